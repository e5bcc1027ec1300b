// How each layout's tiled bytes become codes, scales and offsets: value = scale * (code - ZERO) where
// a layout is SYMMETRIC, else scale * code + offset. A tile is 16 rows; a step is 32 columns, or 512
// codes: eight B64, the four codes k..k+3 of 16 rows each (k = 4 * index). HALVES 2 has a scale for
// every 16 columns; one that is not SYMMETRIC has minima for them, which are subtracted. A span is a head and its steps: SPAN columns, or as many as the matrix says.
// quant/formats/tiled.py says where each field lies.
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

inline void sixth_bits(const uint8_t* p, B64* q) {
    const B64 pair = B64::set1(0x30);
    for (int half = 0; half < 2; half++) {
        B64 high = B64::load(p + 64 * half);
        B64* out = q + 4 * half;
        out[0] = out[0] | (high.shl<4>() & pair);
        out[1] = out[1] | (high.shl<2>() & pair);
        out[2] = out[2] | (high & pair);
        out[3] = out[3] | (high.shr<2>() & pair);
    }
}

inline void pairs(const uint8_t* p, B64* q) {
    const B64 pair = B64::set1(3);
    for (int half = 0; half < 2; half++) {
        const B64 b = B64::load(p + 64 * half);
        B64* out = q + 4 * half;
        out[0] = b & pair;
        out[1] = b.shr<2>() & pair;
        out[2] = b.shr<4>() & pair;
        out[3] = b.shr<6>() & pair;
    }
}

inline void masked_bits(const uint8_t* p, int bit, B64* q) {
    for (int v = 0; v < 8; v++) {
        uint64_t mask;
        __builtin_memcpy(&mask, p + 8 * v, 8);
        q[v] = q[v].with_bits(mask, bit);
    }
}

// The codes of a step, BITS wide.
template <int BITS> inline void read_codes(const uint8_t* p, B64* q) {
    if (BITS < 4) {
        pairs(p, q);
        if (BITS == 3) masked_bits(p + 128, 4, q);
        return;
    }
    if (BITS == 8) {
        for (int v = 0; v < 8; v++) q[v] = B64::load(p + 64 * v);
        return;
    }
    nibbles(p, q);
    if (BITS == 5) masked_bits(p + 256, 16, q);
    if (BITS == 6) sixth_bits(p + 256, q);
}

constexpr int step_bytes(int bits) { return bits * 64; }

// Whether there are minima for every 16 columns, and what is noted of activations: -zero times their sums; 0 for nothing.
template <class Layout> constexpr bool half_minima() { return !Layout::SYMMETRIC && Layout::HALVES == 2; }
template <class Layout> constexpr int start_zero() { return Layout::SYMMETRIC ? Layout::ZERO : half_minima<Layout>() ? 1 : 0; }

inline F16L negated(F16L x) { return x * F16L::set1(-1.f); }

// int4 to int8 in groups, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: half-precision scales, maybe minima.
template <int BITS_, bool MINIMUM> struct Affine {
    static constexpr int BITS = BITS_, HALVES = 1, SPAN = 0, ZERO = 1 << (BITS - 1);
    static constexpr bool SYMMETRIC = !MINIMUM;
    static constexpr int HEADER = MINIMUM ? 64 : 32, STEP = step_bytes(BITS);
    struct Head { F16L scale, offset; };
    static Head open(const uint8_t* p) {
        Head head;
        head.scale = F16L::load_f16(p);
        if (MINIMUM) head.offset = F16L::load_f16(p + 32);
        return head;
    }
    static void codes(const uint8_t* p, B64* q) { read_codes<BITS>(p, q); }
    static F16L scale(const Head& head, const uint8_t*, int, int) { return head.scale; }
    static F16L offset(const Head& head, int) { return head.offset; }
};

// Sixteen numbers of six bits: five in a word, the last one's pairs of bits on top of the three.
struct SixBit {
    I16 words[3], last;
    explicit SixBit(const uint8_t* p) : words{I16::load(p), I16::load(p + 64), I16::load(p + 128)} {
        last = words[0].shr(30) | words[1].shr(30).shl(2) | words[2].shr(30).shl(4);
    }
    I16 operator[](int i) const { return i < 15 ? words[i / 5].shr(6 * (i % 5)) & I16::set1(63) : last; }
};

template <bool FIVE> struct TwoLevel {  // Q4_K, Q5_K
    static constexpr int BITS = FIVE ? 5 : 4, HALVES = 1, SPAN = 256, ZERO = 0;
    static constexpr bool SYMMETRIC = false;
    static constexpr int HEADER = 256, STEP = step_bytes(BITS);
    struct Head { F16L scale[8], offset[8]; };
    static Head open(const uint8_t* p) {
        const F16L d = F16L::load_f16(p), minimum = negated(F16L::load_f16(p + 32));
        const SixBit six(p + 64);
        Head head;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++)
            (i < 8 ? head.scale[i] : head.offset[i - 8]) = (i < 8 ? d : minimum) * F16L::from(six[i]);
        return head;
    }
    static void codes(const uint8_t* p, B64* q) { read_codes<BITS>(p, q); }
    static F16L scale(const Head& head, const uint8_t*, int step, int) { return head.scale[step]; }
    static F16L offset(const Head& head, int step) { return head.offset[step]; }
};

struct Six {  // Q6_K: a scale for every 16 columns
    static constexpr int BITS = 6, HALVES = 2, SPAN = 256, ZERO = 32;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 288, STEP = step_bytes(6);
    struct Head { F16L d; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p)}; }
    static void codes(const uint8_t* p, B64* q) { read_codes<6>(p, q); }
    static F16L scale(const Head& head, const uint8_t* p, int step, int half) {
        return head.d * F16L::from(I16::load_i8(p + 32 + 16 * (2 * step + half)));
    }
};

struct Three {  // Q3_K: the same, of six bits around 32
    static constexpr int BITS = 3, HALVES = 2, SPAN = 256, ZERO = 4;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 224, STEP = step_bytes(3);
    struct Head { F16L scale[16]; };
    static Head open(const uint8_t* p) {
        const F16L d = F16L::load_f16(p), middle = F16L::set1(-32.f);
        const SixBit six(p + 32);
        Head head;
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) head.scale[i] = d * (F16L::from(six[i]) + middle);
        return head;
    }
    static void codes(const uint8_t* p, B64* q) { read_codes<3>(p, q); }
    static F16L scale(const Head& head, const uint8_t*, int step, int half) { return head.scale[2 * step + half]; }
};

struct Two {  // Q2_K: nibbles of a scale and a minimum for every 16 columns
    static constexpr int BITS = 2, HALVES = 2, SPAN = 256, ZERO = 0;
    static constexpr bool SYMMETRIC = false;
    static constexpr int HEADER = 320, STEP = step_bytes(2);
    struct Head { F16L d, least; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p), F16L::load_f16(p + 32)}; }
    static I16 both(const uint8_t* p, int step, int half) { return I16::load_u8(p + 64 + 16 * (2 * step + half)); }
    static void codes(const uint8_t* p, B64* q) { read_codes<2>(p, q); }
    static F16L scale(const Head& head, const uint8_t* p, int step, int half) {
        return head.d * F16L::from(both(p, step, half) & I16::set1(15));
    }
    static F16L minimum(const Head& head, const uint8_t* p, int step, int half) {
        return head.least * F16L::from(both(p, step, half).shr(4));
    }
};

struct Ternary {  // TQ2_0
    static constexpr int BITS = 2, HALVES = 1, SPAN = 256, ZERO = 1;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 32, STEP = step_bytes(2);
    struct Head { F16L scale; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p)}; }
    static void codes(const uint8_t* p, B64* q) { read_codes<2>(p, q); }
    static F16L scale(const Head& head, const uint8_t*, int, int) { return head.scale; }
};

// Codes of four bits that stand for other numbers.
inline void looked_up(const uint8_t* p, const uint8_t* numbers, B64* q) {
    const B64 table = B64::table(numbers);
    nibbles(p, q);
    for (int v = 0; v < 8; v++) q[v] = table.lookup(q[v]);
}

// Twice E2M1, around 12.
inline void e2m1_codes(const uint8_t* p, B64* q) {
    alignas(16) static const uint8_t numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    looked_up(p, numbers, q);
}

struct Mxfp4 {  // E8M0 scales
    static constexpr int BITS = 5, HALVES = 1, SPAN = 32, ZERO = 12;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 16, STEP = step_bytes(4);
    struct Head { F16L scale; };
    static Head open(const uint8_t* p) { return {F16L::bits(I16::load_u8(p).shl(23)) * F16L::set1(0.5f)}; }
    static void codes(const uint8_t* p, B64* q) { e2m1_codes(p, q); }
    static F16L scale(const Head& head, const uint8_t*, int, int) { return head.scale; }
};

struct Nvfp4 {  // E4M3 scales, one for every 16 columns
    static constexpr int BITS = 5, HALVES = 2, SPAN = 32, ZERO = 12;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 32, STEP = step_bytes(4);
    struct Head { F16L scale[2]; };
    static Head open(const uint8_t* p) { return {{e4m3(p), e4m3(p + 16)}}; }
    // Half of a positive E4M3: as float32 bits it lacks 120 in the exponent.
    static F16L e4m3(const uint8_t* p) { return F16L::bits(I16::load_u8(p).shl(20)) * F16L::set1(0x1p119f); }
    static void codes(const uint8_t* p, B64* q) { e2m1_codes(p, q); }
    static F16L scale(const Head& head, const uint8_t*, int, int half) { return head.scale[half]; }
};

struct Nf4 {  // levels rounded to 1/127: within 0.4 % of the group's largest magnitude
    static constexpr int BITS = 8, HALVES = 1, SPAN = 64, ZERO = 128;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 32, STEP = step_bytes(4);
    struct Head { F16L scale; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p) * F16L::set1(1.f / 127)}; }
    static void codes(const uint8_t* p, B64* q) {
        alignas(16) static const uint8_t numbers[16] = {1,   40,  61,  78,  92,  105, 116, 128,
                                                        138, 148, 159, 171, 184, 199, 220, 255};
        looked_up(p, numbers, q);
    }
    static F16L scale(const Head& head, const uint8_t*, int, int) { return head.scale; }
};

// IQ4_NL's and IQ4_XS' levels, around 128.
inline void iq4_codes(const uint8_t* p, B64* q) {
    alignas(16) static const uint8_t numbers[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                    129, 141, 153, 166, 181, 197, 217, 241};
    looked_up(p, numbers, q);
}

struct Iq4Nl {
    static constexpr int BITS = 8, HALVES = 1, SPAN = 32, ZERO = 128;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 32, STEP = step_bytes(4);
    struct Head { F16L scale; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p)}; }
    static void codes(const uint8_t* p, B64* q) { iq4_codes(p, q); }
    static F16L scale(const Head& head, const uint8_t*, int, int) { return head.scale; }
};

struct Iq4Xs {  // scales of six bits around 32: five in a word, two in bytes, the last one on top of these
    static constexpr int BITS = 8, HALVES = 1, SPAN = 256, ZERO = 128;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 128, STEP = step_bytes(4);
    struct Head { F16L scale[8]; };
    static Head open(const uint8_t* p) {
        const F16L d = F16L::load_f16(p), middle = F16L::set1(-32.f);
        const I16 word = I16::load(p + 32), first = I16::load_u8(p + 96), second = I16::load_u8(p + 112), low = I16::set1(63);
        const I16 last = word.shr(30) | first.shr(6).shl(2) | second.shr(6).shl(4);
        Head head;
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const I16 six = i < 5 ? word.shr(6 * i) & low : i == 5 ? first & low : i == 6 ? second & low : last;
            head.scale[i] = d * (F16L::from(six) + middle);
        }
        return head;
    }
    static void codes(const uint8_t* p, B64* q) { iq4_codes(p, q); }
    static F16L scale(const Head& head, const uint8_t*, int step, int) { return head.scale[step]; }
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
