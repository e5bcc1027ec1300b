// Joins the partial results of attention.cu in order of runs: a block takes one row and head, a thread one element.
//
//   VALUES    how the cache keeps values
// TURNED    size of the cache's Hadamard rotations (rotate.cu); 1: none
//   RECORDS   1 to write the records of the product that comes next, FINE ones or not (records.cuh):
//             whole steps of 32
#include "attention.cuh"
#include "records.cuh"

constexpr int THREADS = (VALUES::SIZE + 31) / 32 * 32;
constexpr int AHEAD = 8;  // runs that are read at once

extern "C" __global__ void attention_join(Attention args) {
    constexpr int VALUE = VALUES::SIZE;
    const int which = blockIdx.x, row = args.first + which / args.heads, e = threadIdx.x;
    const i64 width = args.run_stride / VALUE;
    const Span& span = span_of(args.spans, args.count, row);
    const int own = Span::token(span, row - (int)span.first), position = (int)args.positions[row];
    const bool sees = span.tree && (span.columns >= 0 || args.window);
    const int used = ((int)(span.held + (sees ? span.fresh : own + 1)) + RUN - 1) / RUN;
    const int begin = Attention::since(args, position, args.chunked) / RUN;
    const float sink = args.sinks ? times(args.sinks[which % args.heads], LOG2E) : minus_infinity();
    const float *tops = args.stats + which, *weights = tops + args.runs * width;
    __shared__ float shares[THREADS], parts[THREADS];
    // Threads share the search for the maximum; each of them sums all runs in order.
    float top = sink;
    for (int i = begin + e; i < used; i += THREADS) top = most(top, tops[i * width]);
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) top = most(top, shuffle_xor(top, lanes));
    if (e % 32 == 0) parts[e / 32] = top;
    __syncthreads();
    for (int w = 0; w < THREADS / 32; w++) top = most(top, parts[w]);
    float sum = 0, weight = args.sinks ? power_of_two(plus(sink, -top)) : 0;
    const float* partial = args.partial + (i64)which * VALUE + e;
    for (int first = begin; first < used; first += THREADS) {
        const int count = used - first < THREADS ? used - first : THREADS;
        __syncthreads();
        if (e < count) {
            shares[e] = power_of_two(plus(tops[(first + e) * width], -top));
            parts[e] = weights[(first + e) * width];
        }
        __syncthreads();
        for (int i = 0; i < count; i += AHEAD) {
            float found[AHEAD];
#pragma unroll
            for (int a = 0; a < AHEAD; a++)
                found[a] = i + a < count && e < VALUE ? partial[(first + i + a) * args.run_stride] : 0;
#pragma unroll
            for (int a = 0; a < AHEAD; a++) {
                if (i + a >= count) break;
                weight = fused(shares[i + a], parts[i + a], weight);
                sum = fused(shares[i + a], found[a], sum);
            }
        }
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
