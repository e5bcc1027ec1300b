// The fused steps of the Ops protocol, on float32 rows. Included once per instruction set.
#pragma once
#include "matmul.h"
#if LRT_PART != 2
#include "attention.h"
#include "ceilings.h"

inline namespace LRT_SPACE {

inline float square_sum(const float* x, int n) {
    F16L sum = F16L::zero();
    int i = 0;
    for (; i + 16 <= n; i += 16) {
        const F16L v = F16L::load(x + i);
        sum = v.fma(v, sum);
    }
    float total = sum16(sum);
    for (; i < n; i++) total += x[i] * x[i];
    return total;
}

inline void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
    const float inverse = 1.f / std::sqrt(square_sum(x, n) / (float)n + eps);
    for (int i = 0; i < n; i++) out[i] = x[i] * inverse * weight[i];
}

// Collects the kinds of sums that a stack's matrices need; returns whether one is packed.
inline bool note_starts(const Stack& stack, Acts& acts, bool precise = false) {
    bool packed = false;
    for (int i = 0; i < stack.count; i++)
        with_layout(stack.parts[i].layout, [&](auto part) {
            if constexpr (decltype(part)::PACKED) {
                using Layout = typename decltype(part)::Kind;
                packed = true;
                constexpr int ZERO = start_zero<Layout>();
                const int halves = start_halves<Layout>(precise);
                if (ZERO && !acts.find_start(ZERO, halves)) acts.starts[acts.start_count++] = {ZERO, halves, nullptr};
            }
        });
    return packed;
}

// Room for the codes of `count` groups and for their sums.
inline void reserve_groups(Context::Rows& memory, size_t count, Acts& acts, bool precise = false) {
    size_t starts = 0;
    for (int i = 0; i < acts.start_count; i++) starts += count * acts.starts[i].halves;
    if (precise) acts.pairs = scratch<int32_t>(memory.codes, count * 16);
    else acts.codes = scratch<int8_t>(memory.codes, count * 32);
    acts.meta = scratch<float>(memory.meta, count * 2);
    int32_t* values = scratch<int32_t>(memory.starts, starts);
    for (int i = 0; i < acts.start_count; i++) {
        acts.starts[i].values = values;
        values += count * acts.starts[i].halves;
    }
}

// Room for the inputs of `stack`, with codes if a part is packed.
inline Acts reserve(Context::Rows& memory, const float* x, int rows, const Stack& stack, bool precise = false) {
    Acts acts = {x, nullptr, nullptr, {}, 0, rows, stack.cols, nullptr};
    if (note_starts(stack, acts, precise)) reserve_groups(memory, (size_t)Runs(rows).padded() * (stack.cols / 32), acts, precise);
    return acts;
}

// Prepares inputs of `stack`: normed if `norm`, rotated if it needs it, quantized if a part is packed (16 bits if `precise`).
inline Acts prepare(Context& context, Context::Rows& memory, const float* x, const int64_t* wanted, int rows, const float* norm,
                    float eps, const Stack& stack, bool precise = false) {
    const int cols = stack.cols;
    Acts acts = reserve(memory, x, rows, stack, precise);
    const bool copy = norm || wanted || stack.hadamard;
    float* normed = copy ? scratch<float>(memory.normed, (size_t)rows * cols) : nullptr;
    if (copy) acts.x = normed;
    if (rows == context.adapters.rows && !wanted) acts.mixes = context.adapters.mixes;
    const Runs runs(rows);
    each_row(context, runs.padded(), [&](int row) {
        const float* from = row < rows ? x + (size_t)(wanted ? wanted[row] : row) * cols : nullptr;
        if (copy && from) {
            float* to = normed + (size_t)row * cols;
            if (norm) rms_norm(from, norm, eps, cols, to);
            else copy_floats(from, cols, to);
            if (stack.hadamard) block_hadamard(to, cols, stack.hadamard);
            from = to;
        }
        if (acts.pairs) quantize_row<true>(acts, runs, row, from, 0, cols);
        else if (acts.codes) quantize_row(acts, runs, row, from, 0, cols);
    });
    return acts;
}

// Rows as they are, times a stack's.
void linear(Context& context, const Stack& stack, const float* x, int rows, float* out) {
    matmul(context, stack, prepare(context, context.rows, x, nullptr, rows, nullptr, 0, stack), out);
}

// The flags of inputs whose groups become ready one by one, for `rows` single rows.
inline void begin_groups(Context::Rows& memory, Acts& acts, int rows = 1) {
    const int count = rows * (acts.cols / 32);
    acts.ready = scratch<uint8_t>(memory.ready, count);
    for (int i = 0; i < count; i++) acts.ready[i] = 0;
}

// A single row as the input of `stack`, which one task prepares and others wait for.
struct RowInput {
    const Stack& stack;
    Acts acts;
    Countdown prepared = {1};

    explicit RowInput(const Stack& stack) : stack(stack) {}
    void read(Context& context, Context::Rows& memory, const float* x, const float* norm, float eps, bool precise = false) {
        acts = prepare(context, memory, x, nullptr, 1, norm, eps, stack, precise);
        prepared.finish();
    }
    void wait(int tile) const { prepared.wait(tile_at(stack, tile)); }
    void multiply(int tile, int tiles, float* out) const {
        wait(tile);
        multiply_tiles(stack, tile, tiles, acts, out);
    }
};

inline void rotate(float* head, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

// A row of an attention layer: what its place in its sequence decides about its heads.
struct HeadRow {
    const AttentionArgs& args;
    const Span* span;
    int row, slot;
    const float *cos, *sin, *place_cos, *place_sin;
    bool moved;  // its position is not its index in the cache

    HeadRow(const AttentionArgs& args, int row) : args(args), span(args.spans), row(row), slot(row) {
        while (slot >= span->rows) slot -= span++->rows;
        slot += span->held;
        const size_t turn = (size_t)row * (args.rotary / 2), turned = args.rotary / 2 * sizeof(float);
        cos = args.cos ? args.cos + turn : nullptr, sin = args.sin + turn;
        place_cos = args.place_cos + turn, place_sin = args.place_sin + turn;
        // Decided row by row: a row's bits must not depend on other rows.
        moved = args.place_cos && (__builtin_memcmp(cos, place_cos, turned) || __builtin_memcmp(sin, place_sin, turned));
    }
    // Norms and turns a head of queries, or the keys of a group.
    void finish(float* head, const float* norm, const KeyBias* bias) const {
        const int size = args.head_dim;
        if (bias && !moved) bias->take_off(head);
        if (norm && !args.joint_norms && !args.norms_last) rms_norm(head, norm, args.eps, size, head);
        if (cos) rotate(head, cos, sin, args.rotary / 2);
        if (bias && moved) bias->take_off(head, place_cos, place_sin);
        if (norm && args.norms_last) rms_norm(head, norm, args.eps, size, head);
        rotate_head(span->format, size, head);
    }
    // Finishes a group's queries, `step` apart, and appends its keys and values, if it has any, to the cache.
    void finish_group(int g, float* queries, int step, float* keys, float* values) const {
        const int size = args.head_dim, per = args.heads / args.kv_heads;
        float* q = args.q + ((size_t)row * args.heads + g * per) * size;
        for (int i = 0; i < per; i++, queries += step) {
            finish(queries, args.q_norm, nullptr);
            for (int e = 0; e < size; e++) *q++ = queries[e] * args.scale;
        }
        if (args.projections == 1) return;  // those of an earlier layer are used
        alignas(64) float copy[MAX_HEAD];
        if (args.projections == 2) copy_floats(keys, size, values = copy);
        const KeyBias bias(args, *span, g);
        finish(keys, args.k_norm, &bias);
        if (args.v_norm) rms_norm(values, args.v_norm, args.eps, size, values);
        rotate_head(span->format, size, values);
        append(*span, g, slot, size, keys, values);
    }
};

void norm_qkv_rope_append(Context& context, const AttentionArgs& args) {
    const int heads = args.heads, groups = args.kv_heads, size = args.head_dim, width = args.qkv.rows;
    const Acts acts = prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.qkv);
    float* wide = scratch<float>(context.wide, (size_t)args.rows * width);
    matmul(context, args.qkv, acts, wide);
    const int step = args.gated ? 2 * size : size, per = heads / groups;
    each_row<8>(context, args.rows, [&](int row) {
        float *line = wide + (size_t)row * width, *keys = line + heads * step, *values = keys + groups * size;
        float* gates = args.q + (size_t)(args.rows + row) * heads * size;
        if (args.qkv_bias)
            for (int i = 0; i < width; i++) line[i] += args.qkv_bias[i];
        for (int h = 0; h < heads && args.gated; h++) copy_floats(line + h * step + size, size, gates + h * size);
        for (int h = 0; h < heads && args.head_gates; h++) fill_floats(gates + h * size, size, line[width - heads + h]);
        if (args.number_gates) copy_floats(line + width - heads * size, heads * size, gates);
        if (args.joint_norms && args.q_norm) rms_norm(line, args.q_norm, args.eps, heads * size, line);
        if (args.joint_norms && args.k_norm && args.projections > 1) rms_norm(keys, args.k_norm, args.eps, groups * size, keys);
        const HeadRow at(args, row);
        for (int g = 0; g < groups; g++) at.finish_group(g, line + g * per * step, step, keys + g * size, values + g * size);
    });
}

inline void finish_rows(Context& context, float* out, int rows, int cols, const float* bias, const float* norm, float eps) {
    if (!bias && !norm) return;
    each_row(context, rows, [&](int row) {
        float* line = out + (size_t)row * cols;
        if (bias)
            for (int i = 0; i < cols; i++) line[i] += bias[i];
        if (norm) rms_norm(line, norm, eps, cols, line);
    });
}

// In place.
void norm_rows(Context& context, const NormArgs& args) {
    finish_rows(context, args.x, args.rows, args.cols, nullptr, args.norm, args.eps);
}

inline void gate_result(float* result, const float* gates, int count, bool softplus) {
    for (int i = 0; i < count; i += 16) {
        const int n = least(16, count - i);
        const F16L gate = load_some(gates + i, n);
        store_some(load_some(result + i, n) * (softplus ? softplus16(gate) : sigmoid16(gate)), n, result + i);
    }
}

void attention_output(Context& context, const AttentionArgs& args) {
    const int width = args.heads * args.head_dim;
    float* joined = scratch<float>(context.joined, (size_t)args.rows * width);
    int row = 0;
    for (int s = 0; s < args.span_count; s++) {
        attend(context, args, args.spans[s], row, joined + (size_t)row * width);
        row += args.spans[s].rows;
    }
    if (args.gated || args.head_gates || args.number_gates) {
        const float* gates = args.q + (size_t)args.rows * width;
        parallel(context, args.rows, [&](int row) {
            gate_result(joined + (size_t)row * width, gates + (size_t)row * width, width, args.softplus);
        });
    }
    linear(context, args.proj, joined, args.rows, args.out);
    finish_rows(context, args.out, args.rows, args.proj.rows, args.out_bias, args.post_norm, args.result_eps);
}

// A single row: projections, attention and its output are one list of tasks, so that threads meet once. Whoever ends a
// group's projections finishes its heads, who ends its attention quantizes the result, and products wait for the columns
// that they read.
inline void attention_of_row(Context& context, const AttentionArgs& args) {
    const int heads = args.heads, groups = args.kv_heads, size = args.head_dim, per = heads / groups;
    const int step = args.gated ? 2 * size : size, kept = args.projections - 1, parts = kept + per;
    float *line = scratch<float>(context.wide, args.qkv.rows), *joined = scratch<float>(context.joined, heads * size);
    float *keys = line + heads * step, *values = keys + groups * size;
    Acts results = reserve(context.inner, joined, 1, args.proj);
    begin_groups(context.inner, results);
    RowInput input(args.qkv);
    const Attending attending(context, args, *args.spans, 0);
    const Shares shares(context, context.tasks, args.proj, 0);
    struct Group { Countdown projected, finished, attended; };
    Group* of = scratch<Group>(context.places, groups);
    const int pieces = attending.tasks_of_group();
    for (int g = 0; g < groups; g++) of[g] = {{parts}, {1}, {pieces}};
    const HeadRow row(args, 0);
    auto project = [&](int g, int part) {  // the keys, the values, or a head's queries
        const int column = part >= kept ? (g * per + part - kept) * step : heads * step + (part * groups + g) * size;
        const int count = part >= kept ? step : size;
        input.multiply(column / 16, count / 16, line);
        for (int i = column; i < column + count && args.qkv_bias; i++) line[i] += args.qkv_bias[i];
        if (!of[g].projected.finish()) return;
        row.finish_group(g, line + g * per * step, step, keys + g * size, values + g * size);
        of[g].finished.finish();
    };
    auto attend_piece = [&](int g, int task) {
        of[g].finished.wait();
        attending.run(task);
        if (!of[g].attended.finish()) return;
        float* result = joined + g * per * size;
        for (int i = 0; i < per; i++) {
            attending.merge(g, i, joined);
            if (args.gated) gate_result(result + i * size, line + (g * per + i) * step + size, size, args.softplus);
        }
        if (args.proj.hadamard) block_hadamard(result, per * size, args.proj.hadamard);
        quantize_row(results, Runs(1), 0, result, g * per * size, per * size);
    };
    parallel(context, 1 + groups * (parts + pieces) + shares.count, [&](int task) {
        if (task == 0) return input.read(context, context.rows, args.x, args.norm, args.eps);
        if (--task < groups * parts) return project(task / parts, task % parts);
        if ((task -= groups * parts) < groups * pieces) return attend_piece(task / pieces, task);
        multiply_share(args.proj, shares.list[task - groups * pieces], results, args.out);
    });
    finish_rows(context, args.out, args.rows, args.proj.rows, args.out_bias, args.post_norm, args.result_eps);
}

// Both steps of a layer.
void attention(Context& context, const AttentionArgs& args) {
    const int part = args.heads / args.kv_heads * args.head_dim, rotated = most(32, args.proj.hadamard);
    bool alone = args.rows == 1 && args.span_count == 1 && !args.spans->mask && !args.chosen && !context.adapters.rows;
    alone &= !args.joint_norms && !args.head_gates && !args.number_gates && args.head_dim % 16 == 0 && part % rotated == 0;
    alone &= !any_plain(args.proj) && whole_tiles(args.qkv);
    if (alone) return attention_of_row(context, args);
    norm_qkv_rope_append(context, args);
    attention_output(context, args);
}

// Computes numbers [begin, end) of F gated ones in a row from its gates and ups.
inline void gate_row(const float* gate, const float* up, int begin, int end, const Gate& join, const float* gate_bias,
                     const float* up_bias, float* gated) {
    for (int i = begin; i < end; i += 16) {
        const int n = least(16, end - i);
        F16L g = load_some(gate + i, n), u = load_some(up + i, n);
        if (gate_bias) {
            g = g + load_some(gate_bias + i, n);
            u = u + load_some(up_bias + i, n);
        }
        alignas(64) float lanes[16];
        join(g, u).store(lanes);
        copy_floats(lanes, n, gated + i);
    }
}

// gated (R, F) from wide (R, 2F), gates first; or from (R, F) without gates, which may be `gated` itself.
inline void gate_rows(Context& context, const float* wide, int rows, int inner, const Gate& join, float* gated) {
    const size_t ups = has_gate(join.activation) ? inner : 0;
    // Long rows are divided as well: otherwise a single row's gate would run on one thread.
    const int piece = 2048, pieces = (inner + piece - 1) / piece;
    parallel(context, rows * pieces, [&](int task) {
        const int row = task / pieces, begin = task % pieces * piece, end = least(inner, begin + piece);
        const float* gate = wide + row * (inner + ups);
        gate_row(gate, gate + ups, begin, end, join, nullptr, nullptr, gated + (size_t)row * inner);
    });
}

// Rows times the sigmoids of `gates`.
inline void scale_rows(Context& context, float* out, int rows, int cols, const float* gates) {
    each_row(context, rows, [&](int row) {
        const float factor = sigmoid1(gates[row]);
        float* line = out + (size_t)row * cols;
        for (int i = 0; i < cols; i++) line[i] *= factor;
    });
}

// A single row's MLP in tasks that wait for each other: its input, and its gates and ups, which end as codes. Its downs wait
// for the columns that they read.
struct RowMlp {
    const MlpArgs& args;
    const Halves halves;
    RowInput input;
    Acts gated;
    int unit, count, *starts;  // tasks of gates and ups

    static bool fits(const MlpArgs& args, Halves& halves) {
        return has_gate(args.activation) && args.down.count && can_gate(args.gate_up, args.down, halves);
    }
    RowMlp(const Context& context, Context::Rows& inner, Scratch& tasks, const MlpArgs& args, const Halves& halves)
        : args(args), halves(halves), input(args.gate_up), gated(reserve(inner, nullptr, 1, args.down)), unit(gated_unit(args.down)) {
        begin_groups(inner, gated);
        count = divide_gated(context, tasks, halves.gate.rows / 16, unit, false, starts);
    }
    void read(Context& context, Context::Rows& memory) { input.read(context, memory, args.x, args.norm, args.eps); }
    void gate(int task) const {
        const Gated to = {gated, {args.activation, args.limit, args.gate_scale, args.curve}, args.down.hadamard, nullptr, nullptr};
        const int tile = starts[task], tiles = starts[task + 1] - tile;
        input.wait(tile);
        multiply_gated(halves, tile, tiles, unit, input.acts, Runs(1), {0, 1}, to);
    }
};

// As one list of tasks, so that threads meet once.
inline void mlp_of_row(Context& context, const MlpArgs& args, const Halves& halves) {
    RowMlp mlp(context, context.inner, context.tasks, args, halves);
    const Shares downs(context, context.more_tasks, args.down, 0);
    parallel(context, 1 + mlp.count + downs.count, [&](int task) {
        if (task == 0) mlp.read(context, context.rows);
        else if (task <= mlp.count) mlp.gate(task - 1);
        else multiply_share(args.down, downs.list[task - 1 - mlp.count], mlp.gated, args.out);
    });
}

// Of several rows: gates and ups, if `halves` are there quantized at once, then downs.
inline void mlp_of_rows(Context& context, const MlpArgs& args, const Halves* halves, const Gate& gate) {
    const Acts acts = prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.gate_up);
    const bool gates = has_gate(args.activation);
    const int inner = args.gate_up.rows / (gates ? 2 : 1);
    Acts gated;
    if (halves) {
        gated = reserve(context.inner, nullptr, args.rows, args.down);
        const Additions more = additions(context, args.gate_up, acts);
        // Direct quantization leaves no floats for adapters of the next matrix.
        float* keep = adapted(context, args.down) ? scratch<float>(context.gated, (size_t)args.rows * inner) : nullptr;
        gated_matmul(context, *halves, acts, {gated, gate, args.down.hadamard, nullptr, nullptr, more.products ? &more : nullptr, keep});
        if (keep) gated.x = keep, gated.mixes = context.adapters.mixes;
    } else {
        float* wide = scratch<float>(context.wide, (size_t)args.rows * args.gate_up.rows + 16);
        matmul(context, args.gate_up, acts, wide);
        float* values = !args.down.count ? args.out : gates ? scratch<float>(context.gated, (size_t)args.rows * inner + 16) : wide;
        gate_rows(context, wide, args.rows, inner, gate, values);
        if (!args.down.count) return;
        gated = prepare(context, context.inner, values, nullptr, args.rows, nullptr, 0, args.down);
    }
    matmul(context, args.down, gated, args.out);
}

void norm_gated_mlp(Context& context, const MlpArgs& args) {
    const Gate gate = {args.activation, args.limit, args.gate_scale, args.curve};
    Halves halves;
    const bool joined = RowMlp::fits(args, halves);
    if (joined && args.rows == 1 && !context.adapters.rows) mlp_of_row(context, args, halves);
    else mlp_of_rows(context, args, joined ? &halves : nullptr, gate);
    if (args.down.count == 0) return;
    finish_rows(context, args.out, args.rows, args.down.rows, nullptr, args.post_norm, args.result_eps);
    if (args.row_gate.count == 0) return;
    float* factors = scratch<float>(context.wide, args.rows);
    matmul(context, args.row_gate, prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.row_gate), factors);
    scale_rows(context, args.out, args.rows, args.down.rows, factors);
}

inline void cap_softly(float* x, int count, float most) {
    const F16L cap = F16L::set1(most);
    for (int i = 0; i < count; i += 16) store_some(tanh16(load_some(x + i, count - i) / cap) * cap, count - i, x + i);
}

// Logits are sensitive to rounding, and the head is limited by reading: 16-bit activations.
void head(Context& context, const HeadArgs& args) {
    if (args.count == 0) return;  // chunks of a prompt but the last need no logits
    const Acts acts = prepare(context, context.rows, args.x, args.wanted, args.count, args.norm, args.eps, args.weight, true);
    matmul(context, args.weight, acts, args.logits);
    if (args.softcap > 0) {
        const int64_t total = (int64_t)args.count * args.weight.rows, piece = 8192;
        parallel(context, (int)((total + piece - 1) / piece), [&](int task) {
            cap_softly(args.logits + task * piece, (int)least(piece, total - task * piece), args.softcap);
        });
    }
}

}  // namespace

#include "routing.h"
#include "experts.h"
#include "latent.h"
#include "streams.h"
#include "index.h"
#include "ngrams.h"
#include "scale_search.h"
#include "vision.h"

inline namespace LRT_SPACE {

// Rows of a tiled matrix as float32: the embedding, and the kernels' own reference.
void read_rows(const Matrix& matrix, const int64_t* rows, int count, float factor, float* out) {
    with_layout(matrix.layout, [&](auto kind) {
        for (int i = 0; i < count; i++)
            kind.read(matrix, (int)rows[i], factor * matrix.scale, out + (size_t)i * matrix.cols);
    });
}

}  // namespace

#if !LRT_BF16_ONLY
extern const Kernels KERNELS;
const Kernels KERNELS = {norm_qkv_rope_append, attention_output, attention, norm_gated_mlp, norm_route, run_experts, combine_experts,
                         mixture_of_row, head, linear, read_rows, read_all, search_scales, norm_latent_append, latent_output, latent,
                         norm_rows, project_inputs, gate_inputs, read_streams, recurrent, add_ngrams, choose_tokens, pack_low_rank,
                         {vision_linear, vision_norm, vision_rotate, vision_gate, vision_add, vision_attention}};
#endif
#endif  // LRT_PART
