// Sixteen lanes in two 256-bit registers. Needs AVX2, FMA, F16C; AVX-VNNI where LRT_VNNI is set.
#pragma once
#include <immintrin.h>
#include <cstdint>

inline namespace LRT_SPACE {

#define LRT_PANEL_ROWS 4
constexpr int PANEL_ROWS = LRT_PANEL_ROWS, PANEL_TILES = 1, ROW_CHUNK = 384, DIRECT_ROWS = 4;
constexpr int chains(int rows) { return LRT_VNNI && rows <= 2 ? 2 : 1; }  // chains of sums: several hide latency
// Classes of code widths that share kernels.
constexpr int code_class(int most) { return LRT_VNNI ? 255 : most <= 16 ? 16 : most <= 32 ? 32 : most <= 64 ? 64 : most <= 128 ? 128 : 255; }
// Whether the sum of `steps` products of symmetric codes fits 16 bits: it begins at its start, and may wrap on the way.
constexpr bool wraps(int most, int steps) { return !LRT_VNNI && steps * most * 127 <= INT16_MAX; }
constexpr bool WIDE_LOOK_UP = false;  // for codebook entries
constexpr bool FLOAT_SUMS = LRT_VNNI;
constexpr int QUERIES = 6, ATTENTION_SUMS = 4;

// Copies register by register: a block copy would go through memory.
#define LRT_PAIR(NAME, HALF) \
    NAME() = default; \
    NAME(HALF a_, HALF b_) : a(a_), b(b_) {} \
    NAME(const NAME& from) : a(from.a), b(from.b) {} \
    NAME& operator=(const NAME& from) { \
        a = from.a; \
        b = from.b; \
        return *this; \
    }

struct I16 {
    __m256i a, b;
    LRT_PAIR(I16, __m256i)
    static I16 zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
    static I16 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
    static I16 load(const void* p) {
        return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
    }
    static I16 load_i8(const void* p) {
        return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)((const char*)p + 8)))};
    }
    // 32 bytes as 16-bit halves.
    static I16 load_i8_halves(const void* p) {
        return {_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p + 1))};
    }
    static I16 load_u8(const void* p) {
        return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)((const char*)p + 8)))};
    }
    I16 operator+(I16 o) const { return {_mm256_add_epi32(a, o.a), _mm256_add_epi32(b, o.b)}; }
    I16 operator&(I16 o) const { return {_mm256_and_si256(a, o.a), _mm256_and_si256(b, o.b)}; }
    I16 operator|(I16 o) const { return {_mm256_or_si256(a, o.a), _mm256_or_si256(b, o.b)}; }
    I16 shl(int n) const {
        __m128i c = _mm_cvtsi32_si128(n);
        return {_mm256_sll_epi32(a, c), _mm256_sll_epi32(b, c)};
    }
    I16 shr(int n) const {
        __m128i c = _mm_cvtsi32_si128(n);
        return {_mm256_srl_epi32(a, c), _mm256_srl_epi32(b, c)};
    }
    // Sum of the products of a lane's two 16-bit halves, alone and added to `sum`.
    I16 dot2(I16 o) const { return {_mm256_madd_epi16(a, o.a), _mm256_madd_epi16(b, o.b)}; }
    I16 dot2(I16 o, I16 sum) const {
#if LRT_VNNI
        return {_mm256_dpwssd_avx_epi32(sum.a, a, o.a), _mm256_dpwssd_avx_epi32(sum.b, b, o.b)};
#else
        sum = sum + dot2(o);
        __asm__("" : "+x"(sum.a), "+x"(sum.b));  // in sequence: a tree of sums would not fit the registers
        return sum;
#endif
    }
    inline struct B64 as_bytes() const;
    // Sixteen four-bit values.
    static I16 nibbles(uint64_t x) {
        const __m256i shifts = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0), low = _mm256_set1_epi32(15);
        return {_mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)x), shifts), low),
                _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32((int)(x >> 32)), shifts), low)};
    }
    void store_i8(int8_t* p) const {
        const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xD8);
        _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
    }
    int32_t sum() const {
        const __m256i eight = _mm256_add_epi32(a, b);
        __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
        four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4E));
        return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xB1)));
    }
};

struct F16L {
    __m256 a, b;
    LRT_PAIR(F16L, __m256)
    static F16L zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
    static F16L set1_shared(const float* p) { return set1(*p); }
    static F16L set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
    static F16L load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
    static F16L load_f16(const void* p) {
        return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
    }
    static F16L load_bf16(const void* p) {
        return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)),
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p + 1)), 16))};
    }
    static F16L from(I16 i) { return {_mm256_cvtepi32_ps(i.a), _mm256_cvtepi32_ps(i.b)}; }
    static F16L bits(I16 i) { return {_mm256_castsi256_ps(i.a), _mm256_castsi256_ps(i.b)}; }
    I16 as_bits() const { return {_mm256_castps_si256(a), _mm256_castps_si256(b)}; }
    I16 rounded() const { return {_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b)}; }
    void store(float* p) const {
        _mm256_storeu_ps(p, a);
        _mm256_storeu_ps(p + 8, b);
    }
    F16L operator+(F16L o) const { return {_mm256_add_ps(a, o.a), _mm256_add_ps(b, o.b)}; }
    F16L operator-(F16L o) const { return {_mm256_sub_ps(a, o.a), _mm256_sub_ps(b, o.b)}; }
    F16L operator*(F16L o) const { return {_mm256_mul_ps(a, o.a), _mm256_mul_ps(b, o.b)}; }
    F16L operator/(F16L o) const { return {_mm256_div_ps(a, o.a), _mm256_div_ps(b, o.b)}; }
    F16L max(F16L o) const { return {_mm256_max_ps(a, o.a), _mm256_max_ps(b, o.b)}; }
    F16L min(F16L o) const { return {_mm256_min_ps(a, o.a), _mm256_min_ps(b, o.b)}; }
    // Each lane: `yes` if this is greater than `bound`, else `no`.
    F16L above(F16L bound, F16L yes, F16L no) const {
        return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(a, bound.a, _CMP_GT_OQ)),
                _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(b, bound.b, _CMP_GT_OQ))};
    }
    float highest() const {
        const __m256 eight = _mm256_max_ps(a, b);
        __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
        four = _mm_max_ps(four, _mm_movehl_ps(four, four));
        return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
    }
    // Lane i of the result is lane i ^ N.
    template <int N> F16L across() const {
        if (N == 1) return {_mm256_permute_ps(a, 0xB1), _mm256_permute_ps(b, 0xB1)};
        if (N == 2) return {_mm256_permute_ps(a, 0x4E), _mm256_permute_ps(b, 0x4E)};
        if (N == 4) return {_mm256_permute2f128_ps(a, a, 1), _mm256_permute2f128_ps(b, b, 1)};
        return {b, a};
    }
    F16L fma(F16L m, F16L c) const { return {_mm256_fmadd_ps(a, m.a, c.a), _mm256_fmadd_ps(b, m.b, c.b)}; }
};

struct B64 {
    __m256i a, b;
    LRT_PAIR(B64, __m256i)
    static B64 load(const void* p) {
        return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
    }
    void store(void* p) const {
        _mm256_storeu_si256((__m256i*)p, a);
        _mm256_storeu_si256((__m256i*)p + 1, b);
    }
    static B64 set1(int x) { return {_mm256_set1_epi8((char)x), _mm256_set1_epi8((char)x)}; }
    static B64 table(const uint8_t* t) {
        __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)t));
        return {v, v};
    }
    B64 operator&(B64 o) const { return {_mm256_and_si256(a, o.a), _mm256_and_si256(b, o.b)}; }
    B64 operator|(B64 o) const { return {_mm256_or_si256(a, o.a), _mm256_or_si256(b, o.b)}; }
    template <int N> B64 shr() const { return {_mm256_srli_epi16(a, N), _mm256_srli_epi16(b, N)}; }
    template <int N> B64 shl() const { return {_mm256_slli_epi16(a, N), _mm256_slli_epi16(b, N)}; }
    B64 lookup(B64 i) const { return {_mm256_shuffle_epi8(a, i.a), _mm256_shuffle_epi8(b, i.b)}; }
    B64 with_bits(uint64_t mask, int bit) const {
        const B64 set = spread(mask) & set1(bit);
        return *this | set;
    }
    // `twice` minus the byte if the mask's bit is set: mirrors it about `twice` / 2
    B64 mirrored(uint64_t mask, int twice) const {
        const __m256i from = _mm256_set1_epi8((char)twice);
        const B64 set = spread(mask);
        return {_mm256_blendv_epi8(a, _mm256_sub_epi8(from, a), set.a), _mm256_blendv_epi8(b, _mm256_sub_epi8(from, b), set.b)};
    }
    // All ones in each byte whose bit in the mask is set.
    static B64 spread(uint64_t mask) {
        const __m256i all = _mm256_set1_epi64x((long long)mask), select = _mm256_set1_epi64x((long long)0x8040201008040201ull);
        const __m256i first = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const __m256i second = _mm256_setr_epi64x(0x0404040404040404, 0x0505050505050505, 0x0606060606060606, 0x0707070707070707);
        const __m256i a = _mm256_and_si256(_mm256_shuffle_epi8(all, first), select);
        const __m256i b = _mm256_and_si256(_mm256_shuffle_epi8(all, second), select);
        return {_mm256_cmpeq_epi8(a, select), _mm256_cmpeq_epi8(b, select)};
    }
};

inline B64 I16::as_bytes() const { return {a, b}; }

// Bytes at even and at odd places, as 16-bit halves.
inline I16 even_bytes(B64 x) { return I16{x.a, x.b} & I16::set1(0x00FF00FF); }
inline I16 odd_bytes(B64 x) { return {_mm256_srli_epi16(x.a, 8), _mm256_srli_epi16(x.b, 8)}; }

// Four activations, broadcast to all lanes.
struct Quad {
    __m256i v;
    static Quad load(const int8_t* p) {
        int32_t four;
        __builtin_memcpy(&four, p, 4);
        return {_mm256_set1_epi32(four)};
    }
    static Quad load_shared(const int8_t* p) { return load(p); }
};

// Dot products of codes and activations, one sum per lane over STEPS steps. Codes are at most MOST. If the zero point ZERO
// is not 0, sums begin at `start`: -ZERO times the activations' sum.
#if LRT_VNNI
template <int MOST, int ZERO, int STEPS, int CHAINS = 1> struct Dots {
    using Weights = B64;
    I16 sums[CHAINS];

    LRT_INLINE void begin(const int32_t* start) {
        for (int i = 0; i < CHAINS; i++) sums[i] = ZERO && !i ? I16::set1(*start) : I16::zero();
    }
    LRT_INLINE void add(int step, B64 w, Quad a) {
        I16& sum = sums[step % CHAINS];
        sum = {_mm256_dpbusd_avx_epi32(sum.a, w.a, a.v), _mm256_dpbusd_avx_epi32(sum.b, w.b, a.v)};
    }
    LRT_INLINE I16 total() const { return CHAINS == 2 ? sums[0] + sums[CHAINS - 1] : sums[0]; }
};
#else
// Adds as many pairs of products in 16 bits as fit, then adds in 32 bits. If all fit, `start` has two 16-bit sums.
template <int MOST, int ZERO, int STEPS, int CHAINS = 1> struct Dots {
    using Weights = B64;
    static constexpr int ROOM = INT16_MAX / (2 * 127 * MOST);
    static constexpr bool WRAPS = ZERO && wraps(MOST, STEPS);
    static constexpr int FIT = WRAPS ? STEPS : least(STEPS, ROOM >= 8 ? 8 : ROOM >= 4 ? 4 : ROOM >= 2 ? 2 : 1);
    const int32_t* start;
    I16 pairs, sum;

    LRT_INLINE void begin(const int32_t* first) {
        start = first;
        if (WRAPS) pairs = I16::set1(*first);
    }
    LRT_INLINE void add(int step, const Weights& w, Quad a) {
        const I16 products = {_mm256_maddubs_epi16(w.a, a.v), _mm256_maddubs_epi16(w.b, a.v)};
        if (WRAPS || step % FIT) pairs = {_mm256_add_epi16(pairs.a, products.a), _mm256_add_epi16(pairs.b, products.b)};
        else pairs = products;
        __asm__("" : "+x"(pairs.a), "+x"(pairs.b));  // in sequence: a tree of sums would not fit the registers
        if (step % FIT != FIT - 1) return;
        const I16 more = pairs.dot2(I16::set1(0x00010001));
        sum = step < FIT ? more : sum + more;
    }
    LRT_INLINE I16 total() const { return ZERO && !WRAPS ? sum + I16::set1(*start) : sum; }
};

// With eight-bit codes not even two products fit, so codes are widened to 16 bits.
template <int ZERO, int STEPS, int CHAINS> struct Dots<255, ZERO, STEPS, CHAINS> {
    struct Weights {
        I16 even, odd;
        Weights() = default;
        LRT_INLINE Weights(B64 codes) : even(even_bytes(codes)), odd(odd_bytes(codes)) {}
    };
    I16 sum;

    LRT_INLINE void begin(const int32_t* start) { sum = ZERO ? I16::set1(*start) : I16::zero(); }
    LRT_INLINE void add(int, const Weights& w, Quad a) {
        const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(a.v, 8), 8), odd = _mm256_srai_epi16(a.v, 8);
        sum = w.even.dot2({even, even}, sum);
        sum = w.odd.dot2({odd, odd}, sum);
    }
    LRT_INLINE I16 total() const { return sum; }
};
#endif

}  // namespace
