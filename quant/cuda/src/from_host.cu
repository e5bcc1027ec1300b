// Copies the slots that the host has filled from mapped RAM.
#include "device.cuh"

struct FromHost {
    const float* rows;  // (slots, width)
    const int* filled;  // (slots): 0 leaves a slot unchanged
    float* y;           // (slots, width)
    int width;
};

extern "C" __global__ void from_host(FromHost args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const i64 slot = blockIdx.y;
    if (i < args.width && args.filled[slot]) args.y[slot * args.width + i] = args.rows[slot * args.width + i];
}
