// Attention of new rows over one sequence's cache, in blocks of 256 keys with an online softmax.
// A row's blocks are computed and merged in one fixed order, for any number of rows or threads.
#pragma once
#include "attention_keys.h"

inline namespace LRT_SPACE {

constexpr int MOST_QUERIES = 96;         // queries that share a block: in prefill, or a row's with gathered keys
constexpr size_t MOST_PIECES = 1u << 23;  // floats of partial results, if blocks are divided among threads

struct BlockResult {  // one query over one block; followed by the weighted sum (E)
    float peak, total;
};

// Sums of products in float32; those of int8 keys and values, with 16-bit codes, are exact in 32 bits.
inline F16L add_products(F16L a, F16L b, F16L sum) { return a.fma(b, sum); }
inline I16 add_products(I16 a, I16 b, I16 sum) { return a.dot2(b, sum); }
inline F16L as_floats(F16L x) { return x; }
inline F16L as_floats(I16 x) { return F16L::from(x); }
inline F16L as_words(F16L x) { return x; }
inline F16L as_words(I16 x) { return F16L::bits(x); }
template <class Lanes> inline Lanes broadcast(const float* word);
template <> inline F16L broadcast(const float* word) { return F16L::set1_shared(word); }
template <> inline I16 broadcast(const float* word) { return F16L::set1_shared(word).as_bits(); }

// Keys or values that are widened to float32, or to pairs of 16-bit numbers, once for many queries.
template <class Kind> struct Widened {
    using Lanes = typename Kind::Lanes;
    static constexpr int STEP = Kind::STEP, BYTES = 4 / STEP, SIXTEEN = 64;
    static Lanes load(const uint8_t* p, size_t);
};
template <> inline F16L Widened<CachedBf16>::load(const uint8_t* p, size_t) { return F16L::load((const float*)p); }
template <> inline I16 Widened<CachedInt8>::load(const uint8_t* p, size_t) { return I16::load(p); }

thread_local Scratch widened, block_scores, block_values, query_codes;

constexpr int CODES_SCALE = KEYS - 1;  // where the scale of scores is, behind their codes

// Numbers as multiples of their scale, which is returned: NaN unless all are finite. `to` may be where they are. As many
// products with 127 as there are codes fit 32 bits.
inline float round_codes(const float* from, int count, int16_t* to) {
    const float most_code = least(INT16_MAX, INT32_MAX / 127 / most(1, count));
    F16L peak = F16L::zero(), sum = peak;
    for (int i = 0; i < count; i += 16) {
        const F16L x = F16L::load(from + i);
        peak = peak.max(x).max(F16L::zero() - x);
        sum = sum + x;
    }
    const float top = peak.highest(), nothing = sum16(sum) * 0.f;
    const F16L inverse = F16L::set1(top > LEAST_PEAK ? most_code / top : 0.f);
    for (int i = 0; i < count; i += 16) {
        alignas(64) int32_t words[16];
        int16_t halves[16];
        F16L::bits((F16L::load(from + i) * inverse).rounded()).store((float*)words);
        for (int j = 0; j < 16; j++) halves[j] = (int16_t)words[j];
        __builtin_memcpy(to + i, halves, sizeof halves);
    }
    return top / most_code + nothing;
}

// Rounds the queries of a task for int8 keys.
inline void round_queries(int n, Query* queries, int size) {
    alignas(64) float q[2 * MAX_HEAD];
    const int padded = (size + 15) / 16 * 16;
    int16_t* codes = scratch<int16_t>(query_codes, (size_t)n * padded);
    fill_floats(q + size, padded - size, 0.f);
    for (int i = 0; i < n; i++, codes += padded) {
        copy_floats(queries[i].q, size, q);
        queries[i].scale = round_codes(q, padded, codes);
        queries[i].codes = codes;
    }
}

// Calls fn(index of the first, N) until it was called for `n` queries. N, how many registers hold at once, is a constant.
template <class Fn> inline void by_queries(int n, Fn fn) {
    int i = 0;
    auto go = [&](auto count) {
        if constexpr (decltype(count)::value <= QUERIES)
            for (; i + count <= n; i += count) fn(i, count);
    };
    go(std::integral_constant<int, 8>());
    go(std::integral_constant<int, 6>());
    go(std::integral_constant<int, 4>());
    go(std::integral_constant<int, 2>());
    go(std::integral_constant<int, 1>());
}

// Calls fn(first, T) for each 16 * T of the numbers from `from` to `to`, then fn(first, 1) for each 16.
template <int T, class Fn> inline void by_sixteens(int from, int to, Fn fn) {
    for (; from + 16 * T <= to; from += 16 * T) fn(from, std::integral_constant<int, T>());
    for (; from < to; from += 16) fn(from, std::integral_constant<int, 1>());
}

// Prefetches the share of queries [i, i + some) of `n` in `lines`, which are `stride` bytes apart.
inline void prefetch_share(const uint8_t* from, size_t stride, int lines, int i, int some, int n) {
    for (int line = lines * i / n; line < lines * (i + some) / n; line++) __builtin_prefetch(from + line * stride, 0, 2);
}

// Scores of N queries with T tiles of 16 keys; with ADD, they are added to those that are there.
template <class Kind, int N, int T, bool ADD = false>
inline void score_tiles(const Query* queries, const uint8_t* keys, int size, float (*scores)[KEYS], int at) {
    using Lanes = typename Kind::Lanes;
    Lanes sums[N][T];
    const float* words[N];
    for (int n = 0; n < N; n++) {
        words[n] = Kind::STEP == 2 ? (const float*)queries[n].codes : queries[n].q;
        for (int t = 0; t < T; t++) {
            sums[n][t] = Lanes::zero();
            if constexpr (ADD) sums[n][t] = F16L::load(scores[n] + at + 16 * t);
        }
    }
    const size_t tile_bytes = (size_t)size * 16 * Kind::BYTES;
    for (int e = 0; e < size; e += Kind::STEP, keys += Kind::STEP * 16 * Kind::BYTES) {
        if (!ADD && N < QUERIES && e % (4 / Kind::BYTES) == 0)  // few queries are limited by memory: prefetch the next tiles
            for (int t = T; t < 2 * T; t++) __builtin_prefetch(keys + t * tile_bytes);
        Lanes k[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) k[t] = Kind::load(keys + t * tile_bytes, 16 * Kind::BYTES);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const Lanes q = broadcast<Lanes>(words[n] + e / Kind::STEP);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) sums[n][t] = add_products(k[t], q, sums[n][t]);
        }
    }
    for (int n = 0; n < N; n++)
        for (int t = 0; t < T; t++) as_floats(sums[n][t]).store(scores[n] + at + 16 * t);
}

// Sixteen times T output elements of N queries, from element `e` on: scores times the values of `count` keys.
template <class Kind, int N, int T>
inline void weigh_values(float (*scores)[KEYS], const Sources& from, int e, int count, int size, float* out, size_t stride) {
    using Lanes = typename Kind::Lanes;
    Lanes sums[N][T];
    for (int n = 0; n < N; n++)
        for (int t = 0; t < T; t++) sums[n][t] = Lanes::zero();
    const uint8_t* rows = from.old.v + (size_t)e * Kind::BYTES;
    const size_t next = (size_t)size * Kind::BYTES;
    for (int i = 0; i < count; i += Kind::STEP, rows += Kind::STEP * next) {
        if (i == from.split) rows = from.tail.v + ((size_t)i * size + e) * Kind::BYTES;
        if (N < QUERIES)
            for (int line = 0; line < 16 * T * Kind::BYTES; line += 64)
                __builtin_prefetch(rows + next * 24 + line);
        Lanes v[T];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) v[t] = Kind::load(rows + t * Kind::SIXTEEN, next);
#pragma GCC unroll 8
        for (int n = 0; n < N; n++) {
            const Lanes score = broadcast<Lanes>(scores[n] + i / Kind::STEP);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) sums[n][t] = add_products(v[t], score, sums[n][t]);
        }
    }
    for (int n = 0; n < N; n++) {
        const F16L scale = F16L::set1(Kind::STEP == 2 ? scores[n][CODES_SCALE] : 1.f);
        for (int t = 0; t < T; t++) (as_floats(sums[n][t]) * scale).store(out + n * stride + 16 * t);
    }
}

// The low and the high nibbles of sixteen bytes of int4 codes.
struct Codes {
    F16L low, high;
    static Codes load(const uint8_t* p) {
        const I16 both = I16::load_u8(p);
        return {F16L::from(both & I16::set1(15)), F16L::from(both.shr(4))};
    }
};

// The same for six-bit codes, whose upper bits are the two lowest bits of `low` and of `high`.
inline Codes with_uppers(const uint8_t* p, I16 low, I16 high) {
    const I16 both = I16::load_u8(p), bits = I16::set1(48);
    return {F16L::from((both & I16::set1(15)) | (low.shl(4) & bits)), F16L::from(both.shr(4) | (high.shl(4) & bits))};
}

// Scores of N queries with T tiles of int4 keys: `totals` are the sums of a query's chunks times the codes' zero.
template <int N, int T>
inline void score_int4(const Query* queries, const float (*totals)[MAX_HEAD / CHUNK], const Piece& piece, int size,
                       float (*scores)[KEYS], int at) {
    const int chunks = chunks_of(size);
    const size_t tile_bytes = (size_t)chunks * 16 * CachedInt4::KEY_BYTES;
    const uint8_t* keys = piece.k + at / 16 * tile_bytes;
    for (int n = 0; n < N; n++) fill_floats(scores[n] + at, 16 * T, 0.f);
    for (int c = 0; c < chunks; c++) {
        const bool full = size - c * CHUNK >= CHUNK;
        F16L sums[N][T];
        for (int n = 0; n < N; n++)
            for (int t = 0; t < T; t++) sums[n][t] = F16L::set1(-totals[n][c]);
        I16 lows[T], highs[T];
        for (int t = 0; t < T; t++) {
            lows[t] = I16::load(keys + 256 + t * tile_bytes);
            highs[t] = I16::load(keys + 320 + t * tile_bytes);
        }
        for (int j = 0; j < 16; j++, keys += 16) {
            if (N < QUERIES && j % 4 == 0)
                for (int t = T; t < 2 * T; t++) __builtin_prefetch(keys + t * tile_bytes);
            Codes k[T];
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) {
                k[t] = with_uppers(keys + t * tile_bytes, lows[t], highs[t]);
                lows[t] = lows[t].shr(2);
                highs[t] = highs[t].shr(2);
            }
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const float* q = queries[n].q + c * CHUNK + j;
                const F16L low = F16L::set1_shared(q);
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) sums[n][t] = k[t].low.fma(low, sums[n][t]);
                if (!full) continue;
                const F16L high = F16L::set1_shared(q + 16);
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) sums[n][t] = k[t].high.fma(high, sums[n][t]);
            }
        }
        keys += 128;  // skips the upper bits
        const uint8_t* scales = piece.k_scale + 2 * ((size_t)c * KEYS + at);
        for (int t = 0; t < T; t++) {
            const F16L scale = F16L::load_bf16(scales + 32 * t);
            for (int n = 0; n < N; n++) {
                float* score = scores[n] + at + 16 * t;
                sums[n][t].fma(scale, F16L::load(score)).store(score);
            }
        }
    }
}

// C chunks of int4 outputs of N queries, from chunk `first` on: scores times the values of `count` keys.
template <int N, int C>
inline void weigh_int4(const float (*scores)[KEYS], const Sources& from, int first, int count, int size, float* out, size_t stride) {
    alignas(64) float weights[N][C][KEYS];  // scores times the values' scales
    F16L offsets[N][C];                     // the sums of `weights`
    const int chunks = chunks_of(size);
    for (int c = 0; c < C; c++) {
        for (int n = 0; n < N; n++) offsets[n][c] = F16L::zero();
        for (int i = 0; i < count; i += 16) {
            F16L scale = F16L::load_bf16((i < from.split ? from.old : from.tail).v_scale + 2 * ((size_t)(first + c) * KEYS + i));
            if (i + 16 > count) {  // unwritten positions have arbitrary bits
                alignas(64) float lanes[16];
                scale.store(lanes);
                fill_floats(lanes + count - i, 16 - (count - i), 0.f);
                scale = F16L::load(lanes);
            }
            for (int n = 0; n < N; n++) {
                const F16L weight = F16L::load(scores[n] + i) * scale;
                weight.store(weights[n][c] + i);
                offsets[n][c] = offsets[n][c] + weight;
            }
        }
    }
    F16L low[N][C], high[N][C];
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) low[n][c] = high[n][c] = F16L::zero();
    const uint8_t* rows = from.old.v + 16 * first;
    for (int i = 0; i < count; i++, rows += 16 * chunks) {
        if (i == from.split) rows = from.tail.v + 16 * ((size_t)i * chunks + first);
        if (N < QUERIES) __builtin_prefetch(rows + 16 * chunks * 24);
#pragma GCC unroll 8
        for (int c = 0; c < C; c++) {
            const Codes v = Codes::load(rows + 16 * c);
#pragma GCC unroll 8
            for (int n = 0; n < N; n++) {
                const F16L weight = F16L::set1_shared(weights[n][c] + i);
                low[n][c] = v.low.fma(weight, low[n][c]);
                high[n][c] = v.high.fma(weight, high[n][c]);
            }
        }
    }
    for (int n = 0; n < N; n++)
        for (int c = 0; c < C; c++) {
            const F16L offset = F16L::set1(-CachedInt4::VALUE_ZERO * sum16(offsets[n][c]));
            float* to = out + n * stride + (first + c) * CHUNK;
            (low[n][c] + offset).store(to);
            if (size - (first + c) * CHUNK >= CHUNK) (high[n][c] + offset).store(to + 16);
        }
}

// Multiplies scores by the scales of int8 keys or values, and one more.
inline void scale_scores(const uint8_t* scales, int from, int to, float scale, float* scores) {
    const F16L all = F16L::set1(scale);
    for (int i = from; i < to; i += 16) (F16L::load(scores + i) * (F16L::load((const float*)scales + i) * all)).store(scores + i);
}

// Scores of `n` queries with a block's keys, whole tiles, in the same order for any number of queries or tiles at once.
template <class Kind>
inline void score_block(int n, const Query* queries, int size, const Piece& piece, int from, int to, float (*scores)[KEYS]) {
    if constexpr (std::is_same<Kind, CachedInt4>::value) {
        by_queries(n, [&](int i, auto count) {
            constexpr int N = decltype(count)::value, T = least(4, most(1, ATTENTION_SUMS / N));  // codes take as many registers again
            float totals[N][MAX_HEAD / CHUNK];
            for (int j = 0; j < N; j++)
                for (int c = 0; c < chunks_of(size); c++) {
                    const float* q = queries[i + j].q + c * CHUNK;
                    const F16L sum = size - c * CHUNK >= CHUNK ? F16L::load(q) + F16L::load(q + 16) : F16L::load(q);
                    totals[j][c] = CachedInt4::KEY_ZERO * sum16(sum);
                }
            by_sixteens<T>(from, to, [&](int at, auto tiles) {
                score_int4<N, decltype(tiles)::value>(queries + i, totals, piece, size, scores + i, at);
            });
        });
        return;
    } else if (n > QUERIES) {
        by_sixteens<most(1, ATTENTION_SUMS / QUERIES)>(from, to, [&](int at, auto tiles) {
            constexpr int T = decltype(tiles)::value;
            float* keys = scratch<float>(widened, T * 16 * (size_t)size);
            const uint8_t *now = piece.k + (size_t)at * size * Kind::BYTES, *next = now + (size_t)T * 16 * size * Kind::BYTES;
            for (int i = 0; i < T * 16 * size; i += 16 * Kind::STEP)
                as_words(Kind::load(now + i * Kind::BYTES, 16 * Kind::BYTES)).store(keys + i / Kind::STEP);
            by_queries(n, [&](int i, auto count) {
                prefetch_share(next, 64, (int)((next - now) / 64), i, count, n);
                score_tiles<Widened<Kind>, decltype(count)::value, T>(queries + i, (const uint8_t*)keys, size, scores + i, at);
            });
        });
    } else {
        by_queries(n, [&](int i, auto count) {
            // As many tiles at once as registers hold sums and the cache has ways: tiles are 4 KB apart.
            constexpr int N = decltype(count)::value, T = least(8, most(1, ATTENTION_SUMS / N));
            by_sixteens<T>(from, to, [&](int at, auto tiles) {
                const uint8_t* keys = piece.k + (size_t)at * size * Kind::BYTES;
                score_tiles<Kind, N, decltype(tiles)::value>(queries + i, keys, size, scores + i, at);
            });
        });
    }
    if constexpr (std::is_same<Kind, CachedInt8>::value)
        for (int i = 0; i < n; i++) scale_scores(piece.k_scale, from, to, queries[i].scale, scores[i]);
}

// Contribution of the keys' bias to a block's scores.
template <int N>
inline void add_bias(const Query* queries, const Cached& cached, int block, int tiles, float (*scores)[KEYS]) {
    const KeyBias& bias = cached.bias;
    alignas(64) float factors[N][MAX_HEAD];
    Query turned[N];
    for (int n = 0; n < N; n++) {
        bias.turn(queries[n].q, cached.span.format, cached.args.head_dim, block, factors[n]);
        turned[n].q = factors[n];
    }
    const int size = 2 * bias.half;
    by_sixteens<least(4, most(1, ATTENTION_SUMS / N))>(0, 16 * tiles, [&](int at, auto some) {
        const auto* turns = (const uint8_t*)(bias.near_turns + (size_t)at * size);
        score_tiles<Widened<CachedBf16>, N, decltype(some)::value, true>(turned, turns, size, scores, at);
    });
}

// Turns one query's scores of a block into weights: scales, caps, masks and exponentiates.
inline BlockResult weigh_scores(const Query& query, int start, int tiles, float softcap, float* scores) {
    uint16_t seen[KEYS / 16];
    F16L peak = F16L::set1(-INFINITY);
    for (int tile = 0; tile < tiles; tile++) {
        float* at = scores + 16 * tile;
        const int key = start + 16 * tile;
        if (softcap > 0) (tanh16(F16L::load(at) / F16L::set1(softcap)) * F16L::set1(softcap)).store(at);
        seen[tile] = 0xFFFF;
        if (!query.sees_all(key, key + 16)) {
            seen[tile] = 0;
            for (int i = 0; i < 16; i++) {
                const bool visible = query.sees(key + i);
                seen[tile] |= (uint16_t)(visible << i);
                if (!visible) at[i] = -INFINITY;
            }
        }
        // Not the tiles that only other queries see: their -INFINITY would replace a NaN.
        if (seen[tile]) peak = peak.max(F16L::load(at));
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
            // exp16 stops at e^-87: masked keys must have a weight of exactly 0.
            weights.store(at);
            for (int i = 0; i < 16; i++) at[i] = seen[tile] >> i & 1 ? at[i] : 0.f;
            weights = F16L::load(at);
        }
        total = total + weights;
        weights.store(at);
    }
    return {top, sum16(total)};
}

inline int last_of(int n, const Query* queries) {
    int last = 0;
    for (int i = 0; i < n; i++) last = most(last, queries[i].last);
    return last;
}

// Elements of values from `first` on, weighted by the scores of `n` queries and summed over the keys from `start` on.
template <class Kind>
inline void weigh_block(int n, const Query* queries, const Sources& from, int start, int first, int size, float (*scores)[KEYS],
                        float* out, size_t stride) {
    auto keys_of = [&](int i, int count) { return least(KEYS, last_of(count, queries + i) - start); };
    if constexpr (std::is_same<Kind, CachedInt4>::value) {
        by_queries(n, [&](int i, auto count) {
            constexpr int N = decltype(count)::value, C = N <= 4 ? 2 : 1;
            const int keys = keys_of(i, N), chunks = chunks_of(size);
            int chunk = 0;
            for (; chunk + C <= chunks; chunk += C) weigh_int4<N, C>(scores + i, from, chunk, keys, size, out + i * stride, stride);
            for (; chunk < chunks; chunk++) weigh_int4<N, 1>(scores + i, from, chunk, keys, size, out + i * stride, stride);
        });
    } else if (n > QUERIES) {
        by_sixteens<most(1, ATTENTION_SUMS / QUERIES)>(first, size, [&](int e, auto sixteens) {
            constexpr int T = decltype(sixteens)::value;
            float* values = scratch<float>(widened, KEYS * 16 * T);
            const int keys = keys_of(0, n);
            for (int i = 0; i < keys; i += Kind::STEP)
                for (int t = 0; t < T; t++) {
                    const uint8_t* v = (i < from.split ? from.old : from.tail).v + ((size_t)i * size + e + 16 * t) * Kind::BYTES;
                    as_words(Kind::load(v, (size_t)size * Kind::BYTES)).store(values + (i / Kind::STEP * T + t) * 16);
                }
            Sources wide = from;
            wide.old.v = (uint8_t*)values;
            wide.split = KEYS;
            const uint8_t* next = from.old.v + (size_t)(e + 16 * T) * Kind::BYTES;
            by_queries(n, [&](int i, auto count) {
                constexpr int N = decltype(count)::value;
                prefetch_share(next, (size_t)size * Kind::BYTES, keys, i, N, n);
                weigh_values<Widened<Kind>, N, T>(scores + i, wide, 0, keys_of(i, N), 16 * T, out + i * stride + e - first, stride);
            });
        });
    } else {
        by_queries(n, [&](int i, auto count) {
            constexpr int N = decltype(count)::value, T = least(8, most(1, ATTENTION_SUMS / N));
            const int keys = keys_of(i, N);
            by_sixteens<T>(first, size, [&](int e, auto sixteens) {
                weigh_values<Kind, N, decltype(sixteens)::value>(scores + i, from, e, keys, size, out + i * stride + e - first, stride);
            });
        });
    }
}

// Queries over one block of a group: peak, total and weighted sum of values, without their first elements, for each.
template <class Kind>
inline void attend_block(int n, const Query* queries, const Cached& cached, const Sources& from, int block, int first,
                         BlockResult* results, float* values, size_t stride) {
    auto scores = (float(*)[KEYS])scratch<float>(block_scores, (size_t)n * KEYS);
    const int start = block * KEYS, size = cached.args.head_dim, keys = (least(KEYS, last_of(n, queries) - start) + 15) / 16 * 16;
    const int split = least(keys, from.split);
    score_block<Kind>(n, queries, size, from.old, 0, split, scores);
    if (split < keys) score_block<Kind>(n, queries, size, from.tail, split, keys, scores);
    if (cached.bias.bias)
        by_queries(n, [&](int i, auto count) { add_bias<decltype(count)::value>(queries + i, cached, block, keys / 16, scores + i); });
    for (int i = 0; i < n; i++) {
        results[i] = weigh_scores(queries[i], start, keys / 16, cached.args.softcap, scores[i]);
        if constexpr (std::is_same<Kind, CachedInt8>::value) {
            scale_scores(from.old.v_scale, 0, split, 1.f, scores[i]);
            scale_scores(from.tail.v_scale, split, keys, 1.f, scores[i]);
            scores[i][CODES_SCALE] = round_codes(scores[i], keys, (int16_t*)scores[i]);
        }
    }
    weigh_block<Kind>(n, queries, from, start, first, size, scores, values, stride);
}

// Results of queries so far, each in `pieces` of some blocks: a BlockResult and the weighted sum (size).
struct Partials {
    int pieces, size;
    float* first;

    Partials(Scratch& memory, size_t queries, int pieces, int size)
        : pieces(pieces), size(size), first(scratch<float>(memory, queries * pieces * (size + 2))) {}
    BlockResult& result(size_t query, int piece) const { return *(BlockResult*)(first + (query * pieces + piece) * (size + 2)); }
    float* sum(size_t query, int piece) const { return (float*)(&result(query, piece) + 1); }
    // Merges a block into a piece, rescaled to the larger peak.
    void join(size_t query, int piece, const BlockResult& block, const float* values) const {
        if (block.peak == -INFINITY) return;
        BlockResult& sofar = result(query, piece);
        float* out = sum(query, piece);
        const float peak = most(sofar.peak, block.peak);
        const float keep = sofar.peak == -INFINITY ? 0.f : exp1(sofar.peak - peak), add = exp1(block.peak - peak);
        for (int e = 0; e < size; e++) out[e] = out[e] * keep + values[e] * add;
        sofar = {peak, sofar.total * keep + block.total * add};
    }
    // Merges a query's pieces into its first.
    void merge(size_t query) const {
        for (int piece = 1; piece < pieces; piece++) join(query, 0, result(query, piece), sum(query, piece));
    }
    // A piece of `n` queries, the first of them number `query`, over some of `blocks`. `attend` computes those of a block
    // that see the same keys: some of `list`, from a number on.
    template <class Attend>
    void run(size_t query, int piece, const Query* list, int n, int blocks, const Tree& tree, Attend attend) const {
        int low = INT32_MAX, high = 0;
        for (int i = 0; i < n; i++) {
            low = least(low, list[i].first);
            high = most(high, list[i].last);
            result(query + i, piece) = {-INFINITY, 0.f};
            fill_floats(sum(query + i, piece), size, 0.f);
        }
        BlockResult results[MOST_QUERIES];
        float* values = scratch<float>(block_values, (size_t)n * size);
        const bool split = pieces > 1;
        for (int block = split ? piece : 0; block < (split ? piece + 1 : blocks); block++) {
            const int start = block * KEYS;
            if (start >= high || start + KEYS <= low) continue;
            for (int i = 0, count; i < n; i += count) {
                // In a tree's blocks, each row has its own keys.
                for (count = 1; i + count < n && (!tree.scattered(block) || list[i + count].row == list[i].row);) count++;
                attend(block, i, count, results + i, values + (size_t)i * size);
            }
            for (int i = 0; i < n; i++) join(query + i, piece, results[i], values + (size_t)i * size);
        }
    }
};

// Attention of one sequence's rows, in pieces: some queries of a group over all blocks or one. q (rows, H, E) scaled in
// place.
struct Attending {
    const AttentionArgs& args;
    const Span& span;
    const int first_row, size, groups, per, queries;  // queries of one group, row by row
    int together, chunks, blocks;                     // queries of a piece
    Tree tree;
    const float* q;
    Partials partials;

    Attending(Context& context, const AttentionArgs& args, const Span& span, int first_row)
        : args(args), span(span), first_row(first_row), size(args.head_dim), groups(args.kv_heads), per(args.heads / groups),
          queries(span.rows * per),
          tree(args.chosen ? Tree(span, args.chosen + first_row * (1 + (size_t)args.most_chosen), args.most_chosen)
                           : Tree(context, span, args.window)),
          q(args.q + (size_t)first_row * args.heads * size), partials(divide(context)) {}
    Partials divide(Context& context) {
        const int threads = context.pool.threads();
        // Keys are gathered once for all queries of a row. In prefill, many queries share blocks in the CPU's cache.
        const int fair = groups * queries / (8 * threads) / QUERIES * QUERIES;
        together = args.chosen && per <= MOST_QUERIES ? per : most(QUERIES, least(MOST_QUERIES, fair));
        chunks = (queries + together - 1) / together;
        blocks = (tree.longest() + KEYS - 1) / KEYS;
        // Few queries over a long cache: divide its blocks among threads too. Results are the same either way.
        const bool split = groups * chunks < 4 * threads && blocks > 1 &&
                           (size_t)groups * queries * blocks * (size + 2) <= MOST_PIECES;
        return Partials(context.partial, (size_t)groups * queries, split ? blocks : 1, size);
    }
    int tasks_of_group() const { return chunks * partials.pieces; }
    Query describe(int group, int index) const {
        const int row = index / per, head = group * per + index % per;
        Query query;
        query.q = q + ((size_t)row * args.heads + head) * size;
        query.row = row;
        query.last = tree.last(row);
        const int end = query.last - tree.ahead(row);
        query.first = !args.window ? 0 : args.chunked ? (end - 1) / args.window * args.window : most(0, end - args.window);
        return query;
    }
    void run(int task) const {
        const int pieces = partials.pieces, piece = task % pieces, chunk = task / pieces % chunks, group = task / pieces / chunks;
        const int begin = chunk * together, n = least(together, queries - begin);
        const size_t first = (size_t)group * queries + begin;
        const Cached cached(span, args, group, first_row);
        Query list[MOST_QUERIES];
        for (int i = 0; i < n; i++) list[i] = describe(group, begin + i);
        if (span.format == KV_INT8) round_queries(n, list, size);
        partials.run(first, piece, list, n, blocks, tree, [&](int block, int i, int count, BlockResult* results, float* to) {
            const Sources from = tree.sources(cached, block, list[i].row);
            if (span.format == KV_BF16) attend_block<CachedBf16>(count, list + i, cached, from, block, 0, results, to, size);
            else if (span.format == KV_INT8) attend_block<CachedInt8>(count, list + i, cached, from, block, 0, results, to, size);
            else attend_block<CachedInt4>(count, list + i, cached, from, block, 0, results, to, size);
        });
        for (int i = 0; i < n && pieces == 1; i++) rotate_head(span.format, size, partials.sum(first + i, 0));
    }
    // Merges the pieces of a query: out (rows, H, E).
    void merge(int group, int index, float* out) const {
        const size_t query = (size_t)group * queries + index;
        partials.merge(query);
        float *sum = partials.sum(query, 0), total = partials.result(query, 0).total;
        if (partials.pieces > 1) rotate_head(span.format, size, sum);
        const int row = index / per, head = group * per + index % per;
        float* to = out + ((size_t)row * args.heads + head) * size;
        if (args.sinks) {
            // A sink is a logit without a value: it only adds to the sum.
            const float before = partials.result(query, 0).peak, peak = most(before, args.sinks[head]), keep = exp1(before - peak);
            for (int e = 0; e < size; e++) sum[e] *= keep;
            total = total * keep + exp1(args.sinks[head] - peak);
        }
        const float inverse = total > 0 ? 1.f / total : 0.f;
        for (int e = 0; e < size; e++) to[e] = sum[e] * inverse;
    }
};

inline void attend(Context& context, const AttentionArgs& args, const Span& span, int first_row, float* out) {
    const Attending attending(context, args, span, first_row);
    parallel(context, attending.groups * attending.tasks_of_group(), [&](int task) { attending.run(task); });
    const int queries = attending.queries;
    each_row<64>(context, attending.groups * queries, [&](int at) { attending.merge(at / queries, at % queries, out); });
}

}  // namespace
