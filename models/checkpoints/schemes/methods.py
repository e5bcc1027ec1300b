"""Finds the scheme that a model was quantized with, from its config."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from localrt.common.errors import UnsupportedModelError
from localrt.models.checkpoints.safetensors_header import read_json
from localrt.models.checkpoints.schemes.bitsandbytes import BitsAndBytes
from localrt.models.checkpoints.schemes.compressed_tensors import CompressedTensors
from localrt.models.checkpoints.schemes.floats import Fp8, ModelOpt
from localrt.models.checkpoints.schemes.weights import Keys, Scheme
from localrt.models.checkpoints.schemes.words import Awq, Gptq
from localrt.models.tensor_source import RowSource, StoredTensor
from localrt.quant.formats import F32

_KEY, _MLX_KEY = "quantization_config", "quantization"
_MODELOPT_FILE = "hf_quant_config.json"


def _auto_round(keys: Keys) -> Scheme:
    """Read AutoRound: ``packing_format`` names the method whose tensors it uses."""
    packing = str(keys.value("packing_format") or "auto_round:auto_gptq")
    if "llm_compressor" in packing:
        return CompressedTensors.of(keys)
    if keys.value("data_type") not in ("int", None) or "fp8" in packing:
        raise keys.unread("data_type", str(keys.value("data_type"))[:20])
    if "awq" in packing:
        return Awq.of(keys)
    older = "gptq" in packing and "gptqmodel" not in packing
    values = {**keys.values, "checkpoint_format": "gptq" if older else "gptq_v2"}
    return Gptq.of(Keys(values, keys.where))


_METHODS: Mapping[str, Callable[[Keys], Scheme]] = MappingProxyType(
    {
        "auto-round": _auto_round,
        "awq": Awq.of,
        "bitsandbytes": BitsAndBytes.of,
        "compressed-tensors": CompressedTensors.of,
        "fbgemm_fp8": Fp8.of,
        "fp8": Fp8.of,
        "gptq": Gptq.of,
        "modelopt": ModelOpt.of,
        "modelopt_fp4": ModelOpt.of,
    }
)
_PACKED_EXPERTS = {"mxfp4": ("GptOssForCausalLM", "gpt_oss")}
"""Methods that pack experts only, with their architectures: see ``safetensors/names.py``."""


def read_scheme(config: Mapping[str, object], folder: Path) -> tuple[str, Scheme | None]:
    """Return the method's name and its scheme; None if the weights are not quantized.

    Raises:
        UnsupportedModelError: an unsupported quantization.
        CheckpointError: a part of the config is malformed.
    """
    path = folder / "config.json"
    keys = Keys(config, str(path))
    quantized, method = keys.inner(_KEY), None
    if quantized is not None:
        method = quantized.value("quant_method")
        if method == "intel/auto-round":
            method = "auto-round"
    if method is None and keys.inner(_MLX_KEY) is not None:
        raise UnsupportedModelError(
            f"{folder} is quantized for MLX: take a GGUF file of it or the original"
        )
    if quantized is None and (folder / _MODELOPT_FILE).exists():
        file = folder / _MODELOPT_FILE
        quantized, method = Keys(read_json(file), str(file)).inner("quantization"), "modelopt"
        if quantized is not None and quantized.value("quant_algo") is None:
            return "", None  # only the cache is quantized
    if quantized is None:
        if config.get(_KEY) is not None:
            raise _unknown(path, None)
        return "", None
    names = [config.get("architectures"), config.get("model_type")]
    if any(name in str(names) for name in _PACKED_EXPERTS.get(str(method), ())):
        return "", None
    of = _METHODS.get(method) if isinstance(method, str) else None
    if of is None:
        raise _unknown(path, method)
    return str(method), of(quantized)


def _unknown(path: Path, method: object) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{path}: the weights are quantized with {str(method or 'an unknown method')[:40]}, which "
        f"localrt cannot read (it reads {', '.join(_METHODS)}); use the original model, or a GGUF "
        "file of it"
    )


def published_notes(
    method: str, scheme: Scheme, tensors: Mapping[str, RowSource]
) -> tuple[str, ...]:
    """Lines for the user: the formats of the weights, and the scheme's notes."""
    formats = Counter(
        source.info.format for source in tensors.values() if not isinstance(source, StoredTensor)
    )
    names = ", ".join(format_.name for format_, _ in formats.most_common())
    notes = [f"weights as published in {method}, held exactly as {names}"] if names else []
    if formats[F32]:
        notes.append(
            f"{formats[F32]} of {formats.total()} quantized weights take 32 bits each: their "
            "groups are no columns side by side, or fit none of localrt's (a version without "
            "activation order, or a GGUF file, is smaller)"
        )
    return (*notes, *scheme.notes)
