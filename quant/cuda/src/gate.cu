// A row of gates and as many ups to gate(g) * up.
//
//   GATE   see gates.cuh
#include "gates.cuh"

struct Gate {
    const Bf16* x;  // (m, 2 width)
    Bf16* y;        // (m, width)
    int width;
};

extern "C" __global__ void gate(Gate args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= args.width) return;
    const Bf16* x = args.x + (i64)blockIdx.y * 2 * args.width;
    store(args.y + (i64)blockIdx.y * args.width + i, gated<GATE>(value_of(x[i]), value_of(x[args.width + i]), 0));
}
