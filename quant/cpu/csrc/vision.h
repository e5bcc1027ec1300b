// The steps of a vision encoder over float32 rows: see quant/ops/vision.py. A row's bits do not depend on other rows or
// on threads. With AMX, attention and all matrices except float32 ones are computed in bf16 with float32 sums; with the
// bf16 products of AVX-512 and NEON, only attention and 16-bit matrices are. Their bits differ from those of other
// instruction sets.
#pragma once
#if LRT_BF16
#include "blocks_brain.h"
#endif

inline namespace LRT_SPACE {

// LayerNorm or RMSNorm of `size` elements; the padding after them is zeros and does not count.
inline void norm_line(const float* x, const VisionArgs& args, float* out) {
    const int n = args.size, whole = n / 16 * 16;
    F16L sum = F16L::zero(), squares = F16L::zero();
    if (!args.rms)
        for (int i = 0; i < n; i += 16) sum = sum + load_some(x + i, n - i);
    const float mean = sum16(sum) / (float)n;
    const F16L middle = F16L::set1(mean);
    for (int i = 0; i < whole; i += 16) {
        const F16L off = F16L::load(x + i) - middle;
        squares = off.fma(off, squares);
    }
    float total = sum16(squares);
    for (int i = whole; i < n; i++) total += (x[i] - mean) * (x[i] - mean);
    const F16L inverse = F16L::set1(1.f / std::sqrt(total / (float)n + args.eps));
    for (int i = 0; i < n; i += 16) {
        F16L y = (load_some(x + i, n - i) - middle) * inverse;
        if (args.weight) y = y * load_some(args.weight + i, n - i);
        if (args.bias) y = y + load_some(args.bias + i, n - i);
        store_some(y, n - i, out + i);
    }
}

void vision_norm(Context& context, const VisionArgs& args) {
    each_row(context, args.rows, [&](int row) {
        const float* x = args.x + row * args.strides[0];
        for (int h = 0; h < args.heads; h++) norm_line(x + h * args.size, args, args.out + ((size_t)row * args.heads + h) * args.size);
    });
}

// Applies RoPE to the halves of each head of x, with cosines y and sines z.
void vision_rotate(Context& context, const VisionArgs& args) {
    const int half = args.size / 2;
    each_row(context, args.rows, [&](int row) {
        const float *cos = args.y + (size_t)row * half, *sin = args.z + (size_t)row * half;
        for (int h = 0; h < args.heads; h++) {
            float* head = args.out + ((size_t)row * args.heads + h) * args.size;
            copy_floats(args.x + row * args.strides[0] + h * args.size, args.size, head);
            rotate(head, cos, sin, half);
        }
    });
}

// out (R, size) = activation(gate) * up of x (R, 2 * size).
void vision_gate(Context& context, const VisionArgs& args) {
    each_row(context, args.rows, [&](int row) {
        const float* gate = args.x + (size_t)row * 2 * args.size;
        for (int i = 0; i < args.size; i += 16) {
            const int n = args.size - i;
            const F16L g = activate_vision(load_some(gate + i, n), args.activation);
            store_some(g * load_some(gate + args.size + i, n), n, args.out + (size_t)row * args.size + i);
        }
    });
}

// Adds x to y (R, size) in place.
void vision_add(Context& context, const VisionArgs& args) {
    each_row(context, args.rows, [&](int row) {
        const float *x = args.x + (size_t)row * args.size, *y = args.y + (size_t)row * args.size;
        float* out = args.out + (size_t)row * args.size;
        for (int i = 0; i < args.size; i += 16)
            store_some(load_some(x + i, args.size - i) + load_some(y + i, args.size - i), args.size - i, out + i);
    });
}

// ---- products --------------------------------------------------------------------------------------------------------

#if LRT_BF16
constexpr int BRAIN_ROWS = 384, BRAIN_COLUMNS = 256;  // rows of a task, columns of a panel

#if LRT_AMX
// Converts columns [column, column + count) of a packed matrix's tile to tiles of bf16.
template <class Layout> void put_codes(const Matrix& m, int tile, int column, int count, uint16_t* to) {
    using Kind = Packed<Layout>;
    const int span = Kind::span(m);
    const uint8_t* p = Kind::at(m, tile) + column / span * (Layout::HEADER + span / 32 * Layout::STEP);
    for (int c = 0; c < count; c += span) {
        const auto head = Layout::open(p);
        const uint8_t* steps = p + Layout::HEADER;
        for (int step = 0; step < span / 32; step++, steps += Layout::STEP) {
            const auto codes = Layout::codes(steps);
            for (int v = 0; v < 8; v++, to += 64) {
                const int half = Layout::HALVES == 2 ? v / 4 : 0;
                const F16L scale = Layout::scale(head, p, step, half);
                F16L offset = scale * F16L::set1(-(float)Layout::ZERO);
                if constexpr (half_minima<Layout>()) offset = Layout::minimum(head, p, step, half);
                else if constexpr (!Layout::SYMMETRIC) offset = Layout::offset(head, step);
                const I16 four = {codes.at(v).v};
                const auto value = [&](int i) { return F16L::from(four.shr(8 * i) & I16::set1(255)).fma(scale, offset); };
                BrainPairs::of(value(0), value(1)).paired().store(to);
                BrainPairs::of(value(2), value(3)).paired().store(to + 32);
            }
        }
        p = steps;
    }
}
#endif

template <class Float> void put_floats(const Matrix& m, int tile, int column, int count, uint16_t* to) {
    put_pairs<Float>(m.data + tile * Plain<Float>::tile_bytes(m), column, count, to);
}

// The function that converts a matrix to bf16 tiles; null if it is not converted.
using PutTiles = void (*)(const Matrix& m, int tile, int column, int count, uint16_t* to);
inline PutTiles put_tiles(const Matrix& m) {
    PutTiles found = nullptr;
    with_layout(m.layout, [&](auto kind) {
        using Kind = decltype(kind);
        if constexpr (Kind::PACKED) {  // without AMX, int8 products are faster
#if LRT_AMX
            if (BRAIN_COLUMNS % Kind::span(m) == 0) found = put_codes<typename Kind::Kind>;
#endif
        } else if constexpr (std::is_same<Kind, Plain<Brain>>::value) {
            found = put_floats<Brain>;
        } else if constexpr (std::is_same<Kind, Plain<Half>>::value) {
            found = put_floats<Half>;
        }
    });
    return found;
}

inline bool in_brains(const Stack& stack) {
    for (int i = 0; i < stack.count; i++)
        if (!put_tiles(stack.parts[i])) return false;
    return !stack.hadamard;
}

// Multiplies `count` tiles of a matrix by `rows` rows, a multiple of 32; `valid` of them are stored.
LRT_NOINLINE void multiply_brains(const Matrix& m, int tile, int count, const uint16_t* a, int rows, int valid, int first, const Target& target) {
    constexpr int STRIDE = 16 * TASK_TILES, PANEL = BRAIN_COLUMNS * 16;
    alignas(64) uint16_t panel[2 * PANEL];
    alignas(64) float sums[BRAIN_ROWS * STRIDE];
    const PutTiles put = put_tiles(m);
    const size_t line = (size_t)(m.cols + TILE_COLUMNS - 1) / TILE_COLUMNS * TILE_NUMBERS;
    const WholeTiles tiles;
    for (int column = 0; column < m.cols; column += BRAIN_COLUMNS) {
        const int columns = least(BRAIN_COLUMNS, m.cols - column), steps = (columns + TILE_COLUMNS - 1) / TILE_COLUMNS;
        for (int t = 0; t < count; t += 2) {
            for (int i = 0; i < 2; i++) put(m, tile + least(t + i, count - 1), column, columns, panel + i * PANEL);
            for (int row = 0; row < rows; row += 32)
                multiply_tiles<2>(a + row / 16 * line + column / TILE_COLUMNS * TILE_NUMBERS, line, panel, PANEL, steps, !column,
                                  sums + row * STRIDE + 16 * t, STRIDE);
        }
    }
    for (int row = 0; row < valid; row++)
        for (int t = 0; t < count; t++) target.put(F16L::load(sums + row * STRIDE + 16 * t), first + row, tile + t);
}

inline void multiply_brains(Context& context, const VisionArgs& args, const Finish& finish) {
    constexpr int MOST_ROWS = 4 * BRAIN_ROWS;  // rows in bf16 at once
    const Stack& stack = args.matrix;
    const int tile_columns = (stack.cols + TILE_COLUMNS - 1) / TILE_COLUMNS;
    for (int start = 0; start < args.rows; start += MOST_ROWS) {
        const int rows = least(MOST_ROWS, args.rows - start), padded = (rows + 31) / 32 * 32;
        uint16_t* a = scratch<uint16_t>(context.wide, (size_t)padded * tile_columns * TILE_COLUMNS);
        each_row(context, padded, [&](int row) {
            uint16_t* to = a + (size_t)row / 16 * tile_columns * TILE_NUMBERS + row % 16 * TILE_COLUMNS;
            if (row < rows) return put_brains(args.x + (size_t)(start + row) * stack.cols, stack.cols, 1.f, to);
            for (int k = 0; k < tile_columns; k++) BrainPairs::zero().store(to + k * TILE_NUMBERS);
        });
        const int chunks = (padded + BRAIN_ROWS - 1) / BRAIN_ROWS;
        int column = 0;
        for (int part = 0; part < stack.count; part++) {
            const Matrix& m = stack.parts[part];
            const int tiles = (m.rows + 15) / 16, groups = (tiles + TASK_TILES - 1) / TASK_TILES;
            const Target target = {args.out + (size_t)start * stack.rows + column, (size_t)stack.rows, m.rows, m.scale, nullptr, nullptr};
            parallel(context, chunks * groups, [&](int task) {
                const int tile = task % groups * TASK_TILES, count = least(TASK_TILES, tiles - tile);
                const int first = padded / 32 * (task / groups) / chunks * 32, end = padded / 32 * (task / groups + 1) / chunks * 32;
                const int valid = least(rows, end) - first;
                const uint16_t* from = a + (size_t)first / 16 * tile_columns * TILE_NUMBERS;
                multiply_brains(m, tile, count, from, end - first, valid, first, target);
                finish(target.out + first * target.stride + 16 * tile, target.stride, valid, column + 16 * tile, least(16 * count, m.rows - 16 * tile));
            });
            column += m.rows;
        }
    }
}
#endif

// out (R, D) = activation(x @ matrix.T + bias).
void vision_linear(Context& context, const VisionArgs& args) {
    const Finish finish = {args.bias, args.activation};
#if LRT_BF16
    if (in_brains(args.matrix)) return multiply_brains(context, args, finish);
#endif
#if LRT_BF16_ONLY
    kernels_avx512.vision[VISION_LINEAR](context, args);
#else
    const Stack& stack = args.matrix;
    matmul(context, stack, prepare(context, context.rows, args.x, nullptr, args.rows, nullptr, 0, stack), args.out, stack.rows, &finish);
#endif
}

// ---- attention -------------------------------------------------------------------------------------------------------

constexpr int MAX_VISION_HEAD = 256;
constexpr int HEADS_AT_ONCE = 4;  // heads whose keys and values are packed at a time

// The layout of a head's queries, keys and values, and their products: ROWS queries by KEYS keys at once. A segment's
// keys are padded to a multiple of ROWS.
struct FloatBlocks {
    using Number = float;
    static constexpr int ROWS = 96, KEYS = 128, WIDE = 16 * PANEL_TILES;
    int size, columns;  // head size; padded to whole vectors
    struct Tiles {};  // nothing to set
    alignas(64) float queries[ROWS * MAX_VISION_HEAD], scores[ROWS * KEYS];

    explicit FloatBlocks(int size_) : size(size_), columns((size_ + 15) / 16 * 16) {}
    int key_numbers() const { return size; }
    int value_numbers() const { return columns; }
    // Keys (keys / WIDE, size, WIDE), values (keys, columns); `at` is a multiple of ROWS.
    void put_keys(const float* k, int64_t stride, int count, float* keys, int at) const {
        for (int i = 0; i < count; i++)
            for (int e = 0; e < size; e++) keys[(size_t)((at + i) / WIDE * size + e) * WIDE + (at + i) % WIDE] = k[i * stride + e];
    }
    void put_values(const float* v, int64_t stride, int count, float* values, int at, int) const {
        for (int i = 0; i < count; i++) {
            copy_floats(v + i * stride, size, values + (size_t)(at + i) * columns);
            fill_floats(values + (size_t)(at + i) * columns + size, columns - size, 0.f);
        }
    }
    void put_queries(const float* q, int64_t stride, int count, float scale) {
        for (int i = 0; i < count; i++)
            for (int e = 0; e < size; e++) queries[i * size + e] = q[i * stride + e] * scale;
    }
    void score(int rows, const float* keys, int at, int count) {
        for (int i = 0; i < count; i += WIDE) {
            for (int r = 0; r < rows; r++) fill_floats(scores + r * KEYS + i, WIDE, 0.f);
            multiply_rows<PANEL_TILES>(rows, {queries, (size_t)size, 1, keys + (size_t)(at + i) * size, WIDE, size, scores + i, KEYS});
        }
    }
    static F16L power(F16L x) { return exp16(x); }
    void put_power(int row, int key, F16L low, F16L high) {
        low.store(scores + row * KEYS + key);
        high.store(scores + row * KEYS + key + 16);
    }
    void weigh(int rows, const float* values, int at, int, int count, float* out) const {
        int e = 0;
        for (; e + WIDE <= columns; e += WIDE)
            multiply_rows<PANEL_TILES>(rows, {scores, KEYS, 1, values + (size_t)at * columns + e, (size_t)columns, count, out + e, (size_t)columns});
        if (e < columns)
            multiply_rows<1>(rows, {scores, KEYS, 1, values + (size_t)at * columns + e, (size_t)columns, count, out + e, (size_t)columns});
    }
};

#if LRT_BF16
struct BrainBlocks {
    using Number = uint16_t;
    static constexpr int ROWS = 32, KEYS = 256;
    int size, columns, steps;  // head size; padded to whole vectors; tiles of 32
    using Tiles = WholeTiles;
    alignas(64) uint16_t queries[ROWS * MAX_VISION_HEAD], powers[ROWS * KEYS];
    alignas(64) float scores[ROWS * KEYS];

    explicit BrainBlocks(int size_) : size(size_), columns((size_ + 15) / 16 * 16), steps((size_ + 31) / 32) {}
    int key_numbers() const { return steps * TILE_COLUMNS; }
    int value_numbers() const { return columns; }
    // Keys (keys / 16, steps, 16 pairs, 16 keys, 2).
    void put_keys(const float* k, int64_t stride, int count, uint16_t* keys, int at) const {
        for (int i = 0; i < ROWS; i++) {
            alignas(64) uint16_t tiles[MAX_VISION_HEAD / TILE_COLUMNS * TILE_NUMBERS];
            if (i < count) put_brains(k + i * stride, size, 1.f, tiles);
            uint16_t* to = keys + (size_t)(at + i) / 16 * steps * TILE_NUMBERS + i % 16 * 2;
            for (int s = 0; s < steps; s++)
                for (int pair = 0; pair < 16; pair++) {
                    if (i < count) __builtin_memcpy(to + s * TILE_NUMBERS + pair * 32, tiles + s * TILE_NUMBERS + pair * 2, 4);
                    else __builtin_memset(to + s * TILE_NUMBERS + pair * 32, 0, 4);
                }
        }
    }
    // Values (columns / 16, of = keys / 32, 16 pairs, 16 columns, 2).
    void put_values(const float* v, int64_t stride, int count, uint16_t* values, int at, int of) const {
        for (int e = 0; e < columns; e += 16)
            for (int i = 0; i < ROWS; i += 2) {
                const auto row = [&](int j) { return j < count ? load_some(v + j * stride + e, size - e) : F16L::zero(); };
                uint16_t* to = values + ((size_t)(e / 16) * of + (at + i) / 32) * TILE_NUMBERS + i % 32 * 16;
                BrainPairs::of(row(i), row(i + 1)).paired().store(to);
            }
    }
    void put_queries(const float* q, int64_t stride, int count, float scale) {
        for (int i = 0; i < count; i++)
            put_brains(q + i * stride, size, scale * 1.44269504f, queries + i / 16 * steps * TILE_NUMBERS + i % 16 * TILE_COLUMNS);
    }
    void score(int, const uint16_t* keys, int at, int count) {
        const size_t line = (size_t)steps * TILE_NUMBERS;
        for (int i = 0; i < count; i += 32)
            multiply_tiles<2>(queries, line, keys + (at + i) / 16 * line, line, steps, true, scores + i, KEYS);
    }
    // 2^x within 1e-4, more precise than bf16.
    static F16L power(F16L x) {
        x = x.max(F16L::set1(-126.f));
        const I16 n = x.rounded();
        const F16L f = x - F16L::from(n);
        F16L p = F16L::set1(0.05517164f).fma(f, F16L::set1(0.24261113f));
        p = p.fma(f, F16L::set1(0.69326097f)).fma(f, F16L::set1(0.99992806f));
        return F16L::bits(p.as_bits() + n.shl(23));
    }
    void put_power(int row, int key, F16L low, F16L high) {
        uint16_t* to = powers + (row / 16 * (KEYS / 32) + key / 32) * TILE_NUMBERS + row % 16 * TILE_COLUMNS;
        BrainPairs::of(low, high).store(to);
    }
    void weigh(int, const uint16_t* values, int at, int of, int count, float* out) const {
        const size_t line = (size_t)of * TILE_NUMBERS;
        const int tiles = (count + 31) / 32;
        int e = 0;
        for (; e + 32 <= columns; e += 32)
            multiply_tiles<2>(powers, KEYS / 32 * TILE_NUMBERS, values + e / 16 * line + at / 32 * TILE_NUMBERS, line, tiles, false, out + e, columns);
        if (e < columns)
            multiply_tiles<1>(powers, KEYS / 32 * TILE_NUMBERS, values + e / 16 * line + at / 32 * TILE_NUMBERS, line, tiles, false, out + e, columns);
    }
};
#else
using BrainBlocks = FloatBlocks;
#endif

// Some rows of a segment whose packed keys begin at `place`.
struct VisionTask { int first, end, place, row; };

// Attention of ROWS queries of a head within their segment, one block of keys after another.
template <class Blocks>
LRT_NOINLINE void attend_segment(const VisionArgs& args, const VisionTask& task, int head, const typename Blocks::Number* keys,
                                 const typename Blocks::Number* values, int of) {
    constexpr int KEYS = Blocks::KEYS;
    const int rows = least(Blocks::ROWS, task.end - task.row), count = task.end - task.first;
    Blocks blocks(args.size);
    const int columns = blocks.columns;
    alignas(64) float out[Blocks::ROWS * MAX_VISION_HEAD], totals[Blocks::ROWS * 16], peaks[Blocks::ROWS];
    [[maybe_unused]] const typename Blocks::Tiles tiles{};
    fill_floats(out, Blocks::ROWS * columns, 0.f);
    fill_floats(totals, rows * 16, 0.f);
    fill_floats(peaks, rows, -INFINITY);
    blocks.put_queries(args.x + task.row * args.strides[0] + head * args.size, args.strides[0], rows, args.scale);
    const int at = task.row - task.first, window = args.window ? args.window : count;  // keys beyond no row's window are skipped
    const int begin = most(0, at - window) / KEYS * KEYS, end = least(count, at + rows + window);
    for (int key = begin; key < end; key += KEYS) {
        const int some = least(KEYS, count - key), filled = (some + 31) / 32 * 32;
        blocks.score(rows, keys, task.place + key, some);
        for (int row = 0; row < rows; row++) {
            float* scores = blocks.scores + row * KEYS;
            const int first = at + row - window - key, last = at + row + window - key;
            for (int i = 0; i < least(some, first); i++) scores[i] = -1e30f;  // finite: a row may see nothing of a block
            for (int i = most(0, last + 1); i < some; i++) scores[i] = -1e30f;
            for (int i = some; i < filled; i++) scores[i] = -INFINITY;
            F16L high = F16L::load(scores).max(F16L::load(scores + 16));
            for (int i = 32; i < filled; i += 32) high = high.max(F16L::load(scores + i).max(F16L::load(scores + i + 16)));
            const float before = peaks[row], peak = most(before, high.highest());
            const F16L top = F16L::set1(peak);
            F16L total = F16L::load(totals + row * 16);
            if (peak > before) {
                peaks[row] = peak;
                const F16L factor = Blocks::power(F16L::set1(before - peak));
                total = total * factor;
                if (key)
                    for (int e = 0; e < columns; e += 16) (F16L::load(out + row * columns + e) * factor).store(out + row * columns + e);
            }
            for (int i = 0; i < filled; i += 32) {
                const F16L low = Blocks::power(F16L::load(scores + i) - top), next = Blocks::power(F16L::load(scores + i + 16) - top);
                total = total + (low + next);
                blocks.put_power(row, i, low, next);
            }
            total.store(totals + row * 16);
        }
        blocks.weigh(rows, values, task.place + key, of, some, out);
    }
    for (int row = 0; row < rows; row++) {
        const F16L factor = F16L::set1(1.f / sum16(F16L::load(totals + row * 16)));
        float* to = args.out + ((size_t)(task.row + row) * args.heads + head) * args.size;
        for (int e = 0; e < args.size; e += 16) store_some(F16L::load(out + row * columns + e) * factor, args.size - e, to + e);
    }
}

void vision_attention(Context& context, const VisionArgs& args) {
    using Blocks = BrainBlocks;
    using Number = Blocks::Number;
    constexpr int ROWS = Blocks::ROWS;
    int count = 0;
    for (int s = 0, first = 0; s < args.segments; first = args.ends[s++]) count += (args.ends[s] - first + ROWS - 1) / ROWS;
    VisionTask* tasks = scratch<VisionTask>(context.tasks, count);
    count = 0;
    for (int s = 0, first = 0; s < args.segments; first = args.ends[s++]) {
        const int place = count * ROWS;
        for (int row = first; row < args.ends[s]; row += ROWS) tasks[count++] = {first, args.ends[s], place, row};
    }
    const int padded = count * ROWS;
    const Blocks shape(args.size);
    const size_t of_keys = (size_t)padded * shape.key_numbers(), of_values = (size_t)padded * shape.value_numbers();
    Number* keys = scratch<Number>(context.wide, of_keys * HEADS_AT_ONCE);
    Number* values = scratch<Number>(context.gated, of_values * HEADS_AT_ONCE);
    for (int head = 0; head < args.heads; head += HEADS_AT_ONCE) {
        const int heads = least(HEADS_AT_ONCE, args.heads - head);
        parallel(context, heads * count, [&](int index) {
            const int h = index / count, at = index % count * ROWS;
            const VisionTask& task = tasks[index % count];
            const int rows = least(ROWS, task.end - task.row), column = (head + h) * args.size;
            shape.put_keys(args.y + task.row * args.strides[1] + column, args.strides[1], rows, keys + h * of_keys, at);
            shape.put_values(args.z + task.row * args.strides[2] + column, args.strides[2], rows, values + h * of_values, at, padded / 32);
        });
        parallel(context, heads * count, [&](int index) {
            const int h = index / count;
            attend_segment<Blocks>(args, tasks[index % count], head + h, keys + h * of_keys, values + h * of_values, padded / 32);
        });
    }
}

}  // namespace
