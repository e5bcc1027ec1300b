"""Judges whether a model is fast enough for chat, and says why in one line.

Answers should come as fast as people read, and a page of prompt should not make them wait. It
judges the numbers of any forecast.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from localrt.common.formatting import format_bytes, format_rate, format_seconds

READING_TOK_S = 7.0
"""About as fast as people read."""

THINKING_TOK_S = 20.0
"""Fast enough for a model that thinks first: its thoughts then take about half a minute."""

USABLE_TOK_S = 2.0
"""Below this a short answer takes minutes."""

PROMPT_TOKENS = 500
"""A page of text."""

_MEANINGS = {
    "tok/s": (
        "tokens per second. A token is about three quarters of a word; people read about "
        f"{READING_TOK_S:.0f} a second."
    ),
    "FILE": (
        "the bits of a weight come first (Q4: about 4); fewer are smaller, faster and less exact."
    ),
    "Bits per weight": "fewer are smaller, faster and less exact.",
    "Prefill": "reading the prompt.",
    "Decode": "writing the answer.",
    "TTFT": "the time to the first token of the answer.",
    "FIRST TOKEN": "of the answer to a page of text.",
    "Partly on the SSD": "every token waits until some weights have been read from it.",
    "Streamed": "some weights are read from the SSD, or copied to the GPU, for every token.",
    "Keys and values": "what the model remembers of a conversation, for each token of it.",
    "Link": "between RAM and GPU (PCIe).",
    "Pass": "one way through the model, for each token.",
    "Busy": "the share of the time for which a part works; the busiest sets the pace.",
    "Predicted": "the planner's forecast, without drafts.",
    "Perplexity": "how much a text surprises the model: less is better; f32 is the whole model.",
}


def meanings(text: str) -> Iterator[str]:
    """Yield a line for each word of a report's ``text`` that needs one. Capitals are headers'."""
    for word, meaning in _MEANINGS.items():
        flags = re.NOFLAG if word.isupper() else re.IGNORECASE
        if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text, flags):
            yield f"{word}: {meaning}"


_GOOD_WAIT_S, _USABLE_WAIT_S = 20.0, 60.0  # for the first token after a page of prompt
_MERE_SHARE = 0.05  # of a token's weights: copying less is not mentioned
_WHOLE_SHARE = 0.98
_ROOM = 0.75  # of the memory for a model; more leaves hardly any to other programs

Level = Literal["good", "usable", "slow"]

_WORDS: dict[Level, str] = {
    "good": "Good for chat",
    "usable": "Usable for chat",
    "slow": "Too slow for chat",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Expected tokens per second, and bytes of weights: ``nbytes`` in all, ``needed`` for a token.
    Of ``needed``, ``read`` bytes are read from disk, ``copied`` to the GPU and ``by_cpu`` computed
    by the CPU; ``on_gpu`` bytes are resident on the GPU. ``thinks``: the model thinks before it
    answers. ``gpu_unused``: the model cannot use the machine's GPU.
    """

    tok_s: float
    prefill_tok_s: float
    nbytes: int
    needed: int
    read: int = 0
    copied: int = 0
    on_gpu: int = 0
    by_cpu: int = 0
    thinks: bool = False
    gpu_unused: bool = False

    @property
    def wait_s(self) -> float:
        """Seconds until the first token of the answer to a page."""
        return PROMPT_TOKENS / self.prefill_tok_s

    @property
    def level(self) -> Level:
        """How good the model is for chat."""
        if self.tok_s < USABLE_TOK_S or self.wait_s > _USABLE_WAIT_S:
            return "slow"
        return "good" if self.is_quick and self.wait_s <= _GOOD_WAIT_S else "usable"

    @property
    def enough_tok_s(self) -> float:
        """Tokens per second that are fast enough for people."""
        return THINKING_TOK_S if self.thinks else READING_TOK_S

    @property
    def is_quick(self) -> bool:
        """Whether answers are fast enough for people."""
        return self.tok_s >= self.enough_tok_s

    def has_room(self, memory: int) -> bool:
        """Whether the weights leave a part of ``memory`` to other programs, RAM and the GPU's."""
        return not self.read and self.nbytes <= _ROOM * memory

    @property
    def whole_on_gpu(self) -> bool:
        """Whether the GPU keeps and computes all weights that a token needs, except the
        embedding: it may be in RAM, as a token needs one row of it.
        """
        elsewhere = self.read + self.copied + self.by_cpu
        kept = self.on_gpu >= _WHOLE_SHARE * self.needed
        return kept and elsewhere <= (1 - _WHOLE_SHARE) * self.needed

    @property
    def place(self) -> str:
        """Where the weights are, in a few words."""
        if self.read:
            return "partly on the SSD"
        if self.whole_on_gpu:
            return "GPU memory"
        if self.on_gpu:
            return "GPU memory and RAM"
        return "RAM (not the GPU)" if self.gpu_unused else "RAM"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A level, and one line of ``text`` that begins with it."""

    level: Level
    text: str

    def __str__(self) -> str:
        return self.text


def judge(expected: Expected) -> Verdict:
    """Judge a forecast: ``"Good for chat: 23 tok/s, all of it in memory"``."""
    level, slow = expected.level, not expected.is_quick
    text = f"{_WORDS[level]}: {speed(expected.tok_s)}"
    text += f", because {_burden(expected)}" if slow else f", {_where(expected)}"
    if expected.thinks and READING_TOK_S <= expected.tok_s < THINKING_TOK_S:
        text += "; it thinks before it answers, which takes longer"
    if expected.wait_s > _GOOD_WAIT_S:
        text += f"; a page of text takes {format_seconds(expected.wait_s)} to read"
    return Verdict(level, text)


def speed(tok_s: float) -> str:
    """Format a forecast rate with two digits: ``"23 tok/s"``, ``"0.9 tok/s"``."""
    if tok_s >= 9.95:
        return f"{tok_s:.0f} tok/s"
    return f"{tok_s:.1f} tok/s" if tok_s >= 0.95 else f"{format_rate(tok_s)} tok/s"


def _where(expected: Expected) -> str:
    if expected.read:
        return _moved(expected)
    if expected.whole_on_gpu:
        return "all of it in GPU memory"
    if expected.on_gpu:
        return f"{part_of(expected.on_gpu, expected.nbytes)} in GPU memory, the rest in RAM"
    return f"all of it in {expected.place if expected.gpu_unused else 'memory'}"


def _burden(expected: Expected) -> str:
    """Say what makes the model slow."""
    if expected.read or expected.copied > _MERE_SHARE * expected.needed:
        return _moved(expected)
    left = expected.needed - expected.on_gpu
    if expected.on_gpu and left > 0:
        return f"the CPU computes {part_of(left, expected.needed)} for every token"
    who = "GPU" if expected.on_gpu else "CPU"
    return f"the {who} has to go through {format_bytes(expected.needed)} for every token"


def _moved(expected: Expected) -> str:
    if expected.read:
        return f"{part_of(expected.read, expected.needed)} are read from the SSD for every token"
    return f"{part_of(expected.copied, expected.needed)} are copied to the GPU for every token"


def part_of(part: int, whole: int) -> str:
    """Format one size as part of another: ``"31 of 40 GB"``."""
    some, unit = format_bytes(part).rsplit(" ", 1)
    total = format_bytes(whole)
    return f"{some} of {total}" if total.endswith(f" {unit}") else f"{some} {unit} of {total}"
