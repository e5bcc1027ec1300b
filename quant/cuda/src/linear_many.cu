// Multiplies many rows by one matrix. A block takes 64 weight rows and 128 rows of records, 64 columns at
// a time: half of the warps unpack the next weights to bytes in shared memory while the others multiply,
// each 32 weight rows by 32 rows of records. Of up to 64 rows, each warp takes 16, and all unpack: 128
// columns at a time. Sums are in the order of sums.cuh, so bits equal those of linear.cu. Compiled for
//
//   FORMAT   see formats.cuh
//   NARROW   1: of up to 64 rows
//   GATE OUT FINE   see linear.cu
#include "linear.cuh"

using Weights = FORMAT;
using Codes = Weights::Codes;
using Scales = Weights::Scales<1>;
constexpr int PAIRS = 2, SIDES = 4, STEPS = NARROW ? 4 : 2, N = NARROW ? 2 : Scales::HALVES ? 3 : 4, ROWS = 8 * N * SIDES;
constexpr int COPIERS = STEPS;  // threads that copy a row's records
constexpr int SPAN = Weights::SPAN, TURN = SPAN > 4 ? SPAN : 4;
constexpr bool HALVES = Scales::HALVES, TWO_LEVEL = Scales::TWO_LEVEL, MINIMUM = Scales::MINIMUM, MINIMA = MINIMUM && HALVES;

// A weight row's factors in a step.
enum { SCALE, SECOND, OUTER, LEAST_OUTER, LEAST };
constexpr int FACTORS = MINIMA ? 5 : HALVES ? TWO_LEVEL ? 3 : 2 : MINIMUM ? 2 : 1;
constexpr int MINIMUM_AT = 1;  // in formats without halves

// An integer product starts from these bits; its result, read as a float, is 3 * 2^22 plus the sum.
constexpr i32 MAGIC_BITS = 0x4B400000;
constexpr float MAGIC = 12582912;

struct Step {
    uint4 codes[PAIRS][2][32];  // a lane's operands: rows 0 and 1 of its four, then 2 and 3
    float factors[PAIRS][FACTORS][32];
    uint2 numbers[ROWS][4];
    float2 scales[ROWS];
};

// A block's position in the order of sums.
struct At {
    int step, chain;

    FN void advance(At& at, const Linear& args) {
        at.step += STEPS;
        if (at.step % TURN == 0) at.step += (args.chains - 1) * TURN;
        if (at.step >= args.steps) at.step = ++at.chain * TURN;
    }
};

// Both planes of codes as one, in column order.
template <class Codes>
FN void operands(const Codes& codes, const Lane& lane, int row, u32& a, u32& b) {
    Codes::operands(codes, lane, row, 0, a, b);
    if constexpr (Codes::PLANES == 2) {
        u32 c, d;
        Codes::operands(codes, lane, row, 1, c, d);
        constexpr u32 tops = 0x80808080u;  // unset in every byte, so bytes subtract without borrowing from one another
        a = Codes::NEGATIVE ? a | (tops - c) ^ tops : c | (tops - a) ^ tops;
        b = Codes::NEGATIVE ? b | (tops - d) ^ tops : d | (tops - b) ^ tops;
    }
    if constexpr (Codes::MIXED) {
        const u32 low = pick(a, b, 0x6420);
        b = pick(a, b, 0x7531), a = low;
    }
}

// The factors of a lane's row in step `step` of a span.
template <class Scales, int J = 0>
FN void write_factors(float (&to)[FACTORS][32], const u8* head, const Lane& lane, int lane_of, int step) {
    if constexpr (J + 1 < SPAN)
        if (step != J) return write_factors<Scales, J + 1>(to, head, lane, lane_of, step);
    Scales scales;
    Scales::load(scales, head, lane);
    if constexpr (TWO_LEVEL && HALVES) {
        to[SCALE][lane_of] = from_int(Scales::scale(scales, 0, J, 0));
        to[SECOND][lane_of] = from_int(Scales::scale(scales, 0, J, 1));
        to[OUTER][lane_of] = Scales::outer(scales, 0);
        if constexpr (MINIMA) {
            to[LEAST_OUTER][lane_of] = Scales::outer_minimum(scales, 0);
            to[LEAST][lane_of] = as_float(Scales::minimum(scales, 0, J, 0) | Scales::minimum(scales, 0, J, 1) << 8);
        }
    } else if constexpr (HALVES) {
        to[SCALE][lane_of] = Scales::of(scales, 0, 0);
        to[SECOND][lane_of] = Scales::of(scales, 0, 1);
    } else if constexpr (TWO_LEVEL) {
        to[SCALE][lane_of] = scale_in(scales, 0, J, 0);
        if constexpr (MINIMUM) to[MINIMUM_AT][lane_of] = minimum_in(scales, 0, J);
    } else {
        to[SCALE][lane_of] = Scales::of(scales, 0, 0);
        if constexpr (MINIMUM) to[MINIMUM_AT][lane_of] = Scales::minimum_of(scales, 0);
    }
}

FN void begin(i32 (&c)[4]) { c[0] = c[1] = c[2] = c[3] = MAGIC_BITS; }

// A lane's sums: four weight rows by two of every eight rows of records.
using Results = float[4][N][2];

// Multiplies a warp's step by the operands, with the factors of the lane's four rows.
template <class Codes>
FN void multiply_step(Results& sums, const Step& step, int pair, int side, int lane) {
    const int g = lane / 4, t = lane % 4;
    const uint4* a_of = &step.codes[pair][0][lane];
    const uint4 codes[2] = {a_of[0], a_of[32]};
    const float4* four_of = (const float4*)&step.factors[pair][0][4 * g];
    const uint2* b_of = &step.numbers[side * 8 * N + g][t];
    const float4* scale_of = (const float4*)&step.scales[side * 8 * N + 2 * t];
    float factors[FACTORS][4];
#pragma unroll
    for (int f = 0; f < FACTORS; f++) {
        const float4 four = four_of[8 * f];
        factors[f][0] = four.x, factors[f][1] = four.y, factors[f][2] = four.z, factors[f][3] = four.w;
    }
    float less[4];  // minus the magic number times the scales
    if constexpr (HALVES)
#pragma unroll
        for (int r = 0; r < 4; r++) less[r] = times(factors[TWO_LEVEL ? SECOND : SCALE][r], -MAGIC);
#pragma unroll
    for (int n = 0; n < N; n++) {
        const uint2 b = b_of[8 * 4 * n];
        const float4 x = scale_of[4 * n];
        const float scale[2] = {x.x, x.z}, sum[2] = {x.y, x.w};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const uint4& a = codes[h];
            i32 first[4], second[4], least[4];
            begin(first);
            if constexpr (HALVES) {
                begin(second);
                multiply<Codes::SIGNED>(first, a.x, a.y, b.x);
                multiply<Codes::SIGNED>(second, a.z, a.w, b.y);
            } else {
                multiply<Codes::SIGNED>(first, a.x, a.y, a.z, a.w, b.x, b.y);
            }
            if constexpr (MINIMA) {
                const u32 one = as_bits(factors[LEAST][2 * h]), other = as_bits(factors[LEAST][2 * h + 1]);
                begin(least);
                multiply<Codes::SIGNED>(least, pick(one, 0, 0), pick(other, 0, 0), pick(one, 0, 0x1111), pick(other, 0, 0x1111), b.x, b.y);
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int r = 2 * h + i / 2, c = i % 2;
                float& to = sums[r][n][c];
                const float magic = times(scale[c], -MAGIC), found = as_float(first[i]);  // exact in 22 bits
                if constexpr (TWO_LEVEL && HALVES) {  // integers below 2^24
                    const float part = fused(as_float(second[i]), factors[SECOND][r], less[r]);
                    const float whole = fused(plus(found, -MAGIC), factors[SCALE][r], part);
                    to = fused(times(whole, scale[c]), factors[OUTER][r], to);
                    if constexpr (MINIMA) to = fused(fused(as_float(least[i]), scale[c], magic), factors[LEAST_OUTER][r], to);
                } else if constexpr (HALVES) {
                    const float part = fused(found, factors[SCALE][r], less[r]);
                    to = fused(fused(plus(as_float(second[i]), -MAGIC), factors[SECOND][r], part), scale[c], to);
                } else {
                    float value;
                    if constexpr (!TWO_LEVEL && Codes::ZERO)
                        value = fused(plus(found, -MAGIC), scale[c], times(sum[c], -(float)Codes::ZERO));
                    else
                        value = fused(found, scale[c], magic);
                    to = fused(value, factors[SCALE][r], to);
                    if constexpr (MINIMUM) to = fused(factors[MINIMUM_AT][r], sum[c], to);
                }
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) linear_many(Linear args) {
    __shared__ Step steps[2][STEPS];
    const int warp = threadIdx.x / 32, lane_of = threadIdx.x % 32, pair = warp % PAIRS, side = warp / PAIRS;
    const Lane lane = Lane::make(lane_of);
    // Consecutive blocks share weights, as many as have their records in the GPU's cache.
    const int rows_from = (blockIdx.z * gridDim.x + blockIdx.x) * ROWS;
    if (rows_from >= args.m) return;

    // Pairs of tiles as in linear.cu.
    const int half = GATE ? args.tiles / 2 : args.tiles;
    const int wanted = GATE ? blockIdx.y * PAIRS + pair : 2 * (blockIdx.y * PAIRS + pair) + lane.g / 4;
    // Beyond the matrix, a warp recomputes its last tile.
    const int tile = (wanted < half ? wanted : half - 1) + (GATE ? lane.g / 4 * half : 0);
    const auto span = [&](u32 step) { return args.w + tile * args.tile_bytes + (i64)(step / SPAN) * Weights::BYTES; };
    const int row = rows_from + threadIdx.x / COPIERS, records = (row < args.m ? row : args.m - 1) * args.x_stride;
    const int turn = side - (SIDES - STEPS);  // the step that the warp unpacks; those that may have no rows come first

    const auto fetch = [&](Step (&to)[STEPS], u32 step) {  // two threads copy a record
        const int row = threadIdx.x / COPIERS, t = threadIdx.x % 2, first = threadIdx.x % COPIERS - t;
        const u8* at = args.x + (records + (step + first) / 2 * RECORD);
        if (row < ROWS && (COPIERS == 2 || step + first < args.steps)) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                copy_eight(&to[first].numbers[row][2 * t + i], at + 32 * t + 16 * i);
                copy_eight(&to[first + 1].numbers[row][2 * t + i], at + 32 * t + 16 * i + 8);
            }
            copy_eight(&to[first + t].scales[row], at + SCALES + 8 * t);
        }
        const u32 own = step + turn;
        if (turn >= 0 && own < args.steps) prefetch(span(own) + Weights::HEAD + own % SPAN * Weights::STEP + lane_of % 16 * 32);
    };
    const auto unpack = [&](Step (&to)[STEPS], u32 step) {  // one step of its pair per warp
        const u32 own = step + turn;
        if (turn < 0 || own >= args.steps) return;
        Codes codes;
        Codes::load(codes, span(own) + Weights::HEAD + own % SPAN * Weights::STEP, lane);
        write_factors<Scales>(to[turn].factors[pair], span(own), lane, lane_of, own % SPAN);
#pragma unroll
        for (int h = 0; h < 2; h++) {
            uint4 a;
            operands(codes, lane, 2 * h, a.x, a.z);
            operands(codes, lane, 2 * h + 1, a.y, a.w);
            to[turn].codes[pair][h][lane_of] = a;
        }
    };

    Results sums, total;
#pragma unroll
    for (int i = 0; i < 8 * N; i++) (&sums[0][0][0])[i] = (&total[0][0][0])[i] = 0;
    const int most = rows_from + side * 8 * N < args.m ? STEPS : 0;  // steps at once
    At at = {0, 0};
    fetch(steps[0], 0);
    unpack(steps[0], 0);
    for (int now = 0; at.chain < args.chains; now ^= 1) {
        wait_copies();
        __syncthreads();
        At next = at;
        At::advance(next, args);
        const bool more = next.chain < args.chains;
        if (more) fetch(steps[now ^ 1], next.step);
        const int left = args.steps - at.step;
#pragma unroll 1
        for (int step = 0; step < (left < most ? left : most); step++)
            multiply_step<Codes>(sums, steps[now][step], pair, side, lane_of);
        if (next.chain != at.chain)
#pragma unroll
            for (int i = 0; i < 8 * N; i++) {
                float &sum = (&sums[0][0][0])[i], &to = (&total[0][0][0])[i];
                to = plus(to, sum), sum = 0;
            }
        if (more) unpack(steps[now ^ 1], next.step);
        at = next;
    }

    const Ends ends = {{args.factors, args.factors ? args.factors + half : nullptr}, {args.bias, args.bias ? args.bias + args.rows : nullptr}};
#pragma unroll
    for (int n = 0; n < N; n++)
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < 2 / RECORD_ROWS; c++) {
                const float value = FINE ? plus(total[r][n][0], total[r][n][1]) : total[r][n][c];
                const float beside = GATE ? shuffle_xor(value, 16) : 0;  // the same row of the other tile
                const int m = rows_from + side * 8 * N + 8 * n + 2 * lane.t + c, out = tile * 16 + 4 * lane.q + r;
                if (m >= args.m || tile >= half || out >= args.rows) continue;
                const float result = finished<GATE>(value, beside, Weights::UNIT, ends, tile, out, args.limit);
                store((OUT*)args.y + (i64)(m / RECORD_ROWS) * args.y_stride + out, result);
            }
}
