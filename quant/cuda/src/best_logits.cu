// Finds the best logits of each row: by descending value, then by ascending token, NaN before all. Several
// blocks of a row leave keys of the best of their parts, which a second launch of one block joins.
#include "device.cuh"

constexpr int BEST = 64, THREADS = 256, EACH = 16;
constexpr int PART = THREADS * EACH, WARPS = THREADS / 32;

struct BestLogits {
    const float* logits;  // (rows, vocab)
    const u64* keys;      // (rows, count) of the blocks before, 0 for none; or null: the row's logits
    u64* out;             // (rows, blocks, BEST) keys; of one block each token, and its logit's bits above
    int vocab, count;
};

extern "C" __global__ void __launch_bounds__(THREADS) best_logits(BestLogits args) {
    __shared__ u64 found[BEST];
    __shared__ u32 counts[2][WARPS], places;
    const int thread = threadIdx.x;
    const i64 row = blockIdx.y;
    const float* logits = args.logits + row * args.vocab;
    u64 keys[EACH + 1];  // all different; the last is one of the best so far
    keys[EACH] = 0;
    for (int first = blockIdx.x * PART; first < args.count; first += gridDim.x * PART) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int at = first + i * THREADS + thread;
            keys[i] = at >= args.count ? 0 : args.keys ? args.keys[row * args.count + at] : (u64)ordered(logits[at]) << 32 | ~(u32)at;
        }
        u64 least = 0;  // if there are BEST keys, as many reach it
        for (int bit = 63, count = 0; bit >= 0 && count != BEST; bit--) {
            const u64 trial = least | 1ull << bit;
            i32 own = 0;
#pragma unroll
            for (int i = 0; i <= EACH; i++) own += keys[i] >= trial;
            for (int lanes = 16; lanes; lanes >>= 1) own += shuffle_xor(own, lanes);
            if (thread % 32 == 0) counts[bit % 2][thread / 32] = own;
            __syncthreads();
            count = 0;
            for (int warp = 0; warp < WARPS; warp++) count += counts[bit % 2][warp];
            if (count >= BEST) least = trial;
        }
        if (thread < BEST) found[thread] = 0;
        if (thread == 0) places = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i <= EACH; i++)
            if (keys[i] && keys[i] >= least) found[atomicAdd(&places, 1)] = keys[i];
        __syncthreads();
        keys[EACH] = thread < BEST ? found[thread] : 0;
    }
    if (thread >= BEST) return;
    const u64 own = keys[EACH];
    u64* out = args.out + (row * gridDim.x + blockIdx.x) * BEST;
    int place = 0;
    for (int i = 0; i < BEST; i++) place += found[i] > own;
    const u32 token = ~(u32)own;
    if (gridDim.x > 1)
        out[thread] = own;
    else if (own)
        out[place] = (u64)as_bits(logits[token]) << 32 | token;
}
