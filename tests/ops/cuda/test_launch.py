"""How kernels are started on a GPU: the driver's calls, here of a stand-in."""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from localrt.common.errors import LocalrtError
from localrt.quant.cuda import launch as launching
from localrt.quant.cuda.programs import Program

bindings = pytest.importorskip("cuda.bindings")


class Driver:
    """Notes what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuses = False
        self._contexts = threading.local()
        self.names = SimpleNamespace(
            cuCtxGetCurrent=self.current,
            cuDevicePrimaryCtxRetain=self.primary,
            cuCtxSetCurrent=self.enter,
            cuModuleLoadData=self.module,
            cuModuleGetFunction=self.function,
            cuLaunchKernel=self.launch,
            cuGetErrorString=self.meaning,
        )

    def current(self) -> tuple[int, int]:
        return 0, getattr(self._contexts, "current", 0)

    def primary(self, device: int) -> tuple[int, int]:
        return 0, 100 + device

    def enter(self, context: int) -> tuple[int]:
        self._contexts.current = context
        return (0,)

    def module(self, code: bytes) -> tuple[int, bytes]:
        return 0, code

    def function(self, module: bytes, name: bytes) -> tuple[int, str]:
        self.calls.append(f"load {name.decode()} of {module.decode()}")
        return 0, name.decode()

    def launch(self, function: str, *args: Any) -> tuple[int]:
        (pointer,) = (ctypes.c_void_p * 1).from_address(args[8])
        value = ctypes.c_int.from_address(pointer).value
        where = getattr(self._contexts, "current", 0)
        self.calls.append(f"{function} {args[:8]} of {value} in context {where}")
        return (int(self.refuses),)

    def meaning(self, status: int) -> tuple[int, bytes]:
        return 0, b"too much asked"


class Argument(ctypes.Structure):
    _fields_ = (("value", ctypes.c_int),)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Driver:
    stand_in = Driver()
    stream = type("Stream", (), {"cuda_stream": 7})
    monkeypatch.setattr(bindings, "driver", stand_in.names, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: stream)
    monkeypatch.setattr(launching, "machine_code", lambda program, capability, folder: b"code")
    launching._gpu.cache_clear()
    return stand_in


def start(value: int) -> None:
    device = torch.device("cuda", 2)
    launching.launch(device, Program.of("norm"), (3, 2, 1), 256, Argument(value))


def test_contexts(driver: Driver) -> None:
    start(41)
    other = threading.Thread(target=start, args=(42,))  # that has called nothing of torch's
    other.start()
    other.join()
    how = "norm (3, 2, 1, 256, 1, 1, 0, 7)"
    launches = [f"{how} of {value} in context 102" for value in (41, 42)]
    assert driver.calls == ["load norm of code", *launches]


def test_what_a_gpu_refuses_is_one_line(driver: Driver) -> None:
    driver.refuses = True
    with pytest.raises(LocalrtError, match=r"^the GPU refuses a kernel: too much asked$"):
        start(1)


def test_a_program_is_made_once() -> None:
    """Each launch asks for one; values may be equal where their macros are not."""
    made = Program.of("rms_norm", OUT="float", RECORDS=0)
    assert Program.of("rms_norm", OUT="float", RECORDS=0) is made
    assert Program.of("rms_norm", OUT="float", RECORDS=False) != made


def test_gpu_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 4060")
    versions = SimpleNamespace(cuDriverGetVersion=lambda: (0, 12080))
    monkeypatch.setattr(bindings, "driver", versions, raising=False)
    device = torch.device("cuda", 0)
    file = launching.gpu_file(device)
    assert (file.folder, file.name) == (tmp_path, "RTX 4060")
    assert file.key[0] == "driver for CUDA 12.8"
    file.write("rates", {"launch_s": 1.0})
    assert launching.gpu_file(device).read("rates") == {"launch_s": 1.0}
    versions.cuDriverGetVersion = lambda: (0, 13000)
    assert launching.gpu_file(device).read("rates") == {}
    monkeypatch.setattr(launching, "toolchain", lambda: ("12.8", "other sources"))
    versions.cuDriverGetVersion = lambda: (0, 12080)
    assert launching.gpu_file(device).read("rates") == {}


def test_prepare(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept in memory: the disk may have no room."""
    compiled: list[str] = []

    def compile_(program: Program, capability: int, folder: Path) -> bytes:
        compiled.append(program.name)
        return b"code"

    monkeypatch.setattr(launching, "machine_code", compile_)
    device, programs = torch.device("cuda", 2), [Program.of("norm"), Program.of("gate")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda program: launching.prepare(device, program), programs))
    launching.prepare(device, programs[1])
    start(1)
    start(2)
    assert sorted(compiled) == ["gate", "norm"]
    assert driver.calls[0] == "load norm of code"


def test_stopwatch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls of CUDA, here of a stand-in: what is launched takes from 7 to 3 milliseconds."""
    done: list[str] = []
    marks = iter([0.0, 7.0, 0.0, 6.0, 0.0, 5.0, 0.0, 4.0, 0.0, 3.0])

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = next(marks)

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, end: Any) -> float:
            return float(end.at - self.at)

    stream = SimpleNamespace(synchronize=lambda: done.append("awake"))
    properties = SimpleNamespace(L2_cache_size=24 << 20)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(launching, "_WAKING_S", 1e-3)
    monkeypatch.setattr(
        torch.Tensor, "zero_", lambda self: done.append(f"write {self.nbytes >> 20} MB")
    )
    watch = launching.CudaStopwatch(torch.device("cpu"))
    assert watch.seconds(lambda: done.append("launch")) == 5e-3
    assert done[:3] == ["launch", "write 48 MB", "awake"]
    assert done[-6:] == ["write 48 MB"] * 4 + ["launch", "wait"]
    assert done.count("launch") == 6
