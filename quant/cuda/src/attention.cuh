// Sixteen query rows of a warp: which keys they see, and their sums over keys and values, with an online softmax
// (Milakov and Gimelshein, 2018; FlashAttention, 2022). The inner dimension of a product may be permuted if both
// operands are. So a lane loads 16 bytes of a key, which are operands of two products, and 16 bytes of each of four
// values, operands of eight products.
#pragma once
#include "kv.cuh"

#ifndef RUN_KEYS
#define RUN_KEYS 256
#endif
#ifndef IN_CHUNKS
#define IN_CHUNKS 0  // 1: windows begin at multiples of their size
#endif
constexpr int RUN = RUN_KEYS;  // keys per partial sum; results' bits depend on it
constexpr float LOG2E = 1.44269504f;

FN float minus_infinity() { return as_float(0xFF800000u); }
FN int lesser(int a, int b) { return a < b ? a : b; }
// Before any key was seen, any finite maximum will do; infinity minus infinity would be NaN.
FN float finite(float top) { return top == minus_infinity() ? 0.f : top; }

struct Attention {
    const u16* q;            // (rows of the pass, heads, size), bf16
    const Span* spans;       // (count) sequences (kv.cuh)
    const i64* positions;    // (rows of the pass,)
    const float* sinks;      // (heads,) or null
    u16* out;                // (rows of the pass, heads, value size), bf16; or records (attention_join.cu)
    float *partial, *stats;  // (runs, `rows`, heads, value size); top and weight, (2, runs, `rows`, heads)
    i64 k_at, v_at, run_stride;
    int count, first, rows, heads, per, window, runs;  // `rows` rows from `first` on; `per` heads per group
    float scale, softcap;
    int out_stride;  // bytes of a row of records
    int chunked;     // windows begin at multiples of their size

    // The first key that a row at `position` sees.
    FN int since(const Attention& args, int position, bool chunked) {
        const int first = chunked ? position - position % args.window : position - args.window + 1;
        return args.window && first > 0 ? first : 0;
    }

    // Converts a query row's index in its group to its index in this launch.
    FN int result(const Attention& args, int place, int group) {
        return place / args.per * args.heads + group * args.per + place % args.per;
    }
};

// What a block computes of one sequence: the `tile`th part of `rows` rows from its row `first` on. Row 0 is the pass's
// row `start`; the launch has `skipped` rows before them.
struct OwnRows {
    const u8* const* blocks;
    // Offset from `spans`: (rows, `columns`) i16, which of the last `columns` tokens each row sees, in order, then -1.
    // If `columns` is 0: (rows,) i32, how many later new rows each row sees. If it is 0 itself: causal.
    int tree;
    int held, total, columns, start, skipped, first, rows, tile;

    // Of block `number`, which computes `unit` query rows; there may be none.
    FN OwnRows make(const Attention& all, int unit, int number) {
        const auto within = [&](i64 row) {
            const int at = (int)row - all.first;
            return at < 0 ? 0 : at < all.rows ? at : all.rows;
        };
        const auto begin = [&](int at) { return within(all.spans[at].first) * all.per / unit + at; };
        const int at = last_begun(all.count, number, begin), tile = number - begin(at);
        const Span& span = all.spans[at];
        const int start = (int)span.first, skipped = within(start), rows = within(start + span.rows) - skipped;
        const bool sees = span.tree && (span.columns >= 0 || all.window);
        const int tree = sees ? (int)(at * sizeof(Span) + span.tree) : 0;
        const int columns = sees && span.columns > 0 ? (int)span.columns : 0;
        return {Span::addresses(span), tree, (int)span.held, (int)(span.held + span.fresh), columns, start, skipped,
                all.first + skipped - start, tile * unit < rows * all.per ? rows : 0, tile};
    }

    // The first of the tokens that rows of a tree may see or not.
    FN int tree_begin(int total, int columns) { return total > columns ? total - columns : 0; }

    // Whether some rows see only a part of the keys from `run` on, which a launch over trees then computes.
    FN bool parts(const OwnRows& own, int run) { return own.columns && run + RUN > tree_begin(own.total, own.columns); }

    // Of block `number` of a launch over trees, each of which computes one row, as if it were the last of a chain, so
    // that its sums have the chain's order and bits; there may be none. `run` becomes the block's first key, and `slots`
    // receive the places in the cache of the chain's tokens from there on; its last token fills the rest.
    FN OwnRows of_tree(const Attention& all, int number, int& run, int* slots) {
        __shared__ int count;
        const int tiles = (all.per + 15) / 16, skipped = number / tiles, start = all.first + skipped;
        const Span& span = span_of(all.spans, all.count, start);
        const int total = (int)(span.held + span.fresh), columns = (int)span.columns, begin = total - columns;
        run = columns > 0 ? (blockIdx.x + tree_begin(total, columns) / RUN) * RUN : total;
        if (run >= total) return OwnRows{};
        const i16* path = (const i16*)((const u8*)&span + span.tree) + Span::token(span, start - (int)span.first) * (i64)columns;
        for (int i = threadIdx.x; i < columns; i += blockDim.x)
            if (path[i] >= 0 && (i + 1 == columns || path[i + 1] < 0)) count = i + 1;
        __syncthreads();
        const int last = begin + count - 1;
        for (int i = threadIdx.x; i < RUN; i += blockDim.x) {
            const int token = run + i < last ? run + i : last;
            slots[i] = token < begin ? token : begin + path[token - begin];
        }
        __syncthreads();
        return {Span::addresses(span), 0, last, last + 1, 0, start, skipped, 0, 1, number % tiles};
    }
};

// The arguments of a launch, and what it computes of one sequence.
struct Task {
    const Attention& all;
    const OwnRows& own;

    template <class Number>
    FN const Number* tree(const Task& args) { return (const Number*)((const u8*)args.all.spans + args.own.tree); }

    // The index of a query row's result in the launch, and in the pass.
    FN i64 in_launch(const Task& args, int which) { return (i64)args.own.skipped * args.all.heads + which; }
    FN i64 in_pass(const Task& args, int which) { return (i64)(args.own.start + args.own.first) * args.all.heads + which; }
};

// Rows g and g + 8 of sixteen, and bounds over all sixteen. Keys are counted from the cache's first.
struct Rows {
    int last[2], since[2];  // the last key that each sees; the window's first
    int common, earliest, latest;  // keys before `common` are seen by all; range of `since`

    FN Rows make(const Task& args, int place, int g) {
        const OwnRows& own = args.own;
        Rows rows;
        const auto seen = [&](int row) { return lesser(own.held + own.first + row, own.total - 1); };
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = (place + g + 8 * i) / args.all.per, there = row < own.rows ? row : own.rows - 1;
            rows.since[i] = Attention::since(args.all, (int)args.all.positions[own.start + own.first + there], IN_CHUNKS);
            rows.last[i] = seen(there);
            if (own.tree && !own.columns) rows.last[i] += Task::tree<int>(args)[rows.last[i] - own.held];
        }
        rows.common = seen(place / args.all.per) + 1;
        if (own.tree && !own.columns) {
            rows.common = lesser(rows.last[0], rows.last[1]) + 1;
#pragma unroll
            for (int lanes = 4; lanes < 32; lanes *= 2) rows.common = lesser(rows.common, shuffle_xor(rows.common, lanes));
        }
        const int a = rows.since[0], b = rows.since[1];
        rows.earliest = a < b ? a : b, rows.latest = a < b ? b : a;
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2) {
            const int early = shuffle_xor(rows.earliest, lanes), late = shuffle_xor(rows.latest, lanes);
            rows.earliest = early < rows.earliest ? early : rows.earliest;
            rows.latest = late > rows.latest ? late : rows.latest;
        }
        return rows;
    }

    // Whether all sixteen rows see `count` keys from `key` on.
    FN bool see_all(const Rows& rows, const Task& args, int key, int count) {
        return key >= rows.latest && key + count <= rows.common;
    }

    FN bool sees(const Rows& rows, const Task& args, int i, int key) {
        return key <= rows.last[i] && key >= rows.since[i];
    }
};

// Loads `tiles` times sixteen rows' queries from `place` on as operands: (tiles, STEPS, 32 lanes).
template <int STEPS, int SIZE>
FN void load_queries(const Task& args, int group, int place, int tiles, uint4* to) {
    for (int at = threadIdx.x; at < tiles * STEPS * 32; at += blockDim.x) {
        const int lane = at % 32, step = at / 32 % STEPS, e = step / 2 * 32 + lane % 4 * 8 + step % 2 * 4;
        uint2 found[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int here = place + at / 32 / STEPS * 16 + lane / 4 + 8 * i;
            const bool there = here / args.all.per < args.own.rows && e < SIZE;
            const u16* q = args.all.q + Task::in_pass(args, Attention::result(args.all, here, group)) * SIZE + e;
            found[i] = there ? *(const uint2*)q : make_uint2(0, 0);
        }
        to[at] = make_uint4(found[0].x, found[1].x, found[0].y, found[1].y);
    }
}

template <class Keys, class Values, int MOST = 32>
struct AttentionSums {
    static constexpr int SIZE = Keys::SIZE, VALUE = Values::SIZE, W = Values::W;
    // Registers hold WIDTH elements of each value's sums: SHARES blocks of a launch divide wide values among them.
    static constexpr int SHARES = VALUE > 256 ? VALUE / (Values::CHUNKED ? 128 : 256) : 1, WIDTH = VALUE / SHARES;
    static constexpr int CHUNKS = (SIZE + 31) / 32, QUERY_STEPS = 2 * CHUNKS, SPANS = (WIDTH + 8 * W - 1) / (8 * W);
    static constexpr int STEP = SIZE <= 128 ? MOST : 16, EIGHTS = STEP / 8;  // keys at once

    float of[SPANS][W][4];
    float top[2], weight[2];  // running maximum; weight sum, per lane until `finish`

    // Which elements of a value this block computes.
    FN int share() { return SHARES == 1 ? 0 : blockIdx.y % SHARES; }

    FN void clear(AttentionSums& s) {
#pragma unroll
        for (int i = 0; i < SPANS * W * 4; i++) (&s.of[0][0][0])[i] = 0;
        s.top[0] = s.top[1] = minus_infinity(), s.weight[0] = s.weight[1] = 0;
    }

    using Scores = float[EIGHTS][4];

    // Adds the keys and values of STEP tokens from `key` on; `k` and `v` give a token's address.
    template <class K, class V>
    FN void add(AttentionSums& s, const Task& args, const Rows& rows, const uint4 (&queries)[QUERY_STEPS][32],
                const K& k, const V& v, int key, int total, int lane) {
        Scores scores;
        meet<0>(scores, args, queries, k, key, total, lane);
        weigh<0>(s, scores, args, rows, v, key, total, lane);
    }

    // Scores of keys, whose rows are swizzled if SHARED (kv.cuh).
    template <int SHARED, class K>
    FN void meet(Scores& scores, const Task& args, const uint4 (&queries)[QUERY_STEPS][32], const K& k, int key, int total,
                 int lane) {
        const int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            if (SIZE > 64 && j % 2 == 0) fence();
            scores[j][0] = scores[j][1] = scores[j][2] = scores[j][3] = 0;
            const int token = key + 8 * j + g;
            const u8* row = k(token < total ? token : key);  // `key` is in the cache
            uint4 keys[CHUNKS];
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) keys[c] = Keys::key(row, c, t, SHARED ? key_turn(token) : 0);
#pragma unroll
            for (int c = 0; c < CHUNKS; c++) {
                float part[4] = {0, 0, 0, 0};
                float(&sums)[4] = Keys::CHUNKED ? part : scores[j];
                multiply(sums, queries[2 * c][lane], keys[c].x, keys[c].y);
                multiply(sums, queries[2 * c + 1][lane], keys[c].z, keys[c].w);
                if constexpr (Keys::CHUNKED) {
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const int at = key + 8 * j + 2 * t + i;
                        const float scale = at < total ? Keys::scale(k(at), c) : 0;
                        scores[j][i] = fused(part[i], scale, scores[j][i]);
                        scores[j][2 + i] = fused(part[2 + i], scale, scores[j][2 + i]);
                    }
                }
            }
        }
        const float scale = times(args.all.scale, LOG2E);
#pragma unroll
        for (int j = 0; j < EIGHTS; j++)
#pragma unroll
            for (int c = 0; c < 2; c++) {
                float factor = 0;
                if constexpr (Keys::SCALED) {
                    const int token = key + 8 * j + 2 * t + c;
                    factor = token < total ? Keys::scale(k(token)) : 0;
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float& score = scores[j][2 * i + c];
                    score = times(score, scale);
                    if constexpr (Keys::SCALED) score = times(score, factor);
                }
            }
    }

    static constexpr bool TURNS = Keys::TURNS && Values::TURNS;
    FN int key_turn(int token) { return TURNS ? token % 2 * 4 : 0; }
    FN int value_turn(int token) { return TURNS ? token / 2 % 4 * 2 : 0; }

    // Turns scores into softmax weights and adds the weighted values.
    template <int SHARED, class V>
    FN void weigh(AttentionSums& s, Scores& scores, const Task& args, const Rows& rows, const V& v, int key,
                  int total, int lane) {
        const int g = lane / 4, t = lane % 4;
        const bool all = Rows::see_all(rows, args, key, STEP);
        const float cap = times(args.all.softcap, LOG2E), steep = 2.f * LOG2E / cap;
        float value_scale[2 * EIGHTS];
        if constexpr (Keys::SCALED) {
#pragma unroll
            for (int i = 0; i < 2 * EIGHTS; i++) {
                const int token = key + i / 2 * 8 + 2 * t + i % 2;
                value_scale[i] = token < total ? Values::scale(v(token)) : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = s.top[i];
            u32 hidden = 0;
            if (!all)
#pragma unroll 1  // rarely runs
                for (int at = 0; at < 2 * EIGHTS; at++)
                    hidden |= (u32)!Rows::sees(rows, args, i, key + at / 2 * 8 + 2 * t + at % 2) << at;
#pragma unroll
            for (int j = 0; j < EIGHTS; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float& score = scores[j][2 * i + c];
                    if (args.all.softcap > 0)  // cap tanh(score / cap)
                        score = fused(-2.f * cap, reciprocal(1.f + power_of_two(times(score, steep))), cap);
                    if (hidden >> (2 * j + c) & 1) score = minus_infinity();
                    top = most(top, score);
                }
            top = most(top, shuffle_xor(top, 1));
            top = most(top, shuffle_xor(top, 2));
            const float base = finite(top), kept = power_of_two(plus(s.top[i], -base));
            float weight = 0;
#pragma unroll
            for (int j = 0; j < EIGHTS; j++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float& score = scores[j][2 * i + c];
                    score = power_of_two(plus(score, -base));
                    weight = plus(weight, score);
                    if constexpr (Keys::SCALED) score = times(score, value_scale[2 * j + c]);
                }
            s.weight[i] = fused(s.weight[i], kept, weight);
            s.top[i] = top;
#pragma unroll
            for (int at = 0; at < SPANS * W; at++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float& sum = (&s.of[0][0])[at][2 * i + c];
                    sum = times(sum, kept);
                }
        }
#pragma unroll
        for (int j = 0; j < EIGHTS; j += 2) {
            uint4 shares = make_uint4(two_bf16(scores[j][0], scores[j][1]), two_bf16(scores[j][2], scores[j][3]),
                                      two_bf16(scores[j + 1][0], scores[j + 1][1]),
                                      two_bf16(scores[j + 1][2], scores[j + 1][3]));
            const int token = key + 8 * j + 2 * t;
#pragma unroll
            for (int c = 0; c < SPANS; c++) {
                u32 values[4][W / 2];  // tokens 0, 1, 8 and 9 after it
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int at = token + i / 2 * 8 + i % 2;
                    Values::value(v(at), share() * SPANS + c, g, at < total, values[i], SHARED ? value_turn(at) : 0);
                }
                if constexpr (Values::CHUNKED) {
                    float scale[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int at = token + i / 2 * 8 + i % 2;
                        scale[i] = at < total ? Values::scale(v(at), share() * SPANS + c) : 0;
                    }
                    u32 scaled[4];
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int row = i % 2 * 2, first = i / 2 * 2, eighth = j + i / 2;
                        scaled[i] = two_bf16(times(scores[eighth][row], scale[first]), times(scores[eighth][row + 1], scale[first + 1]));
                    }
                    shares = make_uint4(scaled[0], scaled[1], scaled[2], scaled[3]);
                }
#pragma unroll
                for (int w = 0; w < W / 2; w++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        const u32 which = half ? 0x7632 : 0x5410;
                        multiply(s.of[c][2 * w + half], shares, pick(values[0][w], values[1][w], which),
                                 pick(values[2][w], values[3][w], which));
                    }
            }
        }
    }

    FN void finish(AttentionSums& s) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            s.weight[i] = plus(s.weight[i], shuffle_xor(s.weight[i], 1));
            s.weight[i] = plus(s.weight[i], shuffle_xor(s.weight[i], 2));
        }
    }

    // Passes lane t's results of row g + 8 i to `take`, four at a time.
    template <class Take>
    FN void fours(const AttentionSums& s, int i, int t, Take take) {
#pragma unroll
        for (int c = 0; c < SPANS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int w = 0; w < W; w += 4) {
                    const int e = 8 * W * c + W * (2 * t + half) + w, at = 2 * i + half;
                    const float values[4] = {s.of[c][w][at], s.of[c][w + 1][at], s.of[c][w + 2][at], s.of[c][w + 3][at]};
                    if (e < WIDTH) take(e, values);
                }
    }

    // Writes them as bf16, times `factor`.
    FN void write(const AttentionSums& s, int i, int t, float factor, u16* out) {
#pragma unroll
        for (int c = 0; c < SPANS; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int e = 8 * W * c + W * (2 * t + half);
                if (e >= VALUE) continue;
                u32 words[W / 2];
#pragma unroll
                for (int w = 0; w < W / 2; w++)
                    words[w] = two_bf16(times(s.of[c][2 * w][2 * i + half], factor), times(s.of[c][2 * w + 1][2 * i + half], factor));
                if constexpr (W == 8)
                    *(uint4*)(out + e) = make_uint4(words[0], words[1], words[2], words[3]);
                else
                    *(uint2*)(out + e) = make_uint2(words[0], words[1]);
            }
    }
};
