"""Apertus: Llama with a norm on every query and key head, and MLPs without a gate, whose activation
(xIELU) has numbers that each layer learns.

Folders have these numbers as tensors, GGUF files as metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from localrt.common.errors import CheckpointError
from localrt.models.architectures import llama
from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.config import DecoderConfig, LayerNames
from localrt.models.raw_config import RawConfig
from localrt.models.tensor_source import RowSource, TensorInfo
from localrt.quant.formats import F32
from localrt.quant.formats.packed import Bytes

_CURVE = ("alpha_p", "alpha_n", "beta", "eps")
_PREFIX = "mlp.act_fn."


def read_config(raw: RawConfig) -> DecoderConfig:
    """Read Llama's keys."""
    return replace(
        llama.read_config(raw, {"xielu": "xielu"}),
        qk_norm=True,
        names=LayerNames(gate_up=("mlp.up_proj",)),
    )


def _add_curve(config: Config, file: GgufFacts) -> None:
    """Add the activation's numbers."""
    config["hidden_act"] = "xielu"
    for name in _CURVE:
        config[f"xielu_{name}"] = file.listed(f"xielu.{name}")


@dataclass(frozen=True, slots=True)
class _Number(RowSource):
    """A vector of one value."""

    value: float

    def _read(self, start: int, stop: int) -> Bytes:
        return np.full((1, 1), self.value, np.float32).view(np.uint8)


def _convert(stored: Mapping[str, RowSource], config: Mapping[str, object]) -> dict[str, RowSource]:
    """Each number of a layer's activation as a vector of one value."""
    found = {
        name: replace(tensor, info=replace(tensor.info, shape=(1,)))
        if _PREFIX in name and not tensor.info.shape
        else tensor
        for name, tensor in stored.items()
    }
    for name in _CURVE:
        values = config.get(f"xielu_{name}")
        for layer, value in enumerate(values if isinstance(values, list) else ()):
            if type(value) is not float:
                raise CheckpointError(f"xielu.{name} of layer {layer} must be a number")
            whole = f"model.layers.{layer}.{_PREFIX}{name}"
            found[whole] = _Number(TensorInfo(whole, (1,), F32, 4), value)
    return found


FAMILIES = (
    Family(
        name="apertus",
        read=read_config,
        folders="ApertusForCausalLM",
        gguf="apertus",
        tensors={
            "attention_layernorm.weight": "input_layernorm.weight",
            "feedforward_layernorm.weight": "post_attention_layernorm.weight",
        },
        convert=_convert,
        gguf_config=_add_curve,
    ),
)
