// SPDX-License-Identifier: Apache-2.0
// XXH3, 64 bits, seed 0, with or without a copy of what it hashes.
#ifndef KVCR_XXH3_H
#define KVCR_XXH3_H

#include <stddef.h>
#include <stdint.h>

// Shorter inputs are hashed by other rules, which no block is small enough to need.
#define XXH3_SHORTEST 241

// Hash of `length` (at least XXH3_SHORTEST) bytes at `source`, which are also copied to `target` unless that
// is NULL. Every byte is read once: the hash is of what was stored, even if the source changes meanwhile.
//
// `widest`: the vectors it may use where the processor has them, in bits: 512, 256 or 0.
uint64_t kvcr_xxh3(uint8_t *target, const uint8_t *source, size_t length, int widest);

#define XXH3_STRIPE 64

typedef struct {
    const uint8_t *start;
    size_t length;
} kvcr_piece;

// The same of an input in pieces, each a multiple of XXH3_STRIPE long and together at least XXH3_SHORTEST, which
// are copied to `target` one after the other.
uint64_t kvcr_xxh3_pieces(uint8_t *target, const kvcr_piece *pieces, size_t count, int widest);

#endif
