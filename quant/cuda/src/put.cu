// Copies rows to given places; the places are kernel arguments, so that nothing else is copied.
#include "device.cuh"

constexpr int MOST_PLACES = 960;  // as many as fit in a kernel's arguments

struct Put {
    const float* rows;  // (n, width)
    float* y;           // rows of the same width
    int width;
    int places[MOST_PLACES];
};

extern "C" __global__ void put(Put args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < args.width) args.y[(i64)args.places[blockIdx.y] * args.width + i] = args.rows[(i64)blockIdx.y * args.width + i];
}
