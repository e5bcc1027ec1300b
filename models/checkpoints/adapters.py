"""Low-rank adapters (LoRA, rsLoRA, DoRA): folders of PEFT and llama.cpp's GGUF files.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors`` (rsLoRA: arXiv:2312.03732).
Every matrix is checked against the base model before any is read, and gets the name and row order
of the tensor that it changes. Nothing is unpickled.

A checkpoint presents some matrices under other names, in parts, or with reordered rows
(``safetensors/names.py``, ``family_tensors.py``, ``row_order.py``). The same functions are applied
to a column of row numbers, to find where the base's rows went; an adapter's rows go there. Merging
is in float32; tensors that the adapter does not change are read unchanged. If embedding and head
share a table and the adapter changes one of them, they become two.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints.family_tensors import delta_tensors
from localrt.models.checkpoints.gguf.file import GgufFile, is_gguf
from localrt.models.checkpoints.gguf.names import hf_tensor_name
from localrt.models.checkpoints.safetensors.names import plain_tensors
from localrt.models.checkpoints.safetensors_header import (
    is_raw,
    read_header,
    read_json,
    unread_type_error,
)
from localrt.models.checkpoints.text_model import decoder_tensor
from localrt.models.raw_config import RawConfig
from localrt.models.registry import find_family
from localrt.models.row_order import rotary_rows
from localrt.models.tensor_source import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    RangedFile,
    RowSource,
    StoredTensor,
    TensorInfo,
    WeightBlock,
)
from localrt.models.weight_files import ADAPTER_NAME
from localrt.quant.formats import F32, PackedTensor, unpack
from localrt.quant.formats.packed import Bytes, Floats
from localrt.quant.methods.rotation import restored_rows
from localrt.quant.ops.adapters import Adapter, LowRank

Numbers = npt.NDArray[np.intp]
# Modules of encoders for images and sounds, as transformers calls them.
_ENCODERS = re.compile(
    r"(.+\.)?(visual|vision_tower|vision_model|vision_embed_tokens|audio_tower|audio_model"
    r"|multi_modal_projector|embed_vision|vision_adapter|vision_projection|embed_audio)(\..+)?",
    re.DOTALL,
)
_ONLY_MERGED = (
    # not computed by multiplying rows by a matrix
    (re.compile(r".+\.mlp\.gate\.weight", re.DOTALL), "routers"),
    (re.compile(r".+\.experts\.\d+\..+", re.DOTALL), "routed experts"),
    (re.compile(r".+\.[kv]_b_proj\.weight", re.DOTALL), "matrices of latent attention's heads"),
    (re.compile(r".+\b(ngram_embedding|embed_tokens_per_layer)\.weight", re.DOTALL), "tables"),
)
_IN_FILES = (
    # module names in folders, and the names that GGUF's are translated to
    (re.compile(r"\.feed_forward\.w1\."), ".mlp.gate_proj."),  # LFM2
    (re.compile(r"\.feed_forward\.w3\."), ".mlp.up_proj."),
    (re.compile(r"\.feed_forward\.w2\."), ".mlp.down_proj."),
    (re.compile(r"\.self_attn\.out_proj\."), ".self_attn.o_proj."),
    (re.compile(r"\.mlp\.shared_experts\."), ".mlp."),  # Granite without experts
    (re.compile(r"\.mixer\.(?=(in|out)_proj\.)"), ".mamba."),  # Nemotron-H
    (re.compile(r"\.mixer\.(?=[qkvo]_proj\.)"), ".self_attn."),
    (re.compile(r"\.mixer\.(?=(up|down)_proj\.)"), ".mlp."),
)
_COUNTED = {"moe_num_experts": 0}  # default for a config without experts
_IN_MEMORY = ".forget_gate."  # transformers' group of some of Kimi Linear's matrices
_DELTA = re.compile(r".+\.linear_attn\.(in_proj_(?P<part>qkv|z|b|a)|(?P<out>out_proj))\.weight")


@dataclass(frozen=True, slots=True)
class BaseMatrix:
    """A matrix of the base: its tensor, and which rows and columns of the module belong to it.

    None: all, in order.
    """

    name: str
    rows: Numbers | None = None
    columns: Numbers | None = None


def is_beside_text(module: str) -> bool:
    """Whether a module belongs to a vision or audio encoder, not to the decoder."""
    return _ENCODERS.fullmatch(module) is not None


def text_module(module: str, base: Checkpoint) -> str:
    """The decoder's name for a published module's matrix, without multimodal prefixes."""
    whole = f"{module}.weight"
    if whole in base.tensors:
        return whole
    whole = whole.replace(_IN_MEMORY, ".")
    plain = decoder_tensor(whole, base.config, multimodal=False)
    inner = decoder_tensor(whole, base.config, multimodal=True)
    return inner if inner is not None and plain == whole else plain or whole


def why_only_merged(name: str) -> str | None:
    """Why a tensor cannot be adapted while the model runs; None if it can."""
    return next((what for pattern, what in _ONLY_MERGED if pattern.fullmatch(name)), None)


def places(
    name: str, shape: tuple[int, int], base: Checkpoint, *, pairs: bool, converted: bool
) -> list[BaseMatrix]:
    """The places in ``base`` of the matrix published as ``name`` (a decoder's tensor).

    ``pairs``: rotary rows of queries and keys are published in pairs; ``converted``: rows are in
    the order of GGUF files.

    Raises:
        CheckpointError: its number of rows does not fit the base's config.
    """
    rows, columns = shape
    if name in base.tensors and not pairs and not _DELTA.fullmatch(name):
        return [BaseMatrix(name)]
    numbers: RowSource = _RowNumbers(TensorInfo(name, (rows, 1), F32, rows * F32.row_bytes(1)))
    family = find_family(base.architecture)
    parts = plain_tensors(family, base.architecture, {**_COUNTED, **base.config}, {name: numbers})
    parts = delta_tensors(parts, base.config)
    if pairs:
        parts = parts | rotary_rows(parts, base.config, base.path)
    found = []
    for own, source in parts.items():
        taken = source.read().data.view("<f4").reshape(-1).astype(np.intp)
        own = own if own in base.tensors else _in_file(own, base)
        place = BaseMatrix(own, None if len(taken) == rows and _in_order(taken) else taken)
        found.append(place if converted else _in_turns(place, len(taken), columns, base))
    return found


def _in_file(name: str, base: Checkpoint) -> str:
    """A tensor's name in the checkpoint of a GGUF file."""
    others = (pattern.sub(other, name) for pattern, other in _IN_FILES)
    return next((other for other in others if other in base.tensors), name)


def _in_order(numbers: Numbers) -> bool:
    return bool((numbers == np.arange(len(numbers))).all())


def _in_turns(place: BaseMatrix, rows: int, columns: int, base: Checkpoint) -> BaseMatrix:
    """Interleave the value heads of all key heads, as GGUF files of Qwen3.5 do."""
    match = _DELTA.fullmatch(place.name)
    turned = base.kind == "gguf" and find_family(base.architecture).gguf_by_turns
    if match is None or not turned:
        return place
    keys, heads, key, value = (
        int(cast(int, base.config[f"linear_{name}"]))
        for name in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    )
    width = 1 if match["part"] in ("b", "a") else value
    before = 2 * keys * key if match["part"] == "qkv" else 0
    count = columns if match["out"] else rows
    if count != before + heads * width:
        return place  # another shape: the later comparison of shapes reports it
    by_key = np.arange(before, count).reshape(keys, heads // keys, width)
    order = np.concatenate([np.arange(before), by_key.swapaxes(0, 1).reshape(-1)])
    if match["out"]:
        return BaseMatrix(place.name, place.rows, order)
    return BaseMatrix(place.name, order if place.rows is None else place.rows[order])


@dataclass(frozen=True, slots=True)
class _RowNumbers(RowSource):
    """A column that numbers the rows of a matrix."""

    def _read(self, start: int, stop: int) -> Bytes:
        return np.arange(start, stop, dtype="<f4").view(np.uint8)


class MergedCheckpoint:
    """A ``Checkpoint`` of ``base`` with the adapter merged; the caller closes ``base``."""

    def __init__(self, base: Checkpoint, adapter: Adapter[LowRank]) -> None:
        self._base = base
        self.path, self.stamp, self.notes = base.path, base.stamp, base.notes
        self.kind, self.architecture = base.kind, base.architecture  # rules for text still hold
        self.generation_config, self.metadata = base.generation_config, base.metadata
        self._changes: dict[str, LowRank] = dict(adapter.matrices)
        self._source = {name: name for name in base.tensors}
        self.config: Mapping[str, object] = base.config
        if HEAD not in base.tensors and (adapter.embedding or adapter.head):
            self._source[HEAD] = EMBEDDING
            self.config = {**base.config, "tie_word_embeddings": False}
        if (tokens := adapter.embedding) is not None:
            a = np.ascontiguousarray(tokens.a.T)  # (tokens, rank): a row of the table
            self._changes[EMBEDDING] = LowRank(np.ascontiguousarray(tokens.b.T), a)
        if adapter.head is not None:
            self._changes[HEAD] = adapter.head
        self.tensors: Mapping[str, TensorInfo] = {
            name: self._info(name, base.tensors[source]) for name, source in self._source.items()
        }

    def close(self) -> None:
        """Do nothing: the caller closes the base."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        block = self._base.read(self._source.get(name, name), start, stop)
        return self._merged(name, block, start) if name in self._changes else block

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[WeightBlock]:
        at = 0
        for block in self._base.blocks(self._source.get(name, name), max_bytes):
            yield self._merged(name, block, at) if name in self._changes else block
            at += block.shape[0]

    def _info(self, name: str, info: TensorInfo) -> TensorInfo:
        if name not in self._changes:
            return replace(info, name=name)
        rows, columns = info.shape
        return TensorInfo(name, info.shape, F32, rows * F32.row_bytes(columns))

    def _merged(self, name: str, block: WeightBlock, first: int) -> PackedTensor:
        change = self._changes[name]
        values = np.concatenate(list(restored_rows(block)))
        stop = first + len(values)
        if change.factors is not None:
            values *= change.factors[first:stop, None]
        values += change.b[first:stop] @ change.a
        return PackedTensor(name, F32, values.shape, values.view(np.uint8))


# Keys of PEFT that are applied, that tensors say too, or that matter to training and bookkeeping.
_KNOWN = (
    *("alpha_pattern", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern"),
    *("use_dora", "use_rslora"),
    *("ensure_weight_tying", "exclude_modules", "layers_pattern", "layers_to_transform"),
    *("modules_to_save", "target_modules", "target_parameters"),
    *("corda_config", "eva_config", "loftq_config", "lora_ga_config", "lora_dropout"),
    *("inference_mode", "megatron_core", "merge_weights", "qalora_group_size", "runtime_config"),
    *("auto_mapping", "base_model_name_or_path", "peft_version", "revision", "task_type"),
)
# Keys that change more than matrices by a low rank.
_REFUSED = {
    "alora_invocation_tokens": "that starts at its invocation tokens (aLoRA)",
    "arrow_config": "with routing among adapters",
    "bias": "with biases of its own",
    "fan_in_fan_out": "whose matrices are transposed",
    "kasa_config": "that also truncates the model's matrices (KaSA)",
    "layer_replication": "that repeats layers",
    "lora_bias": "with biases of its own",
    "megatron_config": "split for Megatron",
    "monteclora_config": "with samples of its own (MonteCLoRA)",
    "trainable_token_indices": "with rows of the embedding of its own",
    "use_bdlora": "of diagonal blocks (BD-LoRA)",
    "use_qalora": "of grouped inputs (QA-LoRA)",
    "velora_config": "with projections of its own (VeLoRA)",
}
# Values of init_lora_weights for which PEFT leaves the model's own matrices as they are.
_PLAIN_STARTS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
_MOST_REPEATS, _MOST_CHOICES = 3, 100  # limits of a pattern of module names


def check_peft_config(config: Mapping[str, Any], path: Path) -> None:
    """Check that ``config``, from ``path``, describes a supported PEFT adapter.

    Raises:
        CheckpointError: a key is malformed.
        UnsupportedModelError: it is of another kind than LoRA, rsLoRA and DoRA.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UnsupportedModelError(
            f"{path}: adapters of type {kind!r:.40} are not read: LoRA, rsLoRA and DoRA are"
        )
    for name, value in config.items():
        if name in _KNOWN or not value or value == "none":
            continue
        if name in _REFUSED:
            raise UnsupportedModelError(f"{path}: {name}: an adapter {_REFUSED[name]} is not read")
        raise UnsupportedModelError(
            f"{path}: the key {name!r:.60} is not known, and may change how the adapter is "
            "computed: remove it if it does not"
        )
    start = config.get("init_lora_weights")
    if start not in (None, True, False) and str(start).lower() not in _PLAIN_STARTS:
        raise UnsupportedModelError(
            f"{path}: init_lora_weights is {start!r:.40}: PEFT may then change the model's own "
            "matrices too: save the adapter with path_initial_model_for_weight_conversion, or "
            "merge it with PEFT (merge_and_unload)"
        )
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
    """Whether matching a pattern may take exponential time."""
    plain = re.sub(r"\\.", "x", pattern).replace("(?:", "(")
    repeats, groups = re.findall(r"[*+?{]", plain), plain.count("(")
    repeated = re.search(r"\)[*+?{]", plain) is not None
    return repeated or len(repeats) > _MOST_REPEATS or groups * plain.count("|") > _MOST_CHOICES


def _is_size(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e9


def peft_scale(config: Mapping[str, Any], path: Path) -> Callable[[str, int], float]:
    """Return a function from a module's name and rank to its scale.

    It raises ``CheckpointError`` if the config has a different rank.
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


WEIGHTS_NAME = "adapter_model.safetensors"
_HASHED = 1 << 18  # bytes hashed at a time, so that they stay in the CPU cache
_WRAPPER = "base_model.model."
# PEFT's names of a module's parts: A, B, and DoRA's magnitudes.
_PEFT = re.compile(
    r"(?P<module>.+)\.lora_(?P<part>A|B|embedding_A|embedding_B|magnitude_vector)"
    r"(\.default)?(\.weight)?"  # a model's whole state has the adapter's name too
)
_MERGE = "merge it with 'localrt quantize MODEL --adapter PATH'"
_COPIES = ("embed_tokens.base_layer.weight", "lm_head.base_layer.weight")
_GGUF = re.compile(r"(?P<module>.+)\.lora_(?P<part>[ab])")
_GGUF_KEYS = (
    "adapter.type",
    *(f"adapter.lora.{key}" for key in ("alpha", "task_name", "prompt_prefix")),
)
# Families whose rows GGUF's converter reorders by head.
_REORDERED = frozenset({"qwen3_5", "qwen4_exp"})
# GGUF architectures whose converter multiplies matrices by the config's factors.
_SCALED = frozenset({"falcon-h1"})


@dataclass(frozen=True, slots=True)
class _Source:
    """A file's names and layout."""

    path: Path
    name_of: Callable[[str], str]  # from a module's name to the tensor that it changes
    scale: Callable[[str, int], float]  # from a module's name and rank to its scale
    pairs: bool  # rotary rows of queries and keys are in pairs
    converted: bool = False  # rows are in the order of GGUF files


@dataclass(slots=True)
class _Parts:
    """The stored tensors of one module, not read yet."""

    a: StoredTensor | None = None
    b: StoredTensor | None = None
    magnitude: StoredTensor | None = None
    of_tokens: bool = False


def read_adapter(path: Path, base: Checkpoint, *, merging: bool = False) -> Adapter[LowRank]:
    """The adapter at ``path``, a folder or a ``.gguf`` file, for the model ``base``.

    DoRA's factors need the base's matrices, which are then read once. ``merging`` also allows
    matrices that cannot be adapted while the model runs.

    Raises:
        CheckpointError: it is damaged, or belongs to another base.
        UnsupportedModelError: it is of an unsupported kind.
    """
    if path.is_dir():
        return _read_folder(path, base, merging=merging)
    if path.suffix == ".gguf" or is_gguf(path):  # some programs store GGUF without a suffix
        return _read_gguf(path, base, merging=merging)
    raise CheckpointError(
        f"{path} is no adapter: give a folder of PEFT ({ADAPTER_NAME}, {WEIGHTS_NAME}), or a .gguf "
        "file"
    )


def _read_folder(path: Path, base: Checkpoint, *, merging: bool) -> Adapter[LowRank]:
    config_path = path / ADAPTER_NAME
    if not config_path.exists():
        raise CheckpointError(f"{path} is no adapter: it has no {ADAPTER_NAME}")
    config = read_json(config_path)
    if "peft_type" not in config and (path / "adapters.safetensors").exists():
        raise UnsupportedModelError(
            f"{path} is an adapter of mlx-lm, which localrt cannot read: take one of PEFT"
        )
    check_peft_config(config, config_path)
    if base.kind == "gguf" and base.architecture in _SCALED:
        raise UnsupportedModelError(
            f"{path}: {base.path.name} has the model's factors in its matrices, which an adapter "
            "does not: use the model's folder with it"
        )
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
            if isinstance(tensor, str) or is_raw(tensor.info.format):
                kind = tensor if isinstance(tensor, str) else tensor.info.format.name.upper()
                raise unread_type_error(weights, name, kind)
            found = _PEFT.fullmatch(name.removeprefix(_WRAPPER))
            if found is None and name.endswith(_COPIES):
                continue  # a copy of the base's table, which PEFT saves with adapted tokens
            if found is None:
                raise UnsupportedModelError(
                    f"{weights}: tensor {name!r:.120} is no part of a low rank: an adapter that "
                    "holds whole modules (modules_to_save, bias) must be merged into its model"
                )
            if is_beside_text(found["module"]):
                continue  # only the text model runs
            parts = modules.setdefault(found["module"], _Parts())
            part = found["part"]
            kind = part.removeprefix("embedding_").removesuffix("_vector").lower()
            parts.of_tokens |= part.startswith("embedding_")
            setattr(parts, kind, tensor)
        if config.get("use_dora") and (
            plain := next((name for name, parts in modules.items() if not parts.magnitude), None)
        ):
            raise CheckpointError(
                f"{weights}: module {plain!r:.100} has no magnitudes, though {ADAPTER_NAME} says "
                "that it is a DoRA"
            )
        source = _Source(
            weights,
            lambda module: text_module(module, base),
            peft_scale(config, config_path),
            pairs=find_family(base.architecture).in_pairs,
        )
        with ThreadPoolExecutor(1) as pool:
            key = pool.submit(_digest, file, config_path.read_bytes())
            return _assembled(source, key.result, modules, base, merging=merging)


def _read_gguf(path: Path, base: Checkpoint, *, merging: bool) -> Adapter[LowRank]:
    with closing(GgufFile(path)) as file:
        metadata = file.metadata
        kind = (metadata.text("general.type"), metadata.text("adapter.type"))
        if kind != ("adapter", "lora"):
            raise CheckpointError(f"{path} is no LoRA adapter: its type is {kind[0]} {kind[1]}")
        for name in metadata:
            if name.startswith("adapter.") and name not in _GGUF_KEYS:
                raise UnsupportedModelError(
                    f"{path}: {name:.60}: only plain LoRA adapters are read from GGUF files"
                )
        alpha = metadata.number("adapter.lora.alpha")
        if alpha is None or not alpha > 0:
            raise CheckpointError(f"{path}: adapter.lora.alpha must be above 0, is {alpha}")
        architecture = metadata.text("general.architecture") or ""
        family = find_family(architecture)
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
            return hf_tensor_name(family, module)

        def scale(_: str, rank: int) -> float:
            return float(alpha) / rank

        axes = "mrope_section" in RawConfig(base).mapping("rope_scaling")  # rows are in halves then
        pairs = family.gguf_in_pairs and not axes
        source = _Source(path, name_of, scale, pairs=pairs, converted=True)
        if family.name in _REORDERED and base.kind != "gguf":
            raise UnsupportedModelError(
                f"{path}: an adapter converted for GGUF files of {architecture} does not fit "
                f"{base.path.name}, whose heads lie in another order: use the adapter's PEFT folder"
            )
        with closing(RangedFile(path)) as ranged, ThreadPoolExecutor(1) as pool:
            key = pool.submit(_digest, ranged, b"")
            return _assembled(source, key.result, modules, base, merging=merging)


def _assembled(
    source: _Source,
    key: Callable[[], str],
    modules: Mapping[str, _Parts],
    base: Checkpoint,
    *,
    merging: bool,
) -> Adapter[LowRank]:
    """Check every module, then read them."""
    if not modules:
        raise CheckpointError(f"{source.path} holds no adapter's tensors of a text model")
    checked = [
        (module, *_checked(source, module, parts, base, merging=merging))
        for module, parts in modules.items()
    ]
    matrices: dict[str, LowRank] = {}
    embedding = head = None
    for module, found, a, b in checked:
        parts = modules[module]
        low, high = _values(a), _values(b)
        rank = high.shape[1]
        if parts.of_tokens and a.info.shape[0] != rank:
            low = np.ascontiguousarray(low.T)  # llama.cpp stores one row per token
        factor = source.scale(module, rank)
        if factor != 1:
            high = high * np.float32(factor)
        magnitude = None if parts.magnitude is None else _values(parts.magnitude).reshape(-1)
        for place in found:
            part = LowRank(
                low if place.columns is None else np.ascontiguousarray(low[:, place.columns]),
                high if place.rows is None else high[place.rows],
            )
            if magnitude is not None:
                own = magnitude if place.rows is None else magnitude[place.rows]
                part = _decomposed(part, own, place.name, base)
            if place.name == HEAD:
                head = part
            elif place.name == EMBEDDING:
                embedding = part
            else:
                matrices[place.name] = part
    return Adapter(key(), matrices, embedding, head)


def _checked(
    source: _Source, module: str, parts: _Parts, base: Checkpoint, *, merging: bool
) -> tuple[list[BaseMatrix], StoredTensor, StoredTensor]:
    """Return a module's places in the base, and its two matrices."""
    a, b, path = parts.a, parts.b, source.path
    if a is None or b is None:
        raise CheckpointError(f"{path}: module {module!r:.100} has no lora_{'B' if a else 'A'}")
    if len(a.info.shape) != 2 or len(b.info.shape) != 2:
        raise CheckpointError(f"{path}: module {module!r:.100} is not two matrices")
    low, high = a.info.shape, b.info.shape
    rank = high[1]
    of_rank = low if low[0] == rank else low[::-1]
    if of_rank[0] != rank or (of_rank != low and not parts.of_tokens):
        raise CheckpointError(
            f"{path}: module {module!r:.100}: the ranks of A {a.info.shape} and B {b.info.shape} "
            "disagree"
        )
    shape = (high[0], of_rank[1])
    found = _places(source, module, shape, base)
    for place in found:
        what = None if merging else why_only_merged(place.name)
        if what is not None:
            raise UnsupportedModelError(
                f"{path}: module {module!r:.100}: {what} cannot be adapted while the model runs: "
                f"{_MERGE}"
            )
    if (magnitude := parts.magnitude) is not None and (
        int(np.prod(magnitude.info.shape)) != shape[0] or found[0].name == EMBEDDING
    ):
        raise CheckpointError(
            f"{path}: module {module!r:.100}: magnitudes {magnitude.info.shape} for {shape[0]} rows"
        )
    return found, a, b


def _places(
    source: _Source, module: str, shape: tuple[int, int], base: Checkpoint
) -> list[BaseMatrix]:
    """Return the places of a module of ``shape``; checks that the base has them."""
    name = source.name_of(module)
    try:
        found = places(name, shape, base, pairs=source.pairs, converted=source.converted)
    except CheckpointError as error:
        raise CheckpointError(
            f"{source.path}: module {module!r:.100} has {shape[0]} rows, which are not those of "
            f"{base.path.name}: the adapter is for another model"
        ) from error
    tied = HEAD not in base.tensors
    for place in found:
        info = base.tensors.get(EMBEDDING if place.name == HEAD and tied else place.name)
        if info is None or len(info.shape) != 2:
            raise CheckpointError(
                f"{source.path}: {base.path.name} has no module {module!r:.100}: {_why_not(name)}"
            )
        out, inner = info.shape if place.name != EMBEDDING else info.shape[::-1]
        rows = shape[0] if place.rows is None else len(place.rows)
        if (rows, shape[1]) != (out, inner):
            raise CheckpointError(
                f"{source.path}: module {module!r:.100} is {rows} x {shape[1]}, in "
                f"{base.path.name} {out} x {inner}: the adapter is for another model"
            )
    return found


def _why_not(name: str) -> str:
    if ".experts" in name:
        return "adapters of all experts at once are not read: merge it with PEFT (merge_and_unload)"
    if name.endswith(".kv_b_proj.weight"):
        return "each head's part is computed by itself: merge it with PEFT (merge_and_unload)"
    return "the adapter is for another model"


def _decomposed(part: LowRank, magnitude: Floats, name: str, base: Checkpoint) -> LowRank:
    """DoRA: scale each row of ``W + B A`` to its own magnitude."""
    if name not in base.tensors:
        name = EMBEDDING  # the head is tied
    factors, at = np.empty(len(magnitude), np.float32), 0
    for rows in _rows(base, name):
        rows = rows + part.b[at : at + len(rows)] @ part.a
        factors[at : at + len(rows)] = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))
        at += len(rows)
    with np.errstate(all="ignore"):
        factors = magnitude / factors
    if not np.isfinite(factors).all():
        raise CheckpointError(f"{base.path.name}: rows of {name} are 0: a DoRA cannot scale them")
    return LowRank(part.a, part.b * factors[:, None], factors)


def _rows(base: Checkpoint, name: str) -> Iterator[Floats]:
    from localrt.quant.methods.rotation import restored_rows

    for block in base.blocks(name):
        yield from restored_rows(block)


def _values(tensor: StoredTensor) -> Floats:
    values = unpack(tensor.read()).reshape(tensor.info.shape)
    flat = values.reshape(-1)
    if not np.isfinite(np.dot(flat, flat)):
        raise CheckpointError(
            f"{tensor.file.path}: tensor {tensor.info.name!r:.120} holds no finite numbers: "
            "train or download it again"
        )
    return values


def _digest(file: RangedFile, config: bytes) -> str:
    """A digest of the contents, so that cached results of two adapters never mix."""
    found = hashlib.sha256(config)
    for at in range(0, file.size, _HASHED):
        found.update(file.read(at, min(_HASHED, file.size - at)).data)
    return found.hexdigest()[:24]
