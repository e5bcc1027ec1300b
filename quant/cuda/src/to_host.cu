// Copies rows and the router's results to mapped RAM, for the host's part of a layer.
#include "gates.cuh"

struct ToHost {
    const Bf16* rows;  // (row_count)
    const int* results;
    float* host_rows;
    int* host_results;
    i64 row_count;
    int result_count;
};

extern "C" __global__ void to_host(ToHost args) {
    const i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < args.row_count) args.host_rows[i] = value_of(args.rows[i]);
    if (i < args.result_count) args.host_results[i] = args.results[i];
}
