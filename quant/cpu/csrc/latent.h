// Latent attention: a token's cached row is the key of all heads; without its rotary part it is also their value. Each
// head's own matrices map its query to the latent space, and its result back to its value. A row is read for many
// queries: keys are copied to tiles block by block, and values are used in place.
#pragma once

inline namespace LRT_SPACE {

constexpr int LATENT_QUERIES = 32;          // queries that share a block's tiles
constexpr size_t LATENT_FLOATS = 1u << 21;  // floats of latent queries at once: limits the rows

thread_local Scratch latent_tiles, latent_rows;

// One head's rows of the result of `prepare_heads`.
inline Acts of_head(const Acts& all, int head, const Runs& runs) {
    Acts own = rows_from(all, (size_t)head * runs.padded(), all.rows);
    own.x += (size_t)head * all.rows * all.cols;
    return own;
}

// Prepares the inputs of each head's matrix: rows `from(head, row)`, multiplied by `factor`.
template <class From>
inline Acts prepare_heads(Context& context, int heads, int rows, const Stack& stack, float factor, From from) {
    const int cols = stack.cols;
    float* values = scratch<float>(context.rows.normed, (size_t)heads * rows * cols);
    Acts acts = {values, nullptr, nullptr, {}, 0, rows, cols};
    const Runs runs(rows);
    if (note_starts(stack, acts)) reserve_groups(context.rows, (size_t)heads * runs.padded() * (cols / 32), acts);
    const int share = 16, padded = runs.padded(), tasks = (padded + share - 1) / share;
    parallel(context, heads * tasks, [&](int task) {
        const int head = task / tasks, begin = task % tasks * share;
        const Acts own = of_head(acts, head, runs);
        for (int row = begin; row < least(padded, begin + share); row++) {
            float* to = nullptr;
            if (row < rows) {
                to = values + ((size_t)head * rows + row) * cols;
                const float* x = from(head, row);
                for (int i = 0; i < cols; i++) to[i] = x[i] * factor;
                if (stack.hadamard) block_hadamard(to, cols, stack.hadamard);
            }
            if (own.codes) quantize_row(own, runs, row, to, 0, cols);
        }
    });
    return acts;
}

// Multiplies each head by its own rows of a matrix, in whole tiles; heads are `next` floats apart, rows `stride`.
inline void multiply_heads(Context& context, const Stack& stack, int heads, const Acts& acts, float* out, size_t next, size_t stride) {
    const Matrix& whole = stack.parts[0];
    const int own_rows = whole.rows / heads, tiles = own_rows / 16;
    const Runs runs(acts.rows);
    const Chunks chunks(runs);
    const int step = acts.rows > DIRECT_ROWS ? TASK_TILES : tiles, steps = (tiles + step - 1) / step;
    with_layout(whole.layout, [&](auto kind) {
        const size_t head_bytes = tiles * kind.tile_bytes(whole);
        parallel(context, heads * steps * chunks.count, [&](int index) {
            const int head = index / steps % heads, tile = index % steps * step;
            Matrix own = whole;
            own.data += head * head_bytes;
            own.rows = own_rows;
            const Target target = {out + head * next, stride, own_rows, whole.scale, nullptr, nullptr};
            kind.multiply(own, tile, least(step, tiles - tile), of_head(acts, head, runs), runs, chunks[index / (steps * heads)], target);
        });
    });
}

// Applies RoPE to a head's pairs, adjacent ones if `interleaved`, and writes them as two halves.
inline void turn_pairs(const float* from, const float* cos, const float* sin, int half, bool interleaved, float* to) {
    for (int i = 0; i < half; i++) {
        const float a = from[interleaved ? 2 * i : i], b = from[interleaved ? 2 * i + 1 : i + half];
        to[i] = a * cos[i] - b * sin[i];
        to[i + half] = b * cos[i] + a * sin[i];
    }
}

inline size_t latent_row_bytes(int format, int size) { return format == KV_ROWS_INT8 ? size : 2 * (size_t)size; }

inline void append_latent(const Span& span, int slot, int size, const float* row) {
    uint8_t* block = span.data + slot / KEYS * span.stride;
    const int at = slot % KEYS;
    if (span.format == KV_ROWS_INT8) {
        float* scales = (float*)(block + (size_t)KEYS * size);
        append_int8(row, size, scales + at, (int8_t*)block + (size_t)at * size, 1);
        return;
    }
    uint16_t* to = (uint16_t*)block + (size_t)at * size;
    for (int e = 0; e < size; e++) to[e] = to_bf16(row[e]);
}

void norm_latent_append(Context& context, const LatentArgs& args) {
    const int heads = args.heads, rotary = args.rotary, half = rotary / 2, each = args.nope + rotary, size = rotary + args.latent;
    const int width = args.down.rows, rank = args.query_up.count ? args.query_up.cols : 0;
    const Acts acts = prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.down);
    float* wide = scratch<float>(context.wide, (size_t)args.rows * width);
    matmul(context, args.down, acts, wide);
    if (rank) {
        float* low = scratch<float>(context.gated, (size_t)args.rows * rank);
        parallel(context, (args.rows + 15) / 16, [&](int task) {
            for (int row = task * 16; row < least(args.rows, task * 16 + 16); row++)
                rms_norm(wide + (size_t)row * width, args.query_norm, args.latent_eps, rank, low + (size_t)row * rank);
        });
        const Acts queries = prepare(context, context.rows, low, nullptr, args.rows, nullptr, 0, args.query_up);
        matmul(context, args.query_up, queries, args.q);
    }
    const int share = 8, tasks = (args.rows + share - 1) / share;
    parallel(context, tasks, [&](int task) {
        float turned[MAX_HEAD], key[2 * MAX_HEAD];
        for (int row = task * share; row < least(args.rows, (task + 1) * share); row++) {
            const float *cos = args.cos + (size_t)row * half, *sin = args.sin + (size_t)row * half;
            float *line = wide + (size_t)row * width, *q = args.q + (size_t)row * heads * each;
            if (!rank) copy_floats(line, heads * each, q);
            if (args.head_gates) copy_floats(line + width - size - heads, heads, args.q + (size_t)args.rows * heads * each + (size_t)row * heads);
            for (int h = 0; h < heads; h++) {
                float* pairs = q + (size_t)h * each + args.nope;
                turn_pairs(pairs, cos, sin, half, args.interleaved, turned);
                copy_floats(turned, rotary, pairs);
            }
            const float* latent = line + width - size;
            turn_pairs(latent + args.latent, cos, sin, half, args.interleaved, key);
            rms_norm(latent, args.latent_norm, args.latent_eps, args.latent, key + rotary);
            int index = row, owner = 0;
            while (index >= args.spans[owner].rows) index -= args.spans[owner++].rows;
            append_latent(args.spans[owner], args.spans[owner].held + index, size, key);
        }
    });
}

// The cached rows of a block that a query row attends to: in place, or copied together if a tree scatters them. Their
// keys are copied to tiles of 16.
template <class Number>
inline Sources latent_sources(const Span& span, const Tree& tree, int block, int row, int size) {
    const size_t row_bytes = size * sizeof(Number);
    uint8_t* data = span.data + block * span.stride;
    const int count = least(KEYS, tree.last(row) - block * KEYS);
    if (tree.scattered(block)) {
        uint8_t* copy = scratch<uint8_t>(latent_rows, KEYS * (row_bytes + sizeof(float)));
        const int* seen = tree.path + (size_t)row * (1 + tree.width) + 1;
        for (int i = 0; i < count; i++) {
            const int key = block * KEYS + i, slot = key < tree.base ? key : tree.base + seen[key - tree.base];
            const uint8_t* from = span.data + slot / KEYS * span.stride;
            __builtin_memcpy(copy + i * row_bytes, from + slot % KEYS * row_bytes, row_bytes);
            if (span.format == KV_ROWS_INT8)
                ((float*)(copy + KEYS * row_bytes))[i] = ((const float*)(from + KEYS * row_bytes))[slot % KEYS];
        }
        data = copy;
    }
    const int tiles = (count + 15) / 16;
    Number* keys = scratch<Number>(latent_tiles, (size_t)tiles * 16 * size);
    Piece piece((uint8_t*)keys, TokenBytes(KV_BF16, size));
    piece.v = data;
    piece.k_scale = piece.v_scale = data + KEYS * row_bytes;
    for (int tile = 0; tile < tiles; tile++, keys += 16 * (size_t)size) {
        const Number* rows = (const Number*)data + (size_t)tile * 16 * size;
        for (int e = 0; e < size; e++)
#pragma GCC unroll 16
            for (int lane = 0; lane < 16; lane++) keys[e * 16 + lane] = rows[(size_t)lane * size + e];
    }
    return Sources(piece);
}

// q (rows, H, size), scaled, of a span's rows from `begin` on; out (rows, H, latent).
inline void attend_latents(Context& context, const LatentArgs& args, const Span& span, const Tree& tree, int begin, int rows,
                           const float* q, float* out) {
    const int latent = args.latent, size = args.rotary + latent, queries = rows * args.heads;
    const size_t width = latent + 2;
    int longest = 0;
    for (int row = begin; row < begin + rows; row++) longest = most(longest, tree.last(row));
    const int blocks = (longest + KEYS - 1) / KEYS;
    // Few queries over a long cache: divide its blocks among threads too. Results are the same either way.
    const int threads = context.pool.threads(), wide = (queries + LATENT_QUERIES - 1) / LATENT_QUERIES;
    const bool split = wide < 4 * threads && blocks > 1 && (size_t)queries * blocks * width <= MOST_PIECES;
    const int pieces = split ? blocks : 1;
    const int each = split || wide >= threads ? LATENT_QUERIES : LATENT_QUERIES / 4, chunks = (queries + each - 1) / each;
    float* partial = scratch<float>(context.partial, (size_t)queries * pieces * width);
    auto place = [&](int index, int piece) { return partial + ((size_t)index * pieces + piece) * width; };
    AttentionArgs plain = {};  // arguments of the functions shared with attention.h
    plain.heads = args.heads, plain.kv_heads = 1, plain.head_dim = size;
    parallel(context, chunks * pieces, [&](int task) {
        const int piece = task % pieces, chunk = task / pieces;
        const int from_query = chunk * each, n = least(each, queries - from_query);
        const Cached cached(span, plain, 0, 0);
        Query list[LATENT_QUERIES];
        int high = 0;
        for (int i = 0; i < n; i++) {
            const int row = begin + (from_query + i) / args.heads;
            list[i] = {q + (size_t)(from_query + i) * size, 0, tree.last(row), row};
            high = most(high, list[i].last);
            float* p = place(from_query + i, piece);
            p[0] = -INFINITY;
            fill_floats(p + 1, latent + 1, 0.f);
        }
        BlockResult results[LATENT_QUERIES];
        alignas(64) float values[LATENT_QUERIES * MAX_HEAD];
        for (int block = split ? piece : 0; block < (split ? piece + 1 : blocks); block++) {
            if (block * KEYS >= high) break;
            for (int i = 0, count; i < n; i += count) {
                // In a tree's blocks, each row has its own keys; otherwise the last row attends to the most.
                for (count = 1; i + count < n && (!tree.scattered(block) || list[i + count].row == list[i].row);) count++;
                float* to = values + (size_t)i * latent;
                const int row = list[i + count - 1].row;
                if (tree.last(row) <= block * KEYS) {
                    for (int j = i; j < i + count; j++) results[j] = {-INFINITY, 0.f};
                } else if (span.format == KV_ROWS_INT8) {
                    const Sources from = latent_sources<uint8_t>(span, tree, block, row, size);
                    attend_block<CachedInt8>(count, list + i, cached, from, block, args.rotary, results + i, to, latent);
                } else {
                    const Sources from = latent_sources<uint16_t>(span, tree, block, row, size);
                    attend_block<CachedBf16>(count, list + i, cached, from, block, args.rotary, results + i, to, latent);
                }
            }
            for (int i = 0; i < n; i++) {
                float* p = place(from_query + i, piece);
                BlockResult sofar{p[0], p[1]};
                join(sofar, p + 2, results[i], values + (size_t)i * latent, latent);
                p[0] = sofar.peak;
                p[1] = sofar.total;
            }
        }
    });
    parallel(context, (queries + 15) / 16, [&](int task) {
        for (int index = 16 * task; index < least(queries, 16 * task + 16); index++) {
            float* first = place(index, 0);
            BlockResult sofar{first[0], first[1]};
            for (int piece = 1; piece < pieces; piece++) {
                const float* next = place(index, piece);
                join(sofar, first + 2, {next[0], next[1]}, next + 2, latent);
            }
            const float inverse = sofar.total > 0 ? 1.f / sofar.total : 0.f;
            float* to = out + (size_t)index * latent;
            for (int e = 0; e < latent; e++) to[e] = first[2 + e] * inverse;
        }
    });
}

void latent_output(Context& context, const LatentArgs& args) {
    const int heads = args.heads, rotary = args.rotary, each = args.nope + rotary, latent = args.latent, size = rotary + latent;
    const size_t width = (size_t)heads * args.value;
    float* joined = scratch<float>(context.joined, args.rows * width);
    const int at_once = most(1, (int)(LATENT_FLOATS / ((size_t)heads * size)));
    int first = 0;
    for (int s = 0; s < args.span_count; first += args.spans[s++].rows) {
        const Span& span = args.spans[s];
        const Tree tree(context, span);
        for (int begin = 0; begin < span.rows; begin += at_once) {
            const int rows = least(at_once, span.rows - begin);
            const float* q = args.q + (size_t)(first + begin) * heads * each;
            float* turned = scratch<float>(context.wide, (size_t)rows * heads * size);
            const Acts plain = prepare_heads(context, heads, rows, args.key_up, args.scale,
                                             [&](int head, int row) { return q + ((size_t)row * heads + head) * each; });
            multiply_heads(context, args.key_up, heads, plain, turned + rotary, size, (size_t)heads * size);
            for (int i = 0; i < rows * heads; i++)
                for (int j = 0; j < rotary; j++) turned[(size_t)i * size + j] = q[(size_t)i * each + args.nope + j] * args.scale;
            float* seen = scratch<float>(context.gated, (size_t)rows * heads * latent);
            attend_latents(context, args, span, tree, begin, rows, turned, seen);
            const Acts latents = prepare_heads(context, heads, rows, args.value_up, 1.f,
                                               [&](int head, int row) { return seen + ((size_t)row * heads + head) * latent; });
            multiply_heads(context, args.value_up, heads, latents, joined + (first + begin) * width, args.value, width);
        }
    }
    const float* gates = args.q + (size_t)args.rows * heads * each;
    for (size_t i = 0; args.head_gates && i < (size_t)args.rows * heads; i++) {
        const float gate = sigmoid1(gates[i]);
        for (int e = 0; e < args.value; e++) joined[i * args.value + e] *= gate;
    }
    const Acts acts = prepare(context, context.rows, joined, nullptr, args.rows, nullptr, 0, args.proj);
    matmul(context, args.proj, acts, args.out);
}

}  // namespace
