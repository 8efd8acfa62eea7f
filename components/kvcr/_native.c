// SPDX-License-Identifier: Apache-2.0
// kvcr._native: the few operations on the pool's shared memory that need ordering or a tight loop.
//
// Control words (state << 56 | generation) are the only commit points of the pool. They are stored
// with release and loaded with acquire order, so that a reader that sees a READY word also sees the
// record and the bytes written before it, on every architecture. Everything else (columns, index) is
// derived or guarded by them.
//
// The index is a table of buckets of 8 u64 entries, tag << 32 | slot + 1, zero when empty; a key lives in
// one of two buckets. kvcr/pool/fallback.py is the same in numpy; both run the same tests.
//
// Blocks are copied and hashed here too, in one pass and with the GIL released (_xxh3.c).
//
// All arguments are C-contiguous buffers; lengths are checked here, so that a wrong call raises
// ValueError and never touches memory it was not given.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#include "_xxh3.h"

#define KEY_BYTES 16
#define BUCKET_ENTRIES 8
#define STATE_SHIFT 56
#define GENERATION_MASK ((UINT64_C(1) << STATE_SHIFT) - 1)
#define STATE_GRANTED UINT64_C(1)
#define STATE_READY UINT64_C(2)
// Keys hashed and prefetched ahead of their probe: a probe is two cache misses, and they overlap.
#define PROBE_AHEAD 16
// Below this a probe is shorter than handing the GIL over and back.
#define RELEASE_GIL_ABOVE 512

typedef struct {
    uint64_t low;
    uint64_t high;
} block_key;

typedef struct {
    uint64_t first;
    uint64_t second;
    uint32_t tag;
} probe;

static inline probe probe_of(const uint8_t *key, uint64_t mask)
{
    uint64_t low, high;
    memcpy(&low, key, 8);
    memcpy(&high, key + 8, 8);
    // splitmix64's finaliser: keys are cryptographic hashes, but the table must not depend on it.
    uint64_t x = low + high * UINT64_C(0x9E3779B97F4A7C15);
    x = (x ^ (x >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    x = (x ^ (x >> 27)) * UINT64_C(0x94D049BB133111EB);
    x ^= x >> 31;
    probe p;
    p.first = x & mask;
    p.second = (x >> 32) & mask;
    p.tag = (uint32_t)((x * UINT64_C(0xD6E8FEB86659FD93)) >> 32);
    return p;
}

static inline uint64_t load(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline void store(uint64_t *word, uint64_t value)
{
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    // Orders this word before the record stores that may follow it: a reader that sees a byte of the
    // slot's next life then also sees that this word has changed.
    __atomic_thread_fence(__ATOMIC_RELEASE);
}

// Odd constants with well-spread bits (from splitmix64); a seal guards against damage, not malice.
#define SEAL_START UINT64_C(0x9E3779B97F4A7C15)

static inline uint64_t seal_step(uint64_t state, uint64_t word)
{
    state = (state ^ word) * UINT64_C(0xBF58476D1CE4E5B9);
    return state ^ state >> 29;
}

// ---------------------------------------------------------------------------------------- arguments

static int get_buffer(PyObject *object, Py_buffer *view, int writable, Py_ssize_t item, const char *name)
{
    int flags = PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return -1;
    if (view->len % item != 0 || (item > 1 && item != KEY_BYTES && ((uintptr_t)view->buf) % (size_t)item != 0)) {
        PyErr_Format(PyExc_ValueError, "%s: %zd bytes are not aligned items of %zd bytes", name, view->len, item);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

typedef struct {
    const char *name;
    Py_ssize_t item;
    int writable;
} argument;

static void release_all(Py_buffer *views, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        PyBuffer_Release(&views[i]);
}

static int take_buffers(PyObject *const *args, Py_ssize_t nargs, const argument *wanted, Py_ssize_t count,
                        Py_buffer *views)
{
    if (nargs != count) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", count, nargs);
        return -1;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        if (get_buffer(args[i], &views[i], wanted[i].writable, wanted[i].item, wanted[i].name) < 0) {
            release_all(views, i);
            return -1;
        }
    }
    return 0;
}

static int same_count(Py_ssize_t got, Py_ssize_t wanted, const char *name)
{
    if (got == wanted)
        return 0;
    PyErr_Format(PyExc_ValueError, "%s has %zd items, expected %zd", name, got, wanted);
    return -1;
}

// Number of buckets minus one, or -1 with an error set.
static int64_t bucket_mask(const Py_buffer *buckets)
{
    Py_ssize_t count = buckets->len / (Py_ssize_t)(sizeof(uint64_t) * BUCKET_ENTRIES);
    if (count < 1 || (count & (count - 1)) != 0 || count > ((Py_ssize_t)1 << 32)
        || buckets->len % (Py_ssize_t)(sizeof(uint64_t) * BUCKET_ENTRIES) != 0) {
        PyErr_Format(PyExc_ValueError, "buckets: %zd bytes are not a power of two of buckets", buckets->len);
        return -1;
    }
    return (int64_t)count - 1;
}

// --------------------------------------------------------------------------------------- functions

PyDoc_STRVAR(load_words_doc,
"load_words(words: u64[m], indices: i32[n], out: u64[n]) -> None\n\n"
"Acquire loads. An index outside of words raises IndexError.");

static PyObject *native_load_words(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"words", 8, 0}, {"indices", 4, 0}, {"out", 8, 1}};
    Py_buffer v[3];
    PyObject *result = NULL;
    if (take_buffers(args, nargs, wanted, 3, v) < 0)
        return NULL;
    const uint64_t *words = v[0].buf;
    const int32_t *indices = v[1].buf;
    uint64_t *out = v[2].buf;
    Py_ssize_t m = v[0].len / 8, n = v[1].len / 4;
    if (same_count(v[2].len / 8, n, "out") < 0)
        goto done;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (indices[i] < 0 || indices[i] >= m) {
            PyErr_Format(PyExc_IndexError, "index %d is outside of %zd words", (int)indices[i], m);
            goto done;
        }
        out[i] = load(&words[indices[i]]);
    }
    result = Py_NewRef(Py_None);
done:
    release_all(v, 3);
    return result;
}

PyDoc_STRVAR(store_words_doc,
"store_words(words: u64[m], indices: i32[n], values: u64[n]) -> None\n\n"
"Release stores, in order. An index outside of words raises IndexError before anything is stored.");

static PyObject *native_store_words(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"words", 8, 1}, {"indices", 4, 0}, {"values", 8, 0}};
    Py_buffer v[3];
    PyObject *result = NULL;
    if (take_buffers(args, nargs, wanted, 3, v) < 0)
        return NULL;
    uint64_t *words = v[0].buf;
    const int32_t *indices = v[1].buf;
    const uint64_t *values = v[2].buf;
    Py_ssize_t m = v[0].len / 8, n = v[1].len / 4;
    if (same_count(v[2].len / 8, n, "values") < 0)
        goto done;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (indices[i] < 0 || indices[i] >= m) {
            PyErr_Format(PyExc_IndexError, "index %d is outside of %zd words", (int)indices[i], m);
            goto done;
        }
    }
    for (Py_ssize_t i = 0; i < n; i++)
        store(&words[indices[i]], values[i]);
    result = Py_NewRef(Py_None);
done:
    release_all(v, 3);
    return result;
}

// -1, with an IndexError set, when one of n slots is none of m.
static int slots_inside(const int32_t *slots, Py_ssize_t n, Py_ssize_t m)
{
    for (Py_ssize_t i = 0; i < n; i++) {
        if (slots[i] < 0 || slots[i] >= m) {
            PyErr_Format(PyExc_IndexError, "slot %d is outside of %zd", (int)slots[i], m);
            return -1;
        }
    }
    return 0;
}

PyDoc_STRVAR(grant_doc,
"grant(control: u64[m], owners: i32[m], slots: i32[n], out_generations: u64[n], owner: int) -> None\n\n"
"Write the owner of slots the caller took from the free list, then their control words: GRANTED, generation\n"
"unchanged. A slot outside of control raises IndexError before anything is written.");

static PyObject *native_grant(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {
        {"control", 8, 1}, {"owners", 4, 1}, {"slots", 4, 0}, {"out_generations", 8, 1}};
    Py_buffer v[4];
    PyObject *result = NULL;
    if (nargs != 5) {
        PyErr_Format(PyExc_TypeError, "expected 5 arguments, got %zd", nargs);
        return NULL;
    }
    long owner = PyLong_AsLong(args[4]);
    if (owner == -1 && PyErr_Occurred())
        return NULL;
    if (take_buffers(args, 4, wanted, 4, v) < 0)
        return NULL;
    uint64_t *control = v[0].buf, *generations = v[3].buf;
    int32_t *owners = v[1].buf;
    const int32_t *slots = v[2].buf;
    Py_ssize_t m = v[0].len / 8, n = v[2].len / 4;
    if (same_count(v[1].len / 4, m, "owners") < 0 || same_count(v[3].len / 8, n, "out_generations") < 0)
        goto done;
    if (slots_inside(slots, n, m) < 0)
        goto done;
    for (Py_ssize_t i = 0; i < n; i++) {
        generations[i] = load(&control[slots[i]]) & GENERATION_MASK;
        owners[slots[i]] = (int32_t)owner;
        store(&control[slots[i]], (STATE_GRANTED << STATE_SHIFT) | generations[i]);
    }
    result = Py_NewRef(Py_None);
done:
    release_all(v, 4);
    return result;
}

static int64_t find(const uint64_t *buckets, const probe *p, const uint8_t *key, const uint64_t *control,
                    const block_key *keys, uint64_t slots, uint64_t *generation)
{
    block_key wanted;
    memcpy(&wanted, key, KEY_BYTES);
    for (int choice = 0; choice < 2; choice++) {
        const uint64_t *bucket = buckets + (choice ? p->second : p->first) * BUCKET_ENTRIES;
        for (int e = 0; e < BUCKET_ENTRIES; e++) {
            uint64_t entry = load(&bucket[e]);
            if (entry == 0 || (uint32_t)(entry >> 32) != p->tag)
                continue;
            uint64_t slot = (entry & UINT64_C(0xFFFFFFFF)) - 1;
            if (slot >= slots)
                continue;
            uint64_t before = load(&control[slot]);
            if (before >> STATE_SHIFT != STATE_READY)
                continue;
            uint64_t low = __atomic_load_n(&keys[slot].low, __ATOMIC_RELAXED);
            uint64_t high = __atomic_load_n(&keys[slot].high, __ATOMIC_RELAXED);
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            uint64_t after = __atomic_load_n(&control[slot], __ATOMIC_RELAXED);
            if (before == after && low == wanted.low && high == wanted.high) {
                *generation = before & GENERATION_MASK;
                return (int64_t)slot;
            }
        }
    }
    *generation = 0;
    return -1;
}

// Returns the number of hits.
static long lookup_all(const uint8_t *wanted, Py_ssize_t n, const uint64_t *buckets, uint64_t mask,
                       const uint64_t *control, const block_key *keys, uint64_t slots, int32_t *out_slots,
                       uint64_t *out_generations)
{
    probe probes[PROBE_AHEAD];
    long hits = 0;
    for (Py_ssize_t start = 0; start < n; start += PROBE_AHEAD) {
        int count = (int)(n - start < PROBE_AHEAD ? n - start : PROBE_AHEAD);
        for (int i = 0; i < count; i++) {
            probes[i] = probe_of(wanted + (start + i) * KEY_BYTES, mask);
            __builtin_prefetch(buckets + probes[i].first * BUCKET_ENTRIES);
            __builtin_prefetch(buckets + probes[i].second * BUCKET_ENTRIES);
        }
        for (int i = 0; i < count; i++) {
            out_slots[start + i] = (int32_t)find(buckets, &probes[i], wanted + (start + i) * KEY_BYTES, control,
                                                 keys, slots, &out_generations[start + i]);
            hits += out_slots[start + i] >= 0;
        }
    }
    return hits;
}

PyDoc_STRVAR(lookup_doc,
"lookup(keys: 16 B[n], buckets: u64, control: u64[m], key_column: 16 B[m], out_slots: i32[n],\n"
"       out_generations: u64[n]) -> int\n\n"
"Slot and generation of each key, -1 and 0 for a miss; returns the number of hits. A hit is confirmed by the\n"
"full key between two loads of the control word. Releases the GIL on large batches.");

static PyObject *native_lookup(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"keys", KEY_BYTES, 0},       {"buckets", 8, 0},   {"control", 8, 0},
                                      {"key_column", KEY_BYTES, 0}, {"out_slots", 4, 1}, {"out_generations", 8, 1}};
    Py_buffer v[6];
    PyObject *result = NULL;
    if (take_buffers(args, nargs, wanted, 6, v) < 0)
        return NULL;
    Py_ssize_t n = v[0].len / KEY_BYTES, m = v[2].len / 8;
    int64_t mask = bucket_mask(&v[1]);
    if (mask < 0 || same_count(v[3].len / KEY_BYTES, m, "key_column") < 0
        || same_count(v[4].len / 4, n, "out_slots") < 0 || same_count(v[5].len / 8, n, "out_generations") < 0)
        goto done;
    if (((uintptr_t)v[3].buf) % 8 != 0) {
        PyErr_SetString(PyExc_ValueError, "key_column is not aligned to 8 bytes");
        goto done;
    }
    long hits;
    if (n >= RELEASE_GIL_ABOVE) {
        Py_BEGIN_ALLOW_THREADS
        hits = lookup_all(v[0].buf, n, v[1].buf, (uint64_t)mask, v[2].buf, v[3].buf, (uint64_t)m, v[4].buf, v[5].buf);
        Py_END_ALLOW_THREADS
    } else {
        hits = lookup_all(v[0].buf, n, v[1].buf, (uint64_t)mask, v[2].buf, v[3].buf, (uint64_t)m, v[4].buf, v[5].buf);
    }
    result = PyLong_FromLong(hits);
done:
    release_all(v, 6);
    return result;
}

PyDoc_STRVAR(find_doc,
"find(keys: 16 B[n], buckets: u64, control: u64[m], key_column: 16 B[m], checksum_column: u64[m * ranks],\n"
"     hash_column: u64[m], out_slots: i32[n], out_generations: u64[n], out_checksums: u64[n * ranks],\n"
"     out_hashes: u64[n]) -> int\n\n"
"lookup, with checksums and engine hash of each hit, read while its slot still held that generation. Returns\n"
"the number of hits; both are 0 of a miss.");

static PyObject *native_find(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"keys", KEY_BYTES, 0},       {"buckets", 8, 0},
                                      {"control", 8, 0},            {"key_column", KEY_BYTES, 0},
                                      {"checksum_column", 8, 0},    {"hash_column", 8, 0},
                                      {"out_slots", 4, 1},          {"out_generations", 8, 1},
                                      {"out_checksums", 8, 1},      {"out_hashes", 8, 1}};
    Py_buffer v[10];
    PyObject *result = NULL;
    if (take_buffers(args, nargs, wanted, 10, v) < 0)
        return NULL;
    Py_ssize_t n = v[0].len / KEY_BYTES, m = v[2].len / 8;
    Py_ssize_t ranks = m ? v[4].len / 8 / m : 0;
    int64_t mask = bucket_mask(&v[1]);
    if (mask < 0 || same_count(v[3].len / KEY_BYTES, m, "key_column") < 0
        || same_count(v[4].len / 8, m * ranks, "checksum_column") < 0
        || same_count(v[5].len / 8, m, "hash_column") < 0 || same_count(v[6].len / 4, n, "out_slots") < 0
        || same_count(v[7].len / 8, n, "out_generations") < 0
        || same_count(v[8].len / 8, n * ranks, "out_checksums") < 0
        || same_count(v[9].len / 8, n, "out_hashes") < 0)
        goto done;
    if (((uintptr_t)v[3].buf) % 8 != 0) {
        PyErr_SetString(PyExc_ValueError, "key_column is not aligned to 8 bytes");
        goto done;
    }
    const uint64_t *control = v[2].buf, *column = v[4].buf, *hash_column = v[5].buf;
    int32_t *slots = v[6].buf;
    uint64_t *generations = v[7].buf, *sums = v[8].buf, *hashes = v[9].buf;
    lookup_all(v[0].buf, n, v[1].buf, (uint64_t)mask, control, v[3].buf, (uint64_t)m, slots, generations);
    long hits = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (slots[i] >= 0) {
            for (Py_ssize_t r = 0; r < ranks; r++)
                sums[i * ranks + r] = __atomic_load_n(&column[slots[i] * ranks + r], __ATOMIC_RELAXED);
            hashes[i] = __atomic_load_n(&hash_column[slots[i]], __ATOMIC_RELAXED);
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            uint64_t ready = (STATE_READY << STATE_SHIFT) | generations[i];
            if (__atomic_load_n(&control[slots[i]], __ATOMIC_RELAXED) == ready) {
                hits++;
                continue;
            }
            slots[i] = -1;
            generations[i] = 0;
        }
        hashes[i] = 0;
        memset(sums + i * ranks, 0, (size_t)ranks * 8);
    }
    result = PyLong_FromLong(hits);
done:
    release_all(v, 10);
    return result;
}

PyDoc_STRVAR(still_doc,
"still(control: u64[m], slots: i32[n], generations: u64[n], out: bool[n]) -> None\n\n"
"Whether each slot is READY in that generation now. Slots outside of control are not. Everything the\n"
"caller read before this call was read before the control words are.");

static PyObject *native_still(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"control", 8, 0}, {"slots", 4, 0}, {"generations", 8, 0}, {"out", 1, 1}};
    Py_buffer v[4];
    PyObject *result = NULL;
    if (take_buffers(args, nargs, wanted, 4, v) < 0)
        return NULL;
    const uint64_t *control = v[0].buf;
    const int32_t *slots = v[1].buf;
    const uint64_t *generations = v[2].buf;
    uint8_t *out = v[3].buf;
    Py_ssize_t m = v[0].len / 8, n = v[1].len / 4;
    if (same_count(v[2].len / 8, n, "generations") < 0 || same_count(v[3].len, n, "out") < 0)
        goto done;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (Py_ssize_t i = 0; i < n; i++) {
        uint64_t ready = (STATE_READY << STATE_SHIFT) | (generations[i] & GENERATION_MASK);
        out[i] = slots[i] >= 0 && slots[i] < m && generations[i] <= GENERATION_MASK
                 && load(&control[slots[i]]) == ready;
    }
    result = Py_NewRef(Py_None);
done:
    release_all(v, 4);
    return result;
}

static uint64_t *empty_entry(uint64_t *bucket, int *used)
{
    uint64_t *found = NULL;
    *used = 0;
    for (int e = 0; e < BUCKET_ENTRIES; e++) {
        if (load(&bucket[e]) != 0)
            (*used)++;
        else if (found == NULL)
            found = &bucket[e];
    }
    return found;
}

// Adds key -> slot to the emptier of the key's two buckets; false when both are full.
static int index_key(uint64_t *buckets, uint64_t mask, const uint8_t *key, int32_t slot)
{
    probe p = probe_of(key, mask);
    int first_used, second_used;
    uint64_t *first = empty_entry(buckets + p.first * BUCKET_ENTRIES, &first_used);
    uint64_t *second = empty_entry(buckets + p.second * BUCKET_ENTRIES, &second_used);
    uint64_t *entry = second_used < first_used ? second : first;
    if (entry == NULL || slot < 0)
        return 0;
    store(entry, ((uint64_t)p.tag << 32) | (uint64_t)(slot + (int64_t)1));
    return 1;
}

PyDoc_STRVAR(insert_doc,
"insert(buckets: u64, keys: 16 B[n], slots: i32[n], out: bool[n]) -> None\n\n"
"Adds key -> slot to the emptier of the key's two buckets; out is False where both are full. The caller\n"
"has made sure that the key is not there.");

static PyObject *native_insert(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"buckets", 8, 1}, {"keys", KEY_BYTES, 0}, {"slots", 4, 0}, {"out", 1, 1}};
    Py_buffer v[4];
    PyObject *result = NULL;
    if (take_buffers(args, nargs, wanted, 4, v) < 0)
        return NULL;
    uint64_t *buckets = v[0].buf;
    const uint8_t *keys = v[1].buf;
    const int32_t *slots = v[2].buf;
    uint8_t *out = v[3].buf;
    Py_ssize_t n = v[1].len / KEY_BYTES;
    int64_t mask = bucket_mask(&v[0]);
    if (mask < 0 || same_count(v[2].len / 4, n, "slots") < 0 || same_count(v[3].len, n, "out") < 0)
        goto done;
    for (Py_ssize_t i = 0; i < n; i++)
        out[i] = (uint8_t)index_key(buckets, (uint64_t)mask, keys + i * KEY_BYTES, slots[i]);
    result = Py_NewRef(Py_None);
done:
    release_all(v, 4);
    return result;
}

PyDoc_STRVAR(remove_doc,
"remove(buckets: u64, keys: 16 B[n], slots: i32[n]) -> int\n\n"
"Clears the entries key -> slot; returns how many were there.");

static PyObject *native_remove(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"buckets", 8, 1}, {"keys", KEY_BYTES, 0}, {"slots", 4, 0}};
    Py_buffer v[3];
    PyObject *result = NULL;
    if (take_buffers(args, nargs, wanted, 3, v) < 0)
        return NULL;
    uint64_t *buckets = v[0].buf;
    const uint8_t *keys = v[1].buf;
    const int32_t *slots = v[2].buf;
    Py_ssize_t n = v[1].len / KEY_BYTES;
    int64_t mask = bucket_mask(&v[0]);
    if (mask < 0 || same_count(v[2].len / 4, n, "slots") < 0)
        goto done;
    long removed = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        probe p = probe_of(keys + i * KEY_BYTES, (uint64_t)mask);
        uint64_t entry = ((uint64_t)p.tag << 32) | (uint64_t)(slots[i] + (int64_t)1);
        for (int e = 0; e < 2 * BUCKET_ENTRIES; e++) {
            uint64_t bucket = e < BUCKET_ENTRIES ? p.first : p.second;
            uint64_t *word = buckets + bucket * BUCKET_ENTRIES + e % BUCKET_ENTRIES;
            if (load(word) == entry) {
                store(word, 0);
                removed++;
                break;
            }
        }
    }
    result = PyLong_FromLong(removed);
done:
    release_all(v, 3);
    return result;
}

// Whether all of n keys and all of n slots differ: 1, 0, or -1 without memory.
static int all_distinct(const block_key *keys, const int32_t *slots, Py_ssize_t n)
{
    if (n < 2)
        return 1;
    size_t size = 2;
    while (size < 2 * (size_t)n)
        size *= 2;
    // Two open tables of entry numbers + 1: by key, and by slot.
    uint32_t *seen = PyMem_Calloc(2 * size, sizeof(uint32_t));
    if (seen == NULL)
        return -1;
    int distinct = 1;
    for (Py_ssize_t i = 0; distinct && i < n; i++) {
        size_t at = keys[i].low & (size - 1);
        for (; seen[at]; at = (at + 1) & (size - 1))
            if (keys[seen[at] - 1].low == keys[i].low && keys[seen[at] - 1].high == keys[i].high)
                distinct = 0;
        seen[at] = (uint32_t)(i + 1);
        at = (uint32_t)slots[i] & (size - 1);
        for (; seen[size + at]; at = (at + 1) & (size - 1))
            if (slots[seen[size + at] - 1] == slots[i])
                distinct = 0;
        seen[size + at] = (uint32_t)(i + 1);
    }
    PyMem_Free(seen);
    return distinct;
}

PyDoc_STRVAR(all_new_doc,
"all_new(control: u64[m], buckets: u64, key_column: 16 B[m], slots: i32[n], generations: u64[n],\n"
"        keys: 16 B[n]) -> bool\n\n"
"Whether every slot is GRANTED in its generation, every key a miss, and all of them distinct.");

static PyObject *native_all_new(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"control", 8, 0}, {"buckets", 8, 0},     {"key_column", KEY_BYTES, 0},
                                      {"slots", 4, 0},   {"generations", 8, 0}, {"keys", KEY_BYTES, 0}};
    Py_buffer v[6];
    PyObject *result = NULL;
    if (take_buffers(args, nargs, wanted, 6, v) < 0)
        return NULL;
    const uint64_t *control = v[0].buf, *buckets = v[1].buf, *generations = v[4].buf;
    const block_key *column = v[2].buf;
    const int32_t *slots = v[3].buf;
    const uint8_t *keys = v[5].buf;
    Py_ssize_t m = v[0].len / 8, n = v[3].len / 4;
    int64_t mask = bucket_mask(&v[1]);
    if (mask < 0 || same_count(v[2].len / KEY_BYTES, m, "key_column") < 0
        || same_count(v[4].len / 8, n, "generations") < 0 || same_count(v[5].len / KEY_BYTES, n, "keys") < 0)
        goto done;
    if (((uintptr_t)v[2].buf) % 8 != 0 || ((uintptr_t)v[5].buf) % 8 != 0) {
        PyErr_SetString(PyExc_ValueError, "keys are not aligned to 8 bytes");
        goto done;
    }
    int good = 1;
    for (Py_ssize_t i = 0; good && i < n; i++) {
        uint64_t generation = generations[i];
        if (slots[i] < 0 || slots[i] >= m || generation > GENERATION_MASK
            || load(&control[slots[i]]) != ((STATE_GRANTED << STATE_SHIFT) | generation)) {
            good = 0;
            break;
        }
        probe p = probe_of(keys + i * KEY_BYTES, (uint64_t)mask);
        good = find(buckets, &p, keys + i * KEY_BYTES, control, column, (uint64_t)m, &generation) < 0;
    }
    if (good)
        good = all_distinct(v[5].buf, slots, n);
    if (good < 0)
        PyErr_NoMemory();
    else
        result = PyBool_FromLong(good);
done:
    release_all(v, 6);
    return result;
}

static uint64_t seal_of(uint64_t generation, const uint8_t *key, const uint8_t *parent, uint64_t hash,
                        uint32_t position, const uint64_t *checksums, Py_ssize_t ranks)
{
    uint64_t words[4];
    memcpy(words, key, KEY_BYTES);
    memcpy(words + 2, parent, KEY_BYTES);
    uint64_t state = generation * SEAL_START + SEAL_START;
    for (int w = 0; w < 4; w++)
        state = seal_step(state, words[w]);
    state = seal_step(state, hash);
    state = seal_step(state, position);
    for (Py_ssize_t r = 0; r < ranks; r++)
        state = seal_step(state, checksums[r]);
    return state;
}

PyDoc_STRVAR(seals_doc,
"seals(generations: u64[n], keys: 16 B[n], parents: 16 B[n], engine_hashes: u64[n], positions: u32[n],\n"
"      checksums: u64[n * ranks], out: u64[n]) -> None\n\n"
"A hash over each record and the generation it belongs to.");

static PyObject *native_seals(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"generations", 8, 0},   {"keys", KEY_BYTES, 0}, {"parents", KEY_BYTES, 0},
                                      {"engine_hashes", 8, 0}, {"positions", 4, 0},    {"checksums", 8, 0},
                                      {"out", 8, 1}};
    Py_buffer v[7];
    PyObject *result = NULL;
    if (take_buffers(args, nargs, wanted, 7, v) < 0)
        return NULL;
    Py_ssize_t n = v[0].len / 8;
    Py_ssize_t ranks = n ? v[5].len / 8 / n : 0;
    if (same_count(v[1].len / KEY_BYTES, n, "keys") < 0 || same_count(v[2].len / KEY_BYTES, n, "parents") < 0
        || same_count(v[3].len / 8, n, "engine_hashes") < 0 || same_count(v[4].len / 4, n, "positions") < 0
        || same_count(v[5].len / 8, n * ranks, "checksums") < 0 || same_count(v[6].len / 8, n, "out") < 0)
        goto done;
    const uint64_t *generations = v[0].buf, *hashes = v[3].buf, *checksums = v[5].buf;
    const uint32_t *positions = v[4].buf;
    uint64_t *out = v[6].buf;
    for (Py_ssize_t i = 0; i < n; i++)
        out[i] = seal_of(generations[i], (const uint8_t *)v[1].buf + i * KEY_BYTES,
                         (const uint8_t *)v[2].buf + i * KEY_BYTES, hashes[i], positions[i], checksums + i * ranks,
                         ranks);
    result = Py_NewRef(Py_None);
done:
    release_all(v, 7);
    return result;
}

PyDoc_STRVAR(publish_doc,
"publish(columns: tuple of (control: u64[m], buckets: u64, keys: 16 B[m], parents: 16 B[m], engine_hashes: u64[m],\n"
"        positions: u32[m], stored_at: f64[m], seals: u64[m], checksums: u64[m * ranks], last_used: f64[m],\n"
"        pinned_until: f64[m], demoted: bool[m]), slots: i32[n], generations: u64[n], new_keys: 16 B[n],\n"
"        new_parents: 16 B[n], new_hashes: u64[n], new_positions: u32[n], new_checksums: u64[n * ranks],\n"
"        out: bool[n], now_s: float) -> tuple[int, int]\n\n"
"Write the records of slots, then their control words (READY), then the index; out is False where the index\n"
"has no room. Returns the number of the others, and the XOR of the first words of their keys. The caller owns\n"
"the slots, and the keys are not there. A slot outside of control raises IndexError before anything is written.");

static PyObject *native_publish(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    enum { CONTROL, BUCKETS, KEYS, PARENTS, HASHES, POSITIONS, STORED, SEALS, SUMS, USED, PINNED, DEMOTED, COLUMNS };
    enum { SLOTS, GENERATIONS, NEW_KEYS, NEW_PARENTS, NEW_HASHES, NEW_POSITIONS, NEW_SUMS, OUT, NEWS };
    static const argument columns[COLUMNS] = {
        {"control", 8, 1},   {"buckets", 8, 1},   {"keys", KEY_BYTES, 1}, {"parents", KEY_BYTES, 1},
        {"engine_hashes", 8, 1}, {"positions", 4, 1}, {"stored_at", 8, 1}, {"seals", 8, 1},
        {"checksums", 8, 1}, {"last_used", 8, 1}, {"pinned_until", 8, 1}, {"demoted", 1, 1}};
    static const argument news[NEWS] = {
        {"slots", 4, 0},         {"generations", 8, 0},    {"new_keys", KEY_BYTES, 0}, {"new_parents", KEY_BYTES, 0},
        {"new_hashes", 8, 0},    {"new_positions", 4, 0},  {"new_checksums", 8, 0},    {"out", 1, 1}};
    Py_buffer c[COLUMNS], v[NEWS];
    PyObject *result = NULL;
    if (nargs != NEWS + 2 || !PyTuple_Check(args[0])) {
        PyErr_Format(PyExc_TypeError, "expected a tuple of columns and %d more arguments", NEWS + 1);
        return NULL;
    }
    double now_s = PyFloat_AsDouble(args[NEWS + 1]);
    if (now_s == -1.0 && PyErr_Occurred())
        return NULL;
    if (take_buffers(&PyTuple_GET_ITEM(args[0], 0), PyTuple_GET_SIZE(args[0]), columns, COLUMNS, c) < 0)
        return NULL;
    if (take_buffers(args + 1, NEWS, news, NEWS, v) < 0) {
        release_all(c, COLUMNS);
        return NULL;
    }
    Py_ssize_t m = c[CONTROL].len / 8, n = v[SLOTS].len / 4;
    Py_ssize_t ranks = m ? c[SUMS].len / 8 / m : 0;
    int64_t mask = bucket_mask(&c[BUCKETS]);
    if (mask < 0)
        goto done;
    for (int i = KEYS; i < COLUMNS; i++)
        if (same_count(c[i].len / columns[i].item, i == SUMS ? m * ranks : m, columns[i].name) < 0)
            goto done;
    for (int i = GENERATIONS; i < NEWS; i++)
        if (same_count(v[i].len / news[i].item, i == NEW_SUMS ? n * ranks : n, news[i].name) < 0)
            goto done;
    const int32_t *slots = v[SLOTS].buf;
    if (slots_inside(slots, n, m) < 0)
        goto done;
    const uint64_t *generations = v[GENERATIONS].buf, *hashes = v[NEW_HASHES].buf, *sums = v[NEW_SUMS].buf;
    const uint32_t *positions = v[NEW_POSITIONS].buf;
    uint8_t *out = v[OUT].buf;
    long indexed = 0;
    uint64_t digest = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        Py_ssize_t s = slots[i];
        const uint8_t *key = (const uint8_t *)v[NEW_KEYS].buf + i * KEY_BYTES;
        const uint8_t *parent = (const uint8_t *)v[NEW_PARENTS].buf + i * KEY_BYTES;
        memcpy((uint64_t *)c[SUMS].buf + s * ranks, sums + i * ranks, (size_t)ranks * 8);
        memcpy((uint8_t *)c[KEYS].buf + s * KEY_BYTES, key, KEY_BYTES);
        memcpy((uint8_t *)c[PARENTS].buf + s * KEY_BYTES, parent, KEY_BYTES);
        ((uint64_t *)c[HASHES].buf)[s] = hashes[i];
        ((uint32_t *)c[POSITIONS].buf)[s] = positions[i];
        ((double *)c[STORED].buf)[s] = now_s;
        ((uint64_t *)c[SEALS].buf)[s] =
            seal_of(generations[i], key, parent, hashes[i], positions[i], sums + i * ranks, ranks);
        store((uint64_t *)c[CONTROL].buf + s, (STATE_READY << STATE_SHIFT) | (generations[i] & GENERATION_MASK));
        out[i] = (uint8_t)index_key(c[BUCKETS].buf, (uint64_t)mask, key, slots[i]);
        if (!out[i])
            continue;
        indexed++;
        uint64_t low;
        memcpy(&low, key, 8);
        digest ^= low;
        ((double *)c[USED].buf)[s] = now_s;
        ((double *)c[PINNED].buf)[s] = -Py_HUGE_VAL;
        ((uint8_t *)c[DEMOTED].buf)[s] = 0;
    }
    result = Py_BuildValue("lK", indexed, (unsigned long long)digest);
done:
    release_all(c, COLUMNS);
    release_all(v, NEWS);
    return result;
}

// ------------------------------------------------------------------------------------- bulk of bytes

// A 2-D array of bytes and some of its rows, of which the first `width` bytes count.
typedef struct {
    uint8_t *start;
    Py_ssize_t stride;
    const int32_t *rows;
} row_set;

static int take_rows(row_set *set, const Py_buffer *array, const Py_buffer *rows, Py_ssize_t width, const char *name)
{
    if (array->ndim != 2) {
        PyErr_Format(PyExc_ValueError, "%s has %d dimensions, expected 2", name, array->ndim);
        return -1;
    }
    set->start = array->buf;
    set->stride = array->shape[1] * array->itemsize;
    set->rows = rows->buf;
    if (width < XXH3_SHORTEST || width > set->stride) {
        PyErr_Format(PyExc_ValueError, "width %zd is outside of %d..%zd, the bytes of a row of %s", width,
                     XXH3_SHORTEST, set->stride, name);
        return -1;
    }
    for (Py_ssize_t i = 0; i < rows->len / 4; i++) {
        if (set->rows[i] < 0 || set->rows[i] >= array->shape[0]) {
            PyErr_Format(PyExc_IndexError, "row %d is outside of the %zd rows of %s", (int)set->rows[i],
                         array->shape[0], name);
            return -1;
        }
    }
    return 0;
}

// The buffers, and behind them the bytes of a row that count and the widest vectors to use.
static int take_bulk(PyObject *const *args, Py_ssize_t nargs, const argument *wanted, Py_ssize_t count,
                     Py_buffer *views, Py_ssize_t *width, long *widest)
{
    if (nargs != count + 2) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", count + 2, nargs);
        return -1;
    }
    args += count;
    *width = PyLong_AsSsize_t(args[0]);
    if (*width == -1 && PyErr_Occurred())
        return -1;
    *widest = PyLong_AsLong(args[1]);
    if (*widest == -1 && PyErr_Occurred())
        return -1;
    return take_buffers(args - count, count, wanted, count, views);
}

PyDoc_STRVAR(hash_rows_doc,
"hash_rows(array: u8[m, stride], rows: i32[n], out: u64[n], width: int, widest: int) -> None\n\n"
"xxh3-64 of the first width bytes (241 or more) of each row, with vectors of up to widest bits. Releases\n"
"the GIL. A row outside of array raises IndexError.");

static PyObject *native_hash_rows(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"array", 1, 0}, {"rows", 4, 0}, {"out", 8, 1}};
    Py_buffer v[3];
    PyObject *result = NULL;
    Py_ssize_t width = 0;
    long widest = 0;
    if (take_bulk(args, nargs, wanted, 3, v, &width, &widest) < 0)
        return NULL;
    Py_ssize_t n = v[1].len / 4;
    uint64_t *out = v[2].buf;
    row_set from;
    if (same_count(v[2].len / 8, n, "out") < 0 || take_rows(&from, &v[0], &v[1], width, "array") < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++)
        out[i] = kvcr_xxh3(NULL, from.start + from.rows[i] * from.stride, (size_t)width, (int)widest);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release_all(v, 3);
    return result;
}

PyDoc_STRVAR(copy_rows_doc,
"copy_rows(source: u8[m, stride], source_rows: i32[n], target: u8[k, stride], target_rows: i32[n],\n"
"          out: u64[n], width: int, widest: int) -> None\n\n"
"Copy the first width bytes (241 or more) of rows to rows, and give the xxh3-64 of what was written, even\n"
"if the source changes meanwhile. Releases the GIL. A row outside of its array raises IndexError before\n"
"anything is written.");

static PyObject *native_copy_rows(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {
        {"source", 1, 0}, {"source_rows", 4, 0}, {"target", 1, 1}, {"target_rows", 4, 0}, {"out", 8, 1}};
    Py_buffer v[5];
    PyObject *result = NULL;
    Py_ssize_t width = 0;
    long widest = 0;
    if (take_bulk(args, nargs, wanted, 5, v, &width, &widest) < 0)
        return NULL;
    Py_ssize_t n = v[1].len / 4;
    uint64_t *out = v[4].buf;
    row_set from, to;
    if (same_count(v[3].len / 4, n, "target_rows") < 0 || same_count(v[4].len / 8, n, "out") < 0
        || take_rows(&from, &v[0], &v[1], width, "source") < 0
        || take_rows(&to, &v[2], &v[3], width, "target") < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++)
        out[i] = kvcr_xxh3(to.start + to.rows[i] * to.stride, from.start + from.rows[i] * from.stride,
                           (size_t)width, (int)widest);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release_all(v, 5);
    return result;
}

#define MOST_PIECES 4096

PyDoc_STRVAR(gather_rows_doc,
"gather_rows(segments: tuple of u8[b, width], blocks: i32[n], target: u8[k, stride], rows: i32[n], out: u64[n],\n"
"            widest: int) -> None\n\n"
"Copy the pieces that a block has in each segment, one after the other, to the start of a row, and give the\n"
"xxh3-64 of what was written. Widths are multiples of 64, together 241 or more; rows of a segment may lie\n"
"apart. Releases the GIL. A block or row outside of its array raises IndexError before anything is written.");

static PyObject *native_gather_rows(PyObject *self, PyObject *const *args, Py_ssize_t nargs)
{
    static const argument wanted[] = {{"blocks", 4, 0}, {"target", 1, 1}, {"rows", 4, 0}, {"out", 8, 1}};
    Py_buffer v[4], *segments = NULL;
    kvcr_piece *pieces = NULL;
    PyObject *result = NULL;
    Py_ssize_t taken = 0, width = 0;
    if (nargs != 6 || !PyTuple_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of segments and 5 more arguments");
        return NULL;
    }
    Py_ssize_t count = PyTuple_GET_SIZE(args[0]);
    long widest = PyLong_AsLong(args[5]);
    if (widest == -1 && PyErr_Occurred())
        return NULL;
    if (count < 1 || count > MOST_PIECES) {
        PyErr_Format(PyExc_ValueError, "%zd segments, expected 1 to %d", count, MOST_PIECES);
        return NULL;
    }
    if (take_buffers(args + 1, 4, wanted, 4, v) < 0)
        return NULL;
    const int32_t *blocks = v[0].buf;
    Py_ssize_t n = v[0].len / 4;
    uint64_t *out = v[3].buf;
    row_set to;
    segments = PyMem_Calloc((size_t)count, sizeof(Py_buffer));
    pieces = PyMem_Calloc((size_t)count, sizeof(kvcr_piece));
    if (segments == NULL || pieces == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; taken < count; taken++) {
        Py_buffer *segment = &segments[taken];
        if (PyObject_GetBuffer(PyTuple_GET_ITEM(args[0], taken), segment, PyBUF_STRIDED_RO) < 0)
            goto done;
        if (segment->ndim != 2 || segment->itemsize != 1 || segment->strides[1] != 1 || segment->strides[0] < 0
            || segment->shape[1] < XXH3_STRIPE || segment->shape[1] % XXH3_STRIPE != 0) {
            PyErr_Format(PyExc_ValueError, "segment %zd is not rows of a multiple of %d dense bytes", taken,
                         XXH3_STRIPE);
            PyBuffer_Release(segment);
            goto done;
        }
        width += segment->shape[1];
        for (Py_ssize_t i = 0; i < n; i++) {
            if (blocks[i] < 0 || blocks[i] >= segment->shape[0]) {
                PyErr_Format(PyExc_IndexError, "block %d is outside of the %zd of segment %zd", (int)blocks[i],
                             segment->shape[0], taken);
                PyBuffer_Release(segment);
                goto done;
            }
        }
        pieces[taken].length = (size_t)segment->shape[1];
    }
    if (same_count(v[2].len / 4, n, "rows") < 0 || same_count(v[3].len / 8, n, "out") < 0
        || take_rows(&to, &v[1], &v[2], width, "target") < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < n; i++) {
        for (Py_ssize_t p = 0; p < count; p++)
            pieces[p].start = (const uint8_t *)segments[p].buf + blocks[i] * segments[p].strides[0];
        out[i] = kvcr_xxh3_pieces(to.start + to.rows[i] * to.stride, pieces, (size_t)count, (int)widest);
    }
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    for (Py_ssize_t p = 0; p < taken; p++)
        PyBuffer_Release(&segments[p]);
    PyMem_Free(pieces);
    PyMem_Free(segments);
    release_all(v, 4);
    return result;
}

static PyMethodDef methods[] = {
    {"seals", (PyCFunction)(void (*)(void))native_seals, METH_FASTCALL, seals_doc},
    {"publish", (PyCFunction)(void (*)(void))native_publish, METH_FASTCALL, publish_doc},
    {"hash_rows", (PyCFunction)(void (*)(void))native_hash_rows, METH_FASTCALL, hash_rows_doc},
    {"copy_rows", (PyCFunction)(void (*)(void))native_copy_rows, METH_FASTCALL, copy_rows_doc},
    {"gather_rows", (PyCFunction)(void (*)(void))native_gather_rows, METH_FASTCALL, gather_rows_doc},
    {"load_words", (PyCFunction)(void (*)(void))native_load_words, METH_FASTCALL, load_words_doc},
    {"all_new", (PyCFunction)(void (*)(void))native_all_new, METH_FASTCALL, all_new_doc},
    {"grant", (PyCFunction)(void (*)(void))native_grant, METH_FASTCALL, grant_doc},
    {"store_words", (PyCFunction)(void (*)(void))native_store_words, METH_FASTCALL, store_words_doc},
    {"lookup", (PyCFunction)(void (*)(void))native_lookup, METH_FASTCALL, lookup_doc},
    {"find", (PyCFunction)(void (*)(void))native_find, METH_FASTCALL, find_doc},
    {"still", (PyCFunction)(void (*)(void))native_still, METH_FASTCALL, still_doc},
    {"insert", (PyCFunction)(void (*)(void))native_insert, METH_FASTCALL, insert_doc},
    {"remove", (PyCFunction)(void (*)(void))native_remove, METH_FASTCALL, remove_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT,
    "kvcr._native",
    "Ordered access to the pool's control words and index, and copies that hash. Used through kvcr.pool only.",
    -1,
    methods,
    NULL,
    NULL,
    NULL,
    NULL,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModule_Create(&module);
}
