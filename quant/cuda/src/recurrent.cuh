// Inputs of the recurrent layers' kernels. quant/ops/recurrent.py has the mathematics, and
// quant/ops/states.py the layout of states and rows between passes. Everything that changes from pass
// to pass is in device memory, so that a recorded CUDA graph stays valid. Sums always run in row order,
// so a row's bits depend only on the rows before it.
#pragma once
#include "gates.cuh"

enum { DELTA, SSM };

// One sequence of a pass. Row 0 is its first waiting row: one not yet in the state.
struct Sequence {
    const float *from, *from_rows;  // states, and the rings of rows
    float *to, *to_rows;            // destinations; may be the same
    i64 from_ring, to_ring;         // rows of a ring
    i64 held, fold;                 // tokens before the pass; tokens in the new state
    i64 rows, first;                // row count; first row in pass
    i64 scratch;                    // first prepared row: waiting rows, then new ones
    i64 parents, extra;             // offset in `parents`, or -1; number of held tree rows
};

struct Recurrent {
    const Sequence* sequences;
    const i64* positions;  // per sequence and layer: tokens in the old state
    const i64* parents;    // -1: the token before the tree; -2: no row follows
    const float* mixed;    // (rows, width), as projected
    float* scratch;        // prepared rows: (waiting and new, stride)
    float* seen;           // (rows, heads * value_size)
    void* out;             // convolution only: (rows, channels), or records
    const float *taps, *taps_bias, *decay, *decay_bias, *skip;
    i64 state_at, row_at;  // offsets of the layer's state and ring, in elements
    int layer, layers, width, stride, out_stride;
    int channels, factors, heads, key_heads, value_size, tiled;
    int channels_at, gates_at, strengths_at, decays_at;  // columns of a projected row
    float strength, least_step, most_step;
};

// A sequence in one layer.
struct Rows {
    const Recurrent& args;
    const Sequence& own;
    i64 position;
    int waiting, count, linear;  // the first `linear` rows are consecutive, the others form a tree
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

// Kept row i; enough are kept for convolutions to look back on. Null before the sequence.
FN const float* kept(const Rows& rows, int i) {
    const i64 token = rows.position + i;
    return token < 0 ? nullptr : rows.own.from_rows + in_ring(rows, token, rows.own.from_ring);
}

FN const float* projected(const Rows& rows, int i) {
    return rows.args.mixed + (rows.own.first + i - rows.waiting) * rows.args.width;
}

// Where to keep row i; null if not needed or already kept.
FN float* place_of(const Rows& rows, int i, int back) {
    const i64 token = rows.position + i;
    const bool stays = token >= 0 && token >= rows.own.fold - back;
    if (!stays || (i < rows.waiting && rows.own.to_rows == rows.own.from_rows)) return nullptr;
    return rows.own.to_rows + in_ring(rows, token, rows.own.to_ring);
}

// The rows that the convolution of row i reads, oldest first; negative ones are kept rows.
template <int TAPS_>
FN void look_back(const Rows& rows, int i, int (&seen)[TAPS_]) {
    for (int tap = TAPS_ - 1, from = i; tap >= 0; tap--) {
        seen[tap] = from;
        from = from >= 0 ? parent_of(rows, from) : from - 1;
    }
}
