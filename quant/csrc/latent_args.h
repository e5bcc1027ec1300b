// Latent attention's part of the C interface; mirrored by quant/ops/native_latent.py field by field.
#pragma once
#include "abi.h"

// Formats of a cache whose rows are keys, and hold the values too: token by token, (256, E) in a block, then int8's
// float32 scales (256). They go on counting where KvFormat ends.
enum LatentFormat : int32_t { KV_ROWS_BF16 = 3, KV_ROWS_INT8 };

struct LatentArgs {
    float *x, *q, *out;  // (R, D), (R, H, nope + rotary), (R, D)
    const float *norm, *query_norm, *latent_norm;
    const float *cos, *sin;  // (R, rotary / 2)
    const Span* spans;
    Stack down, query_up, key_up, value_up, proj;  // without query_up's parts, `down` gives the queries
    int32_t rows, span_count, heads, rotary, latent, nope, value, interleaved;
    float eps, latent_eps, scale;
};
