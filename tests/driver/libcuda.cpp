// A stand-in for NVIDIA's driver: what localrt and the tests' torch call of libcuda.so.1, without a GPU.
//
// Nothing runs until somebody waits for it (`hasty` runs some of it sooner), so a wait that is missing
// shows. Handles, contexts, states of capture, addresses and sizes are checked; misuse gets the driver's
// own errors. A module is machine code that NVRTC made, followed by the kernel's twin for the CPU, or the
// twin alone (tests/ops/cuda/emulator.py): a mark and the path of its library. Memory of the GPU is that
// of the host at addresses which are never used twice; whoever touches it once it is freed gets
// CUDA_ERROR_ILLEGAL_ADDRESS, as does a kernel which is given memory that is not the GPU's.
#include <dlfcn.h>
#include <elf.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <climits>
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
#include <vector>

namespace {

enum Result {
    OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, NO_BINARY = 209, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600,
    ILLEGAL_ADDRESS = 700, OUT_OF_RESOURCES = 701, CONTEXT_DESTROYED = 709, ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713, NOT_PERMITTED = 800, NOT_SUPPORTED = 801, CAPTURE_UNSUPPORTED = 900,
    CAPTURE_INVALIDATED = 901, CAPTURE_MERGE = 902, CAPTURE_UNMATCHED = 903, CAPTURE_UNJOINED = 904,
    CAPTURE_ISOLATION = 905, CAPTURED_EVENT = 907, CAPTURE_WRONG_THREAD = 908,
};
const std::map<int, std::pair<const char*, const char*>> ERRORS = {
    {OK, {"CUDA_SUCCESS", "no error"}},
    {INVALID_VALUE, {"CUDA_ERROR_INVALID_VALUE", "invalid argument"}},
    {OUT_OF_MEMORY, {"CUDA_ERROR_OUT_OF_MEMORY", "out of memory"}},
    {INVALID_IMAGE, {"CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"}},
    {INVALID_CONTEXT, {"CUDA_ERROR_INVALID_CONTEXT", "invalid device context"}},
    {NO_BINARY, {"CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"}},
    {INVALID_HANDLE, {"CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"}},
    {NOT_FOUND, {"CUDA_ERROR_NOT_FOUND", "named symbol not found"}},
    {ILLEGAL_ADDRESS, {"CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}},
    {OUT_OF_RESOURCES, {"CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"}},
};

constexpr int DEVICES = 2, CAPABILITY = 89, PROCESSORS = 24, DRIVER = 13000;
constexpr size_t PAGE = 4096, ALIGNMENT = 256, ARENA = size_t(64) << 30;
constexpr unsigned char POISON = 0xA7;
const char MARK[] = "emulated kernel:";  // then the library's path

// -- what there is -----------------------------------------------------------------------------------

using Work = std::function<Result()>;

struct Context;
struct Op {
    Work work;
    Context* context;
    std::vector<std::shared_ptr<Op>> after;
    bool done = false;
    double at = 0;  // ms
};
using Ref = std::shared_ptr<Op>;
struct Node {
    Work work;
    std::vector<int> after;
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
    int device = 0, held = 0;
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
    std::shared_ptr<Nodes> nodes;
};
struct Block {
    size_t size;
    Context* context;
};

std::recursive_mutex mutex_;
Context contexts[DEVICES];
bool begun = false;
size_t memory_ = size_t(8) << 30, pinnable = SIZE_MAX, pinned = 0;
std::minstd_rand random_{1};
bool hasty = false;
std::set<void*> streams, events, modules, functions, graphs, execs;
std::map<char*, Block> blocks;   // of the GPUs
std::map<char*, size_t> hosts;   // registered, or allocated
std::set<char*> owned;           // of these, those allocated
std::set<std::shared_ptr<Capture>> captures;
char *arena = nullptr, *next_ = nullptr;

thread_local Context* current = nullptr;
thread_local int own_mode = 0;  // global, for what this thread calls
thread_local bool in_callback = false;
thread_local char identity;

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

sigjmp_buf escape;
volatile sig_atomic_t guarded = 0;
struct sigaction before;

void on_fault(int signal, siginfo_t* info, void*) {
    if (guarded && in_arena(info->si_addr)) {
        guarded = 0;
        siglongjmp(escape, 1);
    }
    sigaction(signal, &before, nullptr);  // it happens again, to whom it was for
}

Result run_kernel(const Function& function, const std::vector<uint64_t>& args, const unsigned* grid, unsigned threads) {
    // What looks like an address must be the GPU's, or pinned.
    for (uint64_t word : args) {
        char* at = (char*)word;
        unsigned char resident;
        if (in_arena(at) ? !within(blocks, at, 1)
                         : word >> 40 && word < uint64_t(1) << 47 && !within(hosts, at, 1) &&
                               mincore((void*)(word & -PAGE), 1, &resident) == 0)
            return ILLEGAL_ADDRESS;
    }
    if (!function.run) return NO_BINARY;
    using Emulate = void (*)(void (*)(const void*), const void*, const unsigned*, unsigned, unsigned);
    static const auto emulate = (Emulate)dlsym(RTLD_DEFAULT, "emulate");
    struct sigaction action {};
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
    Result result = ILLEGAL_ADDRESS;
    if (!sigsetjmp(escape, 1)) {
        guarded = 1;
        emulate(function.run, args.data(), grid, threads, random_());
        result = OK;
    }
    guarded = 0;
    sigaction(SIGSEGV, &before, nullptr);
    return result;
}

void run(Op& op) {
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
        if (!top->done) run(*top);
        open.pop_back();
    }
}

// The next one that `op` waits for; whether there was one.
bool advance(Ref op) {
    while (op && !op->done) {
        const auto waits = std::find_if(op->after.begin(), op->after.end(), [](auto& each) { return !each->done; });
        if (waits == op->after.end()) return run(*op), true;
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
    if (in_callback) return NOT_PERMITTED;
    if (!begun) return NOT_INITIALIZED;
    if (!current) return INVALID_CONTEXT;
    if (!current->held) return CONTEXT_DESTROYED;
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

// -- modules -----------------------------------------------------------------------------------------

// The kernel of machine code: its parameters' bytes and most threads, by what ptxas notes of it.
bool read_code(const char* image, std::string& name, unsigned& parameters, unsigned& threads, const char*& end) {
    const auto& header = *(const Elf64_Ehdr*)image;
    const auto* sections = (const Elf64_Shdr*)(image + header.e_shoff);
    const char* names = image + sections[header.e_shstrndx].sh_offset;
    end = image + std::max(header.e_shoff + header.e_shnum * header.e_shentsize,
                           header.e_phoff + header.e_phnum * header.e_phentsize);
    for (int i = 0; i < header.e_shnum; i++) {
        const std::string section = names + sections[i].sh_name;
        if (section.rfind(".nv.info.", 0) != 0) continue;
        name = section.substr(9);
        const char *at = image + sections[i].sh_offset, *last = at + sections[i].sh_size;
        while (at < last) {  // kind, attribute, then a value of two bytes or a size and as many
            const unsigned kind = (unsigned char)at[0], attribute = (unsigned char)at[1];
            const unsigned value = *(const uint16_t*)(at + 2);
            at += 4;
            if (kind != 4) {
                if (attribute == 0x19) parameters = value;
                continue;
            }
            if (attribute == 0x05) threads = *(const uint32_t*)at;
            at += value;
        }
        return true;
    }
    return false;
}

Result load(const char* image, Module& module) {
    std::string name;
    unsigned parameters = 0, threads = 1024;
    const bool compiled = !memcmp(image, ELFMAG, SELFMAG);
    if (compiled) {
        const auto& header = *(const Elf64_Ehdr*)image;
        if (header.e_machine != 190) return INVALID_IMAGE;
        if ((header.e_flags >> 8 & 255) != CAPABILITY) return NO_BINARY;
        if (!read_code(image, name, parameters, threads, image)) return INVALID_IMAGE;
    }
    void (*run)(const void*) = nullptr;
    if (!strncmp(image, MARK, sizeof MARK - 1)) {
        void* library = dlopen(image + sizeof MARK - 1, RTLD_NOW | RTLD_LOCAL);
        if (!library) return INVALID_IMAGE;
        run = (void (*)(const void*))dlsym(library, "run");
        const auto* size = (const unsigned*)dlsym(library, "run_size");
        const auto* called = (const char* const*)dlsym(library, "run_name");
        if (!run || !size || !called) return INVALID_IMAGE;
        if (compiled && (name != *called || parameters != *size)) return INVALID_IMAGE;
        name = *called, parameters = *size;
    } else if (!compiled) {
        return INVALID_IMAGE;
    }
    auto& function = module.functions[name];
    function.reset(new Function{&module, name, run, parameters, threads});
    functions.insert(function.get());
    return OK;
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

// -- devices and contexts ----------------------------------------------------------------------------

API cuInit(unsigned flags) {
    LOCK;
    if (flags) return INVALID_VALUE;
    begun = true;
    for (int i = 0; i < DEVICES; i++) contexts[i].device = i;
    return OK;
}

API cuDriverGetVersion(int* version) { return *version = DRIVER, OK; }

API cuDeviceGetCount(int* count) { return begun ? (*count = DEVICES, OK) : NOT_INITIALIZED; }

API cuDeviceGet(int* device, int ordinal) {
    if (!begun) return NOT_INITIALIZED;
    return ordinal >= 0 && ordinal < DEVICES ? (*device = ordinal, OK) : INVALID_DEVICE;
}

API cuDeviceGetName(char* name, int size, int device) {
    if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
    return strncpy(name, "Stand-in GPU", size), OK;
}

API cuDeviceGetAttribute(int* value, int attribute, int device) {
    if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
    const std::map<int, int> known = {{16, PROCESSORS}, {38, 1 << 20}, {75, CAPABILITY / 10}, {76, CAPABILITY % 10}};
    const auto found = known.find(attribute);
    return found == known.end() ? INVALID_VALUE : (*value = found->second, OK);
}

API cuDevicePrimaryCtxRetain(void** context, int device) {
    LOCK;
    if (!begun) return NOT_INITIALIZED;
    if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
    contexts[device].held++;
    return *context = &contexts[device], OK;
}

API cuDevicePrimaryCtxRelease(int device) {
    LOCK;
    if (device < 0 || device >= DEVICES) return INVALID_DEVICE;
    if (!contexts[device].held) return INVALID_CONTEXT;
    return contexts[device].held--, OK;
}

API cuCtxGetCurrent(void** context) {
    if (!begun) return NOT_INITIALIZED;
    return *context = current, OK;
}

API cuCtxSetCurrent(void* context) {
    if (!begun) return NOT_INITIALIZED;
    if (context && (context < contexts || context >= contexts + DEVICES)) return INVALID_CONTEXT;
    return current = (Context*)context, OK;
}

API cuCtxSynchronize() {
    UNSAFE;
    for (auto& capture : captures)
        if (capture->origin->context == current) return capture->invalid = true, CAPTURE_UNSUPPORTED;
    finish(current);
    return current->fault;
}

API cuGetErrorString(int error, const char** text) {
    const auto found = ERRORS.find(error);
    return *text = found == ERRORS.end() ? nullptr : found->second.second, found == ERRORS.end() ? INVALID_VALUE : OK;
}

API cuGetErrorName(int error, const char** text) {
    const auto found = ERRORS.find(error);
    return *text = found == ERRORS.end() ? nullptr : found->second.first, found == ERRORS.end() ? INVALID_VALUE : OK;
}

// -- modules and kernels -----------------------------------------------------------------------------

API cuModuleLoadData(void** module, const void* image) {
    UNSAFE;
    if (!image) return INVALID_VALUE;
    auto made = std::make_unique<Module>(Module{current, {}});
    TRY(load((const char*)image, *made));
    modules.insert(*module = made.release());
    return OK;
}

API cuModuleUnload(void* module) {
    UNSAFE;
    if (!modules.count(module)) return INVALID_HANDLE;
    finish(current);
    for (auto& each : ((Module*)module)->functions) functions.erase(each.second.get());
    return drop<Module>(modules, module);
}

API cuModuleGetFunction(void** function, void* module, const char* name) {
    ENTER;
    if (!modules.count(module)) return INVALID_HANDLE;
    auto& all = ((Module*)module)->functions;
    const auto found = all.find(name);
    return found == all.end() ? NOT_FOUND : (*function = found->second.get(), OK);
}

API cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void* handle, void** parameters, void** extra) {
    ENTER;
    Stream* stream;
    TRY(find(handle, stream));
    if (!functions.count(function)) return INVALID_HANDLE;
    const auto& called = *(Function*)function;
    if (called.module->context != current) return INVALID_HANDLE;
    if (!gx || !gy || !gz || gx > INT_MAX || gy > 65535 || gz > 65535 || !bx || by != 1 || bz != 1 || bx > 1024)
        return INVALID_VALUE;
    if (shared > 48 << 10 || !parameters || !parameters[0] || extra) return INVALID_VALUE;
    if (bx > called.threads) return OUT_OF_RESOURCES;
    std::vector<uint64_t> args((called.parameters + 7) / 8);
    memcpy(args.data(), parameters[0], called.parameters);
    return submit(*stream, [&called, args, gx, gy, gz, bx] {
        const unsigned grid[3] = {gx, gy, gz};
        return run_kernel(called, args, grid, bx);
    });
}

API cuLaunchHostFunc(void* handle, void (*function)(void*), void* data) {
    ENTER;
    Stream* stream;
    TRY(find(handle, stream));
    if (!function) return INVALID_VALUE;
    return submit(*stream, [=] {
        in_callback = true;
        function(data);
        in_callback = false;
        return OK;
    });
}

// -- memory ------------------------------------------------------------------------------------------

API cuMemAlloc_v2(void** at, size_t size) {
    UNSAFE;
    if (!size) return INVALID_VALUE;
    if (current->used + size > memory_) return OUT_OF_MEMORY;
    if (!arena) {
        void* room = mmap(nullptr, ARENA, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED) return OUT_OF_MEMORY;
        arena = next_ = (char*)room;
    }
    // It ends with a page, and the next one belongs to nobody.
    const size_t taken = (size + ALIGNMENT - 1) & -ALIGNMENT, pages = (taken + PAGE - 1) & -PAGE;
    if (next_ + pages + PAGE > arena + ARENA || mprotect(next_, pages, PROT_READ | PROT_WRITE)) return OUT_OF_MEMORY;
    char* begin = next_ + pages - taken;
    next_ += pages + PAGE;
    memset(begin, POISON, taken);
    blocks[begin] = {size, current};
    current->used += size;
    return *at = begin, OK;
}

API cuMemFree_v2(char* at) {
    UNSAFE;
    if (!at) return OK;
    const auto found = blocks.find(at);
    if (found == blocks.end() || found->second.context != current) return INVALID_VALUE;
    finish(current);
    char* page = (char*)((uintptr_t)at & -PAGE);
    const size_t pages = (at + found->second.size - page + PAGE - 1) & -PAGE;
    mprotect(page, pages, PROT_NONE), madvise(page, pages, MADV_DONTNEED);
    current->used -= found->second.size;
    blocks.erase(found);
    return current->fault;
}

API cuMemGetInfo_v2(size_t* left, size_t* total) {
    ENTER;
    return *left = memory_ - current->used, *total = memory_, OK;
}

API cuMemHostRegister_v2(char* at, size_t size, unsigned flags) {
    UNSAFE;
    if (!at || !size || flags & ~1u || in_arena(at)) return INVALID_VALUE;  // 1: for all GPUs
    const auto next = hosts.lower_bound(at);
    if (within(hosts, at, 1) || (next != hosts.end() && next->first < at + size)) return ALREADY_REGISTERED;
    if (pinned + size > pinnable) return OUT_OF_MEMORY;
    return hosts[at] = size, pinned += size, OK;
}

API cuMemHostUnregister(char* at) {
    UNSAFE;
    const auto found = hosts.find(at);
    if (found == hosts.end() || owned.count(at)) return NOT_REGISTERED;
    return pinned -= found->second, hosts.erase(found), OK;
}

API cuMemHostAlloc(void** at, size_t size, unsigned flags) {
    UNSAFE;
    if (!size || flags) return INVALID_VALUE;
    if (pinned + size > pinnable) return OUT_OF_MEMORY;
    char* made = (char*)aligned_alloc(PAGE, (size + PAGE - 1) & -PAGE);
    if (!made) return OUT_OF_MEMORY;
    memset(made, POISON, size);
    hosts[made] = size, pinned += size, owned.insert(made);
    return *at = made, OK;
}

API cuMemFreeHost(char* at) {
    UNSAFE;
    if (!owned.erase(at)) return INVALID_VALUE;
    pinned -= hosts[at], hosts.erase(at), free(at);
    return OK;
}

// From RAM that is not pinned it is as if it had been copied aside: the caller may change it at once.
API cuMemcpyHtoDAsync_v2(void* to, const void* from, size_t size, void* handle) {
    ENTER;
    Stream* stream;
    TRY(find(handle, stream));
    TRY(there(to, size));
    const Where where = host(from, size);
    if (where == WRONG) return INVALID_VALUE;
    if (where == PINNED) return submit(*stream, copying(to, from, size));
    if (stream->capture) return stream->capture->invalid = true, CAPTURE_UNSUPPORTED;
    auto aside = std::make_shared<std::vector<char>>((const char*)from, (const char*)from + size);
    return submit(*stream, [=] {
        if (!within(blocks, to, size)) return ILLEGAL_ADDRESS;
        return memcpy(to, aside->data(), size), OK;
    });
}

API cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t size, void* handle) {
    ENTER;
    Stream* stream;
    TRY(find(handle, stream));
    TRY(there(from, size));
    const Where where = host(to, size);
    if (where == WRONG) return INVALID_VALUE;
    if (where == PINNED) return submit(*stream, copying(to, from, size));
    if (stream->capture) return stream->capture->invalid = true, CAPTURE_UNSUPPORTED;
    finish(stream->last);
    if (current->fault == OK) memcpy(to, from, size);
    return current->fault;
}

API cuMemcpyDtoDAsync_v2(void* to, const void* from, size_t size, void* handle) {
    ENTER;
    Stream* stream;
    TRY(find(handle, stream));
    TRY(there(to, size));
    TRY(there(from, size));
    return submit(*stream, copying(to, from, size));
}

API cuMemsetD8Async(void* at, unsigned char value, size_t size, void* handle) {
    ENTER;
    Stream* stream;
    TRY(find(handle, stream));
    TRY(there(at, size));
    return submit(*stream, [=] { return within(blocks, at, size) ? (memset(at, value, size), OK) : ILLEGAL_ADDRESS; });
}

// -- streams and events ------------------------------------------------------------------------------

API cuStreamCreate(void** stream, unsigned flags) {
    ENTER;
    if (flags != 1) return NOT_SUPPORTED;  // those that wait for the default stream: torch makes none
    streams.insert(*stream = new Stream{current});
    return OK;
}

API cuStreamDestroy_v2(void* handle) {
    ENTER;
    if (!streams.count(handle)) return INVALID_HANDLE;
    Stream& stream = *(Stream*)handle;
    if (stream.capture) return stream.capture->invalid = true, CAPTURE_UNSUPPORTED;
    finish(stream.last);  // what waits must be run by somebody
    return drop<Stream>(streams, handle);
}

API cuStreamSynchronize(void* handle) {
    UNSAFE;
    Stream* stream;
    TRY(find(handle, stream));
    if (stream->capture) return stream->capture->invalid = true, CAPTURE_UNSUPPORTED;
    finish(stream->last);
    return current->fault;
}

API cuStreamQuery(void* handle) {
    UNSAFE;
    Stream* stream;
    TRY(find(handle, stream));
    if (stream->capture) return stream->capture->invalid = true, CAPTURE_UNSUPPORTED;
    if (!stream->last || stream->last->done) return current->fault;
    return advance(stream->last), NOT_READY;
}

API cuStreamWaitEvent(void* handle, void* which, unsigned flags) {
    ENTER;
    Stream* stream;
    Event* event;
    TRY(find(handle, stream));
    TRY(find(which, event));
    if (flags) return INVALID_VALUE;
    if (event->captured) {
        const auto capture = event->capture.lock();
        if (!capture || !captures.count(capture)) return CAPTURE_ISOLATION;
        if (stream->capture && stream->capture != capture)
            return capture->invalid = stream->capture->invalid = true, CAPTURE_MERGE;
        if (stream == &stream->context->legacy) return capture->invalid = true, CAPTURE_UNSUPPORTED;
        stream->capture = capture;
        auto& tail = capture->tails[stream];
        tail.insert(tail.end(), event->nodes.begin(), event->nodes.end());
        return OK;
    }
    if (stream->capture) return stream->capture->invalid = true, CAPTURE_ISOLATION;
    if (!event->op || event->op->done) return OK;
    return submit(*stream, nullptr, {event->op});
}

API cuEventCreate(void** event, unsigned flags) {
    ENTER;
    if (flags & ~3u) return INVALID_VALUE;
    events.insert(*event = new Event{current, !(flags & 2)});
    return OK;
}

API cuEventDestroy_v2(void* handle) {
    LOCK;
    return drop<Event>(events, handle);
}

API cuEventRecord(void* which, void* handle) {
    ENTER;
    Stream* stream;
    Event* event;
    TRY(find(handle, stream));
    TRY(find(which, event));
    if (event->context != current) return INVALID_HANDLE;
    event->captured = bool(stream->capture);
    if (stream->capture) {
        if (stream->capture->invalid) return CAPTURE_INVALIDATED;
        event->capture = stream->capture, event->nodes = stream->capture->tails[stream];
        return OK;
    }
    TRY(submit(*stream, nullptr));
    return event->op = stream->last, OK;
}

API cuEventQuery(void* handle) {
    UNSAFE;
    Event* event;
    TRY(find(handle, event));
    if (event->captured) return CAPTURED_EVENT;
    if (!event->op || event->op->done) return event->context->fault;
    return advance(event->op), NOT_READY;
}

API cuEventSynchronize(void* handle) {
    UNSAFE;
    Event* event;
    TRY(find(handle, event));
    if (event->captured) return CAPTURED_EVENT;
    finish(event->op);
    return event->context->fault;
}

API cuEventElapsedTime_v2(float* ms, void* first, void* last) {
    ENTER;
    Event *begin, *end;
    TRY(find(first, begin));
    TRY(find(last, end));
    if (!begin->timed || !end->timed || !begin->op || !end->op) return INVALID_HANDLE;
    if (!begin->op->done || !end->op->done) return NOT_READY;
    return *ms = float(end->op->at - begin->op->at), OK;
}

// -- graphs ------------------------------------------------------------------------------------------

API cuThreadExchangeStreamCaptureMode(int* mode) {
    if (*mode < 0 || *mode > 2) return INVALID_VALUE;
    return std::swap(own_mode, *mode), OK;
}

API cuStreamBeginCapture_v2(void* handle, int mode) {
    ENTER;
    Stream* stream;
    TRY(find(handle, stream));
    if (mode < 0 || mode > 2) return INVALID_VALUE;
    if (stream == &current->legacy) return CAPTURE_UNSUPPORTED;
    if (stream->capture) return INVALID_VALUE;
    stream->capture = std::make_shared<Capture>();
    stream->capture->mode = mode, stream->capture->thread = &identity, stream->capture->origin = stream;
    stream->capture->tails[stream];
    captures.insert(stream->capture);
    return OK;
}

API cuStreamIsCapturing(void* handle, int* status) {
    ENTER;
    Stream* stream;
    TRY(find(handle, stream));
    return *status = !stream->capture ? 0 : stream->capture->invalid ? 2 : 1, OK;
}

API cuStreamEndCapture(void* handle, void** graph) {
    ENTER;
    Stream* stream;
    TRY(find(handle, stream));
    *graph = nullptr;
    const auto capture = stream->capture;
    if (!capture) return INVALID_VALUE;
    if (capture->origin != stream) return capture->invalid = true, CAPTURE_UNMATCHED;
    if (capture->mode != 2 && capture->thread != &identity) return CAPTURE_WRONG_THREAD;
    std::set<int> joined;
    std::vector<int> open = capture->tails[stream];
    while (!open.empty()) {
        const int at = open.back();
        open.pop_back();
        if (!joined.insert(at).second) continue;
        const auto& after = (*capture->nodes)[at].after;
        open.insert(open.end(), after.begin(), after.end());
    }
    Result result = capture->invalid ? CAPTURE_INVALIDATED : OK;
    for (auto& [each, tail] : capture->tails) {
        for (int at : tail)
            if (!joined.count(at) && result == OK) result = CAPTURE_UNJOINED;
        each->capture = nullptr;
    }
    captures.erase(capture);
    if (result == OK) graphs.insert(*graph = new Graph{capture->nodes});
    return result;
}

API cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long flags) {
    ENTER;
    if (!graphs.count(graph)) return INVALID_VALUE;
    if (flags & ~1ull) return NOT_SUPPORTED;
    execs.insert(*exec = new Exec{current, ((Graph*)graph)->nodes});
    return OK;
}

// Nodes run in any order that they allow.
API cuGraphLaunch(void* handle, void* where) {
    ENTER;
    Stream* stream;
    TRY(find(where, stream));
    if (!execs.count(handle)) return INVALID_VALUE;
    const auto& exec = *(Exec*)handle;
    if (exec.context != current) return INVALID_CONTEXT;
    if (stream->capture) return stream->capture->invalid = true, NOT_SUPPORTED;
    return submit(*stream, [nodes = exec.nodes] {
        std::vector<int> left(nodes->size());
        std::vector<bool> done(nodes->size());
        for (size_t i = 0; i < left.size(); i++) left[i] = i;
        while (!left.empty()) {
            std::vector<int> ready;
            for (int at : left) {
                const auto& after = (*nodes)[at].after;
                if (std::all_of(after.begin(), after.end(), [&](int each) { return done[each]; })) ready.push_back(at);
                if (ready.size() == 8) break;
            }
            const int at = ready[random_() % ready.size()];
            if ((*nodes)[at].work) {
                const Result result = (*nodes)[at].work();
                if (result != OK) return result;
            }
            done[at] = true, left.erase(std::find(left.begin(), left.end(), at));
        }
        return OK;
    });
}

API cuGraphDestroy(void* graph) {
    LOCK;
    return drop<Graph>(graphs, graph) ? INVALID_VALUE : OK;
}

API cuGraphExecDestroy(void* exec) {
    LOCK;
    return drop<Exec>(execs, exec) ? INVALID_VALUE : OK;
}

// -- for tests ---------------------------------------------------------------------------------------

// Bytes of each GPU, and of RAM that may be pinned from now on. With a `seed`, work is also run sooner than it must.
API standin_set(size_t memory, size_t most_pinned, unsigned seed) {
    LOCK;
    memory_ = memory, pinnable = most_pinned > SIZE_MAX - pinned ? SIZE_MAX : pinned + most_pinned, hasty = seed, random_.seed(seed ? seed : 1);
    return OK;
}

// For work of the host that stands for a kernel: whether the GPUs have all these bytes.
API standin_has(void* at, size_t size) { return !size || within(blocks, at, size) || within(hosts, at, size); }

// It has touched others, or failed.
API standin_fault(int device) { return contexts[device].fault = ILLEGAL_ADDRESS; }

// Pieces of RAM that are registered.
API standin_registered() { return int(hosts.size() - owned.size()); }

// A GPU's fault is forgotten, which a driver never does. Returns it.
API standin_reset(int device) {
    LOCK;
    const Result fault = contexts[device].fault;
    return contexts[device].fault = OK, fault;
}

// NVRTC asks for one, and does without.
API cuGetExportTable(const void** table, const void*) { return *table = nullptr, NOT_FOUND; }

API cuGetProcAddress_v2(const char* name, void** found, int version, uint64_t flags, int* status) {
    // By their names, as the one version that there is.
    static void* const self = [] {
        Dl_info info;
        dladdr((void*)&mutex_, &info);
        return dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }();
    for (const char* suffix : {"_v2", ""})
        if ((*found = dlsym(self, (std::string(name) + suffix).c_str()))) break;
    if (status) *status = *found ? 0 : 1;
    return *found ? OK : NOT_FOUND;
}
