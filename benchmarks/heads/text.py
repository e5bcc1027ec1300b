"""Writes a head's training text: the target's own words, and its features, in one file.

Many sequences share each pass. The file grows by whole sequences, so the same call continues it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.heads.prompts import Beginnings
from localrt.engine.native.engine import NativeEngine
from localrt.engine.native.session import NativeSession
from localrt.engine.sampling import Sampling, distribution, draw

Floats = npt.NDArray[np.float32]


def to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """The upper halves of float32 numbers, rounded to nearest (ties away from zero)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    halves: npt.NDArray[np.uint16] = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return halves


class SequenceFile:
    """Sequences of ``length`` tokens: ``tokens`` (L,), which of them the target chose ``written``
    (L,), and ``features`` (L, ``size``) in bfloat16.
    """

    def __init__(self, file: Path, length: int, size: int) -> None:
        self.length = length
        self._file = file
        self._record = np.dtype(
            {
                "names": ["tokens", "written", "features"],
                "formats": [("<i4", (length,)), ("?", (length,)), ("<u2", (length, size))],
            }
        )

    def __len__(self) -> int:
        size = self._file.stat().st_size if self._file.exists() else 0
        return size // self._record.itemsize

    def append(self, tokens: Sequence[int], written: Sequence[bool], features: Floats) -> None:
        """Write the next one, over what was cut off while it was written."""
        record = np.empty((), self._record)
        record["tokens"], record["written"] = tokens, written
        record["features"] = to_bfloat16(features)
        whole = len(self) * self._record.itemsize
        with self._file.open("ab") as stream:
            stream.truncate(whole)
            stream.write(record.tobytes())

    def read(self) -> npt.NDArray[np.void]:
        """All that are there, mapped into memory, as records (count,)."""
        return np.memmap(self._file, self._record, "r", shape=(len(self),))


class _Live:
    """A sequence on its way: ``pending`` are the tokens that come next."""

    def __init__(
        self, number: int, begun: Beginnings, session: NativeSession, layers: tuple[int, ...]
    ) -> None:
        self.session = session
        self.features = session.record_features(layers)
        self.written: list[bool] = []
        self._random = np.random.default_rng((number, 1))
        self._beginnings = begun(number)
        self.pending: list[int] = []
        self._begin()

    @property
    def left(self) -> int:
        """Tokens until it is complete."""
        return self.session.capacity - len(self.session.tokens)

    def _begin(self) -> None:
        beginning = next(self._beginnings)
        given = list(beginning.tokens)
        if self.pending[-1:] == given[:1]:  # an end that the target wrote itself
            given = given[1:]
        self.pending += given
        self.written += [False] * len(given)
        self._most = beginning.most
        self._sampling = Sampling(temperature=beginning.temperature, top_p=1.0, min_p=0.0)

    def choose(self, logits: Floats, eos_ids: frozenset[int]) -> None:
        """The next token, and what follows it where it is an end."""
        token = draw(distribution(logits, self._sampling), float(self._random.random()))
        self.pending = [token]
        self.written.append(True)
        self._most -= 1
        if token in eos_ids or self._most <= 0:
            self._begin()


def write_text(
    engine: NativeEngine,
    begun: Beginnings,
    sequences: SequenceFile,
    count: int,
    layers: tuple[int, ...],
    eos_ids: frozenset[int],
    together: int,
    report: Callable[[str], None],
) -> None:
    """Let the target write sequences until there are ``count``, ``together`` in a pass."""
    while (done := len(sequences)) < count:
        report(f"text: {done * sequences.length} of {count * sequences.length} tokens")
        with ExitStack() as opened:
            live = [
                _Live(
                    number,
                    begun,
                    opened.enter_context(closing(engine.session(sequences.length))),
                    layers,
                )
                for number in range(done, min(done + together, count))
            ]
            while waiting := [each for each in live if each.left]:
                _advance(engine, waiting, eos_ids)
            for each in live:
                rows = each.features.get(0, sequences.length)
                sequences.append(each.session.tokens, each.written[: sequences.length], rows)


def _advance(engine: NativeEngine, live: Sequence[_Live], eos_ids: frozenset[int]) -> None:
    """One pass: a piece of what each sequence wants computed."""
    room = engine.pass_rows // len(live)
    passed, ends = [], []
    for number, each in enumerate(live):
        piece = each.pending[: min(room, each.left)]
        each.pending = each.pending[len(piece) :]
        passed.append((each.session, piece))
        if not each.pending and each.left > len(piece):
            ends.append(number)
    for number, logits in zip(ends, engine.extend_batch(passed, wanted=ends), strict=True):
        live[number].choose(logits, eos_ids)
