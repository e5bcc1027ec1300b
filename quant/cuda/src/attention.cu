// Attention of new rows to a KV cache that already includes them. The query rows of all heads that share
// a KV head are consecutive, and a warp takes sixteen of them. Compiled for
//   KEYS VALUES   how the cache stores them (kv.cuh)
//   SPLIT         1: few rows. A block takes one run of keys, a quarter for each warp, and leaves
//                 sums that attention_join.cu joins; keys and values pass through registers only. 0: many
//                 rows. Each warp takes all keys, which its block has copied to shared memory.
//   IN_CHUNKS     1: windows begin at multiples of their size
//   TREE          1: the runs of keys in which rows of a tree see different ones. A block takes one row, whose keys it
//                 finds through the tree, in the places that they would have had in a chain.
// Keys that a row does not see leave its sums unchanged to the bit, so a row's result depends neither on
// the other rows nor on the cache's length.
#include "attention.cuh"

using Sums = AttentionSums<KEYS, VALUES, SPLIT || KEYS::SIZE <= 64 ? 32 : 16>;
constexpr int OWN = RUN / WARPS;  // keys of a run per warp
static_assert(RUN == BLOCK, "a run of keys is one block of the cache");

// Copies the rows of `tokens` tokens, one after another; their 16-byte pieces are swizzled by `turn`.
template <int BYTES, int STEP, class Turn>
FN void share(u8* to, const u8* from, int tokens, Turn turn) {
    for (int at = threadIdx.x; at < STEP * BYTES / 16; at += blockDim.x) {
        if (at * 16 >= tokens * BYTES) break;
        copy_sixteen(to + 16 * (at ^ turn(at * 16 / BYTES)), from + 16 * at);
    }
}

// Gives the addresses of tokens that follow one another; `first` would be that of token 0.
template <int BYTES>
FN auto from(const u8* first) {
    return [=](int token) { return first + (i64)token * BYTES; };
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) attention(Attention all) {
    constexpr int TILES = SPLIT ? 1 : WARPS;
    __shared__ uint4 queries[TILES][Sums::QUERY_STEPS][32];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int group = blockIdx.y / Sums::SHARES;
    // Later rows see more keys, so they start first.
    const int number = SPLIT ? blockIdx.z : gridDim.x - 1 - blockIdx.x;
#if TREE
    __shared__ int slots[RUN];
    int run;
    const OwnRows own = OwnRows::of_tree(all, number, run, slots);
#else
    const int run = blockIdx.x * RUN;
#if BLOCKS > 2 || WARPS > 4  // registers are few: in shared memory, where there is room; fences have it read again
    __shared__ OwnRows own;
    if (threadIdx.x == 0) own = OwnRows::make(all, TILES * 16, number);
    __syncthreads();
#else
    const OwnRows own = OwnRows::make(all, TILES * 16, number);
#endif
#endif
    const Task args{all, own};
    if (!own.rows || (SPLIT && OwnRows::parts(own, run))) return;
    const auto first_place = [&] { return (own.tile * TILES + (SPLIT ? 0 : warp)) * 16; };
    const auto number_of_run = [&] { return TREE ? run / RUN : (int)blockIdx.x; };  // takes no register
    int place = first_place();
    const int total = own.total;
    load_queries<Sums::QUERY_STEPS, Sums::SIZE>(args, group, own.tile * TILES * 16, TILES, &queries[0][0][0]);
    __syncthreads();

    const Rows rows = Rows::make(args, place, g);
    const int last = (place + 15) / all.per < own.rows ? (place + 15) / all.per : own.rows - 1;
    int end = own.tree ? total : lesser(total, own.held + own.first + last + 1);
    int begin = rows.earliest;
    if constexpr (SPLIT) {
        if ((!TREE && run >= end) || run + RUN <= begin) return;  // attention_join.cu skips such runs
        const int mine = run + warp * OWN;
        begin = begin > mine ? begin : mine, end = end < mine + OWN ? end : mine + OWN;
    }
    fence();
    Sums sums;
    sums.clear(sums);
    // The address that token 0 would have in the block of `key`.
    const auto keys_at = [&](const u8* block, int key) { return block + all.k_at + ((i64)group * BLOCK - key / BLOCK * BLOCK) * KEYS::BYTES; };
    const auto values_at = [&](const u8* block, int key) { return block + all.v_at + ((i64)group * BLOCK - key / BLOCK * BLOCK) * VALUES::BYTES; };
#if TREE
    const auto key_at = [&](int token) { const int slot = slots[token - run]; return keys_at(own.blocks[slot / BLOCK], slot) + (i64)slot * KEYS::BYTES; };
    const auto value_at = [&](int token) { const int slot = slots[token - run]; return values_at(own.blocks[slot / BLOCK], slot) + (i64)slot * VALUES::BYTES; };
#else
    const auto block = [&] { return own.blocks[number_of_run()]; };  // of this run
#endif
    if constexpr (SPLIT) {
#pragma unroll 1
        for (int key = begin / Sums::STEP * Sums::STEP; key < end; key += Sums::STEP)
#if TREE
            sums.add(sums, args, rows, queries[0], key_at, value_at, key, own.total, lane);
#else
            sums.add(sums, args, rows, queries[0], from<KEYS::BYTES>(keys_at(block(), key)), from<VALUES::BYTES>(values_at(block(), key)), key, own.total, lane);
#endif
    } else {
        // Values are loaded while keys are multiplied, and the next keys while values are.
        constexpr int STEP = Sums::STEP;
        __shared__ uint4 keys[STEP * KEYS::BYTES / 16], values[STEP * VALUES::BYTES / 16];
        int* begins = (int*)keys;
        if (lane == 0) begins[warp] = begin;
        __syncthreads();
        int first = begin;
        for (int w = 0; w < WARPS; w++) first = first < begins[w] ? first : begins[w];
        __syncthreads();
        const int lasts = ((own.tile + 1) * TILES * 16 - 1) / all.per;
        const int stop = own.tree ? total : own.held + own.first + (lasts < own.rows ? lasts + 1 : own.rows);
        first = first / STEP * STEP;
        const auto share_keys = [&](int key) {
            share<KEYS::BYTES, STEP>((u8*)keys, keys_at(own.blocks[key / BLOCK], key) + (i64)key * KEYS::BYTES, total - key, Sums::key_turn);
        };
        if (first < stop) share_keys(first);
        for (int key = first; key < stop; key += STEP) {
            wait_copies();
            __syncthreads();
            share<VALUES::BYTES, STEP>((u8*)values, values_at(own.blocks[key / BLOCK], key) + (i64)key * VALUES::BYTES, total - key, Sums::value_turn);
            Sums::Scores scores;
            const bool sees = key < end;
            if (sees) Sums::meet<1>(scores, args, queries[warp], from<KEYS::BYTES>((const u8*)keys - (i64)key * KEYS::BYTES), key, total, lane);
            wait_copies();
            __syncthreads();
            if (key + STEP < stop) share_keys(key + STEP);
            if (sees) Sums::weigh<1>(sums, scores, args, rows, from<VALUES::BYTES>((const u8*)values - (i64)key * VALUES::BYTES), key, total, lane);
        }
    }
    sums.finish(sums);
    fence();
    place = first_place();

    if constexpr (SPLIT) {
        __shared__ float4 meet[16][Sums::WIDTH / 4 + 1];  // padded: rows begin in different banks
        __shared__ float tops[WARPS][16], weights[WARPS][16];
        if (t == 0)
#pragma unroll
            for (int i = 0; i < 2; i++) tops[warp][g + 8 * i] = sums.top[i], weights[warp][g + 8 * i] = sums.weight[i];
        __syncthreads();
        float share[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float top = tops[0][g + 8 * i];
            for (int w = 1; w < WARPS; w++) top = most(top, tops[w][g + 8 * i]);
            share[i] = power_of_two(plus(sums.top[i], -finite(top)));
        }
        for (int w = 0; w < WARPS; w++) {
            if (warp == w)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if ((place + g + 8 * i) / all.per < own.rows)
                        sums.fours(sums, i, t, [&](int e, const float* values) {
                            float4& sum = meet[g + 8 * i][e / 4];
                            const float4 before = w ? sum : float4{0, 0, 0, 0};
                            sum = float4{fused(values[0], share[i], before.x), fused(values[1], share[i], before.y),
                                         fused(values[2], share[i], before.z), fused(values[3], share[i], before.w)};
                        });
            __syncthreads();
        }
        for (int at = threadIdx.x; at < 16 * Sums::WIDTH; at += 32 * WARPS) {
            const int r = at / Sums::WIDTH, e = at % Sums::WIDTH, which = Attention::result(all, place + r, group);
            if ((place + r) / all.per >= own.rows) break;
            all.partial[number_of_run() * all.run_stride + Task::in_launch(args, which) * Sums::VALUE + Sums::share() * Sums::WIDTH + e] = ((const float*)meet[r])[e];
        }
        const int r = threadIdx.x;
        if (Sums::share() == 0 && r < 16 && (place + r) / all.per < own.rows) {
            float top = tops[0][r], weight = 0;
            for (int w = 1; w < WARPS; w++) top = most(top, tops[w][r]);
            for (int w = 0; w < WARPS; w++) weight = fused(weights[w][r], power_of_two(plus(tops[w][r], -finite(top))), weight);
            const i64 width = all.run_stride / Sums::VALUE;
            const i64 at = number_of_run() * width + Task::in_launch(args, Attention::result(all, place + r, group));
            all.stats[at] = top, all.stats[all.runs * width + at] = weight;
        }
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = place + g + 8 * i;
            if (at / all.per >= own.rows) continue;
            const int which = Attention::result(all, at, group);
            float factor = 1;
            if (all.sinks) {
                const float sink = times(all.sinks[which % all.heads], LOG2E), top = most(sums.top[i], sink);
                factor = power_of_two(plus(sums.top[i], -top));
                sums.weight[i] = fused(sums.weight[i], factor, power_of_two(plus(sink, -top)));
            }
            factor = factor / sums.weight[i];
            sums.write(sums, i, t, factor, all.out + Task::in_pass(args, which) * Sums::VALUE);
        }
    }
}
