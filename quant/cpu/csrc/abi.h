// The plain C interface between Python (ctypes) and the kernels. Structs are filled by Python: quant/cpu/abi.py reads
// them here, and the functions in library.cpp.
#pragma once
#include <cstdint>

#if defined(_WIN32)
#define LRT_API extern "C" __declspec(dllexport)
#else
#define LRT_API extern "C" __attribute__((visibility("default")))
#endif

// What GGUF calls the rows that `lrt_tile` takes.
enum Source : int32_t {
    FROM_F32, FROM_F16, FROM_BF16, FROM_Q4_0, FROM_Q4_1, FROM_Q5_0, FROM_Q5_1, FROM_Q8_0, FROM_Q4_K, FROM_Q5_K, FROM_Q6_K, FROM_MXFP4,
    FROM_Q2_K, FROM_Q3_K, FROM_IQ4_NL, FROM_IQ4_XS, FROM_TQ2_0,
    FROM_IQ3_XXS, FROM_IQ3_S, FROM_IQ2_XXS, FROM_IQ2_XS, FROM_IQ2_S, FROM_IQ1_S, FROM_IQ1_M
};

// How tiles are laid out. Formats that differ only in their rows, or in the columns of a span, share one.
enum Layout : int32_t {
    F32, F16, BF16,
    AFFINE4, AFFINE4_MIN, AFFINE5, AFFINE5_MIN, AFFINE6, AFFINE8 = 9, AFFINE8_MIN,
    Q4_K = 19, Q5_K, Q6_K, MXFP4, NVFP4, NF4,
    Q2_K, Q3_K, IQ4_NL, IQ4_XS, TQ2_0,
    IQ3_XXS, IQ3_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ1_S, IQ1_M,
    BRAINS4, BRAINS8, ZEROS4, ZEROS8, NF4_F32, E4M3_GROUPS
};

// A weight matrix in the tiled layout of quant/formats/tiled.py.
struct Matrix {
    const uint8_t* data;
    int32_t layout, rows, cols;
    int32_t span;   // columns that share a head
    float scale;    // of every value
    int32_t site;   // what adapters know it by; 0 for none
};

// Low-rank additions to the products of one matrix: y * factors + B (A x), both in bytes with scales of their own.
struct LowRank {
    int8_t* a;             // (rank, columns filled up to LOW_COLUMNS)
    float* a_scales;       // (rank, of every LOW_COLUMNS)
    uint8_t* b;            // of every 16 rows, of every LOW_RANKS: 16 bf16 scales, codes (ranks / 2, 16, 2)
    const float* factors;  // (rows filled up), or null
    int32_t rank, unused;  // even
};
constexpr int LOW_COLUMNS = 64, LOW_RANKS = 16;

// What such is made of: a (rank, columns), b (rows, rank).
struct LowRankPack {
    const float *a, *b;
    int32_t rank, rows, columns;
};

// The adapters of a pass.
struct AdapterArgs {
    const int32_t* mixes;  // (R), of each row; -1: none
    const LowRank* table;  // (mixes, sites)
    int32_t rows, sites;
};

// Row-stacked matrices that share their input: q, k, v or gate, up.
struct Stack {
    const Matrix* parts;
    int32_t count, rows, cols;
    int32_t hadamard;  // block size of the input's rotation, or 0
};

// In the last two, of latent attention, rows are keys and hold the values too: token by token, (256, E) in a
// block, then int8's float32 scales (256).
enum KvFormat : int32_t { KV_BF16, KV_INT8, KV_INT4, KV_ROWS_BF16, KV_ROWS_INT8 };

// One sequence of a pass: its cache of one layer and the rows that extend it.
struct Span {
    uint8_t* data;        // blocks of 256 tokens, see kv.h
    const uint8_t* mask;  // (rows, extra + rows) or null for causal
    const int32_t* ahead; // (rows): how many of the rows behind it a row sees too, or null; not with a mask
    int64_t stride;       // from one block to the next
    int32_t format, held, rows;
    int32_t windows_only; // rows see those ahead only in layers with a window
    int32_t extra;        // of the tokens held, so many of the last are a tree's rows, which the mask covers
};

struct AttentionArgs {
    float *x, *q, *out;          // (R, D), (R, H, E), behind them the gates of gated attention, (R, D)
    const float *norm, *qkv_bias, *q_norm, *k_norm, *v_norm, *out_bias, *post_norm;
    const float* sinks;          // (H), or null
    const float *cos, *sin;      // (R, rotary / 2), or null
    const float* near_turns;     // (16, rotary / 2, 2, 16), cosines and sines of 256 positions, or null
    const float* far_turns;      // (blocks, rotary / 2, 2), of every 256th position, times the rotary scale
    const int64_t* positions;    // (R)
    const int32_t* chosen;       // (R, 1 + most_chosen): how many tokens a row sees, and which; null: all
    const Span* spans;
    Stack qkv, proj;
    int32_t rows, span_count, heads, kv_heads, head_dim, rotary, window;  // window 0: none
    int32_t joint_norms;  // of all heads at once: q_norm (H * E), k_norm (G * E)
    int32_t projections;  // 3: q, k and v; 2: values are the projected keys; 1: the spans' caches are an earlier layer's
    int32_t gated;        // each head's rows of q are followed by as many of its gate
    int32_t head_gates;   // behind all rows of q, k and v is one of each head's gate
    int32_t norms_last;   // heads are normed behind their rotation
    int32_t most_chosen;
    float eps, scale, softcap;  // softcap 0: none
    const float *place_cos, *place_sin;  // (R, rotary / 2), of rows' places in their caches, if positions differ, or null
};

// An indexer: see quant/ops/attention.py.
struct IndexArgs {
    const float* x;                       // (R, D)
    int32_t* chosen;                      // (R, budget + block), as attention has it
    const float *q_norm, *k_norm;         // (E)
    const float *cos, *sin;               // (R, rotary / 2)
    const float *block_cos, *block_sin;   // the same of the first token of a block that a row would end
    const Span* spans;
    Stack qk;
    int32_t rows, span_count, heads, head_dim, rotary, block, budget;
    float eps;
};

struct LatentArgs {
    float *x, *q, *out;  // (R, D), (R, H, nope + rotary), (R, D)
    const float *norm, *query_norm, *latent_norm;
    const float *cos, *sin;  // (R, rotary / 2)
    const Span* spans;
    Stack down, query_up, key_up, value_up, proj;  // without query_up's parts, `down` gives the queries
    int32_t rows, span_count, heads, rotary, latent, nope, value, interleaved;
    float eps, latent_eps, scale;
};

// One sequence of a pass: its memory of a recurrent layer, and the rows that extend it.
struct StateSpan {
    const float* from;       // (H, V / 16, K, 16), after `position` tokens
    float* to;               // after `fold` tokens; may be `from`
    const float* rows_from;  // (ring_from, channels + factors), token n's row at n % ring_from
    float* rows_to;
    const int32_t* parents;  // (extra + rows): of a tree's rows, -1 for what is before it, -2 for one that nothing needs; or null
    int32_t ring_from, ring_to, position, fold, held, rows;
    int32_t extra;           // of the tokens held, so many of the last are a tree's rows
    int32_t unused;
};

enum RecurrentKind : int32_t { DELTA, SSM, CONV, NGRAM };

// A recurrent layer: see RecurrentSpec and RecurrentWeights in quant/ops/recurrent.py.
struct RecurrentArgs {
    float *x, *out;                        // (R, D)
    const float *norm, *conv, *taps_bias;  // (D), (T, channels), (channels) or null
    const float *decay, *decay_bias, *skip, *out_norm, *mix_bias, *out_bias, *post_norm;
    const float* mix_scale;                // of what a row is projected to, or null
    const StateSpan* spans;
    Stack mix, proj;
    Stack gate_up, decay_up;               // of gates and decays that come by way of fewer numbers, or no parts
    int32_t rows, span_count, kind, heads, key_heads, key_size, value_size, taps, width, tiled, channel_decay;
    int32_t norm_size, norm_width, gate_sigmoid, gate_first;  // norm_width: of the norm's weights
    int32_t dilation;                                         // rows from a tap to the next
    float eps, norm_eps, strength, least_step, most_step;  // norm_eps: of the result's norm
};

// RELU2 is the square of what is above 0; it has no gate, and `gate_up` is up alone.
enum Activation : int32_t { SILU, GELU_TANH, SWIGLU_OAI, RELU2 };

struct MlpArgs {
    const float* x;
    float* out;
    const float *norm, *post_norm;  // or null
    Stack gate_up, down;            // without parts of `down`, what it would multiply is the result
    Stack row_gate;                 // (1, D), or no parts
    int32_t rows, activation;
    int32_t cut;                    // gates are set off by their mean and `cutoff` deviations, and none is below 0
    float eps, cutoff, gate_scale;
};

// A layer's own inputs, and the matrices that join them to the residual stream.
struct InputArgs {
    const float* x;       // (R, D)
    const float* inputs;  // (R, stride), of which a layer's begin at `first`
    float* out;           // (R, D)
    const float* post_norm;
    Stack gate, proj;     // (P, D), (D, P)
    int32_t rows, stride, first, activation;
    float eps;
};

// Several residual streams: see quant/ops/streams.py.
struct StreamArgs {
    const float* streams;      // (R, S * D)
    const float* activated;    // (R, D), what a layer made of the active stream
    float *out, *active;       // (R, S * D), (R, D)
    const float* norm;         // (D), of the router
    const float* coefficients; // (S * S, S) of predictions, (S, S) of corrections
    const float* scale;        // (D), of the active stream, or null
    Stack router;              // (S, D)
    int32_t rows, count, which;
    float eps;
};

// How a layer reads several streams, and what each takes of its output.
struct ConnectionArgs {
    const float* streams; // (R, S * D)
    float *out, *shares;  // (R, D), (R, S)
    const float* norm;    // (S * D)
    Stack down, up;       // (K, S * D), (S * D, K)
    Stack share;          // (S, S * D), of no rows behind the last layer
    int32_t rows, count;
    float eps;
};

// A layer's hashed n-grams: see quant/ops/streams.py.
struct NgramArgs {
    float* streams;        // (R, S * D), to which is added
    const float* ngrams;   // (R, E)
    const float* tokens;   // (R), ids
    const float *key_norm, *stream_norm, *value_norm;  // (S * D) each
    const float* conv;     // (T, S * D)
    const StateSpan* spans;
    Stack key, value;      // (S * D, E), (D, E)
    int32_t rows, span_count, count, taps, dilation;
    float eps;
};

enum Scoring : int32_t { SOFTMAX, SIGMOID, SOFTMAX_CHOSEN };

// A router: see RouterSpec in quant/ops/experts.py.
struct RouteArgs {
    const float* x;              // (R, D)
    float* normed;               // (R, D)
    int32_t* experts;            // (R, ranked)
    float *scores, *weights;     // (R, ranked), (R, used)
    const float *norm, *gate_bias, *choice_bias;  // (D), (E), (E), or null
    const float *gate_norm, *expert_scale;        // (D) in the place of `norm` for the gate, (E) of the weights, or null
    Stack gate;                  // (E, D)
    int32_t rows, used, ranked, scoring, normalize, groups, used_groups, group_top;
    float eps, scale;
};

// An expert of a table; one without parts is not there.
struct Expert {
    Stack gate_up, down;
    const float *gate_up_bias, *down_bias;  // (2F), (D), or null
};

struct ExpertArgs {
    const float* x;         // (R, D), normed
    float* slots;           // (R * used, D)
    const Expert* table;    // (count)
    const int32_t* chosen;  // (R, stride), of which the first `used` are
    const int32_t* asked;   // (asked_count), or null for all that are chosen
    int32_t rows, used, stride, count, asked_count, activation;
    float limit;
};

// How a format's codes are spaced, and what its scales can be.
enum Family : int32_t { EVEN, EVEN_WITH_MINIMUM, NF4_LEVELS, E2M1_BY_POWERS, E2M1_BY_E4M3, Q3_K_BLOCKS, Q2_K_BLOCKS, IQ4_NL_BLOCKS };

// A search for the scales of groups: see quant/methods/scales.py.
struct SearchArgs {
    const float* groups;    // (count, block), block a multiple of 16 up to 128; or GGUF's blocks
    float* scales;          // (count, 1), (count, 2) with a minimum, or those of GGUF's blocks
    const double* shrinks;  // (steps), falling
    const float* weights;   // GGUF's: (weight_count, block), what errors count, for blocks in turn
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

// The steps of a vision tower: see quant/ops/vision.py and vision.h.
enum VisionStep : int32_t { VISION_LINEAR, VISION_NORM, VISION_ROTATE, VISION_GATE, VISION_ADD, VISION_ATTENTION };
constexpr int VISION_STEPS = VISION_ATTENTION + 1;
enum VisionActivation : int32_t { NO_ACTIVATION, EXACT_GELU, TANH_GELU, QUICK_GELU, VISION_SILU };

// What each takes of it: rows of x, y and z, which lie `strides` apart where they have heads.
struct VisionArgs {
    const float *x, *y, *z;
    float* out;
    const float *weight, *bias;  // or null
    const int32_t* ends;         // (segments), rows at which attention's segments end
    Stack matrix;
    int64_t strides[3];
    int32_t rows, heads, size;   // of a head
    int32_t activation, rms, segments;
    float eps, scale;
};

// A step of a list that is run at once: a kernel's arguments, or `x` (count) = (x + scale * y) * total.
enum StepKind : int32_t { STEP_READ_ROWS, STEP_QKV, STEP_ATTENTION, STEP_MLP, STEP_HEAD, STEP_ADD };
struct Step {
    const void* args;
    float* x;       // of STEP_READ_ROWS the result
    const void* y;  // of STEP_READ_ROWS the rows' numbers, int64
    int32_t kind, count;
    float scale, total;
};
