// The fused steps of the Ops protocol, on float32 rows. Included once per instruction set.
#pragma once
#include "matmul.h"
#include "attention.h"
#include "ceilings.h"

namespace {

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

// Room for rows that `stack` multiplies: codes if a part is packed.
inline Acts reserve(Context::Rows& memory, const float* x, int rows, const Stack& stack) {
    Acts acts = {x, nullptr, nullptr, nullptr, {}, 0, rows, stack.cols};
    const size_t count = (size_t)Runs(rows).padded() * (stack.cols / 32);  // groups of all rows
    bool packed = false;
    size_t starts = 0;
    for (int i = 0; i < stack.count; i++)
        with_layout(stack.parts[i].layout, [&](auto part) {
            if constexpr (decltype(part)::PACKED) {
                using Layout = typename decltype(part)::Kind;
                packed = true;
                if (!Layout::SYMMETRIC || acts.find_start(Layout::ZERO, Layout::HALVES)) return;
                starts += count * Layout::HALVES;
                acts.starts[acts.start_count++] = {Layout::ZERO, Layout::HALVES, nullptr};
            }
        });
    if (!packed) return acts;
    acts.codes = scratch<int8_t>(memory.codes, count * 32);
    acts.meta = scratch<float>(memory.meta, count * 2);
    acts.halves = scratch<float>(memory.halves, count * 2);
    int32_t* values = scratch<int32_t>(memory.starts, starts);
    for (int i = 0; i < acts.start_count; i++) {
        acts.starts[i].values = values;
        values += count * acts.starts[i].halves;
    }
    return acts;
}

// Rows ready for `stack`: normalized if `norm`, rotated if it asks for it, quantized if a part is packed.
inline Acts prepare(Context& context, Context::Rows& memory, const float* x, const int64_t* wanted, int rows, const float* norm,
                    float eps, const Stack& stack) {
    const int cols = stack.cols;
    Acts acts = reserve(memory, x, rows, stack);
    const bool copy = norm || wanted || stack.hadamard;
    float* normed = copy ? scratch<float>(memory.normed, (size_t)rows * cols) : nullptr;
    if (copy) acts.x = normed;
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
            if (acts.codes) quantize_row(acts, runs, row, from, 0, cols);
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

void norm_qkv_rope_append(Context& context, const AttentionArgs& args) {
    const int heads = args.heads, groups = args.kv_heads, size = args.head_dim, width = args.qkv.rows;
    const Acts acts = prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.qkv);
    float* wide = scratch<float>(context.wide, (size_t)args.rows * width);
    matmul(context, args.qkv, acts, wide);
    const int share = 8, tasks = (args.rows + share - 1) / share;
    parallel(context, tasks, [&](int task) {
        for (int row = task * share; row < least(args.rows, (task + 1) * share); row++) {
            float* line = wide + (size_t)row * width;
            if (args.qkv_bias)
                for (int i = 0; i < width; i++) line[i] += args.qkv_bias[i];
            int index = row, owner = 0;
            while (index >= args.spans[owner].rows) index -= args.spans[owner++].rows;
            const Span& span = args.spans[owner];
            const int slot = span.held + index;
            for (int g = 0; g < groups; g++) KeyBias(args, span, g).take_off(line + (heads + g) * size);
            for (int h = 0; h < heads + groups; h++) {
                float* head = line + h * size;
                const float* norm = h < heads ? args.q_norm : args.k_norm;
                if (norm) rms_norm(head, norm, args.eps, size, head);
                if (args.cos) {
                    const int half = args.rotary / 2;
                    rotate(head, args.cos + (size_t)row * half, args.sin + (size_t)row * half, half);
                }
            }
            float* q = args.q + (size_t)row * heads * size;
            for (int i = 0; i < heads * size; i++) q[i] = line[i] * args.scale;
            for (int g = 0; g < groups; g++)
                append(span, g, slot, size, line + (heads + g) * size, line + (heads + groups + g) * size);
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

void attention_output(Context& context, const AttentionArgs& args) {
    const int width = args.heads * args.head_dim;
    float* joined = scratch<float>(context.joined, (size_t)args.rows * width);
    int row = 0;
    for (int s = 0; s < args.span_count; s++) {
        attend(context, args, args.spans[s], row, joined + (size_t)row * width);
        row += args.spans[s].rows;
    }
    const Acts acts = prepare(context, context.rows, joined, nullptr, args.rows, nullptr, 0, args.proj);
    matmul(context, args.proj, acts, args.out);
    finish_rows(context, args.out, args.rows, args.proj.rows, args.out_bias, args.post_norm, args.eps);
}

// gated (R, F) from wide (R, 2F), which has the gates first.
inline void gate_rows(Context& context, const float* wide, int rows, int inner, int activation, float* gated) {
    // Long rows are cut as well: at one row the gate would otherwise run on one thread.
    const int piece = 2048, pieces = (inner + piece - 1) / piece;
    parallel(context, rows * pieces, [&](int task) {
        const int row = task / pieces, begin = task % pieces * piece, end = least(inner, begin + piece);
        const float* gate = wide + (size_t)row * 2 * inner;
        for (int i = begin; i < end; i += 16) {
            alignas(64) float a[16] = {}, b[16] = {}, c[16];
            const int n = least(16, end - i);
            copy_floats(gate + i, n, a);
            copy_floats(gate + inner + i, n, b);
            (activate(F16L::load(a), activation) * F16L::load(b)).store(c);
            copy_floats(c, n, gated + (size_t)row * inner + i);
        }
    });
}

void norm_gated_mlp(Context& context, const MlpArgs& args) {
    const int inner = args.down.cols;
    const Acts acts = prepare(context, context.rows, args.x, nullptr, args.rows, args.norm, args.eps, args.gate_up);
    Acts gated;
    if (can_gate(args.gate_up, args.down)) {
        gated = reserve(context.inner, nullptr, args.rows, args.down);
        gated_matmul(context, args.gate_up, acts, args.activation, args.down, gated);
    } else {
        float* wide = scratch<float>(context.wide, (size_t)args.rows * 2 * inner);
        matmul(context, args.gate_up, acts, wide);
        float* values = scratch<float>(context.gated, (size_t)args.rows * inner + 16);
        gate_rows(context, wide, args.rows, inner, args.activation, values);
        gated = prepare(context, context.inner, values, nullptr, args.rows, nullptr, 0, args.down);
    }
    matmul(context, args.down, gated, args.out);
    finish_rows(context, args.out, args.rows, args.down.rows, nullptr, args.post_norm, args.eps);
}

// What rounding a row to int8 leaves over.
inline void rounding_left(const float* x, int cols, float* out) {
    for (int at = 0; at < cols; at += 32) {
        const F16L a = F16L::load(x + at), b = F16L::load(x + at + 16);
        const float peak = a.max(negated(a)).max(b.max(negated(b))).highest();
        const F16L scale = F16L::set1(peak / 127.f), inverse = F16L::set1(peak > 0 ? 127.f / peak : 0.f);
        (a - F16L::from((a * inverse).rounded()) * scale).store(out + at);
        (b - F16L::from((b * inverse).rounded()) * scale).store(out + at + 16);
    }
}

// Logits feel every rounding, and a head waits for its weights: rows go in with their rounding's rest as
// another row each, and the two products are added.
void precise_head(Context& context, const HeadArgs& args, int first, int count) {
    const int cols = args.weight.cols, vocabulary = args.weight.rows;
    float* pairs = scratch<float>(context.joined, (size_t)2 * count * cols);
    parallel(context, count, [&](int row) {
        float *x = pairs + (size_t)2 * row * cols, *rest = x + cols;
        rms_norm(args.x + (size_t)args.wanted[first + row] * cols, args.norm, args.eps, cols, x);
        if (args.weight.hadamard) block_hadamard(x, cols, args.weight.hadamard);
        rounding_left(x, cols, rest);
    });
    Stack weight = args.weight;
    weight.hadamard = 0;
    const Acts acts = prepare(context, context.rows, pairs, nullptr, 2 * count, nullptr, 0, weight);
    float* products = scratch<float>(context.wide, (size_t)2 * count * vocabulary);
    matmul(context, weight, acts, products);
    const int piece = 16384, pieces = (vocabulary + piece - 1) / piece;
    parallel(context, count * pieces, [&](int task) {
        const int row = task / pieces, begin = task % pieces * piece, end = least(vocabulary, begin + piece);
        const float *x = products + (size_t)2 * row * vocabulary, *rest = x + vocabulary;
        float* out = args.logits + (size_t)(first + row) * vocabulary;
        for (int i = begin; i < end; i++) out[i] = x[i] + rest[i];
    });
}

void head(Context& context, const HeadArgs& args) {
    if (args.count == 0) return;  // a chunk of a prompt wants no logits
    bool packed = true;
    for (int i = 0; i < args.weight.count; i++) packed &= is_packed(args.weight.parts[i].layout);
    if (packed) {
        const int at_once = 32;  // bounds the products' memory
        for (int first = 0; first < args.count; first += at_once)
            precise_head(context, args, first, least(at_once, args.count - first));
    } else {
        const Acts acts = prepare(context, context.rows, args.x, args.wanted, args.count, args.norm, args.eps, args.weight);
        matmul(context, args.weight, acts, args.logits);
    }
    if (args.softcap > 0) {
        const size_t total = (size_t)args.count * args.weight.rows, piece = 8192;
        parallel(context, (int)((total + piece - 1) / piece), [&](int task) {
            for (size_t i = task * piece; i < least(total, (task + 1) * piece); i++)
                args.logits[i] = std::tanh(args.logits[i] / args.softcap) * args.softcap;
        });
    }
}

void linear(Context& context, const Stack& stack, const float* x, int rows, float* out) {
    matmul(context, stack, prepare(context, context.rows, x, nullptr, rows, nullptr, 0, stack), out);
}

// Rows of a tiled matrix as float32: the embedding, and the kernels' own reference.
void read_rows(const Matrix& matrix, const int64_t* rows, int count, float factor, float* out) {
    with_layout(matrix.layout, [&](auto kind) {
        for (int i = 0; i < count; i++)
            kind.read(matrix, (int)rows[i], factor * matrix.scale, out + (size_t)i * matrix.cols);
    });
}

}  // namespace

extern const Kernels KERNELS;
const Kernels KERNELS = {norm_qkv_rope_append, attention_output, norm_gated_mlp, head, linear, read_rows, multiply_peak, read_all};
