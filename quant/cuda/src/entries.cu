// Writes entries of an expert table (plan.cuh), passed as kernel arguments: nothing is copied, and
// kernels that were launched before still see the old table.
#include "plan.cuh"

constexpr int MOST_ENTRIES = 32, WORDS = sizeof(Expert) / 8;

struct Entries {
    u64* table;
    u64 words[MOST_ENTRIES][WORDS];
    int experts[MOST_ENTRIES];
};

extern "C" __global__ void entries(Entries args) {
    const int entry = threadIdx.x / WORDS, word = threadIdx.x % WORDS;
    args.table[(i64)args.experts[entry] * WORDS + word] = args.words[entry][word];
}
