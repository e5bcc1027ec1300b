// Tables of codebooks and lookup of entries by byte permutations: x86-64 with AVX-512 VBMI.
#include "codebook.h"
#include "processor.h"

Codebook codebooks[CODEBOOKS];

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
TARGET_BEGIN(LRT_AVX512 ",avx512vbmi")

namespace {

// Looks up bytes in a table of 256 << PLANES; the higher bits of indices are in masks.
template <int PLANES> inline __m512i bytes_at(const uint8_t* table, __m512i low, __mmask64 top, const __mmask64* high) {
    if constexpr (PLANES == 0) {
        const __m512i a = _mm512_permutex2var_epi8(_mm512_load_si512(table), low, _mm512_load_si512(table + 64));
        const __m512i b = _mm512_permutex2var_epi8(_mm512_load_si512(table + 128), low, _mm512_load_si512(table + 192));
        return _mm512_mask_mov_epi8(a, top, b);
    } else {
        const __m512i a = bytes_at<PLANES - 1>(table, low, top, high);
        const __m512i b = bytes_at<PLANES - 1>(table + (128 << PLANES), low, top, high);
        return _mm512_mask_mov_epi8(a, high[PLANES - 1], b);
    }
}

template <int WIDTH, int INDEX_BITS> void look_up_wide(const Codebook& book, const uint8_t* indices, const uint8_t* high, uint8_t* codes) {
    constexpr int VECTORS = 8 / WIDTH, PLANES = INDEX_BITS - 8;
    const __m512i levels = _mm512_load_si512(book.levels);
    for (int vector = 0; vector < VECTORS; vector++) {
        const __m512i low = _mm512_loadu_si512(indices + 64 * vector);
        __mmask64 planes[PLANES + 1];
        for (int plane = 0; plane < PLANES; plane++) planes[plane] = mask64(high + 8 * (plane * VECTORS + vector));
        const __mmask64 top = _mm512_movepi8_mask(low);
        const __m512i first = bytes_at<PLANES>(book.packed[0], low, top, planes);
        const __m512i second = bytes_at<PLANES>(book.packed[1], low, top, planes);
        // Byte i of a lane gets its level in the lowest bits; `levels` ignores the others.
        for (int j = 0; j < 4; j++) {
            if constexpr (WIDTH == 8) {
                const __m512i pairs = _mm512_set1_epi64(0x2624222006040200ll + 0x0808080808080808ll * j);
                _mm512_storeu_si512(codes + 128 * j, _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(pairs, first), levels));
                _mm512_storeu_si512(codes + 128 * j + 64, _mm512_permutexvar_epi8(_mm512_multishift_epi64_epi8(pairs, second), levels));
            } else {
                alignas(64) static const uint8_t lanes[64] = {
                    0,  0,  64,  64,  4,  4,  68,  68,  8,  8,  72,  72,  12, 12, 76,  76,  16, 16, 80,  80,  20, 20,
                    84, 84, 24,  24,  88, 88, 28,  28,  92, 92, 32,  32,  96, 96, 36,  36,  100, 100, 40, 40, 104, 104,
                    44, 44, 108, 108, 48, 48, 112, 112, 52, 52, 116, 116, 56, 56, 120, 120, 60, 60, 124, 124};
                const __m512i from = _mm512_add_epi8(_mm512_load_si512(lanes), _mm512_set1_epi8((char)j));
                const __m512i both = _mm512_permutex2var_epi8(first, from, second);
                const __m512i nibbles = _mm512_set1_epi64(0x3C302C201C100C00ll);
                const __m512i level = _mm512_multishift_epi64_epi8(nibbles, both);
                _mm512_storeu_si512(codes + 256 * vector + 64 * j, _mm512_permutexvar_epi8(level, levels));
            }
        }
    }
}

}  // namespace

TARGET_END

LookUp wide_look_up(int width, int index_bits) {
    if (!processor().vbmi) return nullptr;
    if (width == 4) return index_bits == 8 ? look_up_wide<4, 8> : look_up_wide<4, 9>;
    switch (index_bits) {
        case 8: return look_up_wide<8, 8>;
        case 9: return look_up_wide<8, 9>;
        case 10: return look_up_wide<8, 10>;
        default: return look_up_wide<8, 11>;
    }
}
#else
LookUp wide_look_up(int, int) { return nullptr; }
#endif
