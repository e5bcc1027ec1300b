// Each `size` columns of a row times the Hadamard matrix in natural order over the root of `size`, a power
// of two up to 256. A block takes 256 columns of a row.
#include "gates.cuh"

struct Rotate {
    const Bf16* x;
    Bf16* y;
    int width, size;
    float scale;
};

extern "C" __global__ void rotate(Rotate args) {
    __shared__ float values[256];
    const int i = threadIdx.x, column = blockIdx.x * 256 + i;
    const i64 at = (i64)blockIdx.y * args.width + column;
    const bool there = column < args.width;
    float value = there ? value_of(args.x[at]) : 0;
    for (int apart = 1; apart < args.size; apart *= 2) {
        values[i] = value;
        __syncthreads();
        const float other = values[i ^ apart];
        value = i & apart ? other - value : value + other;
        __syncthreads();
    }
    if (there) store(args.y + at, value * args.scale);
}
