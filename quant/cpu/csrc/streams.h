// Per-layer inputs and several residual streams: see quant/ops/streams.py for the mathematics.
#pragma once

inline namespace LRT_SPACE {

// inputs (R, L * width) += each layer's part of a row's projections, normed.
void project_inputs(Context& context, const Stack& stack, const float* x, int rows, int width, const float* norm, float eps,
                    float* inputs) {
    const int cols = stack.rows, layers = cols / width;
    float* wide = scratch<float>(context.wide, (size_t)rows * cols);
    linear(context, stack, x, rows, wide);
    parallel(context, rows, [&](int row) {
        for (int layer = 0; layer < layers; layer++) {
            const size_t at = (size_t)row * cols + (size_t)layer * width;
            rms_norm(wide + at, norm, eps, width, wide + at);
            for (int i = 0; i < width; i++) inputs[at + i] += wide[at + i];
        }
    });
}

// out (R, D) = norm(proj(activation(gate(x)) * inputs))
void gate_inputs(Context& context, const InputArgs& args) {
    const int width = args.gate.rows;
    float* gates = scratch<float>(context.wide, (size_t)args.rows * width);
    linear(context, args.gate, args.x, args.rows, gates);
    float* gated = scratch<float>(context.gated, (size_t)args.rows * width);
    const Gate gate = {args.activation, INFINITY};
    each_row(context, args.rows, [&](int row) {
        const float* inputs = args.inputs + (size_t)row * args.stride + args.first;
        gate_row(gates + (size_t)row * width, inputs, 0, width, gate, nullptr, nullptr, gated + (size_t)row * width);
    });
    linear(context, args.proj, gated, args.rows, args.out);
    finish_rows(context, args.out, args.rows, args.proj.rows, nullptr, args.post_norm, args.eps);
}

// out (R, D): the mean over streams of gate times normed stream; shares (R, S) are the streams' parts of a layer's output.
void read_streams(Context& context, const ConnectionArgs& args) {
    const int all = args.down.cols, count = args.count, size = all / count, rank = args.down.rows;
    const F16L part = F16L::set1(1.f / (float)count);
    float* normed = scratch<float>(context.joined, (size_t)args.rows * all);
    parallel(context, args.rows, [&](int row) {
        for (int s = 0; s < count; s++) {
            const size_t at = (size_t)row * all + (size_t)s * size;
            rms_norm(args.streams + at, args.norm + (size_t)s * size, args.eps, size, normed + at);
        }
    });
    if (args.share.rows) {
        linear(context, args.share, normed, args.rows, args.shares);
        for (int i = 0; i < args.rows * count; i++) args.shares[i] = 2.f * sigmoid1(args.shares[i] / (float)count);
    }
    float* narrow = scratch<float>(context.gated, (size_t)args.rows * rank);
    linear(context, args.down, normed, args.rows, narrow);
    parallel(context, args.rows, [&](int row) {
        float* line = narrow + (size_t)row * rank;
        for (int i = 0; i < rank; i += 16) {
            const int n = least(16, rank - i);
            store_some(activate(load_some(line + i, n) * part, SILU), n, line + i);
        }
    });
    float* gates = scratch<float>(context.wide, (size_t)args.rows * all);
    linear(context, args.up, narrow, args.rows, gates);
    parallel(context, args.rows, [&](int row) {
        const float *gate = gates + (size_t)row * all, *from = normed + (size_t)row * all;
        for (int i = 0; i < size; i += 16) {
            const int n = least(16, size - i);
            F16L sum = F16L::zero();
            for (int at = i; at < all; at += size) sum = sum + sigmoid16(load_some(gate + at, n)) * load_some(from + at, n);
            store_some(sum * part, n, args.out + (size_t)row * size + i);
        }
    });
}

}  // namespace
