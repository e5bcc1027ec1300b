// Low-rank adapters, applied to products row by row: y * factors + B (A x). Each row of a pass has a mix of adapters or
// none, and gets the same bits as alone. See quant/ops/adapters.py for their contents.
#pragma once

inline namespace LRT_SPACE {

// The entry for a matrix in a row's mix; null if there is none.
inline const LowRank* low_rank_of(const AdapterArgs& adapters, int mix, const Matrix& m) {
    if (mix < 0 || m.site <= 0 || m.site >= adapters.sites) return nullptr;
    const LowRank* entry = adapters.table + (size_t)mix * adapters.sites + m.site;
    return entry->rank || entry->factors ? entry : nullptr;
}

// Whether a pass has adapters for a stack.
inline bool adapted(const Context& context, const Stack& stack) {
    for (int row = 0; row < context.adapters.rows; row++)
        for (int i = 0; i < stack.count; i++)
            if (low_rank_of(context.adapters, context.adapters.mixes[row], stack.parts[i])) return true;
    return false;
}

// Rows of x (ROWS, columns) times rows of A from the k-th on: t[row][k]. Each sum is the same for any ROWS and RANKS.
template <int ROWS, int RANKS> inline void low_rank_dots(const LowRank& low, int k, const float* x, int columns, float* t, int stride) {
    const int groups = (columns + LOW_COLUMNS - 1) / LOW_COLUMNS;
    F16L sums[ROWS][RANKS];
    for (auto& of_row : sums)
        for (auto& sum : of_row) sum = F16L::zero();
    for (int group = 0; group < groups; group++) {
        F16L parts[ROWS][RANKS];
        for (auto& of_row : parts)
            for (auto& part : of_row) part = F16L::zero();
#pragma GCC unroll 4
        for (int i = 0; i < LOW_COLUMNS / 16; i++) {
            const int at = group * LOW_COLUMNS + 16 * i;
            F16L values[ROWS];
            for (int row = 0; row < ROWS; row++) values[row] = load_some(x + (size_t)row * columns + at, most(0, columns - at));
            for (int r = 0; r < RANKS; r++) {
                const F16L codes = F16L::from(I16::load_i8(low.a + (size_t)(k + r) * groups * LOW_COLUMNS + at));
                for (int row = 0; row < ROWS; row++) parts[row][r] = codes.fma(values[row], parts[row][r]);
            }
        }
        for (int r = 0; r < RANKS; r++) {
            const F16L scale = F16L::set1(low.a_scales[(size_t)(k + r) * groups + group]);
            for (int row = 0; row < ROWS; row++) sums[row][r] = parts[row][r].fma(scale, sums[row][r]);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int r = 0; r < RANKS; r++) t[(size_t)row * stride + k + r] = sum16(sums[row][r]);
}

// Rows of A [first, last) for rows of x that have the same mix.
template <int ROWS> inline void low_rank_rows(const LowRank& low, int first, int last, const float* x, int columns, float* t, int stride) {
    constexpr int RANKS = ROWS == 1 ? 8 : 2;
    int k = first;
    for (; k + RANKS <= last; k += RANKS) low_rank_dots<ROWS, RANKS>(low, k, x, columns, t, stride);
    for (; k < last; k++) low_rank_dots<ROWS, 1>(low, k, x, columns, t, stride);
}

// A x of LOW_RANKS ranks as B's input: pairs of 16 bits, times `scale`.
struct LowCodes {
    int32_t pairs[LOW_RANKS / 2];
    float scale;
};

inline LowCodes low_codes(const float* t, int count) {
    constexpr float MOST = 32767.f;
    LowCodes found;
    const F16L values = load_some(t, count);
    const float peak = values.max(negated(values)).highest();
    alignas(64) int32_t codes[16];
    F16L::bits((values * F16L::set1(peak > 1e-30f ? MOST / peak : 0.f)).rounded()).store((float*)codes);
    for (int i = 0; i < LOW_RANKS / 2; i++) found.pairs[i] = (codes[2 * i] & 0xFFFF) | (int32_t)((uint32_t)codes[2 * i + 1] << 16);
    found.scale = peak / MOST;
    return found;
}

inline int low_groups(int rank) { return (rank + LOW_RANKS - 1) / LOW_RANKS; }
inline size_t low_tile_bytes(int rank) { return (size_t)32 * low_groups(rank) + 16 * rank; }

// A tile of B times A x of ROWS rows that have the same mix, `stride` apart; each sum is the same for any ROWS.
template <int ROWS> inline void low_rank_tile(const LowRank& low, int tile, const LowCodes* t, int stride, F16L* sums) {
    const uint8_t* b = low.b + tile * low_tile_bytes(low.rank);
    for (int row = 0; row < ROWS; row++) sums[row] = F16L::zero();
    for (int first = 0; first < low.rank; first += LOW_RANKS, t++) {
        const F16L scales = F16L::load_bf16(b);
        b += 32;
        I16 dots[ROWS];
        for (auto& dot : dots) dot = I16::zero();
        for (int i = 0; i < least(low.rank - first, LOW_RANKS) / 2; i++, b += 32) {
            const I16 codes = I16::load_i8_halves(b);
            for (int row = 0; row < ROWS; row++) dots[row] = dots[row] + codes.dot2(I16::set1(t[row * stride].pairs[i]));
        }
        for (int row = 0; row < ROWS; row++) sums[row] = F16L::from(dots[row]).fma(scales * F16L::set1(t[row * stride].scale), sums[row]);
    }
}

// A pass's additions to the products of one stack: A x, computed already, and its layout for B.
struct Additions {
    const AdapterArgs* adapters;
    const int32_t* mixes;  // of each row
    const Stack& stack;
    int groups = 0;
    const LowCodes* products = nullptr;  // A x (R, parts, groups); null: nothing is added
    const float* sums = nullptr;         // B (A x) (tiles of all parts, R, 16) where rows have several mixes, or null
    int rows = 0;                        // of `products`

    size_t at_sums(int row, int part, int tile) const {
        for (int i = 0; i < part; i++) tile += (stack.parts[i].rows + 15) / 16;
        return ((size_t)tile * rows + row) * 16;
    }

    // Number of rows to compute together from a row on: 4 of one mix, or 1.
    int together(int row, int rows) const {
        if (rows < 4) return 1;
        for (int i = 1; i < 4; i++)
            if (mixes[row + i] != mixes[row]) return 1;
        return 4;
    }

    void multiply(const LowRank& low, int row, int count, int part, int tile, F16L* out) const {
        const LowCodes* t = products + ((size_t)row * stack.count + part) * groups;
        if (count == 4) low_rank_tile<4>(low, tile, t, stack.count * groups, out);
        else low_rank_tile<1>(low, tile, t, stack.count * groups, out);
    }

    // Adds to one tile of some rows' products with a part; rows are `step` tiles apart. `of` may be a piece of the
    // part, from a tile on.
    void to(F16L* y, int step, int first_row, int rows, int part, const Matrix& of, int tile) const {
        for (int at = 0, count; at < rows; at += count) {
            const int row = first_row + at;
            count = together(row, rows - at);
            const LowRank* low = low_rank_of(*adapters, mixes[row], of);
            if (!low) continue;
            const float* there = sums ? sums + at_sums(row, part, tile) : nullptr;
            F16L more[4];
            if (!sums) multiply(*low, row, count, part, tile, more);
            for (int i = 0; i < count; i++) {
                F16L& product = y[(size_t)(at + i) * step];
                if (low->factors) product = product * F16L::load(low->factors + 16 * tile);
                product = product + (sums ? F16L::load(there + 16 * i) : more[i]);
            }
        }
    }

    // Adds to rows in `out`, `stride` floats apart.
    void to_rows(float* out, size_t stride, int first_row, int rows, int part, const Matrix& m, int first_tile, int tiles) const {
        for (int at = 0, count; at < rows; at += count) {
            const int row = first_row + at;
            count = together(row, rows - at);
            if (!low_rank_of(*adapters, mixes[row], m)) continue;
            for (int tile = first_tile; tile < first_tile + tiles; tile++) {
                float* from = out + row * stride + 16 * tile;
                const int width = m.rows - 16 * tile;
                F16L y[4];
                for (int i = 0; i < count; i++) y[i] = load_some(from + i * stride, width);
                to(y, 1, row, count, part, m, tile);
                for (int i = 0; i < count; i++) store_some(y[i], width, from + i * stride);
            }
        }
    }
};

constexpr int PIECE_RANKS = 8, LOW_TILES = 64, LOW_ROWS = 64;  // of a task of A x, of B (A x); most rows that have `sums`

// Computes A x of every row for a stack with inputs `acts`.
inline Additions additions(Context& context, const Stack& stack, const Acts& acts) {
    Additions found = {&context.adapters, acts.mixes, stack};
    if (!acts.mixes || !adapted(context, stack)) return found;
    const int rows = acts.rows, columns = stack.cols, parts = stack.count;
    auto of = [&](int row, int part) { return low_rank_of(context.adapters, acts.mixes[row], stack.parts[part]); };
    bool several = false;
    for (int row = 0; row < rows; row++) {
        several |= acts.mixes[row] != acts.mixes[0];
        for (int part = 0; part < parts; part++)
            if (const LowRank* low = of(row, part)) found.groups = most(found.groups, low_groups(low->rank));
    }
    const float* x = acts.x;
    const int stride = found.groups * LOW_RANKS, numbers = parts * stride;
    float* t = scratch<float>(context.low, (size_t)rows * (numbers + (stack.hadamard ? columns : 0)));
    if (stack.hadamard) {  // the rotation is its own inverse
        float* plain = t + (size_t)rows * numbers;
        parallel(context, rows, [&](int row) {
            copy_floats(x + (size_t)row * columns, columns, plain + (size_t)row * columns);
            block_hadamard(plain + (size_t)row * columns, columns, stack.hadamard);
        });
        x = plain;
    }
    const int pieces = stride / PIECE_RANKS, blocks = (rows + 3) / 4;
    parallel(context, blocks * parts * pieces, [&](int task) {
        const int piece = task % pieces, part = task / pieces % parts, block = task / pieces / parts * 4;
        for (int row = block, count; row < least(rows, block + 4); row += count) {
            count = found.together(row, least(rows, block + 4) - row);
            const LowRank* low = of(row, part);
            if (!low) continue;
            const int first = piece * PIECE_RANKS, last = least(low->rank, first + PIECE_RANKS);
            const float* from = x + (size_t)row * columns;
            float* to = t + (size_t)row * numbers + part * stride;
            if (count == 4) low_rank_rows<4>(*low, first, last, from, columns, to, numbers);
            else low_rank_rows<1>(*low, first, last, from, columns, to, numbers);
        }
    });
    LowCodes* products = scratch<LowCodes>(context.low_codes, (size_t)rows * parts * found.groups);
    parallel(context, (rows + LOW_ROWS - 1) / LOW_ROWS, [&](int task) {
        for (int index = task * LOW_ROWS * parts; index < least(rows, (task + 1) * LOW_ROWS) * parts; index++) {
            const LowRank* low = of(index / parts, index % parts);
            for (int group = 0; low && group < low_groups(low->rank); group++)
                products[index * found.groups + group] =
                    low_codes(t + (size_t)index * stride + group * LOW_RANKS, least(LOW_RANKS, low->rank - group * LOW_RANKS));
        }
    });
    found.products = products;
    if (!several || rows > LOW_ROWS) return found;
    // Reads each mix's B in long pieces: tile by tile in turn, reading takes three times as long.
    struct Piece { int part, tile, tiles; };
    Piece* list = scratch<Piece>(context.tasks, parts + stack.rows / (16 * LOW_TILES) + 1);
    int count = 0, all = 0;
    for (int part = 0; part < parts; part++) {
        const int tiles = (stack.parts[part].rows + 15) / 16;
        for (int tile = 0; tile < tiles; tile += LOW_TILES) list[count++] = {part, tile, least(LOW_TILES, tiles - tile)};
        all += tiles;
    }
    found.rows = rows;
    float* sums = scratch<float>(context.low_sums, (size_t)rows * 16 * all);
    parallel(context, count * rows, [&](int task) {
        const Piece& piece = list[task % count];
        const int row = task / count;
        const LowRank* low = of(row, piece.part);
        for (int tile = piece.tile; low && tile < piece.tile + piece.tiles; tile++) {
            const size_t bytes = low_tile_bytes(low->rank);
            for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(low->b + tile * bytes + PREFETCH + at);
            F16L sum;
            found.multiply(*low, row, 1, piece.part, tile, &sum);
            sum.store(sums + found.at_sums(row, piece.part, tile));
        }
    });
    found.sums = sums;
    return found;
}

// Quantizes A and B for the functions above: to nearest, ties to even.
inline void pack_low_rank(const LowRankPack& from, const LowRank& to) {
    const int columns = from.columns, groups = (columns + LOW_COLUMNS - 1) / LOW_COLUMNS, rank = from.rank;
    auto inverse_of = [](float scale) { return F16L::set1(scale > 1e-30f ? 1.f / scale : 0.f); };
    for (int at = 0; at < to.rank * groups; at++) {
        const int k = at / groups, column = at % groups * LOW_COLUMNS;
        const float* a = from.a + (size_t)least(k, rank - 1) * columns;
        F16L values[LOW_COLUMNS / 16], peaks = F16L::zero();
        for (int i = 0; i < LOW_COLUMNS / 16; i++) {
            values[i] = load_some(a + least(column + 16 * i, columns), k < rank ? most(0, columns - column - 16 * i) : 0);
            peaks = peaks.max(values[i]).max(negated(values[i]));
        }
        const float scale = to.a_scales[at] = peaks.highest() / 127.f;
        for (int i = 0; i < LOW_COLUMNS / 16; i++) (values[i] * inverse_of(scale)).rounded().store_i8(to.a + (size_t)at * LOW_COLUMNS + 16 * i);
    }
    uint8_t* b = to.b;
    for (int tile = 0; tile * 16 < from.rows; tile++)
        for (int first = 0; first < to.rank; first += LOW_RANKS) {
            const int count = least(LOW_RANKS, to.rank - first);
            int8_t* codes = (int8_t*)b + 32;
            for (int i = 0; i < 16; i++) {
                const int row = 16 * tile + i;
                const bool there = row < from.rows;
                const F16L values = load_some(from.b + (there ? (size_t)row * rank + first : 0), there ? least(count, rank - first) : 0);
                float scale = values.max(negated(values)).highest() / 127.f;
                uint32_t bits;
                __builtin_memcpy(&bits, &scale, 4);
                bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
                __builtin_memcpy(&scale, &bits, 4);
                ((uint16_t*)b)[i] = (uint16_t)(bits >> 16);
                int8_t rounded[16];
                (values * inverse_of(scale)).rounded().store_i8(rounded);
                for (int k = 0; k < count; k += 2) __builtin_memcpy(codes + k * 16 + 2 * i, rounded + k, 2);
            }
            b += 32 + 16 * count;
        }
}

}  // namespace
