// Packed matrix products: int8 activations per group of 32 against tiles of 16 weight rows.
// Every output is accumulated over the columns in one fixed order, whatever the number of rows,
// tiles or threads: a row's result is bitwise the same in any batch.
#pragma once
#include <cmath>
#include <type_traits>

namespace {

// Rows are taken in runs of 16, 8, 4, 2 and 1. A run of n rows is stored together, group by group, so
// that a kernel reaches all of them from one pointer: codes (K / 32, n, 32), meta (K / 32, n, 2).
struct Acts {  // R rows of K columns
    const float* x;       // (R, K)
    const int8_t* codes;  // runs, or null when no matrix needs them
    const float* meta;    // runs: scale, scale * sum
    const float* halves;  // runs: scale * sum of each 16
    int rows, cols;
};

struct RowRun { int start, size; };

inline RowRun run_of(int row, int rows) {
    int start = row / MAX_ROWS * MAX_ROWS, size = MAX_ROWS;
    while (start + size > rows || row >= start + size) {
        if (start + size <= rows) start += size;
        size /= 2;
    }
    return {start, size};
}

constexpr int PREFETCH = 4096;  // bytes ahead

template <class Format, int R>
inline void tile_rows(const uint8_t* tile, const Acts& acts, int row, F16L* sums) {
    const int cols = acts.cols, groups = cols / 32;
    const int8_t* a = acts.codes + (size_t)row * cols;
    const float* meta = acts.meta + (size_t)row * groups * 2;
    const float* halves = acts.halves + (size_t)row * groups * 2;
    F16L acc[R];
    for (int r = 0; r < R; r++) acc[r] = F16L::zero();
    for (int group = 0; group < groups; tile += Format::BYTES) {
        const auto head = Format::open(tile);
        for (int step = 0; step < Format::BLOCK / 32; step++, group++, a += 32 * R, meta += 2 * R, halves += 2 * R) {
            B64 q[8];
            Format::codes(tile, step, q);
            // Ask for memory earlier than the hardware does: a third of decode speed.
            constexpr int STEP_BYTES = Format::BYTES / (Format::BLOCK / 32);
            const uint8_t* ahead = tile + step * STEP_BYTES + PREFETCH;
            for (int line = 0; line < STEP_BYTES; line += 64) __builtin_prefetch(ahead + line);
            for (int half = 0; half < Format::HALVES; half++) {
                constexpr int QUADS = 8 / Format::HALVES;
                const F16L scale = Format::scale(head, tile, step, half);
                const F16L offset = Format::offset(head, scale, step, half);
#pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    I16 first = I16::zero(), second = I16::zero();  // two chains: half the latency
#pragma GCC unroll 4
                    for (int v = 0; v < QUADS; v += 2) {
                        first = dot4<Format::BITS>(first, q[half * QUADS + v], a + 32 * r + 16 * half + 4 * v);
                        second = dot4<Format::BITS>(second, q[half * QUADS + v + 1], a + 32 * r + 16 * half + 4 * v + 4);
                    }
                    const I16 dots = first + second;
                    const float sum = Format::HALVES == 1 ? meta[2 * r + 1] : halves[2 * r + half];
                    acc[r] = F16L::from(dots).fma(scale * F16L::set1(meta[2 * r]), acc[r]);
                    acc[r] = offset.fma(F16L::set1(sum), acc[r]);
                }
            }
        }
    }
    for (int r = 0; r < R; r++) sums[r] = acc[r];
}

template <class Float, int R>
inline void float_tile_rows(const uint8_t* tile, const Acts& acts, int row, F16L* sums) {
    const int cols = acts.cols;
    const float* x = acts.x + (size_t)row * cols;
    F16L acc[R][4];  // four sums a row, joined in order: short dependency chains
    for (auto& four : acc)
        for (auto& one : four) one = F16L::zero();
    int k = 0;
    for (; k + 4 <= cols; k += 4)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const F16L w = Float::load(tile + (size_t)(k + i) * Float::BYTES);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) acc[r][i] = w.fma(F16L::set1(x[(size_t)r * cols + k + i]), acc[r][i]);
        }
    for (; k < cols; k++)
        for (int r = 0; r < R; r++)
            acc[r][0] = Float::load(tile + (size_t)k * Float::BYTES).fma(F16L::set1(x[(size_t)r * cols + k]), acc[r][0]);
    for (int r = 0; r < R; r++) sums[r] = (acc[r][0] + acc[r][1]) + (acc[r][2] + acc[r][3]);
}

inline void put(const F16L& sum, float* out, int valid) {
    if (valid >= 16) {
        sum.store(out);
        return;
    }
    float lanes[16];
    sum.store(lanes);
    for (int i = 0; i < valid; i++) out[i] = lanes[i];
}

// out[row * stride + 16 * tile ...] for rows [first, last).
template <template <int> class Kernel>
inline void cover(const uint8_t* tile, const Acts& acts, int first, int last, float* out, size_t stride, int valid) {
    F16L sums[MAX_ROWS];
    int row = first;
    auto go = [&](auto count) {
        constexpr int R = decltype(count)::value;
        if constexpr (R <= MAX_ROWS)
            for (; row + R <= last; row += R) {
                Kernel<R>::run(tile, acts, row, sums);
                for (int r = 0; r < R; r++) put(sums[r], out + (size_t)(row + r) * stride, valid);
            }
    };
    go(std::integral_constant<int, 16>());
    go(std::integral_constant<int, 8>());
    go(std::integral_constant<int, 4>());
    go(std::integral_constant<int, 2>());
    go(std::integral_constant<int, 1>());
}

template <class Format> struct Packed {
    template <int R> struct Kernel {
        static void run(const uint8_t* t, const Acts& a, int row, F16L* s) { tile_rows<Format, R>(t, a, row, s); }
    };
    static size_t tile_bytes(int cols) { return (size_t)cols / Format::BLOCK * Format::BYTES; }
    static void read(const uint8_t* tile, int lane, int cols, float factor, float* out) {
        for (int group = 0; group < cols / 32; tile += Format::BYTES) {
            const auto head = Format::open(tile);
            for (int step = 0; step < Format::BLOCK / 32; step++, group++) {
                B64 q[8];
                Format::codes(tile, step, q);
                for (int half = 0; half < Format::HALVES; half++) {
                    constexpr int QUADS = 8 / Format::HALVES;
                    float scales[16], offsets[16];
                    const F16L scale = Format::scale(head, tile, step, half);
                    scale.store(scales);
                    Format::offset(head, scale, step, half).store(offsets);
                    for (int v = half * QUADS; v < (half + 1) * QUADS; v++)
                        for (int i = 0; i < 4; i++) {
                            const float code = (float)reinterpret_cast<const uint8_t*>(&q[v])[4 * lane + i];
                            out[group * 32 + 4 * v + i] = (scales[lane] * code + offsets[lane]) * factor;
                        }
                }
            }
        }
    }
};
template <class Float> struct Plain {
    template <int R> struct Kernel {
        static constexpr int AT_ONCE = R < 4 ? R : 4;
        static void run(const uint8_t* t, const Acts& a, int row, F16L* s) {
            for (int r = 0; r < R; r += AT_ONCE) float_tile_rows<Float, AT_ONCE>(t, a, row + r, s + r);
        }
    };
    static size_t tile_bytes(int cols) { return (size_t)cols * Float::BYTES; }
    static void read(const uint8_t* tile, int lane, int cols, float factor, float* out) {
        for (int k = 0; k < cols; k++) {
            float lanes[16];
            Float::load(tile + (size_t)k * Float::BYTES).store(lanes);
            out[k] = lanes[lane] * factor;
        }
    }
};

// Calls fn with the class that knows the format.
template <class Fn> inline void with_format(int format, Fn fn) {
    switch (format) {
        case F32: return fn(Plain<Float32>());
        case F16: return fn(Plain<Half>());
        case BF16: return fn(Plain<Brain>());
        case Q4_0: return fn(Packed<Simple<false, false>>());
        case Q4_1: return fn(Packed<Simple<true, false>>());
        case Q5_0: return fn(Packed<Simple<false, true>>());
        case Q5_1: return fn(Packed<Simple<true, true>>());
        case Q8_0: return fn(Packed<Eight>());
        case Q4_K: return fn(Packed<TwoLevel<false>>());
        case Q5_K: return fn(Packed<TwoLevel<true>>());
        case Q6_K: return fn(Packed<Six>());
        case MXFP4: return fn(Packed<Micro>());
    }
}

inline bool is_packed(int format) { return format > BF16; }

// Rows of activations that stay in the second-level cache while all tiles pass over them.
constexpr int ROW_CHUNK = 128;

// out (R, stack.rows) = x (R, K) times the stack's rows.
inline void matmul(Context& context, const Stack& stack, const Acts& acts, float* out) {
    struct Run { const Matrix* matrix; int tile, tiles, column; };
    // Tasks of about 64 KB of weights: small enough to share evenly, large enough to stream.
    int most_runs = 0;
    for (int part = 0; part < stack.count; part++) most_runs += (stack.parts[part].rows + 15) / 16;
    Run* runs = scratch<Run>(context.runs, most_runs);
    int count = 0, column = 0;
    for (int part = 0; part < stack.count; part++) {
        const Matrix& matrix = stack.parts[part];
        const int tiles = (matrix.rows + 15) / 16;
        size_t bytes = 1;
        with_format(matrix.format, [&](auto kind) { bytes = kind.tile_bytes(matrix.cols); });
        const int wanted = most(1, (int)(65536 / bytes)), share = most(1, tiles / (4 * context.pool.threads()));
        const int step = least(wanted, share);
        for (int tile = 0; tile < tiles; tile += step) runs[count++] = {&matrix, tile, least(step, tiles - tile), column};
        column += matrix.rows;
    }
    const size_t stride = stack.rows;
    for (int first = 0; first < acts.rows; first += ROW_CHUNK) {
        const int last = least(first + ROW_CHUNK, acts.rows);
        parallel(context, count, [&](int task) {
            const Run& run = runs[task];
            const Matrix& matrix = *run.matrix;
            with_format(matrix.format, [&](auto kind) {
                using Kind = decltype(kind);
                const size_t bytes = Kind::tile_bytes(matrix.cols);
                for (int tile = run.tile; tile < run.tile + run.tiles; tile++)
                    cover<Kind::template Kernel>(matrix.data + tile * bytes, acts, first, last,
                                                 out + run.column + 16 * tile, stride, matrix.rows - 16 * tile);
            });
        });
    }
}

// One row of activations to int8 with a scale per 32 columns; rounding to nearest, ties to even.
// `stride` is the rows of its run.
inline void quantize_row(const float* x, int cols, int stride, int8_t* codes, float* meta, float* halves) {
    for (int g = 0; g < cols / 32; g++, x += 32, codes += 32 * stride, meta += 2 * stride, halves += 2 * stride) {
        float peak = 0;
        for (int i = 0; i < 32; i++) peak = most(peak, std::fabs(x[i]));
        const float scale = peak / 127.f, inverse = peak > 0 ? 127.f / peak : 0.f;
        int sums[2] = {0, 0};
        for (int h = 0; h < 2; h++)
            for (int i = 0; i < 16; i++) {
                const int code = (int)std::nearbyintf(x[16 * h + i] * inverse);
                codes[16 * h + i] = (int8_t)code;
                sums[h] += code;
            }
        meta[0] = scale;
        meta[1] = scale * (float)(sums[0] + sums[1]);
        halves[0] = scale * (float)sums[0];
        halves[1] = scale * (float)sums[1];
    }
}

}  // namespace
