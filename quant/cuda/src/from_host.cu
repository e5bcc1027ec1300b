// Copies the slots that the host has filled from mapped RAM.
#include "plan.cuh"

struct FromHost {
    const Expert* experts;
    const int* chosen;  // experts of each row's slots, rows `stride` apart
    const float* rows;  // (slots, width)
    float* y;           // (slots, width)
    int width, used, stride, kinds;
};

extern "C" __global__ void from_host(FromHost args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x, slot = blockIdx.y;
    if (i < args.width && is_absent(args.experts, args.chosen, args.used, args.stride, args.kinds, slot))
        args.y[(i64)slot * args.width + i] = args.rows[(i64)slot * args.width + i];
}
