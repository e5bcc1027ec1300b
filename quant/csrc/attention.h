// Attention of new rows over one sequence's cache, in blocks of 256 keys with an online softmax.
// A row's blocks are computed and joined in one fixed order, however many rows or threads there are.
#pragma once

namespace {

constexpr int KEYS = 256;    // keys of a block
constexpr int MAX_HEAD = 512;
constexpr int QUERIES = 8;   // rows times heads that share the loads of a key

inline float sum16(F16L x) {
    float lanes[16];
    x.store(lanes);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

inline float max16(F16L x) {
    float lanes[16];
    x.store(lanes);
    float peak = lanes[0];
    for (int i = 1; i < 16; i++) peak = most(peak, lanes[i]);
    return peak;
}

struct Query {
    const float* q;        // (E), already scaled
    const uint8_t* mask;   // of the new rows, or null
    int first, last;       // keys [first, last) may be seen
};

struct BlockResult {  // of one query over one block; the E values of the weighted sum follow
    float peak, total;
};

// N queries over keys [start, start + KEYS) of one group: peak, total and weighted values each.
template <int N>
inline void attend_block(const Query* queries, const uint16_t* k, const uint16_t* v, int held, int size, int start,
                         float softcap, BlockResult* results, float* values, size_t value_stride) {
    alignas(64) float scores[N][KEYS];
    int last = 0;
    for (int n = 0; n < N; n++) last = most(last, queries[n].last);
    const int count = least(KEYS, last - start);
    const int tiles = (count + 15) / 16;
    for (int tile = 0; tile < tiles; tile++) {
        const uint16_t* keys = k + (size_t)(start / 16 + tile) * size * 16;
        F16L even[N], odd[N];
        for (int n = 0; n < N; n++) even[n] = odd[n] = F16L::zero();
        for (int e = 0; e < size; e += 2) {
            const F16L k0 = F16L::load_bf16(keys + (size_t)e * 16), k1 = F16L::load_bf16(keys + (size_t)(e + 1) * 16);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                even[n] = k0.fma(F16L::set1(queries[n].q[e]), even[n]);
                odd[n] = k1.fma(F16L::set1(queries[n].q[e + 1]), odd[n]);
            }
        }
        for (int n = 0; n < N; n++) (even[n] + odd[n]).store(scores[n] + 16 * tile);
    }
    for (int n = 0; n < N; n++) {
        const Query& query = queries[n];
        if (softcap > 0)
            for (int i = 0; i < 16 * tiles; i += 16)
                (tanh16(F16L::load(scores[n] + i) / F16L::set1(softcap)) * F16L::set1(softcap)).store(scores[n] + i);
        bool seen[KEYS];
        for (int i = 0; i < 16 * tiles; i++) {
            const int key = start + i;
            seen[i] = key >= query.first && key < query.last && (key < held || !query.mask || query.mask[key - held]);
            if (!seen[i]) scores[n][i] = -INFINITY;
        }
        F16L peak = F16L::set1(-INFINITY), total = F16L::zero();
        for (int i = 0; i < 16 * tiles; i += 16) peak = peak.max(F16L::load(scores[n] + i));
        const float top = max16(peak);
        results[n] = {top, 0.f};
        if (top == -INFINITY) {
            fill_floats(scores[n], 16 * tiles, 0.f);
            continue;
        }
        for (int i = 0; i < 16 * tiles; i += 16) exp16(F16L::load(scores[n] + i) - F16L::set1(top)).store(scores[n] + i);
        // exp16 stops at e^-87: what is not seen must weigh exactly nothing.
        for (int i = 0; i < 16 * tiles; i++) scores[n][i] = seen[i] ? scores[n][i] : 0.f;
        for (int i = 0; i < 16 * tiles; i += 16) total = total + F16L::load(scores[n] + i);
        results[n].total = sum16(total);
    }
    for (int e = 0; e < size; e += 16) {
        F16L even[N], odd[N];
        for (int n = 0; n < N; n++) even[n] = odd[n] = F16L::zero();
        const uint16_t* rows = v + (size_t)start * size + e;
        for (int i = 0; i < count; i += 2) {
            const F16L v0 = F16L::load_bf16(rows + (size_t)i * size);
            const F16L v1 = i + 1 < count ? F16L::load_bf16(rows + (size_t)(i + 1) * size) : F16L::zero();
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                even[n] = v0.fma(F16L::set1(scores[n][i]), even[n]);
                odd[n] = v1.fma(F16L::set1(scores[n][i + 1]), odd[n]);
            }
        }
        for (int n = 0; n < N; n++) (even[n] + odd[n]).store(values + n * value_stride + e);
    }
}

inline void attend_some(int n, const Query* queries, const uint16_t* k, const uint16_t* v, int held, int size, int start,
                        float softcap, BlockResult* results, float* values, size_t value_stride) {
    auto go = [&](auto count) {
        constexpr int N = decltype(count)::value;
        for (; n >= N; n -= N, queries += N, results += N, values += N * value_stride)
            attend_block<N>(queries, k, v, held, size, start, softcap, results, values, value_stride);
    };
    go(std::integral_constant<int, 8>());
    go(std::integral_constant<int, 4>());
    go(std::integral_constant<int, 2>());
    go(std::integral_constant<int, 1>());
}

// Adds a block to what a query has so far: rescale to the larger peak.
inline void join(BlockResult& sofar, float* out, const BlockResult& block, const float* values, int size) {
    if (block.peak == -INFINITY) return;
    const float peak = most(sofar.peak, block.peak);
    const float keep = sofar.peak == -INFINITY ? 0.f : std::exp(sofar.peak - peak), add = std::exp(block.peak - peak);
    for (int e = 0; e < size; e++) out[e] = out[e] * keep + values[e] * add;
    sofar = {peak, sofar.total * keep + block.total * add};
}

// q (rows, H, E) scaled in place; out (rows, H, E).
inline void attend(Context& context, const AttentionArgs& args, const Span& span, int first_row, float* out) {
    const int size = args.head_dim, groups = args.kv_heads, per = args.heads / groups;
    const int queries = span.rows * per;  // of one group, row by row
    const int chunks = (queries + QUERIES - 1) / QUERIES;
    const int blocks = (span.held + span.rows + KEYS - 1) / KEYS;
    const float* q = args.q + (size_t)first_row * args.heads * size;
    auto describe = [&](int group, int index) {
        const int row = index / per, head = group * per + index % per;
        Query query;
        query.q = q + ((size_t)row * args.heads + head) * size;
        query.mask = span.mask ? span.mask + (size_t)row * span.rows : nullptr;
        query.last = span.held + (span.mask ? span.rows : row + 1);
        const int64_t position = args.positions[first_row + row];
        // Held keys stand at their own index. A tree's nodes never reach out of a window together.
        query.first = args.window ? (int)most<int64_t>(0, position - args.window + 1) : 0;
        if (span.mask) query.first = least(query.first, span.held);
        return query;
    };
    // Few queries over a long cache: share out its blocks too. Results are the same either way.
    const bool split = groups * chunks < 4 * context.pool.threads() && blocks > 1;
    const int pieces = split ? blocks : 1;
    float* partial = scratch<float>(context.partial, (size_t)groups * queries * pieces * (size + 2));
    auto place = [&](int group, int index, int piece) {
        return partial + (((size_t)group * queries + index) * pieces + piece) * (size + 2);
    };
    parallel(context, groups * chunks * pieces, [&](int task) {
        const int piece = task % pieces, chunk = task / pieces % chunks, group = task / pieces / chunks;
        const int begin = chunk * QUERIES, n = least(QUERIES, queries - begin);
        const uint16_t* k = span.k + (size_t)group * span.allocated * size;
        const uint16_t* v = span.v + (size_t)group * span.allocated * size;
        Query list[QUERIES];
        int low = INT32_MAX, high = 0;
        for (int i = 0; i < n; i++) {
            list[i] = describe(group, begin + i);
            low = least(low, list[i].first);
            high = most(high, list[i].last);
        }
        BlockResult results[QUERIES];
        alignas(64) float values[QUERIES * MAX_HEAD];
        for (int i = 0; i < n; i++) {
            float* p = place(group, begin + i, piece);
            p[0] = -INFINITY;
            fill_floats(p + 1, size + 1, 0.f);
        }
        const int from = split ? piece : 0, to = split ? piece + 1 : blocks;
        for (int block = from; block < to; block++) {
            const int start = block * KEYS;
            if (start >= high || start + KEYS <= low) continue;
            attend_some(n, list, k, v, span.held, size, start, args.softcap, results, values, size);
            for (int i = 0; i < n; i++) {
                float* p = place(group, begin + i, piece);
                BlockResult sofar{p[0], p[1]};
                join(sofar, p + 2, results[i], values + (size_t)i * size, size);
                p[0] = sofar.peak;
                p[1] = sofar.total;
            }
        }
    });
    for (int group = 0; group < groups; group++)
        for (int index = 0; index < queries; index++) {
            float* first = place(group, index, 0);
            BlockResult sofar{first[0], first[1]};
            for (int piece = 1; piece < pieces; piece++) {
                const float* next = place(group, index, piece);
                join(sofar, first + 2, {next[0], next[1]}, next + 2, size);
            }
            const int row = index / per, head = group * per + index % per;
            float* to = out + ((size_t)row * args.heads + head) * size;
            const float inverse = sofar.total > 0 ? 1.f / sofar.total : 0.f;
            for (int e = 0; e < size; e++) to[e] = first[2 + e] * inverse;
        }
}

}  // namespace
