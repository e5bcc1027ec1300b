"""Measures how ``localrt bench`` uses a GPU while a model decodes, or forecasts it without one.

The pipeline's events measure the busy shares; a model that is all on the GPU has none. If
``--gpu-memory`` is given without a GPU, the result is a plan for a known GPU with this machine's
disk, memory and processor, in the form of a measurement but marked ``simulated``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from localrt.bench.workload import BenchOptions, Outcome, Result
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

_TOKENS = 16
_NAMES = {"gpu": "GPU", "link": "link to the GPU", "cpu": "CPU", "ssd": "disk"}
_BUSY = 0.6  # a resource with a smaller busy share is not a bottleneck


@dataclass(frozen=True, slots=True)
class GpuUse:
    """``busy`` maps a resource to its busy share; ``helps`` says what would help."""

    busy: Mapping[str, float]
    helps: str


def use_line(use: Mapping[str, Any]) -> str:
    """Format the fields of a ``GpuUse`` as one line for people."""
    busy = use["busy"]
    shares = ", ".join(f"{_NAMES[name]} {busy[name]:.0%}" for name in _NAMES if name in busy)
    return f"busy while decoding: {shares or 'not measured'}. {use['helps']}"


def gpu_use(model: Model, prompt: Sequence[int]) -> GpuUse:
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
    return GpuUse(busy, what_helps(busy, model.advise().changes))


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
    use = GpuUse(busy, what_helps(busy, helpful_changes(plan)))
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
