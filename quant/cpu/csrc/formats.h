// Decodes each layout's tiled bytes to codes, scales and offsets: value = scale * (code - ZERO) where
// a layout is SYMMETRIC, else scale * code + offset. A tile is 16 rows; a step is 32 columns, or 512
// codes: eight B64, the four codes k..k+3 of 16 rows each (k = 4 * index). HALVES 2 has a scale for
// every 16 columns; one that is not SYMMETRIC has minima for them. A span is a head and its steps: SPAN
// columns, or as many as the matrix says.
// See quant/formats/tiled.py for the position of each field.
#pragma once
#include "codebook.h"

inline namespace LRT_SPACE {

// The codes of a step, BITS wide: `at(v)` are those of columns 4v to 4v + 3, decoded on use, so that all eight vectors
// are never in registers at once.
template <int BITS> struct StepCodes {
    const uint8_t* p;

    // The fastest order: consecutive vectors share bytes.
    static constexpr int nth(int i) { return BITS >= 4 && BITS < 8 ? i / 2 + i % 2 * 4 : i; }
    LRT_INLINE B64 at(int v) const {
        if (BITS == 8) return B64::load(p + 64 * v);
        if (BITS < 4) {
            const B64 two = shifted(B64::load(p + v / 4 * 64), v % 4) & B64::set1(3);
            return BITS == 3 ? masked(two, p + 128, v, 4) : two;
        }
        const B64 both = B64::load(p + v % 4 * 64);
        const B64 four = (v < 4 ? both : both.template shr<4>()) & B64::set1(15);
        if (BITS == 5) return masked(four, p + 256, v, 16);
        if (BITS == 6) return four | (placed(B64::load(p + 256 + v / 4 * 64), v % 4) & B64::set1(0x30));
        return four;
    }

  private:
    // The i-th pair of bits of each byte, moved to bits 0 and 1, or to bits 4 and 5.
    static LRT_INLINE B64 shifted(B64 b, int i) {
        return i == 0 ? b : i == 1 ? b.template shr<2>() : i == 2 ? b.template shr<4>() : b.template shr<6>();
    }
    static LRT_INLINE B64 placed(B64 b, int i) {
        return i == 0 ? b.template shl<4>() : i == 1 ? b.template shl<2>() : i == 2 ? b : b.template shr<2>();
    }
    static LRT_INLINE B64 masked(B64 q, const uint8_t* masks, int v, int bit) { return q.with_bits(mask64(masks + 8 * v), bit); }
};

// Four-bit codes that index a table of levels.
struct LookedUp {
    StepCodes<4> codes;
    B64 table;

    LookedUp(const uint8_t* p, const uint8_t* numbers) : codes{p}, table(B64::table(numbers)) {}
    static constexpr int nth(int i) { return StepCodes<4>::nth(i); }
    LRT_INLINE B64 at(int v) const { return table.lookup(codes.at(v)); }
};

// Codes that are decoded all at once.
struct Filled {
    B64 q[8];
    static constexpr int nth(int i) { return i; }
    LRT_INLINE B64 at(int v) const { return q[v]; }
};

constexpr int step_bytes(int bits) { return bits * 64; }

// Whether scales and minima are integers for every 16 columns: two for a step, in the halves of a word.
template <class Layout> constexpr bool half_minima() { return !Layout::SYMMETRIC && Layout::HALVES == 2; }
// Sums of STEPS steps' products.
template <class Layout, int STEPS, int CHAINS = 1>
using DotsOf = Dots<code_class(Layout::MOST), !Layout::SYMMETRIC ? 0 : Layout::ZERO == 128 ? 128 : 1, STEPS, CHAINS>;
// Kind of the sums stored with activations: -zero times their sums, or sums of both halves; 0 for none.
constexpr int BOTH_SUMS = -1;
template <class Layout> constexpr int start_zero() { return Layout::SYMMETRIC ? Layout::ZERO : half_minima<Layout>() ? BOTH_SUMS : 0; }
template <class Layout> constexpr int start_halves(bool precise) { return half_minima<Layout>() && !precise ? 1 : Layout::HALVES; }

inline F16L negated(F16L x) { return x * F16L::set1(-1.f); }

// int4 to int8 in groups, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0: half-precision scales, optional minima.
template <int BITS_, bool MINIMUM> struct Affine {
    static constexpr int BITS = BITS_, MOST = (1 << BITS) - 1, HALVES = 1, SPAN = 0, ZERO = 1 << (BITS - 1);
    static constexpr bool SYMMETRIC = !MINIMUM;
    static constexpr int HEADER = MINIMUM ? 64 : 32, STEP = step_bytes(BITS);
    struct Head { F16L scale, offset; };
    static Head open(const uint8_t* p) {
        Head head;
        head.scale = F16L::load_f16(p);
        if (MINIMUM) head.offset = F16L::load_f16(p + 32);
        return head;
    }
    static StepCodes<BITS> codes(const uint8_t* p) { return {p}; }
    static F16L scale(const Head& head, const uint8_t*, int, int) { return head.scale; }
    static F16L offset(const Head& head, int) { return head.offset; }
};

// The same with bfloat16 scales and minima, as in published checkpoints.
template <int BITS_> struct Brains : Affine<BITS_, true> {
    using Head = typename Affine<BITS_, true>::Head;
    static Head open(const uint8_t* p) { return {F16L::load_bf16(p), F16L::load_bf16(p + 32)}; }
};

// float32 scales and zero points of one byte.
template <int BITS_> struct ZeroPoints : Affine<BITS_, true> {
    static constexpr int HEADER = 80;
    using Head = typename Affine<BITS_, true>::Head;
    static Head open(const uint8_t* p) {
        const F16L scale = F16L::load((const float*)p);
        return {scale, negated(scale) * F16L::from(I16::load_u8(p + 64))};
    }
};

// Sixteen six-bit values: five in each of three words; the last one's bits are the words' top pairs.
struct SixBit {
    I16 words[3], last;
    explicit SixBit(const uint8_t* p) : words{I16::load(p), I16::load(p + 64), I16::load(p + 128)} {
        last = words[0].shr(30) | words[1].shr(30).shl(2) | words[2].shr(30).shl(4);
    }
    I16 operator[](int i) const { return i < 15 ? words[i / 5].shr(6 * (i % 5)) & I16::set1(63) : last; }
};

template <bool FIVE> struct TwoLevel {  // Q4_K, Q5_K
    static constexpr int BITS = FIVE ? 5 : 4, MOST = (1 << BITS) - 1, HALVES = 1, SPAN = 256, ZERO = 0;
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
    static StepCodes<BITS> codes(const uint8_t* p) { return {p}; }
    static F16L scale(const Head& head, const uint8_t*, int step, int) { return head.scale[step]; }
    static F16L offset(const Head& head, int step) { return head.offset[step]; }
};

struct ByteScales {  // Q6_K: a scale for every 16 columns
    static constexpr int MOST = 63, HALVES = 2, SPAN = 256, ZERO = 32;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 288, STEP = step_bytes(6);
    struct Head { F16L d; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p)}; }
    static StepCodes<6> codes(const uint8_t* p) { return {p}; }
    static F16L scale(const Head& head, const uint8_t* p, int step, int half) {
        return head.d * F16L::from(I16::load_i8(p + 32 + 16 * (2 * step + half)));
    }
};

struct Three {  // Q3_K: the same, with six-bit scales around 32
    static constexpr int MOST = 7, HALVES = 2, SPAN = 256, ZERO = 4;
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
    static StepCodes<3> codes(const uint8_t* p) { return {p}; }
    static F16L scale(const Head& head, const uint8_t*, int step, int half) { return head.scale[2 * step + half]; }
};

struct Two {  // Q2_K: a scale and a minimum of four bits for every 16 columns
    static constexpr int MOST = 3, HALVES = 2, SPAN = 256, ZERO = 0;
    static constexpr bool SYMMETRIC = false;
    static constexpr int HEADER = 320, STEP = step_bytes(2);
    struct Head { F16L d, least; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p), negated(F16L::load_f16(p + 32))}; }
    static I16 both(const uint8_t* p, int step) {
        return I16::load_u8(p + 64 + 32 * step) | I16::load_u8(p + 80 + 32 * step).shl(16);
    }
    static I16 scales(const uint8_t* p, int step) { return both(p, step) & I16::set1(0x000F000F); }
    static I16 minima(const uint8_t* p, int step) { return both(p, step).shr(4) & I16::set1(0x000F000F); }
    static StepCodes<2> codes(const uint8_t* p) { return {p}; }
    static F16L scale(const Head& head, const uint8_t* p, int step, int half) {
        return head.d * F16L::from(scales(p, step).shr(16 * half) & I16::set1(15));
    }
    static F16L minimum(const Head& head, const uint8_t* p, int step, int half) {
        return head.least * F16L::from(minima(p, step).shr(16 * half) & I16::set1(15));
    }
    // Codes times their scales: integers up to MOST_SCALED, from a table of four for each row.
    static constexpr int MOST_SCALED = 45;
    struct Scaled {
        StepCodes<2> codes;
        B64 place, tables[2];
        static constexpr int nth(int i) { return i; }
        LRT_INLINE B64 at(int v) const { return tables[v / 4].lookup(codes.at(v) | place); }
    };
    static Scaled scaled_codes(const uint8_t* p, int step) {
        alignas(64) static const uint32_t rows[4] = {0x00000000, 0x04040404, 0x08080808, 0x0C0C0C0C};
        Scaled scaled = {codes(p + HEADER + step * STEP), B64::table(reinterpret_cast<const uint8_t*>(rows)), {}};
        const I16 pair = scales(p, step);
        for (int half = 0; half < 2; half++) {
            const I16 once = pair.shr(16 * half) & I16::set1(15), twice = once + once;
            scaled.tables[half] = (once.shl(8) | twice.shl(16) | (twice + once).shl(24)).as_bytes();
        }
        return scaled;
    }
};

// A symmetric layout with one half-precision scale in its head.
template <int MOST_, int SPAN_, int ZERO_, int STEP_> struct OneScale {
    static constexpr int MOST = MOST_, HALVES = 1, SPAN = SPAN_, ZERO = ZERO_;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 32, STEP = STEP_;
    struct Head { F16L scale; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p)}; }
    static F16L scale(const Head& head, const uint8_t*, int, int) { return head.scale; }
};

struct Ternary : OneScale<2, 256, 1, step_bytes(2)> {  // TQ2_0
    static StepCodes<2> codes(const uint8_t* p) { return {p}; }
};

// E2M1 times two, plus 12.
inline LookedUp e2m1_codes(const uint8_t* p) {
    alignas(16) static const uint8_t numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    return {p, numbers};
}

struct Mxfp4 : OneScale<24, 32, 12, step_bytes(4)> {  // E8M0 scales
    static constexpr int HEADER = 16;
    static Head open(const uint8_t* p) { return {F16L::bits(I16::load_u8(p).shl(23)) * F16L::set1(0.5f)}; }
    static LookedUp codes(const uint8_t* p) { return e2m1_codes(p); }
};

struct Nvfp4 {  // E4M3 scales, one for every 16 columns
    static constexpr int MOST = 24, HALVES = 2, SPAN = 32, ZERO = 12;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 32, STEP = step_bytes(4);
    struct Head { F16L scale[2]; };
    static Head open(const uint8_t* p) { return {{e4m3(p), e4m3(p + 16)}}; }
    // Half of a positive E4M3 value: as float32 bits, its exponent is 120 too small.
    static F16L e4m3(const uint8_t* p) { return F16L::bits(I16::load_u8(p).shl(20)) * F16L::set1(0x1p119f); }
    static LookedUp codes(const uint8_t* p) { return e2m1_codes(p); }
    static F16L scale(const Head& head, const uint8_t*, int, int half) { return head.scale[half]; }
};

// Levels rounded to 1/127: errors up to 0.4 % of the group's largest magnitude.
template <bool FLOATS> struct Nf4 : OneScale<255, 64, 128, step_bytes(4)> {
    static constexpr int HEADER = FLOATS ? 64 : 32;
    static Head open(const uint8_t* p) {
        return {(FLOATS ? F16L::load((const float*)p) : F16L::load_f16(p)) * F16L::set1(1.f / 127)};
    }
    static LookedUp codes(const uint8_t* p) {
        alignas(16) static const uint8_t numbers[16] = {1,   40,  61,  78,  92,  105, 116, 128,
                                                        138, 148, 159, 171, 184, 199, 220, 255};
        return {p, numbers};
    }
};

struct Fp4 : Nf4<true> {  // bitsandbytes' levels in units of 1/120: exact but for the smallest, 0.625 of one
    static constexpr int MOST = 248;
    static Head open(const uint8_t* p) { return {F16L::load((const float*)p) * F16L::set1(1.f / 120)}; }
    static LookedUp codes(const uint8_t* p) {
        alignas(16) static const uint8_t numbers[16] = {128, 129, 208, 248, 168, 188, 148, 158,
                                                        128, 127, 48,  8,   88,  68,  108, 98};
        return {p, numbers};
    }
};

// Levels of IQ4_NL and IQ4_XS, plus 128.
inline LookedUp iq4_codes(const uint8_t* p) {
    alignas(16) static const uint8_t numbers[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                                    129, 141, 153, 166, 181, 197, 217, 241};
    return {p, numbers};
}

struct Iq4Nl : OneScale<241, 32, 128, step_bytes(4)> {
    static LookedUp codes(const uint8_t* p) { return iq4_codes(p); }
};

// Eight six-bit values: five in a word, two in bytes, the last in the top bits of all three.
struct EightSixBit {
    I16 word, first, second;
    explicit EightSixBit(const uint8_t* p) : word(I16::load(p)), first(I16::load_u8(p + 64)), second(I16::load_u8(p + 80)) {}
    I16 operator[](int i) const {
        if (i == 7) return word.shr(30) | first.shr(6).shl(2) | second.shr(6).shl(4);
        return (i < 5 ? word.shr(6 * i) : i == 5 ? first : second) & I16::set1(63);
    }
};

struct Iq4Xs {  // six-bit scales around 32
    static constexpr int MOST = 241, HALVES = 1, SPAN = 256, ZERO = 128;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = 128, STEP = step_bytes(4);
    struct Head { F16L scale[8]; };
    static Head open(const uint8_t* p) {
        const F16L d = F16L::load_f16(p), middle = F16L::set1(-32.f);
        const EightSixBit six(p + 32);
        Head head;
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) head.scale[i] = d * (F16L::from(six[i]) + middle);
        return head;
    }
    static LookedUp codes(const uint8_t* p) { return iq4_codes(p); }
    static F16L scale(const Head& head, const uint8_t*, int step, int) { return head.scale[step]; }
};

// -- entries of codebooks ----------------------------------------------------------------------------

// The entries of a step's indices, plus ZERO.
template <int LAYOUT, int WIDTH, int INDEX_BITS> inline void entries(const uint8_t* indices, const uint8_t* high, B64* q) {
    static const LookUp wide = WIDE_LOOK_UP ? wide_look_up(WIDTH, INDEX_BITS) : nullptr;
    const Codebook& book = codebooks[LAYOUT - FIRST_CODEBOOK];
    alignas(64) uint8_t codes[8 * 64];
    (wide ? wide : look_up<WIDTH, INDEX_BITS>)(book, indices, high, codes);
    for (int v = 0; v < 8; v++) q[v] = B64::load(codes + 64 * v);
}

// If the eighth sign is implied, odd sign masks have room for four bits per row: bit 4 * row + i is the row's bit i.
inline uint64_t spare_bits(const uint8_t* signs) {
    uint64_t bits = 0;
    for (int i = 0; i < 4; i++) bits |= (mask64(signs + 8 + 16 * i) >> 3 & 0x1111111111111111ull) << i;
    return bits;
}

// Eight columns' signs; the eighth may be implied, as the number of negative ones is even.
template <bool SEVEN, int TWICE> inline void negate(const uint8_t* signs, B64* q) {
    for (int v = 0; v < 8; v += 2) {
        const uint64_t first = mask64(signs + 8 * v);
        uint64_t second = mask64(signs + 8 * v + 8);
        if (SEVEN) {
            second &= 0x7777777777777777ull;
            uint64_t odd = first ^ second;
            odd ^= odd >> 2 & 0x3333333333333333ull;
            odd ^= odd >> 1;
            second |= (odd & 0x1111111111111111ull) << 3;
        }
        q[v] = q[v].mirrored(first, TWICE);
        q[v + 1] = q[v + 1].mirrored(second, TWICE);
    }
}

// 2n + 1 times d.
inline F16L odd_times(F16L d, I16 n) { return d * F16L::from(n + n + I16::set1(1)); }

// Signed entries up to ZERO_; scales are in units of `EIGHTHS` of d.
template <int HALVES_, int ZERO_, int HEADER_, int STEP_, int EIGHTHS> struct Signed {
    static constexpr int MOST = 2 * ZERO_, HALVES = HALVES_, SPAN = 256, ZERO = ZERO_;
    static constexpr bool SYMMETRIC = true;
    static constexpr int HEADER = HEADER_, STEP = STEP_;
    struct Head { F16L d; };
    static Head open(const uint8_t* p) { return {F16L::load_f16(p) * F16L::set1(EIGHTHS / 8.f)}; }
    static const uint8_t* at(const uint8_t* tile, int step) { return tile + HEADER + step * STEP; }
    // The n-th nibble of words in the head.
    static I16 nibble(const uint8_t* tile, int n) { return I16::load(tile + 32 + 64 * (n / 8)).shr(4 * (n % 8)) & I16::set1(15); }
    template <int LAYOUT, int WIDTH, int INDEX_BITS, bool SEVEN>
    static LRT_INLINE Filled signed_entries(const uint8_t* indices, const uint8_t* high, const uint8_t* signs) {
        Filled codes;
        entries<LAYOUT, WIDTH, INDEX_BITS>(indices, high, codes.q);
        negate<SEVEN, MOST>(signs, codes.q);
        return codes;
    }
};

struct Iq3Xxs : Signed<1, 62, 32, 192, 2> {
    static Filled codes(const uint8_t* p) { return signed_entries<IQ3_XXS, 4, 8, true>(p, nullptr, p + 128); }
    static F16L scale(const Head& head, const uint8_t* tile, int step, int) {
        return odd_times(head.d, I16::nibbles(spare_bits(at(tile, step) + 128)));
    }
};

struct Iq3S : Signed<1, 15, 96, 208, 8> {
    static Filled codes(const uint8_t* p) { return signed_entries<IQ3_S, 4, 9, false>(p, p + 192, p + 128); }
    static F16L scale(const Head& head, const uint8_t* tile, int step, int) { return odd_times(head.d, nibble(tile, step)); }
};

struct Iq2Xxs : Signed<1, 43, 32, 128, 1> {
    static Filled codes(const uint8_t* p) { return signed_entries<IQ2_XXS, 8, 8, true>(p, nullptr, p + 64); }
    static F16L scale(const Head& head, const uint8_t* tile, int step, int) {
        return odd_times(head.d, I16::nibbles(spare_bits(at(tile, step) + 64)));
    }
};

struct Iq2Xs : Signed<2, 43, 160, 128, 1> {
    static Filled codes(const uint8_t* p) {
        const uint64_t high = spare_bits(p + 64);
        return signed_entries<IQ2_XS, 8, 9, true>(p, reinterpret_cast<const uint8_t*>(&high), p + 64);
    }
    static F16L scale(const Head& head, const uint8_t* tile, int step, int half) { return odd_times(head.d, nibble(tile, 2 * step + half)); }
};

struct Iq2S : Signed<2, 43, 160, 144, 1> {
    static Filled codes(const uint8_t* p) { return signed_entries<IQ2_S, 8, 10, false>(p, p + 128, p + 64); }
    static F16L scale(const Head& head, const uint8_t* tile, int step, int half) { return odd_times(head.d, nibble(tile, 2 * step + half)); }
};

// Entries from -1 to 1 in eighths, plus 1, or minus 1 if an entry's bit is set: bit 4 * row + i for entry i.
inline void shift(uint64_t less, B64* q) {
    for (int i = 0; i < 4; i++) {
        const uint64_t more = (~less >> i & 0x1111111111111111ull) * 15;
        q[2 * i] = q[2 * i].with_bits(more, 2);
        q[2 * i + 1] = q[2 * i + 1].with_bits(more, 2);
    }
}

struct Iq1S : Signed<1, 9, 32, 96, 1> {  // a row's scale and sign are four bits of a mask
    static Filled codes(const uint8_t* p) {
        Filled codes;
        entries<IQ1_S, 8, 11>(p, p + 64, codes.q);
        shift((mask64(p + 88) >> 3 & 0x1111111111111111ull) * 15, codes.q);
        return codes;
    }
    static F16L scale(const Head& head, const uint8_t* tile, int step, int) {
        return odd_times(head.d, I16::nibbles(mask64(at(tile, step) + 88)) & I16::set1(7));
    }
};

struct Iq1M : Signed<2, 9, 128, 96, 1> {  // pairs of scales, stored like IQ4_XS's six bits
    static Filled codes(const uint8_t* p) {
        Filled codes;
        entries<IQ1_M, 8, 11>(p, p + 64, codes.q);
        shift(mask64(p + 88), codes.q);
        return codes;
    }
    static F16L scale(const Head& head, const uint8_t* tile, int step, int half) {
        return odd_times(head.d, EightSixBit(tile + 32)[step].shr(3 * half) & I16::set1(7));
    }
};

// Whether scales have at most 22 significant bits, so that products with 3 * 2^n are exact.
template <class Layout> constexpr bool SHORT_SCALES = true;
template <int BITS> constexpr bool SHORT_SCALES<ZeroPoints<BITS>> = false;
template <bool FLOATS> constexpr bool SHORT_SCALES<Nf4<FLOATS>> = false;
template <> constexpr bool SHORT_SCALES<Fp4> = false;

// Column i of the four E4M3 codes in each of sixteen words; as float32 bits, exponents are 120 too small.
template <int I> inline F16L e4m3_column(I16 words) {
    const I16 top = words.shl(24 - 8 * I);
    return F16L::bits((top & I16::set1(INT32_MIN)) | (top.shr(4) & I16::set1(0x07F00000))) * F16L::set1(0x1p120f);
}

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
