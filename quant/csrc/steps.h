// The fused steps of the Ops protocol, on float32 rows. Included once per instruction set.
#pragma once
#include "formats.h"
#include "matmul.h"
#include "attention.h"

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

// Rows ready for `stack`: normalized if `norm`, quantized if a part is packed.
inline Acts prepare(Context& context, const float* x, const int64_t* wanted, int rows, int cols, const float* norm, float eps,
                    const Stack& stack) {
    bool packed = false;
    for (int i = 0; i < stack.count; i++) packed |= is_packed(stack.parts[i].format);
    const bool copy = norm || wanted;
    float* normed = copy ? scratch<float>(context.normed, (size_t)rows * cols) : nullptr;
    int8_t* codes = packed ? scratch<int8_t>(context.codes, (size_t)rows * cols) : nullptr;
    const size_t groups = cols / 32;
    float* meta = packed ? scratch<float>(context.meta, rows * groups * 2) : nullptr;
    float* halves = packed ? scratch<float>(context.halves, rows * groups * 2) : nullptr;
    const int share = 16, tasks = (rows + share - 1) / share;
    parallel(context, tasks, [&](int task) {
        for (int row = task * share; row < least(rows, (task + 1) * share); row++) {
            const float* from = x + (size_t)(wanted ? wanted[row] : row) * cols;
            if (norm) {
                rms_norm(from, norm, eps, cols, normed + (size_t)row * cols);
                from = normed + (size_t)row * cols;
            } else if (wanted) {
                copy_floats(from, cols, normed + (size_t)row * cols);
                from = normed + (size_t)row * cols;
            }
            if (!packed) continue;
            const RowRun run = run_of(row, rows);
            const size_t at = row - run.start, base = (size_t)run.start * groups * 2 + at * 2;
            quantize_row(from, cols, run.size, codes + (size_t)run.start * cols + at * 32, meta + base, halves + base);
        }
    });
    return {copy ? normed : x, codes, meta, halves, rows, cols};
}

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
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
    const Acts acts = prepare(context, args.x, nullptr, args.rows, args.qkv.cols, args.norm, args.eps, args.qkv);
    float* wide = scratch<float>(context.wide, (size_t)args.rows * width);
    matmul(context, args.qkv, acts, wide);
    const int share = 8, tasks = (args.rows + share - 1) / share;
    parallel(context, tasks, [&](int task) {
        for (int row = task * share; row < least(args.rows, (task + 1) * share); row++) {
            float* line = wide + (size_t)row * width;
            if (args.qkv_bias)
                for (int i = 0; i < width; i++) line[i] += args.qkv_bias[i];
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
            int index = row, owner = 0;
            while (index >= args.spans[owner].rows) index -= args.spans[owner++].rows;
            const Span& span = args.spans[owner];
            const size_t slot = span.held + index;
            for (int g = 0; g < groups; g++) {
                uint16_t* k = span.k + ((size_t)g * span.allocated + slot / 16 * 16) * size + slot % 16;
                uint16_t* v = span.v + ((size_t)g * span.allocated + slot) * size;
                const float* key = line + (heads + g) * size;
                const float* value = line + (heads + groups + g) * size;
                for (int e = 0; e < size; e++) k[(size_t)e * 16] = to_bf16(key[e]);
                for (int e = 0; e < size; e++) v[e] = to_bf16(value[e]);
            }
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
    const Acts acts = prepare(context, joined, nullptr, args.rows, width, nullptr, 0, args.proj);
    matmul(context, args.proj, acts, args.out);
    finish_rows(context, args.out, args.rows, args.proj.rows, args.out_bias, args.post_norm, args.eps);
}

void norm_gated_mlp(Context& context, const MlpArgs& args) {
    const int inner = args.gate_up.rows / 2, cols = args.gate_up.cols;
    const Acts acts = prepare(context, args.x, nullptr, args.rows, cols, args.norm, args.eps, args.gate_up);
    float* wide = scratch<float>(context.wide, (size_t)args.rows * 2 * inner);
    matmul(context, args.gate_up, acts, wide);
    float* gated = scratch<float>(context.inner, (size_t)args.rows * inner + 16);
    // Long rows are cut as well: at one row the gate would otherwise run on one thread.
    const int piece = 2048, pieces = (inner + piece - 1) / piece;
    parallel(context, args.rows * pieces, [&](int task) {
        const int row = task / pieces, begin = task % pieces * piece, end = least(inner, begin + piece);
        const float* gate = wide + (size_t)row * 2 * inner;
        const float* up = gate + inner;
        float* out = gated + (size_t)row * inner;
        const F16L one = F16L::set1(1.f), half = F16L::set1(0.5f);
        for (int i = begin; i < end; i += 16) {
            alignas(64) float a[16] = {}, b[16] = {}, c[16];
            const int n = least(16, end - i);
            copy_floats(gate + i, n, a);
            copy_floats(up + i, n, b);
            const F16L g = F16L::load(a);
            F16L active;
            if (args.activation == 0) {
                active = g / (one + exp16(F16L::zero() - g));
            } else {
                const F16L inner3 = (g * g * g).fma(F16L::set1(0.044715f), g) * F16L::set1(0.7978845608f);
                active = half * g * (one + tanh16(inner3));
            }
            (active * F16L::load(b)).store(c);
            copy_floats(c, n, out + i);
        }
    });
    const Acts again = prepare(context, gated, nullptr, args.rows, inner, nullptr, 0, args.down);
    matmul(context, args.down, again, args.out);
    finish_rows(context, args.out, args.rows, args.down.rows, nullptr, args.post_norm, args.eps);
}

void head(Context& context, const HeadArgs& args) {
    const Acts acts = prepare(context, args.x, args.wanted, args.count, args.weight.cols, args.norm, args.eps, args.weight);
    matmul(context, args.weight, acts, args.logits);
    if (args.softcap > 0) {
        const size_t total = (size_t)args.count * args.weight.rows;
        for (size_t i = 0; i < total; i++) args.logits[i] = std::tanh(args.logits[i] / args.softcap) * args.softcap;
    }
}

void linear(Context& context, const Stack& stack, const float* x, int rows, float* out) {
    matmul(context, stack, prepare(context, x, nullptr, rows, stack.cols, nullptr, 0, stack), out);
}

// Rows of a tiled matrix as float32: the embedding, and the kernels' own reference.
void read_rows(const Matrix& matrix, const int64_t* rows, int count, float factor, float* out) {
    with_format(matrix.format, [&](auto kind) {
        using Kind = decltype(kind);
        const size_t bytes = Kind::tile_bytes(matrix.cols);
        for (int i = 0; i < count; i++) {
            const uint8_t* tile = matrix.data + rows[i] / 16 * bytes;
            Kind::read(tile, (int)(rows[i] % 16), matrix.cols, factor, out + (size_t)i * matrix.cols);
        }
    });
}

}  // namespace

extern const Kernels KERNELS;
const Kernels KERNELS = {norm_qkv_rope_append, attention_output, norm_gated_mlp, head, linear, read_rows};
