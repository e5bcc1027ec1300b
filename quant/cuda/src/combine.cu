// Adds a row's slots times their weights, in order, and the shared experts' result.
#include "device.cuh"

struct Combine {
    const float* slots;    // (m * used, width)
    const float* weights;  // (m, used), or null: all are 1
    const float* shared;   // (m, width) or null
    float* y;              // (m, width)
    int used, width;
};

extern "C" __global__ void combine(Combine args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    const i64 row = blockIdx.y;
    if (i >= args.width) return;
    float sum = 0;
    for (int k = 0; k < args.used; k++) {
        const float value = args.slots[(row * args.used + k) * args.width + i];
        sum = plus(sum, args.weights ? times(value, args.weights[row * args.used + k]) : value);
    }
    if (args.shared) sum = plus(sum, args.shared[row * args.width + i]);
    args.y[row * args.width + i] = sum;
}
