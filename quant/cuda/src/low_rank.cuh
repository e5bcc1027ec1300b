// Adapters applied to rows of a product (quant/ops/adapters.py): y = factors * (W x) + b (a x).
//
//   RECORDS   1: x is records (records.cuh, with their FINE); 0: bf16
#pragma once
#include "gates.cuh"
#include "records.cuh"

// What an adapter does to some columns of y; without ranks: nothing.
struct Change {
    const Bf16* a;         // (rank, columns), columns even
    const Bf16* b;         // (rows, rank)
    const float* factors;  // (rows,), or null
    i32 rank, rows;
    i32 first;  // first column of y
    i32 unused;
};

struct AdaptedRows {
    const Change* changes;  // (parts, count)
    const i32* places;      // (rows,), those of the rows' adapters among the `count` of each part; -1: no adapter
    const u8* x;
    float* sums;           // (parts, rows, most): a x
    u32* counters;         // of sums begun, of sums done, of blocks that have ended; kernels leave zeros
    const float* bias;     // for low_rank_up: per column of y, or null
    void* y;               // likewise
    i64 x_stride;          // in bytes
    int parts, count, columns, rows, most, y_stride, width;
    int first;             // column of y at which a product begins
    int missing;           // sums: all or none
    int helpers;           // blocks of the grid's first row (blockIdx.y) for each z, which compute sums only
    int blocks;            // those that use the counters
};

// The change of a row of x by a part of the matrix, or null.
FN const Change* change_of(const AdaptedRows& args, int part, int row) {
    const i32 place = args.places[row];
    return place < 0 || !args.changes[part * args.count + place].rank ? nullptr : args.changes + part * args.count + place;
}

// Two columns of a row of records.
FN float2 recorded(const u8* row, int column) {
    const u8* record = row + (column / 64) * RECORD;
    const int step = column / 32 % 2, in = column % 32;
    const u16 codes = *(const u16*)(record + in % 16 / 4 * 16 + step * 8 + in / 16 * 4 + in % 4);
    const float scale = *(const float*)(record + SCALES + step * 8);
    return make_float2(times((float)(i8)codes, scale), times((float)(i8)(codes >> 8), scale));
}

FN float2 input(const u8* row, i64 stride, int column) {
    const Bf16* x = (const Bf16*)row + column;
    if (!RECORDS) return make_float2(value_of(x[0]), value_of(x[1]));
    const float2 high = recorded(row, column), low = FINE ? recorded(row + stride, column) : high;
    return FINE ? make_float2(plus(high.x, low.x), plus(high.y, low.y)) : high;
}

// Computes a sum of `sums`; called by a warp.
FN void compute_sum(const AdaptedRows& args, int to) {
    const int rank = to % args.most, row = to / args.most % args.rows, lane = threadIdx.x % 32;
    const Change* change = change_of(args, to / args.most / args.rows, row);
    if (!change || rank >= change->rank) return;  // whole warps
    const u8* x = args.x + (i64)row * (RECORDS ? RECORD_ROWS : 1) * args.x_stride;
    const u32* a = (const u32*)(change->a + (i64)rank * args.columns);
    for (int line = lane; line < args.columns / 64; line += 32) prefetch(a + 32 * line);
    if (args.helpers)  // others need b soon
        for (int line = rank * 32 + lane; line < change->rows * change->rank / 64; line += 32 * change->rank) prefetch(change->b + 64 * line);
    float sum = 0;
#pragma unroll 8  // several loads at once
    for (int pair = lane; pair < args.columns / 2; pair += 32) {
        const u32 both = a[pair];
        const float2 seen = input(x, args.x_stride, 2 * pair);
        sum = fused(as_float(both << 16), seen.x, sum);
        sum = fused(as_float(both & 0xFFFF0000u), seen.y, sum);
    }
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) sum = plus(sum, shuffle_xor(sum, lanes));
    if (lane == 0) args.sums[to] = sum;
}

// Returns once all sums are done. A block begins sums that no other one has begun, and waits only when none is left: then
// blocks that run compute the rest, so that the order in which blocks run does not matter. `turn` is shared memory.
FN void complete_sums(const AdaptedRows& args, u32& turn) {
    const u32 warps = blockDim.x / 32, missing = args.missing;
    volatile u32* done = args.counters + 1;
    while (missing) {
        __syncthreads();
        if (threadIdx.x == 0) turn = *done < missing ? atomicAdd(args.counters, warps) : missing;
        __syncthreads();
        if (turn >= missing) break;
        if (turn + threadIdx.x / 32 < missing) compute_sum(args, turn + threadIdx.x / 32);
        __threadfence();
        __syncthreads();
        if (threadIdx.x == 0) atomicAdd(args.counters + 1, warps);
    }
    if (threadIdx.x == 0 && missing) {
        while (*done < missing) {}
        if (atomicAdd(args.counters + 2, 1) == args.blocks - 1) args.counters[0] = args.counters[1] = args.counters[2] = 0;
    }
    __syncthreads();
    __threadfence();
}

// A result of type T, unless it is GATED next, with what its row's adapter does; factors do not apply to the bias.
template <class T, bool GATED>
FN float changed(const AdaptedRows& args, int row, int column, float bias, float value) {
    for (int part = 0; part < args.parts; part++) {
        const Change* found = change_of(args, part, row);
        const int at = found ? args.first + column - found->first : -1;
        if (at < 0 || at >= found->rows) continue;
        const float* sums = args.sums + ((i64)part * args.rows + row) * args.most;
        const Bf16* b = found->b + (i64)at * found->rank;
        float sum = 0;
        for (int i = 0; i < found->rank; i++) sum = fused(value_of(b[i]), sums[i], sum);
        T stored;
        if (!GATED) store(&stored, value), value = value_of(stored);
        if (found->factors) value = fused(value - bias, found->factors[at], bias);
        value = plus(value, sum);
    }
    return value;
}
