// Multiplies rows by experts' matrices, wherever these are in GPU memory. A block takes 32 PAIRS weight
// rows of one expert and some of the slots that chose it (plan.cu); it sums as linear.cu does. Compiled
// for
//
//   FORMAT PAIRS_ WIDTH NT_   see sums.cuh
// GATE                      0: down. Else gate and up with this activation, or with RELU2 up alone
//   OUT                       float or Bf16
//   FINE                      see records.cuh
#include "plan.cuh"
#include "results.cuh"

using Weights = FORMAT;
constexpr bool PAIRED = GATE && GATE != RELU2;
constexpr int MATRIX = GATE ? 0 : DOWN;  // the first matrix to read

struct Grouped {
    const u8* x;  // records of rows; each row is read by `per` slots
    void* y;      // a row per slot
    const Expert* experts;
    const Part* parts;
    const int* slots;
    i64 tile_bytes;
    int x_stride, y_stride, per;
    int rows, tiles, steps;  // sizes of one matrix
    float limit;
};

extern "C" __global__ void __launch_bounds__(256, BLOCKS) grouped(Grouped args) {
    constexpr int PAIRS = PAIRS_, NT = NT_, UP = PAIRED ? 1 : 0;
    using S = Sums<Weights, PAIRS, WIDTH, NT, Gathered>;
    constexpr int EACH = PAIRS * S::ROWS * S::COLUMNS * 32;
    __shared__ int offsets[8 * NT];  // byte offsets of rows
    __shared__ float meet[MOST_CHAINS][EACH];
    const Part& part = args.parts[blockIdx.y];  // reloaded after the sums, which need all registers
    if (!part.count) return;
    const Lane lane = Lane::make(threadIdx.x % 32);
    for (int i = threadIdx.x; i < 8 * NT; i += blockDim.x) {
        const int n = i / RECORD_ROWS, slot = args.slots[part.first + (n < part.count ? n : 0)];
        offsets[i] = (slot / args.per * RECORD_ROWS + i % RECORD_ROWS) * args.x_stride;
    }
    __syncthreads();

    // Pairs of tiles: two consecutive ones, or a gate tile and its up tile.
    const int own = lane.g / 4, first = blockIdx.x * (PAIRED ? PAIRS : 2 * PAIRS), next = PAIRED ? 1 : 2;
    const int in_matrix = PAIRED ? first : first + own;
    const int begin = in_matrix < args.tiles ? in_matrix : args.tiles - 1;  // clamped for the last pairs
    const u8* tile = args.experts[part.expert].tiles[PAIRED ? own : MATRIX] + begin * args.tile_bytes;
    const int chain = threadIdx.x / 32, chains = blockDim.x / 32;
    S s;
    s.begin(s, args.x, Gathered{offsets, offsets}, lane, chain);
    s.add(s, tile, begin + next < args.tiles ? next * args.tile_bytes : 0, args.steps, lane, chain, chains);

    const Expert& expert = args.experts[part.expert];
    const float *bias = expert.biases[GATE ? 0 : 1], *factors = expert.factors[MATRIX];
    const Ends ends = {{factors, expert.factors[UP]}, {bias, bias && UP ? bias + args.rows : nullptr}};
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        leave<S, PAIRS>(s, nt, meet);
        for (int i = threadIdx.x; i < EACH; i += blockDim.x)
            meet[0][i] = joined(chains, [&](int w) { return meet[w][i]; });
        __syncthreads();
        for (int i = threadIdx.x; i < EACH; i += blockDim.x) {
            int at, row, n;
            place<S>(i, PAIRS, at, row, n);
            n += nt * 8;
            if (n % RECORD_ROWS) continue;
            n /= RECORD_ROWS;
            const int t = PAIRED ? first + at / 2 : first + at, out = t * 16 + row;
            if (n >= part.count || t >= args.tiles || out >= args.rows || (PAIRED && (at & 1))) continue;
            // The same row of the other tile is 16 lanes further.
            const float value = finished<GATE>(whole<S>(meet[0], i), whole<S>(meet[0], PAIRED ? i + 16 : i), Weights::UNIT, ends, t, out, args.limit);
            store((OUT*)args.y + (i64)args.slots[part.first + n] * args.y_stride + out, value);
        }
    }
}
