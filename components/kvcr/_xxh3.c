// SPDX-License-Identifier: Apache-2.0
// XXH3's rule for long inputs, written from the algorithm's public specification.
//
// The state is 8 lanes of 64 bits. The input goes through it in stripes of 64 bytes, each mixed with the
// secret 8 bytes further on; after 16 stripes (a block) the lanes are scrambled. A copy rides along: a
// stripe that is in a register is stored from there, so that hashing costs no second pass over memory.

#include "_xxh3.h"

#include <string.h>

#define STRIPE XXH3_STRIPE
#define LANES 8
#define SECRET_BYTES 192
#define STRIPES_PER_BLOCK ((SECRET_BYTES - STRIPE) / 8)
#define BLOCK ((size_t)STRIPE * STRIPES_PER_BLOCK)

#define PRIME32_1 UINT64_C(0x9E3779B1)
#define PRIME32_2 UINT64_C(0x85EBCA77)
#define PRIME32_3 UINT64_C(0xC2B2AE3D)
#define PRIME64_1 UINT64_C(0x9E3779B185EBCA87)
#define PRIME64_2 UINT64_C(0xC2B2AE3D27D4EB4F)
#define PRIME64_3 UINT64_C(0x165667B19E3779F9)
#define PRIME64_4 UINT64_C(0x85EBCA77C2B2AE63)
#define PRIME64_5 UINT64_C(0x27D4EB2F165667C5)

static const uint8_t secret[SECRET_BYTES] __attribute__((aligned(64))) = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t word(const uint8_t *at)
{
    uint64_t value;
    memcpy(&value, at, 8);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    value = __builtin_bswap64(value);
#endif
    return value;
}

// How the bytes of a copy are stored. Streaming stores do not read the lines they replace, which saves a
// third of the memory traffic; they need a target that is aligned to a stripe.
enum { HASH_ONLY, STORE, STREAM };

// Ahead of the stripe being mixed. The processor's own prefetcher stops at the end of a page.
#define PREFETCH_BYTES 2048

// Mix `stripes` stripes, of which the first uses `key`, into the lanes, and store them at `target`.
typedef void stripes_fn(uint64_t *lanes, uint8_t *target, const uint8_t *source, const uint8_t *key,
                        size_t stripes, int how);

static void stripes_plain(uint64_t *lanes, uint8_t *target, const uint8_t *source, const uint8_t *key,
                          size_t stripes, int how)
{
    for (size_t s = 0; s < stripes; s++, source += STRIPE, key += 8) {
        uint8_t stripe[STRIPE];
        memcpy(stripe, source, STRIPE);
        if (how != HASH_ONLY)
            memcpy(target + s * STRIPE, stripe, STRIPE);
        for (int i = 0; i < LANES; i++) {
            uint64_t value = word(stripe + 8 * i);
            uint64_t keyed = value ^ word(key + 8 * i);
            lanes[i ^ 1] += value;
            lanes[i] += (keyed & UINT32_MAX) * (keyed >> 32);
        }
    }
}

#if defined(__x86_64__)
#include <immintrin.h>

#define SWAPPED _MM_SHUFFLE(1, 0, 3, 2)

__attribute__((target("avx2"), always_inline))
static inline void mix_avx2(uint64_t *lanes, uint8_t *target, const uint8_t *source, const uint8_t *key,
                            size_t stripes, const int how)
{
    __m256i low = _mm256_loadu_si256((const __m256i *)lanes);
    __m256i high = _mm256_loadu_si256((const __m256i *)(lanes + 4));
    for (size_t s = 0; s < stripes; s++, source += STRIPE, key += 8) {
        _mm_prefetch((const char *)source + PREFETCH_BYTES, _MM_HINT_NTA);
        __m256i a = _mm256_loadu_si256((const __m256i *)source);
        __m256i b = _mm256_loadu_si256((const __m256i *)(source + 32));
        __m256i *to = (__m256i *)(target + s * STRIPE);
        if (how == STREAM) {
            _mm256_stream_si256(to, a);
            _mm256_stream_si256(to + 1, b);
        } else if (how == STORE) {
            _mm256_storeu_si256(to, a);
            _mm256_storeu_si256(to + 1, b);
        }
        __m256i x = _mm256_xor_si256(a, _mm256_loadu_si256((const __m256i *)key));
        __m256i y = _mm256_xor_si256(b, _mm256_loadu_si256((const __m256i *)(key + 32)));
        low = _mm256_add_epi64(low, _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)));
        high = _mm256_add_epi64(high, _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32)));
        low = _mm256_add_epi64(low, _mm256_shuffle_epi32(a, SWAPPED));
        high = _mm256_add_epi64(high, _mm256_shuffle_epi32(b, SWAPPED));
    }
    _mm256_storeu_si256((__m256i *)lanes, low);
    _mm256_storeu_si256((__m256i *)(lanes + 4), high);
}

__attribute__((target("avx2")))
static void stripes_avx2(uint64_t *lanes, uint8_t *target, const uint8_t *source, const uint8_t *key,
                         size_t stripes, int how)
{
    switch (how) {
    case STREAM: mix_avx2(lanes, target, source, key, stripes, STREAM); break;
    case STORE: mix_avx2(lanes, target, source, key, stripes, STORE); break;
    default: mix_avx2(lanes, target, source, key, stripes, HASH_ONLY);
    }
}

__attribute__((target("avx512f"), always_inline))
static inline void mix_avx512(uint64_t *lanes, uint8_t *target, const uint8_t *source, const uint8_t *key,
                              size_t stripes, const int how)
{
    __m512i sum = _mm512_loadu_si512(lanes);
    for (size_t s = 0; s < stripes; s++, source += STRIPE, key += 8) {
        _mm_prefetch((const char *)source + PREFETCH_BYTES, _MM_HINT_NTA);
        __m512i a = _mm512_loadu_si512(source);
        if (how == STREAM)
            _mm512_stream_si512((__m512i *)(target + s * STRIPE), a);
        else if (how == STORE)
            _mm512_storeu_si512(target + s * STRIPE, a);
        __m512i x = _mm512_xor_si512(a, _mm512_loadu_si512(key));
        sum = _mm512_add_epi64(sum, _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)));
        sum = _mm512_add_epi64(sum, _mm512_shuffle_epi32(a, (_MM_PERM_ENUM)SWAPPED));
    }
    _mm512_storeu_si512(lanes, sum);
}

__attribute__((target("avx512f")))
static void stripes_avx512(uint64_t *lanes, uint8_t *target, const uint8_t *source, const uint8_t *key,
                           size_t stripes, int how)
{
    switch (how) {
    case STREAM: mix_avx512(lanes, target, source, key, stripes, STREAM); break;
    case STORE: mix_avx512(lanes, target, source, key, stripes, STORE); break;
    default: mix_avx512(lanes, target, source, key, stripes, HASH_ONLY);
    }
}
#endif

static stripes_fn *kernel(int widest)
{
#if defined(__x86_64__)
    if (widest >= 512 && __builtin_cpu_supports("avx512f"))
        return stripes_avx512;
    if (widest >= 256 && __builtin_cpu_supports("avx2"))
        return stripes_avx2;
#endif
    (void)widest;
    return stripes_plain;
}

static void scramble(uint64_t *lanes)
{
    for (int i = 0; i < LANES; i++) {
        lanes[i] ^= lanes[i] >> 47;
        lanes[i] ^= word(secret + SECRET_BYTES - STRIPE + 8 * i);
        lanes[i] *= PRIME32_1;
    }
}

static uint64_t fold(const uint64_t *lanes, const uint8_t *key)
{
    unsigned __int128 product = (unsigned __int128)(lanes[0] ^ word(key)) * (lanes[1] ^ word(key + 8));
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

#define FIRST_LANES {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1}

static int way_to_store(const uint8_t *target)
{
    return target == NULL ? HASH_ONLY : (uintptr_t)target % STRIPE == 0 ? STREAM : STORE;
}

// `last`: the last 64 bytes of the input, which may overlap with what was mixed before.
static uint64_t finish(uint64_t *lanes, const uint8_t *last, size_t length, int how)
{
    stripes_plain(lanes, NULL, last, secret + SECRET_BYTES - STRIPE - 7, 1, HASH_ONLY);
#if defined(__x86_64__)
    // Streaming stores are ordered by this alone; whoever publishes the bytes must not overtake them.
    if (how == STREAM)
        _mm_sfence();
#endif
    uint64_t hash = (uint64_t)length * PRIME64_1;
    for (int i = 0; i < 4; i++)
        hash += fold(lanes + 2 * i, secret + 11 + 16 * i);
    hash ^= hash >> 37;
    hash *= UINT64_C(0x165667919E3779F9);
    return hash ^ hash >> 32;
}

uint64_t kvcr_xxh3(uint8_t *target, const uint8_t *source, size_t length, int widest)
{
    uint64_t lanes[LANES] = FIRST_LANES;
    stripes_fn *mix = kernel(widest);
    int how = way_to_store(target);
    // The last stripe is the last 64 bytes, whatever was mixed before: it may overlap, and is kept aside.
    size_t whole = (length - 1) / STRIPE;
    uint8_t last[STRIPE];
    for (size_t done = 0; done < whole; done += STRIPES_PER_BLOCK) {
        size_t count = whole - done < STRIPES_PER_BLOCK ? whole - done : STRIPES_PER_BLOCK;
        mix(lanes, target + (target == NULL ? 0 : done * STRIPE), source + done * STRIPE, secret, count, how);
        if (count == STRIPES_PER_BLOCK)
            scramble(lanes);
    }
    size_t rest = length - whole * STRIPE;
    memcpy(last + STRIPE - rest, source + whole * STRIPE, rest);
    memcpy(last, (target == NULL ? source : target) + length - STRIPE, STRIPE - rest);
    if (target != NULL)
        memcpy(target + whole * STRIPE, last + STRIPE - rest, rest);
    return finish(lanes, last, length, how);
}

uint64_t kvcr_xxh3_pieces(uint8_t *target, const kvcr_piece *pieces, size_t count, int widest)
{
    uint64_t lanes[LANES] = FIRST_LANES;
    stripes_fn *mix = kernel(widest);
    int how = way_to_store(target);
    size_t in_block = 0, length = 0;
    uint8_t last[STRIPE];
    for (size_t p = 0; p < count; p++) {
        const uint8_t *source = pieces[p].start;
        // The last stripe of all is mixed by another rule.
        size_t left = pieces[p].length / STRIPE - (p + 1 == count);
        while (left > 0) {
            size_t stripes = STRIPES_PER_BLOCK - in_block < left ? STRIPES_PER_BLOCK - in_block : left;
            mix(lanes, target + length, source, secret + 8 * in_block, stripes, how);
            source += stripes * STRIPE;
            length += stripes * STRIPE;
            left -= stripes;
            in_block = (in_block + stripes) % STRIPES_PER_BLOCK;
            if (in_block == 0)
                scramble(lanes);
        }
        if (p + 1 == count) {
            memcpy(last, source, STRIPE);
            memcpy(target + length, last, STRIPE);
            length += STRIPE;
        }
    }
    return finish(lanes, last, length, how);
}
