// Recurrent layers that consist of a convolution between two gates: a thread takes a channel of a row.
// Rows are kept for the next pass after the first gate.
//   TAPS      size of the convolution
//   RECORDS   1 to write the records of the product that comes next, FINE ones or not (records.cuh):
//             whole steps of 32
#include "recurrent.cuh"
#include "records.cuh"

constexpr int BACK = TAPS - 1;

extern "C" __global__ void recurrent_conv(Recurrent args) {
    const int channel = blockIdx.y * blockDim.x + threadIdx.x, i = (int)blockIdx.x - BACK, width = args.channels;
    const Rows rows = rows_of(args, blockIdx.z);
    if (channel >= width || i >= rows.count) return;
    float* place = place_of(rows, i, BACK);
    const bool fresh = i >= rows.waiting;
    if (!fresh && !place) return;
    auto input = [&](int row) {
        if (row >= rows.waiting) return times(projected(rows, row)[channel], projected(rows, row)[2 * width + channel]);
        const float* line = kept(rows, row);
        return line ? line[channel] : 0.f;
    };
    if (place) place[channel] = input(i);
    if (!fresh) return;
    int seen[TAPS];
    look_back(rows, i, seen);
    float sum = args.taps_bias ? args.taps_bias[channel] : 0;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) sum = fused(args.taps[(i64)tap * width + channel], input(seen[tap]), sum);
    const float value = times(sum, projected(rows, i)[width + channel]);
    const i64 row = rows.own.first + i - rows.waiting;
    if constexpr (RECORDS)
        write_record((u8*)args.out, (int)row, args.out_stride, channel, value);
    else
        store((Bf16*)args.out + row * width + channel, value);
}
