"""Recommends one of a repository's GGUF files: the largest that fits in GPU memory, else the best
trade-off between quality and speed.

Sizes are known before a download; speeds are estimated from the model's published config, or from
the size alone. No weight is read and nothing is measured.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.common.formatting import format_bytes, parse_size
from localrt.common.settings import DEFAULT_CONTEXT, Settings
from localrt.hub.files import DEFAULT_LABEL
from localrt.hub.known_models import KnownModel, repo_thinks
from localrt.hub.names import HubRef
from localrt.hub.resolving import Offer
from localrt.offload.account import UNKNOWN_MODEL_NBYTES, Budgets
from localrt.offload.memory import ram_budget
from localrt.offload.placement import PlacedUnit
from localrt.offload.shapes import ModelShape, aligned
from localrt.planning.advice import LEAST_GAIN
from localrt.planning.forecast import READING_TOK_S, Change, PlanRequest, Prediction, speed
from localrt.planning.machine import MachineProfile
from localrt.planning.measure import budgets_of, machine_on_device
from localrt.planning.search import estimate, whole_nbytes
from localrt.planning.shapes import shape_from_config

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
_FORMATS = {2: "q2_k", 3: "q3_k", 4: "int4-g32", 5: "int5-g32", 6: "int6-g32", 8: "int8-g32"}
# Bits per weight of the files that GGUF repositories usually have.
_USUAL_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "Q3_K_M": 3.9}


@dataclass(frozen=True, slots=True)
class Recommendation:
    """``name`` is the file's name, ``tok_s`` is None if unknown, ``reason`` is one line.

    ``expected`` is None if the model's config is unknown or the file does not fit.
    """

    name: str
    tok_s: float | None
    reason: str
    expected: Prediction | None = None


def recommend(
    offer: Offer,
    settings: Settings,
    *,
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
    device: str = "auto",
) -> Recommendation:
    """Recommend the best file of 3 to 8 bits; if none reaches reading speed, one of 4 bits.

    ``ram``, ``gpu_memory`` and ``device`` are those of ``load``.
    """
    machine, vram = machine_on_device(settings.hub_cache, settings, device, gpu_memory)
    budget = ram_budget(None if ram is None else parse_size(ram))
    return recommend_on(offer, machine, budgets_of(machine, budget, vram))


def recommend_on(
    offer: Offer, machine: MachineProfile, budgets: Budgets, *, ctx: int | None = None
) -> Recommendation:
    """Recommend as ``recommend`` does, for a given machine and budgets and ``ctx`` tokens (None:
    4,096).
    """
    names = _candidates(offer.sizes)
    shape = _outline_of(offer)
    where = " on a typical machine" if machine.sources.get("kernels") == "typical" else ""
    expected: dict[str, Prediction] = {}
    if shape is None:
        rates = {name: _rate_of_size(offer.sizes[name], machine, budgets) for name in names}
        quick = (name for name in names if rates[name] >= READING_TOK_S)
        best = next(quick, None)
        if best is not None and rates[best] == math.inf:
            why = f"the largest of up to {_MOST_BITS} bits that fits the memory here"
            return Recommendation(best, None, why)
    else:
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
        rates = {name: found.tok_s for name, found in expected.items()}
        nbytes = whole_nbytes(shape)
        bits = {name: _PLANNED_BITS * offer.sizes[name] / nbytes for name in names}
        best = _best(expected, bits, budgets)
    name = best or next((each for each in reversed(names) if (_bits(each) or 0) >= 4), names[-1])
    if best is None and DEFAULT_LABEL in names and _bits(name) == 4:
        name = DEFAULT_LABEL
    if not rates.get(name):
        return Recommendation(name, None, "none of its files fits the memory here")
    found = expected.get(name)
    reads = ", reading the SSD for every token" if found is not None and found.read else ""
    about = f"about {speed(rates[name])}{where}{reads}"
    if best is None:
        slow = f"none of its files reaches reading speed ({READING_TOK_S:.0f} tok/s)"
        return Recommendation(name, rates[name], f"{slow}; this one does {about}", found)
    why = f"the largest of up to {_MOST_BITS} bits, {about}"
    if expected:
        why = _why(name, names, expected, about)
    return Recommendation(name, rates[name], why, found)


def _best(
    expected: Mapping[str, Prediction], bits: Mapping[str, float], budgets: Budgets
) -> str | None:
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
        them those that leave room, then order is by value.
        """
        is_good = name in good and expected[name].level == "good"
        roomy = is_good and expected[name].has_room(budgets.ram + budgets.vram)
        return is_good, roomy, value(name)

    return max(worth, key=rank) if quick and worth else None


def _outline_of(offer: Offer) -> ModelShape | None:
    """Return the model's shape in one format, with one expert per layer; None if its config is
    unknown or unsupported.
    """
    if offer.config is not None:
        format = None if as_published(offer) else _PLANNED
        with suppress(UnsupportedModelError, CheckpointError):
            return shape_from_config(offer.config, name="model", format=format, experts=1)
    return None


def _rate_of_size(nbytes: int, machine: MachineProfile, budgets: Budgets) -> float:
    """Return the tokens per second of a dense model from its size alone: infinite if it fits;
    otherwise each token reads the rest from disk.
    """
    missing = nbytes + UNKNOWN_MODEL_NBYTES - budgets.ram
    return math.inf if missing <= 0 else machine.ssd_bytes_s / missing


def usual_offer(model: KnownModel) -> Offer:
    """Return the usual files of a model's repository, with estimated sizes.

    A model that is published quantized has one file, named after its format.
    """
    config, weights = model.config(), model.parameters * 1e9
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        name = str(quantized.get("quant_method", "")).upper()
        nbytes = whole_nbytes(shape_from_config(config, name=name, experts=1))
        return Offer(model.repo, {name: nbytes}, config)
    sizes = {name: round(weights * bits / 8) for name, bits in _USUAL_BITS.items()}
    return Offer(model.repo, sizes, config)


def only(offer: Offer, file: str) -> Offer:
    """Return the offer of one usual ``file`` alone, with an estimated size if it has others."""
    if as_published(offer):
        return offer
    label = next((name for name in offer.sizes if name in file.upper()), file)
    whole = offer.sizes["Q8_0"] / _USUAL_BITS["Q8_0"]
    nbytes = offer.sizes.get(label) or round(whole * ((_bits(file) or _GOOD_BITS) + _BESIDE))
    return replace(offer, sizes={label: nbytes})


def other_files(
    offer: Offer, chosen: str, request: PlanRequest, tok_s: float
) -> tuple[Change, ...]:
    """Return the next two smaller files that are faster than ``chosen`` with its ``tok_s``."""
    now = estimate(request)
    names = _candidates(offer.sizes)
    if now is None or chosen not in names:
        return ()
    found = []
    for name in names[names.index(chosen) + 1 :]:
        shape = sized(request.shape, name, offer.sizes[name])
        expected = estimate(replace(request, shape=shape))
        gain = 0.0 if expected is None else expected.tok_s / now.tok_s
        if gain > LEAST_GAIN:
            what = f"{name} instead of {chosen}, {format_bytes(offer.sizes[name])}"
            file = str(HubRef(offer.repo, variant=name))
            found.append(Change(what, gain * tok_s, gain, (FILE, file)))
    return tuple(found[:2])


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


def as_published(offer: Offer) -> bool:
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
