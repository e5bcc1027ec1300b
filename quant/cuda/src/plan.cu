// Turns the routing of a pass into work for the blocks of grouped.cu: sorts slots by expert and cuts
// them into parts of as many as one block computes. Runs as one block, with a thread per expert.
#include "plan.cuh"

constexpr int WANTED_WORDS = 32;
constexpr int MOST_EXPERTS = 32 * WANTED_WORDS;

struct Plan {
    const Expert* experts;
    const int* chosen;  // experts of each row's slots, rows `stride` apart
    Part* parts;        // unused parts are empty
    int* slots;
    int count, used, stride;  // slots in all; slots and stride of a row
    int most, size, kind;     // number of parts; slots of a part; kind of the experts
    u32 wanted[WANTED_WORDS];
};

// The expert of a slot if it is wanted and present, else -1. A replay thus follows the current table.
FN int expert_of(const Plan& args, int slot) {
    const int expert = args.chosen[(i64)(slot / args.used) * args.stride + slot % args.used];
    const bool wanted = args.wanted[expert / 32] >> expert % 32 & 1;
    return wanted && args.experts[expert].kind == args.kind ? expert : -1;
}

extern "C" __global__ void plan(Plan args) {
    // Per expert, slots and parts: their number, then their end.
    __shared__ u32 slots[MOST_EXPERTS], parts[MOST_EXPERTS], filled[MOST_EXPERTS];
    const int expert = threadIdx.x, experts = blockDim.x;
    slots[expert] = filled[expert] = 0;
    __syncthreads();
    for (int s = threadIdx.x; s < args.count; s += experts) {
        const int chosen = expert_of(args, s);
        if (chosen >= 0) atomicAdd(&slots[chosen], 1);
    }
    __syncthreads();
    const u32 own = slots[expert];
    parts[expert] = (own + args.size - 1) / args.size;
    __syncthreads();
    for (int before = 1; before < experts; before *= 2) {
        const u32 more = expert >= before ? slots[expert - before] : 0, others = expert >= before ? parts[expert - before] : 0;
        __syncthreads();
        slots[expert] += more, parts[expert] += others;
        __syncthreads();
    }
    int first = slots[expert] - own;
    for (int part = parts[expert] - (own + args.size - 1) / args.size; part < parts[expert]; part++) {
        const int left = slots[expert] - first;
        args.parts[part] = Part{expert, first, left < args.size ? left : args.size};
        first += args.size;
    }
    for (int part = parts[experts - 1] + threadIdx.x; part < args.most; part += experts) args.parts[part].count = 0;
    // The order of an expert's slots is arbitrary: it changes no result.
    for (int s = threadIdx.x; s < args.count; s += experts) {
        const int chosen = expert_of(args, s);
        if (chosen >= 0) args.slots[slots[chosen] - 1 - atomicAdd(&filled[chosen], 1)] = s;
    }
}
