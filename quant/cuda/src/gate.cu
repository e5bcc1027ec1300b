// A row of gates and as many ups to gate(g) * up.
//
//   GATE   see gates.cuh
#include "gates.cuh"

struct Gate {
    const Bf16* x;  // (m, 2 width)
    Bf16* y;          // (m, width)
    const i64* rows;  // those that are written, or null
    int width;
};

extern "C" __global__ void gate(Gate args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= args.width) return;
    const i64 row = args.rows ? args.rows[blockIdx.y] : blockIdx.y;
    const Bf16* x = args.x + row * 2 * args.width;
    store(args.y + row * args.width + i, gated<GATE>(value_of(x[i]), value_of(x[args.width + i]), 0));
}
