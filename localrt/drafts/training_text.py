"""The target writes the text that a draft head learns from, with its hidden states.

Half of the sequences are conversations that it invents: the chat template's beginning of a user's
turn, where the target continues as the user, and then answers. The others are pieces of a given
text that it continues. Many share each pass. What a sequence says follows from its number and the
seed alone, whatever it shares passes with and wherever a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from localrt.engine.native.engine import NativeEngine, NativeSession
from localrt.errors import OptionError
from localrt.models.templates.chat_template import MessageTemplate, encode_messages
from localrt.models.tokenizers import Tokenizer
from localrt.speculative.ngram import common_length

__all__ = [
    "Beginning",
    "ChatFrame",
    "Prompts",
    "Written",
    "chat_frame",
    "draw",
    "line_starts",
    "write_sequences",
]

Floats = npt.NDArray[np.float32]

_PIECE = (16, 112)  # tokens of a given text that are continued
_TEMPERATURES = (0.3, 0.6, 0.9)
_USER_TEMPERATURE = 0.9  # an invented user should vary
# Logits that far below the best (times the temperature) have no chance worth counting.
_REACH = 12.0


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Token ids around a user's message: before it, and from its end to the answer's beginning."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def chat_frame(tokenizer: Tokenizer, template: MessageTemplate) -> ChatFrame | None:
    """What the template writes around a user's message; None where that cannot be told apart."""
    first, second = (
        encode_messages(tokenizer, template, [{"role": "user", "content": text}])
        for text in ("0", "x")
    )
    before = common_length(first, second)
    after = common_length(first[::-1], second[::-1])
    if before + after >= min(len(first), len(second)):
        return None
    return ChatFrame(tuple(first[:before]), tuple(first[len(first) - after :]))


def line_starts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """Where in a text's ``ids`` a line begins that is not indented; its beginning counts."""
    texts = {token: tokenizer.token_bytes(token) for token in set(ids)}
    starts = [0] if len(ids) else []
    for at in range(1, len(ids)):
        begins = texts[ids[at]][:1]
        if texts[ids[at - 1]].endswith(b"\n") and begins and not begins.isspace():
            starts.append(at)
    return starts


class Prompts:
    """Beginnings of sequences. ``starts`` are where pieces of ``text`` may begin.

    Raises:
        OptionError: there is neither a text nor a chat template to begin with.
    """

    def __init__(
        self, text: Sequence[int], starts: Sequence[int], frame: ChatFrame | None, *, seed: int
    ) -> None:
        self._text = text
        self._starts = starts
        self._seed = seed
        self.frame = frame
        if not len(starts) and frame is None:
            raise OptionError("the model has no chat template to write from: give it a --text")

    def sequence(self, number: int) -> Beginning:
        """The beginning of sequence ``number``."""
        chat = self.frame is not None and (number % 2 == 0 or not len(self._starts))
        return Beginning(self, chat, np.random.default_rng((self._seed, number)))

    def piece(self, random: np.random.Generator) -> list[int]:
        """A piece of the text, from a beginning of a line on."""
        start = self._starts[int(random.integers(len(self._starts)))]
        return list(self._text[start : start + int(random.integers(*_PIECE))])


class Beginning:
    """One sequence: what it begins with, and how it continues where the target ends something."""

    def __init__(self, prompts: Prompts, chat: bool, random: np.random.Generator) -> None:
        self._prompts = prompts
        self._frame = prompts.frame if chat else None
        self._answering = False
        self._temperature = float(random.choice(_TEMPERATURES))
        self.random = random

    @property
    def temperature(self) -> float:
        """At which the next token is drawn."""
        return _USER_TEMPERATURE if self._frame and not self._answering else self._temperature

    def first(self) -> list[int]:
        """Its first tokens, at least one."""
        self._answering = False
        return list(self._frame.before) if self._frame else self._prompts.piece(self.random)

    def ended(self, token: int) -> list[int]:
        """What follows after the target has ended its text with ``token``, which comes first."""
        frame = self._frame
        if frame is None or self._answering:
            return [token, *self.first()]
        self._answering = True
        return list(frame.after) if frame.after[:1] == (token,) else [token, *frame.after]


@dataclass(frozen=True, slots=True)
class Written:
    """A sequence: ``tokens`` (length,) and the target's ``features`` (length, hidden) at them."""

    number: int
    tokens: npt.NDArray[np.int32]
    features: Floats


class _Live:
    """A sequence on its way."""

    def __init__(self, number: int, beginning: Beginning, session: NativeSession) -> None:
        self.number = number
        self.beginning = beginning
        self.session = session
        self.features = session.record_features()
        self.pending = beginning.first()

    @property
    def left(self) -> int:
        """Tokens until it is complete."""
        return self.session.capacity - len(self.session.tokens)

    def accept(self, logits: Floats, eos_ids: frozenset[int]) -> None:
        """Choose the next token."""
        token = draw(logits, self.beginning.temperature, float(self.beginning.random.random()))
        self.pending = self.beginning.ended(token) if token in eos_ids else [token]


def write_sequences(
    engine: NativeEngine,
    prompts: Prompts,
    numbers: Sequence[int],
    *,
    length: int,
    together: int,
    eos_ids: frozenset[int],
    on_pass: Callable[[int], None],
) -> Iterator[Written]:
    """Sequences of ``length`` tokens, ``together`` at a time, in the order in which they end.

    ``on_pass`` gets each pass's rows, and may raise.
    """
    waiting = list(reversed(numbers))
    live: list[_Live] = []
    try:
        while waiting or live:
            while waiting and len(live) < together:
                number = waiting.pop()
                live.append(_Live(number, prompts.sequence(number), engine.session(length)))
            on_pass(_advance(engine, live, eos_ids))
            for sequence in [s for s in live if not s.left]:
                live.remove(sequence)
                tokens = np.array(sequence.session.tokens, np.int32)
                yield Written(sequence.number, tokens, sequence.features.get(0, length))
                sequence.session.close()
    finally:
        for sequence in live:
            sequence.session.close()


def _advance(engine: NativeEngine, live: Sequence[_Live], eos_ids: frozenset[int]) -> int:
    """One pass: a piece of what each sequence wants computed, as far as rows go; its rows."""
    room = engine.pass_rows
    parts: list[tuple[_Live, list[int]]] = []
    for sequence in live:
        piece = sequence.pending[: min(room, sequence.left)]
        if piece:
            parts.append((sequence, piece))
            room -= len(piece)
    ends = [len(s.pending) == len(piece) and s.left > len(piece) for s, piece in parts]
    wanted = [index for index, end in enumerate(ends) if end]
    logits = engine.extend_batch([(s.session, piece) for s, piece in parts], wanted=wanted)
    rows = iter(logits)
    for (sequence, piece), end in zip(parts, ends, strict=True):
        sequence.pending = sequence.pending[len(piece) :]
        if end:
            sequence.accept(next(rows), eos_ids)
    return sum(len(piece) for _, piece in parts)


def draw(logits: Floats, temperature: float, uniform: float) -> int:
    """A token of ``logits`` (V,) at a ``temperature`` above 0; ``uniform`` is in [0, 1)."""
    top = logits.max()
    ids = np.flatnonzero(logits > top - np.float32(_REACH * temperature))
    weights = np.cumsum(np.exp((logits[ids] - top) / np.float32(temperature), dtype=np.float64))
    chosen = int(np.searchsorted(weights, uniform * weights[-1], side="right"))
    return int(ids[min(chosen, len(ids) - 1)])
