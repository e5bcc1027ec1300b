// Attention of new rows over a KV cache, whose last rows they are. The query rows of all heads that
// share a key/value head lie one after another, and a warp takes sixteen of them: keys and values pass
// through registers only, as operands of the product as they lie. Compiled for
//
//   KEYS VALUES   how the cache keeps them (kv.cuh)
//   SPLIT         1: few rows. A block takes one run of keys, a quarter for each warp, and leaves
//                 sums that attention_join.cu joins. 0: many rows. Each warp takes all keys.
//
// A step of keys that a row does not see leaves its sums as they are, to the bit: so a row's result
// depends neither on the rows beside it nor on the cache's length.
#include "attention.cuh"

constexpr int WARPS = 4, OWN = RUN / WARPS;  // keys of a warp in a run
static_assert(RUN == BLOCK, "a run of keys is one block of the cache");
using Sums = AttentionSums<KEYS, VALUES>;

extern "C" __global__ void __launch_bounds__(128, BLOCKS) attention(Attention args) {
    constexpr int TILES = SPLIT ? 1 : WARPS;
    __shared__ uint4 queries[TILES][Sums::QUERY_STEPS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int old = (int)*args.held, group = blockIdx.y;
    // Later rows see more keys: they go first.
    const int tile = SPLIT ? blockIdx.z : gridDim.x - 1 - blockIdx.x;
    const int place = (tile * TILES + (SPLIT ? 0 : warp)) * 16;
    const u8* block = args.blocks[SPLIT ? blockIdx.x : 0];  // a run is one
    load_queries<Sums::QUERY_STEPS, Sums::SIZE>(args, group, tile * TILES * 16, TILES, &queries[0][0][0]);
    __syncthreads();

    const Rows rows = Rows::make(args, place, g);
    const int last = (place + 15) / args.per < args.rows ? (place + 15) / args.per : args.rows - 1;
    int end = args.tree ? old + args.n : old + args.first + last + 1;
    int begin = args.window && rows.earliest > args.window ? rows.earliest - args.window + 1 : 0;
    if constexpr (SPLIT) {
        const int run = blockIdx.x * RUN;
        if (run >= end || run + RUN <= begin) return;  // which attention_join.cu knows
        const int own = run + warp * OWN;
        begin = begin > own ? begin : own, end = end < own + OWN ? end : own + OWN;
    }
    Sums sums;
    sums.clear(sums);
    for (int key = begin / Sums::STEP * Sums::STEP; key < end; key += Sums::STEP) {
        if constexpr (!SPLIT) block = args.blocks[key / BLOCK];
        const i64 row = (i64)group * BLOCK - key / BLOCK * BLOCK;  // of token 0, were it in this block
        const u8 *k = block + args.k_at + row * KEYS::BYTES, *v = block + args.v_at + row * VALUES::BYTES;
        sums.add(sums, args, rows, queries[SPLIT ? 0 : warp], k, v, key, old, lane);
    }
    sums.finish(sums);

    if constexpr (SPLIT) {
        __shared__ float meet[16][Sums::VALUE];
        __shared__ float tops[WARPS][16], weights[WARPS][16];
        if (t == 0)
#pragma unroll
            for (int i = 0; i < 2; i++) tops[warp][g + 8 * i] = sums.top[i], weights[warp][g + 8 * i] = sums.weight[i];
        __syncthreads();
        float share[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = tops[0][g + 8 * i];
            for (int w = 1; w < WARPS; w++) top = most(top, tops[w][g + 8 * i]);
            share[i] = power_of_two(plus(sums.top[i], -finite(top)));
        }
        for (int w = 0; w < WARPS; w++) {
            if (warp == w)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    sums.each(sums, i, t, [&](int e, float value) {
                        float& sum = meet[g + 8 * i][e];
                        sum = fused(value, share[i], w ? sum : 0);
                    });
            __syncthreads();
        }
        for (int at = threadIdx.x; at < 16 * Sums::VALUE; at += 32 * WARPS) {
            const int r = at / Sums::VALUE, which = Attention::result(args, place + r, group);
            if ((place + r) / args.per >= args.rows) break;
            args.partial[blockIdx.x * args.run_stride + (i64)which * Sums::VALUE + at % Sums::VALUE] = meet[r][at % Sums::VALUE];
        }
        const int r = threadIdx.x;
        if (r < 16 && (place + r) / args.per < args.rows) {
            float top = tops[0][r], weight = 0;
            for (int w = 1; w < WARPS; w++) top = most(top, tops[w][r]);
            for (int w = 0; w < WARPS; w++) weight = fused(weights[w][r], power_of_two(plus(tops[w][r], -finite(top))), weight);
            const i64 width = args.run_stride / Sums::VALUE, at = blockIdx.x * width + Attention::result(args, place + r, group);
            args.stats[at] = top, args.stats[args.runs * width + at] = weight;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = place + g + 8 * i;
            if (at / args.per >= args.rows) continue;
            const int which = Attention::result(args, at, group);
            float factor = 1;
            if (args.sinks) {
                const float sink = times(args.sinks[which % args.heads], LOG2E), top = most(sums.top[i], sink);
                factor = power_of_two(plus(sums.top[i], -top));
                sums.weight[i] = fused(sums.weight[i], factor, power_of_two(plus(sink, -top)));
            }
            factor = factor / sums.weight[i];
            sums.write(sums, i, t, factor, args.out + ((i64)args.first * args.heads + which) * Sums::VALUE);
        }
    }
}
