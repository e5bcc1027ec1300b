// Entries of a table of experts (plan.cuh), which come with the launch: nothing is copied, and kernels
// that were started before see the table as it was.
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
