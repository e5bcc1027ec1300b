// Turns a block's warp sums into results: joins chains in a fixed order, then applies format unit, tile
// factors, biases and gates.
#pragma once
#include "gates.cuh"
#include "sums.cuh"

constexpr int MOST_CHAINS = 8;

// The tile, row and activation row of a block's result `i`, in thread order.
template <class S>
FN void place(int i, int pairs, int& tile, int& row, int& n) {
    const int lane = i % 32, p = i / 32 / (S::ROWS * S::COLUMNS) % pairs, r = i / 32 / S::COLUMNS % S::ROWS, c = i / 32 % S::COLUMNS;
    const Lane l = Lane::make(lane);
    tile = 2 * p + l.g / 4;
    row = 4 * l.q + (S::ROWS == 1 ? l.t : r);
    n = S::ROWS == 1 ? 0 : S::COLUMNS == 1 ? l.t : 2 * l.t + c;
}

// The sum of all chains in order.
template <class Number>
FN float joined(int count, Number number) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < MOST_CHAINS; i++)
        if (i < count) sum = plus(sum, number(i));
    return sum;
}

// Stores every warp's sums of the `nt`-th eight activation rows, in result order.
template <class S, int PAIRS, int EACH>
FN void leave(const S& s, int nt, float (&meet)[MOST_CHAINS][EACH]) {
    __syncthreads();
#pragma unroll
    for (int p = 0; p < PAIRS; p++)
#pragma unroll
        for (int r = 0; r < S::ROWS; r++)
#pragma unroll
            for (int c = 0; c < S::COLUMNS; c++)
                meet[threadIdx.x / 32][((p * S::ROWS + r) * S::COLUMNS + c) * 32 + threadIdx.x % 32] = s.of[p][r][nt][c];
    __syncthreads();
}

// A result; adds two sums if an activation row has two rows of records.
template <class S>
FN float whole(const float* sums, int i) {
    return FINE ? plus(sums[i], sums[i + (S::COLUMNS == 1 ? 1 : 32)]) : sums[i];
}

// Tile factors and row biases, or null: [0] the matrix's or gate's, [1] the up rows'.
struct Ends {
    const float* factors[2];
    const float* biases[2];
};

// The result from `sum` before a gate, of the gate rows (0) or of the up rows (1).
FN float plain(float sum, float unit, const Ends& ends, int which, int tile, int row) {
    float value = times(sum, unit);
    if (ends.factors[which]) value = times(value, ends.factors[which][tile]);
    if (ends.biases[which]) value = plus(value, ends.biases[which][row]);
    return value;
}

// The final result from `sum`; `beside` is the sum of the gate row's matching up row.
template <int KIND>
FN float finished(float sum, float beside, float unit, const Ends& ends, int tile, int row, float limit) {
    const float value = plain(sum, unit, ends, 0, tile, row);
    if constexpr (KIND == 0) return value;
    if constexpr (KIND == RELU2) return value > 0 ? value * value : 0;
    return gated<KIND>(value, plain(beside, unit, ends, 1, tile, row), limit);
}
