// One pool of threads for everything: work is divided into numbered tasks that threads take one by one. A task's result
// does not depend on its thread. Only thin templates over local types are inline here: these headers are compiled for
// several instruction sets, and the linker could choose the newest one's copy of a shared inline function.
#pragma once
#include <cstddef>
#include <cstdint>
#include "abi.h"

#if defined(_MSC_VER)
#define LRT_NOINLINE __declspec(noinline)
#define LRT_INLINE __forceinline
#else
#define LRT_NOINLINE __attribute__((noinline))
#define LRT_INLINE inline __attribute__((always_inline))
#endif

class Pool {
  public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    int threads() const;
    // Sets the number of threads and returns the actual one. Not to be called within `dispatch`.
    int resize(int threads);
    void dispatch(int count, void (*call)(void*, int), void* context);
    // Times that all threads met so far, in `dispatch` or within tasks, which say so.
    int64_t meetings() const;
    void meet();

  private:
    struct State;
    State* state_;
};

// Waits for a moment in a loop that has run `spins` times; after many, lets other threads run.
void pause(int spins);

// Memory that grows and is reused, so that passes do not allocate.
class Scratch {
  public:
    ~Scratch();
    void* bytes(size_t count);

  private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

struct Context {
    explicit Context(int threads) : pool(threads) {}
    Pool pool;
    // For a step and its second half; for a mixture's experts, and a shared one.
    struct Rows { Scratch normed, codes, meta, starts, ready; } rows, inner, chosen, shared_rows, shared_inner;
    Scratch wide, gated, partial, joined, tasks, more_tasks, crowd, places, low, low_codes, low_sums;
    AdapterArgs adapters = {};
};

inline namespace LRT_SPACE {

// Calls fn(task) for every task in [0, count); returns when all are done.
template <class Fn> inline void parallel(Context& context, int count, Fn fn) {
    context.pool.dispatch(count, [](void* f, int task) { (*static_cast<Fn*>(f))(task); }, &fn);
}

// Calls fn(row) for all rows, SHARE in a task.
template <int SHARE = 16, class Fn> inline void each_row(Context& context, int rows, Fn fn) {
    parallel(context, (rows + SHARE - 1) / SHARE, [&](int task) {
        for (int row = task * SHARE; row < rows && row < (task + 1) * SHARE; row++) fn(row);
    });
}

template <class T> inline T* scratch(Scratch& memory, size_t count) { return static_cast<T*>(memory.bytes(count * sizeof(T))); }

// Parts of a step that are not done yet. Within one `parallel`, a task may wait for tasks of lower numbers: these have been
// taken, and wait for still lower ones at most.
struct Countdown {
    int left;
    // Some parts are done; returns whether they were the last.
    bool finish(int parts = 1) { return __atomic_sub_fetch(&left, parts, __ATOMIC_ACQ_REL) == 0; }
    // Fetches the first bytes of what comes next while it waits.
    void wait(const uint8_t* next = nullptr) const {
        for (int spins = 0; __atomic_load_n(&left, __ATOMIC_ACQUIRE) > 0; spins++) {
            for (int line = 0; line < 4 && next && spins < 64; line++) __builtin_prefetch(next + (spins * 4 + line) * 64, 0, 2);
            pause(spins);
        }
    }
};

template <class T> constexpr T least(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T most(T a, T b) { return a < b ? b : a; }

inline void copy_floats(const float* from, int count, float* to) { __builtin_memcpy(to, from, count * sizeof(float)); }
inline void fill_floats(float* to, int count, float value) {
    for (int i = 0; i < count; i++) to[i] = value;
}

}  // namespace
