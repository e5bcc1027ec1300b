// What quant/cuda/src/device.cuh has for a GPU, for a CPU: kernels run in tests as emulator.cpp says. It
// includes nothing, so that a kernel compiles in half a second.
#pragma once
#define EMULATED
#define FN static inline
#define TABLE static const
#define __global__
#define __shared__ static
#define __launch_bounds__(...)
#include <stdint.h>

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct dim3 { unsigned x, y, z; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }

struct Place { dim3 thread, block, threads, blocks; };
extern "C" {
extern struct Place emulated_place;
void emulated_pause();           // a kernel waits for the host
unsigned long long emulated_nanoseconds();
void emulated_block();           // wait for all threads of the block
void emulated_warp();            // and of the warp
uint32_t (*emulated_words())[8];  // of the warp: what its lanes show each other, until they wait again
float fmaf(float, float, float);
float cosf(float);
float expf(float);
float erff(float);
float expm1f(float);
float log1pf(float);
float sinf(float);
float tanhf(float);
float exp2f(float);
float sqrtf(float);
float nearbyintf(float);
}
#define threadIdx emulated_place.thread
#define blockIdx emulated_place.block
#define blockDim emulated_place.threads
#define gridDim emulated_place.blocks


static inline void __syncthreads() { emulated_block(); }
static inline void __threadfence() {}
static inline unsigned atomicAdd(unsigned* at, unsigned by) { return (*at += by) - by; }

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

FN u32 pick(u32 a, u32 b, u32 which) {
    u8 bytes[8];
    __builtin_memcpy(bytes, &a, 4), __builtin_memcpy(bytes + 4, &b, 4);
    u32 found = 0;
    for (int i = 0; i < 4; i++) {
        const u32 nibble = which >> 4 * i & 15;
        const u8 byte = bytes[nibble & 7];
        found |= (u32)(nibble & 8 ? (byte & 128 ? 255 : 0) : byte) << 8 * i;
    }
    return found;
}

FN float as_float(u32 bits) { float f; __builtin_memcpy(&f, &bits, 4); return f; }
FN u32 as_bits(float f) { u32 bits; __builtin_memcpy(&bits, &f, 4); return bits; }
FN float half_to_float(u16 bits) { _Float16 h; __builtin_memcpy(&h, &bits, 2); return (float)h; }
FN u16 float_to_half(float f) { _Float16 h = (_Float16)f; u16 bits; __builtin_memcpy(&bits, &h, 2); return bits; }
FN u32 two_bf16(float low, float high) {
    const u32 a = as_bits(low), b = as_bits(high);
    return (a + 0x7FFF + (a >> 16 & 1)) >> 16 | ((b + 0x7FFF + (b >> 16 & 1)) & 0xFFFF0000u);
}
FN float power_of_two(float f) { return exp2f(f); }
FN float reciprocal(float f) { return 1.f / f; }
FN float2 two_halves(u32 bits) { return {half_to_float((u16)bits), half_to_float((u16)(bits >> 16))}; }
constexpr float E4M3_UNIT = 256;
FN u32 two_e4m3(u32 bits) { return pick(bits, 0, 0x1404) >> 1 & 0x3F803F80u; }
FN float fused(float a, float b, float c) { return fmaf(a, b, c); }
FN float times(float a, float b) { return a * b; }
FN float plus(float a, float b) { return a + b; }
FN i32 nearest(float f) { return (i32)nearbyintf(f); }
FN float from_int(i32 i) { return (float)i; }
FN void fence() {}
FN void fence_host() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
FN u32 load_host(const u32* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
FN void store_host(u32* p, u32 word) { __atomic_store_n(p, word, __ATOMIC_RELEASE); }
FN void pause() { emulated_pause(); }
FN u64 nanoseconds() { return emulated_nanoseconds(); }
FN void copy_eight(void* to, const void* from) { __builtin_memcpy(to, from, 8); }
FN void copy_sixteen(void* to, const void* from) { __builtin_memcpy(to, from, 16); }
FN void prefetch(const void*) {}
FN void wait_copies() {}
FN void end_copies() {}
template <int MOST>
FN void wait_copies_but() {}
FN uint4 load_streamed(const uint4* p) { return *p; }

template <class T>
FN T shuffle_xor(T value, int lanes) {
    const auto words = emulated_words();
    __builtin_memcpy(words[threadIdx.x % 32], &value, 4);
    emulated_warp();
    T found;
    __builtin_memcpy(&found, words[(threadIdx.x % 32) ^ lanes], 4);
    return found;
}

template <bool SIGNED>
FN void multiply(i32 (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 mine[6] = {a0, a1, a2, a3, b0, b1};
    const auto words = emulated_words();
    __builtin_memcpy(words[lane], mine, sizeof mine);
    emulated_warp();
    for (int half = 0; half < 2; half++)
        for (int k = 0; k < 32; k++) {
            const int word = k / 16, owner = k % 16 / 4, byte = 8 * (k % 4);
            const u32 code = words[g * 4 + owner][2 * word + half] >> byte & 255;
            const i32 a = SIGNED ? (i8)code : (i32)code;
            for (int n = 0; n < 2; n++) {
                const i32 b = (i8)(words[(2 * t + n) * 4 + owner][4 + word] >> byte & 255);
                c[2 * half + n] += a * b;
            }
        }
}

template <bool SIGNED>
FN void multiply(i32 (&c)[4], u32 a0, u32 a1, u32 b0) {
    multiply<SIGNED>(c, a0, a1, 0, 0, b0, 0);
}

FN void multiply(float (&c)[4], const uint4& a, u32 b0, u32 b1) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u32 mine[6] = {a.x, a.y, a.z, a.w, b0, b1};
    const auto words = emulated_words();
    __builtin_memcpy(words[lane], mine, sizeof mine);
    emulated_warp();
    for (int half = 0; half < 2; half++)
        for (int n = 0; n < 2; n++) {
            double sum = c[2 * half + n];
            for (int k = 0; k < 16; k++) {
                const int word = k / 8, owner = k % 8 / 2;
                const u32 x = words[g * 4 + owner][2 * word + half], y = words[(2 * t + n) * 4 + owner][4 + word];
                sum += (double)as_float(k % 2 ? x & 0xFFFF0000u : x << 16) * as_float(k % 2 ? y & 0xFFFF0000u : y << 16);
            }
            c[2 * half + n] = (float)sum;
        }
}
