// Multiplies 1 to 64 rows by one matrix, or by one matrix per head. A block takes 32 PAIRS weight rows;
// columns are dealt out to chains, one per warp, which are joined in order. Compiled for
//
//   FORMAT PAIRS_ WIDTH NT_   see sums.cuh
// GATE                      0, or the activation of a matrix of gate rows followed by up rows
//   OUT                       float or Bf16
//   FINE                      see records.cuh
//   ADAPTED                   1: adapters change the results (low_rank.cuh, with its RECORDS)
#include "linear.cuh"
#include "low_rank.cuh"

using Weights = FORMAT;

#if ADAPTED
struct Args : Linear {
    AdaptedRows change;
};
#define CHANGE args.change
#else
using Args = Linear;
#define CHANGE AdaptedRows()
#endif

extern "C" __global__ void __launch_bounds__(256, BLOCKS) linear(Args args) {
    constexpr int PAIRS = PAIRS_, NT = NT_;
    using S = Sums<Weights, PAIRS, WIDTH, NT>;
    constexpr int EACH = PAIRS * S::ROWS * S::COLUMNS * 32;  // results of a block per eight activation rows
    __shared__ float meet[MOST_CHAINS][EACH];
    __shared__ u32 turn;
    if (ADAPTED && blockIdx.y == 0 && blockIdx.x >= CHANGE.helpers) return;
    if (ADAPTED && blockIdx.y == 0) return complete_sums(CHANGE, turn);
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, part = blockIdx.y - ADAPTED, parts = gridDim.y - ADAPTED;
    const Lane lane = Lane::make(threadIdx.x % 32);
    const int groups = (args.m + 8 * NT - 1) / (8 * NT), group = blockIdx.z % groups, head = blockIdx.z / groups;

    // Pairs of tiles: two consecutive ones, or a gate tile and its up tile.
    const int half = GATE ? args.tiles / 2 : args.tiles;
    const int first = blockIdx.x * (GATE ? PAIRS : 2 * PAIRS);
    S s;
    const u8* records = args.x + head * args.x_head + (i64)group * 8 * NT * args.x_stride;
    const int chain = part * warps + warp;
    s.begin(s, records, InOrder{args.x_stride}, lane, chain);
    const int in_half = GATE ? first : first + lane.g / 4, next = GATE ? 1 : 2;
    const int begin = in_half < half ? in_half : half - 1;  // clamped for a matrix's last pairs
    const u8* tile = args.w + ((i64)head * args.tiles + begin + (GATE ? lane.g / 4 * half : 0)) * args.tile_bytes;
    if (chain < args.chains)
        s.add(s, tile, begin + next < half ? next * args.tile_bytes : 0, args.steps, lane, chain, args.chains);

    const float* factors = args.factors ? args.factors + head * args.tiles : nullptr;
    const Ends ends = {{factors, factors ? factors + half : nullptr}, {args.bias, args.bias ? args.bias + args.rows : nullptr}};
    float* shared = args.partial + ((i64)blockIdx.z * gridDim.x + blockIdx.x) * parts * warps * NT * EACH;
    for (int stage = 0; stage < (parts > 1 ? 2 : 1); stage++) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            if (stage == 0) leave<S, PAIRS>(s, nt, meet);
            for (int i = threadIdx.x; i < EACH; i += blockDim.x) {
                if (parts > 1 && stage == 0)
                    for (int w = 0; w < warps; w++) shared[((part * warps + w) * NT + nt) * EACH + i] = meet[w][i];
                else
                    meet[0][i] = joined(args.chains, [&](int w) { return parts > 1 ? shared[(w * NT + nt) * EACH + i] : meet[w][i]; });
            }
            __syncthreads();
            if (parts > 1 && stage == 0) continue;
            if (ADAPTED && nt == 0) complete_sums(CHANGE, turn);
            for (int i = threadIdx.x; i < EACH; i += blockDim.x) {
                int at, row, n;
                place<S>(i, PAIRS, at, row, n);
                n += (group * NT + nt) * 8;
                const int t = GATE ? first + at / 2 : first + at, out = t * 16 + row;
                if (n % RECORD_ROWS || n >= args.m || t >= half || out >= args.rows || (GATE && (at & 1))) continue;
                // The same row of the other tile is 16 lanes further.
                const auto of = [&](int which) {
                    const float value = plain(whole<S>(meet[0], i + 16 * which), Weights::UNIT, ends, which, t, out);
                    if (!ADAPTED) return value;
                    const float bias = ends.biases[which] ? ends.biases[which][out] : 0;
                    return changed<OUT, GATE != 0>(CHANGE, n / RECORD_ROWS, which * args.rows + out, bias, value);
                };
                const float value = GATE ? gated<GATE>(of(0), of(1), args.limit) : of(0);
                store((OUT*)args.y + head * args.y_head + (i64)(n / RECORD_ROWS) * args.y_stride + out, value);
            }
            __syncthreads();
        }
        if (parts > 1 && stage == 0) {
            // The last of the blocks joins all their sums.
            __threadfence();
            __syncthreads();
            u32* arrived = args.arrived + (i64)blockIdx.z * gridDim.x + blockIdx.x;
            if (threadIdx.x == 0) turn = atomicAdd(arrived, 1);
            __syncthreads();
            if (turn != parts - 1) return;
            if (threadIdx.x == 0) *arrived = 0;
            __threadfence();
        }
    }
}
