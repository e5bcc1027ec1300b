// Activations as inputs of packed products: int8, or int16 for precision, with a scale per group of 32 columns.
#pragma once
#include <cmath>

inline namespace LRT_SPACE {

// Rows form runs, and columns panels. A run of n rows is stored group by group, so that a kernel reaches all of them from
// one pointer, and the runs of a panel follow each other: codes (panel, run, group, n, 32), meta (panel, run, group, n, 2),
// and so on. Up to DIRECT_ROWS (1, 4 or 12) are one run, of one row or an even number (the last row may be padding); more
// rows are runs of at most PANEL_ROWS. AMX has runs of sixteen from TILE_ROWS rows on, since a tile costs the same for
// fewer.
constexpr int PANEL_COLUMNS = 512, PANEL_GROUPS = PANEL_COLUMNS / 32;
constexpr int TILE_ROWS = 32, MOST_RUN = LRT_AMX ? 16 : PANEL_ROWS;
inline bool in_tiles(int rows) { return LRT_AMX && rows >= TILE_ROWS; }
inline int longest_run(int rows) { return in_tiles(rows) ? MOST_RUN : PANEL_ROWS; }

struct RowRun { int start, size; };

struct Runs {
    int rows, count, size, longer;  // the first `longer` runs have size + 1 rows

    explicit Runs(int rows_) : rows(rows_) {
        count = rows <= DIRECT_ROWS ? 1 : (rows + longest_run(rows) - 1) / longest_run(rows);
        const int padded = rows > 1 && rows <= DIRECT_ROWS ? (rows + 1) / 2 * 2 : rows;
        size = padded / count;
        longer = padded % count;
    }
    int padded() const { return size * count + longer; }
    RowRun operator[](int run) const { return {run * size + least(run, longer), size + (run < longer)}; }
    RowRun of(int row) const {
        const int head = longer * (size + 1);
        return (*this)[row < head ? row / (size + 1) : longer + (row - head) / size];
    }
    // Where a run's group of columns is stored, of `groups` in all.
    size_t at(RowRun run, int group, int groups) const {
        const int first = group / PANEL_GROUPS * PANEL_GROUPS;  // of the panel
        return (size_t)first * padded() + (size_t)run.start * least(PANEL_GROUPS, groups - first) + (group - first) * run.size;
    }
};

struct RunRange {  // runs [first, last)
    int first, last;
    int rows(const Runs& runs) const { return runs[last - 1].start + runs[last - 1].size - runs[first].start; }
};

// The initial value of a symmetric layout's sums: -zero * the sum of the codes; if it `wraps`, in the halves of a word for
// columns 0 and 1 of each four, and 2 and 3. With BOTH_SUMS there is a sum per half step, to multiply by minima: in the
// halves of a word, or for int16 in two words.
struct Start {
    int zero, halves;
    int32_t* values;  // (panel, run, group, n, halves)
};
constexpr int MAX_STARTS = 15;

struct Acts {
    const float* x;       // (R, K)
    int8_t* codes;        // (panel, run, group, n, 32), or null if no matrix needs them; int16 codes are `pairs`
    float* meta;          // (panel, run, group, n, 2): scale, scale * sum
    Start starts[MAX_STARTS];
    int start_count, rows, cols;
    const int32_t* mixes;  // each row's mix of adapters, or null
    int32_t* pairs = nullptr;  // (panel, run, group, n, 16): int16 of columns 0 and 2, 1 and 3, 4 and 6, 5 and 7, ...; or null
    uint8_t* ready = nullptr;  // of a single row (K / 32): set as its groups are quantized, beside products that read them

    const Start* find_start(int zero, int of_halves) const {
        for (int i = 0; i < start_count; i++)
            if (starts[i].zero == zero && starts[i].halves == of_halves) return starts + i;
        return nullptr;
    }
    const int32_t* start(int zero, int of_halves) const { return find_start(zero, of_halves)->values; }
    // Waits for the first `count` groups; returns how many are ready.
    LRT_NOINLINE int wait(int count) const {
        for (int at = 0; at < cols / 32; at++)
            for (int spins = 0; !__atomic_load_n(ready + at, __ATOMIC_ACQUIRE); spins++) {
                if (at >= count) return at;
                pause(spins);
            }
        return cols / 32;
    }
};

inline float sum16(F16L x) {
    x = x + x.across<8>();
    x = x + x.across<4>();
    x = x + x.across<2>();
    float lanes[16];
    (x + x.across<1>()).store(lanes);
    return lanes[0];
}

// Multiplies every n consecutive values by the Hadamard matrix / sqrt(n), in place; n is 16, 32, 64 or 128.
inline void block_hadamard(float* x, int cols, int n) {
    const F16L factor = F16L::set1(1.f / std::sqrt((float)n));
    alignas(64) float signs[4][16];
    for (int b = 0; b < 4; b++)
        for (int i = 0; i < 16; i++) signs[b][i] = i >> b & 1 ? -1.f : 1.f;
    for (int at = 0; at < cols; at += n) {
        F16L v[8];
        const int count = n / 16;
        for (int i = 0; i < count; i++) {
            F16L a = F16L::load(x + at + 16 * i);
            a = a.fma(F16L::load(signs[0]), a.across<1>());
            a = a.fma(F16L::load(signs[1]), a.across<2>());
            a = a.fma(F16L::load(signs[2]), a.across<4>());
            v[i] = a.fma(F16L::load(signs[3]), a.across<8>());
        }
        for (int half = 1; half < count; half *= 2)
            for (int i = 0; i < count; i += 2 * half)
                for (int j = i; j < i + half; j++) {
                    const F16L a = v[j], b = v[j + half];
                    v[j] = a + b;
                    v[j + half] = a - b;
                }
        for (int i = 0; i < count; i++) (v[i] * factor).store(x + at + 16 * i);
    }
}

inline int32_t two_halves(int low, int high) { return (int32_t)((uint32_t)(low & 0xFFFF) | (uint32_t)high << 16); }

constexpr float LEAST_PEAK = 1e-33f;  // groups up to it are quantized to zeros: the inverse of a smaller scale is infinite

// Quantizes columns [column, column + count) of the row `x` with a scale per 32 columns, rounding to nearest, ties to
// even. A null `x` is a row of zeros. Codes stay in range whatever `x` holds.
template <bool PRECISE = false>
inline void quantize_row(const Acts& acts, const Runs& runs, int row, const float* x, int column, int count) {
    constexpr float MOST = PRECISE ? 32767.f : 127.f;
    const RowRun run = runs.of(row);
    for (int g = column / 32; g < (column + count) / 32; g++) {
        const F16L a = x ? F16L::load(x) : F16L::zero(), b = x ? F16L::load(x + 16) : F16L::zero();
        if (x) x += 32;
        const size_t index = runs.at(run, g, acts.cols / 32) + (row - run.start);
        const float peak = a.max(negated(a)).max(b.max(negated(b))).highest();
        const float scale = peak / MOST;
        const F16L inverse = F16L::set1(peak > LEAST_PEAK ? MOST / peak : 0.f), top = F16L::set1(MOST), bottom = F16L::set1(-MOST);
        const I16 first = (a * inverse).max(bottom).min(top).rounded(), second = (b * inverse).max(bottom).min(top).rounded();
        if (PRECISE) {
            alignas(64) uint32_t codes[32];
            first.as_bytes().store(codes);
            second.as_bytes().store(codes + 16);
            for (int i = 0; i < 16; i++) {
                const uint32_t* low = codes + i / 2 * 4 + i % 2;
                acts.pairs[index * 16 + i] = (int32_t)((low[0] & 0xFFFF) | low[2] << 16);
            }
        } else {
            first.store_i8(acts.codes + index * 32);
            second.store_i8(acts.codes + index * 32 + 16);
        }
        const int sums[2] = {first.sum(), second.sum()};
        float* meta = acts.meta + index * 2;
        meta[0] = scale;
        meta[1] = scale * (float)(sums[0] + sums[1]);
        for (int i = 0; i < acts.start_count; i++) {
            const Start& start = acts.starts[i];
            int32_t* values = start.values + index * start.halves;
            if (start.zero == BOTH_SUMS) {
                values[0] = PRECISE ? sums[0] : two_halves(sums[0], sums[1]);
                if (PRECISE) values[1] = sums[1];
                continue;
            }
            for (int half = 0; half < start.halves; half++) {
                const int sum = start.halves == 2 ? sums[half] : sums[0] + sums[1];
                values[half] = -start.zero * sum;
                if (PRECISE || !wraps(code_class(2 * start.zero), 8 / start.halves)) continue;
                const I16 all = start.halves == 1 ? first + second : half ? second : first;
                const int pairs = all.dot2(I16::nibbles(0x0011001100110011)).sum();  // columns 0 and 1 of each four
                values[half] = two_halves(-start.zero * pairs, -start.zero * (sum - pairs));
            }
        }
        if (acts.ready) __atomic_store_n(acts.ready + g, 1, __ATOMIC_RELEASE);
    }
}

// Codes of a run's group, as inputs of products.
struct ByteCodes {
    using Code = int8_t;
    static constexpr int GROUP = 32;  // of a row
    static const Code* of(const Acts& acts) { return acts.codes; }
    static LRT_INLINE Quad quad(const Code* p, int v) { return Quad::load(p + 4 * v); }
    static LRT_INLINE Quad shared_quad(const Code* p, int v) { return Quad::load_shared(p + 4 * v); }
};
struct TileCodes : ByteCodes {};  // for AMX
struct PairCodes {
    using Code = int32_t;
    static constexpr int GROUP = 16;
    struct Pairs { I16 even, odd; };
    static const Code* of(const Acts& acts) { return acts.pairs; }
    static LRT_INLINE Pairs quad(const Code* p, int v) { return {I16::set1(p[2 * v]), I16::set1(p[2 * v + 1])}; }
    static LRT_INLINE Pairs shared_quad(const Code* p, int v) { return quad(p, v); }
};

// Like Dots, with int16 activations.
template <bool STARTED, int CHAINS = 1> struct PairDots {
    struct Weights {
        I16 even, odd;
        Weights() = default;
        LRT_INLINE Weights(B64 codes) : even(even_bytes(codes)), odd(odd_bytes(codes)) {}
    };
    I16 sums[CHAINS];

    LRT_INLINE void begin(const int32_t* start) {
        sums[0] = STARTED ? I16::set1(*start) : I16::zero();
        if (CHAINS == 2) sums[CHAINS - 1] = I16::zero();
    }
    LRT_INLINE void add(int, const Weights& w, const PairCodes::Pairs& a) {
        sums[0] = w.even.dot2(a.even, sums[0]);
        sums[CHAINS - 1] = w.odd.dot2(a.odd, sums[CHAINS - 1]);
    }
    LRT_INLINE I16 total() const { return CHAINS == 2 ? sums[0] + sums[CHAINS - 1] : sums[0]; }
};

// Adds the minima of both halves times the halves' sums.
template <class Codes> LRT_INLINE F16L add_minima(I16 minima, const int32_t* sums) {
    if (Codes::GROUP == 32) return F16L::from(I16::set1(*sums).dot2(minima));
    const F16L first = F16L::from(minima & I16::set1(0xFFFF)) * F16L::set1((float)sums[0]);
    return F16L::from(minima.shr(16)).fma(F16L::set1((float)sums[1]), first);
}

}  // namespace
