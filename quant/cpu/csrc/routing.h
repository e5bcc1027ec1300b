// Routers: norm, logits in float32, and each row's experts, ranked. See RouterSpec in quant/ops/experts.py for the
// mathematics; ties go to the lower index.
#pragma once

inline namespace LRT_SPACE {

// Picks the values of a row in descending order; picked ones become minus infinity. The maximum of each sixteen is
// cached, so that a pick needs few comparisons.
struct Ranking {
    float *keys, *peaks;
    int blocks;

    Ranking(float* keys, float* peaks, int blocks) : keys(keys), peaks(peaks), blocks(blocks) {
        for (int b = 0; b < blocks; b++) look(b);
    }
    void look(int block) { peaks[block] = F16L::load(keys + 16 * block).highest(); }
    int best() const {  // -1 if none is left
        int block = 0, lane = 0;
        for (int b = 1; b < blocks; b++)
            if (peaks[b] > peaks[block]) block = b;
        if (peaks[block] == -INFINITY) return -1;
        while (keys[16 * block + lane] != peaks[block]) lane++;
        return 16 * block + lane;
    }
    void take(int index) {
        keys[index] = -INFINITY;
        look(index / 16);
    }
};

inline bool all_finite(const float* x, int count) {
    uint32_t bad = 0;
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        __builtin_memcpy(&bits, x + i, 4);
        bad |= (bits & 0x7F800000) == 0x7F800000;
    }
    return !bad;
}

// Chooses one row's experts from its logits. `work` has room for `route_room` floats.
struct Router {
    const RouteArgs& args;
    int count, padded, blocks;

    explicit Router(const RouteArgs& args) : args(args), count(args.gate.rows), padded((count + 15) / 16 * 16), blocks(padded / 16) {}
    size_t room() const { return 3 * (size_t)padded + blocks + 2 * args.groups; }

    void choose(const float* products, int row, float* work) const {
        float *logits = work, *scores = logits + padded, *keys = scores + padded, *peaks = keys + padded;
        int32_t* experts = args.experts + (size_t)row * args.ranked;
        float *best = args.scores + (size_t)row * args.ranked, *weights = args.weights + (size_t)row * args.used;
        fill_floats(logits, padded, -INFINITY);
        for (int i = 0; i < count; i++) logits[i] = products[i] + (args.gate_bias ? args.gate_bias[i] : 0.f);
        const bool finite = all_finite(logits, count);
        if (args.softcap > 0) cap_softly(logits, count, args.softcap);
        score(logits, scores);
        const float* ranks = args.scoring == SOFTMAX_CHOSEN ? logits : scores;  // scores tie if softmax underflows
        fill_floats(keys, padded, -INFINITY);
        for (int i = 0; i < count; i++) keys[i] = ranks[i] + (args.choice_bias ? args.choice_bias[i] : 0.f);
        if (!finite || !all_finite(keys, count)) {
            for (int i = 0; i < args.ranked; i++) experts[i] = i, best[i] = NAN;
            return fill_floats(weights, args.used, NAN);
        }
        float* group_best = peaks + blocks;
        uint8_t* open = (uint8_t*)(group_best + args.groups);
        const int size = count / args.groups, allowed = size * args.used_groups;
        const bool limited = args.used_groups < args.groups;
        if (limited) close_groups(keys, group_best, open);
        Ranking ranking(keys, peaks, blocks);
        for (int i = 0; i < args.ranked; i++) {
            if (limited && i == allowed) {  // the others cannot be chosen
                for (int e = 0; e < count; e++)
                    if (!open[e / size]) keys[e] = ranks[e] + (args.choice_bias ? args.choice_bias[e] : 0.f);
                ranking = Ranking(keys, peaks, blocks);
            }
            experts[i] = ranking.best();
            best[i] = scores[experts[i]];
            ranking.take(experts[i]);
        }
        weigh(logits, experts, best, weights);
    }

    void score(const float* logits, float* scores) const {
        if (args.scoring == SIGMOID) {
            for (int i = 0; i < padded; i += 16) sigmoid16(F16L::load(logits + i)).store(scores + i);
            return;
        }
        if (args.scoring == SQRT_SOFTPLUS) {
            for (int i = 0; i < padded; i += 16) softplus16(F16L::load(logits + i)).store(scores + i);
            for (int i = 0; i < padded; i++) scores[i] = std::sqrt(scores[i]);
            return;
        }
        F16L peak = F16L::load(logits), total = F16L::zero();
        for (int i = 16; i < padded; i += 16) peak = peak.max(F16L::load(logits + i));
        const F16L top = F16L::set1(peak.highest());
        for (int i = 0; i < padded; i += 16) exp16(F16L::load(logits + i) - top).store(scores + i);
        fill_floats(scores + count, padded - count, 0.f);
        for (int i = 0; i < padded; i += 16) total = total + F16L::load(scores + i);
        const F16L sum = F16L::set1(sum16(total));
        for (int i = 0; i < padded; i += 16) (F16L::load(scores + i) / sum).store(scores + i);
    }

    // Masks all keys outside the best groups, which are ranked by the sum of their largest keys.
    void close_groups(float* keys, float* group_best, uint8_t* open) const {
        const int size = count / args.groups;
        for (int g = 0; g < args.groups; g++) {
            float* from = keys + g * size;
            float sum = 0, last = INFINITY;
            for (int taken = 0; taken < least(args.group_top, size);) {  // equal keys are counted together
                float next = -INFINITY;
                for (int i = 0; i < size; i++)
                    if (from[i] < last && from[i] > next) next = from[i];
                for (int i = 0; i < size && taken < args.group_top; i++)
                    if (from[i] == next) sum += next, taken++;
                last = next;
            }
            group_best[g] = sum;
            open[g] = 0;
        }
        for (int used = 0; used < args.used_groups; used++) {
            int top = -1;
            for (int g = 0; g < args.groups; g++)
                if (!open[g] && (top < 0 || group_best[g] > group_best[top])) top = g;
            open[top] = 1;
        }
        for (int i = 0; i < count; i++)
            if (!open[i / size]) keys[i] = -INFINITY;
    }

    void weigh(const float* logits, const int32_t* experts, const float* best, float* weights) const {
        float sum = 0;
        if (args.scoring == SOFTMAX_CHOSEN) {
            float peak = logits[experts[0]];
            for (int k = 1; k < args.used; k++) peak = most(peak, logits[experts[k]]);
            for (int k = 0; k < args.used; k++) sum += weights[k] = exp1(logits[experts[k]] - peak);
        } else {
            for (int k = 0; k < args.used; k++) sum += weights[k] = best[k];
            if (!args.normalize) sum = 1.f;
        }
        for (int k = 0; k < args.used; k++) weights[k] = weights[k] / most(sum, 1e-20f) * args.scale;
        if (args.expert_scale)
            for (int k = 0; k < args.used; k++) weights[k] *= args.expert_scale[experts[k]];
    }
};

// A row as experts see it.
inline void norm_routed(const RouteArgs& args, int row) {
    const size_t at = (size_t)row * args.gate.cols;
    if (args.norm) rms_norm(args.x + at, args.norm, args.eps, args.gate.cols, args.normed + at);
    else copy_floats(args.x + at, args.gate.cols, args.normed + at);
}

void norm_route(Context& context, const RouteArgs& args) {
    const int count = args.gate.rows;
    each_row(context, args.rows, [&](int row) { norm_routed(args, row); });
    float* products = scratch<float>(context.gated, (size_t)args.rows * count);
    const float* seen = args.gate_norm ? args.x : args.normed;
    // 16-bit activations, since there are few products and their errors matter.
    const Acts acts = prepare(context, context.rows, seen, nullptr, args.rows, args.gate_norm, args.eps, args.gate, true);
    matmul(context, args.gate, acts, products);
    const Router router(args);
    const int share = 4, tasks = (args.rows + share - 1) / share;
    const size_t room = (router.room() + 15) / 16 * 16;
    float* work = scratch<float>(context.wide, tasks * room);
    parallel(context, tasks, [&](int task) {
        for (int row = task * share; row < least(args.rows, (task + 1) * share); row++)
            router.choose(products + (size_t)row * count, row, work + task * room);
    });
}

}  // namespace
