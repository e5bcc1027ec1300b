// The step before latent attention: rotates the last columns of each query head, and appends the latent
// and the key that all heads share to a cache. A warp takes one head of one row, or the row's latent.
//
//   Q_IN WIDE_IN   float or Bf16
#include "kv.cuh"

struct LatentAppend {
    const Q_IN* q;        // (n, heads, width); the last 2 * half columns are rotated
    const WIDE_IN* wide;  // (n, latent + 2 half): the latent, then the key
    Bf16* queries;        // (n, heads, 2 half + latent)
    const Span* spans;    // (count) sequences (kv.cuh); cached rows are as long as queries'
    const float *cos, *sin;  // (n, half)
    const float* norm;       // (latent,)
    const i64* positions;    // (n): queries are scaled by 1 + beta log(1 + (position + offset) / length); or null
    i64 cache_at, q_stride, wide_stride;
    int heads, width, half, latent, interleaved, count, length, offset;
    float eps, beta;
};

// Rotates pairs, times `factor`; they become halves of `to`.
template <class In>
FN void turn(const LatentAppend& args, const In* from, Bf16* to, int row, int lane, float factor) {
    for (int i = lane; i < args.half; i += 32) {
        const float a = value_of(from[args.interleaved ? 2 * i : i]);
        const float b = value_of(from[args.interleaved ? 2 * i + 1 : i + args.half]);
        const float cos = args.cos[row * args.half + i], sin = args.sin[row * args.half + i];
        store(to + i, times(fused(a, cos, -times(b, sin)), factor));
        store(to + args.half + i, times(fused(b, cos, times(a, sin)), factor));
    }
}

extern "C" __global__ void latent_append(LatentAppend args) {
    const int head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, row = blockIdx.y, lane = threadIdx.x % 32;
    const int rope = 2 * args.half, size = rope + args.latent;
    if (head > args.heads) return;
    if (head < args.heads) {
        const Q_IN* q = args.q + row * args.q_stride + (head + 1) * args.width - rope;
        Bf16* to = args.queries + ((i64)row * args.heads + head) * size;
        if (!args.positions) return turn(args, q, to, row, lane, 1.f);
        const float factor = plus(1.f, times(args.beta, log1pf((float)((args.positions[row] + args.offset) / args.length))));
        turn(args, q, to, row, lane, factor);
        for (int i = rope + lane; i < size; i += 32) store(to + i, times(value_of(to[i]), factor));
        return;
    }
    const WIDE_IN* wide = args.wide + row * args.wide_stride;
    const Span& span = span_of(args.spans, args.count, row);
    const i64 slot = span.held + Span::token(span, row - (int)span.first);
    Bf16* to = (Bf16*)(Span::addresses(span)[slot / BLOCK] + args.cache_at) + slot % BLOCK * size;
    turn(args, wide + args.latent, to, row, lane, 1.f);
    float sum = 0;
    for (int i = lane; i < args.latent; i += 32) sum = fused(value_of(wide[i]), value_of(wide[i]), sum);
    for (int lanes = 16; lanes; lanes >>= 1) sum = plus(sum, shuffle_xor(sum, lanes));
    const float scale = 1.f / sqrtf(sum / (float)args.latent + args.eps);
    for (int i = lane; i < args.latent; i += 32) store(to + rope + i, times(times(value_of(wide[i]), scale), args.norm[i]));
}
