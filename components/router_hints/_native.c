// SPDX-License-Identifier: Apache-2.0
// router_hints._native: the two tight loops of the router.
//
// Table: block key to set of holders. Open addressing with linear probing over entries of a 16-byte key and
// one bit a holder; a key is a cryptographic hash, so its first word picks the slot. An entry without holders
// is free: removal shifts the entries behind it back, so there are no tombstones and a miss stays short. The
// table doubles up to its bound and halves when it is mostly empty, which gives the memory back. At the bound
// an entry is evicted for each new one, by a clock that spares what was looked up since its last round.
// router_hints/fallback.py does the same with a dict; both run the same tests.
//
// walk: for each target worker, the runs of blocks it lacks, each from its cheapest holder.
//
// All arguments are C-contiguous buffers; lengths are checked here, so that a wrong call raises ValueError
// and never touches memory it was not given. One thread: everything runs under the GIL.

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <float.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define KEY_BYTES 16
#define FIRST_SLOTS 4096
// 128 holders: with the key 32 bytes, so that no entry of this size lies across two cache lines.
#define FIRST_WORDS 2
#define WORD_BITS 64
// Keys whose slot is fetched ahead of their probe: probes are cache misses, and they overlap.
#define PROBE_AHEAD 16

typedef struct {
    PyObject_HEAD
    uint64_t *entries; // per slot: first word, second word, holder words
    uint8_t *touched;  // looked up since the clock passed; kept only near the bound
    uint64_t mask;     // slots - 1
    Py_ssize_t words;  // holder words of an entry
    Py_ssize_t stride; // words of an entry
    Py_ssize_t live;
    Py_ssize_t max_blocks;
    uint64_t hand;
    uint64_t *counts, *digests, *evicted; // by holder
    Py_ssize_t bits;
} Table;

static inline uint64_t home_of(const uint64_t *key, uint64_t mask)
{
    return key[0] & mask;
}

static inline uint64_t *entry_at(const Table *t, uint64_t slot)
{
    return t->entries + slot * (uint64_t)t->stride;
}

static inline int is_free(const Table *t, const uint64_t *entry)
{
    for (Py_ssize_t w = 0; w < t->words; w++)
        if (entry[2 + w])
            return 0;
    return 1;
}

// The slot of a key, or the free one where it would go.
static inline uint64_t find(const Table *t, const uint64_t *key, int *found)
{
    uint64_t slot = home_of(key, t->mask);
    for (;; slot = (slot + 1) & t->mask) {
        const uint64_t *entry = entry_at(t, slot);
        if (is_free(t, entry)) {
            *found = 0;
            return slot;
        }
        if (entry[0] == key[0] && entry[1] == key[1]) {
            *found = 1;
            return slot;
        }
    }
}

// Free a slot, and move back every entry behind it that this lets closer to its home.
static void erase(Table *t, uint64_t slot)
{
    uint64_t hole = slot;
    for (uint64_t next = (slot + 1) & t->mask;; next = (next + 1) & t->mask) {
        uint64_t *entry = entry_at(t, next);
        if (is_free(t, entry))
            break;
        uint64_t home = home_of(entry, t->mask);
        if (((next - home) & t->mask) >= ((next - hole) & t->mask)) {
            memcpy(entry_at(t, hole), entry, sizeof(uint64_t) * (size_t)t->stride);
            t->touched[hole] = t->touched[next];
            hole = next;
        }
    }
    memset(entry_at(t, hole) + 2, 0, sizeof(uint64_t) * (size_t)t->words);
    t->touched[hole] = 0;
    t->live--;
}

// Zeroed pages straight from the system, and back to it: probes are random, so huge ones where there are any.
static uint64_t *map_entries(size_t bytes)
{
    void *pages = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages == MAP_FAILED)
        return NULL;
    madvise(pages, bytes, MADV_HUGEPAGE);
    return pages;
}

static void unmap_entries(Table *t)
{
    if (t->entries)
        munmap(t->entries, (size_t)(t->mask + 1) * (size_t)t->stride * sizeof(uint64_t));
    t->entries = NULL;
}

// Give the table this shape; entries are placed anew. -1 with MemoryError set, and nothing changed.
static int reshape(Table *t, uint64_t slots, Py_ssize_t words)
{
    Py_ssize_t stride = 2 + words;
    size_t bytes = slots * (size_t)stride * sizeof(uint64_t);
    uint64_t *entries = map_entries(bytes);
    uint8_t *touched = calloc(slots, 1);
    if (!entries || !touched) {
        if (entries)
            munmap(entries, bytes);
        free(touched);
        PyErr_NoMemory();
        return -1;
    }
    uint64_t mask = slots - 1;
    if (t->entries)
        for (uint64_t slot = 0; slot <= t->mask; slot++) {
            const uint64_t *entry = entry_at(t, slot);
            if (is_free(t, entry))
                continue;
            uint64_t to = home_of(entry, mask);
            for (;; to = (to + 1) & mask) {
                const uint64_t *there = entries + to * (uint64_t)stride;
                int taken = 0;
                for (Py_ssize_t w = 0; w < words && !taken; w++)
                    taken = there[2 + w] != 0;
                if (!taken)
                    break;
            }
            memcpy(entries + to * (uint64_t)stride, entry, sizeof(uint64_t) * (size_t)t->stride);
            touched[to] = t->touched[slot];
        }
    unmap_entries(t);
    free(t->touched);
    t->entries = entries;
    t->touched = touched;
    t->mask = mask;
    t->words = words;
    t->stride = stride;
    t->hand &= mask;
    return 0;
}

static void evict_one(Table *t)
{
    for (;; t->hand = (t->hand + 1) & t->mask) {
        uint64_t *entry = entry_at(t, t->hand);
        if (is_free(t, entry))
            continue;
        if (t->touched[t->hand]) {
            t->touched[t->hand] = 0;
            continue;
        }
        for (Py_ssize_t w = 0; w < t->words; w++)
            for (uint64_t left = entry[2 + w]; left; left &= left - 1) {
                Py_ssize_t bit = w * WORD_BITS + __builtin_ctzll(left);
                t->counts[bit]--;
                t->digests[bit] ^= entry[0];
                t->evicted[bit]++;
            }
        erase(t, t->hand);
        t->hand = (t->hand + 1) & t->mask;
        return;
    }
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
        return reshape(t, t->mask + 1, bit / WORD_BITS + 1);
    return 0;
}

static int make_room(Table *t, Py_ssize_t more)
{
    Py_ssize_t wanted = t->live + more;
    if (wanted > t->max_blocks)
        wanted = t->max_blocks;
    uint64_t slots = t->mask + 1;
    while ((uint64_t)wanted * 10 > slots * 7)
        slots *= 2;
    return slots == t->mask + 1 ? 0 : reshape(t, slots, t->words);
}

static int give_back(Table *t)
{
    uint64_t slots = t->mask + 1;
    while (slots > FIRST_SLOTS && (uint64_t)t->live * 8 < slots)
        slots /= 2;
    return slots == t->mask + 1 ? 0 : reshape(t, slots, t->words);
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

static inline void fetch_ahead(const Table *t, const Py_buffer *keys, Py_ssize_t i, Py_ssize_t n)
{
    if (i + PROBE_AHEAD < n) {
        uint64_t key[2];
        key_at(keys, i + PROBE_AHEAD, key);
        __builtin_prefetch(entry_at(t, home_of(key, t->mask)), 1);
    }
}

// ------------------------------------------------------------------------------------------- methods

static PyObject *table_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"max_blocks", NULL};
    Py_ssize_t max_blocks;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n", names, &max_blocks))
        return NULL;
    if (max_blocks < 1) {
        PyErr_Format(PyExc_ValueError, "max_blocks must be at least 1, got %zd", max_blocks);
        return NULL;
    }
    Table *t = (Table *)type->tp_alloc(type, 0);
    if (!t)
        return NULL;
    t->max_blocks = max_blocks;
    if (reshape(t, FIRST_SLOTS, FIRST_WORDS) < 0 || reserve(t, 0) < 0) {
        Py_DECREF(t);
        return NULL;
    }
    return (PyObject *)t;
}

static void table_dealloc(Table *t)
{
    unmap_entries(t);
    free(t->touched);
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
    for (Py_ssize_t i = 0; i < n; i++) {
        uint64_t key[2];
        int found;
        fetch_ahead(t, &keys, i, n);
        key_at(&keys, i, key);
        uint64_t slot = find(t, key, &found);
        if (!found) {
            if (t->live >= t->max_blocks) {
                evict_one(t);
                slot = find(t, key, &found);
            }
            uint64_t *entry = entry_at(t, slot);
            entry[0] = key[0];
            entry[1] = key[1];
            t->live++;
        }
        uint64_t *holders = entry_at(t, slot) + 2 + bit / WORD_BITS;
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
        for (Py_ssize_t i = 0; i < n; i++) {
            uint64_t key[2];
            int found;
            fetch_ahead(t, &keys, i, n);
            key_at(&keys, i, key);
            uint64_t slot = find(t, key, &found);
            if (!found)
                continue;
            uint64_t *entry = entry_at(t, slot), *holders = entry + 2 + bit / WORD_BITS;
            if (*holders & flag) {
                *holders &= ~flag;
                t->counts[bit]--;
                t->digests[bit] ^= key[0];
                removed++;
                if (is_free(t, entry))
                    erase(t, slot);
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
        // A slot that an erased entry's successor moved into is looked at again. One that moves from the
        // start of the table to its end, behind us, was looked at before.
        for (uint64_t slot = 0; slot <= t->mask;) {
            uint64_t *entry = entry_at(t, slot), *holders = entry + 2 + bit / WORD_BITS;
            if (*holders & flag) {
                *holders &= ~flag;
                if (is_free(t, entry)) {
                    erase(t, slot);
                    continue;
                }
            }
            slot++;
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
    char *out = PyBytes_AS_STRING(result), *end = out + PyBytes_GET_SIZE(result);
    uint64_t flag = UINT64_C(1) << (bit % WORD_BITS);
    for (uint64_t slot = 0; slot <= t->mask && out < end; slot++) {
        const uint64_t *entry = entry_at(t, slot);
        if (entry[2 + bit / WORD_BITS] & flag) {
            memcpy(out, entry, KEY_BYTES);
            out += KEY_BYTES;
        }
    }
    return result;
}

static PyObject *table_lookup(PyObject *self, PyObject *argument)
{
    Table *t = (Table *)self;
    Py_buffer keys;
    if (take_keys(argument, &keys) < 0)
        return NULL;
    Py_ssize_t n = keys.len / KEY_BYTES, words = t->words;
    PyObject *bits = NULL, *held = NULL, *result = NULL;
    uint64_t small[512], *masks = small;
    if (words * (n + 1) > 512)
        masks = malloc(sizeof(uint64_t) * (size_t)(words * (n + 1)));
    if (!masks) {
        PyErr_NoMemory();
        goto done;
    }
    uint64_t *any = masks + words * n;
    memset(any, 0, sizeof(uint64_t) * (size_t)words);
    int near_bound = t->live * 8 > t->max_blocks * 7;
    for (Py_ssize_t i = 0; i < n; i++) {
        uint64_t key[2];
        int found;
        fetch_ahead(t, &keys, i, n);
        key_at(&keys, i, key);
        uint64_t slot = find(t, key, &found);
        if (!found) {
            for (Py_ssize_t w = 0; w < words; w++)
                masks[w * n + i] = 0;
            continue;
        }
        if (near_bound)
            t->touched[slot] = 1;
        const uint64_t *entry = entry_at(t, slot);
        for (Py_ssize_t w = 0; w < words; w++) {
            masks[w * n + i] = entry[2 + w];
            any[w] |= entry[2 + w];
        }
    }
    Py_ssize_t rows = 0;
    for (Py_ssize_t w = 0; w < words; w++)
        rows += __builtin_popcountll(any[w]);
    bits = PyList_New(rows);
    held = PyByteArray_FromStringAndSize(NULL, rows * n);
    if (!bits || !held)
        goto done;
    char *row = PyByteArray_AS_STRING(held);
    Py_ssize_t at = 0;
    for (Py_ssize_t w = 0; w < words; w++)
        for (uint64_t left = any[w]; left; left &= left - 1) {
            int shift = __builtin_ctzll(left);
            PyObject *bit = PyLong_FromSsize_t(w * WORD_BITS + shift);
            if (!bit)
                goto done;
            PyList_SET_ITEM(bits, at++, bit);
            for (Py_ssize_t i = 0; i < n; i++)
                row[i] = (char)(masks[w * n + i] >> shift & 1);
            row += n;
        }
    result = PyTuple_Pack(2, bits, held);
done:
    if (masks != small)
        free(masks);
    Py_XDECREF(bits);
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
    uint64_t slots = t->mask + 1;
    return PyLong_FromUnsignedLongLong(slots * ((uint64_t)t->stride * 8 + 1) + 24 * (uint64_t)t->bits);
}

static PyMethodDef table_methods[] = {
    {"reserve_bit", table_reserve_bit, METH_O, "reserve_bit(bit) -> None"},
    {"add", (PyCFunction)(void (*)(void))table_add, METH_FASTCALL, "add(keys, bit) -> keys that are new to bit"},
    {"remove", (PyCFunction)(void (*)(void))table_remove, METH_FASTCALL, "remove(keys, bit) -> keys it had"},
    {"clear", table_clear, METH_O, "clear(bit) -> None"},
    {"held_by", table_held_by, METH_O, "held_by(bit) -> keys"},
    {"lookup", table_lookup, METH_O, "lookup(keys) -> (bits, a row of bytes 0 or 1 for each)"},
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

static PyTypeObject TableType = {
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

// ---------------------------------------------------------------------------------------------- walk

typedef struct {
    int32_t first, end;
} run;

typedef struct {
    const char *name;
    Py_ssize_t item;
    int writable;
} argument;

enum { HELD, USABLE, OWN, STARTS, BLOCK_BYTES, QUEUED, RATES, OWN_S, FIRST, END, SOURCE, SECONDS, COUNTS, BUFFERS };

static const argument walk_arguments[BUFFERS] = {
    {"held", 1, 0},          {"usable", 1, 0}, {"own", 4, 0},         {"starts", 4, 0},    {"block_bytes", 8, 0},
    {"queued_bytes", 8, 0},  {"bytes_per_s", 8, 0}, {"own_block_s", 8, 0}, {"out_first", 4, 1}, {"out_end", 4, 1},
    {"out_source", 4, 1},    {"out_seconds", 8, 1}, {"out_counts", 4, 1},
};

PyDoc_STRVAR(walk_doc, "See router_hints.ways: the numpy version there is the specification.");

static PyObject *native_walk(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    (void)self;
    Py_buffer v[BUFFERS];
    int taken = 0;
    PyObject *result = NULL;
    run *runs = NULL;
    double *latency = NULL;
    if (nargs != BUFFERS + 1) {
        PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", BUFFERS + 1, nargs);
        return NULL;
    }
    double latency_s = PyFloat_AsDouble(args[8]);
    if (latency_s == -1.0 && PyErr_Occurred())
        return NULL;
    for (; taken < BUFFERS; taken++) {
        const argument *wanted = &walk_arguments[taken];
        int flags = PyBUF_C_CONTIGUOUS | (wanted->writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(args[taken < 8 ? taken : taken + 1], &v[taken], flags) < 0)
            goto done;
        if (v[taken].len % wanted->item) {
            PyErr_Format(PyExc_ValueError, "%s: %zd bytes are not items of %zd", wanted->name, v[taken].len,
                         wanted->item);
            taken++;
            goto done;
        }
    }
    Py_ssize_t sources = v[BLOCK_BYTES].len / 8, targets = v[OWN].len / 4;
    Py_ssize_t blocks = sources ? v[HELD].len / sources : 0;
    Py_ssize_t most = targets ? v[FIRST].len / 4 / targets : 0;
    if (v[HELD].len != sources * blocks || v[USABLE].len != targets * sources || v[STARTS].len != targets * 4
        || v[QUEUED].len != sources * 8 || v[RATES].len != targets * sources * 8 || v[OWN_S].len != targets * 8
        || v[FIRST].len != targets * most * 4 || v[END].len != v[FIRST].len || v[SOURCE].len != v[FIRST].len
        || v[SECONDS].len != targets * most * 8 || v[COUNTS].len != targets * 4 || blocks > INT32_MAX) {
        PyErr_SetString(PyExc_ValueError, "the arrays of a walk do not fit each other");
        goto done;
    }
    // Runs of each source, once for all targets: at most every other block begins one.
    runs = malloc(sizeof(run) * (size_t)(sources * (blocks / 2 + 1)) + 1);
    latency = malloc((sizeof(double) * 2 + sizeof(Py_ssize_t) * 3) * (size_t)sources + 1);
    if (!runs || !latency) {
        PyErr_NoMemory();
        goto done;
    }
    double *queued = latency + sources;
    Py_ssize_t *begin = (Py_ssize_t *)(queued + sources), *stop = begin + sources, *cursor = stop + sources;
    Py_ssize_t total = 0;
    for (Py_ssize_t s = 0; s < sources; s++) {
        const char *row = (const char *)v[HELD].buf + s * blocks, *at = row, *last = row + blocks;
        begin[s] = total;
        while (at < last && (at = memchr(at, 1, (size_t)(last - at)))) {
            const char *gap = memchr(at, 0, (size_t)(last - at));
            if (!gap)
                gap = last;
            runs[total++] = (run){(int32_t)(at - row), (int32_t)(gap - row)};
            at = gap;
        }
        stop[s] = total;
    }
    const double *block_bytes = v[BLOCK_BYTES].buf;
    for (Py_ssize_t t = 0; t < targets; t++) {
        const uint8_t *usable = (const uint8_t *)v[USABLE].buf + t * sources;
        const double *rates = (const double *)v[RATES].buf + t * sources;
        int32_t own = ((const int32_t *)v[OWN].buf)[t], position = ((const int32_t *)v[STARTS].buf)[t];
        Py_ssize_t count = 0;
        if (own >= sources || position < 0) {
            PyErr_Format(PyExc_ValueError, "target %zd: own row %d, start %d", t, own, position);
            goto done;
        }
        memcpy(queued, v[QUEUED].buf, sizeof(double) * (size_t)sources);
        for (Py_ssize_t s = 0; s < sources; s++) {
            latency[s] = latency_s;
            cursor[s] = begin[s];
        }
        while (position < blocks && count < most) {
            int32_t end = position, limit = (int32_t)blocks, source = -1;
            double seconds = 0, load_s = ((const double *)v[OWN_S].buf)[t];
            if (own >= 0) {
                while (cursor[own] < stop[own] && runs[cursor[own]].end <= position)
                    cursor[own]++;
                if (cursor[own] < stop[own]) {
                    if (runs[cursor[own]].first <= position) {
                        end = runs[cursor[own]].end;
                        seconds = (end - position) * load_s;
                    } else
                        // Up to where the target's own blocks go on: those are cheaper than anybody's.
                        limit = runs[cursor[own]].first;
                }
            }
            if (end == position) {
                double best = DBL_MAX;
                for (Py_ssize_t s = 0; s < sources; s++) {
                    if (!usable[s])
                        continue;
                    while (cursor[s] < stop[s] && runs[cursor[s]].end <= position)
                        cursor[s]++;
                    if (cursor[s] == stop[s] || runs[cursor[s]].first > position)
                        continue;
                    int32_t till = runs[cursor[s]].end < limit ? runs[cursor[s]].end : limit;
                    // What arrives in the pool still has to be loaded, as what was there.
                    double each = latency[s] + (queued[s] + (till - position) * block_bytes[s]) / rates[s]
                        + (till - position) * load_s;
                    // By seconds a block, so that a long run far away competes with a short one nearby.
                    if (each / (till - position) < best) {
                        best = each / (till - position);
                        source = (int32_t)s;
                        end = till;
                        seconds = each;
                    }
                }
                if (source < 0)
                    break;
                // Its queue and its lease are paid for once.
                latency[source] = queued[source] = 0;
            }
            Py_ssize_t at = t * most + count++;
            ((int32_t *)v[FIRST].buf)[at] = position;
            ((int32_t *)v[END].buf)[at] = end;
            ((int32_t *)v[SOURCE].buf)[at] = source;
            ((double *)v[SECONDS].buf)[at] = seconds;
            position = end;
        }
        ((int32_t *)v[COUNTS].buf)[t] = (int32_t)count;
    }
    result = Py_NewRef(Py_None);
done:
    free(runs);
    free(latency);
    while (taken--)
        PyBuffer_Release(&v[taken]);
    return result;
}

static PyMethodDef methods[] = {
    {"walk", (PyCFunction)(void (*)(void))native_walk, METH_FASTCALL, walk_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Tight loops of the router.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    if (PyType_Ready(&TableType) < 0)
        return NULL;
    PyObject *created = PyModule_Create(&module);
    if (created && PyModule_AddObjectRef(created, "Table", (PyObject *)&TableType) < 0)
        Py_CLEAR(created);
    return created;
}
