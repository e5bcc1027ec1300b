// What streams record instead of running it, and its replays.
#pragma once
#include "driver.h"

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
    if (current->used + EXECUTABLE > memory_) return OUT_OF_MEMORY;
    current->used += EXECUTABLE;
    execs.insert(*exec = new Exec{current, run_, ((Graph*)graph)->nodes});
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
    const bool waits = std::any_of(exec.nodes->begin(), exec.nodes->end(), [](const Node& each) { return each.waits; });
    TRY(submit(*stream, [nodes = exec.nodes] {
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
    }));
    if (waits && !stream->last->done) {
        stream->last->waits = true;
        std::thread([op = stream->last] {
            LOCK;
            runs_waiting = true;
            finish(op);
        }).detach();
    }
    return OK;
}

API cuGraphDestroy(void* graph) {
    LOCK;
    return drop<Graph>(graphs, graph) ? INVALID_VALUE : OK;
}

API cuGraphExecDestroy(void* exec) {
    LOCK;
    TRY(unsafe());
    if (!execs.count(exec)) return INVALID_VALUE;
    if (((Exec*)exec)->run == run_) ((Exec*)exec)->context->used -= EXECUTABLE;
    return drop<Exec>(execs, exec);
}
