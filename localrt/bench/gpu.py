"""How ``localrt bench`` uses a GPU while a model decodes: energy, use, memory, busy shares.

No card has run this yet.

NVIDIA's management library (NVML, through ctypes) gives energy, use, and memory of the GPUs and the
peak memory of a process; what it does not report is missing or None. The pipeline's events measure
the busy shares; a model that is all on the GPU has none.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import psutil

from localrt import system
from localrt.bench.workload import BenchOptions, Outcome, Result
from localrt.common.closing import Closing
from localrt.common.errors import OptionError
from localrt.common.formatting import format_bytes, format_rate
from localrt.common.settings import Settings
from localrt.engine.types import Metrics
from localrt.offload import hardware
from localrt.offload.memory import ram_budget
from localrt.planning.forecast import PlanRequest
from localrt.planning.machine import DEFAULT_GPU, GPUS, GpuModel
from localrt.planning.measure import Hardware, budgets_of, machine_here, with_gpu
from localrt.planning.models import shape_of
from localrt.planning.plan import explain
from localrt.planning.search import helpful_changes, make_forecast
from localrt.quant.ops.kv_formats import parse_kv_format

if TYPE_CHECKING:
    from localrt.api import Model
    from localrt.planning.forecast import Change

_UNKNOWN = (1 << 64) - 1  # NVML_VALUE_NOT_AVAILABLE: Windows' driver does not say
_EVERY_S = 0.05


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_ulonglong) for name in ("total", "free", "used"))


class _Process(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("used", ctypes.c_ulonglong), ("parts", 2 * ctypes.c_uint))


_MOST_PROCESSES = 256
_Processes = _MOST_PROCESSES * _Process


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library; None if it is not installed."""
    try:
        found = ctypes.CDLL(system.NVML)
        known = hasattr(found, "nvmlDeviceGetTotalEnergyConsumption")
        return found if known and found.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _ask(name: str, kind: Any, *more: Any) -> Iterator[tuple[int, Any]]:
    """Yield each GPU's number and its value of a function ``nvmlDeviceGet...``, if it has one."""
    nvml, count = library(), ctypes.c_uint()
    ask = getattr(nvml, f"nvmlDeviceGet{name}", None)
    if nvml is None or ask is None:
        return
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device, value = ctypes.c_void_p(), kind()
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device))
        if not ask(device, *more, ctypes.byref(value)):
            yield index, value


def joules() -> dict[int, float]:
    """Return the energy counters of the GPUs, by number."""
    found = _ask("TotalEnergyConsumption", ctypes.c_ulonglong)
    return {index: millijoules.value / 1e3 for index, millijoules in found}


def use() -> dict[str, float | None] | None:
    """Return the busiest GPU's utilization and the memory in use on all GPUs, if any."""
    if library() is None:
        return None
    busy = [rates.gpu / 100 for _, rates in _ask("UtilizationRates", _Utilization)]
    return {"busy": max(busy, default=None), "bytes": used_nbytes()}


def used_nbytes() -> int | None:
    """Return the bytes that all programs take of all GPUs; None if that is not known."""
    used = [memory.used for _, memory in _ask("MemoryInfo", _Memory)]
    return sum(used) if used else None


def process_nbytes(pid: int) -> int:
    """Return the GPU memory of a process; 0 if the driver does not list it, as in a container."""
    count, total = ctypes.c_uint(_MOST_PROCESSES), 0
    for _, listed in _ask("ComputeRunningProcesses_v3", _Processes, ctypes.byref(count)):
        own = (each for each in listed[: count.value] if each.pid == pid)
        total += sum(each.used for each in own if each.used != _UNKNOWN)
        count.value = _MOST_PROCESSES
    return total


class Peaks(Closing):
    """Watches the memory of a process until it is closed: ``ram`` is the most that was resident."""

    def __init__(self, pid: int) -> None:
        self.ram: int | None = None
        self._pid, self._own, self._more, self._before = pid, 0, 0, used_nbytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="localrt-peaks", daemon=True)
        self._thread.start()

    @property
    def vram(self) -> int | None:
        """The peak of its GPU memory so far; None if not measured. If the driver does not list the
        process, what all programs took more than at the beginning.
        """
        return self._own or self._more or None

    def close(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with suppress(psutil.Error):
                self.ram = max(self.ram or 0, int(psutil.Process(self._pid).memory_info().rss))
            if self._before is not None:
                self._more = max(self._more, (used_nbytes() or 0) - self._before)
                self._own = max(self._own, process_nbytes(self._pid))
            if self._over.wait(_EVERY_S):
                return


_TOKENS = 16
_NAMES = {"gpu": "GPU", "link": "link to the GPU", "cpu": "CPU", "ssd": "disk"}
_BUSY = 0.6  # a resource with a smaller busy share is not a bottleneck


@dataclass(frozen=True, slots=True)
class GpuShares:
    """``busy`` maps a resource to its busy share; ``helps`` says what would help."""

    busy: Mapping[str, float]
    helps: str


def use_line(use: Mapping[str, Any]) -> str:
    """Format the fields of a ``GpuShares`` as one line for people."""
    busy = use["busy"]
    shares = ", ".join(f"{_NAMES[name]} {busy[name]:.0%}" for name in _NAMES if name in busy)
    return f"busy while decoding: {shares or 'not measured'}. {use['helps']}"


def gpu_use(model: Model, prompt: Sequence[int]) -> GpuShares:
    """Decode tokens after ``prompt`` and measure GPU use, after CUDA graphs have been recorded."""
    room = max(1, model.info.ctx - 2 * _TOKENS)
    stream = model.stream(
        token_ids=prompt[:room], max_tokens=2 * _TOKENS, ignore_eos=True, temperature=0
    )
    for _ in islice(stream, _TOKENS):
        pass
    before = model.status(lanes=True)  # meanwhile the pipeline times every pass
    for _ in stream:
        pass
    busy = dict(model.status(lanes=False).since(before).busy)
    return GpuShares(busy, what_helps(busy, model.advise().changes))


def what_helps(busy: Mapping[str, float], changes: Sequence[Change]) -> str:
    """Describe the busiest resource, and which of the planned ``changes`` helps most."""
    text = ""
    if busy:
        name = max(busy, key=lambda each: busy[each])
        share = f"the {_NAMES.get(name, name)}, {busy[name]:.0%}"
        text = f"Busiest is {share}"
        if busy[name] < _BUSY:
            text = f"No part is busy all the time (at most {share}): they wait for one another"
        text += ". "
    if not changes:
        return f"{text}No change that was planned helps by more than 5 %."
    best = changes[0]
    return (
        f"{text}Best change: {best.what}, about {format_rate(best.tok_s)} tok/s"
        f" ({best.gain:.1f} times)."
    )


def wants_forecast(options: BenchOptions) -> bool:
    """Whether the options give GPU memory but name no GPU, and this machine has none."""
    any_gpu = options.gpu_memory is not None and options.device in (None, "auto")
    return any_gpu and not hardware.gpus()


def gpu_for(gpu_memory: int) -> GpuModel:
    """Return the smallest known GPU with that much memory, preferring the default GPU.

    Raises:
        OptionError: no known GPU has that much.
    """
    large = [gpu for gpu in GPUS.values() if gpu.vram_bytes >= gpu_memory]
    if not large:
        most = max(gpu.vram_bytes for gpu in GPUS.values())
        raise OptionError(
            f"there is no GPU here, and no known one has {format_bytes(gpu_memory)}: give at most"
            f" {format_bytes(most)}"
        )
    return min(large, key=lambda gpu: (gpu.vram_bytes, gpu.name != DEFAULT_GPU))


def forecast(options: BenchOptions, settings: Settings) -> Outcome:
    """Plan the model for the GPU chosen by ``options.gpu_memory``, and predict the workload.

    Raises:
        MemoryBudgetError: it does not fit on GPU, RAM and disk.
        LocalrtError: the model cannot be read, or no known GPU has that much memory.
    """
    assert options.gpu_memory is not None
    work, gpu = options.workload, gpu_for(options.gpu_memory)
    shape = shape_of(options.path)
    formats = {unit.format for unit in shape.units}
    machine, _ = machine_here(settings, options.path, formats)
    machine, vram = with_gpu(machine, Hardware(gpu=gpu.name, gpu_memory=options.gpu_memory))
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=budgets_of(machine, ram_budget(options.ram, rss=0), vram),
        ctx=options.ctx or work.ctx,
        kv_format=parse_kv_format(options.kv_format or "bf16"),
        held=work.prompt_tokens + work.tokens // 2,
    )
    plan = make_forecast(request)
    found = plan.prediction
    busy: dict[str, float] = {
        name: seconds * found.tok_s for name, seconds in found.busy.items() if seconds
    }
    use = GpuShares(busy, what_helps(busy, helpful_changes(plan)))
    metrics = Metrics(
        prompt_tokens=work.prompt_tokens,
        completion_tokens=work.tokens,
        ttft_s=work.prompt_tokens / found.prefill_tok_s,
        tpot_s=1 / found.tok_s,
        prefill_tok_s=found.prefill_tok_s,
        decode_tok_s=found.tok_s,
        peak_vram_bytes=plan.memory.total("vram"),
        peak_ram_bytes=plan.memory.total("ram"),
        pipeline_efficiency=found.efficiency,
        ceiling_tok_s=found.ceiling_tok_s,
        predicted_tok_s=found.tok_s,
        exactness="approximate",
        simulated=True,
    )
    result = Result(
        engine="native",
        setting=gpu.name,
        metrics={
            **metrics.to_dict(),
            "read_bytes_per_token": None,
            "long_ttft_s": work.long_prompt_tokens / found.prefill_tok_s or None,
            **asdict(use),
        },
        samples=(),
        load_s=0.0,
        info={"device": gpu.name, "architecture": shape.architecture},
    )
    known = {
        "name": gpu.name,
        "vram_bytes": gpu.vram_bytes,
        "link_bytes_s": gpu.link_bytes_s,
        "memory_bytes_s": gpu.bytes_s,
        "flops": gpu.flops,
    }
    heading = (
        f"SIMULATED: no GPU here. A plan for a {gpu.name} (link {gpu.link_bytes_s / 1e9:.3g} GB/s) "
        f"with {format_bytes(plan.request.budgets.vram)} of its memory; nothing ran on it.\n\n"
        f"{explain(plan)}"
    )
    return Outcome(
        [result],
        [],
        interleaved=False,
        forecast={"simulated": True, "gpu": known, "plan": plan.to_dict()},
        heading=heading,
    )
