// Activations quantized to 8 bits, as the products read them. A record of 64 columns, two steps of 32, has
//   64 bytes   for t = 0 to 3: columns 4t to 4t + 3 and 16 + 4t to 16 + 4t + 3 of the first step, then of the second
//   64 bytes   the negated values
//   16 bytes   per step: the scale, and the sum of the dequantized values, as float
// A step's scale is 1/127 of its largest magnitude, rounded to 22 bits so that 3 times it is an exact float. With FINE,
// a row has 15 bits: two rows of records, multiples of 254 and the remainder, whose products are added.
#pragma once
#include "device.cuh"

#ifndef FINE
#define FINE 0
#endif

constexpr int RECORD = 144, NEGATIVES = 64, SCALES = 128;
constexpr int RECORD_ROWS = FINE ? 2 : 1;  // rows of records per row

FN float in_22_bits(float f) { return as_float(as_bits(f) & ~3u); }

FN void write_codes(u8* row, int column, i32 code, float scale) {
    i32 sum = code;
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) sum += shuffle_xor(sum, lanes);
    u8* record = row + (column / 64) * RECORD;
    const int step = column / 32 % 2, in = column % 32;
    u8* at = record + in % 16 / 4 * 16 + step * 8 + in / 16 * 4 + in % 4;
    at[0] = (u8)code, at[NEGATIVES] = (u8)-code;
    if (in == 0) *(float2*)(record + SCALES + step * 8) = make_float2(scale, times((float)sum, scale));
}

// Called by the 32 threads of a step, each with its column; rows of records are `stride` bytes apart.
FN void write_record(u8* records, int row, i64 stride, int column, float value) {
    float most = value < 0 ? -value : value;
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) {
        const float other = shuffle_xor(most, lanes);
        most = other > most ? other : most;
    }
    // FINE codes: one unit of the upper part is 254 of the lower.
    constexpr float PARTS = FINE ? 254 : 1, LEVELS = FINE ? 127 + 126 / 254.f : 127;
    const float scale = in_22_bits(most / LEVELS), inverse = scale > 0 ? PARTS / scale : 0;
    const i32 code = nearest(times(value, inverse));
    records += row * RECORD_ROWS * stride;
    if constexpr (FINE) {
        const i32 high = (code + (code < 0 ? -127 : 127)) / 254;
        write_codes(records, column, high, scale);
        write_codes(records + stride, column, code - 254 * high, in_22_bits(scale / 254.f));
    } else {
        write_codes(records, column, code, scale);
    }
}
