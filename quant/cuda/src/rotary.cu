// cos and sin of every position times every frequency.
#include "device.cuh"

struct Rotary {
    const i64* positions;      // (n)
    const float* frequencies;  // (half)
    float *cos, *sin;          // (n, half)
    int n, half;
    float scale;
};

extern "C" __global__ void rotary(Rotary args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= args.n * args.half) return;
    const float angle = times((float)args.positions[i / args.half], args.frequencies[i % args.half]);
    args.cos[i] = times(cosf(angle), args.scale);
    args.sin[i] = times(sinf(angle), args.scale);
}
