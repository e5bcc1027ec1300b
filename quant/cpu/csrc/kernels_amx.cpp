// x86-64 with AVX-512 VNNI and AMX's products of integers and of bf16.
#define LRT_AMX 1
#include "kernels.h"
#if LRT_AMX_COMPILES
// Standard headers first: their code must not be compiled for this instruction set.
#include <cerrno>
#include <cmath>
#include <cpuid.h>
#include <csignal>
#include <initializer_list>
#include <immintrin.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <type_traits>
#include <unistd.h>
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,amx-tile,amx-int8,amx-bf16,avx512bf16")
#include "vec_avx512.h"
#define KERNELS kernels_amx
#include "steps.h"

namespace {

void try_tiles() {
    TileShape shape;
    alignas(64) uint8_t bytes[1024] = {};
    shape.take(16, 64);
    _tile_loadd(4, bytes, 64);
    _tile_loadd(6, bytes, 64);
    _tile_zero(0);
    _tile_dpbsud(0, 4, 6);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stored(0, bytes, 64);
}

}  // namespace
#pragma GCC pop_options

namespace {

// Linux grants the tile registers on request, and a hypervisor may report AMX without supporting it: a child process tries.
bool tiles_work() {
    constexpr unsigned TILE_INT8_BF16 = 3u << 24 | 1u << 22;
    unsigned a, b, c, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & TILE_INT8_BF16) != TILE_INT8_BF16) return false;
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

}  // namespace

bool amx_works() {
    static const bool works = tiles_work();
    return works;
}
#endif
