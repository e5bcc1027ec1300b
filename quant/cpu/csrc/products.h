// Packed matrix products: int8 activations per group of 32 against tiles of 16 weight rows.
// Every output is summed over the columns in one fixed order for any number of rows, tiles or threads: a row's result has
// the same bits in any batch.
#pragma once
#include <type_traits>
#include "formats.h"
#include "acts.h"

inline namespace LRT_SPACE {

constexpr int PREFETCH = 4096;  // bytes; farther ahead than the hardware prefetches, worth a third of decode speed
// To L2, as L1 allows too few lines in flight: worth 2 to 13 % of decode speed on a Xeon with AVX2 and AVX-512, and 25 %
// with four 8-bit rows on AMX.
constexpr int PREFETCH_INTO = 2;

// Up to DIRECT_ROWS rows: each vector of codes is unpacked into a register and multiplied by all rows.
template <class Layout, int R, class Codes>
inline void direct_rows(const uint8_t* tile, int span, const Acts& acts, F16L* totals) {
    constexpr bool PRECISE = !std::is_same<Codes, ByteCodes>::value, MINIMA = half_minima<Layout>();
    const int groups = acts.cols / 32;
    const typename Codes::Code* a = Codes::of(acts);
    const float* meta = acts.meta;
    constexpr int ZERO = start_zero<Layout>();
    // With byte codes, each half's sum fits in 16 bits. Pair codes are scaled first, as in panels: one sum for both
    // halves.
    constexpr int HALVES = MINIMA && PRECISE ? 1 : Layout::HALVES, STEPS = 8 / HALVES, STARTS = start_halves<Layout>(PRECISE);
    using Products = std::conditional_t<PRECISE, PairDots<Layout::SYMMETRIC, chains(R)>, DotsOf<Layout, STEPS, chains(R)>>;
    const int32_t* start = ZERO ? acts.start(ZERO, STARTS) : nullptr;
    F16L sums[R];
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) sums[r] = F16L::zero();
    int ready = R == 1 && acts.ready ? 0 : groups;
    for (int group = 0; group < groups;) {
        if (R == 1 && group + span / 32 > ready) ready = acts.wait(group + span / 32);
        const auto head = Layout::open(tile);
        const uint8_t* steps = tile + Layout::HEADER;
        for (int step = 0; step < span / 32; step++, group++, steps += Layout::STEP) {
            const auto codes = [&] {
                if constexpr (MINIMA && PRECISE) return Layout::scaled_codes(tile, step);
                else return Layout::codes(steps);
            }();
            constexpr int BYTES = Layout::STEP + (Layout::SPAN == 256 ? Layout::HEADER / 8 : Layout::HEADER);
            for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(steps + PREFETCH + line, 0, PREFETCH_INTO);
            F16L part[R];
            I16 both[R];
#pragma GCC unroll 2
            for (int half = 0; half < HALVES; half++) {
                Products dots[R];
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) dots[r].begin(Layout::SYMMETRIC ? start + r * HALVES + half : nullptr);
#pragma GCC unroll 8
                for (int i = 0; i < STEPS; i++) {
                    const int v = HALVES == 1 ? codes.nth(i) : half * STEPS + i;
                    const typename Products::Weights w = codes.at(v);
#pragma GCC unroll 12
                    for (int r = 0; r < R; r++) dots[r].add(i, w, Codes::quad(a + Codes::GROUP * r, v));
                }
                if constexpr (MINIMA && PRECISE) {
#pragma GCC unroll 12
                    for (int r = 0; r < R; r++) part[r] = F16L::from(dots[r].total()) * head.d;
                } else if constexpr (MINIMA) {  // both halves' sums are in one word
#pragma GCC unroll 12
                    for (int r = 0; r < R; r++) {
                        const I16 sum = dots[r].total();
                        both[r] = half ? both[r] | sum.shl(16) : sum & I16::set1(0xFFFF);
                    }
                } else {
                    const F16L scale = Layout::scale(head, tile, step, half);
#pragma GCC unroll 12
                    for (int r = 0; r < R; r++) {
                        const F16L dot = F16L::from(dots[r].total());
                        part[r] = half ? dot.fma(scale, part[r]) : dot * scale;
                        if (half == HALVES - 1) sums[r] = part[r].fma(F16L::set1(meta[2 * r]), sums[r]);
                        if constexpr (!ZERO) sums[r] = Layout::offset(head, step).fma(F16L::set1(meta[2 * r + 1]), sums[r]);
                    }
                }
            }
            if constexpr (MINIMA) {
                const I16 scales = Layout::scales(tile, step), minima = Layout::minima(tile, step);
#pragma GCC unroll 12
                for (int r = 0; r < R; r++) {
                    if (!PRECISE) part[r] = F16L::from(both[r].dot2(scales)) * head.d;
                    part[r] = add_minima<Codes>(minima, start + STARTS * r).fma(head.least, part[r]);
                    sums[r] = part[r].fma(F16L::set1(meta[2 * r]), sums[r]);
                }
            }
            a += Codes::GROUP * R;
            meta += 2 * R;
            if (ZERO) start += STARTS * R;
        }
        tile = steps;
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) totals[r] = sums[r];
}

template <class Float, int R>
inline void float_rows(const uint8_t* tile, const Acts& acts, int row, F16L* totals) {
    const int cols = acts.cols;
    const float* x = acts.x + (size_t)row * cols;
    F16L sums[R][4];  // four sums per row, added in order: short dependency chains
    for (auto& four : sums)
        for (auto& one : four) one = F16L::zero();
    int k = 0;
    for (; k + 4 <= cols; k += 4) {
        if (R == 1)
            for (int line = 0; line < 4 * Float::BYTES; line += 64) __builtin_prefetch(tile + (size_t)k * Float::BYTES + PREFETCH + line, 0, PREFETCH_INTO);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const F16L w = Float::load(tile + (size_t)(k + i) * Float::BYTES);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) sums[r][i] = w.fma(F16L::set1(x[(size_t)r * cols + k + i]), sums[r][i]);
        }
    }
    for (; k < cols; k++)
        for (int r = 0; r < R; r++)
            sums[r][0] = Float::load(tile + (size_t)k * Float::BYTES).fma(F16L::set1(x[(size_t)r * cols + k]), sums[r][0]);
    for (int r = 0; r < R; r++) totals[r] = (sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3]);
}

}  // namespace

#include "panel.h"
#include "blocks.h"
#include "activation.h"

inline namespace LRT_SPACE {

constexpr int FLOAT_PANEL_ROWS = 12, FLOAT_ROWS = 192, FLOAT_TILES = 4, FLOAT_COLUMNS = 256;  // for float matrices
// Tiles of a task: with many rows, with few gated rows, and at most (if totals fit).
constexpr int TASK_TILES = 8, PIECE_TILES = 32, MOST_TILES = 32;
constexpr int TOTALS = ROW_CHUNK * TASK_TILES, PIECE_TOTALS = 4 * PIECE_TILES;

inline int panel_index(int tile, int row, int rows) {
    return (tile / PANEL_TILES * rows + row) * PANEL_TILES + tile % PANEL_TILES;
}

// Loads up to sixteen values: the last group may have fewer.
inline F16L load_some(const float* from, int count) {
    if (count >= 16) return F16L::load(from);
    alignas(64) float lanes[16] = {};
    copy_floats(from, count, lanes);
    return F16L::load(lanes);
}

inline void store_some(F16L x, int count, float* to) {
    if (count >= 16) return x.store(to);
    alignas(64) float lanes[16];
    x.store(lanes);
    copy_floats(lanes, count, to);
}

}  // namespace

#include "adapters.h"

inline namespace LRT_SPACE {

// Applied to a product in place while it is in the cache: a bias, a vision encoder's activation.
struct Finish {
    const float* bias;  // for all columns, or null
    int activation;

    // Applies to rows of `count` elements, from column `column` on.
    void operator()(float* out, size_t stride, int rows, int column, int count) const {
        if (!bias && activation == NO_ACTIVATION) return;
        for (int row = 0; row < rows; row++, out += stride)
            for (int i = 0; i < count; i += 16) {
                F16L y = load_some(out + i, count - i);
                if (bias) y = y + load_some(bias + column + i, count - i);
                store_some(activate_vision(y, activation), count - i, out + i);
            }
    }
};

// Destination of products: rows of `stride` floats, sums times `factor`; the last tile is cut off at the matrix's rows.
struct Target {
    float* out;
    size_t stride;
    int columns;  // columns of the output
    float factor;
    const float* bias;     // (columns), or null
    const int32_t* lines;  // destination of each row; null: in order

    void put(F16L sum, int row, int tile) const {
        float* to = out + (lines ? lines[row] : row) * stride + 16 * tile;
        const int valid = columns - 16 * tile;
        if (bias) sum = sum.fma(F16L::set1(factor), load_some(bias + 16 * tile, valid));
        else if (factor != 1.f) sum = sum * F16L::set1(factor);
        store_some(sum, valid, to);
    }
};

// Destination of gated rows: rotated if the next matrix needs it, then quantized.
struct Gated {
    const Acts& acts;
    Gate gate;
    int hadamard;
    const float *gate_bias, *up_bias;  // or null
    const Additions* more = nullptr;   // from adapters
    float* keep = nullptr;             // (R, F) in floats, for adapters of the next matrix

    static F16L scaled(F16L y, const Matrix& m, const float* bias, int tile) {
        return y.fma(F16L::set1(m.scale), bias ? F16L::load(bias + 16 * tile) : F16L::zero());
    }
    // With adapters: scales some rows' gate and up products of a tile, and adds the adapters' products. Rows are
    // `step` elements apart.
    void adapt(F16L* gates, F16L* ups, int step, int first_row, int rows, const Matrix& gate, const Matrix& up, int tile) const {
        if (!more) return;
        for (int i = 0; i < rows * step; i += step) {
            gates[i] = scaled(gates[i], gate, gate_bias, tile);
            ups[i] = scaled(ups[i], up, up_bias, tile);
        }
        const bool joint = more->stack.count == 1;  // ups are the second half of one matrix
        more->to(gates, step, first_row, rows, 0, gate, tile);
        more->to(ups, step, first_row, rows, joint ? 0 : 1, up, tile + (joint ? gate.rows / 16 : 0));
    }
    F16L gated(F16L g, F16L u, const Matrix& of_gate, const Matrix& of_up, int tile) const {
        if (more) return gate(g, u);
        return gate(scaled(g, of_gate, gate_bias, tile), scaled(u, of_up, up_bias, tile));
    }
    void finish(const Runs& runs, int row, float* values, int column, int count) const {
        if (hadamard) block_hadamard(values, count, hadamard);
        if (keep) copy_floats(values, count, keep + (size_t)row * acts.cols + column);
        quantize_row(acts, runs, row, values, column, count);
    }
};

template <class Layout> struct Packed {
    using Kind = Layout;
    static constexpr bool PACKED = true;
    static int span(const Matrix& m) { return Layout::SPAN ? Layout::SPAN : m.span; }
    static size_t tile_bytes(const Matrix& m) {
        const int columns = span(m);
        return (size_t)m.cols / columns * (Layout::HEADER + columns / 32 * Layout::STEP);
    }
    static const uint8_t* at(const Matrix& m, int tile) { return m.data + tile * tile_bytes(m); }
    static void direct(const Matrix& m, int tile, const Acts& acts, F16L* sums) {
        if (acts.pairs) direct_of<PairCodes>(m, tile, acts, sums);
        else direct_of<ByteCodes>(m, tile, acts, sums);
    }
    template <class Codes, int R = 1> static void direct_of(const Matrix& m, int tile, const Acts& acts, F16L* sums) {
        if constexpr (R < DIRECT_ROWS)
            if (acts.rows > R) return direct_of<Codes, R == 1 ? 2 : R + 2>(m, tile, acts, sums);
        direct_rows<Layout, R, Codes>(at(m, tile), span(m), acts, sums);
    }
    // Each layout's functions are compiled in one of the instruction set's two files: see LAYOUTS_OF_PART_2.
    static void multiply(const Matrix& m, int tile, int count, const Acts& acts, const Runs& runs, RunRange range, const Target& target);
    // The gated product of two matrices of one layout, computed together tile by tile: rows of `out`.
    static void multiply_gated(const Matrix& gate, const Matrix& up, int tile, int count, int unit, const Acts& acts, const Runs& runs,
                               RunRange range, const Gated& out);
    // Unpacks one row, times `factor`.
    static void read(const Matrix& m, int row, float factor, float* out) {
        const uint8_t* tile = m.data + row / 16 * tile_bytes(m);
        const int lane = row % 16;
        for (int group = 0; group < m.cols / 32;) {
            const auto head = Layout::open(tile);
            const uint8_t* steps = tile + Layout::HEADER;
            for (int step = 0; step < span(m) / 32; step++, group++, steps += Layout::STEP) {
                const auto codes = Layout::codes(steps);
                for (int v = 0; v < 8; v++) {
                    alignas(64) uint8_t quads[64];
                    codes.at(v).store(quads);
                    const int half = Layout::HALVES == 2 ? v / 4 : 0;
                    float scales[16], offsets[16];
                    Layout::scale(head, tile, step, half).store(scales);
                    if constexpr (half_minima<Layout>()) Layout::minimum(head, tile, step, half).store(offsets);
                    else if constexpr (!Layout::SYMMETRIC) Layout::offset(head, step).store(offsets);
                    for (int i = 0; i < 4; i++) {
                        const int code = quads[4 * lane + i];
                        const float value = Layout::SYMMETRIC ? scales[lane] * (float)(code - Layout::ZERO)
                                                              : scales[lane] * (float)code + offsets[lane];
                        out[group * 32 + 4 * v + i] = value * factor;
                    }
                }
            }
            tile = steps;
        }
    }
};

// Never inlined: in one frame, the totals of all layouts together would fill the stack.
template <class Layout>
LRT_NOINLINE void Packed<Layout>::multiply(const Matrix& m, int tile, int count, const Acts& acts, const Runs& runs, RunRange range,
                                  const Target& target) {
    if (acts.rows <= DIRECT_ROWS) {
        F16L sums[DIRECT_ROWS];
        for (int t = tile; t < tile + count; t++) {
            direct(m, t, acts, sums);
            for (int row = 0; row < acts.rows; row++) target.put(sums[row], row, t);
        }
        return;
    }
    const uint8_t* tiles[MOST_TILES];
    const int whole = (count + PANEL_TILES - 1) / PANEL_TILES * PANEL_TILES;
    for (int t = 0; t < whole; t++) tiles[t] = at(m, tile + least(t, count - 1));
    F16L totals[TOTALS];
    const int rows = range.rows(runs), start = runs[range.first].start;
    if (acts.pairs) panel_tiles<Layout, PairCodes>(tiles, whole, span(m), acts, runs, range, totals);
    else panel_tiles<Layout, ByteCodes>(tiles, whole, span(m), acts, runs, range, totals);
    for (int row = 0; row < least(rows, acts.rows - start); row++)  // the run may end with a row of padding
        for (int t = 0; t < count; t++) target.put(totals[panel_index(t, row, rows)], start + row, tile + t);
}

template <class Layout>
LRT_NOINLINE void Packed<Layout>::multiply_gated(const Matrix& gate, const Matrix& up, int tile, int count, int unit, const Acts& acts,
                                        const Runs& runs, RunRange range, const Gated& out) {
    alignas(64) float values[PIECE_TILES * 16];
    if (acts.rows <= DIRECT_ROWS) {
        const int rows = runs.padded(), piece = least(PIECE_TILES, PIECE_TOTALS / rows) / unit * unit;
        if (count > piece) {
            for (int t = 0; t < count; t += piece)
                multiply_gated(gate, up, tile + t, least(piece, count - t), unit, acts, runs, range, out);
            return;
        }
        F16L gates[PIECE_TOTALS], ups[PIECE_TOTALS];
        for (int t = 0; t < count; t++) direct(gate, tile + t, acts, gates + t * rows);
        for (int t = 0; t < count; t++) direct(up, tile + t, acts, ups + t * rows);
        for (int t = 0; t < count; t++) out.adapt(gates + t * rows, ups + t * rows, 1, 0, acts.rows, gate, up, tile + t);
        for (int row = 0; row < acts.rows; row++) {
            for (int t = 0; t < count; t++)
                out.gated(gates[t * rows + row], ups[t * rows + row], gate, up, tile + t).store(values + 16 * t);
            out.finish(runs, row, values, 16 * tile, 16 * count);
        }
        for (int row = acts.rows; row < rows; row++) quantize_row(out.acts, runs, row, nullptr, 16 * tile, 16 * count);
        return;
    }
    const uint8_t* tiles[MOST_TILES];
    for (int t = 0; t < count; t++) {
        tiles[2 * t] = at(gate, tile + t);
        tiles[2 * t + 1] = at(up, tile + t);
    }
    F16L totals[TOTALS];
    const int rows = range.rows(runs), start = runs[range.first].start;
    panel_tiles<Layout, ByteCodes>(tiles, 2 * count, span(gate), acts, runs, range, totals);
    auto gate_at = [&](int t, int row) { return totals + panel_index(2 * t, row, rows); };
    auto up_at = [&](int t, int row) { return totals + panel_index(2 * t + 1, row, rows); };
    for (int t = 0; t < count; t++) out.adapt(gate_at(t, 0), up_at(t, 0), PANEL_TILES, start, rows, gate, up, tile + t);
    for (int row = 0; row < rows; row++) {
        for (int t = 0; t < count; t++) out.gated(*gate_at(t, row), *up_at(t, row), gate, up, tile + t).store(values + 16 * t);
        out.finish(runs, start + row, values, 16 * tile, 16 * count);
    }
}

// An instruction set is compiled in two files that take about equally long: the second has these layouts' products.
#define LAYOUTS_OF_PART_2(each)                                                                                      \
    each(TwoLevel<false>) each(TwoLevel<true>) each(Two) each(Three) each(Iq4Nl) each(Iq4Xs) each(Ternary)           \
    each(Iq3Xxs) each(Iq3S) each(Iq2Xxs) each(Iq2Xs) each(Iq2S) each(Iq1S) each(Iq1M) each(Mxfp4) each(Nvfp4)       \
    each(Nf4<false>) each(Nf4<true>) each(Fp4) each(ZeroPoints<4>) each(ZeroPoints<8>) each(ByteScales)
#if LRT_PART == 2
#define PRODUCTS_OF(...)                                                                                                     \
    template void Packed<__VA_ARGS__>::multiply(const Matrix&, int, int, const Acts&, const Runs&, RunRange, const Target&); \
    template void Packed<__VA_ARGS__>::multiply_gated(const Matrix&, const Matrix&, int, int, int, const Acts&, const Runs&, \
                                                      RunRange, const Gated&);
#elif LRT_BF16_ONLY
#define PRODUCTS_OF(...)  // an anonymous namespace shares nothing with other files
#else
#define PRODUCTS_OF(...)                                                                                                            \
    extern template void Packed<__VA_ARGS__>::multiply(const Matrix&, int, int, const Acts&, const Runs&, RunRange, const Target&); \
    extern template void Packed<__VA_ARGS__>::multiply_gated(const Matrix&, const Matrix&, int, int, int, const Acts&, const Runs&, \
                                                             RunRange, const Gated&);
#endif
LAYOUTS_OF_PART_2(PRODUCTS_OF)

template <class Float> struct Plain {
    static constexpr bool PACKED = false;
    static size_t tile_bytes(const Matrix& m) { return (size_t)m.cols * Float::BYTES; }
    static void multiply(const Matrix& m, int tile, int count, const Acts& acts, const Runs& runs, RunRange range,
                         const Target& target) {
        const int first = runs[range.first].start, last = least(acts.rows, first + range.rows(runs));
        if (last - first >= FLOAT_PANEL_ROWS) {
            for (int t = tile; t < tile + count; t += FLOAT_TILES)
                for (int row = first; row < last; row += FLOAT_ROWS)
                    multiply_panels(m, t, least(FLOAT_TILES, tile + count - t), acts, row, least(FLOAT_ROWS, last - row), target);
            return;
        }
        for (int t = tile; t < tile + count; t++) {
            const uint8_t* p = m.data + t * tile_bytes(m);
            F16L sums[4];
            for (int row = first; row < last;) {
                const int at_once = last - row >= 4 ? 4 : 1;
                if (at_once == 4) float_rows<Float, 4>(p, acts, row, sums);
                else float_rows<Float, 1>(p, acts, row, sums);
                for (int r = 0; r < at_once; r++, row++) target.put(sums[r], row, t);
            }
        }
    }
    // Many rows: PANEL_TILES tiles are unpacked to floats, FLOAT_COLUMNS at a time, and multiplied by all rows. There
    // are four sums, each of every fourth column, in the same order as in `float_rows`.
    static LRT_NOINLINE void multiply_panels(const Matrix& m, int tile, int count, const Acts& acts, int row, int rows,
                                             const Target& target) {
        constexpr int WIDE = 16 * PANEL_TILES, STRIDE = 16 * FLOAT_TILES;
        alignas(64) float panel[FLOAT_COLUMNS * WIDE], sums[4][FLOAT_ROWS * STRIDE];
        const float* x = acts.x + (size_t)row * acts.cols;
        for (auto& some : sums) fill_floats(some, rows * STRIDE, 0.f);
        for (int column = 0; column < m.cols; column += FLOAT_COLUMNS) {
            const int columns = least(FLOAT_COLUMNS, m.cols - column), fours = columns / 4;
            for (int t = 0; t < count; t += PANEL_TILES) {
                for (int part = 0; part < PANEL_TILES; part++) {
                    const uint8_t* p = m.data + (tile + least(t + part, count - 1)) * tile_bytes(m) + (size_t)column * Float::BYTES;
                    for (int k = 0; k < columns; k++) {
                        const int place = k < 4 * fours ? k % 4 * fours + k / 4 : k;
                        Float::load(p + (size_t)k * Float::BYTES).store(panel + place * WIDE + 16 * part);
                    }
                }
                for (int r = 0; r < rows; r += BLOCK_ROWS) {
                    const int some = least(BLOCK_ROWS, rows - r);
                    const float* a = x + (size_t)r * acts.cols + column;
                    for (int i = 0; i < 4; i++)
                        multiply_rows<PANEL_TILES>(some, {a + i, (size_t)acts.cols, 4, panel + i * fours * WIDE, WIDE, fours,
                                                          sums[i] + r * STRIDE + 16 * t, STRIDE});
                    if (columns % 4)
                        multiply_rows<PANEL_TILES>(some, {a + 4 * fours, (size_t)acts.cols, 1, panel + 4 * fours * WIDE, WIDE,
                                                          columns % 4, sums[0] + r * STRIDE + 16 * t, STRIDE});
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int t = 0; t < count; t++) {
                const auto sum = [&](int i) { return F16L::load(sums[i] + r * STRIDE + 16 * t); };
                target.put((sum(0) + sum(1)) + (sum(2) + sum(3)), row + r, tile + t);
            }
    }
    static void read(const Matrix& m, int row, float factor, float* out) {
        const uint8_t* tile = m.data + row / 16 * tile_bytes(m);
        for (int k = 0; k < m.cols; k++) {
            float lanes[16];
            Float::load(tile + (size_t)k * Float::BYTES).store(lanes);
            out[k] = lanes[row % 16] * factor;
        }
    }
};

// E4M3 codes in groups: 16 float32 scales, then steps of bytes.
struct E4m3Groups {
    static constexpr bool PACKED = false;
    static size_t tile_bytes(const Matrix& m) { return (size_t)m.cols / m.span * (64 + 16 * m.span); }
    template <int R> static void rows(const uint8_t* tile, int span, const Acts& acts, int row, F16L* totals) {
        const int cols = acts.cols;
        const float* x = acts.x + (size_t)row * cols;
        for (int r = 0; r < R; r++) totals[r] = F16L::zero();
        for (int k = 0; k < cols; k += span) {
            const F16L scale = F16L::load((const float*)tile);
            tile += 64;
            F16L sums[R][4];
            for (auto& four : sums)
                for (auto& one : four) one = F16L::zero();
            for (int c = k; c < k + span; c += 4, tile += 64) {
                __builtin_prefetch(tile + PREFETCH, 0, PREFETCH_INTO);
                const I16 words = I16::load(tile);
                const F16L w[4] = {e4m3_column<0>(words), e4m3_column<1>(words), e4m3_column<2>(words), e4m3_column<3>(words)};
#pragma GCC unroll 4
                for (int r = 0; r < R; r++)
                    for (int i = 0; i < 4; i++) sums[r][i] = w[i].fma(F16L::set1(x[(size_t)r * cols + c + i]), sums[r][i]);
            }
            for (int r = 0; r < R; r++) totals[r] = ((sums[r][0] + sums[r][1]) + (sums[r][2] + sums[r][3])).fma(scale, totals[r]);
        }
    }
    static void multiply(const Matrix& m, int tile, int count, const Acts& acts, const Runs& runs, RunRange range,
                         const Target& target) {
        const int first = runs[range.first].start, last = least(acts.rows, first + range.rows(runs));
        for (int t = tile; t < tile + count; t++) {
            const uint8_t* p = m.data + t * tile_bytes(m);
            F16L sums[4];
            for (int row = first; row < last;) {
                const int at_once = last - row >= 4 ? 4 : 1;
                if (at_once == 4) rows<4>(p, m.span, acts, row, sums);
                else rows<1>(p, m.span, acts, row, sums);
                for (int r = 0; r < at_once; r++, row++) target.put(sums[r], row, t);
            }
        }
    }
    static void read(const Matrix& m, int row, float factor, float* out) {
        const uint8_t* tile = m.data + row / 16 * tile_bytes(m);
        for (int k = 0; k < m.cols; k += m.span) {
            float scales[16], lanes[4][16];
            F16L::load((const float*)tile).store(scales);
            tile += 64;
            for (int c = k; c < k + m.span; c += 4, tile += 64) {
                const I16 words = I16::load(tile);
                e4m3_column<0>(words).store(lanes[0]);
                e4m3_column<1>(words).store(lanes[1]);
                e4m3_column<2>(words).store(lanes[2]);
                e4m3_column<3>(words).store(lanes[3]);
                for (int i = 0; i < 4; i++) out[c + i] = lanes[i][row % 16] * scales[row % 16] * factor;
            }
        }
    }
};

// Calls fn with the layout's class.
template <class Fn> inline void with_layout(int layout, Fn fn) {
    switch (layout) {
        case F32: return fn(Plain<Float32>());
        case F16: return fn(Plain<Half>());
        case BF16: return fn(Plain<Brain>());
        case AFFINE4: return fn(Packed<Affine<4, false>>());
        case AFFINE4_MIN: return fn(Packed<Affine<4, true>>());
        case AFFINE5: return fn(Packed<Affine<5, false>>());
        case AFFINE5_MIN: return fn(Packed<Affine<5, true>>());
        case AFFINE6: return fn(Packed<Affine<6, false>>());
        case AFFINE8: return fn(Packed<Affine<8, false>>());
        case AFFINE8_MIN: return fn(Packed<Affine<8, true>>());
        case Q4_K: return fn(Packed<TwoLevel<false>>());
        case Q5_K: return fn(Packed<TwoLevel<true>>());
        case Q6_K: return fn(Packed<ByteScales>());
        case MXFP4: return fn(Packed<Mxfp4>());
        case NVFP4: return fn(Packed<Nvfp4>());
        case NF4: return fn(Packed<Nf4<false>>());
        case Q2_K: return fn(Packed<Two>());
        case Q3_K: return fn(Packed<Three>());
        case IQ4_NL: return fn(Packed<Iq4Nl>());
        case IQ4_XS: return fn(Packed<Iq4Xs>());
        case TQ2_0: return fn(Packed<Ternary>());
        case IQ3_XXS: return fn(Packed<Iq3Xxs>());
        case IQ3_S: return fn(Packed<Iq3S>());
        case IQ2_XXS: return fn(Packed<Iq2Xxs>());
        case IQ2_XS: return fn(Packed<Iq2Xs>());
        case IQ2_S: return fn(Packed<Iq2S>());
        case IQ1_S: return fn(Packed<Iq1S>());
        case IQ1_M: return fn(Packed<Iq1M>());
        case BRAINS4: return fn(Packed<Brains<4>>());
        case BRAINS8: return fn(Packed<Brains<8>>());
        case ZEROS4: return fn(Packed<ZeroPoints<4>>());
        case ZEROS8: return fn(Packed<ZeroPoints<8>>());
        case NF4_F32: return fn(Packed<Nf4<true>>());
        case FP4_F32: return fn(Packed<Fp4>());
        case E4M3_GROUPS: return fn(E4m3Groups());
    }
}

inline bool is_packed(int layout) { return layout > BF16 && layout != E4M3_GROUPS; }

}  // namespace
