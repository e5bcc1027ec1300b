"""``adapter_config.json`` of PEFT and mlx-lm: what is read, and what products are times."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from localrt.errors import CheckpointError, UnsupportedModelError

__all__ = ["check_mlx_config", "check_peft_config", "mlx_scale", "peft_scale"]

# What changes more than a matrix by a low rank.
_REFUSED = {
    "fan_in_fan_out": "whose matrices are transposed",
    "layer_replication": "that repeats layers",
    "megatron_config": "split for Megatron",
    "trainable_token_indices": "with rows of the embedding of its own",
    "arrow_config": "with routing among adapters",
    "corda_config": "in the form of CorDA",
}
_MOST_REPEATS, _MOST_CHOICES = 3, 100  # in a pattern of modules' names


def check_peft_config(config: Mapping[str, Any], path: Path) -> None:
    """Whether this is the ``adapter_config.json`` at ``path`` of an adapter that is read here.

    Raises:
        CheckpointError: a key is malformed.
        UnsupportedModelError: it is of another kind than LoRA, rsLoRA and DoRA.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{path}: adapters of type {kind!r:.40} are not read: LoRA, rsLoRA and DoRA are"
        )
    for name, what in _REFUSED.items():
        if config.get(name):
            raise UnsupportedModelError(f"{path}: {name}: an adapter {what} is not read")
    if config.get("bias", "none") != "none":
        raise UnsupportedModelError(f"{path}: bias: an adapter with biases of its own is not read")
    for name in ("r", "lora_alpha"):
        value = config.get(name)
        if not _is_size(value):
            raise CheckpointError(f"{path}: {name} must be a number above 0, is {value!r:.40}")
    for name in ("rank_pattern", "alpha_pattern"):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or not all(map(_is_size, pattern.values())):
            raise CheckpointError(f"{path}: {name} must give modules numbers above 0")
        for each in pattern:
            if _is_slow(each):
                raise CheckpointError(
                    f"{path}: {name}: {each!r:.60} could take too long to match: write names of "
                    f"modules, with at most {_MOST_REPEATS} of * + ? and none of them after )"
                )


def _is_slow(pattern: str) -> bool:
    """Whether matching a name may try so many ways that it does not end."""
    plain = re.sub(r"\\.", "x", pattern).replace("(?:", "(")
    repeats, groups = re.findall(r"[*+?{]", plain), plain.count("(")
    repeated = re.search(r"\)[*+?{]", plain) is not None
    return repeated or len(repeats) > _MOST_REPEATS or groups * plain.count("|") > _MOST_CHOICES


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def peft_scale(config: Mapping[str, Any], path: Path) -> Callable[[str, int], float]:
    """What a module's product is times, from its name and rank.

    Calling it raises ``CheckpointError`` where the config says another rank.
    """

    def of(kind: str, module: str, default: float) -> float:
        for pattern, value in (config.get(kind) or {}).items():
            try:
                if re.fullmatch(rf"(.*\.)?({pattern})", module):
                    return float(value)
            except re.error as error:
                raise CheckpointError(f"{path}: {kind}: {pattern!r:.60}: {error}") from error
        return default

    def scale(module: str, rank: int) -> float:
        told = of("rank_pattern", module, config["r"])
        if told != rank:
            raise CheckpointError(
                f"{path}: module {module!r:.100} has rank {rank}, the config's r or rank_pattern "
                f"says {told:g}"
            )
        alpha = of("alpha_pattern", module, config["lora_alpha"])
        return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)

    return scale


def check_mlx_config(config: Mapping[str, Any], path: Path) -> None:
    """Whether this is the ``adapter_config.json`` at ``path`` of an adapter of mlx-lm's.

    Raises:
        CheckpointError: a key is malformed.
        UnsupportedModelError: it is of another kind than LoRA and DoRA.
    """
    kind = config.get("fine_tune_type", "lora")
    if kind not in ("lora", "dora"):
        raise UnsupportedModelError(
            f"{path}: fine_tune_type is {kind!r:.40}, of which localrt reads lora and dora: fuse "
            "it with its model (mlx_lm.fuse)"
        )
    parameters = config.get("lora_parameters")
    if not isinstance(parameters, dict) or not _is_size(parameters.get("scale")):
        raise CheckpointError(f"{path}: lora_parameters must have a scale above 0")


def mlx_scale(config: Mapping[str, Any], path: Path) -> Callable[[str, int], float]:
    """What every product is times, whatever the rank."""
    return lambda module, rank: float(config["lora_parameters"]["scale"])
