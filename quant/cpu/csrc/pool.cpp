// The thread pool and the scratch memory, compiled once for every processor.
#include "pool.h"
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>
#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__APPLE__)
#include <pthread/qos.h>
#endif
#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

// A pass is a burst of short jobs: workers spin during a pass, then sleep until the next one.
constexpr int SPINS = 20000, SPINS_BEFORE_YIELD = 4096;

}  // namespace

void pause(int spins) {
    if (spins > SPINS_BEFORE_YIELD) {
        std::this_thread::yield();
        return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

namespace {

#if defined(_WIN32)
using Worker = std::thread;
#else
constexpr size_t STACK = 4 << 20;

// A thread with enough stack for the kernels' blocks, about 254 kB: musl gives threads 128 kB.
class Worker {
  public:
    explicit Worker(std::function<void()> work) : work_(new std::function<void()>(std::move(work))) {
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, STACK);
#if defined(__APPLE__)
        pthread_attr_set_qos_class_np(&attributes, QOS_CLASS_USER_INITIATED, 0);  // performance cores first
#endif
        const int failed = pthread_create(&thread_, &attributes, run, work_.get());
        pthread_attr_destroy(&attributes);
        if (failed) throw std::system_error(failed, std::generic_category());
    }
    void join() { pthread_join(thread_, nullptr); }

  private:
    static void* run(void* work) {
        (*(std::function<void()>*)work)();
        return nullptr;
    }
    std::unique_ptr<std::function<void()>> work_;
    pthread_t thread_;
};
#endif

// Number of forks since the library was loaded. A child has no workers, only its parent's pools, which it must neither
// wake nor wait for.
std::atomic<int> forks{0};
#if !defined(_WIN32)
[[maybe_unused]] const int watching = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
#endif

// Keeps a worker off the core of the calling thread. In a virtual machine Linux takes an idle core for a busy one, so it
// starts and wakes workers on the caller's core and separates them many milliseconds later: a pass takes twice as long. A
// sleeping worker is barred from that core when it is woken, a running one leaves it, and then both may run anywhere.
class Place {
  public:
#if defined(__linux__)
    void sleeps() {
        thread_ = (pid_t)syscall(SYS_gettid);
        asleep_ = true;
    }
    void bar(int core) {
        if (asleep_ && !barred_) barred_ = leave(thread_, core, 1);
    }
    void wakes() {
        if (barred_) come_back();
        barred_ = asleep_ = false;
    }
    void step_off(int core, int threads) {
        if (sched_getcpu() == core && leave(0, core, threads)) come_back();
    }
    static int this_core() { return sched_getcpu(); }

  private:
    // The thread's affinity is read every time, since others may change it.
    bool leave(pid_t thread, int core, int least_cores) {
        if (sched_getaffinity(thread, sizeof allowed_, &allowed_) || CPU_COUNT(&allowed_) < least_cores) return false;
        others_ = allowed_;
        CPU_CLR(core, &others_);
        return CPU_COUNT(&others_) && !sched_setaffinity(thread, sizeof others_, &others_);
    }
    // Restores the affinity, unless it has been changed since.
    void come_back() {
        cpu_set_t now;
        if (!sched_getaffinity(0, sizeof now, &now) && CPU_EQUAL(&now, &others_)) sched_setaffinity(0, sizeof allowed_, &allowed_);
    }

    pid_t thread_ = 0;
    bool asleep_ = false, barred_ = false;
    cpu_set_t allowed_, others_;
#else
    void sleeps() {}
    void bar(int) {}
    void wakes() {}
    void step_off(int, int) {}
    static int this_core() { return -1; }
#endif
};

// Whether the calling thread has idle priority.
bool gives_way() {
#if defined(__linux__)
    return sched_getscheduler(0) == SCHED_IDLE;
#else
    return false;
#endif
}

// Yields a thread's core to other programs. The scheduler would take the core after a few milliseconds, mostly within a
// task, and the pass would wait for that task as long again. So a worker yields earlier, between two tasks, while the
// others continue. If no program is waiting, this costs less than a microsecond. A thread of idle priority yields
// often: Linux (6.13 and later) lets a waking program wait for the next tick, unless the thread enters the kernel.
class Slice {
  public:
    explicit Slice(bool gentle) : longest_(gentle ? 100 : 2000) {}  // time slices are 3 ms and more
    void between_tasks() {
        const auto lasted = Clock::now() - began_;
        if (lasted < longest_) return;
        if (lasted < SLEPT) std::this_thread::yield();  // otherwise it has just slept
        began_ = Clock::now();
    }

  private:
    using Clock = std::chrono::steady_clock;
    static constexpr std::chrono::milliseconds SLEPT{8};
    std::chrono::microseconds longest_;
    Clock::time_point began_ = Clock::now();
};

}  // namespace

struct Pool::State {
    // Uses fewer threads if the system grants no more.
    explicit State(int count) : threads(count < 1 ? 1 : count), places(threads - 1) {
        try {
            for (auto& place : places) workers.emplace_back([this, &place] { work(place); });
        } catch (const std::system_error&) {
        }
    }
    bool inherited() const { return born != forks.load(std::memory_order_relaxed); }
    ~State() {
        {
            std::lock_guard<std::mutex> lock(mutex);
            stop.store(true, std::memory_order_release);
            ticket.store((uint64_t)(job() + 1) << 32, std::memory_order_release);
        }
        wake.notify_all();
        for (auto& worker : workers) worker.join();
    }

    // Runs tasks of one job until none are left. `ticket` holds the job's number in its upper bits and the number of
    // unclaimed tasks below. Claiming a task fails once the job is over, so nobody waits for a worker that arrives late
    // because its core was busy. The job's parameters do not change while tasks are left; they are valid only if the
    // exchange succeeds. The caller has no `slice` unless it has idle priority: the job cannot continue without it.
    void take(uint32_t job, Slice* slice) {
        uint64_t seen = ticket.load(std::memory_order_acquire);
        while ((uint32_t)(seen >> 32) == job) {
            const int left = (int)(uint32_t)seen;
            if (left == 0) return;
            const int task = count.load(std::memory_order_relaxed) - left;
            auto fn = call.load(std::memory_order_relaxed);
            void* argument = context.load(std::memory_order_relaxed);
            if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel)) continue;
            fn(argument, task);
            done.fetch_add(1, std::memory_order_release);
            if (slice) slice->between_tasks();
            seen = ticket.load(std::memory_order_acquire);
        }
    }

    uint32_t job() const { return (uint32_t)(ticket.load(std::memory_order_acquire) >> 32); }

    void work(Place& place) {
        uint32_t seen = 0;
        Slice slice(gentle);
        for (;;) {
            uint32_t now = seen;
            for (int spins = 0; spins < SPINS && (now = job()) == seen; spins++) pause(spins % SPINS_BEFORE_YIELD);
            if (now == seen) {
                std::unique_lock<std::mutex> lock(mutex);
                sleeping++;
                place.sleeps();
                wake.wait(lock, [&] { return job() != seen; });
                place.wakes();
                sleeping--;
                now = job();
            }
            seen = now;
            if (stop.load(std::memory_order_acquire)) return;
            place.step_off(caller.load(std::memory_order_relaxed), threads);
            take(now, &slice);
        }
    }

    const int threads;
    const bool gentle = gives_way();  // priority of the creating thread, inherited by workers
    const int born = forks.load(std::memory_order_relaxed);
    std::vector<Place> places;  // guarded by the mutex, like `sleeping`
    std::vector<Worker> workers;
    std::mutex mutex;
    std::condition_variable wake;
    std::atomic<uint64_t> ticket{0};
    std::atomic<int> done{0}, count{0}, caller{-1};
    std::atomic<void (*)(void*, int)> call{nullptr};
    std::atomic<void*> context{nullptr};
    std::atomic<bool> stop{false};
    int sleeping = 0;
    int64_t meetings = 0;
};

Pool::Pool(int threads) : state_(new State(threads)) {}
Pool::~Pool() {
    if (!state_->inherited()) delete state_;
}
int Pool::threads() const { return state_->threads; }

int Pool::resize(int threads) {
    const State& s = *state_;
    // New workers would inherit the calling thread's priority; a forked child has no workers.
    if (threads < 1 || threads == s.threads || gives_way() != s.gentle || s.inherited()) return s.threads;
    delete state_;  // first, because the system may not grant threads for both
    state_ = new State(threads);
    return threads;
}

void Pool::dispatch(int count, void (*call)(void*, int), void* context) {
    State& s = *state_;
    if (s.workers.empty() || count <= 1 || s.inherited()) {
        for (int task = 0; task < count; task++) call(context, task);
        return;
    }
    s.call.store(call, std::memory_order_relaxed);
    s.context.store(context, std::memory_order_relaxed);
    s.count.store(count, std::memory_order_relaxed);
    s.done.store(0, std::memory_order_relaxed);
    const uint32_t job = s.job() + 1;
    const int core = Place::this_core();
    s.caller.store(core, std::memory_order_relaxed);
    bool wake;
    {
        std::lock_guard<std::mutex> lock(s.mutex);
        s.ticket.store((uint64_t)job << 32 | (uint32_t)count, std::memory_order_release);
        wake = s.sleeping > 0;
        if (wake)
            for (auto& place : s.places) place.bar(core);
    }
    if (wake) s.wake.notify_all();
    Slice slice(s.gentle);
    s.take(job, s.gentle ? &slice : nullptr);
    s.meetings++;
    for (int spins = 0; s.done.load(std::memory_order_acquire) < count; spins++) pause(spins);
}

int64_t Pool::meetings() const { return state_->meetings; }
void Pool::meet() { state_->meetings += !state_->workers.empty(); }

static void release(void* data) {
#if defined(_WIN32)
    _aligned_free(data);
#else
    std::free(data);
#endif
}

Scratch::~Scratch() { release(data_); }

void* Scratch::bytes(size_t count) {
    count = (count + 63) / 64 * 64;
    if (count > size_) {
        release(data_);
#if defined(_WIN32)
        data_ = _aligned_malloc(count, 64);
#else
        if (posix_memalign(&data_, 64, count)) data_ = nullptr;
#endif
        size_ = data_ ? count : 0;
    }
    return data_;
}
