"""A rehearsal of ``scripts/gpu_check`` on the driver of this folder: the same phases with tiny
models, placed by turns in all places, and no rate of the machine measured.

``python -m tests.driver.rehearsal`` is ``benchmarks.gpu`` there, with ``child`` its
``loaded_child``.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu import encoders, facts, loaded, loaded_child, pictures, timing
from benchmarks.gpu.__main__ import interruptible, main
from localrt import system
from localrt.loading import gpu as opening
from localrt.loading import native, placing
from localrt.offload.placement import Where
from localrt.offload.reading.disk_speed import DiskProfile
from localrt.offload.reading.files import ReadMode
from localrt.planning.forecast import Forecast, PlanRequest
from localrt.quant import choose
from localrt.quant.cuda import cuda_memory, programs
from localrt.quant.cuda import driver as calling
from localrt.quant.cuda.device import emulate
from localrt.quant.cuda.programs import Program
from tests.ops.cuda.emulator import Emulator
from tests.planner.models import machine

MIB = 1 << 20
_first_plan = placing.first_plan
TINY = {"hidden_size": 64, "head_dim": 32, "vocab_size": 64, "intermediate_size": 64}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 3}
EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}


def has_driver() -> bool:
    """Whether the driver can be built here, and there is no other one."""
    if system.has_nvidia_driver() or sys.platform != "linux":
        return False
    return bool(find_spec("cuda")) and programs.has_compiler()


def begin() -> bool:
    """Use the CPU for kernels, and, where it can be built, the driver; whether it can."""
    emulate(Emulator())
    torch.set_num_threads(1)  # small work, for which threads of busy cores wait
    _set(pictures, _SIDE=2, _TEXT=24)
    _set(encoders, _ENCODERS={})  # seconds each, and tested without a rehearsal
    if not has_driver():
        return False
    from tests.driver.standin import image
    from tests.driver.standin import loaded as driver

    driver().set()

    def machine_code(program: Program, capability: int, folder: Path) -> bytes:
        return image(program)

    _set(calling, machine_code=machine_code)
    _set(cuda_memory, _SAMPLE=MIB)
    _set(choose, _default_device=lambda: "cuda")
    _set(opening, _rates=lambda *_, **__: None)
    _set(facts, _COPIED=8 * MIB, _PIECES=(2 * MIB, 8 * MIB), _LAUNCHES=2, _RUNS=2)
    _set(timing, _COPIED=MIB)
    _set(loaded_child, _THROTTLE_SAMPLE=1000, _LOGIT_ROWS=14)
    _set(loaded_child, current_rss=lambda: 0)  # budgets tell models with weights on the SSD
    _set(
        loaded,
        _FEW=2,
        LARGE={name: tiny(size) for name, size in loaded.LARGE.items()},
    )
    here = SimpleNamespace(run=run_here, TimeoutExpired=subprocess.TimeoutExpired)
    _set(loaded, subprocess=here)
    rates = DiskProfile(ReadMode(direct=False, threads=2, block=MIB), 1e9, 0.0), machine()
    _set(placing, machine_profile=lambda *_, **__: rates, first_plan=_by_turns)
    gc.collect()
    gc.freeze()  # loading collects garbage, and would look through all that is imported
    _set(native, _must_stream=lambda *args: args[-1].gpu_memory is not None)
    return True


def _set(module: Any, **values: Any) -> None:
    for name, value in values.items():
        assert hasattr(module, name), f"{module.__name__} has no {name}"
        setattr(module, name, value)


def run_here(
    command: list[str], *, input: bytes, env: dict[str, str], **_: Any
) -> CompletedProcess[bytes]:
    """In this process: another one takes seconds to begin."""
    with patch.dict(os.environ, env):
        *_, found = loaded_child.results(json.loads(input))
    return CompletedProcess(command, 0, json.dumps(found).encode() + b"\n", b"")


def run_apart(
    command: list[str], *, run: Callable[..., Any], **options: Any
) -> CompletedProcess[bytes]:
    """``run`` a process of its own, which begins as this one did."""
    assert command[1:] == ["-m", loaded_child.__name__]
    done: CompletedProcess[bytes] = run([command[0], "-m", __name__, "child"], **options)
    return done


def _by_turns(request: PlanRequest, rows: int) -> Forecast:
    """In all places, those of the SSD if RAM is short."""
    plan, units = _first_plan(request, rows), request.shape.units
    short = request.budgets.ram in (3_000_000_000, 6_000_000_000)
    ssd = [Where.SSD, Where.SSD_LINK] if short else []
    order = [Where.LINK, *ssd[:1], Where.VRAM, *ssd[1:], Where.RAM]
    where = dict(plan.placement.where)
    passing = [unit for unit in units if unit.kind in ("attention", "mlp")]
    where |= {unit.name: order[n % len(order)] for n, unit in enumerate(passing)}
    experts = [unit for unit in units if unit.kind == "expert"]
    if experts:  # CPU and GPU share their layers
        where |= dict.fromkeys((unit.name for unit in passing), Where.VRAM)
        places = [Where.VRAM, Where.SSD if short else Where.RAM]
        where |= {unit.name: places[n % 2] for n, unit in enumerate(experts)}
    ring = 2 * max(unit.nbytes for unit in units)
    kv: Any = ("ram",) * request.shape.layers
    placed = replace(plan.placement, where=where, kv=kv, ram_ring=ring, vram_ring=ring)
    return replace(plan, placement=placed)


def tiny(size: loaded.Size) -> loaded.Size:
    """The same with a thousandth of the weights."""
    config = {**size.config, **TINY, **HEADS}
    if "num_experts" in config:
        config |= EXPERTS
    return replace(
        size, config=config, budgets=size.budgets[:1], prompts=(3, 5), tokens=4, tokens_from_ssd=2
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["child"]:
        begin()
        loaded_child.main()
    else:
        interruptible(partial(main, begin))
