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

// Room for the inputs of each head's matrix.
inline Acts reserve_heads(Context::Rows& memory, int heads, int rows, const Stack& stack) {
    Acts acts = {scratch<float>(memory.normed, (size_t)heads * rows * stack.cols), nullptr, nullptr, {}, 0, rows, stack.cols};
    if (note_starts(stack, acts)) reserve_groups(memory, (size_t)heads * Runs(rows).padded() * (stack.cols / 32), acts);
    return acts;
}

// Prepares a row of a head's inputs, `x` times `factor`; padding if null.
inline void prepare_head(const Acts& own, const Runs& runs, int row, const Stack& stack, const float* x, float factor) {
    float* to = x ? const_cast<float*>(own.x) + (size_t)row * own.cols : nullptr;
    for (int i = 0; x && i < own.cols; i++) to[i] = x[i] * factor;
    if (x && stack.hadamard) block_hadamard(to, own.cols, stack.hadamard);
    if (own.codes) quantize_row(own, runs, row, to, 0, own.cols);
}

// Prepares the inputs of each head's matrix: rows `from(head, row)`, multiplied by `factor`.
template <class From>
inline Acts prepare_heads(Context& context, int heads, int rows, const Stack& stack, float factor, From from) {
    const Acts acts = reserve_heads(context.rows, heads, rows, stack);
    const Runs runs(rows);
    const int share = 16, padded = runs.padded(), tasks = (padded + share - 1) / share;
    parallel(context, heads * tasks, [&](int task) {
        const int head = task / tasks, begin = task % tasks * share;
        const Acts own = of_head(acts, head, runs);
        for (int row = begin; row < least(padded, begin + share); row++)
            prepare_head(own, runs, row, stack, row < rows ? from(head, row) : nullptr, factor);
    });
    return acts;
}

// A head's own rows of a matrix, in whole tiles.
inline Matrix matrix_of(const Stack& stack, int heads, int head) {
    Matrix own = stack.parts[0];
    own.rows /= heads;
    own.data = tile_at(stack.parts[0], head * (own.rows / 16));
    return own;
}

// Multiplies each head by its own rows of a matrix, in whole tiles; heads are `next` floats apart, rows `stride`.
inline void multiply_heads(Context& context, const Stack& stack, int heads, const Acts& acts, float* out, size_t next, size_t stride) {
    const int tiles = stack.parts[0].rows / heads / 16;
    const Runs runs(acts.rows);
    const Chunks chunks(runs);
    const int step = acts.rows > DIRECT_ROWS ? TASK_TILES : tiles, steps = (tiles + step - 1) / step;
    parallel(context, heads * steps * chunks.count, [&](int index) {
        const int head = index / steps % heads, tile = index % steps * step;
        const Matrix own = matrix_of(stack, heads, head);
        const Target target = {out + head * next, stride, own.rows, own.scale, nullptr, nullptr};
        multiply(own, tile, least(step, tiles - tile), of_head(acts, head, runs), runs, chunks[index / (steps * heads)], target);
    });
}

// The same for a head of a single row.
inline void multiply_head(const Stack& stack, int heads, int head, const Acts& acts, float* out) {
    const Matrix own = matrix_of(stack, heads, head);
    multiply(own, 0, own.rows / 16, acts, Runs(1), {0, 1}, {out, 0, own.rows, own.scale, nullptr, nullptr});
}

// Applies RoPE to a head's pairs, adjacent ones if `interleaved`, and writes them as two halves.
inline void turn_pairs(const float* from, const float* cos, const float* sin, int half, bool interleaved, float* to) {
    for (int i = 0; i < half; i++) {
        const float a = from[interleaved ? 2 * i : i], b = from[interleaved ? 2 * i + 1 : i + half];
        to[i] = a * cos[i] - b * sin[i];
        to[i + half] = b * cos[i] + a * sin[i];
    }
}

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

// Turns a head's query.
inline void turn_query(const LatentArgs& args, int row, float* pairs) {
    float turned[MAX_HEAD];
    const size_t at = (size_t)row * (args.rotary / 2);
    turn_pairs(pairs, args.cos + at, args.sin + at, args.rotary / 2, args.interleaved, turned);
    copy_floats(turned, args.rotary, pairs);
}

// Norms, turns and caches a row's key, which ends its projections.
inline void append_key(const LatentArgs& args, int row, const float* latent) {
    float key[2 * MAX_HEAD];
    const size_t at = (size_t)row * (args.rotary / 2);
    turn_pairs(latent + args.latent, args.cos + at, args.sin + at, args.rotary / 2, args.interleaved, key);
    rms_norm(latent, args.latent_norm, args.latent_eps, args.latent, key + args.rotary);
    int index = row, owner = 0;
    while (index >= args.spans[owner].rows) index -= args.spans[owner++].rows;
    append_latent(args.spans[owner], args.spans[owner].held + index, args.rotary + args.latent, key);
}

void norm_latent_append(Context& context, const LatentArgs& args) {
    const int heads = args.heads, each = args.nope + args.rotary, size = args.rotary + args.latent;
    const int width = args.down.rows, rank = args.query_up.count ? args.query_up.cols : 0;
    const Acts acts = prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.down);
    float* wide = scratch<float>(context.wide, (size_t)args.rows * width);
    matmul(context, args.down, acts, wide);
    if (rank) {
        float* low = scratch<float>(context.gated, (size_t)args.rows * rank);
        each_row(context, args.rows, [&](int row) {
            rms_norm(wide + (size_t)row * width, args.query_norm, args.latent_eps, rank, low + (size_t)row * rank);
        });
        linear(context, args.query_up, low, args.rows, args.q);
    }
    each_row<8>(context, args.rows, [&](int row) {
        float *line = wide + (size_t)row * width, *q = args.q + (size_t)row * heads * each;
        if (!rank) copy_floats(line, heads * each, q);
        if (args.head_gates) copy_floats(line + width - size - heads, heads, args.q + (size_t)args.rows * heads * each + (size_t)row * heads);
        for (int h = 0; h < heads; h++) turn_query(args, row, q + (size_t)h * each + args.nope);
        append_key(args, row, line + width - size);
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

// Attention of a span's rows from `begin` on, in pieces: some queries over all blocks or one. q (rows, H, size), scaled.
struct AttendingLatents {
    const LatentArgs& args;
    const Span& span;
    const Tree& tree;
    const int begin, latent, size, queries;
    const float* q;
    int blocks, each, chunks;  // queries of a chunk
    Partials partials;
    AttentionArgs plain = {};  // arguments of the functions shared with attention.h

    AttendingLatents(Context& context, const LatentArgs& args, const Span& span, const Tree& tree, int begin, int rows, const float* q)
        : args(args), span(span), tree(tree), begin(begin), latent(args.latent), size(args.rotary + latent), queries(rows * args.heads), q(q),
          partials(divide(context, rows)) {
        plain.heads = args.heads, plain.kv_heads = 1, plain.head_dim = size;
    }
    Partials divide(Context& context, int rows) {
        int longest = 0;
        for (int row = begin; row < begin + rows; row++) longest = most(longest, tree.last(row));
        blocks = (longest + KEYS - 1) / KEYS;
        // Few queries over a long cache: divide its blocks among threads too. Results are the same either way.
        const int threads = context.pool.threads(), wide = (queries + LATENT_QUERIES - 1) / LATENT_QUERIES;
        const bool split = wide < 4 * threads && blocks > 1 && (size_t)queries * blocks * (latent + 2) <= MOST_PIECES;
        each = split || wide >= threads ? LATENT_QUERIES : LATENT_QUERIES / 4;
        chunks = (queries + each - 1) / each;
        return Partials(context.partial, queries, split ? blocks : 1, latent);
    }
    int tasks() const { return chunks * partials.pieces; }
    void run(int task) const {
        const int piece = task % partials.pieces, chunk = task / partials.pieces;
        const int from_query = chunk * each, n = least(each, queries - from_query);
        const Cached cached(span, plain, 0, 0);
        Query list[LATENT_QUERIES];
        for (int i = 0; i < n; i++) {
            const int row = begin + (from_query + i) / args.heads;
            list[i] = {q + (size_t)(from_query + i) * size, 0, tree.last(row), row};
        }
        if (span.format == KV_ROWS_INT8) round_queries(n, list, size);
        partials.run(from_query, piece, list, n, blocks, tree, [&](int block, int i, int count, BlockResult* results, float* to) {
            const int row = list[i + count - 1].row;  // the last row attends to the most
            if (tree.last(row) <= block * KEYS) {
                for (int j = 0; j < count; j++) results[j] = {-INFINITY, 0.f};
            } else if (span.format == KV_ROWS_INT8) {
                const Sources from = latent_sources<uint8_t>(span, tree, block, row, size);
                attend_block<CachedInt8>(count, list + i, cached, from, block, args.rotary, results, to, latent);
            } else {
                const Sources from = latent_sources<uint16_t>(span, tree, block, row, size);
                attend_block<CachedBf16>(count, list + i, cached, from, block, args.rotary, results, to, latent);
            }
        });
    }
    // Merges the pieces of a query: out (rows, H, latent).
    void merge(int index, float* out) const {
        partials.merge(index);
        const float *sum = partials.sum(index, 0), total = partials.result(index, 0).total, inverse = total > 0 ? 1.f / total : 0.f;
        float* to = out + (size_t)index * latent;
        for (int e = 0; e < latent; e++) to[e] = sum[e] * inverse;
    }
};

inline void attend_latents(Context& context, const AttendingLatents& attending, float* out) {
    parallel(context, attending.tasks(), [&](int task) { attending.run(task); });
    each_row(context, attending.queries, [&](int index) { attending.merge(index, out); });
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
            attend_latents(context, {context, args, span, tree, begin, rows, turned}, seen);
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
    linear(context, args.proj, joined, args.rows, args.out);
}

// A single row as one list of tasks: the projection to latents, each head's query in the latent space, attention, each
// head's value, and the output. Threads wait for each other behind the first, whose results are normed together.
inline void latent_of_row(Context& context, const LatentArgs& args) {
    const int heads = args.heads, each = args.nope + args.rotary, latent = args.latent, size = args.rotary + latent;
    const int width = args.down.rows, rank = args.query_up.count ? args.query_up.cols : 0;
    float *line = scratch<float>(context.wide, width), *joined = scratch<float>(context.joined, (size_t)heads * args.value);
    float *low = scratch<float>(context.gated, rank + (size_t)heads * (size + latent)), *turned = low + rank, *seen = turned + (size_t)heads * size;
    const Runs runs(1);
    const Acts plain = reserve_heads(context.chosen, heads, 1, args.key_up), latents = reserve_heads(context.shared_inner, heads, 1, args.value_up);
    RowInput input(args.down), queries(args.query_up);
    Acts results = reserve(context.inner, joined, 1, args.proj);
    begin_groups(context.inner, results);
    const Tree tree(context, *args.spans);
    const AttendingLatents attending(context, args, *args.spans, tree, 0, 1, turned);
    const Shares downs(context, context.tasks, args.down, 0), outs(context, context.more_tasks, args.proj, 0);
    struct Chunk { Countdown asked, attended; };
    Chunk* of = scratch<Chunk>(context.places, attending.chunks);
    for (int c = 0; c < attending.chunks; c++) of[c] = {{least(attending.each, heads - c * attending.each)}, {attending.partials.pieces}};
    Countdown projected = {downs.count}, normed = {1};
    auto project = [&](int task) {
        const Share& share = downs.list[task];
        input.prepared.wait(tile_at(*share.matrix, share.tile));
        multiply_share(args.down, share, input.acts, line);
        if (!projected.finish()) return;
        append_key(args, 0, line + width - size);
        if (rank) {
            rms_norm(line, args.query_norm, args.latent_eps, rank, low);
            queries.read(context, context.shared_rows, low, nullptr, 0);
        }
        normed.finish();
    };
    auto ask = [&](int h) {  // a head's query in the latent space
        float *q = args.q + (size_t)h * each, *to = turned + (size_t)h * size;
        normed.wait();
        if (rank) queries.multiply(h * each / 16, each / 16, args.q);
        else copy_floats(line + h * each, each, q);
        turn_query(args, 0, q + args.nope);
        const Acts own = of_head(plain, h, runs);
        prepare_head(own, runs, 0, args.key_up, q, args.scale);
        multiply_head(args.key_up, heads, h, own, to + args.rotary);
        for (int j = 0; j < args.rotary; j++) to[j] = q[args.nope + j] * args.scale;
        of[h / attending.each].asked.finish();
    };
    auto attend = [&](int task) {
        Chunk& chunk = of[task / attending.partials.pieces];
        chunk.asked.wait();
        attending.run(task);
        chunk.attended.finish();
    };
    auto answer = [&](int h) {  // a head's value
        float* to = joined + (size_t)h * args.value;
        of[h / attending.each].attended.wait();
        attending.merge(h, seen);
        const Acts own = of_head(latents, h, runs);
        prepare_head(own, runs, 0, args.value_up, seen + (size_t)h * latent, 1.f);
        multiply_head(args.value_up, heads, h, own, to);
        const float gate = args.head_gates ? sigmoid1(line[width - size - heads + h]) : 1.f;
        for (int e = 0; e < args.value && args.head_gates; e++) to[e] *= gate;
        if (args.proj.hadamard) block_hadamard(to, args.value, args.proj.hadamard);
        quantize_row(results, runs, 0, to, h * args.value, args.value);
    };
    context.pool.meet();  // where latents are normed
    const int pieces = attending.tasks();
    parallel(context, 1 + downs.count + 2 * heads + pieces + outs.count, [&](int task) {
        if (task == 0) return input.read(context, context.rows, args.x, args.norm, args.eps);
        if (--task < downs.count) return project(task);
        if ((task -= downs.count) < heads) return ask(task);
        if ((task -= heads) < pieces) return attend(task);
        if ((task -= pieces) < heads) return answer(task);
        multiply_share(args.proj, outs.list[task - heads], results, args.out);
    });
}

// Both steps of a layer.
void latent(Context& context, const LatentArgs& args) {
    bool alone = args.rows == 1 && args.span_count == 1 && !args.spans->mask && !context.adapters.rows;
    alone &= (args.nope + args.rotary) % 16 == 0 && args.value % most(32, args.proj.hadamard) == 0;
    if (alone && !any_plain(args.proj) && whole_tiles(args.query_up)) return latent_of_row(context, args);
    norm_latent_append(context, args);
    latent_output(context, args);
}

}  // namespace
