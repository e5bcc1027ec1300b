// Arguments of the kernels for few and for many rows.
#pragma once
#include "results.cuh"

struct Linear {
    const u8* x;    // records of rows, padded to a multiple of 8
    const u8* w;    // tiles
    void* y;        // (m, rows) per head
    const float* bias;     // (rows,) or null
    const float* factors;  // (tiles,) or null: a factor per tile
    float* partial;        // sums of blocks that share rows, then counters of finished blocks; or null
    u32* arrived;
    i64 x_head, y_head, tile_bytes;
    int x_stride, y_stride;
    int m, rows, tiles, steps;  // m: rows of records; `rows` and `tiles` are per head
    int chains;                 // chains of all blocks that share rows
    float limit;
};
