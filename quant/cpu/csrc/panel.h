// Products with many rows: PANEL_TILES tiles are unpacked to bytes, PANEL_COLUMNS at a time, and multiplied by all rows
// run by run. The order of sums, and so the bits, are those of `direct_rows` in products.h.
#pragma once

inline namespace LRT_SPACE {

struct Panel {
    alignas(64) uint8_t codes[PANEL_COLUMNS / 4 * PANEL_TILES * 64];     // (column / 4, tile, 64)
    alignas(64) float scale[PANEL_COLUMNS / 16 * PANEL_TILES * 16];      // (column / 16 or 32, tile, 16); with minima of halves,
                                                                         // a scale of each 32 and one of the minima
    alignas(64) float offset[PANEL_COLUMNS / 16 * PANEL_TILES * 16];     // like the scales; or the bits of both minima
};

// Sums of a group: one per scale; with minima of halves, codes are scaled first and there is a single sum.
template <class Layout, class Codes, bool MINIMA = half_minima<Layout>()> struct PanelSums {
    using Products = DotsOf<Layout, 8 / Layout::HALVES>;
};
template <class Layout> struct PanelSums<Layout, ByteCodes, true> { using Products = Dots<code_class(Layout::MOST_SCALED), 0, 8>; };
template <class Layout, bool MINIMA> struct PanelSums<Layout, PairCodes, MINIMA> { using Products = PairDots<Layout::SYMMETRIC>; };

// `tiles` point to a span of each tile and advance by `columns`. SIGNED subtracts Layout::ZERO from codes; MATRICES stores
// them as NEON's matrix instructions take them.
template <class Layout, bool SIGNED = false, bool MATRICES = false> LRT_NOINLINE void unpack_panel(const uint8_t** tiles, int columns, int span, Panel& panel) {
    constexpr int HALVES = Layout::HALVES;
    for (int t = 0; t < PANEL_TILES; t++) {
        const uint8_t* p = tiles[t];
        uint8_t* codes = panel.codes + 64 * t;
        float *scales = panel.scale + 16 * t, *offsets = panel.offset + 16 * t;
        for (int column = 0; column < columns; column += span) {
            const auto head = Layout::open(p);
            const uint8_t* steps = p + Layout::HEADER;
            for (int step = 0; step < span / 32; step++, steps += Layout::STEP) {
                const auto made = [&] {
                    if constexpr (half_minima<Layout>()) return Layout::scaled_codes(p, step);
                    else return Layout::codes(steps);
                }();
#if LRT_I8MM
                if constexpr (MATRICES) {
                    for (int v = 0; v < 8; v += 2, codes += 128) store_matrices(made.at(v), made.at(v + 1), codes);
                } else
#endif
#pragma GCC unroll 8
                for (int v = 0; v < 8; v++, codes += 64 * PANEL_TILES) {
                    if constexpr (SIGNED) (made.at(v) - B64::set1(Layout::ZERO)).store(codes);
                    else made.at(v).store(codes);
                }
#pragma GCC unroll 2
                for (int half = 0; half < HALVES; half++, scales += 16 * PANEL_TILES, offsets += 16 * PANEL_TILES) {
                    if constexpr (half_minima<Layout>()) {
                        (half ? head.least : head.d).store(scales);
                        F16L::bits(Layout::minima(p, step)).store(offsets);
                    } else {
                        Layout::scale(head, p, step, half).store(scales);
                        if constexpr (!Layout::SYMMETRIC) Layout::offset(head, step).store(offsets);
                    }
                }
            }
            p = steps;
        }
        tiles[t] = p;
    }
}

// Prefetches the next panel while the current one is multiplied: a few cache lines at every group.
struct Ahead {
    const uint8_t* tiles[PANEL_TILES];
    int lines;  // cache lines per tile and group; 0 for none

    void fetch() {
        for (int t = 0; t < PANEL_TILES; t++)
            for (int i = 0; i < lines; i++, tiles[t] += 64) __builtin_prefetch(tiles[t]);
    }
};

// A sum that began at FLOAT_START is, read as a float, FLOAT_BASE plus the sum (at most 2^20). So it is multiplied by a scale
// without a conversion: `sum.fma(scale, -FLOAT_BASE * scale)` is rounded once, like the product of the two.
constexpr int32_t FLOAT_START = 0x4B400000;
constexpr float FLOAT_BASE = 0x1.8p23f;

// Integer sums of a run's rows with the panel's tiles: QUADS steps of four columns at a time. STARTED: not from zero.
template <class Products, int R, class Codes, bool STARTED> struct RunDots {
    static constexpr int QUADS = 1;
    Products dots[R][PANEL_TILES];

    // A row's starts are `stride` apart.
    LRT_INLINE void begin(const int32_t* start, int stride) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int t = 0; t < PANEL_TILES; t++) dots[r][t].begin(STARTED ? start + r * stride : nullptr);
    }
    LRT_INLINE void add_to_all(I16 more) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 2
            for (int t = 0; t < PANEL_TILES; t++) dots[r][t].sums[0] = dots[r][t].sums[0] + more;
    }
    LRT_INLINE void add(const uint8_t* codes, const typename Codes::Code* rows, int first, int v) {
        typename Products::Weights w[PANEL_TILES];
#pragma GCC unroll 2
        for (int t = 0; t < PANEL_TILES; t++) w[t] = B64::load(codes + 64 * t);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const auto a = Codes::shared_quad(rows + Codes::GROUP * r, first + v);
#pragma GCC unroll 2
            for (int t = 0; t < PANEL_TILES; t++) dots[r][t].add(v, w[t], a);
        }
    }
    LRT_INLINE I16 total(int r, int t) const { return dots[r][t].total(); }
};

#if LRT_I8MM
// The same by NEON's matrix instructions.
template <class Products, int R, bool STARTED> struct RunDots<Products, R, ByteCodes, STARTED> {
    static constexpr int QUADS = 2;
    static_assert(PANEL_TILES == 1, "the codes of two steps are stored together");
    MatrixDots<R, ByteCodes::GROUP> dots;
    const int32_t* starts;
    int step;

    LRT_INLINE void begin(const int32_t* start, int stride) { dots.begin(), starts = start, step = stride; }
    LRT_INLINE void add(const uint8_t* codes, const int8_t* rows, int first, int v) { dots.add(codes, rows + 4 * (first + v)); }
    LRT_INLINE I16 total(int r, int) const { return STARTED ? dots.of(r) + I16::set1(starts[r * step]) : dots.of(r); }
};
#endif

template <class Codes> struct PanelRows {  // some rows of a run, from the panel's first column on
    const typename Codes::Code* codes;
    const float* meta;
    const int32_t* start;
    int beside;  // number of rows of the whole run
};

template <int R, int HALVES, bool SYMMETRIC, class Codes, class Products, bool FLOATS>
LRT_NOINLINE void panel_rows(const Panel& panel, int groups, PanelRows<Codes> rows, Ahead& ahead, F16L* totals) {
    // With minima of halves, codes are scaled first, so both halves have one sum.
    constexpr bool MINIMA = !SYMMETRIC && HALVES == 2;
    constexpr int T = PANEL_TILES, PARTS = MINIMA ? 1 : HALVES, QUADS = 8 / PARTS;
    constexpr int STARTS = MINIMA && Codes::GROUP == 16 ? 2 : PARTS;
    const uint8_t* codes = panel.codes;
    const float *scales = panel.scale, *offsets = panel.offset;
    F16L sums[R][T];
    // Unrolled, like all loops over the sums: otherwise the sums are in memory, and stored at every group.
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int t = 0; t < T; t++) sums[r][t] = totals[r * T + t];
    for (int group = 0; group < groups; group++) {
        ahead.fetch();
        F16L part[R][T];
#pragma GCC unroll 2
        for (int half = 0; half < PARTS; half++) {
            RunDots<Products, R, Codes, SYMMETRIC> dots;
            dots.begin(rows.start + half, PARTS);
            if constexpr (FLOATS)
                if (!half) dots.add_to_all(I16::set1(FLOAT_START));
#pragma GCC unroll 8
            for (int v = 0; v < QUADS; v += dots.QUADS, codes += 64 * T * dots.QUADS) dots.add(codes, rows.codes, half * QUADS, v);
            F16L scale[T], base[T];
            for (int t = 0; t < T; t++) {
                scale[t] = F16L::load(scales + 16 * t);
                base[t] = scale[t] * F16L::set1(-FLOAT_BASE);
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const F16L factor = F16L::set1(rows.meta[2 * r]);
#pragma GCC unroll 2
                for (int t = 0; t < T; t++) {
                    const I16 total = dots.total(r, t);
                    if (FLOATS && !half) part[r][t] = F16L::bits(total).fma(scale[t], base[t]);
                    else part[r][t] = half ? F16L::from(total).fma(scale[t], part[r][t]) : F16L::from(total) * scale[t];
                    if (MINIMA) {
                        const F16L least = add_minima<Codes>(I16::load(offsets + 16 * t), rows.start + STARTS * r);
                        part[r][t] = least.fma(F16L::load(scales + 16 * (T + t)), part[r][t]);
                    }
                    if (half == PARTS - 1) sums[r][t] = part[r][t].fma(factor, sums[r][t]);
                    if (!SYMMETRIC && !MINIMA) sums[r][t] = F16L::load(offsets + 16 * t).fma(F16L::set1(rows.meta[2 * r + 1]), sums[r][t]);
                }
            }
            scales += 16 * T * (MINIMA ? 2 : 1);
            offsets += 16 * T * (MINIMA ? 2 : 1);
        }
        rows.codes += Codes::GROUP * rows.beside;
        rows.meta += 2 * rows.beside;
        if (SYMMETRIC || MINIMA) rows.start += STARTS * rows.beside;
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int t = 0; t < T; t++) totals[r * T + t] = sums[r][t];
}

template <class Layout, class Codes>
inline void panel_run(int size, const Panel& panel, int groups, PanelRows<Codes> rows, Ahead& ahead, F16L* totals) {
    using Products = typename PanelSums<Layout, Codes>::Products;
    constexpr bool FLOATS = FLOAT_SUMS && SHORT_SCALES<Layout> && !half_minima<Layout>() && std::is_same<Codes, ByteCodes>::value;
    constexpr int STARTS = start_halves<Layout>(Codes::GROUP == 16);
    for (int some; size; size -= some) {
        some = least(size, LRT_PANEL_ROWS);
        switch (some) {
#define LRT_RUN(R) \
    case R: panel_rows<R, Layout::HALVES, Layout::SYMMETRIC, Codes, Products, FLOATS>(panel, groups, rows, ahead, totals); break;
            LRT_RUN(1) LRT_RUN(2) LRT_RUN(3)
#if LRT_PANEL_ROWS > 3
            LRT_RUN(4)
#endif
#if LRT_PANEL_ROWS > 4
            LRT_RUN(5) LRT_RUN(6)
#endif
#undef LRT_RUN
        }
        rows = {rows.codes + Codes::GROUP * some, rows.meta + 2 * some, rows.start ? rows.start + STARTS * some : nullptr, rows.beside};
        totals += some * PANEL_TILES;
    }
}

#if LRT_AMX
}  // namespace
#include "panel_amx.h"
inline namespace LRT_SPACE {
#else
struct TileShape {};  // nothing to set
#endif

// Multiplies runs [range.first, range.last) with `count` tiles, PANEL_TILES at a time; `totals` is
// (count / PANEL_TILES, rows, PANEL_TILES). Columns are the outer loop: their activations stay in the
// second-level cache for all tiles.
template <class Layout, class Codes>
inline void panel_tiles(const uint8_t** tiles, int count, int span, const Acts& acts, const Runs& runs, RunRange range,
                        F16L* totals) {
    constexpr bool TILES = std::is_same<Codes, TileCodes>::value;
    if constexpr (LRT_AMX && std::is_same<Codes, ByteCodes>::value)
        if (in_tiles(acts.rows)) return panel_tiles<Layout, TileCodes>(tiles, count, span, acts, runs, range, totals);
    TileShape shape;
    Panel panel;
    const int start = runs[range.first].start, rows = range.rows(runs);
    for (int i = 0; i < rows * count; i++) totals[i] = F16L::zero();
    constexpr int ZERO = start_zero<Layout>();
    constexpr int STARTS = start_halves<Layout>(Codes::GROUP == 16);
    const int32_t* starts = ZERO ? acts.start(ZERO, STARTS) : nullptr;
    // A tile's bytes of one panel, divided among the first runs.
    const int bytes = PANEL_COLUMNS / 32 * Layout::STEP + PANEL_COLUMNS / span * Layout::HEADER;
    const int fetching = least(4, range.last - range.first) * (PANEL_COLUMNS / 32), lines = (bytes / 64 + fetching) / fetching;
    for (int t = 0; t < PANEL_TILES; t++)
        for (int at = 0; at < bytes; at += 64) __builtin_prefetch(tiles[t] + at);
    for (int column = 0; column < acts.cols; column += PANEL_COLUMNS) {
        const int columns = least(PANEL_COLUMNS, acts.cols - column);
        for (int tile = 0; tile < count; tile += PANEL_TILES) {
            constexpr bool MATRICES = LRT_I8MM && std::is_same<Codes, ByteCodes>::value;
            unpack_panel<Layout, TILES && Layout::SYMMETRIC, MATRICES>(tiles + tile, columns, span, panel);
            Ahead ahead;
            ahead.lines = lines;
            for (int t = 0; t < PANEL_TILES; t++) ahead.tiles[t] = tiles[(tile + PANEL_TILES) % count + t];
            for (int index = range.first; index < range.last; index++) {
                if (index - range.first == 4) ahead.lines = 0;
                const RowRun run = runs[index];
                const size_t at = runs.at(run, column / 32, acts.cols / 32);
                const PanelRows<Codes> of_run = {Codes::of(acts) + at * Codes::GROUP, acts.meta + at * 2,
                                                 ZERO ? starts + at * STARTS : nullptr, run.size};
                F16L* to = totals + (size_t)tile * rows + (run.start - start) * PANEL_TILES;
                if constexpr (TILES) tile_run(Layout(), shape, run.size, panel, columns / 32, of_run, ahead, to);
                else panel_run<Layout, Codes>(run.size, panel, columns / 32, of_run, ahead, to);
            }
        }
    }
}

}  // namespace
