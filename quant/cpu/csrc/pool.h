// One pool of threads for everything: work is cut into numbered tasks that threads take in turn.
// Which thread runs a task never changes its result.
// Nothing here is inline but thin templates over local types: these headers are compiled for several
// instruction sets, and a shared inline function could end up as the newest one's.
#pragma once
#include <cstddef>
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
    // Goes on with so many threads, if it can; returns how many there are. Never within `dispatch`.
    int resize(int threads);
    void dispatch(int count, void (*call)(void*, int), void* context);

  private:
    struct State;
    State* state_;
};

// Memory that grows and is kept: a pass allocates nothing.
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
    struct Rows { Scratch normed, codes, meta, starts; } rows, inner;  // of a step, of its second half
    Scratch wide, gated, partial, joined, tasks, crowd, places, low, low_codes, low_sums;
    AdapterArgs adapters = {};
};

namespace {

// fn(task) for every task in [0, count); returns when all are done.
template <class Fn> inline void parallel(Context& context, int count, Fn fn) {
    context.pool.dispatch(count, [](void* f, int task) { (*static_cast<Fn*>(f))(task); }, &fn);
}

template <class T> inline T* scratch(Scratch& memory, size_t count) { return static_cast<T*>(memory.bytes(count * sizeof(T))); }

template <class T> constexpr T least(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T most(T a, T b) { return a < b ? b : a; }

inline void copy_floats(const float* from, int count, float* to) { __builtin_memcpy(to, from, count * sizeof(float)); }
inline void fill_floats(float* to, int count, float value) {
    for (int i = 0; i < count; i++) to[i] = value;
}

}  // namespace
