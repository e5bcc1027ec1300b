// Copies rows and the router's results to mapped RAM, for the host's part of a layer, and tells the host. Runs as one
// block: its last store follows all others.
#include "gates.cuh"

struct ToHost {
    const Bf16* rows;  // (row_count)
    const int* results;
    float* host_rows;
    int* host_results;
    u32 *turn, *ticket;  // how often it has run: here, and in mapped RAM
    i64 row_count;
    int result_count;
};

extern "C" __global__ void to_host(ToHost args) {
    for (i64 i = threadIdx.x; i < args.row_count; i += blockDim.x) args.host_rows[i] = value_of(args.rows[i]);
    for (int i = threadIdx.x; i < args.result_count; i += blockDim.x) args.host_results[i] = args.results[i];
    fence_host();
    __syncthreads();
    if (threadIdx.x == 0) store_host(args.ticket, ++*args.turn);
}
