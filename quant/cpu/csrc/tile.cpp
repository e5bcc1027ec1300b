// Repacks rows of GGUF blocks losslessly into tiles of 16 rows; quant/formats/tiled.py is the specification.
#include "abi.h"
#include "pool.h"
#include <cstring>

namespace {

uint32_t word(const uint8_t* p) {
    uint32_t w;
    std::memcpy(&w, p, 4);
    return w;
}

// One bit of each code, in eight masks.
uint8_t* pack_masks(const uint8_t* codes, size_t stride, int bit, uint8_t* out) {
    for (int v = 0; v < 8; v++, out += 8) {
        uint64_t mask = 0;
        for (int r = 0; r < 16; r++) {
            const uint32_t ones = word(codes + r * stride + 4 * v) >> bit & 0x01010101;
            mask |= (uint64_t)((ones * 0x01020408u >> 24) & 15) << 4 * r;
        }
        for (int i = 0; i < 8; i++) out[i] = (uint8_t)(mask >> 8 * i);
    }
    return out;
}

// Two bits of each code, from `bit` on, in two vectors.
uint8_t* pack_pairs(const uint8_t* codes, size_t stride, int bit, uint8_t* out) {
    for (int half = 0; half < 2; half++)
        for (int r = 0; r < 16; r++, out += 4) {
            uint32_t w = 0;
            for (int j = 0; j < 4; j++) w |= (word(codes + r * stride + 16 * half + 4 * j) >> bit & 0x03030303) << 2 * j;
            std::memcpy(out, &w, 4);
        }
    return out;
}

// The nibbles and higher bits of 32 columns of 16 rows; codes (16, stride) hold one code a byte.
uint8_t* pack_step(const uint8_t* codes, size_t stride, int bits, uint8_t* out) {
    if (bits == 8) {
        for (int v = 0; v < 8; v++)
            for (int r = 0; r < 16; r++, out += 4) std::memcpy(out, codes + r * stride + 4 * v, 4);
        return out;
    }
    if (bits < 4) {
        out = pack_pairs(codes, stride, 0, out);
        return bits == 3 ? pack_masks(codes, stride, 2, out) : out;
    }
    for (int v = 0; v < 4; v++)
        for (int r = 0; r < 16; r++, out += 4) {
            const uint32_t w = (word(codes + r * stride + 4 * v) & 0x0F0F0F0F) | (word(codes + r * stride + 16 + 4 * v) & 0x0F0F0F0F) << 4;
            std::memcpy(out, &w, 4);
        }
    if (bits == 5) return pack_masks(codes, stride, 4, out);
    return bits == 6 ? pack_pairs(codes, stride, 4, out) : out;
}

// Pairs of bits; each 32 share 32 bytes.
void low_pairs(const uint8_t* p, uint8_t* codes) {
    for (int j = 0; j < 256; j++) codes[j] = p[j / 128 * 32 + j % 32] >> j % 128 / 32 * 2 & 3;
}

// Sixteen six-bit numbers as three words.
void six_bit_words(const uint8_t* six, int row, uint32_t (*words)[16]) {
    for (int w = 0; w < 3; w++) {
        words[w][row] = (uint32_t)(six[15] >> 2 * w & 3) << 30;
        for (int i = 0; i < 5; i++) words[w][row] |= (uint32_t)six[5 * w + i] << 6 * i;
    }
}

// One bit of h for each byte, at bit 4.
void fifth(const uint8_t* h, uint8_t* codes) {
    const uint32_t bits = word(h);
    for (int j = 0; j < 32; j++) codes[j] |= (bits >> j & 1) << 4;
}

void low_high(const uint8_t* p, int half, uint8_t* codes) {
    for (int j = 0; j < half; j++) {
        codes[j] = p[j] & 15;
        codes[j + half] = p[j] >> 4;
    }
}

// Eight six-bit numbers as one word and two bytes.
void eight_six_bit(const uint8_t* six, int row, uint32_t* words, uint8_t (*bytes)[16]) {
    words[row] = (uint32_t)(six[7] & 3) << 30;
    for (int i = 0; i < 5; i++) words[row] |= (uint32_t)six[i] << 6 * i;
    for (int i = 0; i < 2; i++) bytes[i][row] = (uint8_t)(six[5 + i] | (six[7] >> (2 + 2 * i) & 3) << 6);
}

// Contents of a row's block of a codebook type: see quant/formats/codebook.py.
struct Entries {
    uint16_t d, index[64];
    uint8_t scale[16];
    uint32_t signs[8];   // one bit for each column
    uint8_t less[32];    // IQ1: one for each entry
};

uint16_t short_word(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// Seven signs and the implied eighth.
uint32_t eight_signs(uint32_t seven) { return seven | (uint32_t)__builtin_parity(seven) << 7; }

Entries entries_of(int source, const uint8_t* p) {
    Entries e = {};
    e.d = short_word(p);
    switch (source) {
        case FROM_IQ3_XXS: case FROM_IQ2_XXS:
            for (int step = 0; step < 8; step++) {
                const bool three = source == FROM_IQ3_XXS;
                const uint8_t* low = p + 2 + 8 * step;
                const uint32_t rest = word(three ? p + 66 + 4 * step : low + 4);
                for (int i = 0; i < (three ? 8 : 4); i++) e.index[(three ? 8 : 4) * step + i] = low[i];
                for (int i = 0; i < 4; i++) e.signs[step] |= eight_signs(rest >> 7 * i & 127) << 8 * i;
                e.scale[step] = (uint8_t)(rest >> 28);
            }
            break;
        case FROM_IQ2_XS:
            for (int i = 0; i < 32; i++) {
                const uint16_t both = short_word(p + 2 + 2 * i);
                e.index[i] = both & 511;
                e.signs[i / 4] |= eight_signs(both >> 9) << 8 * (i % 4);
            }
            break;
        case FROM_IQ2_S:
            for (int i = 0; i < 32; i++) e.index[i] = (uint16_t)(p[2 + i] | (p[66 + i / 4] >> 2 * (i % 4) & 3) << 8);
            std::memcpy(e.signs, p + 34, 32);
            break;
        case FROM_IQ3_S:
            for (int i = 0; i < 64; i++) e.index[i] = (uint16_t)(p[2 + i] | (p[66 + i / 8] >> i % 8 & 1) << 8);
            std::memcpy(e.signs, p + 74, 32);
            break;
        case FROM_IQ1_S:
            for (int step = 0; step < 8; step++) {
                const uint16_t high = short_word(p + 34 + 2 * step);
                for (int i = 0; i < 4; i++) e.index[4 * step + i] = (uint16_t)(p[2 + 4 * step + i] | (high >> 3 * i & 7) << 8);
                e.scale[step] = (uint8_t)(high >> 12);  // and the sign
            }
            break;
        case FROM_IQ1_M:
            e.d = 0;
            for (int i = 0; i < 4; i++) {
                const uint16_t scales = short_word(p + 48 + 2 * i);
                e.d |= (uint16_t)(scales >> 12 << 4 * i);
                for (int j = 0; j < 4; j++) e.scale[4 * i + j] = scales >> 3 * j & 7;
            }
            for (int i = 0; i < 32; i++) {
                const int high = p[32 + i / 2] >> 4 * (i % 2) & 15;
                e.index[i] = (uint16_t)(p[i] | (high & 7) << 8);
                e.less[i] = (uint8_t)(high >> 3);
            }
            break;
    }
    return e;
}

// A block of 16 rows: see quant/formats/codebook.py for the layout.
uint8_t* tile_entries(int source, const uint8_t* const* rows, uint8_t* out) {
    Entries all[16];
    for (int r = 0; r < 16; r++) all[r] = entries_of(source, rows[r]);
    for (int r = 0; r < 16; r++, out += 2) std::memcpy(out, &all[r].d, 2);
    auto field = [&](int at) {
        for (int r = 0; r < 16; r++, out += 4) std::memcpy(out, rows[r] + at, 4);
    };
    if (source == FROM_IQ3_S) field(106);
    if (source == FROM_IQ2_XS || source == FROM_IQ2_S) {
        const int at = source == FROM_IQ2_XS ? 66 : 74;
        field(at);
        field(at + 4);
    }
    if (source == FROM_IQ1_M) {
        uint32_t words[16];
        uint8_t bytes[2][16];
        for (int r = 0; r < 16; r++) {
            uint8_t six[8];
            for (int i = 0; i < 8; i++) six[i] = all[r].scale[2 * i] | all[r].scale[2 * i + 1] << 3;
            eight_six_bit(six, r, words, bytes);
        }
        std::memcpy(out, words, sizeof words);
        std::memcpy(out + sizeof words, bytes, sizeof bytes);
        out += sizeof words + sizeof bytes;
    }
    // Four bits of each row.
    auto mask = [&](auto nibble) {
        uint64_t bits = 0;
        for (int r = 0; r < 16; r++) bits |= (uint64_t)(nibble(all[r]) & 15) << 4 * r;
        for (int i = 0; i < 8; i++) *out++ = (uint8_t)(bits >> 8 * i);
    };
    const bool four = source == FROM_IQ3_XXS || source == FROM_IQ3_S, shifted = source == FROM_IQ1_S || source == FROM_IQ1_M;
    const bool seven = source == FROM_IQ3_XXS || source == FROM_IQ2_XXS || source == FROM_IQ2_XS;
    const int vectors = four ? 2 : 1;
    const int bits = shifted ? 11 : source == FROM_IQ2_S ? 10 : source == FROM_IQ3_S ? 9 : 8;  // as in masks
    for (int step = 0; step < 8; step++) {
        for (int vector = 0; vector < vectors; vector++)
            for (int r = 0; r < 16; r++)
                for (int j = 0; j < 4; j++) *out++ = (uint8_t)all[r].index[4 * (vectors * step + vector) + j];
        if (!shifted)
            for (int v = 0; v < 8; v++)
                mask([&](const Entries& e) {
                    int signs = (int)(e.signs[step] >> 4 * v & 15);
                    if (seven && v % 2) {
                        const int number = source == FROM_IQ2_XS ? e.index[4 * step + v / 2] >> 8 : e.scale[step] >> v / 2 & 1;
                        signs = (signs & 7) | number << 3;
                    }
                    return signs;
                });
        for (int bit = 8; bit < bits; bit++)
            for (int vector = 0; vector < vectors; vector++)
                mask([&](const Entries& e) {
                    int nibble = 0;
                    for (int j = 0; j < 4; j++) nibble |= (e.index[4 * (vectors * step + vector) + j] >> bit & 1) << j;
                    return nibble;
                });
        if (source == FROM_IQ1_S) mask([&](const Entries& e) { return (int)e.scale[step]; });
        if (source == FROM_IQ1_M)
            mask([&](const Entries& e) {
                const uint8_t* less = e.less + 4 * step;
                return less[0] | less[1] << 1 | less[2] << 2 | less[3] << 3;
            });
    }
    return out;
}

// One block of 16 rows; rows[r] points at the block, or at zeros beyond the matrix.
uint8_t* tile_block(int source, const uint8_t* const* rows, uint8_t* out) {
    uint8_t codes[16][256];
    auto field = [&](int at, int bytes) {
        for (int r = 0; r < 16; r++, out += bytes) std::memcpy(out, rows[r] + at, bytes);
    };
    switch (source) {
        case FROM_F32: field(0, 4); return out;
        case FROM_F16: case FROM_BF16: field(0, 2); return out;
        case FROM_Q4_0: case FROM_Q4_1: case FROM_IQ4_NL: case FROM_MXFP4: {
            const int head = source == FROM_Q4_1 ? 4 : source == FROM_MXFP4 ? 1 : 2;
            field(0, head == 1 ? 1 : 2);
            if (head == 4) field(2, 2);
            for (int r = 0; r < 16; r++) low_high(rows[r] + head, 16, codes[r]);
            return pack_step(codes[0], 256, 4, out);
        }
        case FROM_Q5_0: case FROM_Q5_1: {
            const int head = source == FROM_Q5_0 ? 2 : 4;
            field(0, 2);
            if (source == FROM_Q5_1) field(2, 2);
            for (int r = 0; r < 16; r++) {
                low_high(rows[r] + head + 4, 16, codes[r]);
                fifth(rows[r] + head, codes[r]);
            }
            return pack_step(codes[0], 256, 5, out);
        }
        case FROM_Q8_0:
            field(0, 2);
            for (int r = 0; r < 16; r++)
                for (int j = 0; j < 32; j++) codes[r][j] = rows[r][2 + j] ^ 0x80;
            return pack_step(codes[0], 256, 8, out);
        case FROM_Q4_K: case FROM_Q5_K: {
            field(0, 2);
            field(2, 2);
            uint32_t words[3][16];
            for (int r = 0; r < 16; r++) {
                const uint8_t* p = rows[r] + 4;
                uint8_t six[16];  // eight scales, eight minima
                for (int j = 0; j < 4; j++) {
                    six[j] = p[j] & 63;
                    six[j + 8] = p[j + 4] & 63;
                    six[j + 4] = (p[j + 8] & 15) | (p[j] >> 6) << 4;
                    six[j + 12] = (p[j + 8] >> 4) | (p[j + 4] >> 6) << 4;
                }
                six_bit_words(six, r, words);
                const uint8_t* q = rows[r] + (source == FROM_Q4_K ? 16 : 48);
                for (int c = 0; c < 4; c++) low_high(q + 32 * c, 32, codes[r] + 64 * c);
                if (source == FROM_Q5_K)
                    for (int j = 0; j < 256; j++) codes[r][j] |= (rows[r][16 + j % 32] >> j / 32 & 1) << 4;
            }
            std::memcpy(out, words, sizeof words);
            out += sizeof words;
            for (int step = 0; step < 8; step++) out = pack_step(codes[0] + 32 * step, 256, source == FROM_Q4_K ? 4 : 5, out);
            return out;
        }
        case FROM_Q2_K:
            field(80, 2);
            field(82, 2);
            for (int sub = 0; sub < 16; sub++) field(sub, 1);
            for (int r = 0; r < 16; r++) low_pairs(rows[r] + 16, codes[r]);
            for (int step = 0; step < 8; step++) out = pack_step(codes[0] + 32 * step, 256, 2, out);
            return out;
        case FROM_TQ2_0:
            field(64, 2);
            for (int r = 0; r < 16; r++) low_pairs(rows[r], codes[r]);
            for (int step = 0; step < 8; step++) out = pack_step(codes[0] + 32 * step, 256, 2, out);
            return out;
        case FROM_Q3_K: {
            field(108, 2);
            uint32_t words[3][16];
            for (int r = 0; r < 16; r++) {
                const uint8_t *p = rows[r] + 96, *high = rows[r];
                uint8_t six[16];
                for (int j = 0; j < 16; j++) six[j] = (p[j % 8] >> j / 8 * 4 & 15) | (p[8 + j % 4] >> j / 4 * 2 & 3) << 4;
                six_bit_words(six, r, words);
                low_pairs(rows[r] + 32, codes[r]);
                for (int j = 0; j < 256; j++) codes[r][j] |= (high[j % 32] >> j / 32 & 1) << 2;
            }
            std::memcpy(out, words, sizeof words);
            out += sizeof words;
            for (int step = 0; step < 8; step++) out = pack_step(codes[0] + 32 * step, 256, 3, out);
            return out;
        }
        case FROM_IQ4_XS: {
            field(0, 2);
            uint32_t words[16];
            uint8_t bytes[2][16];
            for (int r = 0; r < 16; r++) {
                const uint8_t* p = rows[r] + 2;
                uint8_t six[8];
                for (int j = 0; j < 8; j++) six[j] = (p[2 + j / 2] >> j % 2 * 4 & 15) | (p[j / 4] >> j % 4 * 2 & 3) << 4;
                eight_six_bit(six, r, words, bytes);
                for (int group = 0; group < 8; group++) low_high(rows[r] + 8 + 16 * group, 16, codes[r] + 32 * group);
            }
            std::memcpy(out, words, sizeof words);
            std::memcpy(out + sizeof words, bytes, sizeof bytes);
            out += sizeof words + sizeof bytes;
            for (int step = 0; step < 8; step++) out = pack_step(codes[0] + 32 * step, 256, 4, out);
            return out;
        }
        case FROM_Q6_K:
            field(208, 2);
            for (int sub = 0; sub < 16; sub++)
                for (int r = 0; r < 16; r++) *out++ = rows[r][192 + sub];
            for (int r = 0; r < 16; r++)
                for (int half = 0; half < 2; half++) {
                    const uint8_t *low = rows[r] + 64 * half, *high = rows[r] + 128 + 32 * half;
                    uint8_t* c = codes[r] + 128 * half;
                    for (int j = 0; j < 32; j++) {
                        c[j] = (low[j] & 15) | (high[j] & 3) << 4;
                        c[j + 32] = (low[j + 32] & 15) | (high[j] >> 2 & 3) << 4;
                        c[j + 64] = low[j] >> 4 | (high[j] >> 4 & 3) << 4;
                        c[j + 96] = low[j + 32] >> 4 | (high[j] >> 6) << 4;
                    }
                }
            for (int step = 0; step < 8; step++) out = pack_step(codes[0] + 32 * step, 256, 6, out);
            return out;
        default: return tile_entries(source, rows, out);
    }
    return out;
}

}  // namespace

// A row is blocks of `size` columns in `bytes` bytes.
void tile_rows(Context& context, int source, int size, int bytes, const uint8_t* from, int rows, int cols, uint8_t* to) {
    static const uint8_t zeros[256] = {};
    const size_t row_bytes = (size_t)cols / size * bytes;
    parallel(context, (rows + 15) / 16, [&](int tile) {
        uint8_t* out = to + (size_t)tile * 16 * row_bytes;
        const uint8_t* lines[16];
        for (int block = 0; block < cols / size; block++) {
            for (int r = 0; r < 16; r++) {
                const int row = tile * 16 + r;
                lines[r] = row < rows ? from + row * row_bytes + (size_t)block * bytes : zeros;
            }
            out = tile_block(source, lines, out);
        }
    });
}
