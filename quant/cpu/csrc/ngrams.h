// Hashed n-grams in a layer of several residual streams: see quant/ops/streams.py for the mathematics. The convolution and
// the rows cached between passes are those of recurrent layers.
#pragma once
#include "recurrent.h"

inline namespace LRT_SPACE {

constexpr float LEAST_PRODUCT = 1e-6f;  // lower bound of the product of a key with a stream

// One row: `line` (S * D) has its keys and receives normed values; `gated` (S * D) receives the values themselves.
inline void gate_values(const NgramArgs& args, const float* stream, const float* value, float* line, float* gated, float* normed) {
    const int size = args.value.rows;
    for (int s = 0; s < args.count; s++) {
        const int at = s * size;
        rms_norm(line + at, args.key_norm + at, args.eps, size, line + at);
        rms_norm(stream + at, args.stream_norm + at, args.eps, size, normed);
        const float product = dot(line + at, normed, size) / std::sqrt((float)size);
        const float root = std::copysign(std::sqrt(most(LEAST_PRODUCT, std::fabs(product))), product);
        const float gate = sigmoid1(root);
        for (int i = 0; i < size; i++) gated[at + i] = gate * value[i];
        rms_norm(gated + at, args.value_norm + at, args.eps, size, line + at);
    }
}

void add_ngrams(Context& context, const NgramArgs& args) {
    const int size = args.value.rows, all = args.count * size;
    RecurrentArgs memory = {};
    memory.kind = NGRAM;
    memory.conv = args.conv;
    memory.spans = args.spans;
    memory.span_count = args.span_count;
    memory.heads = memory.key_heads = memory.key_size = memory.value_size = 1;
    memory.taps = args.taps;
    memory.dilation = args.dilation;
    memory.width = all;
    const RecurrentShape shape(memory);
    float* wide = scratch<float>(context.wide, (size_t)args.rows * all);
    linear(context, args.key, args.ngrams, args.rows, wide);
    float* joined = scratch<float>(context.joined, (size_t)args.rows * (all + 2 * size));
    float *value = joined + (size_t)args.rows * all, *normed = value + (size_t)args.rows * size;
    linear(context, args.value, args.ngrams, args.rows, value);
    parallel(context, args.rows, [&](int row) {
        const size_t at = (size_t)row * all, part = (size_t)row * size;
        gate_values(args, args.streams + at, value + part, wide + at, joined + at, normed + part);
    });
    const Sequences sequences(context, memory, shape, wide, joined);
    const float* token = args.tokens;
    for (int s = 0; s < args.span_count; s++) {
        const Rows& rows = sequences.list[s];
        for (int i = 0; i < rows.count; i++) {
            if (i < rows.waiting) rows.take_kept(i, shape);
            else rows.factors[i] = *token++;
        }
    }
    keep_and_convolve(context, memory, shape, sequences.list);
    parallel(context, args.rows, [&](int row) {
        const size_t at = (size_t)row * all;
        for (int i = 0; i < all; i++) args.streams[at + i] += joined[at + i] + wide[at + i];
    });
}

}  // namespace
