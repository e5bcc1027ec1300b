// What the products of few and of many rows are given.
#pragma once
#include "results.cuh"

struct Linear {
    const u8* x;    // records of rows, in whole eights of them
    const u8* w;    // tiles
    void* y;        // (m, rows) of each head
    const float* bias;     // (rows,) or null
    const float* factors;  // (tiles,) or null: what multiplies each tile
    float* partial;        // of blocks that share rows, and how many of them are done; or null
    u32* arrived;
    i64 x_head, y_head, tile_bytes;
    int x_stride, y_stride;
    int m, rows, tiles, steps;  // rows of records; `rows` and `tiles` of a head
    int chains;                 // of all blocks that share rows
    float limit;
};
