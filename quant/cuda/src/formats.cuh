// The packed formats of quant/formats/tiled.py. A format is a struct that unpacks a lane's words of a step
// (four rows of eight columns) to operands of the integer product and reads a row's scale; nothing else in
// these kernels depends on the format. In a step (32 columns of a tile of 16 rows) a lane has rows 4q to 4q +
// 3 and columns 4t to 4t + 3 and 16 + 4t to 16 + 4t + 3. Signed codes are in the upper bits of their bytes,
// so that their zero point is the sign bit: sums are 2 ** (8 - bits) times too large, which UNIT corrects.
#pragma once
#include "device.cuh"

struct Lane {
    int g, t, q;  // below 8, 4 and 4

    FN Lane make(int lane) {
        Lane l;
        l.g = lane >> 2, l.t = lane & 3, l.q = l.g & 3;
        return l;
    }
};

FN u32 word(const uint4& v, int row) { return row == 0 ? v.x : row == 1 ? v.y : row == 2 ? v.z : v.w; }

// -- codes -----------------------------------------------------------------------------------------

// Integers of 4, 5, 6 or 8 bits. `ZERO` is subtracted by means of the sum of x, at no cost; if the halves of
// a step would need two sums, codes of 6 bits are SIGNED around the middle of their range.
template <int BITS_, int ZERO_, bool SIGNED_ = false>
struct Whole {
    static_assert(!SIGNED_ || BITS_ == 6);
    static constexpr int BITS = BITS_, ZERO = ZERO_, PLANES = 1, STEP = 64 * BITS;
    static constexpr bool SIGNED = SIGNED_, MIXED = false;
    static constexpr float UNIT = SIGNED ? 1.f / (1 << (8 - BITS)) : 1.f;
    uint4 low, high[2];
    u32 fifth[2];

    FN void load(Whole& w, const u8* step, const Lane& lane) {
        w.low = load_streamed((const uint4*)(step + lane.t * 64 + lane.q * 16));
        if constexpr (BITS == 8) w.high[0] = load_streamed((const uint4*)(step + 256 + lane.t * 64 + lane.q * 16));
        if constexpr (BITS == 6)
            for (int h = 0; h < 2; h++) w.high[h] = *(const uint4*)(step + 256 + h * 64 + lane.q * 16);
        if constexpr (BITS == 5)
            for (int h = 0; h < 2; h++) w.fifth[h] = *(const u16*)(step + 256 + (4 * h + lane.t) * 8 + lane.q * 2);
    }

    // A row's columns 4t to 4t + 3 and 16 + 4t to 16 + 4t + 3.
    FN void operands(const Whole& w, const Lane& lane, int row, int plane, u32& a, u32& b) {
        const u32 codes = word(w.low, row);
        if constexpr (BITS == 8) {
            a = codes, b = word(w.high[0], row);
        } else if constexpr (BITS == 4) {
            a = codes & 0x0F0F0F0Fu;
            b = codes >> 4 & 0x0F0F0F0Fu;
        } else if constexpr (BITS == 5) {
            // Spreads four bits to the tops of four bytes: the partial products do not overlap.
            constexpr u32 spread = 0x02040810u, top = 0x10101010u;
            const u32 fa = (w.fifth[0] >> 4 * row & 15) * spread & top;
            const u32 fb = (w.fifth[1] >> 4 * row & 15) * spread & top;
            a = (codes & 0x0F0F0F0Fu) | fa;
            b = (codes >> 4 & 0x0F0F0F0Fu) | fb;
        } else {
            constexpr u32 middle = 0x80808080u;
            const u32 fa = word(w.high[0], row) >> 2 * lane.t, fb = word(w.high[1], row) >> 2 * lane.t;
            a = SIGNED ? ((codes << 2 & 0x3C3C3C3Cu) | (fa << 6 & 0xC0C0C0C0u)) ^ middle
                       : (codes & 0x0F0F0F0Fu) | (fa << 4 & 0x30303030u);
            b = SIGNED ? ((codes >> 2 & 0x3C3C3C3Cu) | (fb << 6 & 0xC0C0C0C0u)) ^ middle
                       : (codes >> 4 & 0x0F0F0F0Fu) | (fb << 4 & 0x30303030u);
        }
    }
};

// Integers of 2 or 3 bits.
template <int BITS_, int ZERO_, bool SIGNED_ = false>
struct Pairs {
    static constexpr int BITS = BITS_, ZERO = ZERO_, PLANES = 1, STEP = 64 * BITS;
    static constexpr bool SIGNED = SIGNED_, MIXED = false;
    static constexpr float UNIT = SIGNED ? 1.f / (1 << (8 - BITS)) : 1.f;
    uint4 pairs[2];
    u32 third[2];

    FN void load(Pairs& w, const u8* step, const Lane& lane) {
        for (int h = 0; h < 2; h++) {
            w.pairs[h] = load_streamed((const uint4*)(step + h * 64 + lane.q * 16));
            if constexpr (BITS == 3) w.third[h] = *(const u16*)(step + 128 + (4 * h + lane.t) * 8 + lane.q * 2);
        }
    }

    FN u32 half(const Pairs& w, const Lane& lane, int row, int h) {
        const u32 two = word(w.pairs[h], row) >> 2 * lane.t;
        u32 codes = SIGNED ? two << (8 - BITS) & 0x03030303u << (8 - BITS) : two & 0x03030303u;
        if constexpr (BITS == 3) {
            constexpr u32 spread = SIGNED ? 0x10204080u : 0x00810204u, top = SIGNED ? 0x80808080u : 0x04040404u;
            codes |= (w.third[h] >> 4 * row & 15) * spread & top;
        }
        return SIGNED ? codes ^ 0x80808080u : codes;
    }

    FN void operands(const Pairs& w, const Lane& lane, int row, int plane, u32& a, u32& b) {
        a = half(w, lane, row, 0), b = half(w, lane, row, 1);
    }
};

// Sixteen levels from two tables of magnitudes: codes below 8 are in one plane, the others in another; the
// plane `NEGATIVE` is multiplied by -x. A code of the other plane gives 0, since `pick` then replicates a
// magnitude's sign bit, which is 0. Columns are in byte order: 4t, 16 + 4t, 4t + 1, ...
template <u32 L0, u32 L1, u32 H0, u32 H1, int NEGATIVE_>
struct Levels {
    static constexpr int ZERO = 0, PLANES = 2, NEGATIVE = NEGATIVE_, STEP = 256;
    static constexpr bool SIGNED = true, MIXED = true;
    uint4 low;

    FN void load(Levels& w, const u8* step, const Lane& lane) {
        w.low = load_streamed((const uint4*)(step + lane.t * 64 + lane.q * 16));
    }

    FN void operands(const Levels& w, const Lane&, int row, int plane, u32& a, u32& b) {
        const u32 codes = plane ? word(w.low, row) ^ 0x88888888u : word(w.low, row);
        a = plane ? pick(H0, H1, codes) : pick(L0, L1, codes);
        b = plane ? pick(H0, H1, codes >> 16) : pick(L0, L1, codes >> 16);
    }
};

struct E2m1 : Levels<0x03020100u, 0x0C080604u, 0x03020100u, 0x0C080604u, 1> {
    static constexpr float UNIT = 0.5f;
};

// NF4's levels in multiples of 1/127: within 0.4 % of a group's largest magnitude, as on the CPU.
struct Nf4 : Levels<0x3243587Fu, 0x000C1724u, 0x2B1F140Au, 0x7F5C4738u, 0> {
    static constexpr float UNIT = 1.f / 127;
};

// bitsandbytes' FP4 in multiples of 1/120: exact but for the smallest level, 0.625 of one, as on the CPU.
struct Fp4 : Levels<0x78500100u, 0x1E143C28u, 0x78500100u, 0x1E143C28u, 1> {
    static constexpr float UNIT = 1.f / 120;
};

struct Iq4 : Levels<0x4153687Fu, 0x0A162331u, 0x26190D01u, 0x71594535u, 0> {
    static constexpr float UNIT = 1;
};

// Codebook entries, ENTRIES: a word has four columns. See quant/formats/codebook.py; in a step, the indices'
// low bytes come first, signs begin at `SIGNS`, and the indices' high bits at `HIGH`.
#ifdef ENTRIES
TABLE u32 entry_words[] = ENTRIES;
#endif

template <int WIDTH, int PLANES_>
struct Indices {
    static constexpr int VECTORS = 8 / WIDTH;
    uint4 low[VECTORS];
    u32 high[PLANES_ ? PLANES_ * VECTORS : 1];  // four bits per row

    FN void load(Indices& x, const u8* step, const u8* high, const Lane& lane) {
        for (int i = 0; i < VECTORS; i++) x.low[i] = load_streamed((const uint4*)(step + i * 64 + lane.q * 16));
        for (int i = 0; i < PLANES_ * VECTORS; i++) x.high[i] = *(const u16*)(high + 8 * i + 2 * lane.q);
    }

    // The word of a row's entry with columns 4t to 4t + 3 of the step's `half`.
    FN u32 entry(const Indices& x, const Lane& lane, int row, int half, u32 more = 0) {
        const int at = WIDTH == 8 ? 2 * half + lane.t / 2 : lane.t, vector = WIDTH == 8 ? 0 : half;
        u32 index = word(x.low[vector], row) >> 8 * at & 255;
        for (int i = 0; i < PLANES_; i++) index |= (x.high[i * VECTORS + vector] >> (4 * row + at) & 1) << (8 + i);
#ifdef ENTRIES
        return entry_words[WIDTH == 8 ? 2 * (index | more) + (lane.t & 1) : index | more];
#else
        return index;
#endif
    }
};

// Sign masks of each eighth of a step: four bits per row. With SEVEN, odd eighths store no sign for their
// last column: the number of negative signs is even, and that bit has another use.
template <bool SEVEN>
struct SignMasks {
    u32 own[2], spare[2];

    FN void load(SignMasks& s, const u8* signs, const Lane& lane) {
        for (int h = 0; h < 2; h++) {
            const u8* at = signs + 32 * h + 2 * lane.q;
            if constexpr (SEVEN) {
                const u32 even = *(const u16*)(at + 8 * (lane.t & 2)), odd = *(const u16*)(at + 8 * (lane.t | 1));
                u32 count = even ^ (odd & 0x7777u);
                count ^= count >> 2 & 0x3333u, count ^= count >> 1;
                s.own[h] = lane.t & 1 ? (odd & 0x7777u) | (count & 0x1111u) << 3 : even;
                s.spare[h] = odd >> 3;
            } else {
                s.own[h] = *(const u16*)(at + 8 * lane.t);
            }
        }
    }
    // Applies signs to bytes above 0: negating one does not carry into the next.
    FN u32 apply(const SignMasks& s, int row, int half, u32 numbers) {
        const u32 tops = (s.own[half] >> 4 * row & 15) * 0x10204080u & 0x80808080u;
        return (numbers ^ pick(tops, tops, 0xBA98)) + (tops >> 7);
    }
};

// IQ3 and IQ2. NINTH: bit 8 of an index is in the place of an omitted sign.
template <int WIDTH, int PLANES_, bool SEVEN, bool NINTH, int EIGHTHS>
struct SignedEntries {
    static constexpr int ZERO = 0, PLANES = 1, LOW = 8 / WIDTH * 64, STEP = LOW + 64 + PLANES_ * 8 * (8 / WIDTH);
    static constexpr bool SIGNED = true, MIXED = false;
    static constexpr float UNIT = EIGHTHS / 8.f;
    Indices<WIDTH, PLANES_> indices;
    SignMasks<SEVEN> signs;

    FN void load(SignedEntries& w, const u8* step, const Lane& lane) {
        w.indices.load(w.indices, step, step + LOW + 64, lane);
        w.signs.load(w.signs, step + LOW, lane);
    }
    FN u32 half(const SignedEntries& w, const Lane& lane, int row, int h) {
        const u32 more = NINTH ? (w.signs.spare[h] >> 4 * row & 1) << 8 : 0;
        return w.signs.apply(w.signs, row, h, w.indices.entry(w.indices, lane, row, h, more));
    }
    FN void operands(const SignedEntries& w, const Lane& lane, int row, int plane, u32& a, u32& b) {
        a = half(w, lane, row, 0), b = half(w, lane, row, 1);
    }
};

// IQ1: 8 times -1, 0 or 1, minus or plus 1: the same for a whole row, or with EACH for each entry.
// `entry_words` have the codes for minus 1, plus 119.
template <bool EACH>
struct ShiftedEntries {
    static constexpr int ZERO = 0, PLANES = 1, STEP = 96;
    static constexpr bool SIGNED = true, MIXED = false;
    static constexpr float UNIT = 0.125f;
    Indices<8, 3> indices;
    u32 less;

    FN void load(ShiftedEntries& w, const u8* step, const Lane& lane) {
        w.indices.load(w.indices, step, step + 64, lane);
        w.less = *(const u16*)(step + 88 + 2 * lane.q);
    }
    FN u32 half(const ShiftedEntries& w, const Lane& lane, int row, int h) {
        const int at = 4 * row + (EACH ? 2 * h + lane.t / 2 : 3);
        const u32 more = w.less >> at & 1 ? 0 : 0x02020202u;
        return (w.indices.entry(w.indices, lane, row, h) + more) ^ 0x80808080u;
    }
    FN void operands(const ShiftedEntries& w, const Lane& lane, int row, int plane, u32& a, u32& b) {
        a = half(w, lane, row, 0), b = half(w, lane, row, 1);
    }
};

// -- scales ----------------------------------------------------------------------------------------

// For ROWS rows: the lane's four, or if it has only one result row, row 4q + t.

template <int ROWS>
struct Halves {  // float16
    uint2 four;
    u16 one;

    FN void load(Halves& h, const u8* at, const Lane& lane) {
        if constexpr (ROWS == 4) h.four = *(const uint2*)(at + lane.q * 8);
        if constexpr (ROWS == 1) h.one = *(const u16*)(at + lane.q * 8 + lane.t * 2);
    }
    FN float of(const Halves& h, int row) {
        if constexpr (ROWS == 1) return half_to_float(h.one);
        const float2 two = two_halves(row < 2 ? h.four.x : h.four.y);
        return row & 1 ? two.y : two.x;
    }
};

template <int ROWS>
struct Bytes {
    u32 four;

    FN void load(Bytes& b, const u8* at, const Lane& lane) {
        if constexpr (ROWS == 4) b.four = *(const u32*)(at + lane.q * 4);
        if constexpr (ROWS == 1) b.four = at[lane.q * 4 + lane.t];
    }
    // Byte `row` shifted left by `shift`; other bytes are not masked off.
    FN u32 of(const Bytes& b, int row, int shift) {
        const int by = shift - 8 * row;
        return by >= 0 ? b.four << by : b.four >> -by;
    }
};

template <int ROWS>
struct Words {
    uint4 four;
    u32 one;

    FN void load(Words& w, const u8* at, const Lane& lane) {
        if constexpr (ROWS == 4) w.four = *(const uint4*)(at + lane.q * 16);
        if constexpr (ROWS == 1) w.one = *(const u32*)(at + lane.q * 16 + lane.t * 4);
    }
    FN u32 of(const Words& w, int row) { return ROWS == 1 ? w.one : word(w.four, row); }
};

// HEAD: the bytes of a span's scales. TWO_LEVEL: integers times the span's scale. HALVES: two for each step.
template <int HEAD_, bool MINIMUM_ = false, bool TWO_LEVEL_ = false, bool HALVES_ = false>
struct Scale {
    static constexpr bool MINIMUM = MINIMUM_, TWO_LEVEL = TWO_LEVEL_, HALVES = HALVES_;
    static constexpr int HEAD = HEAD_;
    static constexpr float UNIT = 1;
};

template <int ROWS>
struct HalfScale : Scale<32> {  // a float16 for a span
    Halves<ROWS> scales;

    FN void load(HalfScale& s, const u8* head, const Lane& lane) { s.scales.load(s.scales, head, lane); }
    FN float of(const HalfScale& s, int row, int) { return s.scales.of(s.scales, row); }
    FN float exact(const HalfScale& s, int row, int half) { return of(s, row, half); }
};

template <int ROWS>
struct HalfScaleAndMinimum : Scale<64, true> {
    Halves<ROWS> scales, minima;

    FN void load(HalfScaleAndMinimum& s, const u8* head, const Lane& lane) {
        s.scales.load(s.scales, head, lane);
        s.minima.load(s.minima, head + 32, lane);
    }
    FN float of(const HalfScaleAndMinimum& s, int row, int) { return s.scales.of(s.scales, row); }
    FN float exact(const HalfScaleAndMinimum& s, int row, int half) { return of(s, row, half); }
    FN float minimum_of(const HalfScaleAndMinimum& s, int row) { return s.minima.of(s.minima, row); }
};

template <int ROWS>
struct BrainScaleAndMinimum : HalfScaleAndMinimum<ROWS> {  // the same in bfloat16, the upper half of a float
    FN float brain(const Halves<ROWS>& h, int row) {
        if constexpr (ROWS == 1) return as_float((u32)h.one << 16);
        const u32 two = row < 2 ? h.four.x : h.four.y;
        return as_float(row & 1 ? two & 0xFFFF0000u : two << 16);
    }
    FN float of(const BrainScaleAndMinimum& s, int row, int) { return brain(s.scales, row); }
    FN float exact(const BrainScaleAndMinimum& s, int row, int half) { return of(s, row, half); }
    FN float minimum_of(const BrainScaleAndMinimum& s, int row) { return brain(s.minima, row); }
};

template <int ROWS>
struct FloatScale : Scale<64> {  // a float for a span
    Words<ROWS> scales;

    FN void load(FloatScale& s, const u8* head, const Lane& lane) { s.scales.load(s.scales, head, lane); }
    FN float of(const FloatScale& s, int row, int) { return as_float(s.scales.of(s.scales, row)); }
    FN float exact(const FloatScale& s, int row, int half) { return of(s, row, half); }
};

template <int ROWS>
struct FloatScaleAndZero : Scale<80, true> {  // a float scale, and a zero point in a byte
    FloatScale<ROWS> scales;
    Bytes<ROWS> zeros;

    FN void load(FloatScaleAndZero& s, const u8* head, const Lane& lane) {
        s.scales.load(s.scales, head, lane);
        s.zeros.load(s.zeros, head + 64, lane);
    }
    FN float of(const FloatScaleAndZero& s, int row, int half) { return s.scales.of(s.scales, row, half); }
    FN float exact(const FloatScaleAndZero& s, int row, int half) { return of(s, row, half); }
    FN float minimum_of(const FloatScaleAndZero& s, int row) {
        return -times(of(s, row, 0), from_int((i32)(s.zeros.of(s.zeros, row, 0) & 255)));
    }
};

template <int ROWS>
struct E8m0Scale : Scale<16> {  // a power of two
    Bytes<ROWS> bytes;

    FN void load(E8m0Scale& s, const u8* head, const Lane& lane) { s.bytes.load(s.bytes, head, lane); }
    // A byte is the exponent of a float; 2 ** -127, a subnormal, becomes 0.
    FN float of(const E8m0Scale& s, int row, int) { return as_float(s.bytes.of(s.bytes, row, 23) & 0x7F800000u); }
    FN float exact(const E8m0Scale& s, int row, int half) {
        const float scale = of(s, row, half);
        return scale == 0 ? as_float(0x00400000u) : scale;
    }
};

template <int ROWS>
struct E4m3Scale : Scale<32, false, false, true> {  // one per 16 columns, never negative
    static constexpr float UNIT = E4M3_UNIT;
    Bytes<ROWS> bytes[2];

    FN void load(E4m3Scale& s, const u8* head, const Lane& lane) {
        for (int h = 0; h < 2; h++) s.bytes[h].load(s.bytes[h], head + 16 * h, lane);
    }
    FN float of(const E4m3Scale& s, int row, int half) {
        const float2 two = two_halves(two_e4m3(row < 2 ? s.bytes[half].four : s.bytes[half].four >> 16));
        return row & 1 ? two.y : two.x;
    }
    FN float exact(const E4m3Scale& s, int row, int half) { return of(s, row, half); }
};

// The i-th of sixteen 6-bit values: five per word, and the last one in the words' top bits.
template <int ROWS>
FN i32 six_bits(const Words<ROWS> (&w)[3], int row, int i) {
    if (i < 15) return w[i / 5].of(w[i / 5], row) >> 6 * (i % 5) & 63;
    return (w[0].of(w[0], row) >> 30) | (w[1].of(w[1], row) >> 30 << 2) | (w[2].of(w[2], row) >> 30 << 4);
}

// Q4_K and Q5_K: a 6-bit scale and minimum per step, times the span's two float16.
template <int ROWS>
struct SixBitScales : Scale<256, true, true> {
    Halves<ROWS> d, dmin;
    Words<ROWS> words[3];

    FN void load(SixBitScales& s, const u8* head, const Lane& lane) {
        s.d.load(s.d, head, lane);
        s.dmin.load(s.dmin, head + 32, lane);
        for (int i = 0; i < 3; i++) s.words[i].load(s.words[i], head + 64 + i * 64, lane);
    }
    FN i32 scale(const SixBitScales& s, int row, int step, int) { return six_bits(s.words, row, step); }
    FN i32 minimum(const SixBitScales& s, int row, int step) { return six_bits(s.words, row, 8 + step); }
    FN float outer(const SixBitScales& s, int row) { return s.d.of(s.d, row); }
    FN float outer_minimum(const SixBitScales& s, int row) { return -s.dmin.of(s.dmin, row); }
};

// Q3_K: a 6-bit scale, offset by 32, per 16 columns, times the span's float16.
template <int ROWS>
struct SixBitHalves : Scale<224, false, true, true> {
    Halves<ROWS> d;
    Words<ROWS> words[3];

    FN void load(SixBitHalves& s, const u8* head, const Lane& lane) {
        s.d.load(s.d, head, lane);
        for (int i = 0; i < 3; i++) s.words[i].load(s.words[i], head + 32 + i * 64, lane);
    }
    FN i32 scale(const SixBitHalves& s, int row, int step, int half) { return six_bits(s.words, row, 2 * step + half) - 32; }
    FN float outer(const SixBitHalves& s, int row) { return s.d.of(s.d, row); }
};

// IQ4_XS: the same per step; five in a word, two in bytes, and the last one in the top bits of those.
template <int ROWS>
struct SixBitSteps : Scale<128, false, true> {
    Halves<ROWS> d;
    Words<ROWS> first;
    Bytes<ROWS> bytes[2];

    FN void load(SixBitSteps& s, const u8* head, const Lane& lane) {
        s.d.load(s.d, head, lane);
        s.first.load(s.first, head + 32, lane);
        for (int i = 0; i < 2; i++) s.bytes[i].load(s.bytes[i], head + 96 + i * 16, lane);
    }
    FN i32 scale(const SixBitSteps& s, int row, int step, int) {
        if (step < 5) return (i32)(s.first.of(s.first, row) >> 6 * step & 63) - 32;
        const u32 a = s.bytes[0].of(s.bytes[0], row, 0), b = s.bytes[1].of(s.bytes[1], row, 0);
        if (step < 7) return (i32)((step == 5 ? a : b) & 63) - 32;
        return (i32)((s.first.of(s.first, row) >> 30) | (a >> 6 & 3) << 2 | (b >> 6 & 3) << 4) - 32;
    }
    FN float outer(const SixBitSteps& s, int row) { return s.d.of(s.d, row); }
};

// Q6_K: a signed byte per 16 columns, times the span's float16.
template <int ROWS>
struct ByteScales : Scale<288, false, true, true> {
    Halves<ROWS> d;
    Bytes<ROWS> bytes[16];

    FN void load(ByteScales& s, const u8* head, const Lane& lane) {
        s.d.load(s.d, head, lane);
        for (int i = 0; i < 16; i++) s.bytes[i].load(s.bytes[i], head + 32 + i * 16, lane);
    }
    FN i32 scale(const ByteScales& s, int row, int step, int half) {
        const Bytes<ROWS>& b = s.bytes[2 * step + half];
        return (i32)b.of(b, row, 24) >> 24;
    }
    FN float outer(const ByteScales& s, int row) { return s.d.of(s.d, row); }
};

// Q2_K: a byte's nibbles are a scale and a minimum per 16 columns, times the span's two float16. Minima are
// operands of a separate product, so they are loaded for all rows, whatever row the lane's result has.
template <int ROWS>
struct NibbleHalves : Scale<320, true, true, true> {
    Halves<ROWS> d, dmin;
    Bytes<4> bytes[16];
    int first;

    FN void load(NibbleHalves& s, const u8* head, const Lane& lane) {
        s.d.load(s.d, head, lane);
        s.dmin.load(s.dmin, head + 32, lane);
        for (int i = 0; i < 16; i++) s.bytes[i].load(s.bytes[i], head + 64 + i * 16, lane);
        s.first = ROWS == 1 ? 8 * lane.t : 0;
    }
    FN i32 scale(const NibbleHalves& s, int row, int step, int half) {
        return s.bytes[2 * step + half].four >> (s.first + 8 * row) & 15;
    }
    FN i32 minimum(const NibbleHalves& s, int row, int step, int half) {
        return s.bytes[2 * step + half].four >> (s.first + 8 * row + 4) & 15;
    }
    FN u32 minima(const NibbleHalves& s, int row, int step, int half) {
        const u32 high = s.bytes[2 * step + half].four >> 4 & 0x0F0F0F0Fu;
        return pick(high, 0, row * 0x1111u);
    }
    FN float outer(const NibbleHalves& s, int row) { return s.d.of(s.d, row); }
    FN float outer_minimum(const NibbleHalves& s, int row) { return -s.dmin.of(s.dmin, row); }
};

// Codebooks' scales: 2 n + 1 times the span's float16.
template <int ROWS, bool HALVES_, int HEAD_>
struct OddScales : Scale<HEAD_, false, true, HALVES_> {
    Halves<ROWS> d;
    FN float outer(const OddScales& s, int row) { return s.d.of(s.d, row); }
};

// n: four bits of the head's words, per step for IQ3_S, per half step for IQ2_XS and IQ2_S.
template <int ROWS, bool HALVES_>
struct NibbleScales : OddScales<ROWS, HALVES_, HALVES_ ? 160 : 96> {
    static constexpr int WORDS = HALVES_ ? 2 : 1;
    Words<ROWS> words[WORDS];

    FN void load(NibbleScales& s, const u8* head, const Lane& lane) {
        s.d.load(s.d, head, lane);
        for (int i = 0; i < WORDS; i++) s.words[i].load(s.words[i], head + 32 + 64 * i, lane);
    }
    FN i32 scale(const NibbleScales& s, int row, int step, int half) {
        const int n = HALVES_ ? 2 * step + half : step;
        return 2 * (i32)(s.words[n / 8].of(s.words[n / 8], row) >> 4 * (n % 8) & 15) + 1;
    }
};
template <int ROWS>
using StepNibbles = NibbleScales<ROWS, false>;
template <int ROWS>
using HalfNibbles = NibbleScales<ROWS, true>;

// n is in the steps, four bits per row: in the places of omitted signs for IQ3_XXS and IQ2_XXS, in a mask of
// its own for IQ1_S, whose n is three of the bits.
template <int ROWS, int STEP, int AT, bool SPARE>
struct MaskScales : OddScales<ROWS, false, 32> {
    u32 four[8];
    int first;

    FN void load(MaskScales& s, const u8* head, const Lane& lane) {
        s.d.load(s.d, head, lane);
        s.first = ROWS == 1 ? 4 * lane.t : 0;
        for (int j = 0; j < 8; j++) {
            const u8* at = head + 32 + j * STEP + AT + 2 * lane.q;
            if constexpr (SPARE) {
                s.four[j] = 0;
                for (int i = 0; i < 4; i++) s.four[j] |= (u32)(*(const u16*)(at + 8 + 16 * i) >> 3 & 0x1111) << i;
            } else {
                s.four[j] = *(const u16*)at;
            }
        }
    }
    FN i32 scale(const MaskScales& s, int row, int step, int) {
        return 2 * (i32)(s.four[step] >> (s.first + 4 * row) & (SPARE ? 15 : 7)) + 1;
    }
};
template <int ROWS>
using Iq3XxsScales = MaskScales<ROWS, 192, 128, true>;
template <int ROWS>
using Iq2XxsScales = MaskScales<ROWS, 128, 64, true>;
template <int ROWS>
using Iq1SScales = MaskScales<ROWS, 96, 88, false>;

// IQ1_M: n are pairs of 3-bit values, stored like IQ4_XS's scales.
template <int ROWS>
struct PairScales : OddScales<ROWS, true, 128> {
    SixBitSteps<ROWS> pairs;

    FN void load(PairScales& s, const u8* head, const Lane& lane) {
        s.d.load(s.d, head, lane);
        s.pairs.load(s.pairs, head, lane);
    }
    FN i32 scale(const PairScales& s, int row, int step, int half) {
        return 2 * ((s.pairs.scale(s.pairs, row, step, 0) + 32) >> 3 * half & 7) + 1;
    }
};

// For two-level formats: the scale and the minimum of a row's codes in a step or half step.
template <class Scales>
FN float scale_in(const Scales& scales, int row, int step, int half) {
    return times(Scales::outer(scales, row), from_int(Scales::scale(scales, row, step, half)));
}
template <class Scales>
FN float minimum_in(const Scales& scales, int row, int step) {
    return times(Scales::outer_minimum(scales, row), from_int(Scales::minimum(scales, row, step)));
}

// -- a format --------------------------------------------------------------------------------------

template <class CODES, template <int> class SCALES, int SPAN_>
struct Packed {
    using Codes = CODES;
    template <int ROWS>
    using Scales = SCALES<ROWS>;
    static constexpr int SPAN = SPAN_;  // steps per span
    static constexpr int HEAD = SCALES<4>::HEAD, STEP = CODES::STEP, BYTES = HEAD + SPAN * STEP;
    static constexpr float SCALE_UNIT = SCALES<4>::UNIT, UNIT = CODES::UNIT * SCALE_UNIT;
};
