// What the driver has, how its work runs, and what every call checks.
#pragma once
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, OUT_OF_RESOURCES = 701, ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901, CAPTURE_MERGE = 902, CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908,
};

constexpr int DEVICES = 3, CAPABILITY = 89, PROCESSORS = 24, DRIVER = 13000;
constexpr int AT_ONCE = 2;  // the GPU whose work is done as it is submitted
constexpr size_t PAGE = 4096, ALIGNMENT = 256, ARENA = size_t(64) << 30;
constexpr size_t EXECUTABLE = 64 << 10;  // what a graph takes of a GPU
constexpr unsigned char POISON = 0xA7;

// -- what there is -----------------------------------------------------------------------------------

using Work = std::function<Result()>;

struct Context;
struct Op {
    Work work;
    Context* context;
    std::vector<std::shared_ptr<Op>> after;
    bool done = false;
    double at = 0;  // ms
    bool waits = false;    // for the host, so that a thread of its own runs it
    bool running = false;
};
using Ref = std::shared_ptr<Op>;
struct Node {
    Work work;
    std::vector<int> after;
    bool waits = false;
};
using Nodes = std::vector<Node>;
struct Stream;
struct Capture {
    int mode;
    void* thread;
    Stream* origin;
    bool invalid = false;
    std::shared_ptr<Nodes> nodes = std::make_shared<Nodes>();
    std::map<Stream*, std::vector<int>> tails;  // of each stream that takes part
};
struct Stream {
    Context* context;
    std::deque<Ref> queue = {};
    Ref last = nullptr;
    std::shared_ptr<Capture> capture = nullptr;
};
struct Event {
    Context* context;
    bool timed;
    Ref op = nullptr;
    std::weak_ptr<Capture> capture = {};
    bool captured = false;
    std::vector<int> nodes = {};
};
struct Context {
    Result fault = OK;
    size_t used = 0;
    Stream legacy{this};
};
struct Module;
struct Function {
    Module* module;
    std::string name;
    void (*run)(const void*);
    unsigned parameters, threads;
};
struct Module {
    Context* context;
    std::map<std::string, std::unique_ptr<Function>> functions;
};
struct Graph {
    std::shared_ptr<Nodes> nodes;
};
struct Exec {
    Context* context;
    int run;  // in which it was made: see standin_begin
    std::shared_ptr<Nodes> nodes;
};
struct Block {
    size_t size;
    Context* context;
    int run;
};

std::recursive_mutex mutex_;
Context contexts[DEVICES];
bool begun = false;
size_t memory_ = size_t(8) << 30, pinnable = SIZE_MAX, pinned = 0;
std::minstd_rand random_{1};
bool hasty = false;
int run_ = 0;
std::set<void*> streams, events, modules, functions, graphs, execs;
std::map<char*, Block> blocks;   // of the GPUs
std::map<char*, size_t> hosts;   // registered, or allocated
std::set<char*> owned;           // of these, those allocated
std::set<std::shared_ptr<Capture>> captures;
char *arena = nullptr, *next_ = nullptr;

thread_local Context* current = nullptr;
thread_local int own_mode = 0;  // global, for what this thread calls
thread_local char identity;
thread_local bool runs_waiting = false;  // this thread runs what waits for the host
bool spinning = false;                   // whether a kernel waits for it now

double now() {
    using namespace std::chrono;
    return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

template <class T>
typename std::map<char*, T>::iterator holding(std::map<char*, T>& all, const void* at) {
    auto found = all.upper_bound((char*)at);
    return found == all.begin() ? all.end() : --found;
}
size_t size_of(const Block& block) { return block.size; }
size_t size_of(size_t size) { return size; }
template <class T>
bool within(std::map<char*, T>& all, const void* at, size_t size) {
    auto found = holding(all, at);
    return found != all.end() && (char*)at + size <= found->first + size_of(found->second);
}
bool in_arena(const void* at) { return at >= arena && at < arena + ARENA; }

// -- running -----------------------------------------------------------------------------------------

// Lets other threads call the driver.
void let_others() {
    mutex_.unlock();
    std::this_thread::yield();
    mutex_.lock();
}

// A kernel waits for the host, and no other runs meanwhile.
void spin() {
    spinning = true;
    let_others();
    spinning = false;
}

void run(Op& op) {
    while (spinning) let_others();
    op.running = true;
    if (op.context->fault == OK) {
        const Result result = op.work ? op.work() : OK;
        if (result != OK) op.context->fault = result;
    }
    op.done = true, op.at = now(), op.work = nullptr, op.after.clear();
}

// All that `op` waits for, and itself.
void finish(const Ref& op) {
    std::vector<Ref> open;
    if (op) open.push_back(op);
    while (!open.empty()) {
        const Ref top = open.back();
        const auto waits = std::find_if(top->after.begin(), top->after.end(), [](auto& each) { return !each->done; });
        if (!top->done && waits != top->after.end()) {
            open.push_back(*waits);
            continue;
        }
        while (!top->done && (top->running || (top->waits && !runs_waiting))) let_others();
        if (!top->done) run(*top);
        open.pop_back();
    }
}

// The next one that `op` waits for; whether there was one.
bool advance(Ref op) {
    while (op && !op->done) {
        const auto waits = std::find_if(op->after.begin(), op->after.end(), [](auto& each) { return !each->done; });
        if (waits == op->after.end()) return !op->waits && (run(*op), true);
        op = *waits;
    }
    return false;
}

void trim(Stream& stream) {
    while (!stream.queue.empty() && stream.queue.front()->done) stream.queue.pop_front();
}

void finish(Context* context) {
    finish(context->legacy.last);
    for (void* each : streams)
        if (((Stream*)each)->context == context) finish(((Stream*)each)->last);
}

Result submit(Stream& stream, Work work, std::vector<Ref> also = {}) {
    if (stream.capture) {
        Capture& capture = *stream.capture;
        if (capture.invalid) return CAPTURE_INVALIDATED;
        capture.nodes->push_back({std::move(work), capture.tails[&stream]});
        capture.tails[&stream] = {int(capture.nodes->size()) - 1};
        return OK;
    }
    if (stream.last && !stream.last->done) also.push_back(stream.last);
    stream.last = std::make_shared<Op>(Op{std::move(work), stream.context, std::move(also)});
    trim(stream);
    stream.queue.push_back(stream.last);
    if (stream.context == &contexts[AT_ONCE]) finish(stream.last);
    return OK;
}

void hurry() {
    std::vector<Stream*> waiting;
    for (Context& context : contexts) waiting.push_back(&context.legacy);
    for (void* each : streams) waiting.push_back((Stream*)each);
    for (int count = random_() % 4; count--;) {
        Stream& stream = *waiting[random_() % waiting.size()];
        trim(stream);
        if (!stream.queue.empty()) advance(stream.queue.front());
    }
}

// -- checks ------------------------------------------------------------------------------------------

// Of a call in a context. A GPU's fault stays, and is told by whatever is called next.
Result enter() {
    if (!begun) return NOT_INITIALIZED;
    if (!current) return INVALID_CONTEXT;
    if (hasty) hurry();
    return current->fault;
}

// Of a call that may wait for the GPU, which a capture forbids.
Result unsafe() {
    bool refused = false;
    if (own_mode != 2)
        for (auto& capture : captures) {
            const bool mine = capture->thread == &identity;
            if (mine ? capture->mode != 2 : capture->mode == 0 && own_mode == 0)
                capture->invalid = refused = true;
        }
    return refused ? CAPTURE_UNSUPPORTED : OK;
}

Result find(void* handle, Stream*& stream) {
    if (!handle || handle == (void*)1) return stream = &current->legacy, OK;
    if (!streams.count(handle)) return INVALID_HANDLE;
    stream = (Stream*)handle;
    return stream->context == current ? OK : INVALID_CONTEXT;
}
Result find(void* handle, Event*& event) {
    if (!events.count(handle)) return INVALID_HANDLE;
    return event = (Event*)handle, OK;
}

// Memory of this context's GPU.
Result there(const void* at, size_t size) {
    if (!size || !within(blocks, at, size)) return INVALID_VALUE;
    return holding(blocks, at)->second.context == current ? OK : INVALID_VALUE;
}

enum Where { PLAIN, PINNED, WRONG };
Where host(const void* at, size_t size) {
    if (!at || !size || in_arena(at)) return WRONG;
    if (within(hosts, at, size)) return PINNED;
    const auto next = hosts.lower_bound((char*)at);
    if (within(hosts, at, 1) || (next != hosts.end() && next->first < (char*)at + size)) return WRONG;
    return PLAIN;
}

Work copying(void* to, const void* from, size_t size) {
    return [=] {
        for (const void* each : {(const void*)to, from})
            if (!within(blocks, each, size) && !within(hosts, each, size)) return ILLEGAL_ADDRESS;
        return memmove(to, from, size), OK;
    };
}

template <class T>
Result drop(std::set<void*>& all, void* handle) {
    if (!all.erase(handle)) return INVALID_HANDLE;
    delete (T*)handle;
    return OK;
}

}  // namespace

#define API extern "C" __attribute__((visibility("default"))) int
#define LOCK std::lock_guard<std::recursive_mutex> lock(mutex_)
#define TRY(call) do { const int result_ = (call); if (result_) return result_; } while (0)
#define ENTER LOCK; TRY(enter())
#define UNSAFE ENTER; TRY(unsafe())
