// The slots that the host has filled, from RAM that the GPU sees.
#include "device.cuh"

struct FromHost {
    const float* rows;  // (slots, width)
    const int* filled;  // (slots): those that are not are left as they are
    float* y;           // (slots, width)
    int width;
};

extern "C" __global__ void from_host(FromHost args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const i64 slot = blockIdx.y;
    if (i < args.width && args.filled[slot]) args.y[slot * args.width + i] = args.rows[slot * args.width + i];
}
