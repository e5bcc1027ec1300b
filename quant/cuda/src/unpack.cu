// Unpacks rows of weights: indexed ones (an embedding's) or a range. A warp takes eight steps of one or four rows.
//
//   FORMAT   see formats.cuh
//   OUT      float or Bf16
//   INDEXED  1: rows are those of `index`
#include "gates.cuh"
#include "unpack.cuh"

using Weights = FORMAT;

FN void store_four(float* at, const float (&v)[4]) {
    *(uint4*)at = make_uint4(as_bits(v[0]), as_bits(v[1]), as_bits(v[2]), as_bits(v[3]));
}
FN void store_four(Bf16* at, const float (&v)[4]) { *(uint2*)at = make_uint2(two_bf16(v[0], v[1]), two_bf16(v[2], v[3])); }

struct Unpack {
    const u8* w;
    const float* factors;  // (tiles,) or null
    const i64* index;      // (n,)
    void* y;               // (n, columns)
    i64 tile_bytes;
    int n, first, steps;
    float factor;
};

extern "C" __global__ void unpack(Unpack args) {
    using Scales = typename Weights::template Scales<4>;
    const int line = blockIdx.y * (blockDim.x / 32) + threadIdx.x / 32, lane_of = threadIdx.x % 32;
    const int step = blockIdx.x * 8 + lane_of / 4;
    const int place = INDEXED ? line : args.first / 4 + line;  // index of the four rows
    if (step >= args.steps || (INDEXED ? line >= args.n : 4 * place >= args.first + args.n)) return;
    const i64 row = INDEXED ? args.index[line] : (i64)4 * place;
    Lane lane;
    lane.g = 0, lane.t = lane_of % 4, lane.q = (int)(row % 16 / 4);

    const i64 tile = row / 16;
    const u8* span = args.w + tile * args.tile_bytes + (i64)(step / Weights::SPAN) * Weights::BYTES;
    const int in_span = step % Weights::SPAN;
    typename Weights::Codes codes;
    Scales scales;
    codes.load(codes, span + Weights::HEAD + in_span * Weights::STEP, lane);
    scales.load(scales, span, lane);
    const float factor = args.factors ? args.factors[tile] : 1;
    for (int r = 0; r < 4; r++) {
        if (INDEXED && r != row % 4) continue;
        const i64 out = INDEXED ? line : row + r - args.first;
        if (out < 0 || out >= args.n) continue;
        float parts[2][4];
        numbers<Weights>(codes, scales, lane, r, in_span, parts[0], parts[1]);
        OUT* y = (OUT*)args.y + out * args.steps * 32 + step * 32 + 4 * lane.t;
        for (int half = 0; half < 2; half++) {
            for (float& value : parts[half]) {
                if (args.factors) value = times(value, factor);
                value = times(value, args.factor);
            }
            store_four(y + 16 * half, parts[half]);
        }
    }
}
