"""What a benchmark asks of every engine: prompts of an exact length, and a number of tokens.

The text is the same on every machine and for every engine, so results can be compared. This module
knows no engine; the tokenizer comes from the model under test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localrt.errors import OptionError
from localrt.option_names import option

__all__ = ["LONG_ANSWER", "Workload", "make_long_prompt", "make_prompts"]

LONG_ANSWER = 2
"""Tokens after a long prompt: only the first is timed."""

# Prompts start this many tokens apart in one text: no engine can reuse the cache of another run.
_STRIDE = 17

_SENTENCES = (
    "In the year {year} the harbour master wrote down every ship that came in before noon.",
    "Ship number {n} carried {a} crates of tea, {b} barrels of oil and a small brass telescope.",
    "Nobody asked who had paid for it, and the clerk simply noted: received, weighed, stored.",
    "By evening the wind had turned to the north, and {a} boats were still outside the wall.",
    "A light burned on the hill, as it did every night, and {b} people looked up at it.",
    "“If the tide holds,” said the pilot, “we shall all be ashore in {n} minutes.”",
    "The sum was simple enough: {a} + {b} = {sum}, and the price of a crate was {n} shillings.",
)


_LEAST = {"prompt_tokens": 1, "tokens": 2, "runs": 1, "long_prompt_tokens": 0}


@dataclass(frozen=True, slots=True)
class Workload:
    """``prompt_tokens`` of prompt and ``tokens`` of answer, greedily, ``runs`` times.

    The first token of a prompt of ``long_prompt_tokens`` is timed once, if there are any.
    """

    prompt_tokens: int = 512
    tokens: int = 128
    runs: int = 5
    long_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise OptionError(
                    f"{option(name)} must be at least {least}, is {getattr(self, name)}"
                )

    @property
    def ctx(self) -> int:
        """The shortest context that holds it."""
        return max(self.prompt_tokens + self.tokens, self.long_prompt_tokens + LONG_ANSWER)


def make_prompts(workload: Workload, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """One prompt of exactly ``workload.prompt_tokens`` ids for the warm-up and for every run."""
    needed = workload.prompt_tokens + workload.runs * _STRIDE
    count = 16
    while len(ids := encode(_text(count))) < needed:
        count *= 2
    starts = range(0, (workload.runs + 1) * _STRIDE, _STRIDE)
    return [ids[start : start + workload.prompt_tokens] for start in starts]


def make_long_prompt(workload: Workload, encode: Callable[[str], list[int]]) -> list[int]:
    """One of ``workload.long_prompt_tokens`` ids, like no other prompt from its first token on."""
    one = Workload(workload.long_prompt_tokens, runs=workload.runs + 1)
    return make_prompts(one, encode)[-1]


def _text(sentences: int) -> str:
    """``sentences`` sentences; a longer text starts with the shorter ones."""
    lines = []
    for index in range(sentences):
        a, b = 3 + index * 7 % 89, 5 + index * 11 % 97
        template = _SENTENCES[index % len(_SENTENCES)]
        lines.append(template.format(year=1700 + index, n=index + 1, a=a, b=b, sum=a + b))
    return " ".join(lines)
