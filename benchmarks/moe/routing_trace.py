"""Routing traces: which experts every token of a run was sent to, and with what scores.

A trace is what cache policies are compared on, since it does not depend on them. It holds ranks a
little below the chosen ones too: they are what score-based policies go by. A file is one ``.npz``;
reading one checks everything. It knows no weights, no cache and no clock.
"""

from __future__ import annotations

import itertools
import json
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from localrt.errors import OptionError, StorageError
from localrt.files import atomic_write

__all__ = ["RoutingTrace", "Step", "TraceHeader", "TraceRecorder"]

_VERSION = 1
_DAMAGED = (OSError, ValueError, EOFError, LookupError, TypeError, AttributeError,
            zipfile.BadZipFile, zlib.error, NotImplementedError, MemoryError)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """The model that a trace is of.

    ``layers`` counts the layers that have experts, numbered from 0 in the trace whatever dense
    layers lie between them; ``used`` of ``count`` experts see a token. ``fingerprint`` is the
    model's own, as its opener gives it.
    """

    model: str
    architecture: str
    fingerprint: str
    layers: int
    count: int
    used: int

    def __post_init__(self) -> None:
        if not 1 <= self.used <= self.count < 1 << 15:
            raise ValueError(f"used must be 1 to count, is {self.used} of {self.count} experts")
        if self.layers < 1:
            raise ValueError(f"layers must be at least 1, is {self.layers}")

    @property
    def width(self) -> int:
        """Ranks that are kept of a token: twice the chosen ones, as far as there are experts."""
        return min(2 * self.used, self.count)


class Step(NamedTuple):
    """What one layer asked for in one pass: best first, the first ``used`` columns are chosen."""

    number: int  # of the pass, from 0
    layer: int
    experts: NDArray[np.int16]  # (rows, width)
    scores: NDArray[np.float16]  # (rows, width)


@dataclass(frozen=True, slots=True, eq=False)
class RoutingTrace:
    """Routing of ``tokens`` tokens: who was asked, with what score, in which pass.

    ``experts`` and ``scores`` are (tokens, layers, width), best first; ``pass_of`` (tokens,) does
    not descend. A pass of one token is decoding, one of several is a prompt's.

    Raises:
        ValueError: the arrays do not fit together.
    """

    header: TraceHeader
    experts: NDArray[np.int16]
    scores: NDArray[np.float16]
    pass_of: NDArray[np.int32]

    def __post_init__(self) -> None:
        shape = (len(self.pass_of), self.header.layers, self.header.width)
        kinds = {"experts": np.int16, "scores": np.float16, "pass_of": np.int32}
        for name, kind in kinds.items():
            if (found := getattr(self, name).dtype) != kind:
                raise ValueError(f"{name} must be {np.dtype(kind)}, is {found}")
        if self.pass_of.ndim != 1 or self.experts.shape != shape or self.scores.shape != shape:
            raise ValueError(
                f"experts {self.experts.shape} and scores {self.scores.shape} must both be {shape}"
            )
        if self.experts.size:
            low, high = int(self.experts.min()), int(self.experts.max())
            if low < 0 or high >= self.header.count:
                raise ValueError(f"experts must be 0 to {self.header.count - 1}, found {low, high}")
            ranked = np.sort(self.experts, axis=-1)
            if bool((ranked[..., 1:] == ranked[..., :-1]).any()):
                raise ValueError("a token names an expert twice")
        if not bool(np.isfinite(self.scores).all()):
            raise ValueError("scores must be finite")
        if bool((np.diff(self.pass_of) < 0).any()):
            raise ValueError("passes must not descend")

    @property
    def tokens(self) -> int:
        """Tokens recorded."""
        return len(self.pass_of)

    def passes(self) -> list[slice]:
        """The tokens of each pass, in order."""
        edges = np.flatnonzero(np.diff(self.pass_of)) + 1
        bounds = [0, *edges.tolist(), self.tokens]
        return [slice(a, b) for a, b in itertools.pairwise(bounds) if b > a]

    def steps(self) -> Iterator[Step]:
        """Every layer of every pass, in the order in which they were asked."""
        for number, tokens in enumerate(self.passes()):
            for layer in range(self.header.layers):
                yield Step(number, layer, self.experts[tokens, layer], self.scores[tokens, layer])

    def decoding(self) -> RoutingTrace:
        """The passes of one token alone."""
        kept = np.zeros(self.tokens, np.bool_)
        for tokens in self.passes():
            kept[tokens] = tokens.stop - tokens.start == 1
        return RoutingTrace(self.header, self.experts[kept], self.scores[kept], self.pass_of[kept])

    # -- files -------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write one ``.npz``; ``path`` holds the whole of it or what it held before.

        Raises:
            StorageError: it cannot be written.
        """
        header = json.dumps({"localrt_trace": _VERSION, **asdict(self.header)})
        try:
            with atomic_write(path) as file:
                np.savez_compressed(
                    file,
                    header=np.array(header),
                    experts=self.experts,
                    scores=self.scores,
                    pass_of=self.pass_of,
                )
        except OSError as error:
            reason = error.strerror or error
            raise StorageError(f"the trace cannot be written to {path}: {reason}") from error

    @classmethod
    def load(cls, path: Path) -> RoutingTrace:
        """Read what ``save`` wrote.

        Raises:
            OptionError: there is no such file, it is damaged, or it is no trace.
        """
        if not path.is_file():
            raise OptionError(f"there is no trace {path}")
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as stored:
                header = json.loads(str(stored["header"]))
                arrays = [stored[name] for name in ("experts", "scores", "pass_of")]
            version = header.pop("localrt_trace")
            if version != _VERSION:
                raise ValueError(f"it is of version {version}, not {_VERSION}")
            return cls(TraceHeader(**header), *arrays)
        except _DAMAGED as error:
            raise OptionError(
                f"{path} is not a routing trace, or damaged ({error}): "
                "benchmarks.moe.record_trace writes one"
            ) from error


class TraceRecorder:
    """Collects a run's routing, one layer and pass at a time, at the cost of two small copies.

    Not thread-safe: the thread that runs the passes adds to it.
    """

    def __init__(self, header: TraceHeader) -> None:
        self.header = header
        self._passes: dict[int, dict[int, tuple[NDArray[np.int16], NDArray[np.float16]]]] = {}

    def add(
        self, pass_number: int, layer: int, experts: NDArray[Any], scores: NDArray[Any]
    ) -> None:
        """Remember one layer's routing: (rows, at least the header's width), best first.

        ``pass_number`` ascends over the run; ``layer`` counts layers with experts. A layer that is
        added again replaces what it was (a pass begun anew).
        """
        width = self.header.width
        if not 0 <= layer < self.header.layers:
            raise ValueError(f"layer must be 0 to {self.header.layers - 1}, is {layer}")
        if experts.ndim != 2 or experts.shape[1] < width or scores.shape != experts.shape:
            raise ValueError(
                f"experts {experts.shape} and scores {scores.shape} must have {width} columns"
            )
        kept = experts[:, :width].astype(np.int16), scores[:, :width].astype(np.float16)
        self._passes.setdefault(pass_number, {})[layer] = kept

    def finish(self) -> RoutingTrace:
        """What was recorded; passes that did not reach every layer are left out."""
        layers, width = self.header.layers, self.header.width
        experts, scores, pass_of = [], [], []
        for number in sorted(self._passes):
            found = self._passes[number]
            if len(found) < layers or len({len(kept[0]) for kept in found.values()}) > 1:
                continue
            experts.append(np.stack([found[layer][0] for layer in range(layers)], axis=1))
            scores.append(np.stack([found[layer][1] for layer in range(layers)], axis=1))
            pass_of.append(np.full(len(experts[-1]), number, np.int32))
        if not experts:
            nothing = (0, layers, width)
            empty = np.empty(nothing, np.int16), np.empty(nothing, np.float16)
            return RoutingTrace(self.header, *empty, np.empty(0, np.int32))
        return RoutingTrace(
            self.header, np.concatenate(experts), np.concatenate(scores), np.concatenate(pass_of)
        )
