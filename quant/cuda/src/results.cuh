// From the sums of a block's warps to results: chains are joined in one order, then come the format's
// unit, factors of tiles, biases and gates.
#pragma once
#include "gates.cuh"
#include "sums.cuh"

constexpr int MOST_CHAINS = 8;

// Result `i` of a block, in the order of its threads: which of its tiles, row and activations.
template <class S>
FN void place(int i, int pairs, int& tile, int& row, int& n) {
    const int lane = i % 32, p = i / 32 / (S::ROWS * S::COLUMNS) % pairs, r = i / 32 / S::COLUMNS % S::ROWS, c = i / 32 % S::COLUMNS;
    const Lane l = Lane::make(lane);
    tile = 2 * p + l.g / 4;
    row = 4 * l.q + (S::ROWS == 1 ? l.t : r);
    n = S::ROWS == 1 ? 0 : S::COLUMNS == 1 ? l.t : 2 * l.t + c;
}

// The sum of all chains, one after another.
template <class Number>
FN float joined(int count, Number number) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < MOST_CHAINS; i++)
        if (i < count) sum = plus(sum, number(i));
    return sum;
}

// Every warp's sums of eight rows of activations (of which `nt` counts), in the order of results.
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

// A result, whose row of activations may have two rows of records, one after the other.
template <class S>
FN float whole(const float* sums, int i) {
    return FINE ? plus(sums[i], sums[i + (S::COLUMNS == 1 ? 1 : 32)]) : sums[i];
}

// What multiplies each tile and is added to each row: of the matrix, or a gate's and of the up rows. Or null.
struct Ends {
    const float* factors[2];
    const float* biases[2];
};

// A result by its sum, of a row of a tile; `beside` is the sum of the up row that belongs to a gate's.
template <int KIND>
FN float finished(float sum, float beside, float unit, const Ends& ends, int tile, int row, float limit) {
    float value = times(sum, unit);
    if (ends.factors[0]) value = times(value, ends.factors[0][tile]);
    if (ends.biases[0]) value = plus(value, ends.biases[0][row]);
    if constexpr (KIND == RELU2) {
        value = value > 0 ? value * value : 0;
    } else if constexpr (KIND != 0) {
        float up = times(beside, unit);
        if (ends.factors[1]) up = times(up, ends.factors[1][tile]);
        if (ends.biases[1]) up = plus(up, ends.biases[1][row]);
        value = gated<KIND>(value, up, limit);
    }
    return value;
}
