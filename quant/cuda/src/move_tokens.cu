// Moves tokens of a cache to earlier places, to keep the accepted path of a tree. A thread moves the same
// bytes of each token in turn: tokens ascend, so none is overwritten before it is read.
#include "kv.cuh"

// Adjacent heads of a block (kv.cuh) with rows of the same size: keys, values, or several layers.
struct Part {
    i64 start, heads, size;  // offset in bytes; heads; bytes of a row
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
