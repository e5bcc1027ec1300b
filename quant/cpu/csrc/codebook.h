// Codebooks of ggml's types IQ3, IQ2 and IQ1: tables that Python fills once, and the lookup of a step's codes by
// index. See quant/formats/codebook.py for the layout of indices, signs and scales.
#pragma once
#include "abi.h"

constexpr int FIRST_CODEBOOK = IQ3_XXS, CODEBOOKS = IQ1_M + 1 - FIRST_CODEBOOK, MOST_ENTRIES = 2048;

struct Codebook {
    alignas(64) uint8_t entries[MOST_ENTRIES * 8];  // (count, width): codes
    alignas(64) uint8_t packed[2][MOST_ENTRIES];    // per half of an entry, its codes' levels in 2 or 4 bits each
    alignas(64) uint8_t levels[64];                 // the codes of the levels, repeated
};

extern Codebook codebooks[CODEBOOKS];

// Looks up a step's codes, (32 / 4, 16 rows, 4). An index has `index_bits` bits, from `indices` and the masks after
// them.
using LookUp = void (*)(const Codebook& book, const uint8_t* indices, const uint8_t* high, uint8_t* codes);

// Lookup by byte permutations of whole tables; null without AVX-512 VBMI.
LookUp wide_look_up(int width, int index_bits);

inline namespace LRT_SPACE {

inline uint64_t mask64(const uint8_t* p) {
    uint64_t mask;
    __builtin_memcpy(&mask, p, 8);
    return mask;
}

template <int WIDTH, int INDEX_BITS> void look_up(const Codebook& book, const uint8_t* indices, const uint8_t* high, uint8_t* codes) {
    constexpr int VECTORS = 8 / WIDTH, PLANES = INDEX_BITS - 8;
    for (int vector = 0; vector < VECTORS; vector++)
        for (int at = 0; at < 64; at++) {
            int index = indices[64 * vector + at];
            for (int plane = 0; plane < PLANES; plane++) index |= (int)(mask64(high + 8 * (plane * VECTORS + vector)) >> at & 1) << (8 + plane);
            const uint8_t* entry = book.entries + index * WIDTH;
            uint8_t* to = codes + (at % 4 + 4 * vector) * (WIDTH / 4) * 64 + at / 4 * 4;
            __builtin_memcpy(to, entry, 4);
            if (WIDTH == 8) __builtin_memcpy(to + 64, entry + 4, 4);
        }
}

}  // namespace
