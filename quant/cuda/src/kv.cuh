// Rows of a KV cache: one token's key or value of one head, in contiguous bytes. A lane reads eight elements of a key
// or W of a value, as bf16 operands of products. In shared memory, the 16-byte pieces of a row may be swizzled: their
// indices are XORed with `turn`, so that lanes access different banks. `write` is called by a warp; x[i] of a lane is
// element lane + 32 i of the row. Quantized rows are stored after a Hadamard rotation in blocks of TURN. A cache
// consists of blocks of BLOCK tokens, each with all layers: `blocks` are their addresses. In a block, a layer's keys
// begin at one offset, head after head; so do its values.
#pragma once
#include "gates.cuh"

constexpr int BLOCK = 256;

// A sequence of a pass, in a table in the order of rows. Offsets are in bytes from the struct itself.
struct Span {
    i64 blocks, tree;  // offsets of the addresses of its cache's blocks, and of its `tree` (attention.cuh) or 0
    i64 held;          // tokens in the cache before the pass
    i64 first, rows;   // its rows of the pass
    i64 fresh;         // its new tokens: rows beyond them repeat the last one
    i64 columns;       // elements of a row of `tree`; -1: without any, for layers with a window
    i64 unused;

    FN u8* const* addresses(const Span& span) { return (u8* const*)((const u8*)&span + span.blocks); }
    FN int token(const Span& span, int row) { return row < (int)span.fresh ? row : (int)span.fresh - 1; }
};

// The last of `count` places that begins at or before `at`, or the first.
template <class Begin>
FN int last_begun(int count, int at, Begin begin) {
    int low = 0;
    for (int high = count; high - low > 1;) {
        const int middle = (low + high) / 2;
        (begin(middle) <= at ? low : high) = middle;
    }
    return low;
}

FN const Span& span_of(const Span* spans, int count, int row) {
    return spans[last_begun(count, row, [&](int at) { return (int)spans[at].first; })];
}

FN float most(float a, float b) { return a > b ? a : b; }
FN uint4 nothing() { return make_uint4(0, 0, 0, 0); }

template <int SIZE_>
struct Bf16Numbers {
    static constexpr int SIZE = SIZE_, BYTES = 2 * SIZE, PIECES = (SIZE + 31) / 32;
    static constexpr int W = SIZE % 64 == 0 ? 8 : 4, TURN = 1;
    static constexpr bool SCALED = false, CHUNKED = false, TURNS = SIZE % 64 == 0;

    FN float scale(const u8* row) { return 1; }
    // Elements from 32 c + 8 t on.
    FN uint4 key(const u8* row, int c, int t, int turn = 0) {
        return 32 * c + 8 * t < SIZE ? *(const uint4*)(row + 16 * ((4 * c + t) ^ turn)) : nothing();
    }
    // Elements from 8 W c + W g on, in W / 2 words.
    FN void value(const u8* row, int c, int g, bool live, u32 (&words)[W / 2], int turn = 0) {
        live = live && 8 * W * c + W * g < SIZE;
        const u8* at = row + 2 * W * ((8 * c + g) ^ turn);
        if constexpr (W == 8) {
            const uint4 v = live ? *(const uint4*)at : nothing();
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        } else {
            const uint2 v = live ? *(const uint2*)at : make_uint2(0, 0);
            words[0] = v.x, words[1] = v.y;
        }
    }
    FN void write(u8* row, int lane, const float (&x)[PIECES]) {
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            if (lane + 32 * i < SIZE) store((Bf16*)row + lane + 32 * i, x[i]);
    }
};

// Signed bytes `first` and `first` + 1 of four, as bf16.
FN u32 two_bytes(u32 codes, int first) {
    codes ^= 0x80808080u;  // become the low bits of the float 2^23 + 128 + code
    const float a = as_float(pick(codes, 0x4B000000u, 0x7440 + first)), b = as_float(pick(codes, 0x4B000000u, 0x7441 + first));
    return two_bf16(plus(a, -8388736.f), plus(b, -8388736.f));
}

// Signed bytes, followed by their float scale.
template <int SIZE_>
struct Int8Numbers {
    static constexpr int SIZE = SIZE_, BYTES = SIZE + 4, PIECES = (SIZE + 31) / 32;
    static constexpr int W = SIZE % 64 == 0 ? 8 : 4, TURN = (SIZE & -SIZE) < 128 ? (SIZE & -SIZE) : 128;
    static constexpr bool SCALED = true, CHUNKED = false, TURNS = false;

    FN float scale(const u8* row) { return *(const float*)(row + SIZE); }
    FN uint4 key(const u8* row, int c, int t, int = 0) {
        if (32 * c + 8 * t >= SIZE) return nothing();
        const u32* at = (const u32*)(row + 32 * c + 8 * t);
        const u32 a = at[0], b = at[1];
        return make_uint4(two_bytes(a, 0), two_bytes(a, 2), two_bytes(b, 0), two_bytes(b, 2));
    }
    FN void value(const u8* row, int c, int g, bool live, u32 (&words)[W / 2], int = 0) {
        live = live && 8 * W * c + W * g < SIZE;
        const u32* at = (const u32*)(row + W * (8 * c + g));
#pragma unroll
        for (int i = 0; i < W / 4; i++) {
            const u32 codes = live ? at[i] : 0;
            words[2 * i] = two_bytes(codes, 0), words[2 * i + 1] = two_bytes(codes, 2);
        }
    }
    FN void write(u8* row, int lane, const float (&x)[PIECES]) {
        float peak = 0;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            if (lane + 32 * i < SIZE) peak = most(peak, x[i] < 0 ? -x[i] : x[i]);
#pragma unroll
        for (int lanes = 16; lanes; lanes >>= 1) peak = most(peak, shuffle_xor(peak, lanes));
        const float inverse = peak > 0 ? 127.f / peak : 0;
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            if (lane + 32 * i < SIZE) row[lane + 32 * i] = (u8)nearest(times(x[i], inverse));
        if (lane == 0) *(float*)(row + SIZE) = peak / 127.f;
    }
};

// Two codes below 64, each stored doubled, minus `zero`, as bf16.
FN u32 two_codes(u32 a, u32 b, float zero) {  // low bits of the float 2^22 + code
    return two_bf16(plus(as_float(0x4A800000u | a), -4194304.f - zero), plus(as_float(0x4A800000u | b), -4194304.f - zero));
}

// Codes of four bits, or six with UPPERS. First the nibbles in order, then all upper bits, then the bf16 scales of
// every 32 elements. An element is (code - half of the largest code) times the scale.
template <int SIZE_, bool UPPERS>
struct SmallNumbers {
    static constexpr int SIZE = SIZE_, PIECES = (SIZE + 31) / 32, SCALES_AT = (UPPERS ? 24 : 16) * PIECES;
    static constexpr int BYTES = (SCALES_AT + 2 * PIECES + 3) / 4 * 4;
    static constexpr int W = 4, TURN = (SIZE & -SIZE) < 128 ? (SIZE & -SIZE) : 128;
    static constexpr bool SCALED = false, CHUNKED = true, TURNS = false;
    static constexpr float ZERO = UPPERS ? 31.5f : 7.5f;

    FN float scale(const u8* row, int c) { return value_of(((const Bf16*)(row + SCALES_AT))[c]); }
    FN uint4 key(const u8* row, int c, int t, int = 0) {
        const u32 low = *(const u32*)(row + 16 * c + 4 * t), high = UPPERS ? *(const u16*)(row + 16 * PIECES + 8 * c + 2 * t) : 0;
        u32 words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const u32 a = (low >> 8 * i & 15) | (high >> 4 * i & 3) << 4, b = (low >> (8 * i + 4) & 15) | (high >> (4 * i + 2) & 3) << 4;
            words[i] = two_codes(2 * a, 2 * b, ZERO);
        }
        return make_uint4(words[0], words[1], words[2], words[3]);
    }
    FN void value(const u8* row, int c, int g, bool live, u32 (&words)[W / 2], int = 0) {
        const u32 codes = live ? *(const u16*)(row + 16 * c + 2 * g) : 0;
#pragma unroll
        for (int i = 0; i < 2; i++) words[i] = two_codes((codes >> 8 * i & 15) << 1, (codes >> (8 * i + 4) & 15) << 1, ZERO);
    }
    FN void write(u8* row, int lane, const float (&x)[PIECES]) {
#pragma unroll
        for (int c = 0; c < PIECES; c++) {
            float peak = x[c] < 0 ? -x[c] : x[c];
#pragma unroll
            for (int lanes = 16; lanes; lanes >>= 1) peak = most(peak, shuffle_xor(peak, lanes));
            Bf16 kept;
            store(&kept, peak / ZERO);
            const float scale = value_of(kept), inverse = scale > 0 ? 1.f / scale : 0;
            const float exact = fused(x[c], inverse, ZERO), above = exact > 0 ? exact : 0;
            const i32 code = nearest(above < 2 * ZERO ? above : 2 * ZERO);
            i32 low = (code & 15) << 4 * (lane % 8), high = (code >> 4) << 2 * (lane % 8);
#pragma unroll
            for (int lanes = 1; lanes < 8; lanes *= 2) low |= shuffle_xor(low, lanes), high |= shuffle_xor(high, lanes);
            if (lane % 8 == 0) {
                *(u32*)(row + 16 * c + lane / 2) = (u32)low;
                if constexpr (UPPERS) *(u16*)(row + 16 * PIECES + 8 * c + lane / 4) = (u16)high;
            }
            if (lane == 0) ((Bf16*)(row + SCALES_AT))[c] = kept;
        }
    }
};

// Multiplies blocks of TURN elements of a row by the Hadamard matrix / sqrt(TURN), its own inverse.
template <int TURN, int PIECES>
FN void rotate(float (&x)[PIECES], int lane) {
#pragma unroll
    for (int width = 1; width < TURN && width < 32; width *= 2)
#pragma unroll
        for (int i = 0; i < PIECES; i++) {
            const float other = shuffle_xor(x[i], width);
            x[i] = plus(other, lane & width ? -x[i] : x[i]);
        }
#pragma unroll
    for (int width = 32; width < TURN; width *= 2)
#pragma unroll
        for (int i = 0; i < PIECES; i++)
            if (!(i & width / 32)) {
                const float a = x[i], b = x[i + width / 32];
                x[i] = plus(a, b), x[i + width / 32] = plus(a, -b);
            }
    constexpr float ROOT = TURN == 128 ? 0.0883883476f : TURN == 64 ? 0.125f : TURN == 32 ? 0.176776695f
                         : TURN == 16 ? 0.25f : TURN == 8 ? 0.353553391f : 1;
#pragma unroll
    for (int i = 0; i < PIECES; i++) x[i] = times(x[i], ROOT);
}
