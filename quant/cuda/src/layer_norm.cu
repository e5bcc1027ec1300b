// LayerNorm of rows. A block takes a row; the order of sums does not depend on other rows.
//   OUT   float or Bf16: the type of y
#include "gates.cuh"

struct LayerNorm {
    const float *x, *weight, *bias;  // (m, width); (width,), bias may be null
    OUT* y;                          // (m, width)
    int width;
    float eps;
};

// The sum of all threads' values.
FN float sum_of_block(float sum) {
    __shared__ float sums[32];
    for (int lanes = 16; lanes; lanes >>= 1) sum = plus(sum, shuffle_xor(sum, lanes));
    __syncthreads();
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int warp = 0; warp < blockDim.x / 32; warp++) sum = plus(sum, sums[warp]);
    return sum;
}

extern "C" __global__ void layer_norm(LayerNorm args) {
    const float* x = args.x + (i64)blockIdx.x * args.width;
    OUT* y = args.y + (i64)blockIdx.x * args.width;
    float sum = 0;
    for (int i = threadIdx.x; i < args.width; i += blockDim.x) sum = plus(sum, x[i]);
    const float mean = sum_of_block(sum) / args.width;
    sum = 0;
    for (int i = threadIdx.x; i < args.width; i += blockDim.x) {
        const float off = plus(x[i], -mean);
        sum = fused(off, off, sum);
    }
    const float scale = 1.f / sqrtf(sum_of_block(sum) / args.width + args.eps);
    for (int i = threadIdx.x; i < args.width; i += blockDim.x) {
        const float value = times(times(plus(x[i], -mean), scale), args.weight[i]);
        store(y + i, args.bias ? plus(value, args.bias[i]) : value);
    }
}
