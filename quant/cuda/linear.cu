// Products of 1 to 64 rows with one matrix, or with a matrix for each head. A block takes 32 PAIRS weight
// rows; its warps are the chains that the columns are dealt out to, joined in order. Compiled for
//
//   FORMAT PAIRS_ WIDTH NT_   see sums.cuh
//   GATE                      0, or a matrix of gate rows before as many up rows, and how they meet
//   OUT                       float or Bf16
#include "gates.cuh"
#include "sums.cuh"

using Weights = FORMAT;

struct Linear {
    const u8* x;    // records of rows, in whole eights of them
    const u8* w;    // tiles
    void* y;        // (m, rows) of each head
    const float* bias;     // (rows,) or null
    const float* factors;  // (tiles,) or null: what multiplies each tile
    float* partial;        // of blocks that share rows, and how many of them are done; or null
    u32* arrived;
    i64 x_head, y_head, tile_bytes;
    int x_stride, y_stride;
    int m, rows, tiles, steps;  // `rows` and `tiles` of a head
    int chains;                 // of all blocks that share rows
    float limit;
};

// Result `i` of a block, in the order of its threads: which of its tiles, row and activations.
template <class S>
FN void place(int i, int pairs, int& tile, int& row, int& n) {
    const int lane = i % 32, p = i / 32 / (S::ROWS * S::COLUMNS) % pairs, r = i / 32 / S::COLUMNS % S::ROWS, c = i / 32 % S::COLUMNS;
    const Lane l = Lane::make(lane);
    tile = 2 * p + l.g / 4;
    row = 4 * l.q + (S::ROWS == 1 ? l.t : r);
    n = S::ROWS == 1 ? 0 : S::COLUMNS == 1 ? l.t : 2 * l.t + c;
}

// The sum of W numbers in the order of a tree, which is the same however chains are shared out to blocks.
template <class Number>
FN float joined(int count, Number number) {
    float sums[8];
#pragma unroll
    for (int i = 0; i < 8; i++) sums[i] = i < count ? number(i) : 0;
#pragma unroll
    for (int width = 1; width < 8; width *= 2)
#pragma unroll
        for (int i = 0; i < 8; i += 2 * width) sums[i] = plus(sums[i], sums[i + width]);
    return sums[0];
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS) linear(Linear args) {
    constexpr int PAIRS = PAIRS_, NT = NT_, MOST = 8;
    using S = Sums<Weights, PAIRS, WIDTH, NT>;
    constexpr int EACH = PAIRS * S::ROWS * S::COLUMNS * 32;  // results of a block, for each of NT
    __shared__ float meet[MOST][EACH];
    __shared__ u32 turn;
    const int warp = threadIdx.x / 32, warps = blockDim.x / 32, parts = gridDim.y;
    const Lane lane = Lane::make(threadIdx.x % 32);
    const int groups = (args.m + 8 * NT - 1) / (8 * NT), group = blockIdx.z % groups, head = blockIdx.z / groups;

    // Pairs of tiles: two that follow one another, or a gate's and the up rows' that belong to it.
    const int half = GATE ? args.tiles / 2 : args.tiles;
    const int first = blockIdx.x * (GATE ? PAIRS : 2 * PAIRS);
    S s;
    const u8* records = args.x + head * args.x_head + (i64)group * 8 * NT * args.x_stride;
    const int chain = blockIdx.y * warps + warp;
    s.begin(s, records, InOrder{args.x_stride}, lane, chain);
    const int in_half = GATE ? first : first + lane.g / 4, next = GATE ? 1 : 2;
    const int begin = in_half < half ? in_half : half - 1;  // the last of a matrix may lack neighbours
    const u8* tile = args.w + ((i64)head * args.tiles + begin + (GATE ? lane.g / 4 * half : 0)) * args.tile_bytes;
    if (chain < args.chains)
        s.add(s, tile, begin + next < half ? next * args.tile_bytes : 0, args.steps, lane, chain, args.chains);

    float* shared = args.partial + ((i64)blockIdx.z * gridDim.x + blockIdx.x) * parts * NT * EACH;
    for (int stage = 0; stage < (parts > 1 ? 2 : 1); stage++) {
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            if (stage == 0) {
                __syncthreads();
#pragma unroll
                for (int p = 0; p < PAIRS; p++)
#pragma unroll
                    for (int r = 0; r < S::ROWS; r++)
#pragma unroll
                        for (int c = 0; c < S::COLUMNS; c++)
                            meet[warp][((p * S::ROWS + r) * S::COLUMNS + c) * 32 + threadIdx.x % 32] = s.of[p][r][nt][c];
                __syncthreads();
            }
            for (int i = threadIdx.x; i < EACH; i += blockDim.x) {
                if (stage == 0) {
                    const float sum = joined(warps, [&](int w) { return meet[w][i]; });
                    if (parts > 1) shared[(blockIdx.y * NT + nt) * EACH + i] = sum;
                    meet[0][i] = sum;
                } else {
                    meet[0][i] = joined(parts, [&](int y) { return shared[(y * NT + nt) * EACH + i]; });
                }
            }
            __syncthreads();
            if (parts > 1 && stage == 0) continue;
            for (int i = threadIdx.x; i < EACH; i += blockDim.x) {
                int at, row, n;
                place<S>(i, PAIRS, at, row, n);
                n += (group * NT + nt) * 8;
                const int t = GATE ? first + at / 2 : first + at, out = t * 16 + row;
                if (n >= args.m || t >= half || out >= args.rows || (GATE && (at & 1))) continue;
                const float* factors = args.factors ? args.factors + head * args.tiles : nullptr;
                float value = times(meet[0][i], Weights::UNIT);
                if (factors) value = times(value, factors[t]);
                if (args.bias) value = plus(value, args.bias[out]);
                if constexpr (GATE != 0) {
                    // The same row of the other tile is 16 lanes on.
                    float up = times(meet[0][i + 16], Weights::UNIT);
                    if (factors) up = times(up, factors[half + t]);
                    if (args.bias) up = plus(up, args.bias[args.rows + out]);
                    value = gated<GATE>(value, up, args.limit);
                }
                store((OUT*)args.y + head * args.y_head + (i64)n * args.y_stride + out, value);
            }
            __syncthreads();
        }
        if (parts > 1 && stage == 0) {
            // Whoever of the blocks comes last finds what all have left.
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
