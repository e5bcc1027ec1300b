// Upper bounds of this machine's speed to compare kernels with: products in registers, sequential reads.
#pragma once

inline namespace LRT_SPACE {

// Runs twelve independent chains of `rounds` multiply-adds on every thread; returns the number of operations, two per
// multiply-add.
double multiply_peak(Context& context, int rounds) {
    constexpr int CHAINS = 12, STEPS = 8;
    using Peak = Dots<code_class(15), 0, STEPS>;
    const int threads = context.pool.threads();
    volatile int sink = 0;
    parallel(context, threads, [&](int) {
        alignas(64) uint8_t bytes[64];
        for (int i = 0; i < 64; i++) bytes[i] = (uint8_t)(sink + i % 16);
        const Peak::Weights codes = B64::load(bytes);
        const Quad a = Quad::load((const int8_t*)bytes);
        I16 sums[CHAINS];
        for (auto& sum : sums) sum = I16::zero();
        for (int round = 0; round < rounds; round += STEPS)
#pragma GCC unroll 12
            for (auto& sum : sums) {
                Peak dots;
                dots.begin(nullptr);
#pragma GCC unroll 8
                for (int step = 0; step < STEPS; step++) dots.add(step, codes, a);
                sum = sum + dots.total();
            }
        int total = 0;
        for (auto& sum : sums) total += sum.sum();
        if (total == 1) sink = total;
    });
    return 128. * CHAINS * rounds * threads;
}

// Reads every byte once; threads take pieces one by one.
void read_all(Context& context, const uint8_t* data, int64_t bytes) {
    constexpr int64_t PIECE = 256 << 10;
    volatile int sink = 0;
    parallel(context, (int)((bytes + PIECE - 1) / PIECE), [&](int piece) {
        const uint8_t *p = data + piece * PIECE, *end = data + least(bytes, (piece + 1) * PIECE);
        I16 sums[4] = {I16::zero(), I16::zero(), I16::zero(), I16::zero()};
        for (; p + 256 <= end; p += 256)
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                __builtin_prefetch(p + 64 * i + PREFETCH);
                sums[i] = sums[i] | I16::load(p + 64 * i);
            }
        const int total = (sums[0] | sums[1] | sums[2] | sums[3]).sum();
        if (total == 1) sink = total;
    });
}

}  // namespace
