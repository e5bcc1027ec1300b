// The rows of tokens in a table that has `each` rows for every token: see rows_of_tokens in quant/ops/streams.py.
#include "device.cuh"

struct TokenRows {
    const i64* tokens;  // (count / each)
    i64* rows;          // (count)
    int count, each, known;  // tokens from `known` on are missing in the table
};

extern "C" __global__ void token_rows(TokenRows args) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= args.count) return;
    const i64 token = args.tokens[i / args.each];
    args.rows[i] = (token < args.known ? token : 0) * args.each + i % args.each;
}
