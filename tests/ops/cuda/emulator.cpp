// Runs kernels on a CPU, for tests: each thread of a block is a coroutine, which lets the others go on
// where it waits for its warp or its block. Blocks, and the threads of one, come in an order that
// `seed` shuffles: a barrier that is missing shows. A context starts a coroutine; from then on jumps
// switch, which ask nothing of the system.
#include <ucontext.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <vector>

struct Three {
    unsigned x, y, z;
};
struct Place {
    Three thread, block, threads, blocks;
};

namespace {

constexpr size_t STACK = 128 << 10;

struct Barrier {
    unsigned arrived = 0, round = 0;
};
struct Warp {
    uint32_t words[2][32][8];  // by turns: while some lanes read, others go on and write
    Barrier barrier;
};
struct Thread {
    void* stopped[5];
    std::unique_ptr<char[]> stack{new char[STACK]};
    bool begun = false, done;
    const Barrier* waits;  // for its next round, or for nothing
    unsigned round;
};

std::vector<Thread> threads;
std::vector<Warp> warps;
Barrier block;
void* scheduler[5];
unsigned current, left;
void (*kernel)(const void*);
const void* arguments;
std::mutex running;  // one kernel at a time, as there is one of each of these

}  // namespace

extern "C" {

Place emulated_place;
void (*emulated_pausing)() = nullptr;  // what a kernel calls that waits for the host

void emulated_pause() {
    if (emulated_pausing) emulated_pausing();
}

unsigned long long emulated_nanoseconds() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

// The compiler's jumps, which save what it knows to be in use: libc's take four times as long. They must
// leave from another function than they return to.
[[noreturn]] __attribute__((noinline)) static void jump(void** to) { __builtin_longjmp(to, 1); }

__attribute__((noinline)) static void stop(Thread& own) {
    if (!__builtin_setjmp(own.stopped)) jump(scheduler);
}

static void wait(Barrier& barrier, unsigned count) {
    const unsigned round = barrier.round;
    if (++barrier.arrived == count) {
        barrier.arrived = 0, barrier.round++;
        return;
    }
    Thread& own = threads[current];
    own.waits = &barrier, own.round = round;
    stop(own);
}

void emulated_block() { wait(block, emulated_place.threads.x); }

void emulated_warp() {
    const unsigned warp = emulated_place.thread.x / 32, count = emulated_place.threads.x;
    wait(warps[warp].barrier, std::min(32u, count - warp * 32));
}

uint32_t (*emulated_words())[8] {
    Warp& warp = warps[emulated_place.thread.x / 32];
    return warp.words[warp.barrier.round % 2];
}

static void thread_main() {
    for (;;) {  // to be used again: contexts ask the system
        kernel(arguments);
        Thread& own = threads[current];
        own.done = true, left--;
        stop(own);
    }
}

// Until it waits or is done.
__attribute__((noinline)) static void go_on(Thread& thread) {
    if (__builtin_setjmp(scheduler)) return;
    if (thread.begun) jump(thread.stopped);
    thread.begun = true;
    ucontext_t context;
    getcontext(&context);
    // Stacks end at different lines of the cache: all are in use by turns.
    const size_t apart = (&thread - threads.data()) % 64 * 320;
    context.uc_stack.ss_sp = thread.stack.get(), context.uc_stack.ss_size = STACK - apart;
    context.uc_link = nullptr;
    makecontext(&context, thread_main, 0);
    setcontext(&context);
}

static void run_block(unsigned count, std::minstd_rand& random) {
    warps.assign((count + 31) / 32, Warp());
    block = Barrier(), left = count;
    std::vector<unsigned> order(count);
    for (unsigned i = 0; i < count; i++) {
        order[i] = i;
        threads[i].done = false, threads[i].waits = nullptr;
    }
    std::shuffle(order.begin(), order.end(), random);
    while (left)
        for (unsigned i : order) {
            Thread& thread = threads[i];
            if (thread.done || (thread.waits && thread.waits->round == thread.round)) continue;
            current = i, emulated_place.thread = {i, 0, 0};
            go_on(thread);
        }
}

// A thread that leaves a kernel early must not be waited for: those that do leave all together.
void emulate(void (*run)(const void*), const void* args, const unsigned* grid, unsigned count, unsigned seed) {
    running.lock();
    kernel = run, arguments = args;
    if (threads.size() < count) threads.resize(count);
    emulated_place.blocks = {grid[0], grid[1], grid[2]}, emulated_place.threads = {count, 1, 1};
    std::vector<Three> blocks;
    for (unsigned z = 0; z < grid[2]; z++)
        for (unsigned y = 0; y < grid[1]; y++)
            for (unsigned x = 0; x < grid[0]; x++) blocks.push_back({x, y, z});
    std::minstd_rand random(seed);
    std::shuffle(blocks.begin(), blocks.end(), random);
    for (const Three& at : blocks) emulated_place.block = at, run_block(count, random);
    running.unlock();
}

// For who leaves a kernel by a jump.
void emulated_fault() {
    for (Thread& thread : threads) thread.begun = false;
    running.unlock();
}
}
