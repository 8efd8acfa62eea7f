// SPDX-License-Identifier: Apache-2.0
// kvcr._chain: the keys of a chain of blocks, BLAKE2b-128 (RFC 7693) of the parent's key and the block's tokens.
//
// kvcr/keys.py has the same with hashlib, which takes several times as long: most of it is making objects.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define KEY_BYTES 16
#define INPUT_BYTES 128

static const uint64_t IV[8] = {
    UINT64_C(0x6a09e667f3bcc908), UINT64_C(0xbb67ae8584caa73b), UINT64_C(0x3c6ef372fe94f82b),
    UINT64_C(0xa54ff53a5f1d36f1), UINT64_C(0x510e527fade682d1), UINT64_C(0x9b05688c2b3e6c1f),
    UINT64_C(0x1f83d9abfb41bd6b), UINT64_C(0x5be0cd19137e2179),
};

static const uint8_t SIGMA[12][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0},
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
};

static inline uint64_t rotate(uint64_t x, int n)
{
    return (x >> n) | (x << (64 - n));
}

#define MIX(a, b, c, d, x, y)         \
    do {                              \
        v[a] += v[b] + (x);           \
        v[d] = rotate(v[d] ^ v[a], 32); \
        v[c] += v[d];                 \
        v[b] = rotate(v[b] ^ v[c], 24); \
        v[a] += v[b] + (y);           \
        v[d] = rotate(v[d] ^ v[a], 16); \
        v[c] += v[d];                 \
        v[b] = rotate(v[b] ^ v[c], 63); \
    } while (0)

static void compress(uint64_t h[8], const uint8_t input[INPUT_BYTES], uint64_t total, int last)
{
    uint64_t v[16], m[16];
    for (int i = 0; i < 16; i++) {
        const uint8_t *p = input + 8 * i;
        m[i] = (uint64_t)p[0] | (uint64_t)p[1] << 8 | (uint64_t)p[2] << 16 | (uint64_t)p[3] << 24
            | (uint64_t)p[4] << 32 | (uint64_t)p[5] << 40 | (uint64_t)p[6] << 48 | (uint64_t)p[7] << 56;
    }
    for (int i = 0; i < 8; i++) {
        v[i] = h[i];
        v[i + 8] = IV[i];
    }
    v[12] ^= total;
    if (last)
        v[14] = ~v[14];
    for (int r = 0; r < 12; r++) {
        const uint8_t *s = SIGMA[r];
        MIX(0, 4, 8, 12, m[s[0]], m[s[1]]);
        MIX(1, 5, 9, 13, m[s[2]], m[s[3]]);
        MIX(2, 6, 10, 14, m[s[4]], m[s[5]]);
        MIX(3, 7, 11, 15, m[s[6]], m[s[7]]);
        MIX(0, 5, 10, 15, m[s[8]], m[s[9]]);
        MIX(1, 6, 11, 12, m[s[10]], m[s[11]]);
        MIX(2, 7, 8, 13, m[s[12]], m[s[13]]);
        MIX(3, 4, 9, 14, m[s[14]], m[s[15]]);
    }
    for (int i = 0; i < 8; i++)
        h[i] ^= v[i] ^ v[i + 8];
}

// The key of one block: its input is the parent's key followed by the tokens.
static void key_of(const uint8_t parent[KEY_BYTES], const uint8_t *tokens, Py_ssize_t size, const uint64_t start[8],
                   uint8_t key[KEY_BYTES])
{
    uint64_t h[8];
    uint8_t input[INPUT_BYTES];
    memcpy(h, start, sizeof h);
    memcpy(input, parent, KEY_BYTES);
    Py_ssize_t filled = KEY_BYTES, total = KEY_BYTES + size, done = 0;
    for (;;) {
        Py_ssize_t take = size < INPUT_BYTES - filled ? size : INPUT_BYTES - filled;
        memcpy(input + filled, tokens, (size_t)take);
        tokens += take;
        size -= take;
        filled += take;
        if (!size) {
            memset(input + filled, 0, (size_t)(INPUT_BYTES - filled));
            compress(h, input, (uint64_t)total, 1);
            break;
        }
        done += INPUT_BYTES;
        compress(h, input, (uint64_t)done, 0);
        filled = 0;
    }
    for (int i = 0; i < KEY_BYTES; i++)
        key[i] = (uint8_t)(h[i / 8] >> (8 * (i % 8)));
}

PyDoc_STRVAR(extend_doc,
"extend(parent: 16 bytes, tokens: u32 little-endian, block_bytes: int, person: bytes) -> bytes\n\n"
"Keys of the whole blocks of tokens, 16 bytes each. Without the GIL.");

static PyObject *chain_extend(PyObject *self, PyObject *args)
{
    (void)self;
    Py_buffer parent, tokens, person;
    Py_ssize_t block_bytes;
    if (!PyArg_ParseTuple(args, "y*y*ny*", &parent, &tokens, &block_bytes, &person))
        return NULL;
    PyObject *result = NULL;
    if (parent.len != KEY_BYTES || person.len > 16 || block_bytes < 1) {
        PyErr_Format(PyExc_ValueError, "a parent of %zd bytes, a person of %zd, blocks of %zd: expected 16, at most "
                     "16, at least 1", parent.len, person.len, block_bytes);
        goto done;
    }
    Py_ssize_t blocks = tokens.len / block_bytes;
    result = PyBytes_FromStringAndSize(NULL, blocks * KEY_BYTES);
    if (!result)
        goto done;
    uint8_t *out = (uint8_t *)PyBytes_AS_STRING(result), salt[16] = {0};
    memcpy(salt, person.buf, (size_t)person.len);
    uint64_t start[8];
    memcpy(start, IV, sizeof start);
    // The parameter block: digest length, no key, fanout and depth 1, and the personalisation.
    start[0] ^= UINT64_C(0x01010000) ^ KEY_BYTES;
    for (int i = 0; i < 16; i++)
        start[6 + i / 8] ^= (uint64_t)salt[i] << (8 * (i % 8));
    Py_BEGIN_ALLOW_THREADS
    const uint8_t *before = parent.buf, *at = tokens.buf;
    for (Py_ssize_t i = 0; i < blocks; i++, before = out + (i - 1) * KEY_BYTES, at += block_bytes)
        key_of(before, at, block_bytes, start, out + i * KEY_BYTES);
    Py_END_ALLOW_THREADS
done:
    PyBuffer_Release(&parent);
    PyBuffer_Release(&tokens);
    PyBuffer_Release(&person);
    return result;
}

static PyMethodDef methods[] = {
    {"extend", chain_extend, METH_VARARGS, extend_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_chain", "Keys of a chain of blocks.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__chain(void)
{
    return PyModule_Create(&module);
}
