// Dequantizes a lane's codes of a step.
#pragma once
#include "formats.cuh"

// Columns 4t to 4t + 3 and 16 + 4t to 16 + 4t + 3 of one of the lane's rows: scale * code + offset, rounded
// after the product and after the sum, as in the formats' reference.
template <class F, class Scales>
FN void numbers(const typename F::Codes& codes, const Scales& scales, const Lane& lane, int row, int step, float (&low)[4],
                float (&high)[4]) {
    using Codes = typename F::Codes;
    float scale[2], offset[2] = {0, 0};
    for (int half = 0; half < 2; half++) {
        if constexpr (Scales::TWO_LEVEL)
            scale[half] = scale_in(scales, row, step, half);
        else
            scale[half] = times(Scales::exact(scales, row, half), F::SCALE_UNIT);
        if (!Scales::HALVES) scale[1] = scale[0];
    }
    for (int half = 0; half < 2; half++) {
        if constexpr (Scales::TWO_LEVEL && Scales::MINIMUM && Scales::HALVES)
            offset[half] = times(Scales::outer_minimum(scales, row), from_int(Scales::minimum(scales, row, step, half)));
        else if constexpr (Scales::TWO_LEVEL && Scales::MINIMUM)
            offset[half] = minimum_in(scales, row, step);
        else if constexpr (Scales::MINIMUM)
            offset[half] = Scales::minimum_of(scales, row);
    }
    for (int i = 0; i < 8; i++) {
        i32 code = 0;
        for (int plane = 0; plane < Codes::PLANES; plane++) {
            u32 a, b;
            Codes::operands(codes, lane, row, plane, a, b);
            const u32 byte = (i < 4 ? a : b) >> 8 * (i % 4) & 255;
            const i32 found = Codes::SIGNED ? (i32)(i8)byte : (i32)byte - Codes::ZERO;
            bool negative = false;
            if constexpr (Codes::PLANES == 2) negative = plane == Codes::NEGATIVE;
            code += negative ? -found : found;
        }
        // In byte order, codes are of columns 4t, 16 + 4t, 4t + 1, ...
        const int half = Codes::MIXED ? i % 2 : i / 4, at = Codes::MIXED ? i / 2 : i % 4;
        float value = times(times(from_int(code), Codes::UNIT), scale[half]);
        if constexpr (Scales::MINIMUM) value = plus(value, offset[half]);
        (half ? high : low)[at] = value;
    }
}
