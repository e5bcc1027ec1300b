// The indexer, which chooses the tokens for attention: see quant/ops/attention.py for the mathematics. Its cache is a
// layer with one KV head: a token's key is its projected index key, its value is the key of the block that it ends.
#pragma once
#include "attention.h"

inline namespace LRT_SPACE {

constexpr int SCORED_ROWS = 32;    // rows scored at once
constexpr int SCORED_BLOCKS = 64;  // per task: four tiles

// A cached int4 element: of sixteen bytes, codes below 16 are in low nibbles, others in high nibbles.
inline float int4_code(const uint8_t* bytes, int step, int at) {
    const uint8_t both = bytes[at % 16 * step];
    return (float)(at < 16 ? both & 15 : both >> 4);
}

// A token's cached key, rotated if the format's keys are.
inline void read_key(const Span& span, int slot, int size, float* out) {
    const Piece piece(span, slot / KEYS, 0, size);
    const int at = slot % KEYS, tile = at / 16, lane = at % 16;
    if (span.format == KV_BF16) {
        const uint16_t* keys = (const uint16_t*)piece.k + (size_t)tile * 16 * size + lane;
        for (int e = 0; e < size; e++) out[e] = from_bf16(keys[(size_t)e * 16]);
    } else if (span.format == KV_INT8) {
        const int8_t* keys = (const int8_t*)piece.k + (size_t)tile * 16 * size + lane;
        const float scale = ((const float*)piece.k_scale)[at];
        for (int e = 0; e < size; e++) out[e] = (float)keys[(size_t)e * 16] * scale;
    } else {
        const uint8_t* keys = piece.k + (size_t)tile * chunks_of(size) * 16 * CachedInt4::KEY_BYTES;
        for (int e = 0; e < size; e++) {
            const int c = e / CHUNK, i = e % CHUNK, half = i / 16;
            const uint8_t* chunk = keys + (size_t)c * 16 * CachedInt4::KEY_BYTES;
            uint32_t uppers;
            __builtin_memcpy(&uppers, chunk + 256 + 64 * half + 4 * lane, 4);
            const float code = int4_code(chunk + lane, 16, i) + (float)(16 * (uppers >> 2 * (i % 16) & 3));
            out[e] = (code - CachedInt4::KEY_ZERO) * from_bf16(((const uint16_t*)piece.k_scale)[(size_t)c * KEYS + at]);
        }
    }
}

// The same for its value.
inline void read_value(const Span& span, int slot, int size, float* out) {
    const Piece piece(span, slot / KEYS, 0, size);
    const int at = slot % KEYS;
    if (span.format == KV_BF16) {
        const uint8_t* values = piece.v + (size_t)at * size * 2;
        for (int e = 0; e < size; e += 16) F16L::load_bf16(values + 2 * e).store(out + e);
    } else if (span.format == KV_INT8) {
        const F16L scale = F16L::set1(((const float*)piece.v_scale)[at]);
        const uint8_t* values = piece.v + (size_t)at * size;
        for (int e = 0; e < size; e += 16) (F16L::from(I16::load_i8(values + e)) * scale).store(out + e);
    } else {
        const int chunks = chunks_of(size);
        for (int e = 0; e < size; e++) {
            const int c = e / CHUNK;
            const uint8_t* chunk = piece.v + ((size_t)at * chunks + c) * CachedInt4::VALUE_BYTES;
            const float scale = from_bf16(((const uint16_t*)piece.v_scale)[(size_t)c * KEYS + at]);
            out[e] = (int4_code(chunk, 1, e % CHUNK) - CachedInt4::VALUE_ZERO) * scale;
        }
    }
}

// The key of the block that a row ends, from its tokens' cached keys.
inline void finish_block(const IndexArgs& args, const Tree& tree, int row, const float* cos, const float* sin, float* out) {
    const int size = args.head_dim, length = tree.last(row), format = tree.span.format;
    alignas(64) float sum[MAX_HEAD], key[MAX_HEAD];
    fill_floats(sum, size, 0.f);
    for (int i = length - args.block; i < length; i++) {
        read_key(tree.span, tree.slot(row, i), size, key);
        for (int e = 0; e < size; e++) sum[e] += key[e];
    }
    for (int e = 0; e < size; e++) sum[e] /= (float)args.block;
    rotate_head(format, size, sum);  // undoes the rotation, if there was one
    rms_norm(sum, args.k_norm, args.eps, size, out);
    rotate(out, cos, sin, args.rotary / 2);
    rotate_head(format, size, out);
}

// The keys of the blocks [first, end), at most sixteen, for a row: a tile (E, 16).
inline void read_tile(const IndexArgs& args, const Tree& tree, int row, int first, int end, float* tile) {
    const int size = args.head_dim, count = least(16, end - first);
    alignas(64) float key[MAX_HEAD];
    if (count < 16) fill_floats(tile, 16 * size, 0.f);
    for (int lane = 0; lane < count; lane++) {
        read_value(tree.span, tree.slot(row, (first + lane + 1) * args.block - 1), size, key);
        for (int e = 0; e < size; e++) tile[16 * e + lane] = key[e];
    }
}

// Adds the scores of N queries (E) with a tile of blocks.
template <int N> inline F16L add_scores(const float* q, const float* tile, int size, F16L total) {
    F16L sums[N];
    for (int n = 0; n < N; n++) sums[n] = F16L::zero();
    for (int e = 0; e < size; e++) {
        const F16L key = F16L::load(tile + 16 * e);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) sums[n] = key.fma(F16L::set1_shared(q + n * size + e), sums[n]);
    }
    for (int n = 0; n < N; n++) total = total + sums[n].max(F16L::zero());
    return total;
}

// Scores of a tile of blocks for a row with queries `q` (H, E); all are at least 0.
inline F16L score_tile(const IndexArgs& args, const float* q, const float* tile) {
    F16L total = F16L::zero();
    int h = 0;
    for (; h + 4 <= args.heads; h += 4) total = add_scores<4>(q + h * args.head_dim, tile, args.head_dim, total);
    for (; h < args.heads; h++) total = add_scores<1>(q + h * args.head_dim, tile, args.head_dim, total);
    return total;
}

inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return bits;
}

// The bits of the `kept`-th largest of values >= 0, which are ordered like the values; `above` values are larger. A
// radix selection, from the highest byte down.
inline uint32_t nth_largest(const float* numbers, int count, int kept, int& above) {
    uint32_t prefix = 0;
    above = 0;
    for (int shift = 24; shift >= 0; shift -= 8) {
        int counts[256] = {};
        const uint32_t higher = shift == 24 ? 0 : ~0u << (shift + 8);
        for (int i = 0; i < count; i++) {
            const uint32_t bits = bits_of(numbers[i]);
            if ((bits & higher) == prefix) counts[bits >> shift & 255]++;
        }
        int byte = 255;
        while (above + counts[byte] < kept) above += counts[byte--];
        prefix |= (uint32_t)byte << shift;
    }
    return prefix;
}

// Picks the tokens of the best blocks and those after the last whole block, in order; ties go to earlier blocks.
inline void pick_tokens(const IndexArgs& args, const Tree& tree, int row, const float* scores, int* chosen) {
    const int length = tree.last(row), whole = length / args.block, kept = args.budget / args.block;
    int above, *to = chosen + 1;
    const uint32_t least_bits = nth_largest(scores, whole, kept, above);
    int ties = kept - above;
    for (int b = 0; b < whole; b++) {
        const uint32_t bits = bits_of(scores[b]);
        if (bits < least_bits || (bits == least_bits && ties-- <= 0)) continue;
        for (int i = b * args.block; i < (b + 1) * args.block; i++) *to++ = tree.slot(row, i);
    }
    for (int i = whole * args.block; i < length; i++) *to++ = tree.slot(row, i);
    chosen[0] = (int)(to - chosen) - 1;
}

// Chooses tokens for one sequence: `qk` (rows, (H + 1) E) as projected; `first` is its first row in the pass.
inline void choose_of_span(Context& context, const IndexArgs& args, const Span& span, int first, float* qk) {
    const int size = args.head_dim, wide = (args.heads + 1) * size, half = args.rotary / 2, kept = args.budget / args.block;
    const Tree tree(context, span);
    parallel(context, span.rows, [&](int row) {
        float *line = qk + (size_t)row * wide, *own = line + args.heads * size;
        const size_t turn = (size_t)(first + row) * half;
        alignas(64) float nothing[MAX_HEAD];
        for (int h = 0; h < args.heads; h++) {
            float* q = line + h * size;
            rms_norm(q, args.q_norm, args.eps, size, q);
            rotate(q, args.cos + turn, args.sin + turn, half);
            rotate_head(span.format, size, q);
        }
        rotate_head(span.format, size, own);
        fill_floats(nothing, size, 0.f);
        append(span, 0, span.held + row, size, own, nothing);
    });
    parallel(context, span.rows, [&](int row) {  // all keys are cached now
        if (tree.last(row) % args.block) return;
        const size_t turn = (size_t)(first + row) * half;
        alignas(64) float key[MAX_HEAD];
        finish_block(args, tree, row, args.block_cos + turn, args.block_sin + turn, key);
        append_value(span, 0, span.held + row, size, key);
    });
    const int most_blocks = tree.longest() / args.block, pieces = (most_blocks + SCORED_BLOCKS - 1) / SCORED_BLOCKS;
    const int stride = pieces * SCORED_BLOCKS;  // between rows of scores
    float* scores = scratch<float>(context.partial, (size_t)SCORED_ROWS * stride);
    auto whole = [&](int row) { return tree.last(row) / args.block; };
    auto picks = [&](int row) { return whole(row) > kept; };
    for (int begin = 0; begin < span.rows; begin += SCORED_ROWS) {
        const int count = least(SCORED_ROWS, span.rows - begin);
        parallel(context, pieces, [&](int piece) {
            alignas(64) float tile[16 * MAX_HEAD];
            for (int first = piece * SCORED_BLOCKS; first < least(most_blocks, (piece + 1) * SCORED_BLOCKS); first += 16) {
                // Rows outside a tree score the same blocks; later rows score more of them.
                const bool shared = !tree.path || (first + 16) * args.block <= tree.base;
                bool ready = false;
                for (int task = 0; task < count; task++) {
                    const int row = begin + task;
                    if (!picks(row) || first >= whole(row)) continue;
                    if (!ready) read_tile(args, tree, row, first, shared ? most_blocks : whole(row), tile);
                    ready = shared;
                    score_tile(args, qk + (size_t)row * wide, tile).store(scores + (size_t)task * stride + first);
                }
            }
        });
        parallel(context, count, [&](int task) {
            const int row = begin + task;
            int* chosen = args.chosen + (size_t)(first + row) * (args.budget + args.block);
            if (picks(row)) return pick_tokens(args, tree, row, scores + (size_t)task * stride, chosen);
            chosen[0] = tree.last(row);
            for (int i = 0; i < chosen[0]; i++) chosen[1 + i] = tree.slot(row, i);
        });
    }
}

void choose_tokens(Context& context, const IndexArgs& args) {
    float* qk = scratch<float>(context.wide, (size_t)args.rows * args.qk.rows);
    linear(context, args.qk, args.x, args.rows, qk);
    for (int s = 0, row = 0; s < args.span_count; row += args.spans[s++].rows)
        choose_of_span(context, args, args.spans[s], row, qk + (size_t)row * args.qk.rows);
}

}  // namespace
