// Panels with AMX: an instruction multiplies sixteen activation rows by sixteen weight rows. Its sums are integers, and
// the rest is computed as in `panel_rows`, so the bits are the same.
#pragma once

inline namespace LRT_SPACE {

// Tile registers: 0 and 1 hold sums of rows, 4 activations, 6 codes.
struct TileShape {
    int rows = 0, columns = 0;

    void take(int of_rows, int of_columns) {
        if (of_rows == rows && of_columns == columns) return;
        rows = of_rows, columns = of_columns;
        struct alignas(64) {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int i = 0; i < 2; i++) shape.bytes[i] = 64, shape.rows[i] = (uint8_t)rows;
        shape.bytes[4] = (uint16_t)columns, shape.rows[4] = (uint8_t)rows;
        shape.bytes[6] = 64, shape.rows[6] = (uint8_t)(columns / 4);
        _tile_loadconfig(&shape);
    }
    ~TileShape() {
        if (rows) _tile_release();  // otherwise the system saves kilobytes per thread at context switches
    }
};

// out (rows, 16) from activations (rows, columns) and codes (columns / 4, 64); GCC needs literal register numbers.
#define LRT_TILE_PRODUCT(SUMS, a, codes, out)          \
    _tile_loadd(4, a, 32);                             \
    _tile_loadd(6, codes, 64 * PANEL_TILES);           \
    _tile_zero(SUMS);                                  \
    if constexpr (SYMMETRIC) _tile_dpbssd(SUMS, 4, 6); \
    else _tile_dpbsud(SUMS, 4, 6);                     \
    _tile_stored(SUMS, out, 64)

template <int R, int HALVES, bool SYMMETRIC>
LRT_NOINLINE void tile_rows(const Panel& panel, int groups, PanelRows<TileCodes> rows, Ahead& ahead, F16L* totals) {
    constexpr bool MINIMA = !SYMMETRIC && HALVES == 2;
    constexpr int T = PANEL_TILES, PARTS = MINIMA ? 1 : HALVES, SCALES = MINIMA ? 2 : PARTS;
    alignas(64) int32_t products[2][PARTS][16 * 16];
    for (int t = 0; t < T; t++) {
        const auto multiply = [&](int group) __attribute__((always_inline)) {
            const int8_t* a = rows.codes + (size_t)32 * rows.beside * group;
            const uint8_t* codes = panel.codes + (8 * T * group + t) * 64;
            LRT_TILE_PRODUCT(0, a, codes, products[group % 2][0]);
            if constexpr (PARTS == 2) {
                LRT_TILE_PRODUCT(1, a + 16, codes + 4 * T * 64, products[group % 2][PARTS - 1]);
            }
        };
        F16L sums[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) sums[r] = totals[r * T + t];
        const float *scales = panel.scale + 16 * t, *offsets = panel.offset + 16 * t, *meta = rows.meta;
        const int32_t* start = rows.start;
        multiply(0);
        for (int group = 0; group < groups; group++) {
            if (group + 1 < groups) multiply(group + 1);  // one group ahead, to hide the latency
            if (!t) ahead.fetch();
            const auto& ready = products[group % 2];
            F16L scale[SCALES];
            for (int i = 0; i < SCALES; i++) scale[i] = F16L::load(scales + 16 * T * i);
            const F16L offset = SYMMETRIC ? F16L::zero() : F16L::load(offsets);
#pragma GCC unroll 16
            for (int r = 0; r < R; r++) {
                F16L part = F16L::from(I16::load(ready[0] + 16 * r)) * scale[0];
                if (PARTS == 2) part = F16L::from(I16::load(ready[PARTS - 1] + 16 * r)).fma(scale[SCALES - 1], part);
                if (MINIMA) part = add_minima<TileCodes>(offset.as_bits(), start + r).fma(scale[SCALES - 1], part);
                sums[r] = part.fma(F16L::set1(meta[2 * r]), sums[r]);
                if (!SYMMETRIC && !MINIMA) sums[r] = offset.fma(F16L::set1(meta[2 * r + 1]), sums[r]);
            }
            scales += 16 * T * SCALES;
            offsets += 16 * T * SCALES;
            meta += 2 * rows.beside;
            if (MINIMA) start += rows.beside;
        }
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) totals[r * T + t] = sums[r];
    }
}
#undef LRT_TILE_PRODUCT

template <class Layout>
inline void tile_run(Layout, TileShape& shape, int size, const Panel& panel, int groups, const PanelRows<TileCodes>& rows,
                     Ahead& ahead, F16L* totals) {
    shape.take(size, half_minima<Layout>() ? 32 : 32 / Layout::HALVES);
    switch (size) {
#define LRT_RUN(R) \
    case R: return tile_rows<R, Layout::HALVES, Layout::SYMMETRIC>(panel, groups, rows, ahead, totals);
        static_assert(TILE_ROWS == 32, "33 rows are runs of 11");
        LRT_RUN(11) LRT_RUN(12) LRT_RUN(13) LRT_RUN(14) LRT_RUN(15) LRT_RUN(16)
#undef LRT_RUN
    }
}

}  // namespace
