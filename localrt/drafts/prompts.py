"""How the target is brought to write the text that a draft head learns from.

Half of the sequences are conversations that it invents: the chat template's beginning of a user's
turn, where the target goes on as the user, and then answers. The others are pieces of a given text
that it continues. What a sequence begins with follows from its number and the seed alone. It knows
token ids, and no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from localrt.errors import OptionError
from localrt.models.templates.chat_template import encode_messages

if TYPE_CHECKING:
    from localrt.models.templates.chat_template import MessageTemplate
    from localrt.models.tokenizers import Tokenizer

__all__ = ["Beginning", "ChatFrame", "Prompts", "chat_frame", "line_starts"]

Ints = npt.NDArray[np.int64]

_PIECE = (16, 112)  # tokens of a given text that are continued
_TEMPERATURES = (0.3, 0.6, 0.9)
_USER_TEMPERATURE = 0.9  # an invented user should vary


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
    before = _common(first, second)
    after = _common(first[::-1], second[::-1])
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
        self._text = np.asarray(text, np.int64)
        self._starts = np.asarray(starts, np.int64)
        self._frame = frame
        self._seed = seed
        if not len(self._starts) and frame is None:
            raise OptionError("the model has no chat template to write from: give it a --text")

    def sequence(self, number: int) -> Beginning:
        """The beginning of sequence ``number``."""
        chat = self._frame is not None and (number % 2 == 0 or not len(self._starts))
        return Beginning(self, chat, np.random.default_rng((self._seed, number)))

    @property
    def frame(self) -> ChatFrame | None:
        """What surrounds a user's message."""
        return self._frame

    def piece(self, random: np.random.Generator) -> list[int]:
        """A piece of the text, from a beginning of a line on."""
        start = int(self._starts[random.integers(len(self._starts))])
        count = int(random.integers(*_PIECE))
        piece: list[int] = self._text[start : start + count].tolist()
        return piece


class Beginning:
    """One sequence: what it begins with, and how it goes on where the target ends something."""

    def __init__(self, prompts: Prompts, chat: bool, random: np.random.Generator) -> None:
        self._prompts = prompts
        self._chat = chat
        self._answering = False
        self.random = random
        self._temperature = float(random.choice(_TEMPERATURES))

    @property
    def temperature(self) -> float:
        """At which the next token is drawn."""
        return _USER_TEMPERATURE if self._chat and not self._answering else self._temperature

    def first(self) -> list[int]:
        """Its first tokens, at least one."""
        frame = self._prompts.frame
        if self._chat and frame is not None:
            self._answering = False
            return list(frame.before)
        return self._prompts.piece(self.random)

    def ended(self, token: int) -> list[int]:
        """What follows after the target has ended its text with ``token``, which comes first."""
        frame = self._prompts.frame
        if not self._chat or frame is None or self._answering:
            return [token, *self.first()]
        self._answering = True
        return list(frame.after) if frame.after[:1] == (token,) else [token, *frame.after]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
