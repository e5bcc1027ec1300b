// Finds the scales of groups with the least rounding error, by a search over how far to clip. Results equal those of
// quant/methods/scales.py (numpy), ten times as fast.
#pragma once

inline namespace LRT_SPACE {

// |e|^2.4 from e^2, within 1e-4: two Newton steps for the inverse fifth root.
inline F16L power_of_error(F16L square) {
    // The first guess divides the exponent by -5; its error is at most 3 %.
    F16L root = F16L::bits(F16L::from(square.as_bits()).fma(F16L::set1(-0.2f), F16L::set1(1.277925e9f)).rounded());
    for (int step = 0; step < 2; step++) {
        const F16L two = root * root;
        root = root * (square * root * (two * two)).fma(F16L::set1(-0.2f), F16L::set1(1.2f));
    }
    const F16L two = root * root;
    return square * square * (two * two);
}

// Rounds to half precision, ties to even.
inline float rounded_to_half(float x) {
    const float size = std::fabs(x);
    if (size >= 65520.f) return x < 0 ? -INFINITY : INFINITY;
    if (size < 6.10351562e-5f) return std::nearbyintf(x * 16777216.f) * 5.9604644775390625e-8f;
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    bits = (bits + 0xFFF + (bits >> 13 & 1)) & ~0x1FFFu;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

// Rounds x >= 0 to E4M3, ties down; saturates.
inline float rounded_to_e4m3(float x) {
    if (x >= 448.f) return 448.f;
    const float step = std::ldexp(1.f, most(std::ilogb(x), -6) - 3);
    return most(0.f, std::ceil(x / step - 0.5f) * step);
}

// Rounds x to the nearest unscaled code value. `end` is the largest magnitude.
struct EvenCodes {
    F16L low, high;
    float end;
    F16L nearest(F16L x) const { return F16L::from(x.max(low).min(high).rounded()); }
};

constexpr float NF4_VALUES[16] = {-1.f,           -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
                                  -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.f,
                                  0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
                                  0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.f};

struct Nf4Codes {
    static constexpr float end = 1.f;
    F16L nearest(F16L x) const {
        F16L y = F16L::set1(NF4_VALUES[0]);
#pragma GCC unroll 15
        for (int i = 1; i < 16; i++)
            y = x.above(F16L::set1((NF4_VALUES[i - 1] + NF4_VALUES[i]) / 2), F16L::set1(NF4_VALUES[i]), y);
        return y;
    }
};

struct E2m1Codes {
    static constexpr float end = 6.f;
    F16L nearest(F16L x) const {
        constexpr float values[8] = {0.f, 0.5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
        const I16 sign = x.as_bits() & I16::set1(INT32_MIN);
        const F16L size = F16L::bits(x.as_bits() & I16::set1(INT32_MAX));
        F16L y = F16L::zero();
#pragma GCC unroll 7
        for (int i = 1; i < 8; i++) y = size.above(F16L::set1((values[i - 1] + values[i]) / 2), F16L::set1(values[i]), y);
        return F16L::bits(y.as_bits() | sign);
    }
};

// A group relative to `centre`, in units of its farthest weight.
struct SearchedGroup {
    alignas(64) float values[128];
    float centre, farthest, size;  // size: the distance of the farthest weight

    SearchedGroup(const float* from, int block, float centre) : centre(centre), farthest(from[0]), size(-1.f) {
        for (int i = 0; i < block; i++) {
            const float distance = std::fabs(from[i] - centre);
            if (distance > size) size = distance, farthest = from[i];
        }
        size = most(size, 1.17549435e-38f);
        const float inverse = 1.f / size;
        for (int i = 0; i < block; i++) values[i] = (from[i] - centre) * inverse;
    }
};

struct Candidate {
    float scale, minimum;
};

template <class Codes> float rounding_error(const SearchedGroup& group, int block, const Codes& codes, Candidate tried) {
    const F16L inverse = F16L::set1(tried.scale != 0 ? group.size / tried.scale : 0.f), scale = F16L::set1(tried.scale / group.size);
    const F16L start = F16L::set1((tried.minimum - group.centre) / group.size);
    F16L total = F16L::zero();
    for (int i = 0; i < block; i += 16) {
        const F16L value = F16L::load(group.values + i) - start;
        const F16L error = codes.nearest(value * inverse).fma(scale, F16L::zero() - value);
        total = total + power_of_error(error * error);
    }
    return sum16(total);
}

// Whether the farthest weight, which maps to the largest magnitude, overflows.
template <class Codes> bool overflows(const SearchedGroup& group, const Codes& codes, Candidate tried) {
    const F16L code = codes.nearest(F16L::set1(std::fabs(group.farthest) / std::fabs(tried.scale)));
    return !std::isfinite((code * F16L::set1(std::fabs(tried.scale))).highest());
}

// The candidate with the least error among those of `fit` for each fraction of the group's range; `clipped` is the
// farthest weight's distance from the end of a candidate's range.
template <class Codes, class Fit, class Clipped>
Candidate best_candidate(const SearchedGroup& group, const SearchArgs& args, const Codes& codes, Fit fit, Clipped clipped) {
    Candidate best = {INFINITY, INFINITY};
    float least_error = INFINITY, bearable = INFINITY;
    for (int step = 0; step < args.steps; step++) {
        const Candidate tried = fit(args.shrinks[step]);
        if (!std::isfinite(tried.scale) || !std::isfinite(tried.minimum)) break;  // too large for the format
        // Each step clips the farthest weight more. Once its error alone exceeds the best total, no later candidate is
        // better.
        if (clipped(tried) > bearable * group.size) break;
        if (group.size > 1e37f && overflows(group, codes, tried)) continue;
        const float error = rounding_error(group, args.block, codes, tried);
        if (error < least_error) {
            least_error = error;
            bearable = std::pow(error, 1.f / 2.4f) * 1.0001f;
            best = tried;
        }
    }
    return best;
}

// `scale_of` computes a scale from the farthest weight and the fraction of it to cover.
template <class Codes, class ScaleOf>
float search_symmetric(const float* from, const SearchArgs& args, const Codes& codes, ScaleOf scale_of) {
    const SearchedGroup group(from, args.block, 0.f);
    const auto fit = [&](double shrink) { return Candidate{scale_of(group.farthest, shrink), 0.f}; };
    const auto clipped = [&](Candidate tried) { return group.size - codes.end * std::fabs(tried.scale); };
    return best_candidate(group, args, codes, fit, clipped).scale;
}

inline Candidate search_with_minimum(const float* from, const SearchArgs& args, const EvenCodes& codes) {
    float low = from[0], high = from[0];
    double sum = 0;
    for (int i = 0; i < args.block; i++) {
        low = least(low, from[i]);
        high = most(high, from[i]);
        sum += from[i];
    }
    const float mean = (float)(sum / args.block);
    const SearchedGroup group(from, args.block, mean);
    const auto fit = [&](double shrink) {
        const float bottom = shrink == 1 ? low : (float)(mean + shrink * (low - mean));
        const float top = shrink == 1 ? high : (float)(mean + shrink * (high - mean));
        return Candidate{rounded_to_half(top / codes.end - bottom / codes.end), rounded_to_half(bottom)};
    };
    const auto clipped = [&](Candidate tried) {
        return group.farthest < mean ? tried.minimum - group.farthest : group.farthest - (tried.minimum + codes.end * tried.scale);
    };
    return best_candidate(group, args, codes, fit, clipped);
}

inline float scale_of_nf4(float farthest, double shrink) { return rounded_to_half(std::fabs(farthest) * (float)shrink); }
inline float scale_of_nvfp4(float farthest, double shrink) { return rounded_to_e4m3(std::fabs(farthest) * (float)(shrink / 6)); }
inline float scale_of_mxfp4(float farthest, double shrink) {
    const int exponent = farthest == 0 ? -127 : std::ilogb(farthest) + std::ilogb(shrink) - 2;
    return std::ldexp(1.f, least(most(exponent, -127), 127));
}

}  // namespace

#include "weighted_search.h"

inline namespace LRT_SPACE {

inline void search_weighted(const SearchArgs& args, int64_t index) {
    const float* from = args.groups + index * args.block;
    const float* weights = args.weights + index % args.weight_count * args.block;
    if (args.family == Q3_K_BLOCKS) search_q3_k(from, weights, args, args.scales + 32 * index);
    if (args.family == Q2_K_BLOCKS) search_q2_k(from, weights, args, args.scales + 64 * index);
    if (args.family == IQ4_NL_BLOCKS) search_iq4_nl(from, weights, args, args.scales + index);
}

inline void search_group(const SearchArgs& args, int64_t index) {
    const float* from = args.groups + index * args.block;
    float* scale = args.scales + index;
    const float end = (float)(1 << (args.bits - 1)), last = (float)((1 << args.bits) - 1);
    switch (args.family) {
        case EVEN:
            *scale = search_symmetric(from, args, EvenCodes{F16L::set1(-end), F16L::set1(end - 1), end},
                                      [&](float farthest, double shrink) { return rounded_to_half(farthest * (float)(-shrink / end)); });
            break;
        case EVEN_WITH_MINIMUM: {
            const Candidate found = search_with_minimum(from, args, EvenCodes{F16L::zero(), F16L::set1(last), last});
            args.scales[2 * index] = found.scale;
            args.scales[2 * index + 1] = found.minimum;
            break;
        }
        case NF4_LEVELS: *scale = search_symmetric(from, args, Nf4Codes(), scale_of_nf4); break;
        case E2M1_BY_POWERS: *scale = search_symmetric(from, args, E2m1Codes(), scale_of_mxfp4); break;
        case E2M1_BY_E4M3: *scale = search_symmetric(from, args, E2m1Codes(), scale_of_nvfp4); break;
        default: search_weighted(args, index);
    }
}

void search_scales(Context& context, const SearchArgs& args) {
    constexpr int SHARE = 64;
    parallel(context, (int)((args.count + SHARE - 1) / SHARE), [&](int task) {
        for (int64_t i = (int64_t)task * SHARE; i < least(args.count, (int64_t)(task + 1) * SHARE); i++) search_group(args, i);
    });
}

}  // namespace
