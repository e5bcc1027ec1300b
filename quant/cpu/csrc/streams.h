// Per-layer inputs and several residual streams: see quant/ops/streams.py for the mathematics.
#pragma once

inline namespace LRT_SPACE {

// inputs (R, L * width) += each layer's part of a row's projections, normed.
void project_inputs(Context& context, const Stack& stack, const float* x, int rows, int width, const float* norm, float eps,
                    float* inputs) {
    const int cols = stack.rows, layers = cols / width;
    float* wide = scratch<float>(context.wide, (size_t)rows * cols);
    matmul(context, stack, prepare(context, context.rows, x, nullptr, rows, nullptr, 0, stack), wide);
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
    matmul(context, args.gate, prepare(context, context.rows, args.x, nullptr, args.rows, nullptr, 0, args.gate), gates);
    float* gated = scratch<float>(context.gated, (size_t)args.rows * width);
    const Gate gate = {args.activation, INFINITY};
    parallel(context, (args.rows + 15) / 16, [&](int task) {
        for (int row = task * 16; row < least(args.rows, task * 16 + 16); row++)
            gate_row(gates + (size_t)row * width, args.inputs + (size_t)row * args.stride + args.first, 0, width, gate, nullptr, nullptr,
                     gated + (size_t)row * width);
    });
    matmul(context, args.proj, prepare(context, context.inner, gated, nullptr, args.rows, nullptr, 0, args.proj), args.out);
    finish_rows(context, args.out, args.rows, args.proj.rows, nullptr, args.post_norm, args.eps);
}

// out (R, D) = n + norm(right(left(n))), where n = norm(x)
void low_rank(Context& context, const Stack& left, const Stack& right, const float* x, int rows, const float* norm,
              const float* post_norm, float eps, float* out) {
    const int cols = left.cols, rank = left.rows;
    float* normed = scratch<float>(context.joined, (size_t)rows * cols);
    parallel(context, (rows + 15) / 16, [&](int task) {
        for (int row = task * 16; row < least(rows, task * 16 + 16); row++)
            rms_norm(x + (size_t)row * cols, norm, eps, cols, normed + (size_t)row * cols);
    });
    float* narrow = scratch<float>(context.wide, (size_t)rows * rank);
    matmul(context, left, prepare(context, context.rows, normed, nullptr, rows, nullptr, 0, left), narrow);
    matmul(context, right, prepare(context, context.inner, narrow, nullptr, rows, nullptr, 0, right), out);
    finish_rows(context, out, rows, cols, nullptr, post_norm, eps);
    parallel(context, (rows + 15) / 16, [&](int task) {
        for (size_t i = (size_t)task * 16 * cols; i < (size_t)least(rows, task * 16 + 16) * cols; i++) out[i] += normed[i];
    });
}

// The factor that scales y (D) to the magnitude of x.
inline float same_magnitude(const float* x, const float* y, int size) {
    const float wanted = std::sqrt(square_sum(x, size) / (float)size);
    return wanted / std::sqrt(most(square_sum(y, size) / (float)size, 1e-5f));
}

// out (R, S * D): x and its S - 1 projections, scaled to the magnitude of x.
void split_streams(Context& context, const Stack& stack, const float* x, int rows, float* out) {
    const int size = stack.cols, others = stack.rows / size;
    float* wide = scratch<float>(context.wide, (size_t)rows * stack.rows);
    matmul(context, stack, prepare(context, context.rows, x, nullptr, rows, nullptr, 0, stack), wide);
    parallel(context, rows, [&](int row) {
        const float* first = x + (size_t)row * size;
        float* to = out + (size_t)row * (others + 1) * size;
        copy_floats(first, size, to);
        for (int s = 0; s < others; s++) {
            const float* from = wide + ((size_t)row * others + s) * size;
            const float factor = same_magnitude(first, from, size);
            to += size;
            for (int i = 0; i < size; i++) to[i] = from[i] * factor;
        }
    });
}

// The mean of the first stream and the others' projections, scaled to its magnitude.
void join_streams(Context& context, const Stack& stack, const float* streams, int rows, float* out) {
    const int size = stack.cols, others = stack.count, all = (others + 1) * size;
    float* products = scratch<float>(context.wide, (size_t)rows * size);
    float* from = scratch<float>(context.joined, (size_t)rows * size);
    for (int s = 0; s <= others; s++) {
        const bool last = s == others;
        if (s > 0) {
            for (int row = 0; row < rows; row++) copy_floats(streams + (size_t)row * all + s * size, size, from + (size_t)row * size);
            const Stack one = {stack.parts + s - 1, 1, size, size, stack.hadamard};
            matmul(context, one, prepare(context, context.rows, from, nullptr, rows, nullptr, 0, one), products);
        }
        parallel(context, rows, [&](int row) {
            const float* first = streams + (size_t)row * all;
            float* to = out + (size_t)row * size;
            if (s == 0) {
                copy_floats(first, size, to);
            } else {
                const float* product = products + (size_t)row * size;
                const float factor = same_magnitude(first, product, size);
                for (int i = 0; i < size; i++) to[i] += product[i] * factor;
            }
            if (last)
                for (int i = 0; i < size; i++) to[i] /= (float)(others + 1);
        });
    }
}

// (rows, S): the router's output, from which coefficients are computed.
inline float* stream_modes(Context& context, const StreamArgs& args, const float* x) {
    float* modes = scratch<float>(context.gated, (size_t)args.rows * args.count);
    router_products(context, args.router, x, args.rows, args.norm, args.eps, modes);
    const int size = args.rows * args.count;
    for (int i = 0; i < size; i += 16) store_some(tanh16(load_some(modes + i, least(16, size - i))), least(16, size - i), modes + i);
    return modes;
}

// out (R, S * D): each stream plus all streams times its coefficients; `active` is the active one of the results.
void predict_streams(Context& context, const StreamArgs& args) {
    const int size = args.router.cols, count = args.count, all = count * size;
    for (int row = 0; row < args.rows; row++)
        copy_floats(args.streams + (size_t)row * all + args.which * size, size, args.active + (size_t)row * size);
    const float* modes = stream_modes(context, args, args.active);
    parallel(context, args.rows, [&](int row) {
        const float *from = args.streams + (size_t)row * all, *mode = modes + (size_t)row * count;
        float* to = args.out + (size_t)row * all;
        for (int s = 0; s < count; s++) {
            copy_floats(from + s * size, size, to + s * size);
            for (int t = 0; t < count; t++) {
                float factor = 0;
                for (int p = 0; p < count; p++) factor += args.coefficients[(s * count + t) * count + p] * mode[p];
                for (int i = 0; i < size; i++) to[s * size + i] += from[t * size + i] * factor;
            }
        }
        copy_floats(to + args.which * size, size, args.active + (size_t)row * size);
    });
}

// out (R, S * D): each prediction plus the active one's error times the stream's coefficient.
void correct_streams(Context& context, const StreamArgs& args) {
    const int size = args.router.cols, count = args.count, all = count * size;
    const float* modes = stream_modes(context, args, args.activated);
    parallel(context, args.rows, [&](int row) {
        const float *from = args.streams + (size_t)row * all, *mode = modes + (size_t)row * count;
        const float *guess = from + args.which * size, *truth = args.activated + (size_t)row * size;
        float *to = args.out + (size_t)row * all, *active = args.active + (size_t)row * size;
        for (int s = 0; s < count; s++) {
            float factor = 1;
            for (int p = 0; p < count; p++) factor += args.coefficients[s * count + p] * mode[p];
            for (int i = 0; i < size; i++) to[s * size + i] = from[s * size + i] + (truth[i] - guess[i]) * factor;
        }
        for (int i = 0; i < size; i++) active[i] = to[args.which * size + i] * (args.scale ? args.scale[i] : 1.f);
    });
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
        matmul(context, args.share, prepare(context, context.rows, normed, nullptr, args.rows, nullptr, 0, args.share), args.shares);
        for (int i = 0; i < args.rows * count; i++) args.shares[i] = 2.f * sigmoid1(args.shares[i] / (float)count);
    }
    float* narrow = scratch<float>(context.gated, (size_t)args.rows * rank);
    matmul(context, args.down, prepare(context, context.rows, normed, nullptr, args.rows, nullptr, 0, args.down), narrow);
    parallel(context, args.rows, [&](int row) {
        float* line = narrow + (size_t)row * rank;
        for (int i = 0; i < rank; i += 16) {
            const int n = least(16, rank - i);
            store_some(activate(load_some(line + i, n) * part, SILU), n, line + i);
        }
    });
    float* gates = scratch<float>(context.wide, (size_t)args.rows * all);
    matmul(context, args.up, prepare(context, context.inner, narrow, nullptr, args.rows, nullptr, 0, args.up), gates);
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
