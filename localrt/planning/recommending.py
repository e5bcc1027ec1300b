"""Which of a repository's GGUF files to take: the largest that this machine answers with at reading
speed.

Sizes are known before anything is downloaded; how fast each is, is planned from the model's
published config, or from the size alone. No weight is read and nothing is measured.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localrt.errors import CheckpointError, MemoryBudgetError, UnsupportedModelError
from localrt.formatting import format_rate, parse_size
from localrt.hub.choosing import Offer
from localrt.hub.files import DEFAULT_LABEL
from localrt.offload.memory.process import ram_budget
from localrt.offload.planner import Budgets, MachineProfile, ModelShape, PlanRequest, make_plan
from localrt.offload.planner.config_shapes import shape_from_config
from localrt.offload.shapes import aligned
from localrt.planning.inputs import budgets_of
from localrt.planning.preview import machine_on_device, preview_size
from localrt.settings import Settings

__all__ = ["READING_TOK_S", "Recommendation", "recommend"]

READING_TOK_S = 7.0
"""About as fast as people read."""

_CTX = 4096
_MOST_BITS, _LEAST_BITS = 8, 3  # more are not seen in the answers, fewer are
_BITS = re.compile(r"(?:I?Q|TQ|FP|BF|F)(\d+)")
_NAMED_BITS = {"MXFP4": 4, "NVFP4": 4}
_REPACKED = re.compile(r"_\d_\d_\d$")  # of one kind of processor
_FORMATS = {2: "q2_k", 3: "q3_k", 4: "int4-g32", 5: "int5-g32", 6: "int6-g32", 8: "int8-g32"}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """``name`` is the file's, ``tok_s`` None where nobody can tell, ``reason`` one line."""

    name: str
    tok_s: float | None
    reason: str


def recommend(
    offer: Offer,
    settings: Settings,
    *,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    device: str = "auto",
) -> Recommendation:
    """The largest of three to eight bits that reaches reading speed; else the fastest of four.

    ``ram``, ``gpu_memory`` and ``device`` are those of ``load``.
    """
    machine, vram = machine_on_device(settings.hub_cache, settings, device, gpu_memory)
    budget = ram_budget(None if ram is None else parse_size(ram))
    rate = _Rate(offer.sizes, offer.config, machine, budgets_of(machine, budget, vram), ram)
    names = _candidates(offer.sizes)
    where = "" if machine.sources.get("kernels") == "measured" else " on a typical machine"
    # Smaller files are never slower, so that few of them need a plan.
    first = bisect_left(range(len(names)), True, key=lambda place: rate.reaches(names[place]))
    if first < len(names):
        too_slow = names[first - 1] if first else None
        tok_s = rate(names[first])
        return Recommendation(names[first], tok_s, _why(tok_s, too_slow, where))
    name = next((each for each in reversed(names) if (_bits(each) or 0) >= 4), names[-1])
    name = DEFAULT_LABEL if DEFAULT_LABEL in names and _bits(name) == 4 else name
    tok_s = rate(name)
    if not tok_s:
        return Recommendation(name, None, "none of its files fits the memory here")
    speed = f"about {format_rate(tok_s)} tok/s{where}"
    slow = f"none of its files reaches reading speed ({READING_TOK_S:.0f} tok/s)"
    return Recommendation(name, tok_s, f"{slow}; this one does {speed}")


def _why(tok_s: float | None, too_slow: str | None, where: str) -> str:
    if tok_s is None:
        return f"the largest of up to {_MOST_BITS} bits that fits the memory here"
    speed = f"about {format_rate(tok_s)} tok/s{where}"
    if too_slow is None:
        return f"the largest of up to {_MOST_BITS} bits, {speed}"
    return (
        f"the largest that runs at reading speed ({READING_TOK_S:.0f} tok/s), {speed}; "
        f"{too_slow} would be slower"
    )


def _candidates(sizes: Mapping[str, int]) -> list[str]:
    """Largest first; files for other purposes, and what nobody would notice, are left out."""
    named = {name: bits for name in sizes if (bits := _bits(name)) is not None}
    usual = [name for name, bits in named.items() if _LEAST_BITS <= bits <= _MOST_BITS]
    usual = [name for name in usual if not _REPACKED.search(name.upper())]
    return sorted(usual or named or sizes, key=lambda name: -sizes[name])


def _bits(name: str) -> int | None:
    """Of a weight, as the name of a quantization says."""
    upper = name.upper()
    for named, bits in _NAMED_BITS.items():
        if named in upper:
            return bits
    found = _BITS.findall(upper)
    return int(found[-1]) if found else None


@dataclass(slots=True)
class _Rate:
    """Tokens per second of a file; None: it fits, and nothing more is known; 0: it does not."""

    sizes: Mapping[str, int]
    config: Mapping[str, Any] | None
    machine: MachineProfile
    budgets: Budgets
    ram: str | int | None
    known: dict[str, float | None] = field(default_factory=dict)

    def reaches(self, name: str) -> bool:
        """Whether it runs at reading speed, as far as can be told."""
        tok_s = self(name)
        return tok_s is None or tok_s >= READING_TOK_S

    def __call__(self, name: str) -> float | None:
        if name not in self.known:
            self.known[name] = self._planned(name, self.sizes[name])
        return self.known[name]

    def _planned(self, name: str, nbytes: int) -> float | None:
        shape = self._shape(name, nbytes)
        if shape is None:
            found = preview_size(nbytes, ram=self.ram)
            return None if found.fits else found.tok_s or 0.0
        ctx = min(_CTX, shape.context_length)
        request = PlanRequest(shape=shape, machine=self.machine, budgets=self.budgets, ctx=ctx)
        try:
            return make_plan(request, exact=False).tok_s
        except MemoryBudgetError:
            return 0.0

    def _shape(self, name: str, nbytes: int) -> ModelShape | None:
        """The model with as many bytes as the file has, in the nearest format that is planned."""
        if self.config is None:
            return None
        bits = _bits(name) or 4
        format = _FORMATS[min(_FORMATS, key=lambda each: abs(each - bits))]
        config = {key: value for key, value in self.config.items() if key != "quantization_config"}
        try:
            shape = shape_from_config(config, name=name, format=format)
        except (UnsupportedModelError, CheckpointError):
            self.config = None  # nor are its other files
            return None
        share = nbytes / shape.nbytes
        units = [replace(unit, nbytes=aligned(round(share * unit.nbytes))) for unit in shape.units]
        return replace(shape, units=tuple(units))
