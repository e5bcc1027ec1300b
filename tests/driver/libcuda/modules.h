// Modules, and what starts their kernels.
#pragma once
#include <dlfcn.h>
#include <elf.h>
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#include <climits>

#include "driver.h"

namespace {

const char MARK[] = "emulated kernel:";  // then the library's path

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
    static const auto emulated_fault = (void (*)())dlsym(RTLD_DEFAULT, "emulated_fault");
    static const auto pausing = (void (**)())dlsym(RTLD_DEFAULT, "emulated_pausing");
    *pausing = spin;
    struct sigaction action {};
    action.sa_sigaction = on_fault, action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, &before);
    Result result = ILLEGAL_ADDRESS;
    if (!sigsetjmp(escape, 1)) {
        guarded = 1;
        emulate(function.run, args.data(), grid, threads, random_());
        result = OK;
    } else {
        emulated_fault();
    }
    guarded = 0;
    sigaction(SIGSEGV, &before, nullptr);
    return result;
}

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

}  // namespace

API cuModuleLoadData(void** module, const void* image) {
    UNSAFE;
    if (!image) return INVALID_VALUE;
    auto made = std::make_unique<Module>(Module{current, {}});
    TRY(load((const char*)image, *made));
    modules.insert(*module = made.release());
    return OK;
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
    TRY(submit(*stream, [&called, args, gx, gy, gz, bx] {
        const unsigned grid[3] = {gx, gy, gz};
        return run_kernel(called, args, grid, bx);
    }));
    if (stream->capture && called.name == "wait_host") stream->capture->nodes->back().waits = true;
    return OK;
}

