// Adapters applied to rows of a product (quant/ops/adapters.py): y = factors * (W x) + b (a x).
#pragma once
#include "gates.cuh"

// What an adapter does to some columns of y; without ranks: nothing.
struct Change {
    const Bf16* a;         // (rank, columns), columns even
    const Bf16* b;         // (rows, rank)
    const float* factors;  // (rows,), or null
    i32 rank, rows;
    i32 first;  // first column of y
    i32 unused;
};

// The change of a row of x by a part of the matrix, or null. `places` are those of the rows' adapters among the
// `count` of each part; -1: no adapter.
FN const Change* change_of(const Change* changes, const i32* places, int count, int part, int row) {
    const i32 place = places[row];
    return place < 0 || !changes[part * count + place].rank ? nullptr : changes + part * count + place;
}
