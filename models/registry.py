"""Architectures by their names in ``config.json`` and GGUF.

Does not know engines: ``load_decoder`` takes any ``Ops``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

from localrt.common.errors import UnsupportedModelError
from localrt.common.option_names import option
from localrt.models import architectures
from localrt.models.architectures.family import PLAIN, Family
from localrt.models.config import DecoderConfig
from localrt.models.decoder import Decoder, load_resident
from localrt.models.encoders import EncoderConfig
from localrt.models.raw_config import RawConfig
from localrt.models.tensor_source import Checkpoint
from localrt.models.weights import WeightLoader
from localrt.quant.formats import FORMATS, GGML_FORMATS
from localrt.quant.ops.protocol import Ops

T = TypeVar("T", DecoderConfig, EncoderConfig)
# Every module with FAMILIES counts, so that a new file is all that a new family needs.
_FAMILIES: Mapping[str, Family] = {
    name: family
    for module in iter_modules(architectures.__path__, f"{architectures.__name__}.")
    for family in getattr(import_module(module.name), "FAMILIES", ())
    for name in (*family.gguf.split(), *family.folders.split())
}
ARCHITECTURES = {name: family.name for name, family in _FAMILIES.items() if family.read}
"""Families of models that write, by the names that ``config.json`` and GGUF use."""
ENCODERS = {name: family.name for name, family in _FAMILIES.items() if family.encoder}
"""Families of models that embed or rank texts."""
ONLY_EMBEDS = "an encoder embeds or ranks texts and writes none: choose a model that writes"


def find_family(name: str) -> Family:
    """The family of a checkpoint's architecture; ``PLAIN`` if it is unknown."""
    return _FAMILIES.get(name, PLAIN)


def find_architecture(name: str) -> Callable[[RawConfig], DecoderConfig]:
    """The function that reads the config of a checkpoint's architecture.

    Raises:
        UnsupportedModelError: an unknown architecture; lists the known ones.
    """
    if name in ENCODERS:
        raise UnsupportedModelError(ONLY_EMBEDS)
    if name not in ARCHITECTURES:
        known = ", ".join(sorted({*ARCHITECTURES.values(), *ENCODERS.values()}))
        raise UnsupportedModelError(
            f"architecture {name!r:.60} is not known to the native engine (known: {known}); "
            f"a GGUF file may run with {option('engine', 'llamacpp')}"
        )
    read = _FAMILIES[name].read
    assert read is not None, "it is no head"
    return read


def read_config(checkpoint: Checkpoint, *, context: int | None = None) -> DecoderConfig:
    """Read the checkpoint's config; rotary scaling may depend on ``context``, in tokens."""
    name = checkpoint.architecture
    if name == "llama" and checkpoint.config.get("num_local_experts"):
        name = "MixtralForCausalLM"  # GGUF has one name for both
    if checkpoint.config.get("model_type") == "mistral4":
        name = "Mistral4ForCausalLM"  # within ``Mistral3ForConditionalGeneration``
    return _read(find_architecture(name), ARCHITECTURES[name], checkpoint, context)


def read_encoder_config(checkpoint: Checkpoint) -> EncoderConfig | None:
    """Read the config of an encoder of texts; None for other models."""
    family = find_family(checkpoint.architecture)
    return None if family.encoder is None else _read(family.encoder, family.name, checkpoint, None)


def _read(
    read: Callable[[RawConfig], T], family: str, checkpoint: Checkpoint, context: int | None
) -> T:
    try:
        return replace(read(RawConfig(checkpoint, context=context)), architecture=family)
    except ValueError as error:
        raise UnsupportedModelError(f"{checkpoint.path.name}: {error}") from error


def require_readable(checkpoint: Checkpoint) -> None:
    """Check that localrt can unpack every tensor's format.

    Raises:
        UnsupportedModelError: names the first unsupported one, and an alternative.
    """
    for info in checkpoint.tensors.values():
        if FORMATS.get(info.format.name) != info.format:
            readable = ", ".join(known.name.upper() for known in GGML_FORMATS.values())
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor {info.name!r} is {info.format.name.upper()}, which the "
                f"native engine cannot read: use a file with one of {readable}, "
                f"or {option('engine', 'llamacpp')}"
            )


def load_decoder(
    checkpoint: Checkpoint,
    ops: Ops,
    config: DecoderConfig,
    *,
    on_bytes: Callable[[int], None] | None = None,
) -> Decoder:
    """Read every tensor into ``ops`` and build the model; ``on_bytes`` gets each read's bytes."""
    require_readable(checkpoint)
    return Decoder(load_resident(config, ops, WeightLoader(checkpoint, ops, on_bytes)))
