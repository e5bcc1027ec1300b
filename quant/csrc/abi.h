// The plain C interface between Python (ctypes) and the kernels. Structs are filled by Python and
// mirror quant/ops/native_abi.py field by field.
#pragma once
#include <cstdint>

#if defined(_WIN32)
#define LRT_API extern "C" __declspec(dllexport)
#else
#define LRT_API extern "C" __attribute__((visibility("default")))
#endif

enum Format : int32_t {
    F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, MXFP4, FORMAT_COUNT
};

// A weight matrix in the tiled layout of quant/formats/tiled.py.
struct Matrix {
    const uint8_t* data;
    int32_t format, rows, cols, unused;
};

// Row-stacked matrices that share their input: q, k, v or gate, up.
struct Stack {
    const Matrix* parts;
    int32_t count, rows, cols, unused;
};

// One sequence of a pass: its cache of one layer and the rows that extend it.
struct Span {
    uint16_t* k;          // bf16, (G, allocated / 16, E, 16)
    uint16_t* v;          // bf16, (G, allocated, E)
    const uint8_t* mask;  // (rows, rows) or null for causal
    int64_t allocated;
    int32_t held, rows;
};

struct AttentionArgs {
    float *x, *q, *out;          // (R, D), (R, H, E), (R, D)
    const float *norm, *qkv_bias, *q_norm, *k_norm, *out_bias, *post_norm;
    const float *cos, *sin;      // (R, rotary / 2), or null
    const int64_t* positions;    // (R)
    const Span* spans;
    Stack qkv, proj;
    int32_t rows, span_count, heads, kv_heads, head_dim, rotary, window;  // window 0: none
    float eps, scale, softcap;                                            // softcap 0: none
};

struct MlpArgs {
    const float* x;
    float* out;
    const float *norm, *post_norm;
    Stack gate_up, down;
    int32_t rows, activation;  // 0 silu, 1 gelu_tanh
    float eps;
};

struct HeadArgs {
    const float* x;       // (R, D)
    const int64_t* wanted;
    float* logits;        // (count, V)
    const float* norm;
    Stack weight;
    int32_t count;
    float eps, softcap;
};
