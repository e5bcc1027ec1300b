// Applies head norms and RoPE to rows of a projection: queries go to q (their gates to `gates`), keys and
// values are appended to a cache. A warp takes one head of one row.
//   KEYS VALUES   how the cache stores them (kv.cuh)
//   IN            Bf16 or float: the type of the projection
//   AXES          each rotates an equal part of a head's rotary dims, pairing the part's halves
//   NORM_VALUES   1: values are normed, without weights
#include "kv.cuh"

struct RopeAppend {
    const IN* qkv;  // per row: query heads `step` apart; keys from `keys_at`, values from `values_at` on, which may be the same
    Bf16 *q, *gates;  // (n, heads, size); gates may be null
    const Span* spans;  // (count) sequences (kv.cuh)
    const float *cos, *sin;        // (n, half)
    const float *q_norm, *k_norm;  // (size,) or null; over all heads if joint
    const i64* positions;  // (n): queries are scaled by 1 + beta log(1 + (position + offset) / length); or null
    i64 k_at, v_at;
    int row_stride, step, keys_at, values_at, heads, groups, half, joint, last, count;  // last: norms are applied after the rotation
    int gates_at, gate_step;  // of a head's gates in a row; with a step of 1, a head has one
    int length, offset;
    float eps, beta;
};

FN float sum_of_warp(float sum) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) sum = plus(sum, shuffle_xor(sum, lanes));
    return sum;
}

template <int PIECES>
FN float scale_of(const float (&x)[PIECES], int size, float eps) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < PIECES; i++) sum = fused(x[i], x[i], sum);
    return 1.f / sqrtf(sum_of_warp(sum) / (float)size + eps);
}

// How element e of a head rotates: its partner, its angle, and whether it is in the first half.
struct Turn {
    int other, angle;
    bool first;

    FN Turn make(int e, int half) {
        if (e >= 2 * half) return {e, 0, false};
        const int wide = half / AXES, part = AXES == 1 ? 0 : e / (2 * wide), in = AXES == 1 ? e : e % (2 * wide);
        const bool first = in < wide;
        return {first ? e + wide : e - wide, part * wide + (first ? in : in - wide), first};
    }
};

extern "C" __global__ void rope_append(RopeAppend args) {
    constexpr int SIZE = KEYS::SIZE, PIECES = KEYS::PIECES;
    const int head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, row = blockIdx.y, lane = threadIdx.x % 32;
    if (head >= args.heads + 2 * args.groups) return;
    const int cached = head - args.heads, in_values = cached - args.groups;
    const int at = cached < 0 ? head * args.step : in_values < 0 ? args.keys_at + cached * SIZE : args.values_at + in_values * SIZE;
    const IN *projected = args.qkv + (i64)row * args.row_stride, *from = projected + at;
    float x[PIECES], other[PIECES];  // an element, and its rotation partner
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int e = lane + 32 * i;
        x[i] = e < SIZE ? value_of(from[e]) : 0;
        other[i] = e < SIZE ? value_of(from[Turn::make(e, args.half).other]) : 0;
    }
    const bool query = cached < 0, key = !query && in_values < 0;
    const Span& span = span_of(args.spans, args.count, row);
    const i64 slot = span.held + Span::token(span, row - (int)span.first);
    u8* block = Span::addresses(span)[slot / BLOCK];
    if (!query && !key) {
        if constexpr (NORM_VALUES) {
            const float scale = scale_of(x, SIZE, args.eps);
#pragma unroll
            for (int i = 0; i < PIECES; i++) x[i] = times(x[i], scale);
        }
        if constexpr (VALUES::TURN > 1) rotate<VALUES::TURN>(x, lane);
        VALUES::write(block + args.v_at + ((i64)in_values * BLOCK + slot % BLOCK) * VALUES::BYTES, lane, x);
        return;
    }
    const float* norm = query ? args.q_norm : args.k_norm;
    if (norm && !args.last) {
        float scale;
        if (args.joint) {
            const int width = (query ? args.heads : args.groups) * SIZE;
            const IN* all = projected + (query ? 0 : args.keys_at);
            float sum = 0;
            for (int e = lane; e < width; e += 32) sum = fused(value_of(all[e]), value_of(all[e]), sum);
            scale = 1.f / sqrtf(sum_of_warp(sum) / (float)width + args.eps);
            norm += (query ? head : cached) * SIZE;
        } else {
            scale = scale_of(x, SIZE, args.eps);
        }
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const int e = lane + 32 * i, away = Turn::make(e, args.half).other;
            if (e < SIZE) x[i] = times(times(x[i], scale), norm[e]), other[i] = times(times(other[i], scale), norm[away]);
        }
    }
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int e = lane + 32 * i;
        if (e >= 2 * args.half) continue;
        const Turn turn = Turn::make(e, args.half);
        const int angle = row * args.half + turn.angle;
        const float turned = times(other[i], args.sin[angle]);
        x[i] = fused(x[i], args.cos[angle], turn.first ? -turned : turned);
    }
    if (norm && args.last) {
        const float scale = scale_of(x, SIZE, args.eps);
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            if (lane + 32 * i < SIZE) x[i] = times(times(x[i], scale), norm[lane + 32 * i]);
    }
    if constexpr (KEYS::TURN > 1) rotate<KEYS::TURN>(x, lane);
    if (key) {
        KEYS::write(block + args.k_at + ((i64)cached * BLOCK + slot % BLOCK) * KEYS::BYTES, lane, x);
        return;
    }
    if (args.positions) {
        const float factor = plus(1.f, times(args.beta, log1pf((float)((args.positions[row] + args.offset) / args.length))));
#pragma unroll
        for (int i = 0; i < PIECES; i++) x[i] = times(x[i], factor);
    }
    const i64 to = ((i64)row * args.heads + head) * SIZE;
    Bf16Numbers<SIZE>::write((u8*)(args.q + to), lane, x);
    if (!args.gates) return;
    const IN* gates = projected + args.gates_at + head * args.gate_step;
    for (int e = lane; e < SIZE; e += 32) store(args.gates + to + e, value_of(gates[args.gate_step > 1 ? e : 0]));
}
