// Memory of the GPUs and pinned RAM, and copies between them.
#pragma once
#include <sys/mman.h>

#include "driver.h"

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
    blocks[begin] = {size, current, run_};
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
    if (found->second.run == run_) current->used -= found->second.size;
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
