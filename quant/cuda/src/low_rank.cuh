// Adapters applied to rows of a product (quant/ops/adapters.py): y = factors * (W x) + b (a x).
#pragma once
#include "gates.cuh"

struct Change {
    const Bf16* a;         // (rank, columns), columns even
    const Bf16* b;         // (rows, rank)
    const float* factors;  // (rows,), or null
    i32 rank, rows;
    i32 row, count;  // rows of x and y: first, number
    i32 first;       // first column of y
};
