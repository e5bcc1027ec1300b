"""Chooses the variant of the products' kernel for a GPU: by a rule, then the quickest of a few.

How the work is cut changes no result, so a case's candidates are timed when it first comes up, on
its own matrix and rows. The result is kept with the GPU's other figures: a case is measured once.
It knows cases and seconds, not how a product is launched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch

from localrt.common.errors import LocalrtError
from localrt.quant.cuda.gpu_file import GpuFile
from localrt.quant.cuda.launch import (
    CudaStopwatch,
    Stopwatch,
    gpu_file,
    is_noting,
)
from localrt.quant.formats.affine import AFFINE

CUTS = "cuts"
"""The part of a GPU's file that has the chosen variants."""

_BUDGET_S = 2.0  # of one model
_WORTH = 1.03  # least speedup over the rule: smaller ones are noise
_LONG = 1024  # tiles: the best cut for so many is the best for more
# Of rows: each has another kernel, or other candidates. The last is for prompts.
_CLASSES = (1, 4, 8, 16, 32, 64, 128, 512)
# Formats whose sums and scales need more registers than there are: with four eights of rows, and
# with two pairs of tiles.
_NARROW = ("nvfp4", "q2_k", "q4_k", "iq3_xxs")
_WIDE = ("q4_k", "q5_k", "q6_k", *(name for name, codec in AFFINE.items() if codec.bits == 6))


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work of a product is cut. Results do not depend on it.

    ``pairs`` of tiles for a warp; rows in ``groups`` of eight at once; ``parts`` blocks share the
    columns of the same rows.
    """

    pairs: int
    groups: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Case:
    """Products that share a best cut, of ``rows`` rows of records or somewhat fewer."""

    format: str
    rows: int
    tiles: int
    columns: int
    gate: bool = False
    fine: bool = False

    @classmethod
    @cache  # a launch asks each time
    def of(
        cls,
        format_: str,
        rows: int,
        tiles: int,
        columns: int,
        *,
        gate: bool = False,
        fine: bool = False,
    ) -> Case:
        """The case that a product belongs to."""
        most = next((most for most in _CLASSES if rows <= most), _CLASSES[-1])
        return cls(format_, most, min(tiles, _LONG), columns, gate, fine)


@dataclass(frozen=True, slots=True)
class Choice:
    """The quickest cut of a case, and its speedup over the rule's."""

    cut: Cut
    gain: float


class Variants:
    """The cuts of one GPU with so many ``processors``; by rule if there is no ``stopwatch``.

    Measuring takes at most ``budget_s`` seconds per loaded model, plus one case; other cases go by
    rule until the next process. ``now`` is its clock.
    """

    def __init__(
        self,
        processors: int,
        *,
        stopwatch: Stopwatch | None = None,
        file: GpuFile | None = None,
        budget_s: float = _BUDGET_S,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._processors, self._stopwatch, self._file = processors, stopwatch, file
        self._budget_s = self._left_s = budget_s
        self._now = now
        self._measured = {} if file is None else dict(_read(file, processors))
        self._cuts = {case: choice.cut for case, choice in self._measured.items()}

    @property
    def measured(self) -> Mapping[Case, Choice]:
        """The choices measured so far, by this process and others."""
        return self._measured

    def cut(self, case: Case, launch: Callable[[Cut], object]) -> Cut:
        """The best cut for ``case``; ``launch`` starts the product in which the case came up."""
        found = self._cuts.get(case)
        if found is None:
            found = best_cut(case, self._processors)
            if self._stopwatch is not None:
                if is_noting():  # a model is loaded: what will be timed is to be compiled
                    self._left_s = self._budget_s
                    for cut in candidates(case, self._processors):
                        launch(cut)
                    return found
                if not self._stopwatch.ready():
                    return found  # not to be remembered
                if self._left_s > 0:
                    found = self._quickest(self._stopwatch, case, launch) or found
            self._cuts[case] = found
        return found

    def _quickest(
        self, stopwatch: Stopwatch, case: Case, launch: Callable[[Cut], object]
    ) -> Cut | None:
        """The quickest candidate; None if the GPU has no room to measure."""
        rule, *others = candidates(case, self._processors)
        if not others:
            return rule
        launch(rule)  # is compiled in any case
        started = self._now()
        try:
            first = stopwatch.seconds(lambda: launch(rule))
            best, least = rule, first / _WORTH
            for cut in others:
                with suppress(LocalrtError):  # the GPU refuses it
                    seconds = stopwatch.seconds(lambda cut=cut: launch(cut))  # type: ignore[misc]
                    if seconds < least:
                        best, least = cut, seconds
            if best != rule:  # a GPU's clocks may have changed meanwhile
                first = min(first, stopwatch.seconds(lambda: launch(rule)))
                if first < _WORTH * least:
                    best = rule
        except torch.OutOfMemoryError:
            return None
        self._left_s -= self._now() - started
        self._measured[case] = Choice(best, 1.0 if best == rule else first / least)
        if self._file is not None:
            rows = [
                {**asdict(each), **asdict(choice.cut), "gain": round(choice.gain, 3)}
                for each, choice in self._measured.items()
            ]
            self._file.write(CUTS, {"cases": rows})
        return best


def best_cut(case: Case, processors: int) -> Cut:
    """By rule: blocks enough for a GPU of ``processors``, and no more registers than it has."""
    # Two pairs share the activations that a warp loads, but need registers, and blocks enough.
    light = case.format == "nvfp4" and case.rows == 1 and case.tiles >= 16 * processors
    blocks = -(-case.tiles // (4 if light else 2))
    parts = 1 if blocks >= processors else 2 if 2 * blocks >= processors else 4
    return Cut(pairs=2 if light else 1, groups=_most_groups(case), parts=parts)


def candidates(case: Case, processors: int) -> Iterator[Cut]:
    """The rule's cut first, then those that may be quicker."""
    rule = best_cut(case, processors)
    yield rule
    blocks = -(-case.tiles // 2)
    for groups in (1, 2, 4):
        if groups > _most_groups(case):
            break
        rows = -(-case.rows // (8 * groups))
        for parts in (1, 2, 4):
            # More blocks than a few for each processor are never too few.
            if parts > 1 and (case.tiles == _LONG or parts * blocks * rows > 8 * processors):
                break
            if (cut := Cut(1, groups, parts)) != rule:
                yield cut
    if case.rows == 1 and rule.pairs == 1 and case.format not in _WIDE:
        yield Cut(2, 1, rule.parts)


def groups_of(rows: int) -> int:
    """Rows in eights that a warp multiplies at once, at most; records have room for so many."""
    return 1 if rows <= 8 else 2 if rows <= 16 else 4


def _most_groups(case: Case) -> int:
    return min(2 if case.format in _NARROW else 4, groups_of(case.rows))


@cache
def variants(device: torch.device) -> Variants:
    """The variants of a device; by rule if it is no GPU."""
    if device.type != "cuda":
        return Variants(1)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return Variants(processors, stopwatch=CudaStopwatch(device), file=gpu_file(device))


def _read(file: GpuFile, processors: int) -> Iterator[tuple[Case, Choice]]:
    """Read the kept choices; invalid lines are ignored."""
    rows: Any = file.read(CUTS).get("cases")
    for row in rows if isinstance(rows, list) else ():
        try:
            case = Case(*(row[name] for name in Case.__slots__))
            cut = Cut(*(row[name] for name in Cut.__slots__))
            choice = Choice(cut, float(row["gain"]))
            known = cut in candidates(case, processors)
        except (KeyError, TypeError, ValueError):
            continue
        if known:
            yield case, choice
