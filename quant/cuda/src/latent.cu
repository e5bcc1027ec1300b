// Latent attention of few new rows to a cache whose rows all heads share: a rotary key, followed by
// the latent, which is both key and value. A block takes sixteen query rows and one run of keys,
// staged in shared memory for both products; attention_join.cu joins the runs.
//   ROPE LATENT   elements of a cached row's rotary key and of its latent
//   RUN_KEYS      keys per run
//   TREE          1: as in attention.cu
// For scores, each warp takes some columns of all keys; for values, some columns of the result. As
// in attention.cu, keys that a row does not see leave its sums unchanged to the bit.
#include "attention.cuh"

constexpr int WARPS = 4, STEP = 32, EIGHTS = STEP / 8, SIZE = ROPE + LATENT;
constexpr int SLICES = ((SIZE + 15) / 16 + WARPS - 1) / WARPS;  // 16-column slices per warp
constexpr int SPANS = (LATENT + 63) / 64, OWN = (SPANS + WARPS - 1) / WARPS;  // 64-column spans; those of a warp
// Pieces of 16 bytes; the padding at the end puts rows of shared memory in different banks.
constexpr int PIECES = (ROPE + 64 * SPANS + 15) / 16 * 2, WIDTH = PIECES + 1;

extern "C" __global__ void __launch_bounds__(128, 1) latent(Attention all) {
    __shared__ uint4 keys[STEP][WIDTH];
    __shared__ float parts[WARPS][16][STEP + 4];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
#if TREE
    __shared__ int slots[RUN];
    int begin;
    const OwnRows own = OwnRows::of_tree(all, blockIdx.y, begin, slots);
    const auto place_of = [&](int token) { return slots[token - begin]; };
#else
    const int begin = blockIdx.x * RUN;
    const OwnRows own = OwnRows::make(all, 16, blockIdx.y);
    const auto place_of = [&](int token) { return token; };
#endif
    const Task args{all, own};
    if (!own.rows || OwnRows::parts(own, begin)) return;
    const int place = own.tile * 16, total = own.total;
    const Rows rows = Rows::make(args, place, g);
    const int last = (place + 15) / all.per < own.rows ? (place + 15) / all.per : own.rows - 1;
    const u8* rows_there = own.blocks[begin / BLOCK] + all.k_at;
    int end = own.tree ? total : lesser(total, own.held + own.first + last + 1);
    if (!TREE && begin >= end) return;  // attention_join.cu skips such runs
    end = end < begin + RUN ? end : begin + RUN;

    uint4 queries[SLICES];
    const u16* q = all.q + Task::in_pass(args, place) * SIZE;
#pragma unroll
    for (int s = 0; s < SLICES; s++) {
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int r = g + i % 2 * 8, e = 16 * (warp * SLICES + s) + 2 * t + i / 2 * 8;
            words[i] = (place + r) / all.per < own.rows && e < SIZE ? *(const u32*)(q + r * SIZE + e) : 0;
        }
        queries[s] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    float sums[OWN][8][4];
#pragma unroll
    for (int i = 0; i < OWN * 32; i++) (&sums[0][0][0])[i] = 0;
    float top[2] = {minus_infinity(), minus_infinity()}, weight[2] = {0, 0};  // weight per lane
    const float scale = times(all.scale, LOG2E);

    for (int key = begin; key < end; key += STEP) {
        __syncthreads();
        for (int at = threadIdx.x; at < STEP * PIECES; at += 32 * WARPS) {
            const int token = key + at / PIECES, piece = at % PIECES;
            const bool there = token < total && 8 * piece < SIZE;
            const int slot = place_of(token);
            const u8* from = TREE ? own.blocks[slot / BLOCK] + all.k_at : rows_there;
            keys[at / PIECES][piece] = there ? *(const uint4*)(from + (slot % BLOCK * SIZE + 8 * piece) * 2) : nothing();
        }
        __syncthreads();
        float scores[EIGHTS][4];
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
            scores[j][0] = scores[j][1] = scores[j][2] = scores[j][3] = 0;
            const u32* row = (const u32*)keys[8 * j + g] + 8 * warp * SLICES + t;
#pragma unroll
            for (int s = 0; s < SLICES; s++)
                if (16 * (warp * SLICES + s) < SIZE) multiply(scores[j], queries[s], row[8 * s], row[8 * s + 4]);
#pragma unroll
            for (int i = 0; i < 4; i++) parts[warp][g + i / 2 * 8][8 * j + 2 * t + i % 2] = scores[j][i];
        }
        __syncthreads();
        const bool seen = Rows::see_all(rows, args, key, STEP);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float most_yet = top[i];
#pragma unroll
            for (int at = 0; at < 2 * EIGHTS; at++) {
                const int column = at / 2 * 8 + 2 * t + at % 2;
                float score = parts[0][g + 8 * i][column];
#pragma unroll
                for (int w = 1; w < WARPS; w++) score = plus(score, parts[w][g + 8 * i][column]);
                score = times(score, scale);
                if (!seen && !Rows::sees(rows, args, i, key + column)) score = minus_infinity();
                scores[at / 2][2 * i + at % 2] = score;
                most_yet = most(most_yet, score);
            }
            most_yet = most(most_yet, shuffle_xor(most_yet, 1));
            most_yet = most(most_yet, shuffle_xor(most_yet, 2));
            const float base = finite(most_yet), kept = power_of_two(plus(top[i], -base));
            float added = 0;
#pragma unroll
            for (int at = 0; at < 2 * EIGHTS; at++) {
                float& score = scores[at / 2][2 * i + at % 2];
                score = power_of_two(plus(score, -base));
                added = plus(added, score);
            }
            weight[i] = fused(weight[i], kept, added);
            top[i] = most_yet;
#pragma unroll
            for (int at = 0; at < OWN * 8; at++)
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    float& sum = (&sums[0][0])[at][2 * i + c];
                    sum = times(sum, kept);
                }
        }
#pragma unroll
        for (int j = 0; j < EIGHTS; j += 2) {
            const uint4 shares = make_uint4(two_bf16(scores[j][0], scores[j][1]), two_bf16(scores[j][2], scores[j][3]),
                                            two_bf16(scores[j + 1][0], scores[j + 1][1]),
                                            two_bf16(scores[j + 1][2], scores[j + 1][3]));
#pragma unroll
            for (int c = 0; c < OWN; c++) {
                const int span = warp * OWN + c;
                if (span >= SPANS) continue;
                uint4 v[4];  // eight columns of tokens 0, 1, 8 and 9 from the lane's first
#pragma unroll
                for (int i = 0; i < 4; i++) v[i] = keys[8 * j + 2 * t + i / 2 * 8 + i % 2][ROPE / 8 + 8 * span + g];
                const u32 words[4][4] = {{v[0].x, v[0].y, v[0].z, v[0].w}, {v[1].x, v[1].y, v[1].z, v[1].w},
                                         {v[2].x, v[2].y, v[2].z, v[2].w}, {v[3].x, v[3].y, v[3].z, v[3].w}};
#pragma unroll
                for (int w = 0; w < 8; w++) {
                    const u32 which = w % 2 ? 0x7632 : 0x5410;
                    multiply(sums[c][w], shares, pick(words[0][w / 2], words[1][w / 2], which),
                             pick(words[2][w / 2], words[3][w / 2], which));
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        weight[i] = plus(weight[i], shuffle_xor(weight[i], 1));
        weight[i] = plus(weight[i], shuffle_xor(weight[i], 2));
        const int which = place + g + 8 * i;
        if (which / all.per >= own.rows) continue;
        float* out = all.partial + begin / RUN * all.run_stride + Task::in_launch(args, which) * LATENT;
#pragma unroll
        for (int c = 0; c < OWN; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int e = 64 * (warp * OWN + c) + 8 * (2 * t + half), r = 2 * i + half;
                if (e < LATENT)
#pragma unroll
                    for (int w = 0; w < 8; w++) out[e + w] = sums[c][w][r];
            }
        if (warp == 0 && t == 0) {
            const i64 width = all.run_stride / LATENT, at = begin / RUN * width + Task::in_launch(args, which);
            all.stats[at] = top[i], all.stats[all.runs * width + at] = weight[i];
        }
    }
}
