// Multiplies the rows of x by the `a` of their changes. A warp computes one rank of one row.
//
//   RECORDS   1: x is records (records.cuh, with their FINE); 0: bf16
#include "low_rank.cuh"
#include "records.cuh"

struct LowRankDown {
    const Change* changes;  // (parts, count)
    const i32* places;      // (rows,)
    const u8* x;
    float* y;      // (parts, rows, most)
    i64 x_stride;  // in bytes
    int count, columns, most;
};

FN float recorded(const u8* row, int column) {
    const u8* record = row + (column / 64) * RECORD;
    const int step = column / 32 % 2, in = column % 32;
    const i8 code = (i8)record[in % 16 / 4 * 16 + step * 8 + in / 16 * 4 + in % 4];
    return times((float)code, *(const float*)(record + SCALES + step * 8));
}

FN float input(const u8* row, i64 stride, int column) {
#if RECORDS
    const float high = recorded(row, column);
    return FINE ? plus(high, recorded(row + stride, column)) : high;
#else
    return value_of(((const Bf16*)row)[column]);
#endif
}

extern "C" __global__ void low_rank_down(LowRankDown args) {
    const int row = blockIdx.x, rank = (blockIdx.y * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32;
    const Change* change = change_of(args.changes, args.places, args.count, blockIdx.z, row);
    if (!change || rank >= change->rank) return;  // whole warps
    const u8* x = args.x + (i64)row * (RECORDS ? RECORD_ROWS : 1) * args.x_stride;
    const u32* a = (const u32*)(change->a + (i64)rank * args.columns);
    float sum = 0;
    for (int pair = lane; pair < args.columns / 2; pair += 32) {
        const u32 both = a[pair];
        sum = fused(as_float(both << 16), input(x, args.x_stride, 2 * pair), sum);
        sum = fused(as_float(both & 0xFFFF0000u), input(x, args.x_stride, 2 * pair + 1), sum);
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) sum = plus(sum, shuffle_xor(sum, lanes));
    if (lane == 0) args.y[((i64)blockIdx.z * gridDim.x + row) * args.most + rank] = sum;
}
