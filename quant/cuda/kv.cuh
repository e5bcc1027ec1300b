// Rows of a KV cache: one token's key or value of one head, as bytes that lie together.
//
// Keys are read eight numbers a lane, values W numbers, and both as bf16: as the operands of products
// want them, in an order that suits loads. `write` is called by a warp whose lane has number
// lane + 32 i of the row as x[i].
#pragma once
#include "gates.cuh"

FN uint4 nothing() { return make_uint4(0, 0, 0, 0); }

template <int SIZE_>
struct Bf16Numbers {
    static constexpr int SIZE = SIZE_, BYTES = 2 * SIZE, PIECES = (SIZE + 31) / 32;
    static constexpr int W = SIZE % 64 == 0 ? 8 : 4;

    // Numbers 32 c + 8 t and on.
    FN uint4 key(const u8* row, int c, int t) {
        return 32 * c + 8 * t < SIZE ? *(const uint4*)(row + 64 * c + 16 * t) : nothing();
    }
    // Numbers 8 W c + W g and on, in W / 2 words.
    FN void value(const u8* row, int c, int g, bool live, u32 (&words)[W / 2]) {
        live = live && 8 * W * c + W * g < SIZE;
        const u8* at = row + 2 * W * (8 * c + g);
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
