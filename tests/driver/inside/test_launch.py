"""Kernels through the real bindings: contexts, modules, arguments, and what a driver refuses; and
that the stand-in refuses it, and does its work when somebody waits for it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from localrt.common.errors import LocalrtError
from localrt.quant.cuda import driver as calling
from localrt.quant.cuda import launch as launching
from localrt.quant.cuda import programs
from localrt.quant.cuda.device import emulate
from localrt.quant.cuda.driver import Cuda, Event, device_of
from localrt.quant.cuda.launch import CudaStopwatch, gpu_file, launch
from localrt.quant.cuda.programs import Compiled, Program
from localrt.quant.cuda.steps import _Norm, norm
from localrt.quant.cuda.tensor import FLOAT32, Tensor, empty, upload, zeros
from tests.driver.inside.conftest import Kernels, forget
from tests.driver.standin import Driver, call, image, loaded
from tests.ops.cuda.emulator import Emulator

NORM = Program.of("rms_norm", OUT="float", RECORDS=0)


@pytest.fixture
def compiled(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The programs that NVRTC has compiled; its machine code is what the driver gets."""
    seen: list[str] = []

    def compile_program(program: Program, capability: int) -> Compiled:
        seen.append(program.name)
        made = plain(program, capability)
        return Compiled(image(program, made.code), made.log)

    plain = programs.compile_program
    monkeypatch.setattr(programs, "compile_program", compile_program)
    monkeypatch.setattr(calling, "machine_code", programs.machine_code)
    return seen


def inputs(device: Any) -> tuple[Tensor, Tensor]:
    """Rows and a weight."""
    rows = np.arange(192, dtype=np.float32).reshape(3, 64)
    weight = np.linspace(0, 1, 64, dtype=np.float32)
    return upload(rows, device), upload(weight, device)


def normed(device: str) -> list[float]:
    """What ``NORM`` makes."""
    x, weight = inputs(device_of(device))
    values: list[float] = norm(x, weight, 1e-6, out=FLOAT32).to_host().tolist()
    return values


def arguments(x: Tensor, weight: Tensor, out: Tensor) -> Any:
    """Those of ``NORM``."""
    width = x.shape[1]
    return _Norm(x.address, None, weight.address, out.address, width, width, width, 1e-6)


@pytest.fixture
def expected() -> list[float]:
    """Of ``normed``."""
    before = emulate(Emulator())
    found = normed("cpu")
    emulate(before)
    return found


def test_machine_code_of_nvrtc(compiled: list[str], expected: list[float]) -> None:
    """Compiled once, kept on the disk, and once a module of each GPU."""
    for _ in range(2):
        for device in ("cuda:0", "cuda:1"):
            assert normed(device) == expected
        forget()
    assert sorted(compiled) == ["move_bytes", "rms_norm"]


def test_threads_without_a_context(gpu: Kernels, expected: list[float]) -> None:
    """A thread that has called nothing of CUDA's."""
    device = device_of("cuda:1")
    x, weight = inputs(device)
    out = empty(*x.shape, device=device)

    def start() -> None:
        assert int(cuda.cuCtxGetCurrent()[1]) == 0
        launch(device, NORM, (3, 1, 1), 256, arguments(x, weight, out))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert out.to_host().tolist() == expected


def test_what_a_gpu_refuses_is_one_line(gpu: Kernels) -> None:
    x = zeros(1, 64, device=device_of("cuda"))
    args = arguments(x, x, x)
    for grid, threads in (((1, 0, 1), 256), ((1, 1 << 17, 1), 256), ((1, 1, 1), 2048)):
        with pytest.raises(LocalrtError, match=r"^the GPU refuses a kernel: invalid argument$"):
            launch(x.device, NORM, grid, threads, args)


def test_more_threads_than_it_was_compiled_for(compiled: list[str]) -> None:
    program = Program.of("latent", TREE=0, ROPE=16, LATENT=64, RUN_KEYS=256)
    args = ctypes.create_string_buffer(512)
    with pytest.raises(LocalrtError, match="too many resources requested for launch"):
        launch(device_of("cuda:0"), program, (1, 1, 1), 160, cast(Any, args))


def test_code_for_another_gpu(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    code = programs.compile_program(NORM, 80).code
    monkeypatch.setattr(calling, "machine_code", lambda *_: code)
    with pytest.raises(LocalrtError, match="no kernel image is available"):
        normed("cuda")
    monkeypatch.setattr(calling, "machine_code", lambda *_: b"neither this nor that")
    with pytest.raises(LocalrtError, match="device kernel image is invalid"):
        normed("cuda")


@pytest.mark.parametrize("fault", ["freed", "host", "beyond"])
def test_addresses_that_are_not_the_gpus(gpu: Kernels, driver: Driver, fault: str) -> None:
    """Whoever waits for the kernel hears of it, and whoever comes later."""
    device = device_of("cuda")
    x, plain = zeros(1, 64, device=device), np.ones((1, 64), np.float32)
    args = arguments(x, x, x)
    if fault == "host":
        args.x = plain.ctypes.data
    if fault == "freed":
        assert x.block is not None
        x.block.free()
        device.trim()
    if fault == "beyond":
        args.width = 1 << 24
    launch(device, NORM, (1, 1, 1), 256, args)
    for _ in range(2):
        with pytest.raises(LocalrtError, match="illegal memory access"):
            device.synchronize()
    assert driver.reset(0) == 700


def test_prepare(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept in memory: the disk may have no room."""

    def full(*_: object, **options: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(programs, "write_bytes", full)
    device, gate = device_of("cuda"), Program.of("quantize", IN="float", FINE=0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(device.prepare, [NORM, gate]))
    device.prepare(gate)
    normed("cuda")
    normed("cuda")
    assert sorted(compiled) == ["move_bytes", "quantize", "rms_norm"]


def test_threads_that_come_first(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share what is prepared."""
    begin = Cuda.__init__

    def slowly(device: Cuda, index: int) -> None:
        time.sleep(0.05)
        begin(device, index)

    monkeypatch.setattr(Cuda, "__init__", slowly)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: device_of("cuda:0"), range(4)))
    assert len(set(map(id, found))) == 1


def test_gpu_file(gpu: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = device_of("cuda")
    file = gpu_file(device)
    assert (file.folder, file.name) == (tmp_path / "cache", "Stand-in GPU")
    assert file.key[0] == "driver for CUDA 13.0"
    file.write("rates", {"launch_s": 1.0})
    assert gpu_file(device).read("rates") == {"launch_s": 1.0}
    monkeypatch.setattr(launching, "toolchain", lambda: ("12.8", "other sources"))
    assert gpu_file(device).read("rates") == {}


def test_stopwatch(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run once to compile, then five times, the cache emptied before each; the median counts."""
    times, elapsed, clear = iter([7.0, 6.0, 5.0, 4.0, 3.0]), Event.ms_until, Cuda.clear

    def ms_until(first: Event, last: Event) -> float:
        assert elapsed(first, last) > 0
        return next(times)

    def cleared(device: Cuda, to: int, nbytes: int) -> None:
        gpu.launches.append("clear")
        clear(device, to, nbytes)

    monkeypatch.setattr(Event, "ms_until", ms_until)
    monkeypatch.setattr(Cuda, "clear", cleared)
    device = device_of("cuda")
    x, weight = inputs(device)
    gpu.launches.clear()
    watch = CudaStopwatch(device)
    assert watch.seconds(lambda: norm(x, weight, 1e-6, out=FLOAT32)) == 5e-3
    steps = "".join({"rms_norm": "n", "clear": "c"}[name] for name in gpu.launches)
    assert steps.startswith("n")
    assert steps.endswith(5 * "ccccn")
    assert steps.count("n") == 6


# -- the stand-in ----------------------------------------------------------------------------------

THREAD = cuda.CUstreamCaptureMode(1)


@pytest.fixture
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


def test_work_is_late(late: Driver) -> None:
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


def test_ram_that_is_unpinned_too_soon(late: Driver) -> None:
    rows, where = Rows(), stream()
    rows.send(where)
    call("cuMemFreeHost", rows.host)
    assert status("cuStreamSynchronize", where) == "ILLEGAL_ADDRESS"
    assert status("cuMemAlloc", 1) == "ILLEGAL_ADDRESS"  # for good
    assert late.reset(0) == 700


def test_graphs(late: Driver) -> None:
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


def test_what_a_capture_forbids(late: Driver) -> None:
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
    assert status("cuStreamEndCapture", where) == "STREAM_CAPTURE_UNJOINED"
