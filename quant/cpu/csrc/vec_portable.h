// Sixteen lanes as plain arrays: any C++17 compiler, any processor.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

inline namespace LRT_SPACE {

#define LRT_PANEL_ROWS 3
constexpr int PANEL_ROWS = LRT_PANEL_ROWS, PANEL_TILES = 1, ROW_CHUNK = 384, DIRECT_ROWS = 1;
constexpr int code_class(int) { return 255; }  // class of code widths that share kernels
constexpr int chains(int) { return 1; }  // chains of sums
constexpr bool WIDE_LOOK_UP = false;  // for codebook entries
constexpr bool wraps(int, int) { return false; }
constexpr bool FLOAT_SUMS = false;
constexpr int QUERIES = 4, ATTENTION_SUMS = 4;
constexpr int LANES = 16;

inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, fraction = h & 1023, bits;
    if (exponent == 31) {
        bits = sign | 0x7F800000 | fraction << 13;
    } else if (exponent) {
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    } else {
        float value = (float)fraction * 5.9604644775390625e-8f;  // 2^-24
        std::memcpy(&bits, &value, 4);
        bits |= sign;
    }
    float out;
    std::memcpy(&out, &bits, 4);
    return out;
}

struct I16 {
    int32_t v[LANES];
    template <class Fn> static I16 each(Fn fn) {
        I16 r;
        for (int i = 0; i < LANES; i++) r.v[i] = fn(i);
        return r;
    }
    static I16 zero() { return set1(0); }
    static I16 set1(int32_t x) { return each([=](int) { return x; }); }
    static I16 load(const void* p) {
        I16 r;
        std::memcpy(r.v, p, sizeof r.v);
        return r;
    }
    static I16 load_i8(const void* p) { return each([=](int i) { return ((const int8_t*)p)[i]; }); }
    // 32 bytes as 16-bit halves.
    static I16 load_i8_halves(const void* p) {
        return each([=](int i) {
            const int8_t* pair = (const int8_t*)p + 2 * i;
            return (int32_t)((uint32_t)(uint16_t)pair[0] | (uint32_t)(uint16_t)pair[1] << 16);
        });
    }
    static I16 load_u8(const void* p) { return each([=](int i) { return ((const uint8_t*)p)[i]; }); }
    I16 operator+(I16 o) const { return each([&](int i) { return (int32_t)((uint32_t)v[i] + (uint32_t)o.v[i]); }); }
    I16 operator&(I16 o) const { return each([&](int i) { return v[i] & o.v[i]; }); }
    I16 operator|(I16 o) const { return each([&](int i) { return v[i] | o.v[i]; }); }
    I16 shl(int n) const { return each([&](int i) { return (int32_t)((uint32_t)v[i] << n); }); }
    I16 shr(int n) const { return each([&](int i) { return (int32_t)((uint32_t)v[i] >> n); }); }
    // Sum of the products of a lane's two 16-bit halves, alone and added to `sum`.
    I16 dot2(I16 o) const {
        return each([&](int i) { return (int16_t)v[i] * (int16_t)o.v[i] + (v[i] >> 16) * (o.v[i] >> 16); });
    }
    I16 dot2(I16 o, I16 sum) const { return sum + dot2(o); }
    inline struct B64 as_bytes() const;
    // Sixteen four-bit values.
    static I16 nibbles(uint64_t x) { return each([=](int i) { return (int32_t)(x >> 4 * i & 15); }); }
    void store_i8(int8_t* p) const {
        for (int i = 0; i < LANES; i++) p[i] = (int8_t)v[i];
    }
    int32_t sum() const {
        int32_t total = 0;
        for (int32_t x : v) total += x;
        return total;
    }
};

struct F16L {
    float v[LANES];
    template <class Fn> static F16L each(Fn fn) {
        F16L r;
        for (int i = 0; i < LANES; i++) r.v[i] = fn(i);
        return r;
    }
    static F16L zero() { return set1(0); }
    static F16L set1_shared(const float* p) { return set1(*p); }
    static F16L set1(float x) { return each([=](int) { return x; }); }
    static F16L load(const float* p) { return each([=](int i) { return p[i]; }); }
    static F16L load_f16(const void* p) {
        return each([=](int i) {
            uint16_t h;
            std::memcpy(&h, (const char*)p + 2 * i, 2);
            return half_to_float(h);
        });
    }
    static F16L load_bf16(const void* p) {
        return bits(I16::each([=](int i) {
            uint16_t h;
            std::memcpy(&h, (const char*)p + 2 * i, 2);
            return (int32_t)((uint32_t)h << 16);
        }));
    }
    static F16L from(I16 x) { return each([&](int i) { return (float)x.v[i]; }); }
    static F16L bits(I16 x) {
        F16L r;
        std::memcpy(r.v, x.v, sizeof r.v);
        return r;
    }
    I16 as_bits() const {
        I16 r;
        std::memcpy(r.v, v, sizeof v);
        return r;
    }
    // What has no integer is the lowest one, as on x86.
    I16 rounded() const {
        return I16::each([&](int i) { return std::fabs(v[i]) < 2147483648.f ? (int32_t)std::nearbyintf(v[i]) : INT32_MIN; });
    }
    void store(float* p) const { std::memcpy(p, v, sizeof v); }
    F16L operator+(F16L o) const { return each([&](int i) { return v[i] + o.v[i]; }); }
    F16L operator-(F16L o) const { return each([&](int i) { return v[i] - o.v[i]; }); }
    F16L operator*(F16L o) const { return each([&](int i) { return v[i] * o.v[i]; }); }
    F16L operator/(F16L o) const { return each([&](int i) { return v[i] / o.v[i]; }); }
    F16L max(F16L o) const { return each([&](int i) { return v[i] > o.v[i] ? v[i] : o.v[i]; }); }
    F16L min(F16L o) const { return each([&](int i) { return v[i] < o.v[i] ? v[i] : o.v[i]; }); }
    // Each lane: `yes` if this is greater than `bound`, else `no`.
    F16L above(F16L bound, F16L yes, F16L no) const { return each([&](int i) { return v[i] > bound.v[i] ? yes.v[i] : no.v[i]; }); }
    float highest() const {
        float peak = v[0];
        for (float x : v) peak = x > peak ? x : peak;
        return peak;
    }
    // Lane i of the result is lane i ^ N.
    template <int N> F16L across() const { return each([&](int i) { return v[i ^ N]; }); }
    F16L fma(F16L b, F16L c) const { return each([&](int i) { return std::fma(v[i], b.v[i], c.v[i]); }); }
};

struct B64 {
    uint8_t v[64];
    template <class Fn> static B64 each(Fn fn) {
        B64 r;
        for (int i = 0; i < 64; i++) r.v[i] = (uint8_t)fn(i);
        return r;
    }
    static B64 load(const void* p) { return each([=](int i) { return ((const uint8_t*)p)[i]; }); }
    void store(void* p) const { std::memcpy(p, v, sizeof v); }
    static B64 set1(int x) { return each([=](int) { return x; }); }
    static B64 table(const uint8_t* t) { return each([=](int i) { return t[i & 15]; }); }
    B64 operator&(B64 o) const { return each([&](int i) { return v[i] & o.v[i]; }); }
    B64 operator|(B64 o) const { return each([&](int i) { return v[i] | o.v[i]; }); }
    template <int N> B64 shr() const { return each([&](int i) { return v[i] >> N; }); }
    template <int N> B64 shl() const { return each([&](int i) { return v[i] << N; }); }
    B64 lookup(B64 index) const { return each([&](int i) { return v[(i & 48) | (index.v[i] & 15)]; }); }
    B64 with_bits(uint64_t mask, int bit) const { return each([&](int i) { return v[i] | (mask >> i & 1 ? bit : 0); }); }
    // `twice` minus the byte if the mask's bit is set: mirrors it about `twice` / 2
    B64 mirrored(uint64_t mask, int twice) const { return each([&](int i) { return mask >> i & 1 ? twice - v[i] : v[i]; }); }
};

inline B64 I16::as_bytes() const { return B64::load(v); }

// Bytes at even and at odd places, as 16-bit halves.
inline I16 even_bytes(const B64& x) { return I16::load(x.v) & I16::set1(0x00FF00FF); }
inline I16 odd_bytes(const B64& x) { return I16::load(x.v).shr(8) & I16::set1(0x00FF00FF); }

// Four activations, broadcast to all lanes.
struct Quad {
    const int8_t* a;
    static Quad load(const int8_t* p) { return {p}; }
    static Quad load_shared(const int8_t* p) { return {p}; }
};

// Dot products of codes and activations, one sum per lane over STEPS steps. Codes are at most MOST. If the zero point ZERO
// is not 0, sums begin at `start`: -ZERO times the activations' sum.
template <int MOST, int ZERO, int STEPS, int CHAINS = 1> struct Dots {
    using Weights = B64;
    I16 sum;

    void begin(const int32_t* start) { sum = ZERO ? I16::set1(*start) : I16::zero(); }
    void add(int, const B64& w, Quad q) {
        for (int r = 0; r < LANES; r++)
            for (int i = 0; i < 4; i++) sum.v[r] += w.v[4 * r + i] * q.a[i];
    }
    I16 total() const { return sum; }
};

}  // namespace
