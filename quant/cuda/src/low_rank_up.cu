// Adds to the rows of y the `b` of their changes times the result of `a`; factors do not apply to the bias.
//
//   OUT   float or Bf16
#include "low_rank.cuh"

struct LowRankUp {
    const Change* changes;  // (parts, count)
    const i32* places;      // (rows,)
    const float* x;         // (parts, rows, most)
    const float* bias;  // per column of y, or null
    OUT* y;
    int y_stride, count, most;
};

extern "C" __global__ void low_rank_up(LowRankUp args) {
    const int row = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    const Change* found = change_of(args.changes, args.places, args.count, blockIdx.z, row);
    if (!found || column >= found->rows) return;
    const Change change = *found;
    const float* x = args.x + ((i64)blockIdx.z * gridDim.x + blockIdx.x) * args.most;
    const Bf16* b = change.b + (i64)column * change.rank;
    float sum = 0;
    for (int rank = 0; rank < change.rank; rank++) sum = fused(value_of(b[rank]), x[rank], sum);
    OUT* at = args.y + (i64)row * args.y_stride + change.first + column;
    float value = value_of(*at);
    if (change.factors) {
        const float bias = args.bias ? args.bias[change.first + column] : 0;
        value = fused(value - bias, change.factors[column], bias);
    }
    store(at, plus(value, sum));
}
