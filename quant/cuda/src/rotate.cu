// Multiplies blocks of `size` columns by the Hadamard matrix (natural order) / sqrt(size); `size` is a
// power of two up to 256. A thread block takes 256 columns of a row.
#include "gates.cuh"

struct Rotate {
    const Bf16* x;  // (heads, m, width), x_head and x_stride apart
    Bf16* y;        // the same shape, contiguous; may be x
    i64 x_head, x_stride;
    int width, size;
    float scale;
};

extern "C" __global__ void rotate(Rotate args) {
    __shared__ float values[256];
    const int i = threadIdx.x, column = blockIdx.x * 256 + i;
    const i64 row = (i64)blockIdx.z * gridDim.y + blockIdx.y;
    const bool there = column < args.width;
    float value = there ? value_of(args.x[blockIdx.z * args.x_head + blockIdx.y * args.x_stride + column]) : 0;
    for (int apart = 1; apart < args.size; apart *= 2) {
        values[i] = value;
        __syncthreads();
        const float other = values[i ^ apart];
        value = i & apart ? other - value : value + other;
        __syncthreads();
    }
    if (there) store(args.y + row * args.width + column, value * args.scale);
}
