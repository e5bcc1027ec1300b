// Sixteen lanes in one 512-bit register. Needs AVX-512 F, BW, VL, VNNI.
#pragma once
#include <immintrin.h>
#include <cstdint>

inline namespace LRT_SPACE {

// Panels of two tiles and six rows: sums and products take 24 of the 32 registers.
#define LRT_PANEL_ROWS 6
constexpr int PANEL_ROWS = LRT_PANEL_ROWS, PANEL_TILES = 2, ROW_CHUNK = 384, DIRECT_ROWS = 12;
constexpr int code_class(int) { return 255; }  // class of code widths that share kernels
constexpr int chains(int rows) { return rows < 6 ? 2 : 1; }  // chains of sums: with few rows, two hide latency
constexpr bool WIDE_LOOK_UP = true;  // for codebook entries
constexpr bool wraps(int, int) { return false; }  // whether sums fit 16 bits
constexpr bool FLOAT_SUMS = true;  // whether sums may begin at any number, at no cost
constexpr int QUERIES = 8, ATTENTION_SUMS = 16;  // queries (rows times heads) that share a key; sums in registers

struct I16 {
    __m512i v;
    static I16 zero() { return {_mm512_setzero_si512()}; }
    static I16 set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
    static I16 load(const void* p) { return {_mm512_loadu_si512(p)}; }
    static I16 load_i8(const void* p) { return {_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
    // 32 bytes as 16-bit halves.
    static I16 load_i8_halves(const void* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}; }
    static I16 load_u8(const void* p) { return {_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))}; }
    I16 operator+(I16 o) const { return {_mm512_add_epi32(v, o.v)}; }
    I16 operator&(I16 o) const { return {_mm512_and_si512(v, o.v)}; }
    I16 operator|(I16 o) const { return {_mm512_or_si512(v, o.v)}; }
    I16 shl(int n) const { return {_mm512_sll_epi32(v, _mm_cvtsi32_si128(n))}; }
    I16 shr(int n) const { return {_mm512_srl_epi32(v, _mm_cvtsi32_si128(n))}; }
    // Sum of the products of a lane's two 16-bit halves, alone and added to `sum`.
    I16 dot2(I16 o) const { return {_mm512_madd_epi16(v, o.v)}; }
    I16 dot2(I16 o, I16 sum) const { return {_mm512_dpwssd_epi32(sum.v, v, o.v)}; }
    inline struct B64 as_bytes() const;
    // Sixteen four-bit values.
    static I16 nibbles(uint64_t x) {
        const __m512i shifts = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
        const __m512i words = _mm512_inserti64x4(_mm512_set1_epi32((int)x), _mm256_set1_epi32((int)(x >> 32)), 1);
        return {_mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32(15))};
    }
    void store_i8(int8_t* p) const { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(v)); }
    int32_t sum() const { return _mm512_reduce_add_epi32(v); }
};

struct F16L {
    __m512 v;
    static F16L zero() { return {_mm512_setzero_ps()}; }
    static F16L set1(float x) { return {_mm512_set1_ps(x)}; }
    // Loads once for several products, each of which would otherwise load a memory operand.
    static F16L set1_shared(const float* p) {
        F16L x = set1(*p);
        __asm__("" : "+v"(x.v));
        return x;
    }
    static F16L load(const float* p) { return {_mm512_loadu_ps(p)}; }
    static F16L load_f16(const void* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
    static F16L load_bf16(const void* p) {
        return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
    }
    static F16L from(I16 i) { return {_mm512_cvtepi32_ps(i.v)}; }
    static F16L bits(I16 i) { return {_mm512_castsi512_ps(i.v)}; }
    I16 as_bits() const { return {_mm512_castps_si512(v)}; }
    I16 rounded() const { return {_mm512_cvtps_epi32(v)}; }
    void store(float* p) const { _mm512_storeu_ps(p, v); }
    F16L operator+(F16L o) const { return {_mm512_add_ps(v, o.v)}; }
    F16L operator-(F16L o) const { return {_mm512_sub_ps(v, o.v)}; }
    F16L operator*(F16L o) const { return {_mm512_mul_ps(v, o.v)}; }
    F16L operator/(F16L o) const { return {_mm512_div_ps(v, o.v)}; }
    F16L max(F16L o) const { return {_mm512_max_ps(v, o.v)}; }
    F16L min(F16L o) const { return {_mm512_min_ps(v, o.v)}; }
    // Each lane: `yes` if this is greater than `bound`, else `no`.
    F16L above(F16L bound, F16L yes, F16L no) const {
        return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(v, bound.v, _CMP_GT_OQ), no.v, yes.v)};
    }
    float highest() const { return _mm512_reduce_max_ps(v); }
    // Lane i of the result is lane i ^ N.
    template <int N> F16L across() const {
        if (N == 1) return {_mm512_permute_ps(v, 0xB1)};
        if (N == 2) return {_mm512_permute_ps(v, 0x4E)};
        if (N == 4) return {_mm512_shuffle_f32x4(v, v, 0xB1)};
        return {_mm512_shuffle_f32x4(v, v, 0x4E)};
    }
    F16L fma(F16L b, F16L c) const { return {_mm512_fmadd_ps(v, b.v, c.v)}; }  // this * b + c
};

// 64 bytes: lane r holds four consecutive codes of row r.
struct B64 {
    __m512i v;
    static B64 load(const void* p) { return {_mm512_loadu_si512(p)}; }
    void store(void* p) const { _mm512_storeu_si512(p, v); }
    static B64 set1(int x) { return {_mm512_set1_epi8((char)x)}; }
    static B64 table(const uint8_t* t) { return {_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)t))}; }
    B64 operator&(B64 o) const { return {_mm512_and_si512(v, o.v)}; }
    B64 operator|(B64 o) const { return {_mm512_or_si512(v, o.v)}; }
    B64 operator-(B64 o) const { return {_mm512_sub_epi8(v, o.v)}; }
    // Shifts within 16-bit words: mask afterwards.
    template <int N> B64 shr() const { return {_mm512_srli_epi16(v, N)}; }
    template <int N> B64 shl() const { return {_mm512_slli_epi16(v, N)}; }
    B64 lookup(B64 index) const { return {_mm512_shuffle_epi8(v, index.v)}; }
    // sets `bit` if the byte's bit in the mask is set
    B64 with_bits(uint64_t mask, int bit) const {
        return {_mm512_or_si512(v, _mm512_maskz_set1_epi8(mask, (char)bit))};
    }
    // `twice` minus the byte if the mask's bit is set: mirrors it about `twice` / 2
    B64 mirrored(uint64_t mask, int twice) const { return {_mm512_mask_sub_epi8(v, mask, _mm512_set1_epi8((char)twice), v)}; }
};

inline B64 I16::as_bytes() const { return {v}; }

// Bytes at even and at odd places, as 16-bit halves.
inline I16 even_bytes(B64 x) { return {_mm512_and_si512(x.v, _mm512_set1_epi32(0x00FF00FF))}; }
inline I16 odd_bytes(B64 x) { return {_mm512_srli_epi16(x.v, 8)}; }

// Four activations, broadcast to all lanes.
struct Quad {
    __m512i v;
    static Quad load(const int8_t* p) {
        int32_t four;
        __builtin_memcpy(&four, p, 4);
        return {_mm512_set1_epi32(four)};
    }
    static Quad load_shared(const int8_t* p) {
        Quad q = load(p);
        __asm__("" : "+v"(q.v));
        return q;
    }
};

// Dot products of codes and activations, one sum per lane over STEPS steps. Codes are at most MOST. If the zero point ZERO
// is not 0, sums begin at `start`: -ZERO times the activations' sum.
template <int MOST, int ZERO, int STEPS, int CHAINS = 1> struct Dots {
    using Weights = B64;
    I16 sums[CHAINS];

    LRT_INLINE void begin(const int32_t* start) {
        for (int i = 0; i < CHAINS; i++) sums[i] = ZERO && !i ? I16::set1(*start) : I16::zero();
    }
    LRT_INLINE void add(int step, B64 w, Quad a) { sums[step % CHAINS].v = _mm512_dpbusd_epi32(sums[step % CHAINS].v, w.v, a.v); }
    LRT_INLINE I16 total() const { return CHAINS == 2 ? sums[0] + sums[CHAINS - 1] : sums[0]; }
};

#if LRT_BF16
constexpr int BRAIN_LINES = 8;  // rows whose sums with two tiles fit the registers

// 32 numbers of bf16.
struct BrainPairs {
    __m512i v;
    static BrainPairs zero() { return {_mm512_setzero_si512()}; }
    static BrainPairs load(const void* p) { return {_mm512_loadu_si512(p)}; }
    // A pair, broadcast.
    static BrainPairs pair(const uint16_t* p) {
        int both;
        __builtin_memcpy(&both, p, 4);
        return {_mm512_set1_epi32(both)};
    }
    // Sixteen rounded numbers, then sixteen others.
    static BrainPairs of(F16L low, F16L high) { return {(__m512i)_mm512_cvtne2ps_pbh(high.v, low.v)}; }
    void store(void* p) const { _mm512_storeu_si512(p, v); }
    // Two rows of sixteen, as pairs of one number of each.
    BrainPairs paired() const {
        alignas(64) static const uint16_t places[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                        8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
        return {_mm512_permutexvar_epi16(_mm512_load_si512(places), v)};
    }
    // The products of pairs, added to `sum`.
    F16L dot(BrainPairs o, F16L sum) const { return {_mm512_dpbf16_ps(sum.v, (__m512bh)v, (__m512bh)o.v)}; }
};
#endif

}  // namespace
