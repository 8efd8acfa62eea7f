// SPDX-License-Identifier: Apache-2.0
// router_hints._native.Table: block key to set of holders.
//
// Entries are a 16-byte key and one bit a holder, in the order in which they came: blocks of one chain come
// together, so the next key of a query is mostly in the next entry, and a lookup runs along memory as it is
// fetched. Beside them an index, open addressing with linear probing over 8-byte slots: where a key is, and
// half of its first word, so that a probe, a removal and a rehash need not look at the entries. A key is a
// cryptographic hash, so its first word picks the slot. Removal shifts slots back, so there are no tombstones
// and a miss stays short. An entry without holders is free; free ones are chained, and used again first.
//
// The index doubles as it fills and halves when it is mostly empty, entries move together then, and the
// memory goes back. At the bound an entry is evicted for each new one, by a clock that spares what was looked
// up since its last round. router_hints/table.py does the same with a dict; both run the same tests.
//
// Lengths of blobs are checked, so that a wrong call raises ValueError and never touches memory it was not
// given. One thread: everything runs under the GIL.

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include "_table.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define KEY_BYTES 16
#define FIRST_SLOTS 4096
// 64 holders: with the key 24 bytes.
#define FIRST_WORDS 1
#define WORD_BITS 64
// A slot has 32 bits of the key, which must be enough for its home.
#define MOST_BLOCKS (INT64_C(1) << 31)
// Keys that are probed together: probes are cache misses, and they overlap.
#define TOGETHER 32
#define FEW_TOGETHER 8
#define NOWHERE UINT64_MAX

typedef struct {
    PyObject_HEAD
    uint64_t *slots;   // half of the key's first word, and 1 + the position of its entry; 0: free
    uint64_t mask;     // slots - 1
    uint64_t *entries; // by position: first word, second word, holder words; room for max_blocks
    uint8_t *touched;  // by position: looked up since the clock passed; kept only near the bound
    uint64_t end;      // positions in use, or free and chained
    uint64_t gaps;     // 1 + the first free position, whose first word is the next of the chain
    Py_ssize_t words;  // holder words of an entry
    Py_ssize_t stride; // words of an entry
    Py_ssize_t live;
    Py_ssize_t max_blocks;
    uint64_t hand;
    uint64_t *counts, *digests, *evicted; // by holder
    Py_ssize_t bits;
} Table;

static inline uint64_t *entry_at(const Table *t, uint64_t position)
{
    return t->entries + position * (uint64_t)t->stride;
}

static inline int is_free(const Table *t, const uint64_t *entry)
{
    for (Py_ssize_t w = 0; w < t->words; w++)
        if (entry[2 + w])
            return 0;
    return 1;
}

static inline int is_key(const uint64_t *entry, const uint64_t *key)
{
    return entry[0] == key[0] && entry[1] == key[1];
}

static inline uint64_t slot_of(uint64_t first_word, uint64_t position)
{
    return first_word << 32 | (position + 1);
}

static inline uint64_t position_in(uint64_t slot)
{
    return (slot & UINT32_MAX) - 1;
}

// ------------------------------------------------------------------------------------------- the index

// The position of a key. NOWHERE: it is not there.
static inline uint64_t find(const Table *t, const uint64_t *key)
{
    for (uint64_t at = key[0] & t->mask;; at = (at + 1) & t->mask) {
        uint64_t slot = t->slots[at];
        if (!slot)
            return NOWHERE;
        if (slot >> 32 == (uint32_t)key[0] && is_key(entry_at(t, position_in(slot)), key))
            return position_in(slot);
    }
}

static void put_slot(uint64_t *slots, uint64_t mask, uint64_t slot)
{
    uint64_t at = slot >> 32 & mask;
    while (slots[at])
        at = (at + 1) & mask;
    slots[at] = slot;
}

// Free a slot, and move back every one behind it that this lets closer to its home.
static void drop_slot(Table *t, uint64_t slot)
{
    uint64_t hole = slot >> 32 & t->mask;
    while (t->slots[hole] != slot)
        hole = (hole + 1) & t->mask;
    for (uint64_t next = (hole + 1) & t->mask; t->slots[next]; next = (next + 1) & t->mask) {
        uint64_t home = t->slots[next] >> 32 & t->mask;
        if (((next - home) & t->mask) >= ((next - hole) & t->mask)) {
            t->slots[hole] = t->slots[next];
            hole = next;
        }
    }
    t->slots[hole] = 0;
}

// Zeroed pages straight from the system, and back to it: huge ones where there are any. Those that are not
// touched are not there.
static void *map_pages(size_t bytes)
{
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (pages == MAP_FAILED) {
        PyErr_NoMemory();
        return NULL;
    }
    madvise(pages, bytes, MADV_HUGEPAGE);
    return pages;
}

static void unmap_pages(void *pages, size_t bytes)
{
    if (pages)
        munmap(pages, bytes);
}

static size_t slot_bytes(uint64_t slots)
{
    return sizeof(uint64_t) * slots;
}

static size_t entry_bytes(const Table *t, Py_ssize_t words)
{
    return sizeof(uint64_t) * (size_t)(2 + words) * (size_t)t->max_blocks;
}

// More or fewer slots; the entries stay where they are. -1 with MemoryError set, and nothing changed.
static int resize_index(Table *t, uint64_t slots)
{
    uint64_t *wider = map_pages(slot_bytes(slots));
    if (!wider)
        return -1;
    if (t->slots) {
        for (uint64_t at = 0; at <= t->mask; at++)
            if (t->slots[at])
                put_slot(wider, slots - 1, t->slots[at]);
        unmap_pages(t->slots, slot_bytes(t->mask + 1));
    }
    t->slots = wider;
    t->mask = slots - 1;
    return 0;
}

// Move the entries together, into new memory, with so many holder words. -1 as above.
static int rebuild(Table *t, uint64_t slots, Py_ssize_t words)
{
    Py_ssize_t stride = 2 + words;
    uint64_t *index = map_pages(slot_bytes(slots)), *entries = map_pages(entry_bytes(t, words));
    uint8_t *touched = map_pages((size_t)t->max_blocks);
    if (!index || !entries || !touched) {
        unmap_pages(index, slot_bytes(slots));
        unmap_pages(entries, entry_bytes(t, words));
        unmap_pages(touched, (size_t)t->max_blocks);
        return -1;
    }
    uint64_t end = 0;
    for (uint64_t position = 0; position < t->end; position++) {
        const uint64_t *entry = entry_at(t, position);
        if (is_free(t, entry))
            continue;
        memcpy(entries + end * (uint64_t)stride, entry, sizeof(uint64_t) * (size_t)t->stride);
        if (t->touched[position])
            touched[end] = 1;
        put_slot(index, slots - 1, slot_of(entry[0], end++));
    }
    if (t->entries) {
        unmap_pages(t->slots, slot_bytes(t->mask + 1));
        unmap_pages(t->entries, entry_bytes(t, t->words));
        unmap_pages(t->touched, (size_t)t->max_blocks);
    }
    t->slots = index;
    t->mask = slots - 1;
    t->entries = entries;
    t->touched = touched;
    t->end = end;
    t->gaps = t->hand = 0;
    t->words = words;
    t->stride = stride;
    return 0;
}

static int make_room(Table *t, Py_ssize_t more)
{
    Py_ssize_t wanted = more < t->max_blocks - t->live ? t->live + more : t->max_blocks;
    uint64_t slots = t->mask + 1;
    while ((uint64_t)wanted * 2 > slots)
        slots *= 2;
    return slots == t->mask + 1 ? 0 : resize_index(t, slots);
}

static int give_back(Table *t)
{
    uint64_t slots = t->mask + 1;
    while (slots > FIRST_SLOTS && (uint64_t)t->live * 8 < slots)
        slots /= 2;
    return slots == t->mask + 1 ? 0 : rebuild(t, slots, t->words);
}

// ------------------------------------------------------------------------------------------- entries

// An entry that lost its last holder.
static void release(Table *t, uint64_t position)
{
    uint64_t *entry = entry_at(t, position);
    drop_slot(t, slot_of(entry[0], position));
    entry[0] = t->gaps;
    t->gaps = position + 1;
    if (t->touched[position])
        t->touched[position] = 0;
    if (--t->live == 0)
        t->end = t->gaps = t->hand = 0;
}

static void evict_one(Table *t)
{
    for (;; t->hand++) {
        if (t->hand >= t->end)
            t->hand = 0;
        uint64_t *entry = entry_at(t, t->hand);
        if (is_free(t, entry))
            continue;
        if (t->touched[t->hand]) {
            t->touched[t->hand] = 0;
            continue;
        }
        for (Py_ssize_t w = 0; w < t->words; w++) {
            for (uint64_t left = entry[2 + w]; left; left &= left - 1) {
                Py_ssize_t bit = w * WORD_BITS + __builtin_ctzll(left);
                t->counts[bit]--;
                t->digests[bit] ^= entry[0];
                t->evicted[bit]++;
            }
            entry[2 + w] = 0;
        }
        release(t, t->hand++);
        return;
    }
}

// A new entry without holders yet; there is a slot for it.
static uint64_t insert(Table *t, const uint64_t *key)
{
    if (t->live >= t->max_blocks)
        evict_one(t);
    uint64_t position = t->gaps ? t->gaps - 1 : t->end++;
    uint64_t *entry = entry_at(t, position);
    if (t->gaps)
        t->gaps = entry[0];
    entry[0] = key[0];
    entry[1] = key[1];
    put_slot(t->slots, t->mask, slot_of(key[0], position));
    t->live++;
    return position;
}

// Where the entry of the next key is expected: beside the last one. Chains that took free entries may lie the
// other way round.
typedef struct {
    uint64_t at, step;
} trail;

static inline uint64_t follow(const Table *t, const trail *way, const uint64_t *key)
{
    uint64_t guess = way->at + way->step;
    if (guess >= t->end)
        return NOWHERE;
    const uint64_t *entry = entry_at(t, guess);
    __builtin_prefetch(entry + (int64_t)(way->step * TOGETHER) * t->stride);
    return is_key(entry, key) && !is_free(t, entry) ? guess : NOWHERE;
}

static inline void went(trail *way, uint64_t position)
{
    if (position == NOWHERE)
        way->step = 1;
    else if (position + 1 == way->at || position - 1 == way->at)
        way->step = position - way->at;
    way->at = position;
}

static int reserve(Table *t, Py_ssize_t bit)
{
    if (bit < 0 || bit >= (Py_ssize_t)1 << 20) {
        PyErr_Format(PyExc_ValueError, "holder bit %zd is not between 0 and 2^20", bit);
        return -1;
    }
    if (bit >= t->bits) {
        Py_ssize_t bits = (bit / WORD_BITS + 1) * WORD_BITS;
        uint64_t **columns[] = {&t->counts, &t->digests, &t->evicted};
        for (int i = 0; i < 3; i++) {
            uint64_t *wider = realloc(*columns[i], sizeof(uint64_t) * (size_t)bits);
            if (!wider) {
                PyErr_NoMemory();
                return -1;
            }
            memset(wider + t->bits, 0, sizeof(uint64_t) * (size_t)(bits - t->bits));
            *columns[i] = wider;
        }
        t->bits = bits;
    }
    if (bit >= t->words * WORD_BITS)
        return rebuild(t, t->mask + 1, bit / WORD_BITS + 1);
    return 0;
}

// ---------------------------------------------------------------------------------------- arguments

static int take_keys(PyObject *object, Py_buffer *view)
{
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS) < 0)
        return -1;
    if (view->len % KEY_BYTES) {
        PyErr_Format(PyExc_ValueError, "a blob of keys has 16 bytes a key, got %zd bytes", view->len);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static int take_keys_and_bit(PyObject *const *args, Py_ssize_t nargs, Py_buffer *keys, Py_ssize_t *bit)
{
    if (nargs != 2) {
        PyErr_Format(PyExc_TypeError, "expected keys and a bit, got %zd arguments", nargs);
        return -1;
    }
    *bit = PyLong_AsSsize_t(args[1]);
    if (*bit == -1 && PyErr_Occurred())
        return -1;
    return take_keys(args[0], keys);
}

static inline void key_at(const Py_buffer *keys, Py_ssize_t i, uint64_t key[2])
{
    memcpy(key, (const char *)keys->buf + i * KEY_BYTES, KEY_BYTES);
}

static inline void fetch_slot(const Table *t, const Py_buffer *keys, Py_ssize_t i)
{
    uint64_t key[2];
    key_at(keys, i, key);
    __builtin_prefetch(&t->slots[key[0] & t->mask], 1);
}

// Positions of the keys i .. i + count: the cache misses of each step overlap.
static void find_together(const Table *t, const Py_buffer *keys, Py_ssize_t i, Py_ssize_t count, uint64_t *positions)
{
    for (Py_ssize_t j = 0; j < count; j++)
        fetch_slot(t, keys, i + j);
    for (Py_ssize_t j = 0; j < count; j++) {
        uint64_t key[2], slot;
        key_at(keys, i + j, key);
        uint64_t at = key[0] & t->mask;
        while ((slot = t->slots[at]) && slot >> 32 != (uint32_t)key[0])
            at = (at + 1) & t->mask;
        positions[j] = slot ? position_in(slot) : NOWHERE;
        if (slot)
            __builtin_prefetch(entry_at(t, positions[j]));
    }
    for (Py_ssize_t j = 0; j < count; j++)
        if (positions[j] != NOWHERE) {
            uint64_t key[2];
            key_at(keys, i + j, key);
            // Another key with the same half of its first word was before it, or there is only that.
            if (!is_key(entry_at(t, positions[j]), key))
                positions[j] = find(t, key);
        }
}

// ------------------------------------------------------------------------------------------- methods

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"max_blocks", NULL};
    Py_ssize_t max_blocks;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n", names, &max_blocks))
        return NULL;
    if (max_blocks < 1 || max_blocks > MOST_BLOCKS) {
        PyErr_Format(PyExc_ValueError, "max_blocks must be at least 1 and at most 2^31, got %zd", max_blocks);
        return NULL;
    }
    Table *t = (Table *)type->tp_alloc(type, 0);
    if (!t)
        return NULL;
    t->max_blocks = max_blocks;
    if (rebuild(t, FIRST_SLOTS, FIRST_WORDS) < 0 || reserve(t, 0) < 0) {
        Py_DECREF(t);
        return NULL;
    }
    return (PyObject *)t;
}

static void table_dealloc(Table *t)
{
    unmap_pages(t->slots, slot_bytes(t->mask + 1));
    unmap_pages(t->entries, entry_bytes(t, t->words));
    unmap_pages(t->touched, (size_t)t->max_blocks);
    free(t->counts);
    free(t->digests);
    free(t->evicted);
    Py_TYPE(t)->tp_free((PyObject *)t);
}

static Py_ssize_t table_len(PyObject *self)
{
    return ((Table *)self)->live;
}

static PyObject *table_reserve_bit(PyObject *self, PyObject *argument)
{
    Py_ssize_t bit = PyLong_AsSsize_t(argument);
    if ((bit == -1 && PyErr_Occurred()) || reserve((Table *)self, bit) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *table_add(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Table *t = (Table *)self;
    Py_buffer keys;
    Py_ssize_t bit, added = 0;
    if (take_keys_and_bit(args, nargs, &keys, &bit) < 0)
        return NULL;
    Py_ssize_t n = keys.len / KEY_BYTES;
    if (reserve(t, bit) < 0 || make_room(t, n) < 0) {
        PyBuffer_Release(&keys);
        return NULL;
    }
    uint64_t flag = UINT64_C(1) << (bit % WORD_BITS);
    trail way = {NOWHERE, 1};
    for (Py_ssize_t i = 0; i < n; i++) {
        uint64_t key[2];
        if (i + TOGETHER < n)
            fetch_slot(t, &keys, i + TOGETHER);
        key_at(&keys, i, key);
        uint64_t position = follow(t, &way, key);
        if (position == NOWHERE && (position = find(t, key)) == NOWHERE)
            position = insert(t, key);
        went(&way, position);
        uint64_t *holders = entry_at(t, position) + 2 + bit / WORD_BITS;
        if (!(*holders & flag)) {
            *holders |= flag;
            // Counted at once: an eviction further on may take this very entry.
            t->counts[bit]++;
            t->digests[bit] ^= key[0];
            added++;
        }
    }
    PyBuffer_Release(&keys);
    return PyLong_FromSsize_t(added);
}

static PyObject *table_remove(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Table *t = (Table *)self;
    Py_buffer keys;
    Py_ssize_t bit, removed = 0;
    if (take_keys_and_bit(args, nargs, &keys, &bit) < 0)
        return NULL;
    if (bit >= 0 && bit < t->words * WORD_BITS) {
        uint64_t flag = UINT64_C(1) << (bit % WORD_BITS);
        Py_ssize_t n = keys.len / KEY_BYTES;
        trail way = {NOWHERE, 1};
        for (Py_ssize_t i = 0; i < n; i++) {
            uint64_t key[2];
            if (i + TOGETHER < n)
                fetch_slot(t, &keys, i + TOGETHER);
            key_at(&keys, i, key);
            uint64_t position = follow(t, &way, key);
            if (position == NOWHERE)
                position = find(t, key);
            went(&way, position);
            if (position == NOWHERE)
                continue;
            uint64_t *entry = entry_at(t, position), *holders = entry + 2 + bit / WORD_BITS;
            if (*holders & flag) {
                *holders &= ~flag;
                t->counts[bit]--;
                t->digests[bit] ^= key[0];
                removed++;
                if (is_free(t, entry))
                    release(t, position);
            }
        }
    }
    PyBuffer_Release(&keys);
    if (give_back(t) < 0)
        return NULL;
    return PyLong_FromSsize_t(removed);
}

static PyObject *table_clear(PyObject *self, PyObject *argument)
{
    Table *t = (Table *)self;
    Py_ssize_t bit = PyLong_AsSsize_t(argument);
    if (bit == -1 && PyErr_Occurred())
        return NULL;
    if (bit >= 0 && bit < t->words * WORD_BITS) {
        uint64_t flag = UINT64_C(1) << (bit % WORD_BITS);
        for (uint64_t position = 0; position < t->end; position++) {
            uint64_t *entry = entry_at(t, position), *holders = entry + 2 + bit / WORD_BITS;
            if (position + TOGETHER < t->end)
                __builtin_prefetch(&t->slots[entry_at(t, position + TOGETHER)[0] & t->mask], 1);
            if (*holders & flag) {
                *holders &= ~flag;
                if (is_free(t, entry))
                    release(t, position);
            }
        }
        t->counts[bit] = t->digests[bit] = t->evicted[bit] = 0;
    }
    if (give_back(t) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *table_held_by(PyObject *self, PyObject *argument)
{
    Table *t = (Table *)self;
    Py_ssize_t bit = PyLong_AsSsize_t(argument);
    if (bit == -1 && PyErr_Occurred())
        return NULL;
    if (bit < 0 || bit >= t->words * WORD_BITS)
        return PyBytes_FromStringAndSize(NULL, 0);
    PyObject *result = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)t->counts[bit] * KEY_BYTES);
    if (!result)
        return NULL;
    char *out = PyBytes_AS_STRING(result), *last = out + PyBytes_GET_SIZE(result);
    uint64_t flag = UINT64_C(1) << (bit % WORD_BITS);
    for (uint64_t position = 0; position < t->end && out < last; position++) {
        const uint64_t *entry = entry_at(t, position);
        if (entry[2 + bit / WORD_BITS] & flag) {
            memcpy(out, entry, KEY_BYTES);
            out += KEY_BYTES;
        }
    }
    return result;
}

// Holders of each key, word by word: masks[w * n + i]. any[w]: those of all of them.
static void collect(Table *t, const Py_buffer *keys, Py_ssize_t n, uint64_t *masks, uint64_t *any)
{
    Py_ssize_t words = t->words, stride = t->stride, together = FEW_TOGETHER;
    int near_bound = t->live * 8 > t->max_blocks * 7;
    trail way = {NOWHERE, 1};
    memset(any, 0, sizeof(uint64_t) * (size_t)words);
    // What nobody has is mostly the end of a prompt: its slots are fetched while the rest is looked up.
    for (Py_ssize_t i = n < TOGETHER ? 0 : n - TOGETHER; i < n; i++)
        fetch_slot(t, keys, i);
    for (Py_ssize_t i = 0; i < n;) {
        // Along the entries as far as they are those of the keys.
        Py_ssize_t first = i;
        if (way.at < t->end)
            for (Py_ssize_t ahead = 1; ahead < TOGETHER; ahead += 2)
                __builtin_prefetch(entry_at(t, way.at) + (int64_t)way.step * ahead * stride);
        for (uint64_t at = way.at + way.step; i < n && at < t->end; i++, at += way.step) {
            const uint64_t *entry = entry_at(t, at);
            uint64_t key[2], held = 0;
            key_at(keys, i, key);
            __builtin_prefetch(entry + (int64_t)(way.step * TOGETHER) * stride);
            if (!is_key(entry, key))
                break;
            for (Py_ssize_t w = 0; w < words; w++) {
                masks[w * n + i] = entry[2 + w];
                any[w] |= entry[2 + w];
                held |= entry[2 + w];
            }
            if (!held)
                break;
            if (near_bound)
                t->touched[at] = 1;
            way.at = at;
        }
        if (i > first)
            together = FEW_TOGETHER;
        // Then by the index, the more at a time the longer nothing follows another.
        uint64_t positions[TOGETHER];
        Py_ssize_t count = n - i < together ? n - i : together;
        find_together(t, keys, i, count, positions);
        together = TOGETHER < 2 * together ? TOGETHER : 2 * together;
        for (Py_ssize_t j = 0; j < count; j++, i++) {
            uint64_t position = positions[j];
            went(&way, position);
            if (position == NOWHERE) {
                for (Py_ssize_t w = 0; w < words; w++)
                    masks[w * n + i] = 0;
                continue;
            }
            if (near_bound)
                t->touched[position] = 1;
            const uint64_t *entry = entry_at(t, position);
            for (Py_ssize_t w = 0; w < words; w++) {
                masks[w * n + i] = entry[2 + w];
                any[w] |= entry[2 + w];
            }
        }
    }
}

static PyObject *table_lookup(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    Table *t = (Table *)self;
    Py_buffer keys;
    if (nargs != 2 || !PyList_Check(args[1])) {
        PyErr_SetString(PyExc_TypeError, "expected keys, and a list of the holders' names by bit");
        return NULL;
    }
    if (take_keys(args[0], &keys) < 0)
        return NULL;
    Py_ssize_t n = keys.len / KEY_BYTES, words = t->words, needed = words * (n + 1) + n / 8 + 1;
    PyObject *names = NULL, *held = NULL, *result = NULL;
    uint64_t small[512], *masks = needed > 512 ? malloc(sizeof(uint64_t) * (size_t)needed) : small;
    if (!masks) {
        PyErr_NoMemory();
        goto done;
    }
    uint64_t *any = masks + words * n;
    uint8_t *column = (uint8_t *)(any + words);
    collect(t, &keys, n, masks, any);
    Py_ssize_t rows = 0;
    for (Py_ssize_t w = 0; w < words; w++)
        rows += __builtin_popcountll(any[w]);
    names = PyTuple_New(rows);
    held = PyByteArray_FromStringAndSize(NULL, rows * n);
    if (!names || !held)
        goto done;
    uint8_t *row = (uint8_t *)PyByteArray_AS_STRING(held);
    Py_ssize_t at = 0;
    // Eight holders at a time: a byte of each mask is taken once, and its bits are spread many keys at a time.
    for (Py_ssize_t w = 0; w < words; w++)
        for (int shift = 0; any[w] >> shift; shift += 8) {
            unsigned left = any[w] >> shift & 0xff;
            for (Py_ssize_t i = 0; left && i < n; i++)
                column[i] = (uint8_t)(masks[w * n + i] >> shift);
            for (; left; left &= left - 1) {
                int bit = __builtin_ctz(left);
                Py_ssize_t number = w * WORD_BITS + shift + bit;
                if (number >= PyList_GET_SIZE(args[1])) {
                    PyErr_Format(PyExc_ValueError, "holder bit %zd has no name", number);
                    goto done;
                }
                PyTuple_SET_ITEM(names, at++, Py_NewRef(PyList_GET_ITEM(args[1], number)));
                for (Py_ssize_t i = 0; i < n; i++)
                    row[i] = column[i] >> bit & 1;
                row += n;
            }
            if (shift == 56)
                break;
        }
    result = PyTuple_Pack(2, names, held);
done:
    if (masks != small)
        free(masks);
    Py_XDECREF(names);
    Py_XDECREF(held);
    PyBuffer_Release(&keys);
    return result;
}

static PyObject *column(Table *t, const uint64_t *values, PyObject *argument)
{
    Py_ssize_t bit = PyLong_AsSsize_t(argument);
    if (bit == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(bit < 0 || bit >= t->bits ? 0 : values[bit]);
}

static PyObject *table_count(PyObject *self, PyObject *bit)
{
    return column((Table *)self, ((Table *)self)->counts, bit);
}

static PyObject *table_digest(PyObject *self, PyObject *bit)
{
    return column((Table *)self, ((Table *)self)->digests, bit);
}

static PyObject *table_evicted(PyObject *self, PyObject *bit)
{
    return column((Table *)self, ((Table *)self)->evicted, bit);
}

static PyObject *table_nbytes(PyObject *self, void *closure)
{
    (void)closure;
    Table *t = (Table *)self;
    uint64_t bytes = slot_bytes(t->mask + 1) + t->end * ((uint64_t)t->stride * 8 + 1) + 24 * (uint64_t)t->bits;
    return PyLong_FromUnsignedLongLong(bytes);
}

static PyMethodDef table_methods[] = {
    {"reserve_bit", table_reserve_bit, METH_O, "reserve_bit(bit) -> None"},
    {"add", (PyCFunction)(void (*)(void))table_add, METH_FASTCALL, "add(keys, bit) -> keys that are new to bit"},
    {"remove", (PyCFunction)(void (*)(void))table_remove, METH_FASTCALL, "remove(keys, bit) -> keys it had"},
    {"clear", table_clear, METH_O, "clear(bit) -> None"},
    {"held_by", table_held_by, METH_O, "held_by(bit) -> keys"},
    {"lookup", (PyCFunction)(void (*)(void))table_lookup, METH_FASTCALL,
     "lookup(keys, names) -> (names of holders, a row of bytes 0 or 1 for each)"},
    {"count", table_count, METH_O, "count(bit) -> keys"},
    {"digest", table_digest, METH_O, "digest(bit) -> XOR of their first words"},
    {"evicted", table_evicted, METH_O, "evicted(bit) -> keys evicted since it was cleared"},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef table_getset[] = {
    {"nbytes", table_nbytes, NULL, "memory in use", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PySequenceMethods table_sequence = {.sq_length = table_len};

PyTypeObject router_hints_Table = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "router_hints._native.Table",
    .tp_basicsize = sizeof(Table),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Block key to holders; router_hints.table says what the methods do.",
    .tp_new = table_new,
    .tp_dealloc = (destructor)table_dealloc,
    .tp_methods = table_methods,
    .tp_getset = table_getset,
    .tp_as_sequence = &table_sequence,
};
