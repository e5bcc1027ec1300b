// The functions that every instruction set provides.
#pragma once
#include "abi.h"
#include "pool.h"
#include "processor.h"

#ifndef LRT_PART
#define LRT_PART 1  // which of an instruction set's two files is compiled
#endif
#ifndef LRT_AMX
#define LRT_AMX 0  // whether AMX's products are compiled
#endif
#ifndef LRT_I8MM
#define LRT_I8MM 0  // whether NEON's products of byte matrices and of bf16 are compiled
#endif
#ifndef LRT_BF16_ONLY
#define LRT_BF16_ONLY 0  // whether only the functions with bf16 products are compiled; the others are AVX-512's
#endif
#define LRT_BF16 (LRT_AMX || LRT_BF16_ONLY || LRT_I8MM)

struct Kernels {
    void (*norm_qkv_rope_append)(Context&, const AttentionArgs&);
    void (*attention_output)(Context&, const AttentionArgs&);
    void (*attention)(Context&, const AttentionArgs&);  // both
    void (*norm_gated_mlp)(Context&, const MlpArgs&);
    void (*norm_route)(Context&, const RouteArgs&);
    int (*run_experts)(Context&, const ExpertArgs&);
    void (*combine_experts)(Context&, const CombineArgs&);
    bool (*mixture_of_row)(Context&, const RouteArgs&, const MlpArgs* shared, const ExpertArgs&, const CombineArgs&);
    void (*head)(Context&, const HeadArgs&);
    void (*linear)(Context&, const Stack&, const float* x, int rows, float* out);
    void (*read_rows)(const Matrix&, const int64_t* rows, int count, float factor, float* out);
    void (*read_all)(Context&, const uint8_t* data, int64_t bytes);
    void (*search_scales)(Context&, const SearchArgs&);
    void (*norm_latent_append)(Context&, const LatentArgs&);
    void (*latent_output)(Context&, const LatentArgs&);
    void (*latent)(Context&, const LatentArgs&);  // both
    void (*norm_rows)(Context&, const NormArgs&);
    void (*project_inputs)(Context&, const Stack&, const float* x, int rows, int width, const float* norm, float eps, float* inputs);
    void (*gate_inputs)(Context&, const InputArgs&);
    void (*read_streams)(Context&, const ConnectionArgs&);
    void (*recurrent)(Context&, const RecurrentArgs&);
    void (*add_ngrams)(Context&, const NgramArgs&);
    void (*choose_tokens)(Context&, const IndexArgs&);
    void (*pack_low_rank)(const LowRankPack&, const LowRank&);
    void (*vision[VISION_STEPS])(Context&, const VisionArgs&);
};
#if LRT_BF16_ONLY
extern const Kernels kernels_avx512;
#endif

// The kernels of an instruction set. Each file registers its set when the library is loaded, on any processor: that
// code must not use the instruction set, so it comes after TARGET_END.
struct KernelSet {
    KernelSet(const char* isa, const Kernels& kernels);
    const char* isa;
    const Kernels& kernels;
    const KernelSet* next;
};
#if LRT_PART == 1
#define ADD_KERNELS(isa, kernels) static const KernelSet set(isa, kernels);
#else
#define ADD_KERNELS(isa, kernels)
#endif
