// Waits until the host has filled the slots of absent experts; without any, not at all. It waits only for a thread of
// the host, never for a copy: that could be queued behind it. A kernel of its own, one warp, so that what reads the
// results starts with clean caches. Systems end kernels that run for seconds: it gives up before, and for the whole
// pass, whose results the host then throws away.
#include "plan.cuh"

constexpr u64 MOST_NANOSECONDS = 200000000;

struct WaitHost {
    const Expert* experts;
    const int* chosen;  // experts of each row's slots, rows `stride` apart
    const u32* turn;    // see to_host.cu
    const u32* done;    // mapped RAM: the host's last finished turn
    u32* stop;          // mapped RAM: whether the pass is given up
    int count, used, stride, kinds;
};

extern "C" __global__ void wait_host(WaitHost args) {
    int absent = 0;
    for (int s = threadIdx.x; s < args.count; s += 32)
        absent |= is_absent(args.experts, args.chosen, args.used, args.stride, args.kinds, s);
    for (int lanes = 16; lanes; lanes >>= 1) absent |= shuffle_xor(absent, lanes);
    if (threadIdx.x || !absent) return;
    const u64 begin = nanoseconds();
    while (load_host(args.done) != *args.turn && !load_host(args.stop)) {
        if (nanoseconds() - begin < MOST_NANOSECONDS) {
            pause();
            continue;
        }
        store_host(args.stop, 1);
        fence_host();
        if (load_host(args.done) == *args.turn) store_host(args.stop, 0);  // just in time: the host may have seen no stop
    }
}
