// What blocks of grouped products have in common: experts' addresses, and parts of the slots.
#pragma once
#include "device.cuh"

enum { DOWN = 2 };  // after gate and up

// Where an expert lies: an entry of a layer's table. What there is none of is null.
struct Expert {
    i64 kind;                 // from 1 on; 0: it is not there
    const u8* tiles[3];       // gate, up, down; without a gate, up is the first
    const float* factors[3];  // of each of their tiles
    const float* biases[2];   // of gate and up together, of down
};

// `count` slots of one expert, from the `first` in the plan's order on.
struct Part {
    int expert, first, count;
};
