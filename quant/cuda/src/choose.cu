// Chooses a row's experts by router logits, ranked as in quant/reference/experts.py: a block takes a
// row, a thread an expert. An expert's rank is the number of experts before it, so nothing is sorted,
// and a row's bits depend on that row alone.
#include "gates.cuh"

constexpr int MOST_EXPERTS = 1024;

enum { SOFTMAX, SIGMOID_EACH, SOFTMAX_CHOSEN };

struct Choose {
    const float* logits;       // (m, experts)
    const float* gate_bias;    // (experts) or null: added to logits
    const float* choice_bias;  // (experts) or null: for ranking only
    const float* factors;      // (experts) or null: of the chosen experts' weights
    int* chosen;               // (m, ranked), best first
    float* scores;             // (m, ranked)
    float* weights;            // (m, used)
    int experts, used, ranked, scoring, normalize;
    int groups, used_groups, group_top;
    float scale, softcap;  // softcap 0: none
};

// A key that sorts by descending rank, then by ascending number.
FN u64 key_of(float rank, int number) {
    return (u64)ordered(rank) << 10 | (MOST_EXPERTS - 1 - number);
}

// Reduces all threads' values in a fixed order.
template <class Join>
FN float over_all(float value, float* meet, Join join) {
    for (int lanes = 16; lanes; lanes >>= 1) value = join(value, shuffle_xor(value, lanes));
    if (threadIdx.x % 32 == 0) meet[threadIdx.x / 32] = value;
    __syncthreads();
    value = meet[0];
    for (int warp = 1; warp < blockDim.x / 32; warp++) value = join(value, meet[warp]);
    __syncthreads();
    return value;
}

FN int places_before(const u64* keys, int count, u64 own) {
    int place = 0;
    for (int i = 0; i < count; i++) place += keys[i] > own;
    return place;
}

extern "C" __global__ void choose(Choose args) {
    __shared__ u64 keys[MOST_EXPERTS], group_keys[MOST_EXPERTS];
    __shared__ float best[MOST_EXPERTS], parts[MOST_EXPERTS], meet[32];
    __shared__ int broken;
    const int expert = threadIdx.x;
    const i64 row = blockIdx.x;
    const bool there = expert < args.experts;
    if (expert == 0) broken = 0;
    __syncthreads();

    float logit = 0, score = 0, rank = 0;
    if (there) {
        logit = args.logits[row * args.experts + expert];
        if (args.gate_bias) logit = plus(logit, args.gate_bias[expert]);
        if (logit - logit != 0) broken = 1;
        if (args.softcap > 0) logit = times(tanhf(logit / args.softcap), args.softcap);
    }
    if (args.scoring == SIGMOID_EACH) {
        score = sigmoid(logit);
    } else {
        const float most = over_all(there ? logit : as_float(0xFF800000u), meet, [](float a, float b) { return a > b ? a : b; });
        const float part = there ? expf(logit - most) : 0;
        score = part / over_all(part, meet, [](float a, float b) { return plus(a, b); });
    }
    if (there) {
        rank = args.scoring == SOFTMAX_CHOSEN ? logit : score;
        if (args.choice_bias) rank = plus(rank, args.choice_bias[expert]);
        keys[expert] = key_of(rank, expert);
    }
    __syncthreads();

    u64 own = there ? keys[expert] : 0;
    if (args.groups > 1) {  // experts of the best groups rank before all others
        const int size = args.experts / args.groups, group = expert / size;
        if (there) {
            const int place = places_before(keys + group * size, size, own);
            if (place < args.group_top) parts[group * args.group_top + place] = rank;
        }
        __syncthreads();
        if (expert < args.groups) {
            float sum = parts[expert * args.group_top];
            for (int i = 1; i < args.group_top; i++) sum = plus(sum, parts[expert * args.group_top + i]);
            group_keys[expert] = key_of(sum, expert);
        }
        __syncthreads();
        if (there) {
            own |= (u64)(places_before(group_keys, args.groups, group_keys[group]) < args.used_groups) << 42;
            keys[expert] = own;
        }
        __syncthreads();
    }
    const int place = there ? places_before(keys, args.experts, own) : args.ranked;
    if (place < args.ranked) {
        args.chosen[row * args.ranked + place] = expert;
        args.scores[row * args.ranked + place] = score;
        best[place] = args.scoring == SOFTMAX_CHOSEN ? logit : score;
    }
    __syncthreads();

    const bool softmax = args.scoring == SOFTMAX_CHOSEN;
    if (expert < args.used) {
        float most = best[0];
        for (int k = 1; k < args.used; k++) most = best[k] > most ? best[k] : most;
        parts[expert] = softmax ? expf(best[expert] - most) : best[expert];
    }
    __syncthreads();
    if (expert >= args.used) return;
    float weight = parts[expert];
    if (softmax || args.normalize) {
        float sum = parts[0];
        for (int k = 1; k < args.used; k++) sum = plus(sum, parts[k]);
        weight = weight / (softmax ? sum : plus(sum, 1e-20f));
    }
    if (args.factors) weight = times(weight, args.factors[args.chosen[row * args.ranked + expert]]);
    args.weights[row * args.used + expert] = broken ? as_float(0x7FC00000u) : times(weight, args.scale);
}
