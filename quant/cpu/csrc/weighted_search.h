// Finds the scales of GGUF's blocks with the least error, weighted by the magnitude of each column's inputs. Results
// equal those of quant/methods/scales.py (numpy), much faster.
#pragma once

inline namespace LRT_SPACE {

constexpr float TINY = 1e-30f;

struct Iq4Levels {
    static constexpr float VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    F16L nearest(F16L x) const {
        F16L y = F16L::set1(VALUES[0]);
#pragma GCC unroll 15
        for (int i = 1; i < 16; i++) y = x.above(F16L::set1((VALUES[i - 1] + VALUES[i]) / 2), F16L::set1(VALUES[i]), y);
        return y;
    }
};

// The value farthest from 0; the first among equals.
inline float farthest_of(const float* from, int count) {
    float farthest = from[0];
    for (int i = 1; i < count; i++)
        if (std::fabs(from[i]) > std::fabs(farthest)) farthest = from[i];
    return farthest;
}

inline float divisor(float x) { return x == 0 ? 1.f : x; }

// The step between a group's levels that has the least weighted error, of those that map the group's farthest value to
// one of the ends of the code's range; `gain` is how much it reduces the error, `weight` the weighted sum of squared
// codes.
struct WeightedStep {
    float step = 0, gain = 0, weight = 0;
};

template <int LANES, class Codes>
WeightedStep best_step(const float* from, const float* weights, const SearchArgs& args, const Codes& codes, float low, float high) {
    const float farthest = farthest_of(from, LANES);
    WeightedStep best;
    for (int side = 0; side < 2; side++) {
        const float end = side ? high : low;
        for (int i = 0; i < args.steps; i++) {
            const F16L step = F16L::set1(divisor(farthest * (float)(args.shrinks[i] / end)));
            F16L both = F16L::zero(), own = F16L::zero();
            for (int lane = 0; lane < LANES; lane += 16) {
                const F16L x = F16L::load(from + lane), code = codes.nearest(x / step), weighed = F16L::load(weights + lane) * code;
                both = weighed.fma(x, both);
                own = weighed.fma(code, own);
            }
            const float sum = sum16(both), squares = sum16(own), least = sum / most(squares, TINY);
            if (sum * least > best.gain) best = {least, sum * least, squares};
        }
    }
    return best;
}

// d in half precision and integers for 16 groups, with d * integer nearest to the target.
inline float share_step(const float* wanted, const float* weights, float low, float high, float end, F16L& numbers) {
    const float farthest = farthest_of(wanted, 16);
    const F16L want = F16L::load(wanted), weight = F16L::load(weights);
    float found = 0, least = INFINITY;
    numbers = F16L::zero();
    for (int i = 0; i < 25; i++) {
        float d = farthest / (float)(end + (-1.2 + 0.1 * i));
        F16L tried = F16L::zero();
        for (int turn = 0; turn < 2; turn++) {
            tried = F16L::from((want / F16L::set1(divisor(d))).max(F16L::set1(low)).min(F16L::set1(high)).rounded());
            const F16L weighed = weight * tried;
            d = sum16(weighed * want) / most(sum16(weighed * tried), TINY);
        }
        d = rounded_to_half(d);
        const F16L missed = tried.fma(F16L::set1(-d), want);
        const float error = sum16(weight * missed * missed);
        if (error < least) least = error, found = d, numbers = tried;
    }
    return found;
}

inline void search_q3_k(const float* from, const float* weights, const SearchArgs& args, float* scales) {
    alignas(64) float steps[16], own[16], numbers[16];
    for (int group = 0; group < 16; group++) {
        const EvenCodes codes{F16L::set1(-4.f), F16L::set1(3.f), 4.f};
        const WeightedStep found = best_step<16>(from + 16 * group, weights + 16 * group, args, codes, -4.f, 3.f);
        steps[group] = found.step;
        own[group] = found.weight;
    }
    F16L shared;
    const float d = share_step(steps, own, -32.f, 31.f, -32.f, shared);
    shared.store(numbers);
    for (int group = 0; group < 16; group++) scales[2 * group] = d, scales[2 * group + 1] = numbers[group];
}

inline void search_q2_k(const float* from, const float* weights, const SearchArgs& args, float* scales) {
    alignas(64) float steps[16] = {}, own[16] = {}, minima[16] = {}, totals[16], numbers[16], offsets[16];
    for (int group = 0; group < 16; group++, from += 16, weights += 16) {
        const F16L x = F16L::load(from), w = F16L::load(weights), zero = F16L::zero();
        float low = 0, high = 0;
        for (int i = 0; i < 16; i++) low = least(low, from[i]), high = most(high, from[i]);
        const float total = sum16(w), first = sum16(w * x), size = high - low;
        float least_error = INFINITY;
        for (int i = 0; i < args.steps; i++) {
            const F16L start = F16L::set1(low * (float)args.shrinks[i]), step = F16L::set1(divisor(size * (float)(args.shrinks[i] / 3)));
            const F16L code = F16L::from(((x - start) / step).max(zero).min(F16L::set1(3.f)).rounded()), weighed = w * code;
            const float one = sum16(weighed), two = sum16(weighed * code), both = sum16(weighed * x);
            const float apart = most(total * two - one * one, TINY);
            const float offset = least((two * first - one * both) / apart, 0.f);
            const float slope = most(offset == 0 ? both / most(two, TINY) : (total * both - first * one) / apart, 0.f);
            const F16L missed = code.fma(F16L::set1(slope), F16L::set1(offset)) - x;
            const float error = sum16(w * missed * missed);
            if (error < least_error) least_error = error, own[group] = two, steps[group] = slope, minima[group] = -offset;
        }
        totals[group] = total;
    }
    F16L shared;
    const float d = share_step(steps, own, 0.f, 15.f, 15.f, shared);
    shared.store(numbers);
    const float least_d = share_step(minima, totals, 0.f, 15.f, 15.f, shared);
    shared.store(offsets);
    for (int group = 0; group < 16; group++, scales += 4)
        scales[0] = d, scales[1] = numbers[group], scales[2] = least_d, scales[3] = offsets[group];
}

inline void search_iq4_nl(const float* from, const float* weights, const SearchArgs& args, float* scale) {
    *scale = rounded_to_half(best_step<32>(from, weights, args, Iq4Levels(), Iq4Levels::VALUES[0], Iq4Levels::VALUES[15]).step);
}

}  // namespace
