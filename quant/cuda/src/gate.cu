// Computes gate(g) * up of rows of gates followed by ups; without a gate, the activation of a row.
//
//   GATE   see gates.cuh
//   IN     float or Bf16
#include "gates.cuh"

struct Gate {
    const IN *x, *up;  // (m, width), with rows `stride` and `up_stride` apart
    Bf16* y;           // (m, width)
    int stride, up_stride, width;
    float scale;  // factor of gates
    float limit;  // see gates.cuh
    float alpha_p, alpha_n, beta, eps;  // of XIELU
};

extern "C" __global__ void gate(Gate args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= args.width) return;
    const i64 row = blockIdx.y;
    const float first = value_of(args.x[row * args.stride + i]);
    float value;
    if constexpr (GATE == RELU2)
        value = first > 0 ? first * first : first == first ? 0 : first;
    else if constexpr (GATE == XIELU)
        value = (first > 0 ? args.alpha_p * first * first : args.alpha_n * (expm1f(first < args.eps ? first : args.eps) - first)) +
                args.beta * first;
    else
        value = gated<GATE>(times(args.scale, first), value_of(args.up[row * args.up_stride + i]), args.limit);
    store(args.y + row * args.width + i, value);
}
