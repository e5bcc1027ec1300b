// Copies rows: converted, selected by an index, scaled, or added to the destination.
//
//   IN OUT   float or Bf16
#include "gates.cuh"

struct MoveRows {
    const IN* x;         // rows of `width` elements, x_stride apart
    OUT* y;              // (n, width), rows y_stride apart; may be x
    const i64* index;    // (n): rows of x; null: all, in order
    const float* gates;    // (n) or null: each row is multiplied by its gate's sigmoid
    const float* factors;  // (n) or null: of rows
    const float* scales;  // (width) or null: factors of columns
    i64 x_stride, y_stride;
    int width, add;
    float scale, softcap, total;  // softcap: 0 is none; total: factor of sums
};

extern "C" __global__ void move_rows(MoveRows args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const i64 row = blockIdx.y;
    if (i >= args.width) return;
    const i64 from = args.index ? args.index[row] : row;
    float value = times(value_of(args.x[from * args.x_stride + i]), args.scale);
    if (args.scales) value = times(value, args.scales[i]);
    if (args.factors) value = times(value, args.factors[row]);
    if (args.gates) value = times(value, sigmoid(args.gates[row]));
    if (args.softcap) value = times(tanhf(value / args.softcap), args.softcap);
    OUT* y = args.y + row * args.y_stride + i;
    store(y, args.add ? times(plus(value_of(*y), value), args.total) : value);
}
