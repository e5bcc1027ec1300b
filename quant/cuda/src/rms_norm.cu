// RMSNorm of the residual stream after adding `pending`. A block takes a row; the order of sums does
// not depend on other rows.
//   OUT       float or Bf16: the type of y
//   RECORDS   1 to write the records of products instead, FINE ones or not (records.cuh)
#include "gates.cuh"
#include "records.cuh"

struct Norm {
    float* x;              // (m, width); keeps the sum
    const float* pending;  // (m, width) or null
    const float* weight;
    void* y;  // (m, width), or records
    int width, x_stride, y_stride;
    float eps;
};

extern "C" __global__ void rms_norm(Norm args) {
    __shared__ float sums[32];
    float* x = args.x + (i64)blockIdx.x * args.x_stride;
    const float* pending = args.pending ? args.pending + (i64)blockIdx.x * args.width : nullptr;
    float sum = 0;
    for (int i = threadIdx.x; i < args.width; i += blockDim.x) {
        float value = x[i];
        if (pending) x[i] = value = plus(value, pending[i]);
        sum = fused(value, value, sum);
    }
    for (int lanes = 16; lanes; lanes >>= 1) sum = plus(sum, shuffle_xor(sum, lanes));
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    sum = 0;
    for (int warp = 0; warp < blockDim.x / 32; warp++) sum = plus(sum, sums[warp]);
    const float scale = 1.f / sqrtf(sum / args.width + args.eps);
    // Whole warps for records, whose columns are rounded up to 64.
    const int width = RECORDS ? (args.width + 63) / 64 * 64 : args.width;
    for (int i = threadIdx.x; i < width; i += blockDim.x) {
        const float value = i < args.width ? times(times(x[i], scale), args.weight[i]) : 0;
        if constexpr (RECORDS)
            write_record((u8*)args.y, blockIdx.x, args.y_stride, i, value);
        else
            store((OUT*)args.y + (i64)blockIdx.x * args.y_stride + i, value);
    }
}
