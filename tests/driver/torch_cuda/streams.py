"""torch's devices, streams and events."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from cuda.bindings import driver as cuda

_NOT_READY = 600
MODES = {
    "global": cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL,
    "thread_local": cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    "relaxed": cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED,
}


def call(name: str, *args: Any, may: Sequence[int] = ()) -> Any:
    """Call the driver; returns the results, or the status if that is one of ``may``.

    Raises:
        RuntimeError: it refuses.
    """
    status, *values = getattr(cuda, name)(*args)
    if int(status) in may:
        return status
    if int(status) != 0:
        raise RuntimeError(f"CUDA error: {status.name} by {name}")
    return values[0] if len(values) == 1 else (values or None)


class _Thread(threading.local):
    """What torch keeps for each thread."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, Stream] = {}


_thread = _Thread()
_primary: dict[int, Any] = {}


def index_of(device: Any = None) -> int:
    """A GPU's number: the current one's if ``device`` does not say."""
    index = device if device is None or isinstance(device, int) else torch.device(device).index
    return _thread.device if index is None else index


@contextmanager
def using(index: int) -> Iterator[None]:
    """The driver is called in a GPU's context, which stays if the thread had none."""
    if index not in _primary:
        _primary[index] = call("cuDevicePrimaryCtxRetain", index)
    before, own = int(call("cuCtxGetCurrent")), int(_primary[index])
    if before != own:
        call("cuCtxSetCurrent", own)
    try:
        yield
    finally:
        if before not in (0, own):
            call("cuCtxSetCurrent", before)


@contextmanager
def device(which: Any) -> Iterator[None]:
    """See ``torch.cuda.device``."""
    before, _thread.device = _thread.device, index_of(which)
    try:
        with using(_thread.device):
            yield
    finally:
        _thread.device = before


@contextmanager
def relaxed() -> Iterator[None]:
    """This thread may call what could disturb a capture."""
    before = call("cuThreadExchangeStreamCaptureMode", MODES["relaxed"])
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


class Stream:
    """See ``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, *, default: bool = False) -> None:
        self.index, self.cuda_stream = index_of(device), 0
        if not default:
            with using(self.index):
                self.cuda_stream = int(call("cuStreamCreate", 1))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.index, self.cuda_stream))

    def synchronize(self) -> None:
        with using(self.index):
            call("cuStreamSynchronize", self.cuda_stream)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        event.wait(self)


class Event:
    """See ``torch.cuda.Event``: the driver's is made when it is first recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self._flags = (1 if blocking else 0) | (0 if enable_timing else 2)
        self._index, self._handle = 0, 0

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        with using(stream.index):
            if not self._handle:
                self._index, self._handle = stream.index, int(call("cuEventCreate", self._flags))
                weakref.finalize(self, cuda.cuEventDestroy, self._handle)
            call("cuEventRecord", self._handle, stream.cuda_stream)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or current_stream()
        if self._handle:
            with using(stream.index):
                call("cuStreamWaitEvent", stream.cuda_stream, self._handle, 0)

    def synchronize(self) -> None:
        if self._handle:
            with using(self._index):
                call("cuEventSynchronize", self._handle)

    def query(self) -> bool:
        if not self._handle:
            return True
        with using(self._index):
            return call("cuEventQuery", self._handle, may=(_NOT_READY,)) is None

    def elapsed_time(self, last: Event) -> float:
        with using(self._index):
            return float(call("cuEventElapsedTime", self._handle, last._handle))


def current_stream(device: Any = None) -> Stream:
    """See ``torch.cuda.current_stream``."""
    index = index_of(device)
    if index not in _thread.streams:
        _thread.streams[index] = Stream(index, default=True)
    return _thread.streams[index]


@contextmanager
def stream(which: Stream) -> Iterator[None]:
    """See ``torch.cuda.stream``."""
    before = current_stream(which.index)
    with device(which.index):
        _thread.streams[which.index] = which
        try:
            yield
        finally:
            _thread.streams[which.index] = before
