// A stand-in for NVIDIA's driver: what localrt and the tests' torch call of libcuda.so.1, without a GPU.
//
// Nothing runs until somebody waits for it (`hasty` runs some of it sooner), so a wait that is missing
// shows; on the last GPU all runs at once, for what the others must give. Handles, contexts, states of capture, addresses and sizes are checked; misuse gets the driver's
// own errors. A module is machine code that NVRTC made, followed by the kernel's twin for the CPU, or the
// twin alone (tests/ops/cuda/emulator.py): a mark and the path of its library. Memory of the GPU is that
// of the host at addresses which are never used twice; whoever touches it once it is freed gets
// CUDA_ERROR_ILLEGAL_ADDRESS, as does a kernel which is given memory that is not the GPU's.
#include <dlfcn.h>

#include "driver.h"
#include "graphs.h"
#include "memory.h"
#include "modules.h"
#include "streams.h"

namespace {

const std::map<int, const char*> ERRORS = {
    {OK, "no error"},
    {INVALID_VALUE, "invalid argument"},
    {OUT_OF_MEMORY, "out of memory"},
    {INVALID_IMAGE, "device kernel image is invalid"},
    {INVALID_CONTEXT, "invalid device context"},
    {NO_BINARY, "no kernel image is available for execution on the device"},
    {INVALID_HANDLE, "invalid resource handle"},
    {NOT_FOUND, "named symbol not found"},
    {ILLEGAL_ADDRESS, "an illegal memory access was encountered"},
    {CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing"},
    {OUT_OF_RESOURCES, "too many resources requested for launch"},
};

}  // namespace

// -- devices and contexts ----------------------------------------------------------------------------

API cuInit(unsigned flags) {
    LOCK;
    if (flags) return INVALID_VALUE;
    begun = true;
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
    return *context = &contexts[device], OK;
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

API cuGetErrorString(int error, const char** text) {
    const auto found = ERRORS.find(error);
    return *text = found == ERRORS.end() ? nullptr : found->second, found == ERRORS.end() ? INVALID_VALUE : OK;
}

// -- for tests ---------------------------------------------------------------------------------------

// Bytes of each GPU, and of RAM that may be pinned from now on. With a `seed`, work is also run sooner than it must.
API standin_set(size_t memory, size_t most_pinned, unsigned seed) {
    LOCK;
    memory_ = memory, pinnable = most_pinned > SIZE_MAX - pinned ? SIZE_MAX : pinned + most_pinned, hasty = seed, random_.seed(seed ? seed : 1);
    return OK;
}

// The GPUs are empty again: what another test has left in them, and frees late, does not count.
API standin_begin() {
    LOCK;
    for (Context& context : contexts) context.used = 0;
    return ++run_, OK;
}

// Whether the GPUs, or pinned RAM, have all these bytes.
API standin_has(void* at, size_t size) { return !size || within(blocks, at, size) || within(hosts, at, size); }

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
