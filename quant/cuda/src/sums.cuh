// The sums of every product with packed weights, for 1 to 64 rows. A warp takes 32 or 64 weight rows and some
// turns (column ranges); each lane loads 16 bytes per tile, which are its operands of the integer product:
// nothing passes through shared memory, and one row costs as much as four. A row's bits do not depend on
// other rows: a step's products are integers, scaled sums are added in column order, and the assignment of
// turns to chains depends on the number of columns alone. linear_many.cu adds in the same order.
#pragma once
#include "formats.cuh"
#include "records.cuh"

// How many activation rows a warp multiplies at once. ONE: a lane ends with the result of one weight row. FEW
// (up to 4): four weight rows by one activation row. MANY: 8 NT, of which a lane has two out of every 8.
enum Width { ONE, FEW, MANY };

// Contiguous activation rows. Offsets in bytes from a lane's first row: `numbers` of row 8 n, `scales` of row 8 n + c.
struct InOrder {
    int stride;

    FN InOrder begin(const InOrder& rows, int, int) { return rows; }
    FN int first(const InOrder& rows, int row) { return row * rows.stride; }
    FN int numbers(const InOrder& rows, int n) { return 8 * n * rows.stride; }
    FN int scales(const InOrder& rows, int n, int c) { return (8 * n + c) * rows.stride; }
};

// Scattered rows, at offsets listed in shared memory, which costs fewer registers.
struct Gathered {
    const int *of_numbers, *of_scales;  // offsets from a lane's first row

    FN Gathered begin(const Gathered& rows, int numbers, int scales) {
        return Gathered{rows.of_numbers + numbers, rows.of_scales + scales};
    }
    FN int first(const Gathered&, int) { return 0; }
    FN int numbers(const Gathered& rows, int n) { return rows.of_numbers[8 * n]; }
    FN int scales(const Gathered& rows, int n, int c) { return rows.of_scales[8 * n + c]; }
};

template <class F, int PAIRS, Width WIDTH, int NT = 1, class Rows = InOrder>
struct Sums {
    static constexpr int ROWS = WIDTH == ONE ? 1 : 4, COLUMNS = WIDTH == MANY ? 2 : 1;
    using Codes = typename F::Codes;
    using Scales = typename F::template Scales<ROWS>;
    static constexpr int TURN = F::SPAN > 4 ? F::SPAN : 4;  // steps of 32 columns
    static constexpr bool HALVES = Scales::HALVES;
    // If a lane needs one column only, the product's other column is free for the second half.
    static constexpr int SETS = HALVES && COLUMNS == 2 ? 2 : 1;
    // Minima of halves take another product with the same activations.
    static constexpr bool MINIMA = Scales::MINIMUM && HALVES;

    float of[PAIRS][ROWS][NT][COLUMNS];
    const u8 *numbers, *scales;  // of the first row that a lane loads; of the first row of its results
    Rows rows;
    u32 part[2];                    // masks: the half of a step that a column is multiplied with

    // `records` and `rows` locate the activation rows, padded to a multiple of 8.
    FN void begin(Sums& s, const u8* records, const Rows& rows, const Lane& lane, int chain) {
        const bool second = COLUMNS == 1 && (lane.g & 1);
        s.part[0] = Codes::MIXED ? 0x00FF00FFu : 0xFFFFFFFFu, s.part[1] = Codes::MIXED ? 0x00FF00FFu : 0;
        if (second) s.part[0] = ~s.part[0], s.part[1] = ~s.part[1];
        records += chain * (TURN / 2) * RECORD;
        const int number = WIDTH == ONE ? 0 : WIDTH == FEW ? lane.g / 2 : lane.g, scale = WIDTH == ONE ? 0 : WIDTH == FEW ? lane.t : 2 * lane.t;
        s.rows = rows.begin(rows, number, scale);
        s.numbers = records + rows.first(rows, number) + lane.t * 16;
        s.scales = records + rows.first(rows, scale) + SCALES;
#pragma unroll
        for (int i = 0; i < PAIRS * ROWS * NT * COLUMNS; i++) (&s.of[0][0][0][0])[i] = 0;
    }

    // Adds every `chains`-th turn from `chain` on. `tile` is the lane's first tile; the next pair's is
    // `beside` bytes after it.
    FN void add(Sums& s, const u8* tile, i64 beside, int steps, const Lane& lane, int chain, int chains) {
        constexpr int SPANS = TURN / F::SPAN;
        const u8* at = tile + (i64)chain * SPANS * F::BYTES;
        const int spans = steps / F::SPAN, ahead = chains * SPANS;
        int left = spans - chain * SPANS;
        for (; left >= SPANS; left -= ahead) {
            run<SPANS>(s, at, beside, 0, lane);
            at += (i64)ahead * F::BYTES;
            const int skip = chains * (TURN / 2) * RECORD;
            s.numbers += skip, s.scales += skip;
        }
        if constexpr (SPANS > 1)
            for (int i = 0; i < left; i++) run<1>(s, at + i * F::BYTES, beside, i * F::SPAN, lane);
    }

    // Adds SPANS spans; the first begins `first` steps into the turn.
    template <int SPANS>
    FN void run(Sums& s, const u8* tile, i64 beside, int first, const Lane& lane) {
        constexpr int STEPS = SPANS * F::SPAN;
        Codes codes[STEPS][PAIRS];
        Scales scales[SPANS][PAIRS];
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
#pragma unroll
            for (int i = 0; i < SPANS; i++) {
                const u8* at = tile + p * beside + i * F::BYTES;
                Scales::load(scales[i][p], at, lane);
#pragma unroll
                for (int j = 0; j < F::SPAN; j++) Codes::load(codes[i * F::SPAN + j][p], at + F::HEAD + j * F::STEP, lane);
            }
#pragma unroll
        for (int i = 0; i < SPANS; i++)
#pragma unroll
            for (int j = 0; j < F::SPAN; j++) step<STEPS % 2 == 0>(s, codes[i * F::SPAN + j], scales[i], j, first + i * F::SPAN + j, lane);
    }

    FN float2 scale_of(const Sums& s, int n, int c, int step) {
        return *(const float2*)(s.scales + s.rows.scales(s.rows, n, c) + (step >> 1) * RECORD + (step & 1) * 8);
    }

    // Adds one step. EVEN: a turn has whole records.
    template <bool EVEN>
    FN void step(Sums& s, const Codes (&codes)[PAIRS], const Scales (&scales)[PAIRS], int j, int step,
                 const Lane& lane) {
        u32 a[PAIRS][Codes::PLANES][4][2];
#pragma unroll
        for (int p = 0; p < PAIRS; p++)
#pragma unroll
            for (int plane = 0; plane < Codes::PLANES; plane++)
#pragma unroll
                for (int r = 0; r < 4; r++)
                    Codes::operands(codes[p], lane, r, plane, a[p][plane][r][0], a[p][plane][r][1]);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            if constexpr (NT > 2) fence();
            u32 b[Codes::PLANES][SETS][2];
#pragma unroll
            for (int plane = 0; plane < Codes::PLANES; plane++) right<EVEN>(s, b[plane], plane, n, step);
            float2 scale[COLUMNS];
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) scale[c] = scale_of(s, n, c, step);
#pragma unroll
            for (int p = 0; p < PAIRS; p++) {
                i32 sums[SETS][2][4];
#pragma unroll
                for (int set = 0; set < SETS; set++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        i32(&c)[4] = sums[set][h];
                        c[0] = c[1] = c[2] = c[3] = 0;
#pragma unroll
                        for (int plane = 0; plane < Codes::PLANES; plane++) {
                            const u32(&of)[4][2] = a[p][plane];
                            multiply<Codes::SIGNED>(c, of[2 * h][0], of[2 * h + 1][0], of[2 * h][1], of[2 * h + 1][1],
                                                    b[plane][set][0], b[plane][set][1]);
                        }
                    }
                i32 less[2][4] = {};
                if constexpr (MINIMA)
#pragma unroll
                    for (int h = 0; h < 2; h++)
#pragma unroll
                        for (int set = 0; set < SETS; set++) {
                            u32 of[2][2];
                            for (int r = 0; r < 2; r++)
                                for (int half = 0; half < 2; half++) of[r][half] = Scales::minima(scales[p], 2 * h + r, j, half);
                            multiply<Codes::SIGNED>(less[h], of[0][0], of[1][0], of[0][1], of[1][1], b[0][set][0], b[0][set][1]);
                        }
                if constexpr (WIDTH == ONE) {  // all columns are equal: lane t keeps row t
                    const bool odd = lane.t & 1, last = lane.t & 2;
                    i32 kept[2] = {0, 0};
#pragma unroll
                    for (int half = 0; half < (HALVES ? 2 : 1); half++) {
                        const i32 front = odd ? sums[0][0][2 + half] : sums[0][0][half];
                        const i32 back = odd ? sums[0][1][2 + half] : sums[0][1][half];
                        kept[half] = last ? back : front;
                    }
                    const i32 front = odd ? less[0][2] + less[0][3] : less[0][0] + less[0][1];
                    const i32 back = odd ? less[1][2] + less[1][3] : less[1][0] + less[1][1];
                    apply(s.of[p][0][n][0], scales[p], 0, j, kept[0], kept[1], last ? back : front, scale[0]);
                } else {
#pragma unroll
                    for (int r = 0; r < 4; r++)
#pragma unroll
                        for (int c = 0; c < COLUMNS; c++) {
                            const i32(&found)[4] = sums[0][r / 2], (&other)[4] = sums[SETS - 1][r / 2];
                            const i32 first = found[r % 2 * 2 + (COLUMNS == 2 ? c : 0)];
                            const i32 second = COLUMNS == 2 ? other[r % 2 * 2 + c] : found[r % 2 * 2 + 1];
                            const i32(&low)[4] = less[r / 2];
                            const i32 least = COLUMNS == 2 ? low[r % 2 * 2 + c] : low[r % 2 * 2] + low[r % 2 * 2 + 1];
                            apply(s.of[p][r][n][c], scales[p], r, j, first, second, least, scale[c]);
                        }
                }
            }
        }
    }

    // A step's activation operand; one per half step if halves have their own scales.
    template <bool EVEN>
    FN void right(const Sums& s, u32 (&b)[SETS][2], int plane, int n, int step) {
        const u8* at = s.numbers + s.rows.numbers(s.rows, n) + (step >> 1) * RECORD;
        if constexpr (Codes::PLANES == 2) at += plane == Codes::NEGATIVE ? NEGATIVES : 0;
        uint2 v;
        if constexpr (EVEN) {  // one load for both steps of a record: the compiler merges the two
            const uint4 both = *(const uint4*)at;
            v = step & 1 ? make_uint2(both.z, both.w) : make_uint2(both.x, both.y);
        } else {
            v = *(const uint2*)(at + (step & 1) * 8);
        }
        if constexpr (Codes::MIXED) v = make_uint2(pick(v.x, v.y, 0x5140), pick(v.x, v.y, 0x7362));
        b[0][0] = v.x, b[0][1] = v.y;
        if constexpr (HALVES) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if constexpr (COLUMNS == 2) b[SETS - 1][i] = b[0][i] & ~s.part[i];
                b[0][i] &= s.part[i];
            }
        }
    }

    // Adds one result of a step: `first` and `second` are the sums of its halves (or `first` of the whole),
    // `less` that of the minima.
    FN void apply(float& sum, const Scales& scales, int row, int j, i32 first, i32 second, i32 less, float2 x) {
        if constexpr (Scales::TWO_LEVEL && HALVES) {
            const i32 whole = first * Scales::scale(scales, row, j, 0) + second * Scales::scale(scales, row, j, 1);
            sum = fused(times(from_int(whole), x.x), Scales::outer(scales, row), sum);
            if constexpr (MINIMA) sum = fused(times(from_int(less), x.x), Scales::outer_minimum(scales, row), sum);
        } else if constexpr (Scales::TWO_LEVEL) {
            sum = fused(times(from_int(first), x.x), scale_in(scales, row, j, 0), sum);
            if constexpr (Scales::MINIMUM) sum = fused(minimum_in(scales, row, j), x.y, sum);
        } else if constexpr (HALVES) {
            const float both = fused(from_int(second), Scales::of(scales, row, 1),
                                     times(from_int(first), Scales::of(scales, row, 0)));
            sum = fused(both, x.x, sum);
        } else {
            float value;
            if constexpr (Codes::ZERO)
                value = fused(from_int(first), x.x, times(x.y, -(float)Codes::ZERO));
            else
                value = times(from_int(first), x.x);
            sum = fused(value, Scales::of(scales, row, 0), sum);
            if constexpr (Scales::MINIMUM) sum = fused(Scales::minimum_of(scales, row), x.y, sum);
        }
    }
};
