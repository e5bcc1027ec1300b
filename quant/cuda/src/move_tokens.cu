// Tokens of a cache to places before their own, as an accepted path through a tree is kept. A thread takes
// the same bytes of each token in turn: tokens ascend, so it reads what no move before has written.
#include "kv.cuh"

// Neighbours in a block (kv.cuh) whose rows have the same size: heads of keys, of values, of several layers.
struct Part {
    i64 start, heads, size;  // bytes; heads; bytes of a row
};

struct Move {
    const u8* from;  // blocks, and the tokens' places in them
    i64 source;
    u8* to;
    i64 target;
};

struct MoveTokens {
    const Part* parts;
    const Move* moves;
    int count;
};

template <class Word>
FN void move(const MoveTokens& args, const Part& part) {
    const i64 words = part.size / sizeof(Word), i = (i64)blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= part.heads * words) return;
    const i64 at = part.start + i / words * BLOCK * part.size + i % words * sizeof(Word);
    for (int m = 0; m < args.count; m++) {
        const Move move = args.moves[m];
        *(Word*)(move.to + at + move.target * part.size) = *(const Word*)(move.from + at + move.source * part.size);
    }
}

extern "C" __global__ void move_tokens(MoveTokens args) {
    const Part part = args.parts[blockIdx.y];
    if (part.size % sizeof(uint4) == 0)
        move<uint4>(args, part);
    else
        move<u32>(args, part);
}
