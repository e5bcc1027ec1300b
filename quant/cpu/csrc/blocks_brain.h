// Products of dense bf16 blocks, by AMX or AVX-512's bf16 instruction, summed in float32 in column order.
#pragma once

inline namespace LRT_SPACE {

// A tile is 1 KB: sixteen rows and 32 columns of `a`; 32 rows (in pairs) and sixteen columns of `b`, (16, 16, 2).
constexpr int TILE_NUMBERS = 512, TILE_COLUMNS = 32;

#if LRT_AMX
// Configures all tile registers at full size during its lifetime.
struct WholeTiles {
    WholeTiles() {
        struct alignas(64) {
            uint8_t palette = 1, start = 0, unused[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } shape;
        for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.rows[i] = 16;
        _tile_loadconfig(&shape);
    }
    ~WholeTiles() { _tile_release(); }
};

// c (32, 16 T) += a (32, 32 count) b (32 count, 16 T); = if `first`. Tiles of the first and the second sixteen rows of
// `a` are `a_line` elements apart, tiles of successive 16 columns of `b` are `b_line` apart; the tiles of a line are
// contiguous.
template <int T>
inline void multiply_tiles(const uint16_t* a, size_t a_line, const uint16_t* b, size_t b_line, int count, bool first, float* c,
                           size_t c_stride) {
    const size_t stride = c_stride * sizeof(float);
    if (first) {
        _tile_zero(0);
        _tile_zero(2);
        if (T == 2) {
            _tile_zero(1);
            _tile_zero(3);
        }
    } else {
        _tile_loadd(0, c, stride);
        _tile_loadd(2, c + 16 * c_stride, stride);
        if (T == 2) {
            _tile_loadd(1, c + 16, stride);
            _tile_loadd(3, c + 16 * c_stride + 16, stride);
        }
    }
    for (int k = 0; k < count; k++, a += TILE_NUMBERS, b += TILE_NUMBERS) {
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, a + a_line, 64);
        _tile_dpbf16ps(2, 5, 6);
        if (T == 2) {
            _tile_loadd(7, b + b_line, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, c, stride);
    _tile_stored(2, c + 16 * c_stride, stride);
    if (T == 2) {
        _tile_stored(1, c + 16, stride);
        _tile_stored(3, c + 16 * c_stride + 16, stride);
    }
}

#else
struct WholeTiles {
    WholeTiles() {}  // nothing to set
};

// The same for R rows of `a`, in one tile.
template <int R, int T>
inline void multiply_lines(const uint16_t* a, const uint16_t* b, size_t b_line, int count, bool first, float* c, size_t c_stride) {
    F16L sums[R][T];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int t = 0; t < T; t++) sums[r][t] = first ? F16L::zero() : F16L::load(c + r * c_stride + 16 * t);
    for (int k = 0; k < count; k++, a += TILE_NUMBERS, b += TILE_NUMBERS)
        for (int pair = 0; pair < TILE_COLUMNS; pair += 2) {
            BrainPairs w[T];
#pragma GCC unroll 2
            for (int t = 0; t < T; t++) w[t] = BrainPairs::load(b + t * b_line + 16 * pair);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const BrainPairs x = BrainPairs::pair(a + r * TILE_COLUMNS + pair);
#pragma GCC unroll 2
                for (int t = 0; t < T; t++) sums[r][t] = x.dot(w[t], sums[r][t]);
            }
        }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int t = 0; t < T; t++) sums[r][t].store(c + r * c_stride + 16 * t);
}

// See above.
template <int T>
LRT_NOINLINE void multiply_tiles(const uint16_t* a, size_t a_line, const uint16_t* b, size_t b_line, int count, bool first, float* c,
                                 size_t c_stride) {
    for (int row = 0; row < 32; row += BRAIN_LINES)
        multiply_lines<BRAIN_LINES, T>(a + row / 16 * a_line + row % 16 * TILE_COLUMNS, b, b_line, count, first, c + row * c_stride, c_stride);
}
#endif

// Like load_some, but also for counts of 0 and below.
inline F16L load_up_to(const float* x, int count) { return count > 0 ? load_some(x, count) : F16L::zero(); }

// Stores a row (count) of `a` times `factor` from the tile's row `to` on, padded with zeros.
inline void put_brains(const float* x, int count, float factor, uint16_t* to) {
    const F16L by = F16L::set1(factor);
    for (int k = 0; k < count; k += TILE_COLUMNS, to += TILE_NUMBERS)
        BrainPairs::of(load_up_to(x + k, count - k) * by, load_up_to(x + k + 16, count - k - 16) * by).store(to);
}

// Converts columns [column, column + count) of a matrix's tile to tiles of `b`.
template <class Float> inline void put_pairs(const uint8_t* tile, int column, int count, uint16_t* to) {
    const uint8_t* p = tile + (size_t)column * Float::BYTES;
    int k = 0;
    for (; k + 2 <= count; k += 2, p += 2 * Float::BYTES, to += 32) {
        __builtin_prefetch(p + PREFETCH);
        if constexpr (std::is_same<Float, Brain>::value) BrainPairs::load(p).paired().store(to);
        else BrainPairs::of(Float::load(p), Float::load(p + Float::BYTES)).paired().store(to);
    }
    if (k < count) {
        BrainPairs::of(Float::load(p), F16L::zero()).paired().store(to);
        k += 2, to += 32;
    }
    for (; k % TILE_COLUMNS; k += 2, to += 32) BrainPairs::zero().store(to);
}

}  // namespace
