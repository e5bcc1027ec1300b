// Queries the processor directly: __builtin_cpu_supports depends on a compiler library, and some of those report no
// features at all.
#include "processor.h"
#include "abi.h"
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#if LRT_AMX_COMPILES
#include <cerrno>
#include <csignal>
#include <immintrin.h>
#include <initializer_list>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__) && defined(_WIN32)
#include <windows.h>
#endif

namespace {

#if LRT_AMX_COMPILES
TARGET_BEGIN(LRT_AVX512 ",amx-tile,amx-int8,amx-bf16")
void try_tiles() {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, unused[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int tile : {0, 4, 6}) shape.bytes[tile] = 64, shape.rows[tile] = 16;
    alignas(64) uint8_t bytes[1024] = {};
    _tile_loadconfig(&shape);
    _tile_loadd(4, bytes, 64);
    _tile_loadd(6, bytes, 64);
    _tile_zero(0);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stored(0, bytes, 64);
}
TARGET_END

// Linux grants the tile registers on request, and a hypervisor may report AMX without supporting it, so a child process
// tries it.
bool tiles_work() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA)) return false;
    const pid_t child = fork();
    if (child < 0) return false;
    if (!child) {
        for (int signal : {SIGILL, SIGSEGV, SIGBUS}) std::signal(signal, SIG_DFL);
        try_tiles();
        _exit(0);
    }
    int status = 1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return status == 0;
}
#elif defined(__x86_64__)
bool tiles_work() { return false; }
#endif

#if defined(__x86_64__)
Processor ask() {
    Processor has;
    const auto bit = [](unsigned word, int n) { return (word >> n & 1) != 0; };
    unsigned a, b, c, d, more = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return has;  // XGETBV
    const bool avx = bit(c, 12) && bit(c, 28) && bit(c, 29);         // with FMA and F16C
    unsigned saved, high;  // the registers that the system saves per thread
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return has;
    has.avx2 = avx && bit(b, 5) && (saved & 0x06) == 0x06;
    has.avx512 = has.avx2 && (saved & 0xe6) == 0xe6 && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31) && bit(c, 11);
    has.vbmi = has.avx512 && bit(c, 1);
    const bool tiles = bit(d, 22) && bit(d, 24) && bit(d, 25);
    if (a) __get_cpuid_count(7, 1, &more, &b, &c, &d);
    has.avxvnni = has.avx2 && bit(more, 4);
    has.bf16 = has.avx512 && bit(more, 5);
    has.amx = has.bf16 && tiles && tiles_work();
    return has;
}
#elif defined(__aarch64__)
Processor ask() {
    Processor has;
#if defined(__APPLE__)
    has.dot_product = true;  // all Apple processors of this architecture have them
    const auto has_feature = [](const char* name) {
        int yes = 0;
        size_t size = sizeof(yes);
        return !sysctlbyname(name, &yes, &size, nullptr, 0) && yes;
    };
    has.i8mm = has_feature("hw.optional.arm.FEAT_I8MM") && has_feature("hw.optional.arm.FEAT_BF16");
#elif defined(__linux__)
    has.dot_product = getauxval(AT_HWCAP) & (1 << 20);                    // HWCAP_ASIMDDP
    has.i8mm = has.dot_product && (getauxval(AT_HWCAP2) >> 13 & 3) == 3;  // HWCAP2_I8MM, HWCAP2_BF16
#elif defined(_WIN32)
    has.dot_product = IsProcessorFeaturePresent(43);  // PF_ARM_V82_DP_INSTRUCTIONS_AVAILABLE
    // PF_ARM_V82_I8MM_INSTRUCTIONS_AVAILABLE, PF_ARM_V86_BF16_INSTRUCTIONS_AVAILABLE
    has.i8mm = has.dot_product && IsProcessorFeaturePresent(66) && IsProcessorFeaturePresent(68);
#endif
    return has;
}
#else
Processor ask() { return {}; }
#endif

// Best first.
constexpr struct {
    const char* name;
    bool Processor::*runs;
} ISAS[] = {
    {"amx", &Processor::amx},
    {"avx512bf16", &Processor::bf16},
    {"avx512", &Processor::avx512},
#if LRT_EVEX  // AVX-512's encoding of the same instructions, for tests: scripts/avxvnni
    {"avxvnni", &Processor::avx512},
#else
    {"avxvnni", &Processor::avxvnni},
#endif
    {"avx2", &Processor::avx2},
    {"i8mm", &Processor::i8mm},
    {"neon", &Processor::dot_product},
    {"portable", &Processor::any},
};

}  // namespace

const Processor& processor() {
    static const Processor has = ask();
    return has;
}

LRT_API const char* lrt_isa_here(int at) {
    for (const auto& each : ISAS)
        if (processor().*each.runs && !at--) return each.name;
    return nullptr;
}
