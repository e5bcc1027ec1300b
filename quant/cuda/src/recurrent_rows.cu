// The row-wise part of a recurrent layer: convolves channels, normalizes keys and queries to unit
// length, computes decays and strengths, and keeps rows for the next pass. A warp takes a row's query
// and key of one head, or one value with its factors.
//
//   KIND   DELTA or SSM
//   TAPS   size of the convolution
//   KEY    elements of a key; prepared keys are zero-padded to a multiple of 16
//   EACH   1: a decay per element of the key
#include "recurrent.cuh"

constexpr int PADDED = (KEY + 15) / 16 * 16, PIECES = (KEY + 31) / 32, BACK = TAPS - 1;
constexpr float KEY_EPS = 1e-6f;  // added when keys and queries are normalized

FN float sum_of_warp(float sum) {
#pragma unroll
    for (int lanes = 16; lanes; lanes >>= 1) sum = plus(sum, shuffle_xor(sum, lanes));
    return sum;
}

// A row, the inputs of its convolution, and where it is kept.
struct Row {
    const float* inputs[TAPS];  // channels
    float* place;
    bool convolved;
};

FN const float* channels_of(const Rows& rows, int i) {
    return i < rows.waiting ? kept(rows, i) : projected(rows, i) + rows.args.channels_at;
}

FN Row read_row(const Rows& rows, int i) {
    Row row;
    int seen[TAPS];
    look_back(rows, i, seen);
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++) row.inputs[tap] = channels_of(rows, seen[tap]);
    row.place = place_of(rows, i, BACK);
    row.convolved = i >= 0 && wanted(rows, i);
    return row;
}

// Convolves a channel; its input is kept.
FN float take(const Recurrent& args, const Row& row, int channel) {
    if (row.place) row.place[channel] = row.inputs[BACK][channel];
    float sum = args.taps_bias ? args.taps_bias[channel] : 0;
#pragma unroll
    for (int tap = 0; tap < TAPS; tap++)
        if (row.inputs[tap]) sum = fused(args.taps[(i64)tap * args.channels + channel], row.inputs[tap][channel], sum);
    return sum * sigmoid(sum);
}

FN void take_key(const Recurrent& args, const Row& row, int channel, float factor, float* to, int lane) {
    float x[PIECES], sum = 0;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int e = lane + 32 * i;
        x[i] = e < KEY ? take(args, row, channel + e) : 0;
        sum = fused(x[i], x[i], sum);
    }
    if constexpr (KIND == DELTA) factor = times(factor, 1.f / sqrtf(plus(sum_of_warp(sum), KEY_EPS)));
    if (!row.convolved) return;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
        const int e = lane + 32 * i;
        if (e < PADDED) to[e] = times(x[i], factor);
    }
}

// Decays and strength of one head of row i, in the form in which they are kept.
FN void take_factors(const Rows& rows, const Row& row, int i, int head, float* decays, float* strength, int lane) {
    const Recurrent& args = rows.args;
    const int heads = args.heads, each = EACH ? KEY : 1;
    const float *from = i < rows.waiting ? kept(rows, i) + args.channels : nullptr, *line = from ? nullptr : projected(rows, i);
    float* place = row.place ? row.place + args.channels : nullptr;
    float own;
    if (from) {
        own = from[heads * each + head];
    } else if constexpr (KIND == DELTA) {
        own = times(args.strength, sigmoid(line[args.strengths_at + head]));
    } else {
        own = softplus(plus(line[args.strengths_at + head], args.decay_bias[head]));
        own = own < args.least_step ? args.least_step : own > args.most_step ? args.most_step : own;
    }
    if (lane == 0) {
        if (place) place[heads * each + head] = own;
        if (row.convolved) *strength = own;
    }
    for (int e = lane; e < (EACH ? PADDED : 1); e += 32) {
        const int at = head * each + e;
        float decay = 1;
        if (e < each) {
            if (from) decay = from[at];
            else if constexpr (KIND == DELTA)
                decay = expf(times(args.decay[head], softplus(plus(line[args.decays_at + at], args.decay_bias[at]))));
            else
                decay = expf(times(args.decay[head], own));
            if (place) place[at] = decay;
        }
        if (row.convolved) decays[e] = decay;
    }
}

extern "C" __global__ void recurrent_rows(Recurrent args) {
    const int unit = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
    const int i = (int)blockIdx.x - BACK, groups = args.key_heads;
    const Rows rows = rows_of(args, blockIdx.z);
    if (unit >= groups + args.heads || i >= rows.count) return;
    if (i < 0 && !place_of(rows, i, BACK)) return;
    const Row row = read_row(rows, i);
    const int keys = groups * KEY, inner = args.heads * args.value_size;
    float* line = args.scratch + (rows.own.scratch + (i < 0 ? 0 : i)) * args.stride;
    if (unit < groups) {
        const int q = KIND == DELTA ? 0 : inner + keys, k = KIND == DELTA ? keys : inner;
        const float factor = KIND == DELTA ? 1.f / sqrtf((float)KEY) : 1.f;
        take_key(args, row, q + unit * KEY, factor, line + unit * PADDED, lane);
        take_key(args, row, k + unit * KEY, 1.f, line + (groups + unit) * PADDED, lane);
        return;
    }
    const int head = unit - groups, size = args.value_size, v = KIND == DELTA ? 2 * keys : 0;
    float* factors = line + 2 * groups * PADDED;
    float* values = factors + (EACH ? args.heads * PADDED : args.heads) + args.heads;
    for (int e = lane; e < size; e += 32) {
        const float value = take(args, row, v + head * size + e);
        if (row.convolved) values[head * size + e] = value;
    }
    take_factors(rows, row, i, head, factors + head * (EACH ? PADDED : 1),
                 factors + (EACH ? args.heads * PADDED : args.heads) + head, lane);
}
