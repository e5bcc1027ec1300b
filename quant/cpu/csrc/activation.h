// Functions of sixteen lanes: exp, tanh, and activations of MLPs and experts. C libraries' own differ in their last bit.
#pragma once

inline namespace LRT_SPACE {

inline F16L exp16(F16L x) {
    // 2^n * e^r with |r| <= ln(2) / 2; below -87 the result is 0 to float32.
    x = x.max(F16L::set1(-87.33654f)).min(F16L::set1(88.f));
    const I16 n = (x * F16L::set1(1.44269504f)).rounded();
    const F16L nf = F16L::from(n);
    F16L r = nf.fma(F16L::set1(-0.693359375f), x);
    r = nf.fma(F16L::set1(2.12194440e-4f), r);
    F16L p = F16L::set1(1.9875691500e-4f);
    p = p.fma(r, F16L::set1(1.3981999507e-3f));
    p = p.fma(r, F16L::set1(8.3334519073e-3f));
    p = p.fma(r, F16L::set1(4.1665795894e-2f));
    p = p.fma(r, F16L::set1(1.6666665459e-1f));
    p = p.fma(r, F16L::set1(5.0000001201e-1f));
    p = p.fma(r * r, r + F16L::set1(1.f));
    return p * F16L::bits((n + I16::set1(127)).shl(23));
}

// Of one number, with the bits of a lane; below e^-87 it is 0, and NaN stays NaN.
inline float exp1(float x) {
    alignas(64) float lanes[16];
    exp16(F16L::set1(x)).store(lanes);
    return x < -87.f ? 0.f : x == x ? lanes[0] : x;
}

inline float sigmoid1(float x) { return 1.f / (1.f + exp1(-x)); }

inline F16L tanh16(F16L x) {
    const F16L one = F16L::set1(1.f);
    const F16L e = exp16(x.max(F16L::set1(-20.f)).min(F16L::set1(20.f)) * F16L::set1(2.f));
    return (e - one) / (e + one);
}

// SiLU, or GELU by its tanh approximation.
inline F16L activate(F16L g, int activation) {
    const F16L one = F16L::set1(1.f);
    if (activation == SILU || activation == SWIGLU) return g / (one + exp16(F16L::zero() - g));
    const F16L inner = (g * g * g).fma(F16L::set1(0.044715f), g) * F16L::set1(0.7978845608f);
    return F16L::set1(0.5f) * g * (one + tanh16(inner));
}

inline F16L sigmoid16(F16L x) {
    const F16L one = F16L::set1(1.f);
    return one / (one + exp16(F16L::zero() - x));
}

// log(1 + e^x) to float32 precision: from e^-|x| by the series of 2 atanh(u / (2 + u)).
inline F16L softplus16(F16L x) {
    const F16L u = exp16(x.min(negated(x))), s = u / (u + F16L::set1(2.f)), z = s * s;
    F16L p = F16L::set1(1.f / 15);
    for (int n = 13; n >= 1; n -= 2) p = p.fma(z, F16L::set1(1.f / (float)n));
    return (s + s).fma(p, x.max(F16L::zero()));
}

// erf within 2e-7 (Abramowitz and Stegun, 7.1.26).
inline F16L erf16(F16L x) {
    const F16L one = F16L::set1(1.f), size = x.max(negated(x)), t = one / F16L::set1(0.3275911f).fma(size, one);
    F16L p = F16L::set1(1.061405429f).fma(t, F16L::set1(-1.453152027f)).fma(t, F16L::set1(1.421413741f));
    p = p.fma(t, F16L::set1(-0.284496736f)).fma(t, F16L::set1(0.254829592f));
    const F16L y = negated(p * t).fma(exp16(negated(x * x)), one);
    return x.above(F16L::zero(), y, negated(y));
}

// A vision encoder's activations: NO_ACTIVATION, GELU, its approximations, SiLU.
inline F16L activate_vision(F16L x, int activation) {
    const F16L one = F16L::set1(1.f);
    if (activation == NO_ACTIVATION) return x;
    if (activation == EXACT_GELU) return x * F16L::set1(0.5f) * (one + erf16(x * F16L::set1(0.70710678f)));
    F16L z = x;
    if (activation == QUICK_GELU) z = x * F16L::set1(1.702f);
    if (activation == TANH_GELU) z = (x * x * x).fma(F16L::set1(0.044715f), x) * F16L::set1(1.5957691216f);
    return x / (one + exp16(negated(z)));
}

// Whether a stack's first half gates the second; if not, the activation applies to all columns.
inline bool has_gate(int activation) { return activation != RELU2 && activation != XIELU; }

// e^x - 1; near 0, where the difference loses digits, by its series.
inline F16L expm1_16(F16L x) {
    const F16L one = F16L::set1(1.f), size = x.max(negated(x));
    F16L p = one;
    for (int n = 7; n >= 2; n--) p = (p * x).fma(F16L::set1(1.f / (float)n), one);
    return size.above(F16L::set1(0.35f), exp16(x) - one, p * x);
}

// `curve`: alpha of positive and of negative numbers, beta, and the largest argument of the exponential.
inline F16L xielu(F16L x, const float* curve) {
    const F16L low = (expm1_16(x.min(F16L::set1(curve[3]))) - x) * F16L::set1(curve[1]);
    return x.fma(F16L::set1(curve[2]), x.above(F16L::zero(), x * x * F16L::set1(curve[0]), low));
}

// Activation of an MLP: joins gates and ups, or applies to ups if there are no gates.
struct Gate {
    int activation;
    float limit;
    float scale = 1.f;             // factor of gates
    const float* curve = nullptr;  // of XIELU

    F16L operator()(F16L gate, F16L up) const {
        if (activation == RELU2) {
            up = up.max(F16L::zero());
            return up * up;
        }
        if (activation == XIELU) return xielu(up, curve);
        const F16L most = F16L::set1(limit);
        if (activation == SWIGLU) gate = gate.min(most);
        if (activation != SWIGLU_OAI) {
            gate = activate(gate * F16L::set1(scale), activation);
            if (limit == INFINITY) return gate * up;  // NaN stays NaN
            return gate.min(most) * up.min(most).max(negated(most));
        }
        gate = gate.min(most);
        up = up.min(most).max(negated(most));
        return gate * sigmoid16(gate * F16L::set1(1.702f)) * (up + F16L::set1(1.f));
    }
};

}  // namespace
