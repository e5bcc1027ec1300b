"""Low-rank adapters as they are published: PEFT's folders, llama.cpp's GGUF files.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``: LoRA, rsLoRA
(arXiv:2312.03732) and DoRA. Every matrix is checked against the base model's before any is read,
and comes out under the name of the tensor that it changes, in the row order that the checkpoint of
the base shows. Nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints.base import Checkpoint
from localrt.models.checkpoints.gguf_file import GgufFile
from localrt.models.checkpoints.gguf_names import INTERLEAVED_ROTARY, hf_tensor_name
from localrt.models.checkpoints.ranged_file import RangedFile
from localrt.models.checkpoints.safetensors_header import read_header, read_json, unread_type_error
from localrt.models.checkpoints.stored_tensor import StoredTensor
from localrt.models.checkpoints.text_model import decoder_tensor, is_multimodal
from localrt.quant.formats import unpack
from localrt.quant.ops.adapters import Adapter, LowRank

__all__ = ["CONFIG_NAME", "WEIGHTS_NAME", "is_adapter", "read_adapter"]

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

Floats = npt.NDArray[np.float32]

_HASHED = 1 << 18  # bytes at once: they stay in the cache
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_WRAPPER = "base_model.model."
# How PEFT names a module's parts: A, B, and DoRA's magnitudes.
_PEFT = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)(\.weight)?"
)
# Of modules whose matrices are kept in parts.
_KEPT_OTHERWISE = (".kv_b_proj.weight", ".in_proj_qkvz.weight", ".in_proj_ba.weight")
_COPIES = ("embed_tokens.base_layer.weight", "lm_head.base_layer.weight")
_GGUF = re.compile(r"(?P<module>.+)\.lora_(?P<part>[ab])")
# What changes more than a matrix by a low rank.
_REFUSED = {
    "fan_in_fan_out": "whose matrices are transposed",
    "layer_replication": "that repeats layers",
    "megatron_config": "split for Megatron",
    "trainable_token_indices": "with rows of the embedding of its own",
    "target_parameters": "of parameters that are no module's weight",
    "arrow_config": "with routing among adapters",
    "corda_config": "in the form of CorDA",
}


@dataclass(slots=True)
class _Parts:
    """What there is of one module, not read yet."""

    a: StoredTensor | None = None
    b: StoredTensor | None = None
    magnitude: StoredTensor | None = None
    of_tokens: bool = False


def is_adapter(path: Path) -> bool:
    """Whether a file or folder is an adapter and no model."""
    if path.is_dir():
        return (path / CONFIG_NAME).exists()
    if path.suffix != ".gguf" or not path.is_file():
        return False
    with closing(GgufFile(path)) as file:
        return file.metadata.text("general.type") == "adapter"


def read_adapter(path: Path, base: Checkpoint) -> Adapter[LowRank]:
    """The adapter at ``path``, a folder or a ``.gguf`` file, for the model ``base``.

    DoRA's factors need the base's matrices, which are then read once.

    Raises:
        CheckpointError: it is damaged, or belongs to another base.
        UnsupportedModelError: it is of another kind than those above.
    """
    if path.is_dir():
        return _read_folder(path, base)
    if path.suffix == ".gguf":
        return _read_gguf(path, base)
    raise CheckpointError(
        f"{path} is no adapter: give PEFT's folder ({CONFIG_NAME}, {WEIGHTS_NAME}) or a .gguf file"
    )


def _read_folder(path: Path, base: Checkpoint) -> Adapter[LowRank]:
    config_path = path / CONFIG_NAME
    if not config_path.exists():
        raise CheckpointError(f"{path} is no adapter: it has no {CONFIG_NAME}")
    config = read_json(config_path)
    _check_config(config, config_path)
    weights = path / WEIGHTS_NAME
    if not weights.exists():
        pickled = " (only pickled weights, which could run code)" * (
            (path / "adapter_model.bin").exists()
        )
        raise CheckpointError(f"{path} has no {WEIGHTS_NAME}{pickled}: save it as safetensors")
    file = RangedFile(weights)
    with closing(file):
        modules: dict[str, _Parts] = {}
        for name, tensor in read_header(file).items():
            if isinstance(tensor, str):
                raise unread_type_error(weights, name, tensor)
            found = _PEFT.fullmatch(name.removeprefix(_WRAPPER))
            if found is None and name.endswith(_COPIES):
                continue  # of the base's, which PEFT saves beside what it has for tokens
            if found is None:
                raise UnsupportedModelError(
                    f"{weights}: tensor {name!r:.120} is no part of a low rank: an adapter that "
                    "holds whole modules (modules_to_save, bias) must be merged into its model"
                )
            parts = modules.setdefault(found["module"], _Parts())
            kind = found["part"].removeprefix("embedding_")
            parts.of_tokens |= kind != found["part"]
            setattr(parts, {"A": "a", "B": "b"}.get(kind, "magnitude"), tensor)
        scale = _peft_scale(config, config_path)
        with ThreadPoolExecutor(1) as pool:
            key = pool.submit(_digest, file, config_path.read_bytes())
            return _assembled(weights, key.result, modules, base, _peft_names(base), scale)


def _check_config(config: Mapping[str, Any], path: Path) -> None:
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


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def _peft_scale(config: Mapping[str, Any], path: Path) -> Callable[[str, int], float]:
    """What a module's product is times, from its name and rank."""

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
            raise CheckpointError(f"{path}: module {module!r:.100} has rank {rank}, not {told:g}")
        alpha = of("alpha_pattern", module, config["lora_alpha"])
        return float(alpha / rank**0.5 if config.get("use_rslora") else alpha / rank)

    return scale


def _peft_names(base: Checkpoint) -> Callable[[str], str]:
    """From a module's name to the tensor that it changes."""
    multimodal = is_multimodal(base.config)

    def name(module: str) -> str:
        whole = f"{module}.weight"
        if whole in base.tensors:
            return whole
        return decoder_tensor(whole, base.config, multimodal=multimodal) or whole

    return name


def _read_gguf(path: Path, base: Checkpoint) -> Adapter[LowRank]:
    with closing(GgufFile(path)) as file:
        metadata = file.metadata
        kind = (metadata.text("general.type"), metadata.text("adapter.type"))
        if kind != ("adapter", "lora"):
            raise CheckpointError(f"{path} is no LoRA adapter: its type is {kind[0]} {kind[1]}")
        alpha = metadata.number("adapter.lora.alpha")
        if alpha is None or not alpha > 0:
            raise CheckpointError(f"{path}: adapter.lora.alpha must be above 0, is {alpha}")
        architecture = metadata.text("general.architecture") or ""
        modules: dict[str, _Parts] = {}
        for name, tensor in file.tensors.items():
            found = _GGUF.fullmatch(name)
            if found is None:
                raise UnsupportedModelError(
                    f"{path}: tensor {name!r:.120} is no part of a low rank"
                )
            parts = modules.setdefault(found["module"], _Parts())
            setattr(parts, found["part"], tensor)
            parts.of_tokens = found["module"].startswith("token_embd")

        def name_of(module: str) -> str:
            return hf_tensor_name(architecture, module)

        def scale(_: str, rank: int) -> float:
            return float(alpha) / rank

        with closing(RangedFile(path)) as ranged, ThreadPoolExecutor(1) as pool:
            key = pool.submit(_digest, ranged, b"")
            adapter = _assembled(path, key.result, modules, base, name_of, scale)
    if architecture not in INTERLEAVED_ROTARY:
        return adapter
    turned = {name: _turned(name, part, base) for name, part in adapter.matrices.items()}
    return replace(adapter, matrices=turned)


def _turned(name: str, part: LowRank, base: Checkpoint) -> LowRank:
    """Rows of queries and keys as ``rotary_rows.py`` has the base's."""
    stem = name.removesuffix(".weight")
    if not stem.endswith(("self_attn.q_proj", "self_attn.k_proj")):
        return part
    heads = base.config.get("num_attention_heads")
    if stem.endswith("k_proj"):
        heads = base.config.get("num_key_value_heads", heads)
    assert isinstance(heads, int), "the base was read with so many"
    rows, rank = part.b.shape
    pairs = part.b.reshape(heads, rows // heads // 2, 2, rank)
    return replace(part, b=np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, rank))


def _assembled(
    path: Path,
    key: Callable[[], str],
    modules: Mapping[str, _Parts],
    base: Checkpoint,
    name_of: Callable[[str], str],
    scale: Callable[[str, int], float],
) -> Adapter[LowRank]:
    """Check every module, then read them."""
    if not modules:
        raise CheckpointError(f"{path} holds no adapter's tensors")
    tied = _HEAD not in base.tensors
    checked = [
        (module, *_checked(path, module, parts, base, name_of(module), tied))
        for module, parts in modules.items()
    ]
    matrices: dict[str, LowRank] = {}
    embedding = head = None
    for module, name, a, b in checked:
        parts = modules[module]
        rank = b.info.shape[1]
        low = _values(a)
        if parts.of_tokens and a.info.shape[0] != rank:
            low = np.ascontiguousarray(low.T)  # llama.cpp keeps a row for each token
        factor = scale(module, rank)
        part = LowRank(low, _values(b) if factor == 1 else _values(b) * np.float32(factor))
        if parts.magnitude is not None:
            part = _decomposed(part, _values(parts.magnitude).reshape(-1), name, base)
        if name == _HEAD:
            head = part
        elif name == _EMBEDDING:
            embedding = part
        else:
            matrices[name] = part
    return Adapter(key(), matrices, embedding, head)


def _checked(
    path: Path, module: str, parts: _Parts, base: Checkpoint, name: str, tied: bool
) -> tuple[str, StoredTensor, StoredTensor]:
    a, b = parts.a, parts.b
    if a is None or b is None:
        raise CheckpointError(f"{path}: module {module!r:.100} has no lora_{'B' if a else 'A'}")
    info = base.tensors.get(_EMBEDDING if name == _HEAD and tied else name)
    if info is None:
        why = "the adapter is for another model"
        if ".experts" in name:
            why = f"experts cannot be adapted, or {why}"
        elif name.endswith(_KEPT_OTHERWISE):
            why = "localrt keeps its matrix in parts: merge it with PEFT (merge_and_unload)"
        raise CheckpointError(f"{path}: {base.path.name} has no module {module!r:.100}: {why}")
    if len(a.info.shape) != 2 or len(b.info.shape) != 2:
        raise CheckpointError(f"{path}: module {module!r:.100} is not two matrices")
    if ".experts." in name:
        raise UnsupportedModelError(
            f"{path}: module {module!r:.100}: experts cannot be adapted: merge it with "
            "'localrt quantize MODEL --adapter PATH'"
        )
    rank = b.info.shape[1]
    of_rank = a.info.shape if a.info.shape[0] == rank else a.info.shape[::-1]
    if of_rank[0] != rank or (of_rank != a.info.shape and not parts.of_tokens):
        raise CheckpointError(
            f"{path}: module {module!r:.100}: the ranks of A {a.info.shape} and B {b.info.shape} "
            "disagree"
        )
    out, inner = info.shape if name != _EMBEDDING else info.shape[::-1]
    if (b.info.shape[0], of_rank[1]) != (out, inner):
        raise CheckpointError(
            f"{path}: module {module!r:.100} is {b.info.shape[0]} x {of_rank[1]}, in "
            f"{base.path.name} {out} x {inner}: the adapter is for another model"
        )
    if (magnitude := parts.magnitude) is not None and (
        int(np.prod(magnitude.info.shape)) != out or name == _EMBEDDING
    ):
        raise CheckpointError(
            f"{path}: module {module!r:.100}: magnitudes {magnitude.info.shape} for {out} rows"
        )
    return name, a, b


def _decomposed(part: LowRank, magnitude: Floats, name: str, base: Checkpoint) -> LowRank:
    """DoRA: each row of ``W + B A`` has a length of its own."""
    if name not in base.tensors:
        name = _EMBEDDING  # of a tied head
    factors, at = np.empty(len(magnitude), np.float32), 0
    for rows in _rows(base, name):
        rows = rows + part.b[at : at + len(rows)] @ part.a
        factors[at : at + len(rows)] = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))
        at += len(rows)
    factors = magnitude / factors
    return LowRank(part.a, part.b * factors[:, None], factors)


def _rows(base: Checkpoint, name: str) -> Iterator[Floats]:
    from localrt.quant.methods.restore import restored_rows

    for block in base.blocks(name):
        yield from restored_rows(block)


def _values(tensor: StoredTensor) -> Floats:
    values = unpack(tensor.read()).reshape(tensor.info.shape)
    flat = values.reshape(-1)
    if not np.isfinite(np.dot(flat, flat)):
        raise CheckpointError(f"tensor {tensor.info.name!r:.120} holds no finite numbers")
    return values


def _digest(file: RangedFile, config: bytes) -> str:
    """Names the contents: what was computed with an adapter must not pass for another's."""
    found = hashlib.sha256(config)
    for at in range(0, file.size, _HASHED):
        found.update(file.read(at, min(_HASHED, file.size - at)).data)
    return found.hexdigest()[:24]
