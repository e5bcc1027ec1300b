"""Measures a format's loss, in nats per token: how far its answers diverge from the original's.

``measure_losses`` does so for every group of matrices. Each layer alone is rounded to some three
bits, and the divergence of the final logits is measured; the hidden states of all these copies pass
through the layers together, so that each layer is read once. A layer's loss is divided among its
groups by how far each moves the layer's output, and scaled to other formats by the squared errors
of the matrices' outputs, since divergence grows with them.

``divergence`` measures a finished store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints import Checkpoint
from localrt.models.tensor_source import WeightBlock
from localrt.offload.store.pack import fingerprint, stored_infos
from localrt.planning.mix import MIX_FORMATS, GroupLoss, LossTable, known_losses
from localrt.quant.formats import CODECS, Format
from localrt.quant.formats.packed import Floats
from localrt.quant.methods import ScaleSearch, fitting_format, quantize, restore
from localrt.quantize.calibration import Calibration, HiddenStates
from localrt.quantize.layer import LayerQuantizer, common_names

if TYPE_CHECKING:
    from localrt.quant.reference.calibration import Tensor

TRIAL_FORMAT = "q3_k"
_WINDOWS = 2
_SAMPLE_ROWS = 64  # rows of a matrix for comparing formats
_SAMPLE_TENSORS = 8  # matrices of a group to compare: there may be many experts


def model_losses(
    calibration: Calibration,
    trial: Mapping[str, Format],
    search: ScaleSearch,
    *,
    folder: Path | None = None,
    report: Callable[[int], None] = lambda done: None,
) -> LossTable:
    """Return the model's loss table: read it from ``folder``, or measure it and save it there.

    ``trial`` has the format to round each matrix to: ``TRIAL_FORMAT`` or one that fits its rows.
    ``report`` is called with the number of layers done.
    """
    source = calibration.source
    mark = fingerprint(source)
    if folder is not None:
        table = known_losses(folder, mark)
        if table is not None and table.calibration == calibration.digest:
            return table
    infos = stored_infos(source.tensors, trial)
    rounding = LayerQuantizer(source, calibration.config, infos, search)
    windows = calibration.windows[:: -(-len(calibration.windows) // _WINDOWS)]
    groups = measure_losses(calibration.states(windows), rounding, report=report)
    table = LossTable(mark, calibration.digest, sum(map(len, windows)), groups)
    if folder is not None:
        table.save(folder)
    return table


def measure_losses(
    states: HiddenStates, weights: LayerQuantizer, *, report: Callable[[int], None]
) -> tuple[GroupLoss, ...]:
    """Measure the loss of every group of matrices. ``weights`` rounds to ``TRIAL_FORMAT``.

    ``states`` are before the first layer and get overwritten; ``report`` gets the layers done.
    """
    source = weights.source
    copies: list[list[Tensor]] = []  # hidden states, each after one rounded layer
    found: list[list[_Group]] = []
    for layer in range(weights.layers):
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
    """Mean divergence of ``store``'s next tokens from ``source``'s, in nats per position.

    ``one`` and ``other`` are the hidden states of source and store after the last layer.
    """
    answer = _Divergence()
    for own, changed in zip(one.heads(source), other.heads(store), strict=True):
        answer.add(own(one.hidden), changed(other.hidden))
    return answer.mean


@dataclass(frozen=True, slots=True)
class _Group:
    tensors: tuple[str, ...]
    weights: int
    distance: float  # squared distance by which rounding the group moves the layer's output
    trial: str  # the format that it was rounded to
    errors: Mapping[str, float]  # squared errors of its matrices' outputs, by format

    def nats(self, trial: float) -> dict[str, float]:
        """The group's loss by format, given its loss ``trial`` in the trial format."""
        tried = self.errors[self.trial]
        return {
            name: trial * error / tried if tried else 0.0 for name, error in self.errors.items()
        }


class _Overlay:
    """The checkpoint ``base`` with some matrices replaced by ``blocks``."""

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
    """Return the trial format's name, and each format's squared error of the group's outputs, for
    inputs with this ``hessian``, on a sample of rows.
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
    """The divergence of logits b from logits a, which come in parts of the vocabulary.

    Subtracting the largest logit so far keeps exponentials in range.
    """

    def __init__(self) -> None:
        self._a, self._b = _Exponentials(), _Exponentials()
        self._apart: npt.NDArray[np.float64] | float = 0.0  # sums of exp(a) (a - b)

    def add(self, a: Floats, b: Floats) -> None:
        """Add a part (rows, n) of both logits."""
        weight, shrunk = self._a.add(a)
        self._apart = self._apart * shrunk + np.einsum("rc,rc->r", weight, a - b, dtype=np.float64)
        self._b.add(b)

    @property
    def mean(self) -> float:
        """The mean over rows, in nats."""
        rows = self._apart / self._a.sums - self._a.logarithm + self._b.logarithm
        return max(0.0, float(rows.mean()))


class _Exponentials:
    """Each row's sum of exp(x - largest), computed part by part."""

    def __init__(self) -> None:
        self._largest: npt.NDArray[np.float64] | float = -np.inf
        self.sums: npt.NDArray[np.float64] | float = 0.0

    def add(self, x: Floats) -> tuple[Floats, npt.NDArray[np.float64]]:
        """Return exp(x - largest), and the factor by which earlier sums shrink."""
        largest = np.maximum(self._largest, x.max(axis=1))
        shrunk = np.exp(self._largest - largest)
        powers: Floats = np.exp(x - largest[:, None])
        self.sums = self.sums * shrunk + powers.sum(axis=1, dtype=np.float64)
        self._largest = largest
        return powers, shrunk

    @property
    def logarithm(self) -> npt.NDArray[np.float64]:
        """The logarithm of each row's sum of exp(x)."""
        return self._largest + np.log(self.sums)
