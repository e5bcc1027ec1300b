// Streams and events.
#pragma once
#include "driver.h"

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
