// Multiplies the rows of x by the `a` of their changes. A warp computes one rank of one row.
#include "low_rank.cuh"

extern "C" __global__ void low_rank_down(AdaptedRows args) {
    const int to = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
    if (to < args.missing) compute_sum(args, to);
}
