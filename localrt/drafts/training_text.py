"""The text that a draft head learns from, with the target's hidden states, in one file.

The target computes a given text as it is, or writes its own: half of the sequences are
conversations that it invents (the chat template's beginning of a user's turn, where the target
continues as the user, and then answers), the others are pieces of a given text that it continues.
Many share each pass. What a sequence says follows from its number and the seed alone, wherever a
run was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import cycle
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localrt.engine.batch.batch import kv_room
from localrt.engine.native.engine import NativeEngine
from localrt.engine.native.session import NativeSession
from localrt.engine.sampling import Sampling, distribution, draw
from localrt.errors import OptionError, StorageError
from localrt.files import private_file
from localrt.loading.parts import LoadedModel
from localrt.models.templates.chat_template import encode_messages
from localrt.speculative.ngram import common_length

__all__ = [
    "Report",
    "SequenceFile",
    "beginnings",
    "chat_frame",
    "pieces",
    "to_bfloat16",
    "write_text",
]

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
Halves = npt.NDArray[np.uint16]
Report = Callable[[str, int, int, str], None]  # stage, tokens, in all, detail; raises to stop
# Token ids around a user's message: up to it, and from its end to the answer's beginning.
Frame = tuple[Sequence[int], Sequence[int]]
# Of a sequence, by its number: what it begins with, and goes on with each time the target ends.
Parts = Callable[[int], Iterator[Sequence[int]]]

_TOGETHER = 64  # sequences of a pass, where memory holds their caches
_PIECE = (16, 112)  # tokens of a given text that are continued
_TEMPERATURES = (0.3, 0.6, 0.9)


def to_bfloat16(values: Floats) -> Halves:
    """The upper halves of float32 numbers, rounded to nearest (ties away from zero)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    halves: Halves = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return halves


class SequenceFile:
    """``count`` sequences of ``length`` tokens, with hidden states (length, ``hidden``) each.

    They are appended in order; what was cut off while it was written is written over.
    """

    def __init__(self, file: Path, count: int, length: int, hidden: int) -> None:
        self.count = count
        self.length = length
        self._file = file
        self._record = np.dtype(
            [("tokens", "<i4", (length,)), ("features", "<u2", (length, hidden))]
        )

    @property
    def written(self) -> int:
        """How many are there."""
        return self._file.stat().st_size // self._record.itemsize if self._file.exists() else 0

    def append(self, tokens: Sequence[int], features: Floats) -> None:
        """Write the next one.

        Raises:
            StorageError: the disk is full or fails.
        """
        record = np.empty((), self._record)
        record["tokens"], record["features"] = tokens, to_bfloat16(features)
        whole = self.written * self._record.itemsize
        try:
            private_file(self._file)
            with self._file.open("ab") as stream:
                stream.truncate(whole)
                stream.write(record.tobytes())
        except OSError as error:
            raise StorageError(f"{self._file}: {error.strerror or error}") from error

    def tokens(self) -> Tokens:
        """All tokens, (count, length)."""
        return np.array(self._open()["tokens"])

    def read(self, numbers: Sequence[int]) -> tuple[Tokens, Halves]:
        """Some sequences: tokens (n, length), and features (n, length, hidden) in bfloat16."""
        records = self._open()[list(numbers)]
        return np.array(records["tokens"]), np.array(records["features"])

    def _open(self) -> npt.NDArray[np.void]:
        return np.memmap(self._file, self._record, "r", shape=(self.count,))


def chat_frame(loaded: LoadedModel) -> Frame | None:
    """The frame of a model's chat template, if it has one."""
    if loaded.tokenizer is None:
        return None
    first, second = (
        encode_messages(loaded.tokenizer, loaded.template, [{"role": "user", "content": content}])
        for content in ("0", "x")
    )
    before = common_length(first, second)
    after = common_length(first[::-1], second[::-1])
    told_apart = before + after < min(len(first), len(second))
    return (first[:before], first[len(first) - after :]) if told_apart else None


def beginnings(text: Sequence[int], frame: Frame | None, seed: int) -> Parts:
    """Pieces of ``text``, and conversations in ``frame``: half of the sequences are either.

    Raises:
        OptionError: there is neither a text nor a frame.
    """
    if not text and frame is None:
        raise OptionError("the model has no chat template to write from: give it a --text")

    def parts(number: int) -> Iterator[Sequence[int]]:
        if frame is not None and (number % 2 == 0 or not text):
            yield from cycle(frame)
        random = np.random.default_rng((seed, number))
        while True:
            start = int(random.integers(len(text)))
            yield text[start : start + int(random.integers(*_PIECE))]

    return parts


def pieces(text: Sequence[int], length: int) -> Parts:
    """The text as it is, ``length`` tokens for each sequence."""
    return lambda number: iter([text[number * length : (number + 1) * length]])


def write_text(
    engine: NativeEngine,
    parts: Parts,
    sequences: SequenceFile,
    eos_ids: frozenset[int],
    seed: int,
    report: Report,
) -> None:
    """Let the target write what is missing, many sequences at a time, and record its features."""
    length, count = sequences.length, sequences.count
    room = kv_room(engine, ram=None, gpu_memory=None) // engine.kv_nbytes(length)
    together = max(1, min(_TOGETHER, engine.pass_rows, room))
    while (done := sequences.written) < count:
        with ExitStack() as opened:
            live = [
                _Live(
                    parts(number),
                    opened.enter_context(closing(engine.session(length))),
                    np.random.default_rng((number, seed)),
                )
                for number in range(done, min(done + together, count))
            ]
            while waiting := [each for each in live if each.left]:
                written = sum(length - each.left for each in live)
                report("write", done * length + written, count * length, "")
                _advance(engine, waiting, eos_ids)
            for each in live:
                sequences.append(each.session.tokens, each.features.get(0, length))


class _Live:
    """A sequence on its way: ``pending`` are the tokens that come next."""

    def __init__(
        self, parts: Iterator[Sequence[int]], session: NativeSession, random: np.random.Generator
    ) -> None:
        self.session = session
        self.features = session.record_features()
        self._parts = parts
        self._random = random
        temperature = float(random.choice(_TEMPERATURES))
        self._sampling = Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        self.pending = list(next(self._parts))

    @property
    def left(self) -> int:
        """Tokens until it is complete."""
        return self.session.capacity - len(self.session.tokens)

    def choose(self, logits: Floats, eos_ids: frozenset[int]) -> None:
        """The next token, and what follows it where it is an end."""
        token = draw(distribution(logits, self._sampling), float(self._random.random()))
        self.pending = [token]
        if token in eos_ids:
            following = next(self._parts)
            self.pending += following[1:] if following[0] == token else following


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
