// Writes entries of expert tables (plan.cuh), passed as kernel arguments: nothing is copied, and kernels that were
// launched before still see the old tables.
#include "plan.cuh"

constexpr int MOST_ENTRIES = 32, WORDS = sizeof(Expert) / 8;

struct Entries {
    u64 words[MOST_ENTRIES][WORDS];
    u64 entries[MOST_ENTRIES];  // addresses
};

extern "C" __global__ void entries(Entries args) {
    const int entry = threadIdx.x / WORDS, word = threadIdx.x % WORDS;
    ((u64*)args.entries[entry])[word] = args.words[entry][word];
}
