// Multiplies many rows by bf16 weights on tensor cores. A block computes a square of results, a warp 64 rows by 32
// columns of it; the next pieces of rows and weights are copied to shared memory meanwhile.
//
//   OUT    float or Bf16
// Products are added in column order, so a row's bits depend on that row alone. The inner dimension of a product may
// be permuted if both operands are: a lane loads 16 bytes of a row, which are operands of two products.
#include "gates.cuh"

struct DenseMany {
    const Bf16* x;  // (m, columns)
    const Bf16* w;  // (rows, columns)
    void* y;
    const float* bias;  // (rows,) or null
    i64 x_stride, y_stride;
    int m, rows, columns;  // columns: a multiple of 8
};

constexpr int SIDE = 128, DEPTH = 32, STAGES = 3, PIECES = DEPTH / 8;  // pieces of eight columns

extern "C" __global__ void __launch_bounds__(256, 2) dense_many(DenseMany args) {
    __shared__ uint4 xs[STAGES][SIDE * PIECES], ws[STAGES][SIDE * PIECES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int first = blockIdx.y * SIDE, start = blockIdx.x * SIDE;  // rows of x and of w
    const int steps = (args.columns + DEPTH - 1) / DEPTH;

    const auto load = [&](int step) {
        if (step >= steps) return;
#pragma unroll
        for (int at = threadIdx.x; at < SIDE * PIECES; at += 256) {
            const int row = at / PIECES, column = step * DEPTH + at % PIECES * 8;
            const int own = first + row < args.m ? first + row : args.m - 1, other = start + row < args.rows ? start + row : args.rows - 1;
            uint4 *x = &xs[step % STAGES][at], *w = &ws[step % STAGES][at];
            if (column < args.columns) {
                copy_sixteen(x, args.x + own * args.x_stride + column);
                copy_sixteen(w, args.w + (i64)other * args.columns + column);
            } else {
                *x = *w = make_uint4(0, 0, 0, 0);
            }
        }
    };

    float sums[4][4][4] = {};  // 16-row by 8-column tiles
    const int own = warp / 4 * 64 + g, other = warp % 4 * 32 + g;
    for (int step = 0; step < STAGES - 1; step++) {
        load(step);
        end_copies();
    }
    for (int step = 0; step < steps; step++) {
        wait_copies_but<STAGES - 2>();
        __syncthreads();
        load(step + STAGES - 1);  // into the stage that all warps have read
        end_copies();
        const uint4 *x = xs[step % STAGES], *w = ws[step % STAGES];
        uint4 b[4];
#pragma unroll
        for (int n = 0; n < 4; n++) b[n] = w[(other + 8 * n) * PIECES + t];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 low = x[(own + 16 * i) * PIECES + t], high = x[(own + 16 * i + 8) * PIECES + t];
            const uint4 front = make_uint4(low.x, high.x, low.y, high.y), back = make_uint4(low.z, high.z, low.w, high.w);
#pragma unroll
            for (int n = 0; n < 4; n++) {
                multiply(sums[i][n], front, b[n].x, b[n].y);
                multiply(sums[i][n], back, b[n].z, b[n].w);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int row = first + own + 16 * i + c / 2 * 8, column = start + warp % 4 * 32 + 8 * n + 2 * t + c % 2;
                if (row >= args.m || column >= args.rows) continue;
                const float value = args.bias ? plus(sums[i][n][c], args.bias[column]) : sums[i][n][c];
                store((OUT*)args.y + row * args.y_stride + column, value);
            }
}
