// Which keys the rows of a span see, and where these and their values lie.
#pragma once
#include "kv.h"

namespace {

struct Query {
    const float* q;   // (E), already scaled
    int first, last;  // keys [first, last) are seen
    int row;          // of the span

    bool sees(int key) const { return key >= first && key < last; }
    bool sees_all(int from, int to) const { return from >= first && to <= last; }
};

// Where the keys and values of a block lie: those from `split` on, a multiple of 16, in `tail`.
struct Sources {
    Piece old, tail;
    int split;

    explicit Sources(const Piece& piece) : old(piece), tail(piece), split(KEYS) {}
    Sources(const Piece& old, const Piece& tail, int split) : old(old), tail(tail), split(split) {}
};

// One key/value group of a span.
struct Cached {
    const Span& span;
    const AttentionArgs& args;
    int group, first_row;  // of the span's rows in the pass
    KeyBias bias;

    Cached(const Span& span, const AttentionArgs& args, int group, int first_row)
        : span(span), args(args), group(group), first_row(first_row), bias(args, span, group) {}
};

thread_local Scratch tree_tail;  // of a thread's present row: a piece of a block

// Which keys the rows of a span see. A row of a token tree sees those before the tree, then its ancestors and itself,
// wherever they lie: they are gathered, so that it computes bit for bit what it would without the rest of the tree. So are
// the tokens that are chosen for a row, where that sees no others.
struct Tree {
    const Span& span;
    int base;         // tokens before the tree, which all rows see
    int width;        // tokens that a row may see of others, at most
    const int* far = nullptr;  // (rows): how many of the rows behind it a row sees too
    const int* path;  // (rows, 1 + width): how many of those from `base` on a row sees, and which

    // `chosen` (rows, 1 + most) lists all that rows see.
    Tree(const Span& span, const int* chosen, int most) : span(span), base(0), width(most), path(chosen) {}
    Tree(Context& context, const Span& span, bool windowed = false)
        : span(span), base(span.held - (span.mask ? span.extra : 0)), width(span.extra + span.rows), path(nullptr) {
        if (windowed || !span.windows_only) far = span.ahead;
        if (!span.mask) return;
        int* to = scratch<int>(context.tasks, (size_t)span.rows * (1 + width));
        path = to;
        for (int row = 0; row < span.rows; row++, to += 1 + width) {
            const uint8_t* mask = span.mask + (size_t)row * width;
            to[0] = 0;
            for (int i = 0; i < width; i++)
                if (mask[i]) to[1 + to[0]++] = i;
        }
    }
    int last(int row) const {
        return path ? base + path[(size_t)row * (1 + width)] : span.held + row + 1 + ahead(row);
    }
    int ahead(int row) const { return far && !path ? far[row] : 0; }
    // Where the i-th token lies that a row sees.
    int slot(int row, int i) const { return path && i >= base ? base + path[(size_t)row * (1 + width) + 1 + i - base] : i; }
    int longest() const {
        int end = 0;
        for (int row = 0; row < span.rows; row++) end = most(end, last(row));
        return end;
    }
    bool scattered(int block) const { return path && (block + 1) * KEYS > base; }

    // The keys of a block as a row sees them.
    Sources sources(const Cached& cached, int block, int row) const {
        const int size = cached.args.head_dim;
        const Piece old(span, block, cached.group, size);
        if (!scattered(block)) return Sources(old);
        const int* seen = path + (size_t)row * (1 + width) + 1;
        const int start = most(0, base - block * KEYS), end = least(KEYS, last(row) - block * KEYS);
        int bent = start;  // the first key that lies elsewhere
        while (bent < end && seen[block * KEYS + bent - base] == block * KEYS + bent - base) bent++;
        if (bent >= end) return Sources(old);
        const int split = bent / 16 * 16;
        const TokenBytes bytes(span.format, size);
        const Piece tail(scratch<uint8_t>(tree_tail, bytes.of_piece()), bytes);
        copy_tile(span.format, size, old, tail, split);
        for (int i = bent, count; i < end; i += count) {
            const int* slots = seen + block * KEYS + i - base;
            const int slot = base + slots[0], room = least(end - i, 16 - most(i % 16, slot % 16));
            for (count = 1; count < room && slots[count] == slots[0] + count;) count++;
            copy_tokens(span.format, size, Piece(span, slot / KEYS, cached.group, size), slot % KEYS, tail, i, count);
        }
        return Sources(old, tail, split);
    }
};

}  // namespace
