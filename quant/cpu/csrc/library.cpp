// The C interface: only selects the kernels for the processor.
#include "abi.h"
#include "codebook.h"
#include "kernels.h"
#include <chrono>
#include <cmath>
#include <cstring>

static const KernelSet* sets = nullptr;  // all compiled sets, in no particular order

KernelSet::KernelSet(const char* isa, const Kernels& kernels) : isa(isa), kernels(kernels), next(sets) { sets = this; }

void tile_rows(Context& context, int source, int size, int bytes, const uint8_t* from, int rows, int cols, uint8_t* to);

struct Runtime {
    Runtime(int threads, const KernelSet& set) : context(threads), kernels(set.kernels), isa(set.isa) {}
    Context context;
    const Kernels& kernels;
    const char* isa;
};

LRT_API int lrt_abi_version() { return 34; }

// `isa` is such a name, or empty for the best compiled one; returns null if the processor or the library lacks it.
LRT_API Runtime* lrt_create(int threads, const char* isa) {
    const char* name;
    for (int at = 0; (name = lrt_isa_here(at)); at++)
        for (const KernelSet* set = sets; set; set = set->next)
            if (!std::strcmp(set->isa, name) && (!*isa || !std::strcmp(isa, name))) return new Runtime(threads, *set);
    return nullptr;
}
LRT_API void lrt_destroy(Runtime* runtime) { delete runtime; }
// Sets the number of threads, between two calls by the calling thread. Returns the actual number.
LRT_API int lrt_resize(Runtime* runtime, int threads) { return runtime->context.pool.resize(threads); }
LRT_API int64_t lrt_meetings(const Runtime* runtime) { return runtime->context.pool.meetings(); }
LRT_API const char* lrt_isa(const Runtime* runtime) { return runtime->isa; }

LRT_API void lrt_norm_qkv_rope_append(Runtime* r, const AttentionArgs* args) { r->kernels.norm_qkv_rope_append(r->context, *args); }
LRT_API void lrt_attention_output(Runtime* r, const AttentionArgs* args) { r->kernels.attention_output(r->context, *args); }
LRT_API void lrt_norm_gated_mlp(Runtime* r, const MlpArgs* args) { r->kernels.norm_gated_mlp(r->context, *args); }
LRT_API void lrt_norm_route(Runtime* r, const RouteArgs* args) { r->kernels.norm_route(r->context, *args); }
// Returns -1, or an expert that is not in the table; then nothing is computed.
LRT_API int lrt_run_experts(Runtime* r, const ExpertArgs* args) { return r->kernels.run_experts(r->context, *args); }
// The layers from `first` on, in order, as the GPU gives its tickets. Returns the layer that could not be computed, or
// `count`: the GPU has given no ticket for `patience` microseconds, or has given up, or an expert is not in the table.
// `busy` is increased by the seconds that were computed.
LRT_API int lrt_share_layers(Runtime* r, const SharedLayer* layers, int first, int count, int patience, double* busy) {
    using Clock = std::chrono::steady_clock;
    for (int at = first; at < count; at++) {
        const SharedLayer& layer = layers[at];
        const std::chrono::microseconds most(patience);
        const auto begin = Clock::now();
        for (int spins = 0; __atomic_load_n(layer.ticket, __ATOMIC_ACQUIRE) != *layer.turn; spins++) {
            pause(spins);
            if (__atomic_load_n(layer.stop, __ATOMIC_RELAXED)) return at;
            if (spins % 256 == 255 && Clock::now() - begin > most) return at;
        }
        ExpertArgs args = layer.experts;
        args.asked = layer.asked, args.asked_count = 0;
        for (int row = 0; row < args.rows; row++)
            for (int k = 0; k < args.used; k++) {
                const int expert = args.chosen[(size_t)row * args.stride + k];
                if (expert < 0 || expert >= args.count) return at;
                bool asked = layer.present[expert];
                for (int i = 0; i < args.asked_count && !asked; i++) asked = layer.asked[i] == expert;
                if (!asked) layer.asked[args.asked_count++] = expert;
            }
        if (args.asked_count) {
            const auto start = Clock::now();
            if (r->kernels.run_experts(r->context, args) >= 0) return at;
            *busy += std::chrono::duration<double>(Clock::now() - start).count();
        }
        __atomic_store_n(layer.done, *layer.turn, __ATOMIC_RELEASE);
    }
    return count;
}
LRT_API void lrt_combine_experts(Runtime* r, const CombineArgs* args) { r->kernels.combine_experts(r->context, *args); }
LRT_API void lrt_norm_rows(Runtime* r, const NormArgs* args) { r->kernels.norm_rows(r->context, *args); }
LRT_API void lrt_norm_latent_append(Runtime* r, const LatentArgs* args) { r->kernels.norm_latent_append(r->context, *args); }
LRT_API void lrt_latent_output(Runtime* r, const LatentArgs* args) { r->kernels.latent_output(r->context, *args); }
LRT_API void lrt_recurrent(Runtime* r, const RecurrentArgs* args) { r->kernels.recurrent(r->context, *args); }
LRT_API void lrt_head(Runtime* r, const HeadArgs* args) { r->kernels.head(r->context, *args); }
// Computes a mixture's steps together, if it can: returns how many they are.
static int mixture_of_row(Runtime* r, const Step* steps) {
    const Step* next = steps + 1;
    const MlpArgs* shared = next->kind == STEP_MLP ? (const MlpArgs*)(next++)->args : nullptr;
    if (next[0].kind != STEP_EXPERTS || next[1].kind != STEP_COMBINE) return 0;
    const bool done = r->kernels.mixture_of_row(r->context, *(const RouteArgs*)steps->args, shared, *(const ExpertArgs*)next[0].args,
                                                *(const CombineArgs*)next[1].args);
    return done ? (int)(next - steps) + 2 : 0;
}
// Runs the steps of a pass of one row from `*done` to `end`, and counts them there; steps that are computed
// together may end behind `end`. Returns early if a router gave NaN, or an expert is not in its table.
LRT_API void lrt_run(Runtime* r, const Step* steps, int end, int* done) {
    for (; *done < end; ++*done) {
        const Step& s = steps[*done];
        switch (s.kind) {
            case STEP_READ_ROWS:
                r->kernels.read_rows(*(const Matrix*)s.args, (const int64_t*)s.y, s.count, s.scale, s.x);
                break;
            case STEP_QKV:  // with the attention behind it
                r->kernels.attention(r->context, *(const AttentionArgs*)(&s + 1)->args);
                ++*done;
                break;
            case STEP_LATENT:  // likewise
                r->kernels.latent(r->context, *(const LatentArgs*)(&s + 1)->args);
                ++*done;
                break;
            case STEP_RECURRENT: lrt_recurrent(r, (const RecurrentArgs*)s.args); break;
            case STEP_MLP: lrt_norm_gated_mlp(r, (const MlpArgs*)s.args); break;
            case STEP_ROUTE: {
                const RouteArgs& args = *(const RouteArgs*)s.args;
                const int together = mixture_of_row(r, &s);
                if (!together) lrt_norm_route(r, &args);
                float sum = 0;
                for (int k = 0; k < args.used; k++) sum += args.weights[k];
                if (!std::isfinite(sum)) return;
                if (together) *done += together - 1;
                break;
            }
            case STEP_EXPERTS:
                if (lrt_run_experts(r, (const ExpertArgs*)s.args) >= 0) return;
                break;
            case STEP_COMBINE: lrt_combine_experts(r, (const CombineArgs*)s.args); break;
            case STEP_NORM: lrt_norm_rows(r, (const NormArgs*)s.args); break;
            case STEP_HEAD: lrt_head(r, (const HeadArgs*)s.args); break;
            case STEP_ADD:
                for (int i = 0; i < s.count; i++) s.x[i] = (s.x[i] + s.scale * ((const float*)s.y)[i]) * s.total;
        }
    }
}
LRT_API void lrt_linear(Runtime* r, const Stack* stack, const float* x, int rows, float* out) {
    r->kernels.linear(r->context, *stack, x, rows, out);
}
LRT_API void lrt_read_rows(Runtime* r, const Matrix* matrix, const int64_t* rows, int count, float factor, float* out) {
    r->kernels.read_rows(*matrix, rows, count, factor, out);
}
LRT_API void lrt_search_scales(Runtime* r, const SearchArgs* args) { r->kernels.search_scales(r->context, *args); }
// Adds to inputs (R, L * width) each row's products with the projections (L * width, D), normed in groups of `width`.
LRT_API void lrt_project_inputs(Runtime* r, const Stack* stack, const float* x, int rows, int width, const float* norm, float eps,
                                float* inputs) {
    r->kernels.project_inputs(r->context, *stack, x, rows, width, norm, eps, inputs);
}
LRT_API void lrt_gate_inputs(Runtime* r, const InputArgs* args) { r->kernels.gate_inputs(r->context, *args); }
LRT_API void lrt_read_streams(Runtime* r, const ConnectionArgs* args) { r->kernels.read_streams(r->context, *args); }
LRT_API void lrt_choose_tokens(Runtime* r, const IndexArgs* args) { r->kernels.choose_tokens(r->context, *args); }
LRT_API void lrt_add_ngrams(Runtime* r, const NgramArgs* args) { r->kernels.add_ngrams(r->context, *args); }
// The upper bound of decoding: see ceilings.h.
LRT_API void lrt_read_all(Runtime* r, const uint8_t* data, int64_t bytes) { r->kernels.read_all(r->context, data, bytes); }
// Sets the adapters of the following passes; none if `rows` is 0.
LRT_API void lrt_set_adapters(Runtime* r, const AdapterArgs* args) { r->context.adapters = *args; }
LRT_API void lrt_pack_low_rank(Runtime* r, const LowRankPack* from, const LowRank* to) { r->kernels.pack_low_rank(*from, *to); }
LRT_API void lrt_vision(Runtime* r, int step, const VisionArgs* args) { r->kernels.vision[step](r->context, *args); }
// Sets a layout's codebook entries (count, width), before its first matrix: values plus the zero point.
LRT_API void lrt_set_codebook(int layout, int count, int width, const uint8_t* entries) {
    Codebook& book = codebooks[layout - FIRST_CODEBOOK];
    uint8_t level[256] = {}, levels = 0;
    bool used[256] = {};
    for (int i = 0; i < count * width; i++) used[book.entries[i] = entries[i]] = true;
    const int bits = width == 8 ? 2 : 4, half = width / 2;
    for (int code = 0; code < 256; code++) {
        if (!used[code]) continue;
        for (int at = levels; at < 64; at += 1 << bits) book.levels[at] = (uint8_t)code;
        level[code] = levels++;
    }
    for (int i = 0; i < count * 2; i++) {
        int packed = 0;
        for (int j = 0; j < half; j++) packed |= level[entries[i * half + j]] << bits * j;
        book.packed[i % 2][i / 2] = (uint8_t)packed;
    }
}
// Converts rows (rows, cols) of GGUF blocks, `size` columns in `bytes` bytes, to tiles; `to` has room for the rows rounded
// up to 16.
LRT_API void lrt_tile(Runtime* r, int source, int size, int bytes, const uint8_t* from, int rows, int cols, uint8_t* to) {
    tile_rows(r->context, source, size, bytes, from, rows, cols, to);
}
