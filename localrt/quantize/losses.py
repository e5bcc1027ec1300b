"""What a format costs a model, in nats a token: the divergence of its answers from the original's.

``measure_losses`` tells it for every group of matrices. Each layer is rounded alone to some three
bits, and what that does to the answers at the end is measured; all such copies of the hidden states
pass through the layers side by side, so that each layer is read once. Among a layer's groups it is
shared out by how far each moves the layer's output, and a group's other formats are compared by
their errors in what the matrices give: divergence grows with their squares.

``divergence`` is that of a finished store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from localrt.models.checkpoints import Checkpoint
from localrt.models.checkpoints.base import WeightBlock
from localrt.offload.store.pack import fingerprint, stored_infos
from localrt.quant.cpu.ops import fast_tiler
from localrt.quant.formats import CODECS, Format
from localrt.quant.formats.packed import Floats
from localrt.quant.methods import ScaleSearch, fitting_format, quantize, restore
from localrt.quantize.calibration import Calibration, HiddenStates
from localrt.quantize.layer import LayerQuantizer, common_names
from localrt.quantize.mix import (
    MIX_FORMATS,
    GroupLoss,
    LossTable,
    known_losses,
)

TRIAL_FORMAT = "q3_k"
_WINDOWS = 2
_SAMPLE_ROWS = 64  # of a matrix, on which formats are compared
_SAMPLE_TENSORS = 8  # of a group: experts are many


def model_losses(
    calibration: Calibration,
    trial: Mapping[str, Format],
    search: ScaleSearch,
    *,
    folder: Path | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> LossTable:
    """What formats cost a model: as it was kept in ``folder``, or measured, and kept there.

    ``trial`` are matrices' formats to round to, as ``TRIAL_FORMAT`` fits them. ``report`` is told
    how many layers are done.
    """
    source = calibration.source
    mark = fingerprint(source)
    if folder is not None:
        table = known_losses(folder, mark)
        if table is not None and table.calibration == calibration.digest:
            return table
    rounding = LayerQuantizer(
        source,
        calibration.config,
        stored_infos(source.tensors, trial),
        method="rtn",
        folded=0,
        tiler=fast_tiler(),
        search=search,
    )
    windows = calibration.windows[:: -(-len(calibration.windows) // _WINDOWS)]
    groups = measure_losses(calibration.states(windows), rounding, report=report)
    table = LossTable(mark, calibration.digest, sum(map(len, windows)), groups)
    if folder is not None:
        table.save(folder)
    return table


def measure_losses(
    states: HiddenStates, weights: LayerQuantizer, *, report: Callable[[int], None]
) -> tuple[GroupLoss, ...]:
    """Of every group of matrices in the layers. ``weights`` rounds to ``TRIAL_FORMAT``.

    ``states`` are at the first layer, and used up; ``report`` is told how many layers are done.
    """
    source = weights.source
    copies: list[list[Any]] = []  # of the hidden states: each met one layer that was rounded
    found: list[list[_Group]] = []
    for layer in range(weights.config.layers):
        hessians = states.observe(source, layer)
        before = states.copied()
        parts = states.load(source, layer)
        copies = [states.through(parts, each) for each in copies]
        states.hidden = states.through(parts, states.hidden)
        pieces = weights.calibrated(layer, hessians)
        members = weights.groups(layer)
        trial = {name: list(pieces(name)) for names in members.values() for name in names}
        found.append([])
        for stem, names in members.items():
            rounded = _Overlay(source, {name: trial[name] for name in names})
            moved = states.through(states.load(rounded, layer), list(map(states.ops.copy, before)))
            pairs = zip(moved, states.hidden, strict=True)
            distance = sum(states.ops.distance(one, other) for one, other in pairs)
            errors = _errors(weights, names, hessians.get(stem))
            size = sum(int(np.prod(source.tensors[name].shape)) for name in names)
            found[-1].append(_Group(common_names(names), size, distance, *errors))
        copies.append(states.through(states.load(_Overlay(source, trial), layer), before))
        report(layer + 1)
    answers = [_Divergence() for _ in copies]
    for logits in states.heads(source):
        original = logits(states.hidden)
        for answer, copy in zip(answers, copies, strict=True):
            answer.add(original, logits(copy))
    return tuple(
        GroupLoss(group.tensors, group.weights, group.nats(answer.mean * group.distance / total))
        for answer, groups in zip(answers, found, strict=True)
        for total in [sum(group.distance for group in groups) or 1.0]
        for group in groups
    )


def divergence(
    source: Checkpoint, store: Checkpoint, one: HiddenStates, other: HiddenStates
) -> float:
    """Of ``store``'s next tokens from ``source``'s, in nats: the mean over positions.

    ``one`` and ``other`` are theirs, behind the last layer.
    """
    answer = _Divergence()
    for own, changed in zip(one.heads(source), other.heads(store), strict=True):
        answer.add(own(one.hidden), changed(other.hidden))
    return answer.mean


@dataclass(frozen=True, slots=True)
class _Group:
    tensors: tuple[str, ...]
    weights: int
    distance: float  # squared, that rounding it moves the layer's output
    trial: str  # the format that it was rounded to
    errors: Mapping[str, float]  # squared, in what its matrices give, by format

    def nats(self, trial: float) -> dict[str, float]:
        """By format, where it loses ``trial`` in the format that was tried."""
        tried = self.errors[self.trial]
        return {
            name: trial * error / tried if tried else 0.0 for name, error in self.errors.items()
        }


class _Overlay:
    """``base`` with the ``blocks`` of some matrices instead of its own."""

    def __init__(self, base: Checkpoint, blocks: Mapping[str, Sequence[WeightBlock]]) -> None:
        self._base, self._blocks = base, blocks
        self.path, self.architecture, self.tensors = base.path, base.architecture, base.tensors
        self.read = base.read

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        if name in self._blocks:
            return iter(self._blocks[name])
        return self._base.blocks(name, max_bytes)


def _errors(
    weights: LayerQuantizer, names: Sequence[str], hessian: Floats | None
) -> tuple[str, dict[str, float]]:
    """The format that was tried, and each format's squared error in what the inputs with
    ``hessian`` give, on a sample of rows.
    """
    some = [next(weights.rows(name)) for name in names[:: -(-len(names) // _SAMPLE_TENSORS)]]
    sample = np.concatenate([each[:: -(-len(each) // _SAMPLE_ROWS)] for each in some])
    columns = sample.shape[1]
    errors: dict[str, float] = {}
    for name in MIX_FORMATS:
        format_ = fitting_format(CODECS[name].format, columns)
        if format_.name in errors or format_.name not in CODECS:
            errors.setdefault(format_.name, 0.0)
            continue
        off = restore(quantize(sample, format_, hessian=hessian, name=names[0])) - sample
        given = off if hessian is None else off @ hessian
        errors[format_.name] = float(np.einsum("rc,rc->", given, off, dtype=np.float64))
    return fitting_format(CODECS[TRIAL_FORMAT].format, columns).name, errors


class _Divergence:
    """Of answers b from answers a, each row's, out of logits that come in pieces of the vocabulary.

    What the largest logit so far is taken from keeps exponentials in range.
    """

    def __init__(self) -> None:
        self._a, self._b = _Exponentials(), _Exponentials()
        self._apart: Any = 0.0  # sums of exp(a) (a - b)

    def add(self, a: Floats, b: Floats) -> None:
        """A piece (rows, n) of both."""
        weight, shrunk = self._a.add(a)
        self._apart = self._apart * shrunk + np.einsum("rc,rc->r", weight, a - b, dtype=np.float64)
        self._b.add(b)

    @property
    def mean(self) -> float:
        """In nats."""
        rows = self._apart / self._a.sums - self._a.logarithm + self._b.logarithm
        return max(0.0, float(rows.mean()))


class _Exponentials:
    """Sums of exp(x - largest) of each row."""

    def __init__(self) -> None:
        self._largest: Any = -np.inf
        self.sums: Any = 0.0

    def add(self, x: Floats) -> tuple[Floats, Any]:
        """exp(x - largest), and what earlier sums shrink by."""
        largest = np.maximum(self._largest, x.max(axis=1))
        shrunk = np.exp(self._largest - largest)
        powers: Floats = np.exp(x - largest[:, None])
        self.sums = self.sums * shrunk + powers.sum(axis=1, dtype=np.float64)
        self._largest = largest
        return powers, shrunk

    @property
    def logarithm(self) -> Any:
        """Of each row's whole sum."""
        return self._largest + np.log(self.sums)
