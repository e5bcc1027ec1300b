// Sixteen lanes in four 128-bit registers. Needs AArch64 with the dot product instructions; with LRT_I8MM, also those for
// matrices of bytes and for bf16.
#pragma once
#include <arm_neon.h>
#include <cstdint>

inline namespace LRT_SPACE {

#define LRT_PANEL_ROWS (LRT_I8MM ? 4 : 3)
constexpr int PANEL_ROWS = LRT_PANEL_ROWS, PANEL_TILES = 1, ROW_CHUNK = 384, DIRECT_ROWS = 4;
constexpr int code_class(int most) { return most <= 127 ? 127 : 255; }  // class of code widths that share kernels
constexpr int chains(int) { return 1; }  // chains of sums
constexpr bool WIDE_LOOK_UP = false;  // for codebook entries
constexpr bool wraps(int, int) { return false; }
constexpr bool FLOAT_SUMS = false;
constexpr int QUERIES = 4, ATTENTION_SUMS = 4;

struct I16 {
    int32x4_t v[4];
    template <class Fn> static I16 each(Fn fn) { return {{fn(0), fn(1), fn(2), fn(3)}}; }
    static I16 zero() { return set1(0); }
    static I16 set1(int32_t x) { return each([=](int) { return vdupq_n_s32(x); }); }
    static I16 load(const void* p) { return each([=](int i) { return vreinterpretq_s32_u8(vld1q_u8((const uint8_t*)p + 16 * i)); }); }
    static I16 load_i8(const void* p) {
        const int8x16_t b = vld1q_s8((const int8_t*)p);
        const int16x8_t low = vmovl_s8(vget_low_s8(b)), high = vmovl_s8(vget_high_s8(b));
        return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)), vmovl_s16(vget_high_s16(high))}};
    }
    // 32 bytes as 16-bit halves.
    static I16 load_i8_halves(const void* p) {
        return each([=](int i) { return vreinterpretq_s32_s16(vmovl_s8(vld1_s8((const int8_t*)p + 8 * i))); });
    }
    static I16 load_u8(const void* p) {
        const uint8x16_t b = vld1q_u8((const uint8_t*)p);
        const uint16x8_t low = vmovl_u8(vget_low_u8(b)), high = vmovl_u8(vget_high_u8(b));
        return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
                 vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))), vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
    }
    I16 operator+(I16 o) const { return each([&](int i) { return vaddq_s32(v[i], o.v[i]); }); }
    I16 operator&(I16 o) const { return each([&](int i) { return vandq_s32(v[i], o.v[i]); }); }
    I16 operator|(I16 o) const { return each([&](int i) { return vorrq_s32(v[i], o.v[i]); }); }
    I16 shl(int n) const { return each([&](int i) { return vshlq_s32(v[i], vdupq_n_s32(n)); }); }
    I16 shr(int n) const {
        return each([&](int i) { return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(v[i]), vdupq_n_s32(-n))); });
    }
    // Sum of the products of a lane's two 16-bit halves, alone and added to `sum`.
    I16 dot2(I16 o) const {
        return each([&](int i) {
            const int16x8_t a = vreinterpretq_s16_s32(v[i]), b = vreinterpretq_s16_s32(o.v[i]);
            return vpaddq_s32(vmull_s16(vget_low_s16(a), vget_low_s16(b)), vmull_high_s16(a, b));
        });
    }
    I16 dot2(I16 o, I16 sum) const { return sum + dot2(o); }
    inline struct B64 as_bytes() const;
    // Sixteen four-bit values.
    static I16 nibbles(uint64_t x) {
        const int32_t down[4] = {0, -4, -8, -12};
        const int32x4_t shifts = vld1q_s32(down);
        return each([&](int i) {
            const uint32x4_t four = vdupq_n_u32((uint32_t)(x >> 16 * i & 0xFFFF));
            return vreinterpretq_s32_u32(vandq_u32(vshlq_u32(four, shifts), vdupq_n_u32(15)));
        });
    }
    void store_i8(int8_t* p) const {
        const int16x8_t low = vcombine_s16(vqmovn_s32(v[0]), vqmovn_s32(v[1])), high = vcombine_s16(vqmovn_s32(v[2]), vqmovn_s32(v[3]));
        vst1q_s8(p, vcombine_s8(vqmovn_s16(low), vqmovn_s16(high)));
    }
    int32_t sum() const { return vaddvq_s32(vaddq_s32(vaddq_s32(v[0], v[1]), vaddq_s32(v[2], v[3]))); }
};

struct F16L {
    float32x4_t v[4];
    template <class Fn> static F16L each(Fn fn) { return {{fn(0), fn(1), fn(2), fn(3)}}; }
    static F16L zero() { return set1(0); }
    static F16L set1_shared(const float* p) { return set1(*p); }
    static F16L set1(float x) { return each([=](int) { return vdupq_n_f32(x); }); }
    static F16L load(const float* p) { return each([=](int i) { return vld1q_f32(p + 4 * i); }); }
    static F16L load_f16(const void* p) {
        return each([=](int i) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8((const uint8_t*)p + 8 * i))); });
    }
    static F16L load_bf16(const void* p) {
        return each([=](int i) {
            return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8((const uint8_t*)p + 8 * i)), 16));
        });
    }
    static F16L from(I16 x) { return each([&](int i) { return vcvtq_f32_s32(x.v[i]); }); }
    static F16L bits(I16 x) { return each([&](int i) { return vreinterpretq_f32_s32(x.v[i]); }); }
    I16 as_bits() const { return I16::each([&](int i) { return vreinterpretq_s32_f32(v[i]); }); }
    I16 rounded() const { return I16::each([&](int i) { return vcvtnq_s32_f32(v[i]); }); }
    void store(float* p) const {
        for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, v[i]);
    }
    F16L operator+(F16L o) const { return each([&](int i) { return vaddq_f32(v[i], o.v[i]); }); }
    F16L operator-(F16L o) const { return each([&](int i) { return vsubq_f32(v[i], o.v[i]); }); }
    F16L operator*(F16L o) const { return each([&](int i) { return vmulq_f32(v[i], o.v[i]); }); }
    F16L operator/(F16L o) const { return each([&](int i) { return vdivq_f32(v[i], o.v[i]); }); }
    F16L max(F16L o) const { return each([&](int i) { return vmaxq_f32(v[i], o.v[i]); }); }
    F16L min(F16L o) const { return each([&](int i) { return vminq_f32(v[i], o.v[i]); }); }
    // Each lane: `yes` if this is greater than `bound`, else `no`.
    F16L above(F16L bound, F16L yes, F16L no) const {
        return each([&](int i) { return vbslq_f32(vcgtq_f32(v[i], bound.v[i]), yes.v[i], no.v[i]); });
    }
    float highest() const { return vmaxvq_f32(vmaxq_f32(vmaxq_f32(v[0], v[1]), vmaxq_f32(v[2], v[3]))); }
    // Lane i of the result is lane i ^ N.
    template <int N> F16L across() const {
        if (N == 1) return each([&](int i) { return vrev64q_f32(v[i]); });
        if (N == 2) return each([&](int i) { return vextq_f32(v[i], v[i], 2); });
        return each([&](int i) { return v[i ^ (N / 4)]; });
    }
    F16L fma(F16L b, F16L c) const { return each([&](int i) { return vfmaq_f32(c.v[i], v[i], b.v[i]); }); }  // this * b + c
};

// 64 bytes: lane r holds four consecutive codes of row r.
struct B64 {
    uint8x16_t v[4];
    template <class Fn> static B64 each(Fn fn) { return {{fn(0), fn(1), fn(2), fn(3)}}; }
    static B64 load(const void* p) { return each([=](int i) { return vld1q_u8((const uint8_t*)p + 16 * i); }); }
    void store(void* p) const {
        for (int i = 0; i < 4; i++) vst1q_u8((uint8_t*)p + 16 * i, v[i]);
    }
    static B64 set1(int x) { return each([=](int) { return vdupq_n_u8((uint8_t)x); }); }
    static B64 table(const uint8_t* t) { return each([=](int) { return vld1q_u8(t); }); }
    B64 operator&(B64 o) const { return each([&](int i) { return vandq_u8(v[i], o.v[i]); }); }
    B64 operator|(B64 o) const { return each([&](int i) { return vorrq_u8(v[i], o.v[i]); }); }
    template <int N> B64 shr() const { return each([&](int i) { return vshrq_n_u8(v[i], N); }); }
    template <int N> B64 shl() const { return each([&](int i) { return vshlq_n_u8(v[i], N); }); }
    B64 lookup(B64 index) const { return each([&](int i) { return vqtbl1q_u8(v[i], index.v[i]); }); }
    // sets `bit` if the byte's bit in the mask is set
    B64 with_bits(uint64_t mask, int bit) const {
        return each([&](int i) { return vorrq_u8(v[i], vandq_u8(spread(mask, i), vdupq_n_u8((uint8_t)bit))); });
    }
    // `twice` minus the byte if the mask's bit is set: mirrors it about `twice` / 2
    B64 mirrored(uint64_t mask, int twice) const {
        return each([&](int i) { return vbslq_u8(spread(mask, i), vsubq_u8(vdupq_n_u8((uint8_t)twice), v[i]), v[i]); });
    }
    // All ones in each byte of register i whose bit in the mask is set.
    static uint8x16_t spread(uint64_t mask, int i) {
        const uint8x16_t powers = vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull));
        const uint16_t part = (uint16_t)(mask >> 16 * i);
        return vtstq_u8(vcombine_u8(vdup_n_u8((uint8_t)part), vdup_n_u8((uint8_t)(part >> 8))), powers);
    }
};

inline B64 I16::as_bytes() const {
    return B64::each([&](int i) { return vreinterpretq_u8_s32(v[i]); });
}

// Bytes at even and at odd places, as 16-bit halves.
inline I16 even_bytes(B64 x) {
    return I16::each([&](int i) { return vandq_s32(vreinterpretq_s32_u8(x.v[i]), vdupq_n_s32(0x00FF00FF)); });
}
inline I16 odd_bytes(B64 x) {
    return I16::each([&](int i) { return vreinterpretq_s32_u16(vshrq_n_u16(vreinterpretq_u16_u8(x.v[i]), 8)); });
}

// Four activations, broadcast to all lanes.
struct Quad {
    int8x16_t v;
    static Quad load(const int8_t* p) {
        int32_t four;
        __builtin_memcpy(&four, p, 4);
        return {vreinterpretq_s8_s32(vdupq_n_s32(four))};
    }
    static Quad load_shared(const int8_t* p) { return load(p); }
};

// Dot products of codes and activations, one sum per lane over STEPS steps. Codes are at most MOST. If the zero point ZERO
// is not 0, sums begin at `start`: -ZERO times the activations' sum. Signed products can take codes of up to seven bits,
// and eight-bit codes with ZERO 128 after subtracting 128; other codes need a correction.
template <int MOST, int ZERO, int STEPS, int CHAINS = 1> struct Dots {
    static constexpr bool SIGNED = MOST > 127;
    struct Weights {
        B64 v;
        Weights() = default;
        Weights(B64 codes) : v(SIGNED ? B64::each([&](int i) { return veorq_u8(codes.v[i], vdupq_n_u8(128)); }) : codes) {}
    };
    I16 sum;

    LRT_INLINE void begin(const int32_t* start) { sum = ZERO && !(SIGNED && ZERO == 128) ? I16::set1(*start) : I16::zero(); }
    LRT_INLINE void add(int, const Weights& w, Quad a) {
        sum = I16::each([&](int i) { return vdotq_s32(sum.v[i], vreinterpretq_s8_u8(w.v.v[i]), a.v); });
        if (!SIGNED || ZERO == 128) return;
        const int8x16_t half = vdupq_n_s8(64);  // code = (code - 128) + 2 * 64
        sum = I16::each([&](int i) { return vdotq_s32(vdotq_s32(sum.v[i], half, a.v), half, a.v); });
    }
    LRT_INLINE I16 total() const { return sum; }
};

#if LRT_I8MM
// Stores codes of columns 0 to 3 and of columns 4 to 7 as matrices of two rows and eight columns.
inline void store_matrices(B64 first, B64 second, uint8_t* to) {
    for (int i = 0; i < 4; i++, to += 32) {
        const uint32x4_t low = vreinterpretq_u32_u8(first.v[i]), high = vreinterpretq_u32_u8(second.v[i]);
        vst1q_u8(to, vreinterpretq_u8_u32(vzip1q_u32(low, high)));
        vst1q_u8(to + 16, vreinterpretq_u8_u32(vzip2q_u32(low, high)));
    }
}

// Sums of products of R rows of activations, STRIDE bytes apart, with sixteen rows of codes: an instruction multiplies two
// rows of each, eight columns.
template <int R, int STRIDE> struct MatrixDots {
    int32x4_t sums[(R + 1) / 2][8];

    LRT_INLINE void begin() {
#pragma GCC unroll 2
        for (auto& pair : sums)
#pragma GCC unroll 8
            for (auto& sum : pair) sum = vdupq_n_s32(0);
    }
    LRT_INLINE void add(const uint8_t* codes, const int8_t* a) {
        int8x16_t rows[(R + 1) / 2];
#pragma GCC unroll 2
        for (int r = 0; r < R; r += 2)  // an odd row is multiplied twice
            rows[r / 2] = vcombine_s8(vld1_s8(a + r * STRIDE), vld1_s8(a + (r + 1 < R ? r + 1 : r) * STRIDE));
#pragma GCC unroll 8
        for (int w = 0; w < 8; w++) {
            const uint8x16_t matrix = vld1q_u8(codes + 16 * w);
#pragma GCC unroll 2
            for (int p = 0; p < (R + 1) / 2; p++) sums[p][w] = vusmmlaq_s32(sums[p][w], matrix, rows[p]);
        }
    }
    LRT_INLINE I16 of(int row) const {
        const int32x4_t* pair = sums[row / 2];
        return I16::each([=](int i) { return row % 2 ? vuzp2q_s32(pair[2 * i], pair[2 * i + 1]) : vuzp1q_s32(pair[2 * i], pair[2 * i + 1]); });
    }
};

constexpr int BRAIN_LINES = 2;  // rows whose sums with two tiles fit the registers

// 32 numbers of bf16: see vec_avx512.h.
struct BrainPairs {
    bfloat16x8_t v[4];
    template <class Fn> static BrainPairs each(Fn fn) { return {{fn(0), fn(1), fn(2), fn(3)}}; }
    static bfloat16x8_t bits(uint16x8_t x) { return vreinterpretq_bf16_u16(x); }
    uint16x8_t numbers(int i) const { return vreinterpretq_u16_bf16(v[i]); }
    static BrainPairs zero() { return each([](int) { return bits(vdupq_n_u16(0)); }); }
    static BrainPairs load(const void* p) { return each([=](int i) { return bits(vreinterpretq_u16_u8(vld1q_u8((const uint8_t*)p + 16 * i))); }); }
    static BrainPairs pair(const uint16_t* p) {
        uint32_t both;
        __builtin_memcpy(&both, p, 4);
        return each([=](int) { return bits(vreinterpretq_u16_u32(vdupq_n_u32(both))); });
    }
    static BrainPairs of(F16L low, F16L high) {
        const float32x4_t* x[2] = {low.v, high.v};
        return each([&](int i) { return vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(x[i / 2][i % 2 * 2]), x[i / 2][i % 2 * 2 + 1]); });
    }
    void store(void* p) const {
        for (int i = 0; i < 4; i++) vst1q_u8((uint8_t*)p + 16 * i, vreinterpretq_u8_u16(numbers(i)));
    }
    BrainPairs paired() const {
        return each([&](int i) {
            const uint16x8_t one = numbers(i / 2), other = numbers(2 + i / 2);
            return bits(i % 2 ? vzip2q_u16(one, other) : vzip1q_u16(one, other));
        });
    }
    F16L dot(BrainPairs o, F16L sum) const { return F16L::each([&](int i) { return vbfdotq_f32(sum.v[i], v[i], o.v[i]); }); }
};
#endif

}  // namespace
