// The KV cache: blocks of 256 tokens, with one piece per group (KV head). A piece holds keys in tiles of 16 tokens,
// values token by token, then the scales if quantized. No byte belongs to two tokens, because several threads append
// rows. quant/cpu/kv.py has the same sizes.
#pragma once

inline namespace LRT_SPACE {

constexpr int KEYS = 256;      // tokens per block
constexpr int MAX_HEAD = 512;  // elements of a key or value
constexpr int CHUNK = 32;      // int4: elements that share a scale

// bf16: keys (16, E, 16), values (256, E).
struct CachedBf16 {
    using Lanes = F16L;
    static constexpr int BYTES = 2, STEP = 1, SIXTEEN = 32;  // SIXTEEN: bytes to the next lanes of a value
    static F16L load(const uint8_t* p, size_t) { return F16L::load_bf16(p); }
};
// int8: the same, then float32 scales (256) of the keys and of the values.
struct CachedInt8 {
    using Lanes = I16;
    static constexpr int BYTES = 1, STEP = 2, SIXTEEN = 16;
    // Lanes of two 16-bit halves, the second of them `next` bytes further.
    static I16 load(const uint8_t* p, size_t next) { return (I16::load_i8(p) & I16::set1(0xFFFF)) | I16::load_i8(p + next).shl(16); }
};
// int4, in C chunks of 32 elements, the last of which may be half full. Byte j of values (256, C, 16) holds elements j
// and j + 16. In keys (16 tiles, C, 384), line j of a chunk's first 256 bytes, (16, 16), does too. Keys have six bits:
// the upper two bits of elements 0-15 and 16-31 are in the two words (2, 16) per token that follow. Then come the
// scales of keys and of values, bf16 (C, 256) each. An element is (code - half of the largest code) times the scale.
struct CachedInt4 {
    static constexpr int KEY_BYTES = 24, VALUE_BYTES = 16;  // per chunk of a token
    static constexpr float KEY_ZERO = 31.5f, VALUE_ZERO = 7.5f;
};

inline int chunks_of(int size) { return (size + CHUNK - 1) / CHUNK; }

// Quantized keys and values are rotated by a Hadamard matrix, in blocks of the largest power of two that divides the
// head's size: this spreads a head's outliers over all of its elements, which share scales. Queries are rotated as
// well, so that products stay the same, and sums of values are rotated back: the matrix is its own inverse.
inline void rotate_head(int format, int size, float* head) {
    if (format != KV_BF16) block_hadamard(head, size, least(128, size & -size));
}

// A token's bytes in one group: key, value, and their scales.
struct TokenBytes {
    size_t key, value, scale;

    TokenBytes(int format, int size) : key(2 * (size_t)size), value(key), scale(0) {
        const size_t chunks = chunks_of(size);
        if (format == KV_INT8) key = value = size, scale = 4;
        if (format == KV_INT4) key = CachedInt4::KEY_BYTES * chunks, value = CachedInt4::VALUE_BYTES * chunks, scale = 2 * chunks;
    }
    size_t of_piece() const { return KEYS * (key + value + 2 * scale); }
};

// One group's piece of a block.
struct Piece {
    uint8_t *k, *v, *k_scale, *v_scale;

    Piece(uint8_t* data, const TokenBytes& bytes) : k(data) {
        v = k + KEYS * bytes.key;
        k_scale = v + KEYS * bytes.value;
        v_scale = k_scale + KEYS * bytes.scale;
    }
    Piece(const Span& span, int block, int group, int size) : Piece(span.data, TokenBytes(span.format, size)) {
        const size_t skipped = block * span.stride + group * TokenBytes(span.format, size).of_piece();
        k += skipped, v += skipped, k_scale += skipped, v_scale += skipped;
    }
};

// Copies the scales of `count` tokens within a piece's planes or to another piece's.
inline void copy_scales(int format, int size, const uint8_t* from, int source, uint8_t* to, int at, int count) {
    const size_t width = format == KV_INT8 ? 4 : 2, planes = TokenBytes(format, size).scale / width;
    for (size_t plane = 0; plane < planes; plane++)
        __builtin_memcpy(to + (plane * KEYS + at) * width, from + (plane * KEYS + source) * width, count * width);
}

// Copies sixteen tokens from `at` on to the same position in another piece.
inline void copy_tile(int format, int size, const Piece& from, const Piece& to, int at) {
    const TokenBytes bytes(format, size);
    __builtin_memcpy(to.k + at * bytes.key, from.k + at * bytes.key, 16 * bytes.key);
    __builtin_memcpy(to.v + at * bytes.value, from.v + at * bytes.value, 16 * bytes.value);
    copy_scales(format, size, from.k_scale, at, to.k_scale, at, 16);
    copy_scales(format, size, from.v_scale, at, to.v_scale, at, 16);
}

// Copies WIDTH bytes of each line of a tile; lines are `bytes` long.
template <size_t WIDTH> inline void copy_lanes(const uint8_t* from, uint8_t* to, int lines, size_t bytes) {
    for (int line = 0; line < lines; line++) __builtin_memcpy(to + line * bytes, from + line * bytes, WIDTH);
}

// Copies LANES keys of a tile, from lane `source` on, to another tile, from lane `lane` on.
template <int LANES> inline void copy_keys(int format, int size, const uint8_t* from, int source, uint8_t* to, int lane) {
    if (format == KV_BF16) {
        copy_lanes<2 * LANES>(from + 2 * source, to + 2 * lane, size, 32);
    } else if (format == KV_INT8) {
        copy_lanes<LANES>(from + source, to + lane, size, 16);
    } else {
        for (int c = 0; c < chunks_of(size); c++, to += 16 * CachedInt4::KEY_BYTES, from += 16 * CachedInt4::KEY_BYTES) {
            copy_lanes<LANES>(from + source, to + lane, 16, 16);
            copy_lanes<4 * LANES>(from + 256 + 4 * source, to + 256 + 4 * lane, 2, 64);  // the upper bits
        }
    }
}

// Copies adjacent tokens within one tile to another piece, where they are within one tile too.
inline void copy_tokens(int format, int size, const Piece& from, int source, const Piece& to, int at, int count) {
    const TokenBytes bytes(format, size);
    const uint8_t* old = from.k + source / 16 * 16 * bytes.key;
    uint8_t* tile = to.k + at / 16 * 16 * bytes.key;
    int done = 0;
    auto go = [&](auto lanes) {
        constexpr int LANES = decltype(lanes)::value;
        for (; done + LANES <= count; done += LANES)
            copy_keys<LANES>(format, size, old, source % 16 + done, tile, at % 16 + done);
    };
    go(std::integral_constant<int, 8>());
    go(std::integral_constant<int, 4>());
    go(std::integral_constant<int, 1>());
    __builtin_memcpy(to.v + at * bytes.value, from.v + source * bytes.value, count * bytes.value);
    copy_scales(format, size, from.k_scale, source, to.k_scale, at, count);
    copy_scales(format, size, from.v_scale, source, to.v_scale, at, count);
}

inline uint16_t to_bf16(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline float from_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    __builtin_memcpy(&x, &bits, 4);
    return x;
}

inline void append_int8(const float* from, int size, float* scale, int8_t* to, int step) {
    float peak = 0;
    for (int e = 0; e < size; e++) peak = most(peak, std::fabs(from[e]));
    *scale = peak / 127.f;
    const float inverse = peak > LEAST_PEAK ? 127.f / peak : 0.f;
    for (int e = 0; e < size; e++) to[(size_t)e * step] = (int8_t)std::nearbyintf(least(127.f, most(-127.f, from[e] * inverse)));
}

// Quantizes with the scale after its rounding, so that only the codes are inexact. Codes are up to 2 * `zero`; chunks
// are `next` bytes apart, bytes `step` apart. The upper bits of codes above 15 go to `uppers`, if any.
inline void append_int4(const float* from, int size, float zero, uint16_t* scales, uint8_t* to, int next, int step, uint8_t* uppers) {
    for (int c = 0; c < chunks_of(size); c++, from += CHUNK, to += next) {
        const int count = least(CHUNK, size - c * CHUNK);
        float peak = 0;
        for (int e = 0; e < count; e++) peak = most(peak, std::fabs(from[e]));
        const uint16_t scale = to_bf16(peak / zero);
        scales[(size_t)c * KEYS] = scale;
        const float inverse = scale ? 1.f / from_bf16(scale) : 0.f;
        auto code = [&](int e) {
            return e < count ? (uint32_t)std::nearbyintf(most(0.f, least(2 * zero, from[e] * inverse + zero))) : 0u;
        };
        uint32_t words[2] = {0, 0};
        for (int j = 0; j < 16; j++) {
            const uint32_t low = code(j), high = code(j + 16);
            to[j * step] = (uint8_t)((low & 15) | (high & 15) << 4);
            words[0] |= low >> 4 << 2 * j;
            words[1] |= high >> 4 << 2 * j;
        }
        if (!uppers) continue;
        for (int half = 0; half < 2; half++) __builtin_memcpy(uppers + (size_t)c * next + 64 * half, words + half, 4);
    }
}

// Stores a token's value of one group.
inline void append_value(const Span& span, int group, int slot, int size, const float* value) {
    const Piece piece(span, slot / KEYS, group, size);
    const int at = slot % KEYS;
    if (span.format == KV_BF16) {
        uint16_t* values = (uint16_t*)piece.v + (size_t)at * size;
        for (int e = 0; e < size; e++) values[e] = to_bf16(value[e]);
    } else if (span.format == KV_INT8) {
        append_int8(value, size, (float*)piece.v_scale + at, (int8_t*)piece.v + (size_t)at * size, 1);
    } else {
        const int chunks = chunks_of(size), next = CachedInt4::VALUE_BYTES;
        append_int4(value, size, CachedInt4::VALUE_ZERO, (uint16_t*)piece.v_scale + at, piece.v + (size_t)at * chunks * next, next, 1, nullptr);
    }
}

// Stores a token's key and value.
inline void append(const Span& span, int group, int slot, int size, const float* key, const float* value) {
    const Piece piece(span, slot / KEYS, group, size);
    const int at = slot % KEYS, tile = at / 16, lane = at % 16;
    if (span.format == KV_BF16) {
        uint16_t* keys = (uint16_t*)piece.k + (size_t)tile * 16 * size + lane;
        for (int e = 0; e < size; e++) keys[(size_t)e * 16] = to_bf16(key[e]);
    } else if (span.format == KV_INT8) {
        append_int8(key, size, (float*)piece.k_scale + at, (int8_t*)piece.k + (size_t)tile * 16 * size + lane, 16);
    } else {
        const int chunks = chunks_of(size), next = 16 * CachedInt4::KEY_BYTES;
        uint8_t* keys = piece.k + (size_t)tile * chunks * next;
        append_int4(key, size, CachedInt4::KEY_ZERO, (uint16_t*)piece.k_scale + at, keys + lane, next, 16, keys + 256 + 4 * lane);
    }
    append_value(span, group, slot, size, value);
}

// Quantized keys are cached without their projection's bias. In models that have one (Qwen2), a few of its elements
// are a hundred times larger than the variation between tokens, which a shared scale would then round away. Rotated to
// its token's position p, the bias adds to a score, for each rotary pair j,
//     (q1 b1 + q2 b2) cos(p t_j) + (q2 b1 - q1 b2) sin(p t_j),
// which is one more product with a table of cosines and sines of 256 positions, once the query's pairs are rotated back
// by the position of the block. The table is (16 tiles, pairs, 2, 16). A token's position is assumed to be its index in
// the cache; the key of a row with another position (after a picture) includes the difference between the bias at both.
struct KeyBias {
    const float *near_turns, *far_turns, *bias;  // bias (E) of a group; null if keys have none, or are cached with it
    int half;

    KeyBias(const AttentionArgs& args, const Span& span, int group) {
        const bool apart = span.format != KV_BF16 && args.near_turns && args.qkv_bias && !args.k_norm && !args.gated;
        near_turns = args.near_turns;
        far_turns = args.far_turns;
        bias = apart ? args.qkv_bias + (size_t)(args.heads + group) * args.head_dim : nullptr;
        half = args.rotary / 2;
    }
    void take_off(float* key) const {
        if (bias)
            for (int e = 0; e < 2 * half; e++) key[e] -= bias[e];
    }
    // A rotated key's bias at its index in the cache.
    void take_off(float* key, const float* cos, const float* sin) const {
        for (int j = 0; bias && j < half; j++) {
            key[j] -= bias[j] * cos[j] - bias[j + half] * sin[j];
            key[j + half] -= bias[j + half] * cos[j] + bias[j] * sin[j];
        }
    }
    // (half, 2) factors of a rotated query (size) for the 256 positions from 256 * block on.
    void turn(const float* rotated, int format, int size, int block, float* factors) const {
        alignas(64) float q[MAX_HEAD];
        copy_floats(rotated, size, q);
        rotate_head(format, size, q);
        const float* far = far_turns + (size_t)block * 2 * half;
        for (int j = 0; j < half; j++) {
            const float q1 = q[j], q2 = q[j + half], b1 = bias[j], b2 = bias[j + half], cos = far[2 * j], sin = far[2 * j + 1];
            const float a = q1 * b1 + q2 * b2, c = q2 * b1 - q1 * b2;
            factors[2 * j] = a * cos + c * sin;
            factors[2 * j + 1] = c * cos - a * sin;
        }
    }
};

}  // namespace
