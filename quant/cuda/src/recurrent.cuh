// Recurrent layers: what their kernels read. quant/ops/recurrent.py has the mathematics, and
// quant/ops/states.py says where states and rows lie between passes. All that changes from pass to
// pass lies in device memory, so that a recorded CUDA graph stays valid. Rows are added one after
// another in sums of one order: a row's bits depend on the rows before it alone.
#pragma once
#include "gates.cuh"

enum { DELTA, SSM };

// One sequence of a pass. Its rows are numbered from the first that waits, which the state has not yet.
struct Sequence {
    const float *from, *from_rows;  // states, and the rings of rows
    float *to, *to_rows;            // where they go: the same, or others
    i64 from_ring, to_ring;         // rows of a ring
    i64 held, fold;                 // tokens before the pass, and those that the new state has
    i64 rows, first;                // of the pass, from the first on
    i64 scratch;                    // where the rows that wait, and then the new ones, are prepared
    i64 parents, extra;             // where they are in `parents`, or -1; those of a tree that are held
};

struct Recurrent {
    const Sequence* sequences;
    const i64* positions;  // of each sequence's layers: tokens that the old state has
    const i64* parents;    // -1: the token before the tree; -2: no row follows
    const float* mixed;    // (rows, width), as projected
    float* scratch;        // (rows that wait and new ones, stride)
    float* seen;           // (rows, heads * value_size)
    void* out;             // of a convolution alone: (rows, channels), or records
    const float *taps, *taps_bias, *decay, *decay_bias, *skip;
    i64 state_at, row_at;  // the layer's state in a set; its ring, in numbers of one row
    int layer, layers, width, stride, out_stride;
    int channels, factors, heads, key_heads, value_size, tiled;
    int channels_at, gates_at, strengths_at, decays_at;  // in a row as projected
    float strength, least_step, most_step;
};

// A sequence as a layer sees it.
struct Rows {
    const Recurrent& args;
    const Sequence& own;
    i64 position;
    int waiting, count, linear;  // `linear` rows follow one another, the others are a tree's
};

FN Rows rows_of(const Recurrent& args, int sequence) {
    const Sequence& own = args.sequences[sequence];
    const i64 position = args.positions[(i64)sequence * args.layers + args.layer];
    const int waiting = (int)(own.held - position), count = waiting + (int)own.rows;
    return {args, own, position, waiting, count, own.parents < 0 ? count : waiting - (int)own.extra};
}

FN i64 told(const Rows& rows, int i) { return rows.args.parents[rows.own.parents + i - rows.linear]; }
FN bool wanted(const Rows& rows, int i) { return i < rows.linear || told(rows, i) >= -1; }

FN int parent_of(const Rows& rows, int i) {
    if (i < rows.linear) return i - 1;
    const i64 before = told(rows, i);
    return before < 0 ? rows.linear - 1 : rows.linear + (int)before;
}

FN i64 in_ring(const Rows& rows, i64 token, i64 ring) {
    return ring * rows.args.row_at + token % ring * (rows.args.channels + rows.args.factors);
}

// Row i of those kept, which go back to what convolutions look back on; null before the sequence.
FN const float* kept(const Rows& rows, int i) {
    const i64 token = rows.position + i;
    return token < 0 ? nullptr : rows.own.from_rows + in_ring(rows, token, rows.own.from_ring);
}

FN const float* projected(const Rows& rows, int i) {
    return rows.args.mixed + (rows.own.first + i - rows.waiting) * rows.args.width;
}

// Where row i is to be kept; null where it need not be, or is.
FN float* place_of(const Rows& rows, int i, int back) {
    const i64 token = rows.position + i;
    const bool stays = token >= 0 && token >= rows.own.fold - back;
    if (!stays || (i < rows.waiting && rows.own.to_rows == rows.own.from_rows)) return nullptr;
    return rows.own.to_rows + in_ring(rows, token, rows.own.to_ring);
}

// Rows that the convolution of row i reads, the oldest first: those below 0 are kept ones.
template <int TAPS_>
FN void look_back(const Rows& rows, int i, int (&seen)[TAPS_]) {
    for (int tap = TAPS_ - 1, from = i; tap >= 0; tap--) {
        seen[tap] = from;
        from = from >= 0 ? parent_of(rows, from) : from - 1;
    }
}
