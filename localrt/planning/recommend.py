"""Recommendations: which file of a repository, which models a PC runs well, and one-line previews.

Sizes are known before a download; speeds are estimated from the model's published config, or from
its size alone. No weight is read and nothing is measured for it: rates are those measured earlier,
else a typical desktop's. A loaded, streamed model is judged by the plan it runs with; a resident
one by the measured rates of the machine.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

from localrt.common.errors import (
    CheckpointError,
    MemoryBudgetError,
    OptionError,
    UnsupportedModelError,
    known_arguments,
)
from localrt.common.formatting import format_bytes, format_seconds, join_lines, parse_size, table
from localrt.common.settings import DEFAULT_CONTEXT, Settings
from localrt.hub.files import DEFAULT_LABEL
from localrt.hub.names import KNOWN_MODELS, HubRef, KnownModel, repo_thinks
from localrt.hub.resolving import FileChoice
from localrt.models.weight_files import files_nbytes
from localrt.offload.account import UNKNOWN_MODEL_NBYTES, Budgets, longest_context
from localrt.offload.memory import ram_budget
from localrt.offload.placement import PlacedUnit
from localrt.offload.shapes import ModelShape, aligned
from localrt.planning.forecast import (
    PROMPT_TOKENS,
    READING_TOK_S,
    Change,
    Forecast,
    Level,
    PlanRequest,
    Prediction,
    figures,
    gpu_room,
    in_words,
    meanings,
    other_gpu_line,
    speed,
)
from localrt.planning.machine import MachineProfile
from localrt.planning.measure import (
    Hardware,
    budgets_of,
    gpu_here,
    known_machine,
    planned_hardware,
    saved_machine,
    with_gpu,
)
from localrt.planning.models import find_model, shape_from_config, shape_of
from localrt.planning.search import (
    Try,
    estimate,
    fits,
    helpful_changes,
    make_forecast,
    whole_nbytes,
)
from localrt.quant.ops.kv_formats import parse_kv_format

FILE = "file"
"""The option name of a change to another of a repository's files."""

# (bits per weight, relative increase of perplexity), measured on models of 0.1 to 1.5 B
# (docs/quality.md). Larger models lose less, in about the same proportions.
_LOSSES = ((3.0, 0.4), (3.9, 0.12), (4.9, 0.05), (5.7, 0.025), (6.6, 0.012), (8.5, 0.004))
_WORTH = 4.0  # a loss of 1 % weighs as much as 4 % of the speed's value
_GOOD_BITS = 4  # smaller files are recommended only if 4 bits are too slow
_MOST_BITS, _LEAST_BITS = 8, 3  # more do not improve answers, fewer are noticeable
_BITS = re.compile(r"(?:I?Q|TQ|FP|BF|F)(\d+)")
_NAMED_BITS = {"MXFP4": 4, "NVFP4": 4}
_REPACKED = re.compile(r"_\d_\d_\d$")  # repacked for one kind of processor
_BESIDE = 0.9  # additional bits per weight: scales, and tensors with more bits
_PLANNED, _PLANNED_BITS = "int4-g32", 4.5
_NO_ROOM = "none of its files fits the memory here"
_FORMATS = {2: "q2_k", 3: "q3_k", 4: "int4-g32", 5: "int5-g32", 6: "int6-g32", 8: "int8-g32"}
# Bits per weight of the files that GGUF repositories usually have.
_USUAL_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "Q3_K_M": 3.9}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """``name`` is the file's name, ``reason`` is one line. ``expected`` is None if the model's
    config is unknown or the file does not fit.
    """

    name: str
    reason: str
    expected: Prediction | None = None


def recommend(
    offer: FileChoice,
    settings: Settings,
    *,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    device: str = "auto",
) -> Recommendation:
    """Recommend the best file of 3 to 8 bits; if none reaches reading speed, one of 4 bits.

    ``ram``, ``gpu_memory`` and ``device`` are those of ``load``.
    """
    machine, budgets = saved_machine(settings.hub_cache, settings, device, ram, gpu_memory)
    return recommend_on(offer, machine, budgets)


def recommend_on(
    offer: FileChoice, machine: MachineProfile, budgets: Budgets, *, ctx: int | None = None
) -> Recommendation:
    """Recommend as ``recommend`` does, for a given machine and budgets and ``ctx`` tokens (None:
    4,096).
    """
    names, shape = _candidates(offer.sizes), _outline_of(offer)
    if shape is None:
        room = budgets.ram - UNKNOWN_MODEL_NBYTES
        best = next((name for name in names if offer.sizes[name] <= room), None)
        if best is None:
            return Recommendation(_default(names), _NO_ROOM)
        why = f"the largest of up to {_MOST_BITS} bits that fits the memory here"
        return Recommendation(best, why)
    expected: dict[str, Prediction] = {}
    for name in names:
        request = PlanRequest(
            shape=shape if as_published(offer) else sized(shape, name, offer.sizes[name]),
            machine=machine,
            budgets=budgets,
            ctx=min(ctx or DEFAULT_CONTEXT, shape.context_length),
            thinks=repo_thinks(offer.repo),
        )
        if (found := estimate(request)) is not None:
            expected[name] = found
    nbytes = whole_nbytes(shape)
    bits = {name: _PLANNED_BITS * offer.sizes[name] / nbytes for name in names}
    best = _best(expected, bits)
    name = best or _default(names)
    if name not in expected:
        return Recommendation(name, _NO_ROOM)
    found = expected[name]
    about = f"about {speed(found.tok_s)}"
    if machine.sources.get("kernels") == "typical":
        about += " on a typical machine"
    if found.read:
        about += ", reading the SSD for every token"
    why = f"none of its files reaches reading speed ({READING_TOK_S:.0f} tok/s)"
    why = f"{why}; this one does {about}" if best is None else _why(name, names, expected, about)
    return Recommendation(name, why, found)


def _default(names: Sequence[str]) -> str:
    """Return the smallest file of at least four bits, or the usual one of four."""
    name = next((each for each in reversed(names) if (_bits(each) or 0) >= 4), names[-1])
    return DEFAULT_LABEL if DEFAULT_LABEL in names and _bits(name) == 4 else name


def _best(expected: Mapping[str, Prediction], bits: Mapping[str, float]) -> str | None:
    """Return the best of files sorted from the largest; None if none reaches reading speed."""
    good = [name for name in expected if (_bits(name) or _GOOD_BITS) >= _GOOD_BITS]
    whole = (name for name in good if expected[name].whole_on_gpu and expected[name].is_quick)
    if (name := next(whole, None)) is not None:
        return name
    quick = [name for name in expected if expected[name].tok_s >= READING_TOK_S]
    # Fewer than four bits only if that makes the model fast enough.
    worth = [
        name for name in expected if name in good or (name in quick and expected[name].is_quick)
    ]

    def value(name: str) -> float:
        """Return the value of a file's speed, reduced by the loss of its bits. A speed that is just
        fast enough counts half as much as infinite speed.
        """
        found, width = expected[name], bits[name]
        if (named := _bits(name)) is not None:  # embeddings often have more bits than the rest
            width = min(width, named + _BESIDE)
        return found.tok_s / (found.tok_s + found.enough_tok_s) * math.exp(-_WORTH * _loss(width))

    def rank(name: str) -> tuple[bool, bool, float]:
        """Return the sort key: files of at least four bits that are good for chat come first, of
        them those in memory, then order is by value.
        """
        is_good = name in good and expected[name].level == "good"
        return is_good, is_good and not expected[name].read, value(name)

    return max(worth, key=rank) if quick and worth else None


def _outline_of(offer: FileChoice) -> ModelShape | None:
    """Return the model's shape in one format, with one expert per layer; None if its config is
    unknown or unsupported.
    """
    if offer.config is not None:
        format = None if as_published(offer) else _PLANNED
        with suppress(UnsupportedModelError, CheckpointError):
            return shape_from_config(offer.config, name="model", format=format, experts=1)
    return None


def usual_offer(model: KnownModel) -> FileChoice:
    """Return the usual files of a model's repository, with estimated sizes.

    A model that is published quantized has one file, named after its format.
    """
    config, weights = model.config(), model.parameters * 1e9
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        name = str(quantized.get("quant_method", "")).upper()
        nbytes = whole_nbytes(shape_from_config(config, name=name, experts=1))
        return FileChoice(model.repo, {name: nbytes}, config)
    sizes = {name: round(weights * bits / 8) for name, bits in _USUAL_BITS.items()}
    return FileChoice(model.repo, sizes, config)


def only(offer: FileChoice, file: str) -> FileChoice:
    """Return the offer of one usual ``file`` alone, with an estimated size if it has others."""
    if as_published(offer):
        return offer
    label = next((name for name in offer.sizes if name in file.upper()), file)
    whole = offer.sizes["Q8_0"] / _USUAL_BITS["Q8_0"]
    nbytes = offer.sizes.get(label) or round(whole * ((_bits(file) or _GOOD_BITS) + _BESIDE))
    return replace(offer, sizes={label: nbytes})


def other_files(offer: FileChoice, chosen: str, request: PlanRequest) -> Iterator[Try]:
    """Yield the next two files that are smaller than ``chosen``."""
    names = _candidates(offer.sizes)
    if chosen not in names:
        return
    for name in names[names.index(chosen) + 1 :][:2]:
        changed = replace(request, shape=sized(request.shape, name, offer.sizes[name]))
        what = f"{name} instead of {chosen}, {format_bytes(offer.sizes[name])}"
        yield what, changed, (FILE, str(HubRef(offer.repo, variant=name)))


def sized(shape: ModelShape, name: str, nbytes: int) -> ModelShape:
    """Return the model's shape in a file ``name`` (``"Q6_K"``) of ``nbytes``. Units are scaled to
    that size, and matrices take the nearest planned format.
    """
    bits = _bits(name) or 4
    format = _FORMATS[min(_FORMATS, key=lambda each: abs(each - bits))]
    share = nbytes / whole_nbytes(shape)
    units = [
        PlacedUnit(  # ten thousand of them in a table of models
            name=unit.name,
            kind=unit.kind,
            nbytes=aligned(round(share * unit.nbytes)),
            macs=unit.macs,
            format=format if unit.macs else unit.format,
            layer=unit.layer,
            use=unit.use,
            unpacked=unit.unpacked,
        )
        for unit in shape.units
    ]
    return replace(shape, units=tuple(units))


def _why(name: str, names: list[str], expected: Mapping[str, Prediction], what: str) -> str:
    found = expected[name]
    larger = names[names.index(name) - 1] if names.index(name) else None
    if found.whole_on_gpu and found.is_quick:
        why = "the largest that is whole in GPU memory" if larger else "whole in GPU memory"
    elif larger is None:
        return f"the largest of up to {_MOST_BITS} bits, {what}"
    else:
        why = "the best of quality and speed"
    slower = expected.get(larger) if larger else None
    return f"{why}, {what}" + (f"; {larger} would do {speed(slower.tok_s)}" if slower else "")


def _candidates(sizes: Mapping[str, int]) -> list[str]:
    """Return the usual files of 3 to 8 bits (all files if there are none), the largest first."""
    named = {name: bits for name in sizes if (bits := _bits(name)) is not None}
    usual = [name for name, bits in named.items() if _LEAST_BITS <= bits <= _MOST_BITS]
    usual = [name for name in usual if not _REPACKED.search(name.upper())]
    return sorted(usual or named or sizes, key=lambda name: -sizes[name])


def _bits(name: str) -> int | None:
    """Return the bits per weight that the name of a quantization states, if any."""
    upper = name.upper()
    for named, bits in _NAMED_BITS.items():
        if named in upper:
            return bits
    found = _BITS.findall(upper)
    return int(found[-1]) if found else None


def as_published(offer: FileChoice) -> bool:
    """Whether the only file is in the format that the config names, so that its size is known."""
    quantized = None if offer.config is None else offer.config.get("quantization_config")
    return len(offer.sizes) == 1 and isinstance(quantized, Mapping)


def _loss(bits: float) -> float:
    """Return the relative increase of perplexity, interpolated between the points."""
    for (low, more), (high, less) in pairwise(_LOSSES):
        if bits <= high:
            part = max(0.0, (bits - low) / (high - low))
            return float(more * (less / more) ** part)
    return _LOSSES[-1][1]


# -- what a PC runs well: ``localrt plan`` without a model -----------------------------------------

_ORDER: dict[Level, int] = {"good": 0, "usable": 1, "slow": 2}
_WORDS: dict[Level, str] = {"good": "good", "usable": "usable", "slow": "too slow"}
_WELL_KNOWN = ("llama", "qwen", "gemma", "gpt-oss", "mistral", "ministral", "devstral", "phi")
_SAME_SIZE = 1.15  # of models whose sizes differ by less, the newer one comes first
_VERSION = re.compile(r"\d+(\.\d+)?")
_MARGIN = 1.25  # forecasts err: only what is faster than enough by this is surely so


@dataclass(frozen=True, slots=True)
class Runnable:
    """A model in one ``quantization`` and its ``expected`` speed; both None if it cannot run."""

    model: KnownModel
    quantization: str | None
    expected: Prediction | None

    @property
    def level(self) -> Level:
        """How good the model is for chat; ``"slow"`` if it does not fit."""
        return "slow" if self.expected is None else self.expected.level

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        found = self.expected
        expected: dict[str, object] = {}
        if found is not None:
            expected = {
                "tok_s": found.tok_s,
                "prefill_tok_s": PROMPT_TOKENS / found.page_s,
                "nbytes": found.weights,
                "needed": found.needed,
                "read": found.read,
                "copied": found.copied,
                "on_gpu": found.on_gpu,
                "by_cpu": found.by_cpu,
                "thinks": found.thinks,
                "gpu_unused": found.gpu_unused,
            }
        return {
            "name": self.model.name,
            "repo": self.model.repo,
            "parameters": round(self.model.parameters * 1e9),
            "quantization": self.quantization,
            "verdict": self.level,
            "fits": self.expected is not None,
            **expected,
        }


@dataclass(frozen=True, slots=True)
class WhatRuns:
    """All known models on ``machine`` within ``budgets``, the best first."""

    machine: MachineProfile
    budgets: Budgets
    models: tuple[Runnable, ...]
    hypothetical: tuple[str, ...] = ()
    note: str = ""

    @property
    def best(self) -> tuple[Runnable, ...]:
        """The best model of each family that is good or usable for chat."""
        found: dict[str, Runnable] = {}
        for each in self.models:
            if each.level != "slow":
                found.setdefault(each.model.family, each)
        return tuple(found.values())

    def to_dict(self) -> dict[str, object]:
        """Plain values, for JSON."""
        return {
            "simulated": True,
            "hypothetical": list(self.hypothetical),
            "machine": self.machine.to_dict(),
            "budgets": asdict(self.budgets),
            "models": [each.to_dict() for each in self.models],
        }

    def report(self) -> str:
        """Return the table of models, and commands to type."""
        return join_lines(self._lines())

    def _lines(self) -> Iterable[str]:
        where = "a PC like that" if self.hypothetical else "this PC"
        best = self.best
        if not best:
            yield f"None of the known models runs well on {where}. The smallest is smollm2:"
            yield "  localrt chat smollm2"
            return
        yield f"What {where} runs well, the best first: of each family one, with 4,096 tokens"
        yield ""
        rows = [(*_row(each),) for each in best]
        headers = ("MODEL", "FILE", "SIZE", "TOK/S", "FIRST TOKEN", "WEIGHTS IN", "FOR CHAT")
        shown_table = table(rows, headers, "llrrr")
        yield from shown_table.split("\n")
        yield ""
        shown = {each.model.family for each in best}
        slow = dict.fromkeys(
            each.model.name for each in self.models if each.model.family not in shown
        )
        if slow:
            yield f"Too slow or too large: {', '.join(slow)}"
        yield f"Forecasts from {', '.join(figures(self.machine))}"
        memory = f"{format_bytes(self.budgets.ram)} of RAM{gpu_room(self.machine, self.budgets)}"
        yield f"Memory for a model: {memory}; sizes of files are estimates."
        yield from meanings(shown_table)
        if self.note:
            yield f"Note: {self.note}"
        yield ""
        first = best[0].model.name
        yield f"  localrt chat {first}    downloads it, and chats"
        yield f"  localrt plan {first}    says more about it, or about any other model"


def what_runs(wanted: Hardware, settings: Settings, *, measure: bool = True) -> WhatRuns:
    """Estimate all known models. Without ``measure``, by rates that were measured before, else by a
    typical PC's.

    Raises:
        OptionError: a description of hardware that cannot be understood.
    """
    machine, budgets, note = planned_hardware(wanted, settings, measure=measure)
    in_use = budgets.ram - ram_budget(None)
    if wanted.pc is None and wanted.ram is None and in_use > 0:
        note = f"{format_bytes(in_use)} of the RAM are in use by other programs now. {note}".strip()
    note = ". ".join(filter(None, (note, other_gpu_line(machine))))
    return WhatRuns(machine, budgets, _ranked(machine, budgets), wanted.hypothetical, note)


def recommended(settings: Settings | None = None, *, measure: bool = False) -> tuple[Runnable, ...]:
    """The models that this PC runs well, of each family one, the best first.

    By rates that were measured before, else by a typical PC's; with ``measure`` they are measured
    first, which takes some seconds.
    """
    settings = settings or Settings.from_environment()
    return what_runs(Hardware(), settings, measure=measure).best


def best_here(settings: Settings) -> Runnable | None:
    """The first of ``recommended`` if it is good."""
    best = next(iter(recommended(settings)), None)
    return best if best is not None and best.level == "good" else None


def _ranked(machine: MachineProfile, budgets: Budgets) -> tuple[Runnable, ...]:
    found: dict[tuple[object, ...], Recommendation] = {}  # some models differ only in their weights
    models = []
    for model in KNOWN_MODELS:
        key = model.shape, model.parameters, repo_thinks(model.repo)
        if key not in found:
            found[key] = recommend_on(usual_offer(model), machine, budgets)
        best = found[key]
        models.append(Runnable(model, best.name if best.expected else None, best.expected))
    return tuple(sorted(models, key=_rank))


def _rank(each: Runnable) -> tuple[float, ...]:
    """Sort key: the better level first, then models in memory with time to spare, then those in
    memory, then well-known families, the larger ones, and of the same size the newer ones.
    """
    model, found = each.model, each.expected
    is_read = found is None or found.read > 0
    quick = found is not None and found.tok_s >= _MARGIN * found.enough_tok_s
    known = model.family.startswith(_WELL_KNOWN)
    size = math.floor(math.log(model.parameters, _SAME_SIZE))
    version = _VERSION.search(model.family)
    newer = float(version[0]) if version else 0.0
    order = _ORDER[each.level], is_read or not quick, is_read, not known, -size, -newer
    return *order, -model.parameters


def _row(each: Runnable) -> Iterable[str]:
    assert each.expected is not None, "it runs"
    yield each.model.name
    yield each.quantization or ""
    yield format_bytes(each.expected.weights)
    yield speed(each.expected.tok_s).removesuffix(" tok/s")
    yield format_seconds(each.expected.page_s)
    yield each.expected.place
    yield _WORDS[each.level]


# -- previews --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Preview:
    """``fits``: all weights are resident; ``place`` is then ``"RAM"`` or ``"GPU"``.

    Otherwise each token reads ``read_bytes`` from the disk and copies ``copied_bytes`` over the
    link. ``tok_s`` is None if unknown. ``assumed``: rates are not this machine's. ``verdict`` is
    the first line of ``localrt plan``, empty if unknown. ``problem`` is the reason why it cannot
    run.
    """

    fits: bool
    place: str = "RAM"
    weight_bytes: int
    read_bytes: int = 0
    copied_bytes: int = 0
    tok_s: float | None = None
    assumed: bool = False
    verdict: str = ""
    problem: str = ""

    def __str__(self) -> str:
        """Return one line such as ``"streams 410 MB per token, about 6 tok/s"``."""
        if self.problem:
            return self.problem
        text = in_words(
            fits=self.fits,
            read=self.read_bytes,
            copied=self.copied_bytes,
            tok_s=self.tok_s,
            where="on the GPU" if self.place == "GPU" else "in RAM",
        )
        return f"{text} on a typical machine" if self.assumed and self.tok_s else text


@known_arguments
def preview(
    model: str | Path,
    *,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    ctx: int | None = None,
    kv_format: str | None = None,
    device: str = "auto",
    engine: str = "auto",
    settings: Settings | None = None,
) -> Preview:
    """Preview a model that is on this machine, or whose config is, without using the network.

    Options are those of ``load``. Takes up to a second: call it from a thread.

    Raises:
        ModelNotFoundError: neither the model nor its config is on this machine.
        LocalrtError: it cannot be read, or an option cannot be used.
    """
    settings = settings or Settings.from_environment()
    path = find_model(str(model), settings, offline=True)
    budget = ram_budget(None if ram is None else parse_size(ram))
    if engine == "llamacpp":
        return _whole(files_nbytes(path), budget)
    try:
        shape = shape_of(path)
    except UnsupportedModelError as error:
        if path.is_dir() and not any(path.glob("*.gguf")):
            return Preview(fits=False, weight_bytes=files_nbytes(path), problem=str(error))
        return _whole(files_nbytes(path), budget)  # llama.cpp may run it, if it is installed
    machine, budgets = saved_machine(path, settings, device, ram, gpu_memory)
    kept = parse_kv_format(kv_format or "bf16")
    held = ctx or min(DEFAULT_CONTEXT, shape.context_length)
    asked = PlanRequest(shape=shape, machine=machine, budgets=budgets, ctx=held, kv_format=kept)
    if ctx is None:  # loading chooses a context that fits
        held = longest_context(held, lambda tokens: fits(replace(asked, ctx=tokens)))
        asked = replace(asked, ctx=held)
    try:
        plan = make_forecast(asked)
    except MemoryBudgetError as error:
        return Preview(
            fits=False, weight_bytes=shape.nbytes, problem=f"does not fit: {error.marked}"
        )
    return Preview(
        fits=plan.fits,
        place="GPU" if plan.placement.uses_gpu else "RAM",
        weight_bytes=plan.weight_bytes,
        read_bytes=plan.read_bytes,
        copied_bytes=plan.copied_bytes,
        tok_s=plan.tok_s,
        assumed=machine.sources.get("kernels") == "typical",
        verdict=str(plan.verdict),
    )


def fitting_context(path: Path, settings: Settings) -> int:
    """The context with which loading a model would begin: its own, or the longest that fits.

    Raises:
        LocalrtError: the planner does not know the model.
    """
    shape = shape_of(path)
    machine, budgets = saved_machine(path, settings)
    asked = PlanRequest(shape=shape, machine=machine, budgets=budgets, ctx=shape.context_length)
    return longest_context(asked.ctx, lambda tokens: fits(replace(asked, ctx=tokens)))


def preview_size(nbytes: int, *, ram: str | int | None = None) -> Preview:
    """Preview a dense model from the size of its files alone, in bytes.

    Raises:
        OptionError: ``nbytes`` is not a number of bytes.
    """
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0:
        raise OptionError(f"nbytes must be a number of bytes, at least 0, is {nbytes!r:.80}")
    budget = ram_budget(None if ram is None else parse_size(ram))
    found = _whole(nbytes, budget)
    if found.fits:
        return found
    machine = known_machine(Settings.from_environment().cache_dir)
    read = nbytes + UNKNOWN_MODEL_NBYTES - budget
    rate = None if machine is None else machine.ssd_bytes_s / read
    return Preview(fits=False, weight_bytes=nbytes, read_bytes=read, tok_s=rate)


def _whole(nbytes: int, budget: int) -> Preview:
    """Preview a model that cannot be streamed: it either fits in memory or cannot run."""
    if nbytes + UNKNOWN_MODEL_NBYTES <= budget:
        return Preview(fits=True, weight_bytes=nbytes)
    return Preview(
        fits=False,
        weight_bytes=nbytes,
        problem=f"does not fit: {format_bytes(nbytes)} in {format_bytes(budget)} of RAM",
    )


@dataclass(frozen=True, slots=True)
class Outlook:
    """``ceiling_tok_s`` is the highest speed with this placement at one token per pass;
    ``token_bytes`` is the size of the weights for a token; ``changes`` would help, best first. None
    or empty if unknown.
    """

    ceiling_tok_s: float | None = None
    token_bytes: int | None = None
    changes: tuple[Change, ...] = ()


def planned_outlook(plan: Forecast) -> Outlook:
    """Return the outlook of a model as planned, within the budgets that the user gave."""
    nbytes = round(plan.request.shape.pass_nbytes)
    return Outlook(plan.ceiling_tok_s, nbytes, helpful_changes(plan))


def resident_outlook(
    path: Path, *, ctx: int, format: str, device: str, ram: int | None, gpu_memory: int | None
) -> Outlook:
    """Return the outlook of a resident model.

    Raises:
        LocalrtError, OSError: its files were deleted, or the planner does not know it.
    """
    settings, shape = Settings.from_environment(), shape_of(path)
    nbytes = round(shape.pass_nbytes)
    machine = known_machine(settings.cache_dir, path)
    if machine is None or format in ("bf16", "f32"):
        return Outlook(token_bytes=nbytes)
    vram = 0
    if device.startswith("cuda"):
        here = gpu_here()
        if here is None:
            return Outlook(token_bytes=nbytes)
        # Count all of the GPU's memory, since this model already uses some of it.
        machine, _ = with_gpu(machine, Hardware(), settings.cache_dir)
        vram = gpu_memory or here[0].vram_bytes
    request = PlanRequest(
        shape=shape,
        machine=machine,
        budgets=budgets_of(machine, ram_budget(ram), vram),
        ctx=min(ctx, DEFAULT_CONTEXT),
    )
    found = planned_outlook(plan := make_forecast(request))
    return found if plan.fits else replace(found, ceiling_tok_s=None)  # it is resident
