// The upper bound of decoding: sequential reads.
#pragma once

inline namespace LRT_SPACE {

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
                __builtin_prefetch(p + 64 * i + PREFETCH, 0, PREFETCH_INTO);
                sums[i] = sums[i] | I16::load(p + 64 * i);
            }
        const int total = (sums[0] | sums[1] | sums[2] | sums[3]).sum();
        if (total == 1) sink = total;
    });
}

}  // namespace
