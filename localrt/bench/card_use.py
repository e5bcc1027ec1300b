"""What a card, its link and the processor do while a model decodes, and what would help most.

Shares of a real card and its link are the profiler's, those of the rest the pipeline's own, in a
virtual card's time where that is one. Launches and waits are counted on a real card only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from localrt.formatting import format_rate

if TYPE_CHECKING:
    from localrt.api import Model
    from localrt.offload.planner.plan import Change

__all__ = ["CardUse", "card_line", "card_use", "what_helps"]

_TOKENS = 16
_NAMES = {"gpu": "card", "link": "link to the card", "cpu": "CPU", "ssd": "disk"}
_BUSY = 0.6  # a part that is busy for less of the time does not set the pace


@dataclass(frozen=True, slots=True)
class CardUse:
    """``busy`` are shares of the time by resource; the others are of a token, None if not counted.

    ``helps`` is one sentence.
    """

    busy: Mapping[str, float]
    helps: str
    launches_per_token: float | None = None
    waits_per_token: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def card_line(found: Mapping[str, Any]) -> str:
    """One line for people, of a ``CardUse`` as plain values."""
    busy = found["busy"]
    shares = ", ".join(f"{_NAMES[name]} {busy[name]:.0%}" for name in _NAMES if name in busy)
    line = f"busy while decoding: {shares or 'not known'}"
    if found["launches_per_token"] is not None:
        line += f"; {found['launches_per_token']:.0f} launches"
        line += f" and {found['waits_per_token']:.0f} waits a token"
    return f"{line}. {found['helps']}"


def card_use(model: Model, prompt: Sequence[int]) -> CardUse:
    """Decode some tokens behind ``prompt`` and look; recorded graphs are recorded before that."""
    room = max(1, model.info.ctx - 3 * _TOKENS - 1)
    stream = model.stream(
        token_ids=prompt[:room], max_tokens=3 * _TOKENS + 1, ignore_eos=True, temperature=0
    )

    def decode() -> None:
        for _ in islice(stream, _TOKENS):
            pass

    try:
        decode()
        before = model.status()
        decode()
        busy = dict(model.status().since(before).busy)
        seen = None
        if model.info.device.startswith("cuda"):
            from localrt.quant.ops.cuda.counting import count_card_use

            seen = count_card_use(decode)
    finally:
        close = getattr(stream, "close", None)
        if close is not None:
            close()
    changes = model.advise().changes
    if seen is None:
        return CardUse(busy, what_helps(busy, changes))
    busy |= {"gpu": seen.busy_s / seen.seconds, "link": seen.link_s / seen.seconds}
    return CardUse(
        busy,
        what_helps(busy, changes),
        launches_per_token=seen.launches / _TOKENS,
        waits_per_token=seen.waits / _TOKENS,
    )


def what_helps(busy: Mapping[str, float], changes: Sequence[Change]) -> str:
    """Which part is busiest, and the best of the ``changes`` that were planned."""
    text = ""
    if busy:
        name = max(busy, key=lambda each: busy[each])
        share = f"the {_NAMES.get(name, name)}, {busy[name]:.0%}"
        text = f"Busiest is {share}"
        if busy[name] < _BUSY:
            text = f"No part is busy all the time (at most {share}): they wait for one another"
        text += ". "
    if not changes:
        return f"{text}No change that was planned helps by more than 5 %."
    best = changes[0]
    return (
        f"{text}Most would help: {best.what}, about {format_rate(best.tok_s)} tok/s"
        f" ({best.gain:.1f} times)."
    )
