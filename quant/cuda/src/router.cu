// Router logits in float32: a warp takes one expert and one row; a row's bits depend on that row alone.
//   GATE_IN   float or Bf16: the type of the router's weights
#include "gates.cuh"

struct Router {
    const float* x;       // (m, width)
    const GATE_IN* gate;  // (experts, width)
    float* y;             // (m, experts), rows y_stride apart
    int experts, width, y_stride;
};

extern "C" __global__ void router(Router args) {
    const int expert = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (expert >= args.experts) return;
    const float* x = args.x + (i64)blockIdx.y * args.width;
    const GATE_IN* gate = args.gate + (i64)expert * args.width;
    float sum = 0;
    for (int i = lane; i < args.width; i += 32) sum = fused(value_of(gate[i]), x[i], sum);
    for (int lanes = 16; lanes; lanes >>= 1) sum = plus(sum, shuffle_xor(sum, lanes));
    if (lane == 0) args.y[(i64)blockIdx.y * args.y_stride + expert] = sum;
}
