// Attention of new rows over one sequence's cache, in blocks of 256 keys with an online softmax.
// A row's blocks are computed and joined in one fixed order, however many rows or threads there are.
#pragma once

namespace {

constexpr int KEYS = 256;    // keys of a block
constexpr int MAX_HEAD = 512;

// Keys and values as they are cached: sixteen numbers at once, and what a token's numbers are times.
struct CachedBf16 {
    static constexpr int BYTES = 2;
    static F16L load(const uint8_t* p) { return F16L::load_bf16(p); }
};
struct CachedInt8 {
    static constexpr int BYTES = 1;
    static F16L load(const uint8_t* p) { return F16L::from(I16::load_i8(p)); }
};

inline float sum16(F16L x) {
    float lanes[16];
    x.store(lanes);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
    return lanes[0];
}

struct Query {
    const float* q;        // (E), already scaled
    const uint8_t* mask;   // of the new rows, or null
    int first, last;       // keys [first, last) may be seen

    bool sees(int key, int held) const { return key >= first && key < last && (key < held || !mask || mask[key - held]); }
    bool sees_all(int from, int to, int held) const { return from >= first && to <= last && (!mask || to <= held); }
};

// One key/value group of a span: k (allocated / 16, E, 16), v (allocated, E), scales or null.
struct Cached {
    const uint8_t *k, *v;
    const float *k_scale, *v_scale;
    int held, size;
};

struct BlockResult {  // of one query over one block; the E values of the weighted sum follow
    float peak, total;
};

// Scores of N queries with T tiles of 16 keys.
template <class Kind, int N, int T>
inline void score_tiles(const Query* queries, const uint8_t* keys, int size, float (*scores)[KEYS], int at) {
    F16L sums[N][T];
    for (int n = 0; n < N; n++)
        for (int t = 0; t < T; t++) sums[n][t] = F16L::zero();
    const size_t tile_bytes = (size_t)size * 16 * Kind::BYTES;
    for (int e = 0; e < size; e++, keys += 16 * Kind::BYTES) {
        if (N < QUERIES && e % (4 / Kind::BYTES) == 0)  // few queries wait for memory: the next tiles' line
            for (int t = T; t < 2 * T; t++) __builtin_prefetch(keys + t * tile_bytes);
        F16L k[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) k[t] = Kind::load(keys + t * tile_bytes);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const F16L q = F16L::set1_shared(queries[n].q + e);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) sums[n][t] = k[t].fma(q, sums[n][t]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int t = 0; t < T; t++) sums[n][t].store(scores[n] + at + 16 * t);
}

// Sixteen times T values of N queries: their scores times the values of `count` keys.
template <class Kind, int N, int T>
inline void weigh_values(float (*scores)[KEYS], const uint8_t* rows, int count, int size, float* out, size_t stride) {
    F16L sums[N][T];
    for (int n = 0; n < N; n++)
        for (int t = 0; t < T; t++) sums[n][t] = F16L::zero();
    for (int i = 0; i < count; i++, rows += (size_t)size * Kind::BYTES) {
        if (N < QUERIES)
            for (int line = 0; line < 16 * T * Kind::BYTES; line += 64)
                __builtin_prefetch(rows + (size_t)size * Kind::BYTES * 24 + line);
        F16L v[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) v[t] = Kind::load(rows + 16 * t * Kind::BYTES);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const F16L score = F16L::set1_shared(scores[n] + i);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) sums[n][t] = v[t].fma(score, sums[n][t]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int t = 0; t < T; t++) sums[n][t].store(out + n * stride + 16 * t);
}

// One query's scores of a block to weights: scaled, capped, hidden where not seen, exponentiated.
inline BlockResult weigh_scores(const Query& query, const Cached& cached, int start, int tiles, float softcap, float* scores) {
    uint16_t seen[KEYS / 16];
    F16L peak = F16L::set1(-INFINITY);
    for (int tile = 0; tile < tiles; tile++) {
        float* at = scores + 16 * tile;
        const int key = start + 16 * tile;
        F16L s = F16L::load(at);
        if (cached.k_scale) s = s * F16L::load(cached.k_scale + key);
        if (softcap > 0) s = tanh16(s / F16L::set1(softcap)) * F16L::set1(softcap);
        s.store(at);
        seen[tile] = 0xFFFF;
        if (!query.sees_all(key, key + 16, cached.held)) {
            seen[tile] = 0;
            for (int i = 0; i < 16; i++) {
                const bool visible = query.sees(key + i, cached.held);
                seen[tile] |= (uint16_t)(visible << i);
                if (!visible) at[i] = -INFINITY;
            }
        }
        peak = peak.max(F16L::load(at));
    }
    const float top = peak.highest();
    if (top == -INFINITY) {
        fill_floats(scores, 16 * tiles, 0.f);
        return {top, 0.f};
    }
    F16L total = F16L::zero();
    for (int tile = 0; tile < tiles; tile++) {
        float* at = scores + 16 * tile;
        F16L weights = exp16(F16L::load(at) - F16L::set1(top));
        if (seen[tile] != 0xFFFF) {
            // exp16 stops at e^-87: what is not seen must weigh exactly nothing.
            weights.store(at);
            for (int i = 0; i < 16; i++) at[i] = seen[tile] >> i & 1 ? at[i] : 0.f;
            weights = F16L::load(at);
        }
        total = total + weights;
        if (cached.v_scale) weights = weights * F16L::load(cached.v_scale + start + 16 * tile);
        weights.store(at);
    }
    return {top, sum16(total)};
}

// N queries over keys [start, start + KEYS) of one group: peak, total and weighted values each.
template <class Kind, int N>
inline void attend_block(const Query* queries, const Cached& cached, int start, float softcap, BlockResult* results,
                         float* values, size_t stride) {
    alignas(64) float scores[N][KEYS];
    int last = 0;
    for (int n = 0; n < N; n++) last = most(last, queries[n].last);
    const int count = least(KEYS, last - start), tiles = (count + 15) / 16, size = cached.size;
    // As many tiles at once as there are registers for their sums, and ways in a cache set: tiles lie
    // 4 KB apart.
    constexpr int T = least(8, most(1, ATTENTION_SUMS / N));
    const uint8_t* keys = cached.k + (size_t)start * size * Kind::BYTES;
    int tile = 0;
    for (; tile + T <= tiles; tile += T)
        score_tiles<Kind, N, T>(queries, keys + (size_t)tile * size * 16 * Kind::BYTES, size, scores, 16 * tile);
    for (; tile < tiles; tile++)
        score_tiles<Kind, N, 1>(queries, keys + (size_t)tile * size * 16 * Kind::BYTES, size, scores, 16 * tile);
    for (int n = 0; n < N; n++) results[n] = weigh_scores(queries[n], cached, start, tiles, softcap, scores[n]);
    const uint8_t* rows = cached.v + (size_t)start * size * Kind::BYTES;
    int e = 0;
    for (; e + 16 * T <= size; e += 16 * T)
        weigh_values<Kind, N, T>(scores, rows + (size_t)e * Kind::BYTES, count, size, values + e, stride);
    for (; e < size; e += 16)
        weigh_values<Kind, N, 1>(scores, rows + (size_t)e * Kind::BYTES, count, size, values + e, stride);
}

template <class Kind>
inline void attend_some(int n, const Query* queries, const Cached& cached, int start, float softcap, BlockResult* results,
                        float* values, size_t stride) {
    auto go = [&](auto count) {
        constexpr int N = decltype(count)::value;
        if constexpr (N <= QUERIES)
            for (; n >= N; n -= N, queries += N, results += N, values += N * stride)
                attend_block<Kind, N>(queries, cached, start, softcap, results, values, stride);
    };
    go(std::integral_constant<int, 8>());
    go(std::integral_constant<int, 6>());
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
        const bool small = span.k_scale != nullptr;
        const size_t before = (size_t)group * span.allocated, bytes = before * size * (small ? 1 : 2);
        const Cached cached = {span.k + bytes,
                               span.v + bytes,
                               small ? span.k_scale + before : nullptr,
                               small ? span.v_scale + before : nullptr,
                               span.held,
                               size};
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
            if (small) attend_some<CachedInt8>(n, list, cached, start, args.softcap, results, values, size);
            else attend_some<CachedBf16>(n, list, cached, start, args.softcap, results, values, size);
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
