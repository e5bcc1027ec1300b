// Products of dense float32 blocks: c (R, N) += a (R, K) b (K, N). Sums are in the order of K for any R and N.
#pragma once

inline namespace LRT_SPACE {

constexpr int BLOCK_ROWS = 6;  // rows whose sums with PANEL_TILES tiles fit in registers

// Rows of a, b and c are `a_stride`, `b_stride` and `c_stride` floats apart, columns of `a` are `step` apart.
struct FloatBlock {
    const float* a;
    size_t a_stride;
    int step;
    const float* b;
    size_t b_stride;
    int count;  // K
    float* c;
    size_t c_stride;
};

template <int R, int T> LRT_NOINLINE void multiply_block(const FloatBlock& block) {
    const float *a = block.a, *b = block.b;
    const size_t stride = block.a_stride;
    F16L sums[R][T];
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int t = 0; t < T; t++) sums[r][t] = F16L::load(block.c + r * block.c_stride + 16 * t);
    for (int k = 0; k < block.count; k++, a += block.step, b += block.b_stride) {
        F16L w[T];
#pragma GCC unroll 2
        for (int t = 0; t < T; t++) w[t] = F16L::load(b + 16 * t);
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            const F16L x = F16L::set1_shared(a + r * stride);
#pragma GCC unroll 2
            for (int t = 0; t < T; t++) sums[r][t] = w[t].fma(x, sums[r][t]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 2
        for (int t = 0; t < T; t++) sums[r][t].store(block.c + r * block.c_stride + 16 * t);
}

// Multiplies all `rows` by T tiles of 16 columns of `b`.
template <int T> inline void multiply_rows(int rows, FloatBlock block) {
    for (int some; rows; rows -= some) {
        some = rows >= BLOCK_ROWS ? BLOCK_ROWS : rows >= 3 ? 3 : 1;
        if (some == BLOCK_ROWS) multiply_block<BLOCK_ROWS, T>(block);
        else if (some == 3) multiply_block<3, T>(block);
        else multiply_block<1, T>(block);
        block.a += some * block.a_stride;
        block.c += some * block.c_stride;
    }
}

}  // namespace
