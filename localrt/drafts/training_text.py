"""The text that a draft head learns from, with the target's hidden states, in one file.

The target computes a given text as it is, or writes its own: half of the sequences are
conversations that it invents (the chat template's beginning of a user's turn, where the target
continues as the user, and then answers), the others are pieces of a given text that it continues.
Many share each pass. What a sequence says follows from its number and the seed alone, wherever a
run was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localrt.engine.batch.batch import kv_room
from localrt.engine.native.engine import NativeEngine, NativeSession
from localrt.engine.sampling import Sampling, distribution, draw
from localrt.errors import OptionError, StorageError
from localrt.loading.parts import LoadedModel
from localrt.models.templates.chat_template import encode_messages
from localrt.speculative.ngram import common_length

__all__ = ["Prompt", "Prompts", "SequenceFile", "given_text", "to_bfloat16", "write_text"]

Floats = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]
Halves = npt.NDArray[np.uint16]
Report = Callable[[str, int, int], None]  # stage, tokens, tokens in all; raises to stop

_TOGETHER = 64  # sequences of a pass, where memory holds their caches
_PIECE = (16, 112)  # tokens of a given text that are continued
_TEMPERATURES = (0.3, 0.6, 0.9)
_USER_TEMPERATURE = 0.9  # an invented user should vary


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


@dataclass(frozen=True, slots=True)
class Prompts:
    """Beginnings of sequences: pieces of ``text`` from ``starts`` on, and conversations.

    ``before`` and ``after`` are the token ids around a user's message: up to it, and from its end
    to the answer's beginning; None without a template.

    Raises:
        OptionError: there is neither a text nor a chat template to begin with.
    """

    text: Sequence[int]
    starts: Sequence[int]
    frame: tuple[Sequence[int], Sequence[int]] | None
    seed: int

    def __post_init__(self) -> None:
        if not self.starts and self.frame is None:
            raise OptionError("the model has no chat template to write from: give it a --text")

    @classmethod
    def of(cls, parts: LoadedModel, text: Sequence[int], seed: int) -> Prompts:
        """For a model, with the token ids of a text, pieces of which begin with a line of it."""
        if parts.tokenizer is None:
            return cls(text, [], None, seed)
        words = {token: parts.tokenizer.token_bytes(token) for token in set(text)}
        starts = [
            at
            for at, token in enumerate(text)
            if not at or (words[text[at - 1]].endswith(b"\n") and words[token][:1].strip())
        ]
        first, second = (
            encode_messages(parts.tokenizer, parts.template, [{"role": "user", "content": content}])
            for content in ("0", "x")
        )
        before = common_length(first, second)
        after = common_length(first[::-1], second[::-1])
        told_apart = before + after < min(len(first), len(second))
        frame = (first[:before], first[len(first) - after :]) if told_apart else None
        return cls(text, starts, frame, seed)


class Prompt:
    """What sequence ``number`` begins with, and what follows where the target ends something."""

    def __init__(self, prompts: Prompts, number: int) -> None:
        self._prompts = prompts
        self._frame = prompts.frame if number % 2 == 0 or not prompts.starts else None
        self._answering = False
        self._random = np.random.default_rng((prompts.seed, number))
        self._temperature = float(self._random.choice(_TEMPERATURES))

    def first(self) -> list[int]:
        """Its first tokens, at least one."""
        self._answering = False
        if self._frame is not None:
            return list(self._frame[0])
        text, starts = self._prompts.text, self._prompts.starts
        start = starts[int(self._random.integers(len(starts)))]
        return list(text[start : start + int(self._random.integers(*_PIECE))])

    def ended(self, token: int) -> list[int]:
        """What follows after the target has ended its text with ``token``, which comes first."""
        if self._frame is None or self._answering:
            return [token, *self.first()]
        self._answering = True
        after = list(self._frame[1])
        return after if after[:1] == [token] else [token, *after]

    def choose(self, logits: Floats) -> int:
        """The next token."""
        user = self._frame is not None and not self._answering
        temperature = _USER_TEMPERATURE if user else self._temperature
        sampling = Sampling(temperature=temperature, top_k=0, top_p=1.0, min_p=0.0)
        return draw(distribution(logits, sampling), float(self._random.random()))


def given_text(
    engine: NativeEngine, ids: Sequence[int], sequences: SequenceFile, report: Report
) -> None:
    """Compute what is missing of the text ``ids``, window by window."""
    length = sequences.length
    for number in range(sequences.written, sequences.count):
        report("write", number * length, sequences.count * length)
        with closing(engine.session(length)) as session:
            assert isinstance(session, NativeSession), "the engine's own"
            features = session.record_features()
            session.extend(ids[number * length : (number + 1) * length])
            sequences.append(session.tokens, features.get(0, length))


def write_text(
    engine: NativeEngine,
    parts: LoadedModel,
    prompts: Prompts,
    sequences: SequenceFile,
    report: Report,
) -> None:
    """Let the target write what is missing, many sequences at a time."""
    length, count = sequences.length, sequences.count
    room = kv_room(engine, ram=None, gpu_memory=None) // engine.kv_nbytes(length)
    together = max(1, min(_TOGETHER, engine.pass_rows, room))
    while (done := sequences.written) < count:
        numbers = range(done, min(done + together, count))
        with ExitStack() as opened:
            live = []
            for number in numbers:
                session = opened.enter_context(closing(engine.session(length)))
                live.append(_Live(Prompt(prompts, number), session))
            waiting = list(live)
            while waiting:
                _advance(engine, waiting, parts.eos_ids)
                waiting = [each for each in waiting if each.left]
                here = sum(length - each.left for each in live)
                report("write", done * length + here, count * length)
            for each in live:
                sequences.append(each.session.tokens, each.features.get(0, length))


class _Live:
    """A sequence on its way: ``pending`` are the tokens that come next."""

    def __init__(self, prompt: Prompt, session: NativeSession) -> None:
        self.prompt = prompt
        self.session = session
        self.features = session.record_features()
        self.pending = prompt.first()

    @property
    def left(self) -> int:
        """Tokens until it is complete."""
        return self.session.capacity - len(self.session.tokens)


def _advance(engine: NativeEngine, live: Sequence[_Live], eos_ids: frozenset[int]) -> None:
    """One pass: a piece of what each sequence wants computed, as far as rows go."""
    room = engine.pass_rows
    pieces: list[tuple[_Live, list[int]]] = []
    for each in live:
        piece = each.pending[: min(room, each.left)]
        each.pending = each.pending[len(piece) :]
        room -= len(piece)
        if piece:
            pieces.append((each, piece))
    ends = [n for n, (each, _) in enumerate(pieces) if not each.pending]
    passed = [(each.session, piece) for each, piece in pieces]
    for end, logits in zip(ends, engine.extend_batch(passed, wanted=ends), strict=True):
        each = pieces[end][0]
        token = each.prompt.choose(logits)
        each.pending = each.prompt.ended(token) if token in eos_ids else [token]
