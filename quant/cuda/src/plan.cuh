// Shared by the grouped kernels: experts' addresses, and parts of the slots.
#pragma once
#include "device.cuh"

enum { DOWN = 2 };  // after gate and up

// An expert's addresses: an entry of a layer's table. Missing matrices, factors and biases are null.
struct Expert {
    i64 kind;                 // from 1 on; 0: absent
    const u8* tiles[3];       // gate, up, down; without a gate, up is the first
    const float* factors[3];  // a factor per tile
    const float* biases[2];   // gate and up together, down
};

// Whether the host computes slot `slot`: its expert is not in the table, or of a kind after the first `kinds`.
FN bool is_absent(const Expert* experts, const int* chosen, int used, int stride, int kinds, int slot) {
    const i64 kind = experts[chosen[(i64)(slot / used) * stride + slot % used]].kind;
    return kind == 0 || kind > kinds;
}

// `count` slots of one expert, from slot `first` of the plan on.
struct Part {
    int expert, first, count;
};
