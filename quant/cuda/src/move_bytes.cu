// Copies a few bytes between mapped RAM and GPU memory: the copy engine would queue them behind large copies.
#include "device.cuh"

struct MoveBytes {
    const u8* from;
    u8* to;
    i64 count;
};

extern "C" __global__ void move_bytes(MoveBytes args) {
    const i64 start = 4 * ((i64)blockIdx.x * blockDim.x + threadIdx.x);
    const u8* from = args.from + start;
    u8* to = args.to + start;
    const i64 left = args.count - start;
    if (left >= 4 && ((u64)from | (u64)to) % 4 == 0) {
        *(u32*)to = *(const u32*)from;
        return;
    }
    for (int i = 0; i < 4 && i < left; ++i) to[i] = from[i];
}
