"""Typed, checked access to a checkpoint's config, so that every architecture fails in one line.

Knows key lookup and bounds, and common keys of mixtures; architectures know what a key means.
Defaults of missing keys are in ``architectures/defaults.json``: a line for each ``model_type`` of a
text model, with the values of transformers' config classes, which exporters rely on, and a line for
each other name whose models have the defaults of one of these. GGUF files have all keys.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.config import DecoderConfig, MixtureSpec
from localrt.models.tensor_source import Checkpoint
from localrt.quant.formats import unpack
from localrt.quant.ops.experts import ExpertActivation, ExpertSpec, RouterSpec, Scoring

_FILE = Path(__file__).with_name("architectures") / "defaults.json"
_SAME = (
    # Synonyms: one's default does not apply if another is given
    ("num_experts", "num_local_experts", "moe_num_experts", "n_routed_experts"),
    ("num_experts_per_tok", "num_experts_per_token", "moe_k", "top_k_experts"),
    ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    ("n_group", "num_expert_group"),
    ("norm_topk_prob", "moe_renormalize"),
    ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    ("intermediate_size", "block_ff_dim"),
    ("rope_scaling", "rope_parameters"),
    ("layers_block_type", "layer_types", "hybrid_override_pattern"),
)


def with_default_values(config: Mapping[str, object], architecture: str) -> dict[str, object]:
    """``config`` with its family's defaults for missing keys; null is a value.

    Checkpoints call this when they open, so that no reader of their ``config`` has to.
    """
    table = _table()
    found = table.get(_plain(str(config.get("model_type")))) or table.get(_plain(architecture))
    defaults = dict(found or {})
    for names in _SAME:
        if any(config.get(name) is not None for name in names):
            for name in names:
                defaults.pop(name, None)
    missing = {key: value for key, value in defaults.items() if key not in config}
    return {**config, **missing}


_ENDING = re.compile(r"For[A-Z]\w+$|Model$|_text$")


def _plain(name: str) -> str:
    """What a ``model_type`` and the name of its architecture have in common."""
    return re.sub("[_-]", "", _ENDING.sub("", name)).lower()


@cache
def _table() -> Mapping[str, Mapping[str, object]]:
    """Each family's defaults, by its plain names."""
    lines: Mapping[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return {
        _plain(name): lines[line] if isinstance(line, str) else line for name, line in lines.items()
    }


T = TypeVar("T")
# Larger than any real model's: a corrupt header must not cause a huge allocation.
_LIMITS = {
    "vocab_size": 1 << 21,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 12,
    "num_key_value_heads": 1 << 12,
    "max_position_embeddings": 1 << 28,
    "head_dim": 1 << 14,
    "rope_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "num_experts": 1 << 12,
    "num_local_experts": 1 << 12,
    "moe_num_experts": 1 << 12,
    "ngram_rows": 1 << 40,
    "ngram_vocab_size_base": 1 << 32,
    "n_routed_experts": 1 << 12,
    "hc_sinkhorn_iters": 1 << 10,
    "o_groups": 1 << 12,
}
_DEFAULT_LIMIT = 1 << 20
_SMALLEST, _LARGEST = 1e-30, 1e30


class RawConfig:
    """A checkpoint's ``config`` with typed getters, and a few small tensors that complete it.

    ``context`` is the context size in tokens: some rotary scalings depend on it.
    """

    def __init__(self, checkpoint: Checkpoint, *, context: int | None = None) -> None:
        self._checkpoint = checkpoint
        self._values = checkpoint.config
        self.context = context

    @property
    def architecture(self) -> str:
        """The checkpoint's name of the architecture."""
        return self._checkpoint.architecture

    @property
    def is_gguf(self) -> bool:
        """Whether the file is GGUF: llama.cpp's code then has defaults that the file lacks."""
        return self._checkpoint.kind == "gguf"

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._values.get(key) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._required(key, default)
        limit = _LIMITS.get(key, _DEFAULT_LIMIT)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= limit:
            raise self._error(
                f"config {key} must be an integer from 1 to {limit}, is {value!r:.60}"
            )
        return value

    def index(self, key: str, default: int | None = 0) -> int:
        """An integer from 0 on."""
        return 0 if self._required(key, default) == 0 else self.integer(key, default)

    def first_index(self, key: str) -> int:
        """An integer from 0 on, or the first of a list of them."""
        values = self._values.get(key)
        first = values[0] if isinstance(values, list | tuple) and values else values
        return self._with({key: first}).index(key, None)

    def integers(self, key: str, layers: int, default: int | None = None) -> tuple[int, ...]:
        """A positive integer for each layer: a list of them, or one for all."""
        if not isinstance(self._values.get(key), list | tuple):
            return (self.integer(key, default),) * layers
        values = self.layer_list(key, layers) or []
        limit = _LIMITS.get(key, _DEFAULT_LIMIT)
        for layer, value in enumerate(values):
            if type(value) is not int or not 0 < value <= limit:
                raise self._error(
                    f"config {key} of layer {layer} must be an integer from 1 to {limit}, is "
                    f"{value!r:.60}"
                )
        return tuple(values)

    def shares(self, key: str, layers: int) -> tuple[float, ...] | None:
        """A number from 0 on for each layer, or None: a list of them, or one for all."""
        values = self._values.get(key)
        one = [values] * layers if isinstance(values, int | float) else None
        listed = one or self.layer_list(key, layers)
        for layer, value in enumerate(listed or []):
            if value != 0 and positive_number(value) is None:
                raise self._error(
                    f"config {key} of layer {layer} must be a number from 0 on, is {value!r:.60}"
                )
        return None if listed is None else tuple(float(value) for value in listed)

    def limits(self, key: str, layers: int) -> tuple[float, ...]:
        """A limit for each layer; 0 or null is none."""
        given = self._values.get(key)
        if isinstance(given, list | tuple):
            given = [limit or 0.0 for limit in given]
        found = self.changed(**{key: given}).shares(key, layers) or (0.0,) * layers
        return tuple(limit or math.inf for limit in found)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """``count`` positive numbers; ones if the key is missing."""
        values = self.sequence(key)
        if values is None:
            return (1.0,) * count
        numbers = [number for number in map(positive_number, values) if number is not None]
        if not len(numbers) == len(values) == count:
            raise self._error(f"config {key} must be {count} positive numbers, is {values!r:.60}")
        return tuple(numbers)

    def optional_integer(self, key: str) -> int | None:
        """A positive integer, or None when absent, null or zero."""
        return self.integer(key) if self._values.get(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite positive number."""
        value = self._required(key, default)
        if (number := positive_number(value)) is None:
            raise self._error(f"config {key} must be a positive number, is {value!r:.60}")
        return number

    def negative_number(self, key: str) -> float:
        """A finite number below 0."""
        value = self._required(key, None)
        number = positive_number(-value) if isinstance(value, int | float) else None
        if number is None:
            raise self._error(f"config {key} must be a number below 0, is {value!r:.60}")
        return -number

    def optional_number(self, key: str) -> float | None:
        """A positive number, or None when absent, null or zero."""
        return self.number(key) if self._values.get(key) else None

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value."""
        value = self._values.get(key)
        return default if value is None else bool(value)

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._values.get(key)
        return default if value is None else str(value)

    def sequence(self, key: str) -> list[Any] | None:
        """A list, or None."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, list | tuple):
            raise self._error(f"config {key} must be a list, is {value!r:.60}")
        return list(value)

    def mapping(self, key: str) -> Mapping[str, object]:
        """A sub-mapping; empty when absent."""
        value = self._values.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self._error(f"config {key} must be an object, is {value!r:.60}")
        return value

    def nested(self, key: str, name: str | None = None) -> RawConfig:
        """The object ``key``, or the object ``name`` in it, as a config."""
        values: Any = self.mapping(key)
        if name is not None:
            values = values.get(name)
        if not isinstance(values, Mapping):
            raise self._error(f"config {key}[{name!r}] must be an object, is {values!r:.60}")
        return self._with(values)

    def renamed(self, names: Mapping[str, str]) -> RawConfig:
        """This config with keys renamed by ``names``."""
        found = {new: self._values[old] for old, new in names.items() if old in self._values}
        return self._with({**self._values, **found})

    def without(self, key: str) -> RawConfig:
        """This config without a key."""
        return self._with({name: value for name, value in self._values.items() if name != key})

    def changed(self, **values: object) -> RawConfig:
        """This config with other values of some keys."""
        return self._with({**self._values, **values})

    def _with(self, values: Mapping[str, object]) -> RawConfig:
        other = RawConfig(self._checkpoint, context=self.context)
        other._values = values
        return other

    def choice(self, key: str, default: str, table: Mapping[str, object]) -> Any:
        """Look up a string in ``table``; an unknown one is an ``UnsupportedModelError``."""
        name = self.text(key, default)
        if name not in table:
            known = ", ".join(table)
            raise UnsupportedModelError(f"{key} {name!r:.60} is not supported (known: {known})")
        return table[name]

    def has_tensor(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor."""
        return name in self._checkpoint.tensors

    def dense(self) -> tuple[int, ...]:
        """The rows of matrices that sentence-transformers multiplies an encoder's vectors by."""
        found = (self._checkpoint.tensors.get(f"dense_{number}.weight") for number in (2, 3))
        return tuple(info.shape[0] for info in found if info is not None and info.shape)

    def vector(self, name: str) -> npt.NDArray[np.float32] | None:
        """A small tensor that is part of the configuration, such as rotary factors, or None."""
        if name not in self._checkpoint.tensors:
            return None
        return unpack(self._checkpoint.read(name)).reshape(-1)

    def windowed(self, default: list[bool]) -> list[bool]:
        """Whether each layer has a window, by ``layer_types``, or ``default`` without it."""
        kinds = {"full_attention": False, "sliding_attention": True}
        return self.layer_kinds("layer_types", len(default), kinds) or default

    def sparse(self, layers: int) -> list[bool] | None:
        """Whether each layer's MLP is a mixture, by ``mlp_layer_types``; None without it."""
        return self.layer_kinds("mlp_layer_types", layers, {"dense": False, "sparse": True})

    def layer_list(self, key: str, layers: int) -> list[Any] | None:
        """A list of one entry for each layer, or None; those of prediction blocks are left out."""
        values, extra = self.sequence(key), self._values.get("num_nextn_predict_layers")
        if values is not None and type(extra) is int and len(values) == layers + extra:
            values = values[:layers]
        if values is not None and len(values) != layers:
            raise self._error(f"config {key} has {len(values)} entries for {layers} layers")
        return values

    def count(self, key: str) -> int:
        """The number of layers, from the length of a list or string of letters.

        Raises:
            CheckpointError: it is neither, or there is none.
        """
        values = self._required(key, None)
        return len(values if isinstance(values, str) else self.sequence(key) or [])

    def layer_kinds(self, key: str, layers: int, table: Mapping[str, T]) -> list[T] | None:
        """Look up each layer's string in ``table``; None without the key.

        A string instead of a list has a letter for each layer.
        """
        values = self._values.get(key)
        here = self._with({key: list(values)}) if isinstance(values, str) else self
        kinds = here.layer_list(key, layers)
        for layer, kind in enumerate(kinds or []):
            if not isinstance(kind, str) or kind not in table:
                raise UnsupportedModelError(
                    f"{key} {kind!r:.60} of layer {layer} is not supported "
                    f"(known: {', '.join(table)})"
                )
        return None if kinds is None else [table[kind] for kind in kinds]

    def last_layer(self, key: str, layers: int) -> int:
        """A layer's number; -1 or a missing key means the last one."""
        return layers - 1 if self._values.get(key) == -1 else self.integer(key, layers - 1)

    def _required(self, key: str, default: float | None) -> object:
        value = self._values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self._error(f"{key} is missing from the config")
        return value

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._checkpoint.path.name}: {message}")


def positive_number(value: object) -> float | None:
    """``value`` if it is a usable number above 0, else None.

    Values near 0 or infinity would become 0 or infinite in the first division.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if _SMALLEST <= value <= _LARGEST else None


SCORING: Mapping[str, Scoring] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "softmax-chosen": "softmax-chosen",
    "sqrtsoftplus": "sqrt-softplus",
}
_COUNT_KEYS = ("num_experts", "num_local_experts", "moe_num_experts")
_USED_KEYS = ("num_experts_per_tok", "moe_k")


def expert_count_key(raw: RawConfig) -> str:
    """The key that has the number of experts per layer."""
    return next((key for key in _COUNT_KEYS if raw.has(key)), _COUNT_KEYS[0])


def expert_activation(config: DecoderConfig) -> ExpertActivation:
    """The activation of a model's MLPs, for experts.

    Raises:
        ValueError: experts do not have it.
    """
    if config.mlp.activation == "xielu":
        raise ValueError("experts whose activation is xielu are not supported")
    return config.mlp.activation


def read_mixture(
    raw: RawConfig,
    config: DecoderConfig,
    *,
    scoring: Scoring = "softmax",
    normalize: bool = True,
    inner: int | None = None,
    scale: float = 1.0,
    shared: int = 0,
    choice_bias: bool = False,
) -> MixtureSpec:
    """Read the mixture of every sparse layer.

    ``scoring`` and ``normalize`` are defaults; ``inner`` is an expert's width if it is not the
    config's ``intermediate_size``. ``scale`` is the router's, for the others see ``MixtureSpec``.

    Raises:
        ValueError: more experts are used than there are.
    """
    used = next((key for key in _USED_KEYS if raw.has(key)), _USED_KEYS[0])
    router = RouterSpec(
        count=raw.integer(expert_count_key(raw)),
        used=raw.integer(used),
        eps=config.norm_eps,
        scoring=raw.choice("scoring_func", scoring, SCORING),
        normalize=raw.flag("norm_topk_prob", normalize),
        scale=scale,
    )
    return MixtureSpec(
        router=router,
        expert=ExpertSpec(activation=expert_activation(config)),
        inner=inner or config.intermediate_size,
        shared=shared,
        choice_bias=choice_bias,
    )


def sparse_layers(raw: RawConfig, layers: int) -> list[bool]:
    """Which layers are mixtures, by Qwen's ``mlp_only_layers`` and ``decoder_sparse_step``."""
    step = raw.integer("decoder_sparse_step", 1)
    dense = raw.sequence("mlp_only_layers") or []
    if any(type(layer) is not int for layer in dense):
        raise CheckpointError(f"config mlp_only_layers must be a list of layers, is {dense!r:.60}")
    return [layer not in dense and (layer + 1) % step == 0 for layer in range(layers)]


def with_mixture(
    config: DecoderConfig, spec: MixtureSpec, sparse: Sequence[bool] | None = None
) -> DecoderConfig:
    """``config`` with the mixture in the ``sparse`` layers; None means in all."""
    chosen = sparse if sparse is not None else [True] * config.layers
    return replace(config, mixtures=tuple(spec if here else None for here in chosen))


def with_limits(config: DecoderConfig, raw: RawConfig) -> DecoderConfig:
    """``config`` with the limits of each layer's experts, and of its MLP or shared experts."""
    limits = raw.limits("swiglu_limits", config.layers)
    mixtures = (
        spec and replace(spec, expert=replace(spec.expert, limit=limit))
        for spec, limit in zip(config.mixtures, limits, strict=False)
    )
    shared = raw.limits("swiglu_limits_shared", config.layers)
    return replace(config, limits=shared, mixtures=tuple(mixtures))
