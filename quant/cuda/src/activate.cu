// Applies an activation to every element of rows, which may be gates followed by as many ups.
//
//   ACTIVATION   see gates.cuh
//   GATED        1: activation(gate) * up
// OUT          float or Bf16: the type of y
#include "gates.cuh"

struct Activate {
    const float* x;  // (m, width); (m, 2 width) if GATED
    OUT* y;          // (m, width)
    int width;
    float low, high;  // bounds of CLIP
};

extern "C" __global__ void activate(Activate args) {
    const int i = blockIdx.y * blockDim.x + threadIdx.x;
    if (i >= args.width) return;
    const float* at = args.x + (i64)blockIdx.x * (GATED ? 2 : 1) * args.width + i;
    float value = *at;
    if constexpr (ACTIVATION == CLIP)
        value = value < args.low ? args.low : value > args.high ? args.high : value;
    else
        value = activated<ACTIVATION>(value);
    if constexpr (GATED) value = times(value, at[args.width]);
    store(args.y + (i64)blockIdx.x * args.width + i, value);
}
