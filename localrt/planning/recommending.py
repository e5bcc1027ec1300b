"""Which of a repository's GGUF files to take: the largest that this machine answers with at reading
speed.

Sizes are known before anything is downloaded; how fast each is, is estimated from the model's
published config, or from the size alone. No weight is read and nothing is measured.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from localrt.errors import CheckpointError, UnsupportedModelError
from localrt.formatting import format_bytes, format_rate, parse_size
from localrt.hub.choosing import Offer
from localrt.hub.files import DEFAULT_LABEL
from localrt.hub.known_models import KnownModel
from localrt.hub.names import HubRef
from localrt.offload.memory.process import ram_budget
from localrt.offload.planner import Budgets, MachineProfile, ModelShape, PlanRequest
from localrt.offload.planner.estimate import estimate, outline, whole_nbytes
from localrt.offload.planner.plan import Change
from localrt.offload.planner.verdict import READING_TOK_S, Expected
from localrt.offload.shapes import aligned
from localrt.planning.inputs import budgets_of
from localrt.planning.preview import machine_on_device, preview_size
from localrt.settings import Settings

__all__ = ["Recommendation", "other_files", "recommend", "recommend_on", "sized", "usual_offer"]

_CTX = 4096
_LEAST_GAIN = 1.05  # times as fast: less is not worth a line
_MOST_BITS, _LEAST_BITS = 8, 3  # more are not seen in the answers, fewer are
_BITS = re.compile(r"(?:I?Q|TQ|FP|BF|F)(\d+)")
_NAMED_BITS = {"MXFP4": 4, "NVFP4": 4}
_REPACKED = re.compile(r"_\d_\d_\d$")  # of one kind of processor
_FORMATS = {2: "q2_k", 3: "q3_k", 4: "int4-g32", 5: "int5-g32", 6: "int6-g32", 8: "int8-g32"}
# Of a weight, in files of whole models: what repositories of GGUF files usually have.
_USUAL_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "Q3_K_M": 3.9}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """``name`` is the file's, ``tok_s`` None where nobody can tell, ``reason`` one line.

    ``expected`` is there where the model's config is known and it fits.
    """

    name: str
    tok_s: float | None
    reason: str
    expected: Expected | None = None


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
    return recommend_on(offer, machine, budgets_of(machine, budget, vram), ram=ram)


def recommend_on(
    offer: Offer, machine: MachineProfile, budgets: Budgets, *, ram: str | int | None = None
) -> Recommendation:
    """The same on a machine within budgets; ``ram`` is for models of which only sizes are known."""
    rate = _Rate(offer.sizes, offer.config, machine, budgets, ram)
    names = _candidates(offer.sizes)
    where = "" if machine.sources.get("kernels") == "measured" else " on a typical machine"
    # Smaller files are never slower, so that few of them need a look.
    first = bisect_left(range(len(names)), True, key=lambda place: rate.reaches(names[place]))
    if first < len(names):
        name, too_slow = names[first], names[first - 1] if first else None
        tok_s = rate(name)
        return Recommendation(name, tok_s, _why(tok_s, too_slow, where), rate.expected.get(name))
    name = next((each for each in reversed(names) if (_bits(each) or 0) >= 4), names[-1])
    name = DEFAULT_LABEL if DEFAULT_LABEL in names and _bits(name) == 4 else name
    tok_s = rate(name)
    if not tok_s:
        return Recommendation(name, None, "none of its files fits the memory here")
    speed = f"about {format_rate(tok_s)} tok/s{where}"
    slow = f"none of its files reaches reading speed ({READING_TOK_S:.0f} tok/s)"
    why = f"{slow}; this one does {speed}"
    return Recommendation(name, tok_s, why, rate.expected.get(name))


def usual_offer(model: KnownModel) -> Offer:
    """The files that its repository may be taken to have, with estimated sizes.

    A model that is published quantized has one, of the name of its format.
    """
    config, weights = model.config(), model.parameters * 1e9
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        name = str(quantized.get("quant_method", "")).upper()
        return Offer(model.repo, {name: whole_nbytes(outline(config, name=name))}, config)
    sizes = {name: round(weights * bits / 8) for name, bits in _USUAL_BITS.items()}
    return Offer(model.repo, sizes, config)


def other_files(
    offer: Offer, chosen: str, request: PlanRequest, tok_s: float
) -> tuple[Change, ...]:
    """The next two smaller files that are faster than the ``chosen`` one, planned at ``tok_s``."""
    now = estimate(request)
    names = _candidates(offer.sizes)
    if now is None or chosen not in names:
        return ()
    found = []
    for name in names[names.index(chosen) + 1 :]:
        shape = sized(request.shape, name, offer.sizes[name])
        expected = estimate(replace(request, shape=shape))
        gain = 0.0 if expected is None else expected.tok_s / now.tok_s
        if gain > _LEAST_GAIN:
            what = f"{name} instead of {chosen}, {format_bytes(offer.sizes[name])}"
            file = str(HubRef(offer.repo, variant=name))
            found.append(Change(what, gain * tok_s, gain, ("file", file)))
    return tuple(found[:2])


def sized(shape: ModelShape, name: str, nbytes: int) -> ModelShape:
    """The model in a file called ``name`` (``"Q6_K"``) of ``nbytes``: its matrices take their part
    of it, in the nearest format that is planned.
    """
    bits = _bits(name) or 4
    format = _FORMATS[min(_FORMATS, key=lambda each: abs(each - bits))]
    share = nbytes / whole_nbytes(shape)
    units = [
        replace(
            unit,
            nbytes=aligned(round(share * unit.nbytes)),
            format=format if unit.macs else unit.format,
        )
        for unit in shape.units
    ]
    return replace(shape, units=tuple(units))


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
    shape: ModelShape | None = None
    known: dict[str, float | None] = field(default_factory=dict)
    expected: dict[str, Expected] = field(default_factory=dict)

    def reaches(self, name: str) -> bool:
        """Whether it runs at reading speed, as far as can be told."""
        tok_s = self(name)
        return tok_s is None or tok_s >= READING_TOK_S

    def __call__(self, name: str) -> float | None:
        if name not in self.known:
            self.known[name] = self._estimated(name, self.sizes[name])
        return self.known[name]

    def _estimated(self, name: str, nbytes: int) -> float | None:
        shape = self._shape()
        if shape is None:
            found = preview_size(nbytes, ram=self.ram)
            return None if found.fits else found.tok_s or 0.0
        if not self.as_published:
            shape = sized(shape, name, nbytes)
        ctx = min(_CTX, shape.context_length)
        request = PlanRequest(shape=shape, machine=self.machine, budgets=self.budgets, ctx=ctx)
        expected = estimate(request)
        if expected is None:
            return 0.0
        self.expected[name] = expected
        return expected.tok_s

    @property
    def as_published(self) -> bool:
        """Whether the only file is in the format that the config names."""
        quantized = None if self.config is None else self.config.get("quantization_config")
        return len(self.sizes) == 1 and isinstance(quantized, Mapping)

    def _shape(self) -> ModelShape | None:
        """The model in one format; None where its config says too little."""
        if self.config is not None and self.shape is None:
            format = None if self.as_published else "int4-g32"
            try:
                self.shape = outline(self.config, name="model", format=format)
            except (UnsupportedModelError, CheckpointError):
                self.config = None
        return self.shape
