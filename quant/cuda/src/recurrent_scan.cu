// Scans prepared rows (recurrent_rows.cu) in order: each decays the state, adds to it, and reads it. A
// warp keeps eight columns of a head's state in registers, each eight lanes a quarter of the keys. A
// tree's rows start from the state before the tree, which is the state written.
//
//   KIND     DELTA or SSM
//   KEY      elements of a key
//   EACH     1: a decay per element of the key
#include "recurrent.cuh"

constexpr int STEPS = (KEY + 15) / 16, PADDED = 16 * STEPS, COLUMNS = 8;

struct Part {
    int head, group, column, slice;  // the lane's
    bool live;                       // the column is not padding
    float s[4 * STEPS];              // keys 16 j + 4 slice + e
};

FN float* place_in(const Recurrent& args, const Part& part, float* states) {
    const i64 blocks = (args.value_size + 15) / 16;
    return states + args.state_at + ((part.head * blocks + part.column / 16) * KEY) * 16 + part.column % 16;
}

FN void load(const Recurrent& args, Part& part, const float* states) {
    const float* from = place_in(args, part, (float*)states);
#pragma unroll
    for (int i = 0; i < 4 * STEPS; i++) {
        const int k = i / 4 * 16 + part.slice * 4 + i % 4;
        part.s[i] = k < KEY ? from[16 * k] : 0;
    }
}

FN void save(const Recurrent& args, const Part& part, float* states) {
    float* to = place_in(args, part, states);
#pragma unroll
    for (int i = 0; i < 4 * STEPS; i++) {
        const int k = i / 4 * 16 + part.slice * 4 + i % 4;
        if (k < KEY) to[16 * k] = part.s[i];
    }
}

// The product of state and x over the keys, in a fixed order.
FN float product(const Part& part, const float* x) {
    float sums[4] = {0, 0, 0, 0};
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        const float4 some = *(const float4*)(x + 16 * j + 4 * part.slice);
        sums[0] = fused(part.s[4 * j], some.x, sums[0]);
        sums[1] = fused(part.s[4 * j + 1], some.y, sums[1]);
        sums[2] = fused(part.s[4 * j + 2], some.z, sums[2]);
        sums[3] = fused(part.s[4 * j + 3], some.w, sums[3]);
    }
    float sum = plus(plus(sums[0], sums[1]), plus(sums[2], sums[3]));
    sum = plus(sum, shuffle_xor(sum, 8));
    return plus(sum, shuffle_xor(sum, 16));
}

// Adds row i to the state; with SEEN, its output goes to `seen`.
template <bool SEEN>
FN void add(const Rows& rows, Part& part, int i) {
    const Recurrent& args = rows.args;
    const float* line = args.scratch + (rows.own.scratch + i) * args.stride;
    const float *q = line + part.group * PADDED, *k = q + args.key_heads * PADDED;
    const float* decays = line + 2 * args.key_heads * PADDED;
    const float* strengths = decays + args.heads * (EACH ? PADDED : 1);
    const float v = part.live ? strengths[args.heads + part.head * args.value_size + part.column] : 0;
    decays += part.head * (EACH ? PADDED : 1);
    if constexpr (EACH) {
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            const float4 some = *(const float4*)(decays + 16 * j + 4 * part.slice);
            part.s[4 * j] = times(part.s[4 * j], some.x), part.s[4 * j + 1] = times(part.s[4 * j + 1], some.y);
            part.s[4 * j + 2] = times(part.s[4 * j + 2], some.z), part.s[4 * j + 3] = times(part.s[4 * j + 3], some.w);
        }
    } else {
        const float decay = *decays;
#pragma unroll
        for (int j = 0; j < 4 * STEPS; j++) part.s[j] = times(part.s[j], decay);
    }
    const float known = KIND == DELTA ? product(part, k) : 0;
    const float d = times(plus(v, -known), strengths[part.head]);
#pragma unroll
    for (int j = 0; j < STEPS; j++) {
        const float4 some = *(const float4*)(k + 16 * j + 4 * part.slice);
        part.s[4 * j] = fused(some.x, d, part.s[4 * j]), part.s[4 * j + 1] = fused(some.y, d, part.s[4 * j + 1]);
        part.s[4 * j + 2] = fused(some.z, d, part.s[4 * j + 2]), part.s[4 * j + 3] = fused(some.w, d, part.s[4 * j + 3]);
    }
    if constexpr (SEEN) {
        float out = product(part, q);
        if (args.skip) out = fused(args.skip[part.head], v, out);
        const i64 row = rows.own.first + i - rows.waiting;
        if (part.live && part.slice == 0) args.seen[(row * args.heads + part.head) * args.value_size + part.column] = out;
    }
}

extern "C" __global__ void __launch_bounds__(128) recurrent_scan(Recurrent args) {
    const int lane = threadIdx.x % 32, parts = (args.value_size + COLUMNS - 1) / COLUMNS;
    const int task = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (task >= args.heads * parts) return;
    const Rows rows = rows_of(args, blockIdx.y);
    const int fold = (int)(rows.own.fold - rows.position);
    Part part;
    part.head = task / parts, part.column = task % parts * COLUMNS + lane % COLUMNS, part.slice = lane / COLUMNS;
    part.group = args.tiled ? part.head % args.key_heads : part.head / (args.heads / args.key_heads);
    part.live = part.column < args.value_size;
    load(args, part, rows.own.from);
    if (fold == 0 && rows.own.to != rows.own.from) save(args, part, rows.own.to);
    for (int i = 0; i < rows.linear; i++) {
        if (i < rows.waiting) add<false>(rows, part, i);
        else add<true>(rows, part, i);
        if (i + 1 == fold) save(args, part, rows.own.to);
    }
    // A tree's rows: if the next row's parent is not the last row added, its path is added again.
    const int root = rows.linear - 1;
    for (int i = rows.waiting > rows.linear ? rows.waiting : rows.linear, at = root; i < rows.count; i++) {
        if (!wanted(rows, i)) continue;
        const int before = parent_of(rows, i);
        if (before != at) {
            load(args, part, rows.own.to);
            at = root;
            while (at != before) {
                int next = before;
                while (parent_of(rows, next) != at) next = parent_of(rows, next);
                add<false>(rows, part, next);
                at = next;
            }
        }
        add<true>(rows, part, i);
        at = i;
    }
}
