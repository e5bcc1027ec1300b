// Gate activations, and types of stored results.
#pragma once
#include "device.cuh"

struct Bf16 {
    u16 bits;
};

FN float value_of(float f) { return f; }
FN float value_of(Bf16 b) { return as_float((u32)b.bits << 16); }
FN void store(float* at, float value) { *at = value; }
FN void store(Bf16* at, float value) {  // rounds ties to even
    const u32 bits = as_bits(value);
    at->bits = (u16)(value == value ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : 0x7FC0);
}

FN float sigmoid(float x) { return 1.f / (1.f + expf(-x)); }
FN float softplus(float x) { return x > 20.f ? x : log1pf(expf(x)); }

enum { SILU = 1, GELU_TANH, SWIGLU_OAI, RELU2, GELU, QUICK_GELU, CLIP, XIELU, SWIGLU };  // from RELU2 to XIELU: without a gate

template <int KIND>
FN float activated(float x) {
    if constexpr (KIND == GELU) return 0.5f * x * (1.f + erff(0.70710678f * x));
    if constexpr (KIND == QUICK_GELU) return x * sigmoid(1.702f * x);
    // 0.5 (1 + tanh(z)) is sigmoid(2 z)
    if constexpr (KIND == GELU_TANH) return x * sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
    return x * sigmoid(x);
}

template <int KIND>
FN float gated(float gate, float up, float limit) {
    if constexpr (KIND != SWIGLU_OAI && KIND != SWIGLU) gate = activated<KIND>(gate);
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
    if constexpr (KIND == SWIGLU) return activated<SILU>(gate) * up;
    if constexpr (KIND != SWIGLU_OAI) return gate * up;
    return gate * sigmoid(1.702f * gate) * (up + 1.f);
}
