// How each format's tiled bytes become codes, scales and offsets: value = scale * code + offset.
// A tile is 16 rows; a step is 32 columns, or 512 codes: eight B64, the four codes k..k+3 of 16 rows
// each (k = 4 * index). quant/formats/tiled.py says where each field lies.
#pragma once

namespace {

inline void nibbles(const uint8_t* p, B64* q) {
    const B64 low = B64::set1(15);
    for (int v = 0; v < 4; v++) {
        B64 b = B64::load(p + 64 * v);
        q[v] = b & low;
        q[v + 4] = b.shr<4>() & low;
    }
}

inline void fifth_bits(const uint8_t* p, B64* q) {
    for (int v = 0; v < 8; v++) {
        uint64_t mask;
        __builtin_memcpy(&mask, p + 8 * v, 8);
        q[v] = q[v].with_bits(mask, 16);
    }
}

template <bool MINIMUM, bool FIVE> struct Simple {  // Q4_0, Q4_1, Q5_0, Q5_1
    static constexpr int BLOCK = 32, HALVES = 1, BITS = FIVE ? 5 : 4;
    static constexpr int HEADER = MINIMUM ? 64 : 32, BYTES = HEADER + 256 + (FIVE ? 64 : 0);
    struct Head { F16L scale, offset; };
    static Head open(const uint8_t* p) {
        F16L d = F16L::load_f16(p);
        return {d, MINIMUM ? F16L::load_f16(p + 32) : d * F16L::set1(FIVE ? -16.f : -8.f)};
    }
    static void codes(const uint8_t* p, int, B64* q) {
        nibbles(p + HEADER, q);
        if (FIVE) fifth_bits(p + HEADER + 256, q);
    }
    static F16L scale(const Head& h, const uint8_t*, int, int) { return h.scale; }
    static F16L offset(const Head& h, F16L, int, int) { return h.offset; }
};

struct Eight {  // Q8_0, stored as code + 128
    static constexpr int BLOCK = 32, HALVES = 1, BITS = 8, BYTES = 32 + 512;
    struct Head { F16L scale; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p)}; }
    static void codes(const uint8_t* p, int, B64* q) {
        for (int v = 0; v < 8; v++) q[v] = B64::load(p + 32 + 64 * v);
    }
    static F16L scale(const Head& h, const uint8_t*, int, int) { return h.scale; }
    static F16L offset(const Head& h, F16L, int, int) { return h.scale * F16L::set1(-128.f); }
};

template <bool FIVE> struct TwoLevel {  // Q4_K, Q5_K
    static constexpr int BLOCK = 256, HALVES = 1, BITS = FIVE ? 5 : 4;
    static constexpr int STEP = FIVE ? 320 : 256, BYTES = 256 + 8 * STEP;
    struct Head { F16L scale[8], offset[8]; };
    // Eight scales and eight minima of six bits: five in a word, the last one's pairs of bits on top
    // of the three.
    static Head open(const uint8_t* p) {
        const F16L d = F16L::load_f16(p), minimum = F16L::load_f16(p + 32) * F16L::set1(-1.f);
        const I16 words[3] = {I16::load(p + 64), I16::load(p + 128), I16::load(p + 192)};
        const I16 last = words[0].shr(30) | words[1].shr(30).shl(2) | words[2].shr(30).shl(4);
        Head head;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            const I16 six = i < 15 ? words[i / 5].shr(6 * (i % 5)) & I16::set1(63) : last;
            (i < 8 ? head.scale[i] : head.offset[i - 8]) = (i < 8 ? d : minimum) * F16L::from(six);
        }
        return head;
    }
    static void codes(const uint8_t* p, int step, B64* q) {
        p += 256 + step * STEP;
        nibbles(p, q);
        if (FIVE) fifth_bits(p + 256, q);
    }
    static F16L scale(const Head& h, const uint8_t*, int step, int) { return h.scale[step]; }
    static F16L offset(const Head& h, F16L, int step, int) { return h.offset[step]; }
};

struct Six {  // Q6_K: a scale for every 16 columns
    static constexpr int BLOCK = 256, HALVES = 2, BITS = 6, BYTES = 288 + 8 * 384;
    struct Head { F16L d; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p)}; }
    static void codes(const uint8_t* p, int step, B64* q) {
        p += 288 + step * 384;
        nibbles(p, q);
        const B64 pair = B64::set1(0x30);
        for (int half = 0; half < 2; half++) {
            B64 high = B64::load(p + 256 + 64 * half);
            B64* out = q + 4 * half;
            out[0] = out[0] | (high.shl<4>() & pair);
            out[1] = out[1] | (high.shl<2>() & pair);
            out[2] = out[2] | (high & pair);
            out[3] = out[3] | (high.shr<2>() & pair);
        }
    }
    static F16L scale(const Head& h, const uint8_t* p, int step, int half) {
        return h.d * F16L::from(I16::load_i8(p + 32 + 16 * (2 * step + half)));
    }
    static F16L offset(const Head&, F16L scale, int, int) { return scale * F16L::set1(-32.f); }
};

struct Micro {  // MXFP4: twice E2M1, as codes 0..24 around 12
    static constexpr int BLOCK = 32, HALVES = 1, BITS = 5, BYTES = 16 + 256;
    struct Head { F16L scale; };
    static Head open(const uint8_t* p) { return {F16L::bits(I16::load_u8(p).shl(23)) * F16L::set1(0.5f)}; }
    static void codes(const uint8_t* p, int, B64* q) {
        alignas(16) static const uint8_t e2m1[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
        const B64 table = B64::table(e2m1);
        nibbles(p + 16, q);
        for (int v = 0; v < 8; v++) q[v] = table.lookup(q[v]);
    }
    static F16L scale(const Head& h, const uint8_t*, int, int) { return h.scale; }
    static F16L offset(const Head& h, F16L, int, int) { return h.scale * F16L::set1(-12.f); }
};

struct Float32 {
    static constexpr int BYTES = 64;  // 16 rows of one column
    static F16L load(const uint8_t* p) { return F16L::load((const float*)p); }
};
struct Half {
    static constexpr int BYTES = 32;
    static F16L load(const uint8_t* p) { return F16L::load_f16(p); }
};
struct Brain {
    static constexpr int BYTES = 32;
    static F16L load(const uint8_t* p) { return F16L::load_bf16(p); }
};

}  // namespace
