// Low-rank changes of a product's rows (quant/ops/adapters.py): y = factors * (W x) + b (a x).
#pragma once
#include "gates.cuh"

struct Change {
    const Bf16* a;         // (rank, columns), columns even
    const Bf16* b;         // (rows, rank)
    const float* factors;  // (rows,), or null
    i32 rank, rows;
    i32 row, count;  // of x and y: from which on, how many
    i32 first;       // of y's columns
};
