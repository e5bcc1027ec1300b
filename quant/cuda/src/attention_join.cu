// The runs that attention.cu left, joined in order: a block takes one row and head, a thread one number.
//
//   VALUES    how the cache keeps values
//   TURNED    numbers of a head that the cache keeps rotated together (rotate.cu); 1: none
//   RECORDS   1 to write the records of the product that comes next, FINE ones or not (records.cuh):
//             whole steps of 32
#include "attention.cuh"
#include "records.cuh"

extern "C" __global__ void attention_join(Attention args) {
    constexpr int VALUE = VALUES::SIZE;
    const int which = blockIdx.x, row = args.first + which / args.heads, e = threadIdx.x;
    const i64 width = args.run_stride / VALUE;
    const int old = (int)*args.held, position = (int)args.positions[row];
    const int used = ((args.tree ? old + args.n : old + row + 1) + RUN - 1) / RUN;
    const int begin = args.window && position >= args.window ? (position - args.window + 1) / RUN : 0;
    const float sink = args.sinks ? times(args.sinks[which % args.heads], LOG2E) : minus_infinity();
    const float *tops = args.stats + which, *weights = tops + args.runs * width;
    float top = sink;
    for (int i = begin; i < used; i++) top = most(top, tops[i * width]);
    float sum = 0, weight = args.sinks ? power_of_two(plus(sink, -top)) : 0;
    for (int i = begin; i < used; i++) {
        const float share = power_of_two(plus(tops[i * width], -top));
        weight = fused(share, weights[i * width], weight);
        if (e < VALUE) sum = fused(share, args.partial[i * args.run_stride + (i64)which * VALUE + e], sum);
    }
    float value = sum / weight;
    if constexpr (TURNED > 1) {
        __shared__ float values[VALUE];
        for (int apart = 1; apart < TURNED; apart *= 2) {
            if (e < VALUE) values[e] = value;
            __syncthreads();
            if (e < VALUE) value = e & apart ? plus(values[e ^ apart], -value) : plus(value, values[e ^ apart]);
            __syncthreads();
        }
        value = times(value, 1.f / sqrtf((float)TURNED));
    }
    if constexpr (RECORDS)
        write_record((u8*)args.out, row, args.out_stride, which % args.heads * VALUE + e, value);
    else if (e < VALUE)
        store((Bf16*)args.out + ((i64)args.first * args.heads + which) * VALUE + e, value);
}
