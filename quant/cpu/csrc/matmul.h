// Matrix products on all threads, divided into tasks of some tiles and runs of rows. products.h has the work of a task.
#pragma once
#include "products.h"

inline namespace LRT_SPACE {

// The number of runs in a chunk of rows, and the number of chunks.
struct Chunks {
    const Runs& runs;
    int count;

    explicit Chunks(const Runs& all) : runs(all) {
        const int most_runs = all.rows <= DIRECT_ROWS ? 1 : ROW_CHUNK / longest_run(all.rows);
        count = (all.count + most_runs - 1) / most_runs;
    }
    RunRange operator[](int chunk) const { return {chunk * runs.count / count, (chunk + 1) * runs.count / count}; }
};

// The number of tiles whose totals fit in the cache: tasks with fewer rows have more tiles.
inline int tiles_at_once(int rows) {
    const int room = TOTALS / (rows + longest_run(rows));  // chunks may differ by one run
    return most(TASK_TILES, least(room, MOST_TILES)) / TASK_TILES * TASK_TILES;
}

// The number of tiles for the next task; `left` are not assigned yet. With few rows, limited by reading, a task is a
// share of the remaining tiles: most are read in long pieces, and the last pieces are short. With many rows it is
// `at_once`, if not 0.
inline int next_tiles(const Context& context, int left, int at_once) {
    const int threads = context.pool.threads();
    if (!at_once) return most(1, left / (2 * threads));
    const int step = least(most(1, left / (2 * threads)), at_once);
    return (step + PANEL_TILES - 1) / PANEL_TILES * PANEL_TILES;
}

inline int tiles_of(const Matrix& m) { return (m.rows + 15) / 16; }
inline int tiles_of(const Stack& stack) {
    int tiles = 0;
    for (int part = 0; part < stack.count; part++) tiles += tiles_of(stack.parts[part]);
    return tiles;
}
inline bool any_plain(const Stack& stack) {
    for (int i = 0; i < stack.count; i++)
        if (!is_packed(stack.parts[i].layout)) return true;
    return false;
}
// Whether no tile holds rows of two matrices.
inline bool whole_tiles(const Stack& stack) {
    for (int i = 0; i + 1 < stack.count; i++)
        if (stack.parts[i].rows % 16) return false;
    return true;
}
inline const uint8_t* tile_at(const Matrix& m, int tile) {
    const uint8_t* at = nullptr;
    with_layout(m.layout, [&](auto kind) { at = m.data + tile * kind.tile_bytes(m); });
    return at;
}

inline const uint8_t* tile_at(const Stack& stack, int tile) {
    int part = 0;
    while (tile >= tiles_of(stack.parts[part])) tile -= tiles_of(stack.parts[part++]);
    return tile_at(stack.parts[part], tile);
}

// Some tiles of a matrix times some runs of rows.
inline void multiply(const Matrix& m, int tile, int tiles, const Acts& acts, const Runs& runs, RunRange range, const Target& target) {
    with_layout(m.layout, [&](auto kind) { kind.multiply(m, tile, tiles, acts, runs, range, target); });
}

// A task of a product: some tiles of a matrix, whose columns of the output begin at `column`.
struct Share { const Matrix* matrix; int part, tile, tiles, column; };

// Divides a stack's tiles into tasks.
struct Shares {
    Share* list;
    int count = 0;

    Shares(const Context& context, Scratch& memory, const Stack& stack, int at_once) {
        int left = tiles_of(stack), column = 0;
        list = scratch<Share>(memory, left);
        for (int part = 0; part < stack.count; part++) {
            const Matrix& m = stack.parts[part];
            for (int tile = 0; tile < tiles_of(m);) {
                const int step = least(next_tiles(context, left, at_once), tiles_of(m) - tile);
                list[count++] = {&m, part, tile, step, column};
                tile += step;
                left -= step;
            }
            column += m.rows;
        }
    }
};

// A task of a single row's product.
inline void multiply_share(const Stack& stack, const Share& share, const Acts& acts, float* out) {
    const Matrix& m = *share.matrix;
    const Target to = {out + share.column, (size_t)stack.rows, m.rows, m.scale, nullptr, nullptr};
    multiply(m, share.tile, share.tiles, acts, Runs(1), {0, 1}, to);
}

// Some tiles of a stack, as if its matrices were one, for a single row.
inline void multiply_tiles(const Stack& stack, int tile, int tiles, const Acts& acts, float* out) {
    for (int part = 0, column = 0; tiles > 0; column += stack.parts[part++].rows) {
        const Matrix& m = stack.parts[part];
        const int here = most(0, least(tiles, tiles_of(m) - tile));
        if (here) multiply_share(stack, {&m, part, tile, here, column}, acts, out);
        tile = most(0, tile - tiles_of(m));
        tiles -= here;
    }
}

// out (R, stack.rows) = x (R, K) times the stack's rows; rows of `out` are `stride` floats apart.
inline void matmul(Context& context, const Stack& stack, const Acts& acts, float* out, int stride, const Finish* finish = nullptr) {
    if (acts.rows == 0) return;
    const Additions more = additions(context, stack, acts);
    const Runs runs(acts.rows);
    const Chunks chunks(runs);
    const Shares shares(context, context.tasks, stack, acts.rows > DIRECT_ROWS ? TASK_TILES : 0);
    const int count = shares.count;
    parallel(context, chunks.count * count, [&](int index) {
        const Share& task = shares.list[index % count];
        const Matrix& m = *task.matrix;
        const Target target = {out + task.column, (size_t)stride, m.rows, m.scale, nullptr, nullptr};
        const RunRange range = chunks[index / count];
        const int first = runs[range.first].start, rows = least(acts.rows - first, range.rows(runs));
        multiply(m, task.tile, task.tiles, acts, runs, range, target);
        if (more.products) more.to_rows(target.out, target.stride, first, rows, task.part, m, task.tile, task.tiles);
        if (finish)
            (*finish)(target.out + (size_t)first * stride + 16 * task.tile, stride, rows, task.column + 16 * task.tile,
                      least(16 * task.tiles, m.rows - 16 * task.tile));
    });
}

inline void matmul(Context& context, const Stack& stack, const Acts& acts, float* out) { matmul(context, stack, acts, out, stack.rows); }

// The number of gated tiles that must stay in one task: whole groups and rotations of the next matrix.
inline int gated_unit(const Stack& down) { return most(2, down.hadamard / 16); }

// The two halves of a stack: gates and ups.
struct Halves { Matrix gate, up; };

// Whether gate and up can be computed together and quantized directly.
inline bool can_gate(const Stack& stack, const Stack& down, Halves& halves) {
    if (any_plain(down)) return false;
    Matrix &gate = halves.gate, &up = halves.up;
    gate = up = stack.parts[0];
    if (stack.count == 2) {
        up = stack.parts[1];
    } else if (stack.count == 1 && stack.rows % 32 == 0) {
        gate.rows = up.rows = stack.rows / 2;
        with_layout(up.layout, [&](auto kind) { up.data += gate.rows / 16 * kind.tile_bytes(up); });
    } else {
        return false;
    }
    const int unit = gated_unit(down);
    return is_packed(gate.layout) && gate.layout == up.layout && gate.span == up.span && gate.rows == up.rows &&
           2 * unit <= TASK_TILES && gate.rows % (16 * unit) == 0;
}

// Some tiles of both products, joined by `to.gate`, times some runs of rows.
inline void multiply_gated(const Halves& halves, int tile, int tiles, int unit, const Acts& acts, const Runs& runs, RunRange range,
                           const Gated& to) {
    with_layout(halves.gate.layout, [&](auto kind) {
        if constexpr (decltype(kind)::PACKED) kind.multiply_gated(halves.gate, halves.up, tile, tiles, unit, acts, runs, range, to);
    });
}

// Divides gated tiles into tasks that begin at `starts`, whose last is `tiles`; returns how many there are.
inline int divide_gated(const Context& context, Scratch& memory, int tiles, int unit, bool panels, int*& starts) {
    int count = 0;
    starts = scratch<int>(memory, tiles + 1);
    for (int tile = 0; tile < tiles; count++) {
        starts[count] = tile;
        int step = next_tiles(context, tiles - tile, panels ? TASK_TILES : 0);
        if (panels) step = least(step, TASK_TILES / 2);
        tile += (step + unit - 1) / unit * unit;
    }
    starts[count] = tiles;
    return count;
}

// The codes (R, F) of both products, joined by `target.gate`.
inline void gated_matmul(Context& context, const Halves& halves, const Acts& acts, const Gated& target) {
    if (acts.rows == 0) return;
    const Runs runs(acts.rows);
    const Chunks chunks(runs);
    const int tiles = halves.gate.rows / 16, unit = most(2, target.hadamard / 16);
    int* starts;
    const int count = divide_gated(context, context.tasks, tiles, unit, acts.rows > DIRECT_ROWS, starts);
    parallel(context, chunks.count * count, [&](int index) {
        const int tile = starts[index % count], tiles_here = starts[index % count + 1] - tile;
        multiply_gated(halves, tile, tiles_here, unit, acts, runs, chunks[index / count], target);
    });
}

}  // namespace
