// Adds to the rows of y the `b` of their changes times the result of `a`.
//
//   OUT   float or Bf16
#include "low_rank.cuh"

extern "C" __global__ void low_rank_up(AdaptedRows args) {
    const int row = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
    if (column >= args.width || args.places[row] < 0) return;
    OUT* at = (OUT*)args.y + (i64)row * args.y_stride + column;
    store(at, changed<OUT, false>(args, row, column, args.bias ? args.bias[column] : 0, value_of(*at)));
}
