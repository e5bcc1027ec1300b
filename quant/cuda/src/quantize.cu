// Quantizes activation rows to records of 8 bits (records.cuh). A warp takes 32 columns.
//
//   IN     float or Bf16
//   FINE   see records.cuh
#include "gates.cuh"
#include "records.cuh"

struct Quantize {
    const IN* x;  // (m, columns) per head
    u8* records;
    i64 x_head, records_head;
    int x_stride, records_stride;
    int m, columns;
};

extern "C" __global__ void quantize(Quantize args) {
    const int column = blockIdx.y * blockDim.x + threadIdx.x, row = blockIdx.x, head = blockIdx.z;
    if (column >= (args.columns + 63) / 64 * 64) return;  // whole warps
    const IN* x = args.x + head * args.x_head + (i64)row * args.x_stride;
    const float value = column < args.columns ? value_of(x[column]) : 0;
    write_record(args.records + head * args.records_head, row, args.records_stride, column, value);
}
