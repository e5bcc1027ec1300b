// The keys that a span's rows attend to, and the addresses of these keys and their values.
#pragma once
#include "kv.h"

inline namespace LRT_SPACE {

struct Query {
    const float* q;   // (E), already scaled
    int first, last;  // attends to keys [first, last)
    int row;          // row of the span
    const int16_t* codes = nullptr;  // for int8 keys: q is `scale` times these
    float scale = 1.f;

    bool sees(int key) const { return key >= first && key < last; }
    bool sees_all(int from, int to) const { return from >= first && to <= last; }
};

// Addresses of a block's keys and values; those from `split` on, a multiple of 16, are in `tail`.
struct Sources {
    Piece old, tail;
    int split;

    explicit Sources(const Piece& piece) : old(piece), tail(piece), split(KEYS) {}
    Sources(const Piece& old, const Piece& tail, int split) : old(old), tail(tail), split(split) {}
};

// One KV head of a span.
struct Cached {
    const Span& span;
    const AttentionArgs& args;
    int group, first_row;  // first_row: the span's first row in the pass
    KeyBias bias;

    Cached(const Span& span, const AttentionArgs& args, int group, int first_row)
        : span(span), args(args), group(group), first_row(first_row), bias(args, span, group) {}
};

thread_local Scratch tree_tail;  // a piece of a block, for the thread's current row

// The keys that a span's rows attend to. A row of a token tree attends to those before the tree, then to its ancestors
// and itself: these are gathered, so that its result has the same bits as without the rest of the tree. Tokens that an
// indexer chooses for a row are gathered too.
struct Tree {
    const Span& span;
    int base;         // tokens before the tree, which all rows attend to
    int width;        // largest number of further tokens that a row attends to
    const int* far = nullptr;  // (rows): how many later rows each row attends to
    const int* path;  // (rows, 1 + width): number of tokens from `base` on that a row attends to, and their indices

    // `chosen` (rows, 1 + most) lists all tokens that rows attend to.
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
    // Cache position of the i-th token that a row attends to.
    int slot(int row, int i) const { return path && i >= base ? base + path[(size_t)row * (1 + width) + 1 + i - base] : i; }
    int longest() const {
        int end = 0;
        for (int row = 0; row < span.rows; row++) end = most(end, last(row));
        return end;
    }
    bool scattered(int block) const { return path && (block + 1) * KEYS > base; }

    // A block's keys for a row.
    Sources sources(const Cached& cached, int block, int row) const {
        const int size = cached.args.head_dim;
        const Piece old(span, block, cached.group, size);
        if (!scattered(block)) return Sources(old);
        const int* seen = path + (size_t)row * (1 + width) + 1;
        const int start = most(0, base - block * KEYS), end = least(KEYS, last(row) - block * KEYS);
        int bent = start;  // first key that must be gathered
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
