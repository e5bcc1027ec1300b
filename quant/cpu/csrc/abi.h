// The plain C interface between Python (ctypes) and the kernels. Python fills the structs: quant/cpu/abi.py reads their
// declarations here, and those of the functions in library.cpp.
#pragma once
#include <cstdint>

// The namespace of code that is compiled once per instruction set; anonymous unless set.
#ifndef LRT_SPACE
#define LRT_SPACE
#endif

#if defined(_WIN32)
#define LRT_API extern "C" __declspec(dllexport)
#else
#define LRT_API extern "C" __attribute__((visibility("default")))
#endif

// The name of the instruction set at index `at` of those this processor supports, best first; null after the last.
LRT_API const char* lrt_isa_here(int at);

// Row formats that `lrt_tile` converts, with the numbers of GGUF's types.
enum Source : int32_t {
    FROM_F32, FROM_F16, FROM_Q4_0, FROM_Q4_1, FROM_Q5_0 = 6, FROM_Q5_1, FROM_Q8_0,
    FROM_Q2_K = 10, FROM_Q3_K, FROM_Q4_K, FROM_Q5_K, FROM_Q6_K,
    FROM_IQ2_XXS = 16, FROM_IQ2_XS, FROM_IQ3_XXS, FROM_IQ1_S, FROM_IQ4_NL, FROM_IQ3_S, FROM_IQ2_S, FROM_IQ4_XS,
    FROM_IQ1_M = 29, FROM_BF16, FROM_TQ2_0 = 35, FROM_MXFP4 = 39
};

// Layouts of tiles. Formats that differ only in their rows, or in the columns of a span, share one.
enum Layout : int32_t {
    F32, F16, BF16,
    AFFINE4, AFFINE4_MIN, AFFINE5, AFFINE5_MIN, AFFINE6, AFFINE8 = 9, AFFINE8_MIN,
    Q4_K = 19, Q5_K, Q6_K, MXFP4, NVFP4, NF4,
    Q2_K, Q3_K, IQ4_NL, IQ4_XS, TQ2_0,
    IQ3_XXS, IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ1_M,
    BRAINS4, BRAINS8, ZEROS4, ZEROS8, NF4_F32, E4M3_GROUPS, FP4_F32
};

// A weight matrix in the tiled layout of quant/formats/tiled.py.
struct Matrix {
    const uint8_t* data;
    int32_t layout, rows, cols;
    int32_t span;   // columns per head of scales
    float scale;    // factor of all values
    int32_t site;   // index in the adapters' table; 0 for none
};

// A low-rank adapter of one matrix: y * factors + B (A x); A and B are bytes with scales.
struct LowRank {
    int8_t* a;             // (rank, columns padded to LOW_COLUMNS)
    float* a_scales;       // (rank, groups of LOW_COLUMNS)
    uint8_t* b;            // for every 16 rows and LOW_RANKS ranks: 16 bf16 scales, codes (ranks / 2, 16, 2)
    const float* factors;  // (padded rows), or null
    int32_t rank, unused;  // the rank is even
};
constexpr int LOW_COLUMNS = 64, LOW_RANKS = 16;

// Source of a LowRank: a (rank, columns), b (rows, rank).
struct LowRankPack {
    const float *a, *b;
    int32_t rank, rows, columns;
};

// The adapters of a pass.
struct AdapterArgs {
    const int32_t* mixes;  // (R), mix of each row; -1: none
    const LowRank* table;  // (mixes, sites)
    int32_t rows, sites;
};

// Stacked matrices with the same input: q, k, v or gate, up.
struct Stack {
    const Matrix* parts;
    int32_t count, rows, cols;
    int32_t hadamard;  // block size of the input's rotation, or 0
};

// The last two are for latent attention, whose cached rows are both keys and values: (256, E) in a block, followed by
// int8's float32 scales (256).
enum KvFormat : int32_t { KV_BF16, KV_INT8, KV_INT4, KV_ROWS_BF16, KV_ROWS_INT8 };

// One sequence of a pass: its cache of one layer and the rows that extend it.
struct Span {
    uint8_t* data;        // blocks of 256 tokens, see kv.h
    const uint8_t* mask;  // (rows, extra + rows) or null for causal
    const int32_t* ahead; // (rows): how many later rows each row attends to, or null; not with a mask
    int64_t stride;       // bytes from one block to the next
    int32_t format, held, rows;
    int32_t windows_only; // `ahead` applies only in layers with a window
    int32_t extra;        // number of tree rows at the end of the cache, which the mask covers
};

struct AttentionArgs {
    float *x, *q, *out;          // (R, D), (R, H, E) followed by the gates of gated attention, (R, D)
    const float *norm, *qkv_bias, *q_norm, *k_norm, *v_norm, *out_bias, *post_norm;
    const float* sinks;          // (H), or null
    const float *cos, *sin;      // (R, rotary / 2), or null
    const float* near_turns;     // (16, rotary / 2, 2, 16), cosines and sines of 256 positions, or null
    const float* far_turns;      // (blocks, rotary / 2, 2), those of every 256th position, times the rotary scale
    const int64_t* positions;    // (R)
    const int32_t* chosen;       // (R, 1 + most_chosen): number of tokens a row attends to, and their indices; null: all
    const Span* spans;
    Stack qkv, proj;
    int32_t rows, span_count, heads, kv_heads, head_dim, rotary, window;  // window 0: none
    int32_t joint_norms;  // norms over all heads: q_norm (H * E), k_norm (G * E)
    int32_t projections;  // 3: q, k and v; 2: values are the projected keys; 1: the caches of an earlier layer are used
    int32_t gated;        // each head's rows of q are followed by those of its gate
    int32_t head_gates;   // one row per head's gate follows those of q, k and v
    int32_t number_gates; // or one row per number of the heads' results
    int32_t softplus;     // gates are softplus, not sigmoid
    int32_t chunked;      // windows begin at multiples of their size
    int32_t norms_last;   // heads are normed after RoPE
    int32_t most_chosen;
    float eps, result_eps, scale, softcap;  // result_eps: for post_norm; softcap 0: none
    const float *place_cos, *place_sin;  // (R, rotary / 2), of rows' indices in their caches, or null if these are the positions
};

// An indexer: see quant/ops/attention.py.
struct IndexArgs {
    const float* x;                       // (R, D)
    int32_t* chosen;                      // (R, budget + block), as in AttentionArgs
    const float *q_norm, *k_norm;         // (E)
    const float *cos, *sin;               // (R, rotary / 2)
    const float *block_cos, *block_sin;   // the same for the first token of the block that the row ends
    const Span* spans;
    Stack qk;
    int32_t rows, span_count, heads, head_dim, rotary, block, budget;
    float eps;
};

struct LatentArgs {
    float *x, *q, *out;  // (R, D), (R, H, nope + rotary) and perhaps gates (R, H) behind, (R, D)
    const float *norm, *query_norm, *latent_norm;
    const float *cos, *sin;  // (R, rotary / 2)
    const Span* spans;
    Stack down, query_up, key_up, value_up, proj;  // if query_up has no parts, `down` projects the queries
    int32_t rows, span_count, heads, rotary, latent, nope, value, interleaved;
    int32_t head_gates;  // one row per head's gate follows those of queries in `down`
    float eps, latent_eps, scale;
};

// One sequence of a pass: its memory of a recurrent layer, and the rows that extend it.
struct StateSpan {
    const float* from;       // (H, V / 16, K, 16), after `position` tokens
    float* to;               // after `fold` tokens; may be `from`
    const float* rows_from;  // (ring_from, channels + factors), token n's row at n % ring_from
    float* rows_to;
    const int32_t* parents;  // (extra + rows): parents of a tree's rows; -1: before the tree, -2: row not needed; or null
    int32_t ring_from, ring_to, position, fold, held, rows;
    int32_t extra;           // number of tree rows at the end of the cache
    int32_t unused;
};

enum RecurrentKind : int32_t { DELTA, SSM, CONV, NGRAM };

// A recurrent layer: see RecurrentSpec and RecurrentWeights in quant/ops/recurrent.py.
struct RecurrentArgs {
    float *x, *out;                        // (R, D)
    const float *norm, *conv, *taps_bias;  // (D), (T, channels), (channels) or null
    const float *decay, *decay_bias, *skip, *out_norm, *mix_bias, *out_bias, *post_norm;
    const float* mix_scale;                // factors of a row's projection, or null
    const StateSpan* spans;
    Stack mix, proj;
    Stack gate_up, decay_up;               // second projections of low-rank gates and decays, or no parts
    int32_t rows, span_count, kind, heads, key_heads, key_size, value_size, taps, width, tiled, channel_decay;
    int32_t norm_size, norm_width, gate_sigmoid, gate_first;  // norm_width: number of norm weights
    int32_t dilation;                                         // rows between taps
    float eps, norm_eps, strength, least_step, most_step;  // norm_eps: for the norm of results
    float decay_floor;                                     // or 0
};

// RELU2, the square of ReLU, and XIELU have no gate: `gate_up` is up alone.
enum Activation : int32_t { SILU, GELU_TANH, SWIGLU_OAI, RELU2, XIELU, SWIGLU };

struct MlpArgs {
    const float* x;
    float* out;
    const float *norm, *post_norm;  // or null
    Stack gate_up, down;            // if `down` has no parts, its input is the result
    Stack row_gate;                 // (1, D), or no parts
    int32_t rows, activation;
    float eps, result_eps, gate_scale, limit;
    float curve[4];                 // of XIELU
};

// Per-layer inputs, and the matrices that add them to the residual stream.
struct InputArgs {
    const float* x;       // (R, D)
    const float* inputs;  // (R, stride); a layer's begin at `first`
    float* out;           // (R, D)
    const float* post_norm;
    Stack gate, proj;     // (P, D), (D, P)
    int32_t rows, stride, first, activation;
    float eps;
};

// Weights for combining several streams into a layer's input, and for distributing its output: see quant/ops/streams.py.
struct ConnectionArgs {
    const float* streams; // (R, S * D)
    float *out, *shares;  // (R, D), (R, S)
    const float* norm;    // (S * D)
    Stack down, up;       // (K, S * D), (S * D, K)
    Stack share;          // (S, S * D); no rows after the last layer
    int32_t rows, count;
    float eps;
};

// A layer's hashed n-grams: see quant/ops/streams.py.
struct NgramArgs {
    float* streams;        // (R, S * D), updated in place
    const float* ngrams;   // (R, E)
    const float* tokens;   // (R), ids
    const float *key_norm, *stream_norm, *value_norm;  // (S * D) each
    const float* conv;     // (T, S * D)
    const StateSpan* spans;
    Stack key, value;      // (S * D, E), (D, E)
    int32_t rows, span_count, count, taps, dilation;
    float eps;
};

enum Scoring : int32_t { SOFTMAX, SIGMOID, SOFTMAX_CHOSEN, SQRT_SOFTPLUS };

// A router: see RouterSpec in quant/ops/experts.py.
struct RouteArgs {
    const float* x;              // (R, D)
    float* normed;               // (R, D)
    int32_t* experts;            // (R, ranked)
    float *scores, *weights;     // (R, ranked), (R, used)
    const float *norm, *gate_bias, *choice_bias;  // (D), (E), (E), or null
    const float *gate_norm, *expert_scale;        // (D) replaces `norm` for the gate, (E) scales the weights, or null
    Stack gate;                  // (E, D)
    int32_t rows, used, ranked, scoring, normalize, groups, used_groups, group_top;
    float eps, scale, softcap;  // softcap 0: none
};

// An expert of a table; its stacks have no parts if it is not in memory.
struct Expert {
    Stack gate_up, down;
    const float *gate_up_bias, *down_bias;  // (2F), (D), or null
};

struct ExpertArgs {
    const float* x;         // (R, D), normed
    float* slots;           // (R * used, D)
    const Expert* table;    // (count)
    const int32_t* chosen;  // (R, stride); only the first `used` count
    const int32_t* asked;   // (asked_count), or null for all chosen experts
    int32_t rows, used, stride, count, asked_count, activation;
    float limit;
};

// The sum of a row's slots times their weights, in the order of k, then of `shared`.
struct CombineArgs {
    const float *slots, *weights;  // (R * used, D), (R, used)
    const float* shared;           // (R, D), or null
    float* out;                    // (R, D); may be `shared`
    int32_t rows, used, cols;
};

// RMSNorm in place.
struct NormArgs {
    float* x;           // (R, D)
    const float* norm;  // (D)
    int32_t rows, cols;
    float eps;
};

// A layer whose experts a GPU and the CPU compute at once: see quant/cuda/hybrid_exchange.py. Of `experts`, whose x is
// ready once the GPU has set its ticket, those are computed that are not `present` on the GPU.
struct SharedLayer {
    ExpertArgs experts;
    int32_t* asked;          // (count): room for the numbers of those experts
    const uint8_t* present;  // (count)
    const int32_t *turn, *ticket, *stop;
    int32_t* done;
};

// The spacing of a format's codes and the kind of its scales.
enum Family : int32_t { EVEN, EVEN_WITH_MINIMUM, NF4_LEVELS, E2M1_BY_POWERS, E2M1_BY_E4M3, Q3_K_BLOCKS, Q2_K_BLOCKS, IQ4_NL_BLOCKS };

// A search for the scales of groups: see quant/methods/scales.py.
struct SearchArgs {
    const float* groups;    // (count, block), block a multiple of 16 up to 128; or GGUF's blocks
    float* scales;          // (count, 1), (count, 2) with a minimum, or the scales of GGUF's blocks
    const double* shrinks;  // (steps), falling
    const float* weights;   // GGUF's: (weight_count, block), weights of errors, repeated over blocks
    int64_t count, weight_count;
    int32_t block, steps, family, bits;
};

struct HeadArgs {
    const float* x;       // (R, D)
    const int64_t* wanted;
    float* logits;        // (count, V)
    const float* norm;
    Stack weight;
    int32_t count;
    float eps, softcap;
};

// The steps of a vision encoder: see quant/ops/vision.py and vision.h.
enum VisionStep : int32_t { VISION_LINEAR, VISION_NORM, VISION_ROTATE, VISION_GATE, VISION_ADD, VISION_ATTENTION };
constexpr int VISION_STEPS = VISION_ATTENTION + 1;
enum VisionActivation : int32_t { NO_ACTIVATION, EXACT_GELU, TANH_GELU, QUICK_GELU, VISION_SILU };

// Arguments of these steps: rows of x, y and z; `strides` apart if they have heads.
struct VisionArgs {
    const float *x, *y, *z;
    float* out;
    const float *weight, *bias;  // or null
    const int32_t* ends;         // (segments): rows at which attention's segments end
    Stack matrix;
    int64_t strides[3];
    int32_t rows, heads, size;   // size: of a head
    int32_t activation, rms, segments, window;  // window: how many rows away attention sees, or 0
    float eps, scale;
};

// One step of the list that `lrt_run` executes: a kernel's arguments, or `x` (count) = (x + scale * y) * total.
enum StepKind : int32_t {
    STEP_READ_ROWS, STEP_QKV, STEP_ATTENTION, STEP_LATENT, STEP_LATENT_OUTPUT, STEP_RECURRENT, STEP_MLP, STEP_ROUTE, STEP_EXPERTS,
    STEP_COMBINE, STEP_NORM, STEP_HEAD, STEP_ADD
};
struct Step {
    const void* args;
    float* x;       // STEP_READ_ROWS: the result
    const void* y;  // STEP_READ_ROWS: the rows' indices, int64
    int32_t kind, count;
    float scale, total;
};
