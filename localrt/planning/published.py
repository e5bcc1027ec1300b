"""Speeds that users published for PCs with 8 GB cards, beside which a forecast can be put.

Each with the engine and the machine as far as they were named; what was not named is said where a
forecast is made. Forecasts are not tuned to meet them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from localrt.common.formatting import format_rate
from localrt.hub.known_models import KnownModel, find_known
from localrt.offload.planner import ModelShape
from localrt.offload.planner.cards import DEFAULT_CARD
from localrt.offload.planner.estimate import outline
from localrt.quant.ops.kv import KvFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """``tok_s`` of ``model`` (a short name of the table; ``called`` as its users do) on ``card``.

    ``bits`` are those of a weight in ``file``, None where it is as published. ``ctx`` tokens were
    held. What is empty was not named; ``ram`` is then taken to be 32 GB.
    """

    model: str
    called: str
    tok_s: float
    card: str = ""
    engine: str = ""
    file: str = ""
    bits: float | None = 4.9
    ctx: int | None = None
    kv_format: KvFormat = "bf16"
    kv: str = ""
    ram: str = ""
    also: str = ""

    def __str__(self) -> str:
        """``"57.6 tok/s: 35B-A3B IQ3_K_R4, RTX 4060 Ti 8GB, ik_llama.cpp, 16,384 tokens"``."""
        return f"{format_rate(self.tok_s)} tok/s: {', '.join(self._facts())}"

    def _facts(self) -> Iterator[str]:
        yield f"{self.called} {self.file}".rstrip()
        yield self.card or "a card of 8 GB"
        yield self.engine or "engine not named"
        if self.ram:
            yield f"{self.ram} of RAM"
        if self.ctx:
            kept = f" with keys and values in {self.kv}" if self.kv else ""
            yield f"{self.ctx:,} tokens{kept}"
        if self.also:
            yield self.also

    @property
    def pc(self) -> str:
        """The PC, as ``parse_pc`` reads it."""
        return f"{self.card or DEFAULT_CARD}, {self.ram or '32GB'} DDR5-5600, 8 cores, NVMe"

    @property
    def known(self) -> KnownModel:
        """The model of the table."""
        found = find_known(self.model)
        assert found is not None, "it is in the table"
        return found


def _a3b(tok_s: float, engine: str, card: str = "RTX 4060 Ti 8GB", **more: Any) -> Published:
    return Published(
        model="qwen3.5:35b", called="35B-A3B", card=card, engine=engine, tok_s=tok_s, **more
    )


_IK: dict[str, Any] = {"file": "IQ3_K_R4", "bits": 3.5, "kv_format": "int4", "kv": "q4_0"}

PUBLISHED: tuple[Published, ...] = (
    _a3b(57.6, "ik_llama.cpp", ctx=16_384, **_IK),
    _a3b(55.6, "ik_llama.cpp", ctx=163_840, **_IK),
    _a3b(41.6, "llama.cpp", file="Q4_K_S", bits=4.6),
    _a3b(45.0, "FreeToken's fork", "RTX 4060 Laptop 8GB"),
    Published(model="gpt-oss:20b", called="gpt-oss-20b", bits=None, tok_s=36.4),
    Published(
        model="gpt-oss:120b",
        called="gpt-oss-120b",
        bits=None,
        ram="96GB",
        tok_s=25.6,
        also="prompts at 134 tok/s",
    ),
    Published(
        model="qwen3.5:27b",
        called="27B",
        card="RTX 5060 Laptop 8GB",
        file="IQ4_XS",
        bits=4.3,
        tok_s=4.2,
        also="7.3 tok/s with its MTP block",
    ),
    Published(model="mistral-small3.2:24b", called="24B", tok_s=5.2),
    Published(model="qwen3:14b", called="14B", tok_s=20.8),
)
"""Speeds of decoding a token a pass, where nothing else is said."""


def published_of(shape: ModelShape, card: str | None = None) -> tuple[Published, ...]:
    """What was published for models of this shape; with ``card`` only on that card.

    A figure whose card was not named is on none.
    """
    return tuple(
        each
        for each in PUBLISHED
        if (card is None or each.card == card)
        and _layout(_outlined(each.known.shape)) == _layout(shape)
    )


def _layout(shape: ModelShape) -> tuple[int, ...]:
    """What tells models apart, whatever their files are called."""
    return shape.layers, shape.hidden, shape.vocab, shape.experts.count if shape.experts else 0


@cache
def _outlined(name: str) -> ModelShape:
    model = next(each.known for each in PUBLISHED if each.known.shape == name)
    return outline(model.config(), name=name)
