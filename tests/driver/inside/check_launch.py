"""Kernels through the real bindings: contexts, modules, arguments, and what a driver refuses."""

from __future__ import annotations

import ctypes
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from cuda.bindings import driver as cuda

from localrt.common.errors import LocalrtError
from localrt.quant.cuda import launch as launching
from localrt.quant.cuda import programs
from localrt.quant.cuda.launch import CudaStopwatch, emulate, launch, prepare
from localrt.quant.cuda.programs import Compiled, Program
from localrt.quant.cuda.steps import _Norm, norm
from tests.driver import torch_cuda
from tests.driver.standin import Driver, image
from tests.driver.torch_cuda import Kernels
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
    monkeypatch.setattr(launching, "machine_code", programs.machine_code)
    return seen


def normed(device: str) -> torch.Tensor:
    """What ``NORM`` makes."""
    x, weight = torch.arange(192.0).view(3, 64).to(device), torch.linspace(0, 1, 64).to(device)
    with torch.cuda.device(device) if device != "cpu" else nullcontext():
        return norm(x, weight, 1e-6, out=torch.float32).cpu()


def arguments(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> Any:
    """Those of ``NORM``."""
    width = x.shape[1]
    return _Norm(x.data_ptr(), None, weight.data_ptr(), out.data_ptr(), width, width, width, 1e-6)


@pytest.fixture
def expected() -> torch.Tensor:
    """Of ``normed``."""
    before = emulate(Emulator())
    found = normed("cpu")
    emulate(before)
    return found


def test_machine_code_of_nvrtc(compiled: list[str], expected: torch.Tensor) -> None:
    """Compiled once, kept on the disk, and once a module of each GPU."""
    for _ in range(2):
        for device in ("cuda:0", "cuda:1"):
            assert torch.equal(normed(device), expected)
        launching._gpu.cache_clear()
    assert compiled == ["rms_norm"]


def test_threads_without_a_context(gpu: Kernels, expected: torch.Tensor) -> None:
    """A thread that has called nothing of torch's."""
    device = torch.device("cuda", 1)
    x, weight = torch.arange(192.0).view(3, 64).to(device), torch.linspace(0, 1, 64).to(device)
    out = torch.empty_like(x)

    def start() -> None:
        assert int(cuda.cuCtxGetCurrent()[1]) == 0
        launch(device, NORM, (3, 1, 1), 256, arguments(x, weight, out))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert torch.equal(out.cpu(), expected)


def test_what_a_gpu_refuses_is_one_line(gpu: Kernels) -> None:
    x = torch.ones(1, 64, device="cuda")
    args = arguments(x, x, x)
    for grid, threads in (((1, 0, 1), 256), ((1, 1 << 17, 1), 256), ((1, 1, 1), 2048)):
        with pytest.raises(LocalrtError, match=r"^the GPU refuses a kernel: invalid argument$"):
            launch(x.device, NORM, grid, threads, args)


def test_more_threads_than_it_was_compiled_for(compiled: list[str]) -> None:
    program = Program.of("latent", ROPE=16, LATENT=64, RUN_KEYS=256)
    args = ctypes.create_string_buffer(512)
    with pytest.raises(LocalrtError, match="too many resources requested for launch"):
        launch(torch.device("cuda", 0), program, (1, 1, 1), 160, cast(Any, args))


def test_code_for_another_gpu(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    code = programs.compile_program(NORM, 80).code
    monkeypatch.setattr(launching, "machine_code", lambda *_: code)
    with pytest.raises(LocalrtError, match="no kernel image is available"):
        normed("cuda")
    monkeypatch.setattr(launching, "machine_code", lambda *_: b"neither this nor that")
    with pytest.raises(LocalrtError, match="device kernel image is invalid"):
        normed("cuda")


@pytest.mark.parametrize("fault", ["freed", "host", "beyond"])
def test_addresses_that_are_not_the_gpus(gpu: Kernels, driver: Driver, fault: str) -> None:
    """Whoever waits for the kernel hears of it, and whoever comes later."""
    x = torch.ones(1, 64, device="cuda")
    plain = torch.ones(1, 64)
    args = arguments(plain if fault == "host" else x, x, x)
    if fault == "freed":
        x.untyped_storage().resize_(0)
        torch.cuda.empty_cache()
    if fault == "beyond":
        args.width = 1 << 20
    launch(torch.device("cuda", 0), NORM, (1, 1, 1), 256, args)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ILLEGAL_ADDRESS"):
            torch.cuda.synchronize()
    assert driver.reset(0) == 700


def test_prepare(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept in memory: the disk may have no room."""

    def full(*_: object, **options: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(programs, "write_bytes", full)
    device, gate = torch.device("cuda", 0), Program.of("quantize", IN="float", FINE=0)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda program: prepare(device, program), [NORM, gate]))
    prepare(device, gate)
    normed("cuda")
    normed("cuda")
    assert sorted(compiled) == ["quantize", "rms_norm"]


def test_threads_that_come_first(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """They share what is prepared."""
    capability = torch.cuda.get_device_capability

    def slowly(index: int) -> tuple[int, int]:
        time.sleep(0.05)
        return capability(index)

    monkeypatch.setattr(torch.cuda, "get_device_capability", slowly)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: launching._launcher(torch.device("cuda", 0)), range(4)))
    assert len(set(map(id, found))) == 1


def test_gpu_file(gpu: Kernels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    file = launching.gpu_file(device)
    assert (file.folder, file.name) == (tmp_path / "cache", "Stand-in GPU")
    assert file.key[0] == "driver for CUDA 13.0"
    file.write("rates", {"launch_s": 1.0})
    assert launching.gpu_file(device).read("rates") == {"launch_s": 1.0}
    monkeypatch.setattr(launching, "toolchain", lambda: ("12.8", "other sources"))
    assert launching.gpu_file(device).read("rates") == {}


def test_stopwatch(gpu: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run once to compile, then five times, the cache emptied before each; the median counts."""
    times = iter([7.0, 6.0, 5.0, 4.0, 3.0])
    elapsed = torch_cuda.Event.elapsed_time

    def elapsed_time(first: torch_cuda.Event, last: torch_cuda.Event) -> float:
        assert elapsed(first, last) > 0
        return next(times)

    monkeypatch.setattr(torch_cuda.Event, "elapsed_time", elapsed_time)
    monkeypatch.setattr(launching, "_WAKING_S", 1e-3)
    monkeypatch.setattr(launching, "_LEAST_CACHE", 1 << 10)
    x = torch.zeros(8, device="cuda")
    gpu.launches.clear()
    watch = CudaStopwatch(torch.device("cuda", 0))
    assert watch.seconds(lambda: x.add_(1)) == 5e-3
    steps = "".join({"aten::add_": "a", "aten::zero_": "z"}[name] for name in gpu.launches)
    assert steps.startswith("a")
    assert steps.endswith(5 * "zzzza")
    assert x.tolist() == [6.0] * 8
