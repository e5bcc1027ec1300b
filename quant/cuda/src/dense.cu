// Multiplies rows by bf16 weights, or by one matrix per head. A warp takes a weight row; each lane
// adds 8 of every 256 columns in order, and lanes are joined in order: a row's bits depend on that
// row alone.
//
//   OUT    float or Bf16
//   WIDE   1 if columns are a multiple of 8; otherwise a lane adds one of every 32
#include "gates.cuh"

struct Dense {
    const Bf16* x;  // (m, columns) per head
    const Bf16* w;  // (rows, columns)
    void* y;
    const float* bias;  // (rows,) or null
    i64 x_head, y_head;
    int x_stride, y_stride;
    int m, rows, columns;
};

FN float upper(u32 two) { return as_float(two & 0xFFFF0000u); }
FN float lower(u32 two) { return as_float(two << 16); }

// Multiply-adds the eight elements of a and b in memory order.
FN float eight(const uint4& a, const uint4& b, float sum) {
    const u32 left[4] = {a.x, a.y, a.z, a.w}, right[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = fused(lower(left[i]), lower(right[i]), sum);
        sum = fused(upper(left[i]), upper(right[i]), sum);
    }
    return sum;
}

extern "C" __global__ void dense(Dense args) {
    constexpr int ROWS = 8;  // rows of x at once
    const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.z;
    if (row >= args.rows) return;
    const Bf16* w = args.w + ((i64)head * args.rows + row) * args.columns;
    for (int first = blockIdx.y * ROWS; first < args.m; first += gridDim.y * ROWS) {
        float sums[ROWS] = {};
        const Bf16* x = args.x + head * args.x_head + (i64)first * args.x_stride;
        for (int column = (WIDE ? 8 : 1) * lane; column < args.columns; column += WIDE ? 256 : 32) {
#pragma unroll
            for (int n = 0; n < ROWS; n++) {
                if (first + n >= args.m) continue;
                const Bf16* own = x + n * args.x_stride + column;
                if constexpr (WIDE) sums[n] = eight(*(const uint4*)own, *(const uint4*)(w + column), sums[n]);
                else sums[n] = fused(value_of(*own), value_of(w[column]), sums[n]);
            }
        }
#pragma unroll
        for (int n = 0; n < ROWS; n++) {
            for (int lanes = 16; lanes; lanes >>= 1) sums[n] = plus(sums[n], shuffle_xor(sums[n], lanes));
            if (lane == 0 && first + n < args.m) {
                const float value = args.bias ? plus(sums[n], args.bias[row]) : sums[n];
                store((OUT*)args.y + head * args.y_head + (i64)(first + n) * args.y_stride + row, value);
            }
        }
    }
}
