// An activation of every number of rows, which may be gates with as many ups behind them.
//
//   ACTIVATION   see gates.cuh
//   GATED        1: activation(gate) * up
//   OUT          float or Bf16: what y is stored as
#include "gates.cuh"

struct Activate {
    const float* x;  // (m, width), GATED twice as wide
    OUT* y;          // (m, width)
    int width;
    float low, high;  // CLIP's
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
