"""What a family's file says of it: under which names it is published, what its files call its
tensors and keys, and how its config is read.

Names of tensors are those below ``model.layers.N.``, unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from localrt.models.config import EXPERT_DOWN, EXPERT_GATE_UP, DecoderConfig
from localrt.models.encoders import EncoderConfig
from localrt.models.raw_config import RawConfig
from localrt.models.row_order import Stack
from localrt.models.tensor_source import RowSource

Config: TypeAlias = dict[str, Any]
"""What is in a ``config.json``."""

GATE_UP = tuple(f"{name}.weight" for name in EXPERT_GATE_UP)
DOWN = (f"{EXPERT_DOWN}.weight",)
"""An expert's matrices, where ``{}`` is its number."""

SANDWICH_NORMS: Mapping[str, str] = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
"""GGUF's names of norms on inputs and on results."""

MLP_NORM: Mapping[str, str] = {"post_attention_norm": "post_attention_layernorm"}
"""GGUF's name of an MLP's norm that suggests attention."""


class GgufFacts(Protocol):
    """What a GGUF file says beyond the keys that all families share. Keys are those after the
    architecture's name and a dot.
    """

    @property
    def tensors(self) -> Mapping[str, RowSource]:
        """By Hugging Face's names; only shapes and small vectors are used."""

    def integer(self, key: str) -> int | None:
        """An integer, or None."""

    def flag(self, key: str) -> bool | None:
        """A truth value, or None."""

    def number(self, key: str) -> float | None:
        """A number, or None."""

    def value(self, key: str) -> object:
        """Any value, or None."""

    def listed(self, key: str) -> list[Any] | None:
        """An array with about one entry per layer, or None; of a whole key, too."""

    def token(self, name: str) -> int | None:
        """The id of a token that the file's vocabulary names, or None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models. ``read`` makes a decoder's config, ``encoder`` that of an encoder of
    texts; heads that only draft have neither.

    ``folders`` are its names in ``config.json``, ``gguf`` those in GGUF files, separated by spaces.
    ``tensors`` maps a folder's names to localrt's, where ``{}`` is an expert's number; ``stacks``
    are tensors of all experts of a layer. ``in_pairs``, ``gguf_in_pairs``: query and key rows are
    stored in pairs (x0, y0, x1, y1, ...). ``convert`` returns a model's tensors in the decoder's
    form; it gets the config, too. ``predicts``: its MTP blocks can draft.

    ``gguf_top`` and ``gguf_layer`` map GGUF's names, without ``blk.N.`` and ``.weight``, to Hugging
    Face's; ``gguf_stacks`` those of two matrices in one. ``gguf_plus_one``: norm weights include
    the 1 that Hugging Face adds at run time. ``gguf_by_turns``: the value heads of DeltaNet's key
    heads take turns. ``gguf_config`` changes the config that was made from the keys of all
    families.
    """

    name: str
    read: Callable[[RawConfig], DecoderConfig] | None = None
    encoder: Callable[[RawConfig], EncoderConfig] | None = None
    folders: str = ""
    gguf: str = ""
    tensors: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    in_pairs: bool = False
    predicts: bool = True
    convert: Callable[[Mapping[str, RowSource], Mapping[str, object]], dict[str, RowSource]] = (
        lambda stored, config: dict(stored)
    )
    gguf_top: Mapping[str, str] = field(default_factory=dict)
    gguf_layer: Mapping[str, str] = field(default_factory=dict)
    gguf_stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    gguf_in_pairs: bool = False
    gguf_plus_one: bool = False
    gguf_by_turns: bool = False
    gguf_config: Callable[[Config, GgufFacts], None] | None = None


def head_size(config: Mapping[str, object]) -> int | None:
    """Hidden size divided by heads, if both are known."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if isinstance(heads, int) and isinstance(hidden, int) and heads > 0:
        return hidden // heads
    return None


PLAIN = Family(name="")
"""Files of an unknown family: Llama's names."""
