// Unpacks tiles of E4M3 codes in groups to bf16 rows. A block takes sixteen rows and 64 columns; a thread
// takes four columns of a row, whose codes are adjacent.
#include "gates.cuh"

struct UnpackE4m3 {
    const u8* w;  // spans of a tile: 16 scales, then four columns of each row, the next four, and so on
    Bf16* y;      // (rows, columns)
    int rows, columns, group;  // group: columns per scale
    float factor;
};

FN float e4m3(u32 code) {
    const u32 magnitude = code & 127;  // bits of a float 2^120 times smaller
    const float value = magnitude == 127 ? as_float(0x7FC00000u) : times(as_float(magnitude << 20), as_float(0x7B800000u));
    return code & 128 ? -value : value;
}

extern "C" __global__ void unpack_e4m3(UnpackE4m3 args) {
    const int in_tile = threadIdx.x % 16, row = blockIdx.y * 16 + in_tile;
    const int column = (blockIdx.x * 16 + threadIdx.x / 16) * 4;
    if (row >= args.rows || column >= args.columns) return;
    const i64 span = (i64)blockIdx.y * (args.columns / args.group) + column / args.group;
    const u8* head = args.w + span * 16 * (4 + args.group);
    const float scale = times(((const float*)head)[in_tile], args.factor);
    const u32 codes = ((const u32*)head)[16 + column % args.group / 4 * 16 + in_tile];
    float values[4];
    for (int i = 0; i < 4; i++) values[i] = times(e4m3(codes >> 8 * i & 255), scale);
    *(uint2*)(args.y + (i64)row * args.columns + column) = make_uint2(two_bf16(values[0], values[1]), two_bf16(values[2], values[3]));
}
