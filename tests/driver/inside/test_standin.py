"""The driver itself: what it refuses, and that work is done when somebody waits for it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from tests.driver.standin import Driver, call, loaded

GLOBAL, THREAD, RELAXED = (cuda.CUstreamCaptureMode(mode) for mode in range(3))


@pytest.fixture(autouse=True)
def late() -> Iterator[Driver]:
    """A GPU's context, on a driver that is never early."""
    driver = loaded()
    driver.begin()
    driver.set()
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", 0))
    yield driver
    driver.set()
    assert driver.reset(0) == 0
    call("cuCtxSetCurrent", 0)


def status(name: str, *args: Any) -> str:
    """What the driver says to a call."""
    return str(getattr(cuda, name)(*args)[0].name.removeprefix("CUDA_").removeprefix("ERROR_"))


def stream() -> int:
    return int(call("cuStreamCreate", 1))


def event() -> int:
    return int(call("cuEventCreate", 2))


class Rows:
    """Bytes in pinned RAM, and as many on the GPU."""

    def __init__(self, nbytes: int = 4096) -> None:
        self.nbytes = nbytes
        self.host = int(call("cuMemHostAlloc", nbytes, 0))
        self.there = int(call("cuMemAlloc", nbytes))
        self.values = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(self.host))

    def send(self, where: int) -> None:
        call("cuMemcpyHtoDAsync", self.there, self.host, self.nbytes, where)

    def read(self) -> int:
        """What the GPU's first byte is now."""
        return ctypes.c_uint8.from_address(self.there).value


def test_memory(late: Driver) -> None:
    late.set(memory=10_000, pinned=10_000)
    rows, where = Rows(), stream()
    assert call("cuMemGetInfo") == [10_000 - 4096, 10_000]
    assert status("cuMemAlloc", 6000) == status("cuMemHostAlloc", 6000, 0) == "OUT_OF_MEMORY"
    copy = "cuMemcpyHtoDAsync"
    assert status(copy, rows.there, rows.host, 4097, where) == "INVALID_VALUE"
    assert status(copy, rows.there + 1, rows.host, 4096, where) == "INVALID_VALUE"
    assert status(copy, rows.host, rows.host, 16, where) == "INVALID_VALUE"
    assert status(copy, rows.there, rows.there, 16, where) == "INVALID_VALUE"
    assert status("cuMemFree", rows.there + 256) == "INVALID_VALUE"
    assert status("cuMemFree", rows.there) == "SUCCESS"
    assert status("cuMemFree", rows.there) == "INVALID_VALUE"
    assert status(copy, rows.there, rows.host, 16, where) == "INVALID_VALUE"


def test_work_is_late() -> None:
    rows, where, other, copied = Rows(), stream(), stream(), event()
    rows.values[:] = 1
    rows.send(where)
    call("cuEventRecord", copied, where)
    rows.values[:] = 2  # too soon
    assert rows.read() == 0xA7
    assert status("cuEventQuery", copied) == "ERROR_NOT_READY".removeprefix("ERROR_")
    assert rows.read() == 2
    call("cuMemsetD8Async", rows.there, 3, 16, other)
    call("cuStreamSynchronize", where)
    assert rows.read() == 2
    call("cuEventRecord", copied, other)
    call("cuStreamWaitEvent", where, copied, 0)
    call("cuMemsetD8Async", rows.there + 16, 4, 16, where)
    call("cuStreamSynchronize", where)
    assert rows.read() == 3


def test_copies_from_plain_ram() -> None:
    """Copied aside at once; to it, the host waits."""
    data, out = np.ones(16, np.uint8), np.zeros(16, np.uint8)
    there = call("cuMemAlloc", 16)
    call("cuMemcpyHtoDAsync", there, data.ctypes.data, 16, 0)
    data[:] = 2
    call("cuMemcpyDtoHAsync", out.ctypes.data, there, 16, 0)
    assert set(out) == {1}


def test_ram_that_is_unpinned_too_soon(late: Driver) -> None:
    rows, where = Rows(), stream()
    rows.send(where)
    call("cuMemFreeHost", rows.host)
    assert status("cuStreamSynchronize", where) == "ILLEGAL_ADDRESS"
    assert status("cuMemAlloc", 1) == "ILLEGAL_ADDRESS"  # for good
    assert late.reset(0) == 700


def test_handles() -> None:
    where = stream()
    assert status("cuStreamDestroy", where) == "SUCCESS"
    assert status("cuStreamSynchronize", where) == "INVALID_HANDLE"
    assert status("cuEventRecord", where, 0) == "INVALID_HANDLE"
    assert status("cuLaunchKernel", 7, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0) == "INVALID_HANDLE"
    assert status("cuModuleLoadData", b"nothing") == "INVALID_IMAGE"
    where = stream()
    call("cuCtxSetCurrent", call("cuDevicePrimaryCtxRetain", 1))
    assert status("cuStreamSynchronize", where) == "INVALID_CONTEXT"


def test_graphs() -> None:
    rows, where, other = Rows(), stream(), stream()
    fork, join = event(), event()
    rows.values[:] = 1
    call("cuStreamBeginCapture", where, THREAD)
    rows.send(where)
    call("cuEventRecord", fork, where)
    call("cuStreamWaitEvent", other, fork, 0)
    call("cuMemsetD8Async", rows.there + 16, 5, 16, other)
    call("cuEventRecord", join, other)
    call("cuStreamWaitEvent", where, join, 0)
    call("cuMemsetD8Async", rows.there + 17, 6, 1, where)
    graph = call("cuStreamEndCapture", where)
    call("cuStreamSynchronize", where)
    assert rows.read() == 0xA7  # recorded, not run
    graph_exec = call("cuGraphInstantiate", graph, 0)
    assert status("cuGraphDestroy", graph) == "SUCCESS"
    assert status("cuGraphDestroy", graph) == "INVALID_VALUE"
    for value in (1, 2):
        rows.values[:] = value
        call("cuGraphLaunch", graph_exec, where)
        call("cuStreamSynchronize", where)
        seen = np.ctypeslib.as_array((ctypes.c_uint8 * 32).from_address(rows.there))
        assert list(seen) == [value] * 16 + [5, 6] + [5] * 14


def test_what_a_capture_forbids() -> None:
    rows, where, other, mark = Rows(), stream(), stream(), event()
    data = np.zeros(16, np.uint8)
    call("cuEventRecord", mark, other)
    refused = {
        "STREAM_CAPTURE_UNSUPPORTED": [
            ("cuStreamSynchronize", where),
            ("cuStreamSynchronize", other),
            ("cuEventQuery", mark),
            ("cuMemAlloc", 16),
            ("cuMemFree", rows.there),
            ("cuMemHostRegister", data.ctypes.data, 16, 0),
            ("cuModuleLoadData", b"x"),
            ("cuMemcpyHtoDAsync", rows.there, data.ctypes.data, 16, where),
        ],
        "STREAM_CAPTURE_ISOLATION": [("cuStreamWaitEvent", where, mark, 0)],
    }
    for wanted, calls in refused.items():
        for name, *args in calls:
            call("cuStreamBeginCapture", where, THREAD)
            assert status(name, *args) == wanted, name
            assert status("cuStreamEndCapture", where) == "STREAM_CAPTURE_INVALIDATED", name
    assert status("cuStreamBeginCapture", 0, THREAD) == "STREAM_CAPTURE_UNSUPPORTED"
    call("cuStreamBeginCapture", where, THREAD)
    call("cuEventRecord", mark, where)
    assert status("cuEventSynchronize", mark) == "STREAM_CAPTURE_UNSUPPORTED"
    assert status("cuStreamEndCapture", where) == "STREAM_CAPTURE_INVALIDATED"
    assert status("cuEventSynchronize", mark) == "CAPTURED_EVENT"
    # Another stream that has joined, and not come back.
    call("cuStreamBeginCapture", where, THREAD)
    call("cuEventRecord", mark, where)
    call("cuStreamWaitEvent", other, mark, 0)
    call("cuMemsetD8Async", rows.there, 1, 16, other)
    assert status("cuStreamEndCapture", other) == "STREAM_CAPTURE_UNMATCHED"
    assert status("cuStreamEndCapture", where) == "STREAM_CAPTURE_INVALIDATED"
    call("cuStreamBeginCapture", where, THREAD)
    call("cuEventRecord", mark, where)
    call("cuStreamWaitEvent", other, mark, 0)
    call("cuMemsetD8Async", rows.there, 1, 16, other)
    assert status("cuStreamEndCapture", where) == "STREAM_CAPTURE_UNJOINED"


@pytest.mark.parametrize("mode", [GLOBAL, THREAD, RELAXED])
def test_what_other_threads_may_do(mode: Any) -> None:
    where, seen = stream(), list[str]()
    context = call("cuCtxGetCurrent")

    def allocate() -> None:
        call("cuCtxSetCurrent", context)
        seen.append(status("cuMemAlloc", 16))

    call("cuStreamBeginCapture", where, mode)
    thread = threading.Thread(target=allocate)
    thread.start()
    thread.join()
    forbidden = mode == GLOBAL
    assert seen == ["STREAM_CAPTURE_UNSUPPORTED" if forbidden else "SUCCESS"]
    before = call("cuThreadExchangeStreamCaptureMode", RELAXED)
    assert status("cuMemAlloc", 16) == "SUCCESS"
    call("cuThreadExchangeStreamCaptureMode", before)
    ended = status("cuStreamEndCapture", where)
    assert ended == ("STREAM_CAPTURE_INVALIDATED" if forbidden else "SUCCESS")
