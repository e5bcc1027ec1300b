// Computes gate(g) * up of rows of gates followed by ups; without a gate, the activation of a row.
//
//   GATE   see gates.cuh
//   IN     float or Bf16
#include "gates.cuh"

constexpr int PARTS = GATE == RELU2 || GATE == XIELU ? 1 : 2;

struct Gate {
    const IN* x;  // (m, PARTS width)
    Bf16* y;      // (m, width)
    int width;
    float scale;  // factor of gates
    float limit;  // see gates.cuh
    float alpha_p, alpha_n, beta, eps;  // of XIELU
};

extern "C" __global__ void gate(Gate args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= args.width) return;
    const i64 row = blockIdx.y;
    const IN* x = args.x + row * PARTS * args.width;
    const float first = value_of(x[i]);
    float value;
    if constexpr (GATE == RELU2)
        value = first > 0 ? first * first : first == first ? 0 : first;
    else if constexpr (GATE == XIELU)
        value = (first > 0 ? args.alpha_p * first * first : args.alpha_n * (expm1f(first < args.eps ? first : args.eps) - first)) +
                args.beta * first;
    else
        value = gated<GATE>(times(args.scale, first), value_of(x[args.width + i]), args.limit);
    store(args.y + row * args.width + i, value);
}
