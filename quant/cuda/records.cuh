// Activations in 8 bits: what the products read. Of 64 columns, two steps of 32, a record holds
//
//   64 bytes   for each t of 0 to 3: columns 4t to 4t + 3 and 16 + 4t to 16 + 4t + 3 of the first step,
//              then of the second
//   64 bytes   the same times -1
//   16 bytes   for each step its scale and the sum of the values that its bytes stand for, as float
//
// A step's scale is a 127th of its largest magnitude.
#pragma once
#include "device.cuh"

constexpr int RECORD = 144, NEGATIVES = 64, SCALES = 128;

// Called by the 32 threads of a step, each with its column.
FN void write_record(u8* row, int column, float value) {
    float most = value < 0 ? -value : value;
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) {
        const float other = shuffle_xor(most, lanes);
        most = other > most ? other : most;
    }
    const float scale = most / 127.f, inverse = most > 0 ? 127.f / most : 0;
    const i32 code = nearest(times(value, inverse));
    i32 sum = code;
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) sum += shuffle_xor(sum, lanes);
    u8* record = row + (column / 64) * RECORD;
    const int step = column / 32 % 2, in = column % 32;
    u8* at = record + in % 16 / 4 * 16 + step * 8 + in / 16 * 4 + in % 4;
    at[0] = (u8)code, at[NEGATIVES] = (u8)-code;
    if (in == 0) *(float2*)(record + SCALES + step * 8) = make_float2(scale, times((float)sum, scale));
}
