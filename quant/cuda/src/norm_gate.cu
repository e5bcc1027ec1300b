// Gates the results of attention or of a recurrent layer, after an optional norm over parts of a row. A
// block takes one part.
//   IN        float or Bf16: the type of rows
//   RECORDS   1 to write the records of the product that comes next, FINE ones or not (records.cuh):
//             whole steps of 32
#include "gates.cuh"
#include "records.cuh"

enum { SILU_GATE, SIGMOID_GATE, SOFTPLUS_GATE };

struct NormGate {
    const IN *seen, *gates;  // (rows, width); gates' rows are `gate_stride` apart
    const float* norm;       // (norm_width,), repeated over parts; or null
    void* out;               // (rows, width), or records
    int width, size, norm_width, gate_stride, out_stride, gate_first, kind;  // `size`: elements of a part
    float eps;
};

extern "C" __global__ void norm_gate(NormGate args) {
    __shared__ float sums[32];
    const i64 row = blockIdx.x;
    const int first = blockIdx.y * args.size;
    const IN *seen = args.seen + row * args.width + first, *gates = args.gates + row * args.gate_stride + first;
    const float* norm = args.norm ? args.norm + first % args.norm_width : nullptr;
    auto gate = [&](int i) {
        const float value = value_of(gates[i]);
        if (args.kind == SOFTPLUS_GATE) return softplus(value);
        return args.kind == SIGMOID_GATE ? sigmoid(value) : times(value, sigmoid(value));
    };
    float scale = 1;
    if (norm) {
        float sum = 0;
        for (int i = threadIdx.x; i < args.size; i += blockDim.x) {
            const float value = args.gate_first ? times(value_of(seen[i]), gate(i)) : value_of(seen[i]);
            sum = fused(value, value, sum);
        }
        for (int lanes = 16; lanes; lanes >>= 1) sum = plus(sum, shuffle_xor(sum, lanes));
        if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
        __syncthreads();
        sum = 0;
        for (int warp = 0; warp < blockDim.x / 32; warp++) sum = plus(sum, sums[warp]);
        scale = 1.f / sqrtf(sum / args.size + args.eps);
    }
    for (int i = threadIdx.x; i < args.size; i += blockDim.x) {
        float value = value_of(seen[i]);
        if (norm && args.gate_first) value = times(times(times(value, gate(i)), scale), norm[i]);
        else value = times(norm ? times(times(value, scale), norm[i]) : value, gate(i));
        if constexpr (RECORDS)
            write_record((u8*)args.out, (int)row, args.out_stride, first + i, value);
        else
            store((Bf16*)args.out + row * args.width + first + i, value);
    }
}
