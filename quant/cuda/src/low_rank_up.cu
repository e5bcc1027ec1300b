// Adds each change's `b` times the result of its `a` to its rows of y; factors do not apply to the bias.
//
//   OUT   float or Bf16
#include "low_rank.cuh"

struct LowRankUp {
    const Change* changes;
    const float* x;  // (changes, gridDim.x, most)
    const float* bias;  // per column of y, or null
    OUT* y;
    int y_stride, most;
};

extern "C" __global__ void low_rank_up(LowRankUp args) {
    const Change change = args.changes[blockIdx.z];
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if ((int)blockIdx.x >= change.count || column >= change.rows) return;
    const float* x = args.x + ((i64)blockIdx.z * gridDim.x + blockIdx.x) * args.most;
    const Bf16* b = change.b + (i64)column * change.rank;
    float sum = 0;
    for (int rank = 0; rank < change.rank; rank++) sum = fused(value_of(b[rank]), x[rank], sum);
    OUT* at = args.y + (i64)(change.row + (int)blockIdx.x) * args.y_stride + change.first + column;
    float value = value_of(*at);
    if (change.factors) {
        const float bias = args.bias ? args.bias[change.first + column] : 0;
        value = fused(value - bias, change.factors[column], bias);
    }
    store(at, plus(value, sum));
}
