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
    const int share = 16, padded = runs.padded(), tasks = (padded + share - 1) / share;
    parallel(context, tasks, [&](int task) {
        for (int row = task * share; row < least(padded, (task + 1) * share); row++) {
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
        }
    });
    return acts;
}

inline void rotate(float* head, const float* cos, const float* sin, int half) {
    for (int i = 0; i < half; i++) {
        const float a = head[i], b = head[i + half];
        head[i] = a * cos[i] - b * sin[i];
        head[i + half] = b * cos[i] + a * sin[i];
    }
}

// Moves heads' gates, which alternate with queries, to `gates`, and compacts the other `count` elements.
inline void part_gates(float* line, int heads, int count, int size, float* gates) {
    for (int h = 0; h < heads; h++) {
        copy_floats(line + (2 * h + 1) * size, size, gates + h * size);
        if (h) copy_floats(line + 2 * h * size, size, line + h * size);
    }
    for (int i = heads * size; i < count; i++) line[i] = line[i + heads * size];
}

void norm_qkv_rope_append(Context& context, const AttentionArgs& args) {
    const int heads = args.heads, groups = args.kv_heads, size = args.head_dim, width = args.qkv.rows;
    const Acts acts = prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.qkv);
    const int own = args.projections > 1 ? groups : 0;  // cached heads
    float* wide = scratch<float>(context.wide, (size_t)args.rows * width);
    float* copies = args.projections == 2 ? scratch<float>(context.joined, (size_t)args.rows * groups * size) : nullptr;
    matmul(context, args.qkv, acts, wide);
    const int share = 8, tasks = (args.rows + share - 1) / share;
    parallel(context, tasks, [&](int task) {
        for (int row = task * share; row < least(args.rows, (task + 1) * share); row++) {
            float* line = wide + (size_t)row * width;
            if (args.qkv_bias)
                for (int i = 0; i < width; i++) line[i] += args.qkv_bias[i];
            if (args.gated) part_gates(line, heads, width - heads * size, size, args.q + (size_t)(args.rows + row) * heads * size);
            if (args.head_gates)
                for (int h = 0; h < heads; h++)
                    fill_floats(args.q + ((size_t)(args.rows + row) * heads + h) * size, size, line[width - heads + h]);
            if (args.number_gates)
                copy_floats(line + width - heads * size, heads * size, args.q + (size_t)(args.rows + row) * heads * size);
            int index = row, owner = 0;
            while (index >= args.spans[owner].rows) index -= args.spans[owner++].rows;
            const Span& span = args.spans[owner];
            const int slot = span.held + index;
            float* values = copies ? copies + (size_t)row * groups * size : line + (heads + groups) * size;
            if (copies) copy_floats(line + heads * size, groups * size, values);
            const int half = args.rotary / 2;
            const size_t turn = (size_t)row * half, turned = half * sizeof(float);
            // Decided row by row: a row's bits must not depend on other rows.
            const bool moved = args.place_cos && (__builtin_memcmp(args.cos + turn, args.place_cos + turn, turned) ||
                                                  __builtin_memcmp(args.sin + turn, args.place_sin + turn, turned));
            for (int g = 0; g < own && !moved; g++) KeyBias(args, span, g).take_off(line + (heads + g) * size);
            auto norm_head = [&](int h) {
                const float* norm = h < heads ? args.q_norm : args.k_norm;
                if (norm) rms_norm(line + h * size, norm, args.eps, size, line + h * size);
            };
            if (args.joint_norms) {
                if (args.q_norm) rms_norm(line, args.q_norm, args.eps, heads * size, line);
                if (args.k_norm) rms_norm(line + heads * size, args.k_norm, args.eps, own * size, line + heads * size);
            }
            for (int h = 0; h < heads + own; h++) {
                float* head = line + h * size;
                if (!args.joint_norms && !args.norms_last) norm_head(h);
                if (args.cos) rotate(head, args.cos + turn, args.sin + turn, half);
                if (moved && h >= heads)
                    KeyBias(args, span, h - heads).take_off(head, args.place_cos + turn, args.place_sin + turn);
                if (args.norms_last) norm_head(h);
            }
            if (args.v_norm)
                for (int g = 0; g < own; g++) rms_norm(values + g * size, args.v_norm, args.eps, size, values + g * size);
            for (int h = 0; h < heads + own; h++) rotate_head(span.format, size, line + h * size);
            for (int g = 0; g < own; g++) rotate_head(span.format, size, values + g * size);
            float* q = args.q + (size_t)row * heads * size;
            for (int i = 0; i < heads * size; i++) q[i] = line[i] * args.scale;
            for (int g = 0; g < own; g++) append(span, g, slot, size, line + (heads + g) * size, values + g * size);
        }
    });
}

inline void finish_rows(Context& context, float* out, int rows, int cols, const float* bias, const float* norm, float eps) {
    if (!bias && !norm) return;
    parallel(context, (rows + 15) / 16, [&](int task) {
        for (int row = task * 16; row < least(rows, task * 16 + 16); row++) {
            float* line = out + (size_t)row * cols;
            if (bias)
                for (int i = 0; i < cols; i++) line[i] += bias[i];
            if (norm) rms_norm(line, norm, eps, cols, line);
        }
    });
}

// In place.
void norm_rows(Context& context, float* x, int rows, int cols, const float* norm, float eps) {
    finish_rows(context, x, rows, cols, nullptr, norm, eps);
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
            float* line = joined + (size_t)row * width;
            for (int i = 0; i < width; i += 16) {
                const int n = least(16, width - i);
                const F16L gate = load_some(gates + (size_t)row * width + i, n);
                store_some(load_some(line + i, n) * (args.softplus ? softplus16(gate) : sigmoid16(gate)), n, line + i);
            }
        });
    }
    const Acts acts = prepare(context, context.rows, joined, nullptr, args.rows, nullptr, 0, args.proj);
    matmul(context, args.proj, acts, args.out);
    finish_rows(context, args.out, args.rows, args.proj.rows, args.out_bias, args.post_norm, args.post_eps);
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
    parallel(context, (rows + 15) / 16, [&](int task) {
        for (int row = task * 16; row < least(rows, task * 16 + 16); row++) {
            const float factor = sigmoid1(gates[row]);
            float* line = out + (size_t)row * cols;
            for (int i = 0; i < cols; i++) line[i] *= factor;
        }
    });
}

void norm_gated_mlp(Context& context, const MlpArgs& args) {
    const bool gates = has_gate(args.activation);
    const int inner = args.gate_up.rows / (gates ? 2 : 1);
    const Acts acts = prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.gate_up);
    const Gate gate = {args.activation, args.limit, args.gate_scale, args.curve};
    if (args.down.count == 0) {
        float* wide = scratch<float>(context.wide, (size_t)args.rows * args.gate_up.rows + 16);
        matmul(context, args.gate_up, acts, wide);
        gate_rows(context, wide, args.rows, inner, gate, args.out);
        return;
    }
    Acts gated;
    Halves halves;
    if (gates && can_gate(args.gate_up, args.down, halves)) {
        gated = reserve(context.inner, nullptr, args.rows, args.down);
        const Additions more = additions(context, args.gate_up, acts);
        // Direct quantization leaves no floats for adapters of the next matrix.
        float* keep = adapted(context, args.down) ? scratch<float>(context.gated, (size_t)args.rows * inner) : nullptr;
        gated_matmul(context, halves, acts, {gated, gate, args.down.hadamard, nullptr, nullptr, more.products ? &more : nullptr, keep});
        if (keep) gated.x = keep, gated.mixes = context.adapters.mixes;
    } else {
        float* wide = scratch<float>(context.wide, (size_t)args.rows * args.gate_up.rows + 16);
        matmul(context, args.gate_up, acts, wide);
        float* values = gates ? scratch<float>(context.gated, (size_t)args.rows * inner + 16) : wide;
        gate_rows(context, wide, args.rows, inner, gate, values);
        gated = prepare(context, context.inner, values, nullptr, args.rows, nullptr, 0, args.down);
    }
    matmul(context, args.down, gated, args.out);
    finish_rows(context, args.out, args.rows, args.down.rows, nullptr, args.post_norm, args.post_eps);
    if (args.row_gate.count == 0) return;
    float* factors = scratch<float>(context.wide, args.rows);
    matmul(context, args.row_gate, prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.row_gate), factors);
    scale_rows(context, args.out, args.rows, args.down.rows, factors);
}

// Logits are sensitive to rounding, and the head is limited by reading: 16-bit activations.
void head(Context& context, const HeadArgs& args) {
    if (args.count == 0) return;  // chunks of a prompt but the last need no logits
    const Acts acts = prepare(context, context.rows, args.x, args.wanted, args.count, args.norm, args.eps, args.weight, true);
    matmul(context, args.weight, acts, args.logits);
    if (args.softcap > 0) {
        const F16L cap = F16L::set1(args.softcap);
        const int64_t total = (int64_t)args.count * args.weight.rows, piece = 8192;
        parallel(context, (int)((total + piece - 1) / piece), [&](int task) {
            const int64_t end = least(total, (task + 1) * piece);
            for (int64_t i = task * piece; i < end; i += 16) {
                const int count = (int)least(end - i, (int64_t)16);
                store_some(tanh16(load_some(args.logits + i, count) / cap) * cap, count, args.logits + i);
            }
        });
    }
}

void linear(Context& context, const Stack& stack, const float* x, int rows, float* out) {
    matmul(context, stack, prepare(context, context.rows, x, nullptr, rows, nullptr, 0, stack), out);
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
const Kernels KERNELS = {norm_qkv_rope_append, attention_output, norm_gated_mlp, norm_route, run_experts, combine_experts, head, linear,
                         read_rows, read_all, search_scales, norm_latent_append, latent_output, norm_rows, project_inputs,
                         gate_inputs, read_streams, recurrent, add_ngrams, choose_tokens, pack_low_rank,
                         {vision_linear, vision_norm, vision_rotate, vision_gate, vision_add, vision_attention}};
#endif
#endif  // LRT_PART
