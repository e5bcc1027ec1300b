"""Maps tensor names of Hugging Face folders to localrt's names.

Most architectures use Llama's names, as localrt does. Mixtures differ in how they name and stack
their experts: tables have the names below ``model.layers.N.``, where ``{}`` is an expert's number.
Experts are presented separately: ``mlp.experts.E.gate_proj.weight``.

gpt-oss's experts are published in MXFP4: ``..._blocks`` (experts, rows, groups, 16) has two
adjacent columns in each byte, ``..._scales`` (experts, rows, groups) the exponents.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from localrt.common.errors import CheckpointError
from localrt.models.architectures.family import DOWN, GATE_UP, Family
from localrt.models.checkpoints.schemes.floats import regrouped_nibbles
from localrt.models.config import CHOICE_BIAS, ROUTER
from localrt.models.row_order import Stack, check_stack, split_rows, split_stack
from localrt.models.tensor_source import RowSource, StoredTensor, TensorInfo
from localrt.quant.formats import MXFP4
from localrt.quant.formats.packed import Bytes

_HALF = MXFP4.block // 2  # bytes of nibbles per group


def split_mxfp4(
    blocks: StoredTensor, scales: StoredTensor, stack: Stack, prefix: str, count: int | None
) -> Iterator[RowSource]:
    """Split the two tensors into every expert's matrices.

    Raises:
        CheckpointError: their shapes do not fit the number of experts.
    """
    experts = check_stack(blocks.info, 4, count)
    _, rows, groups, width = blocks.info.shape
    parts = len(stack.names)
    if width != _HALF or rows % parts or scales.info.shape != blocks.info.shape[:3]:
        raise CheckpointError(
            f"tensors {blocks.info.name!r:.80} {blocks.info.shape} and {scales.info.name!r:.80} "
            f"{scales.info.shape} are not MXFP4 weights in groups of {MXFP4.block}"
        )
    shape = (rows // parts, groups * MXFP4.block)
    nbytes = shape[0] * MXFP4.row_bytes(shape[1])
    for expert in range(experts):
        for part, name in enumerate(stack.names):
            info = TensorInfo(prefix + name.format(expert), shape, MXFP4, nbytes)
            yield _Mxfp4Rows(info, blocks, scales, expert * rows + part, parts)


@dataclass(frozen=True, slots=True)
class _Mxfp4Rows(RowSource):
    """Rows ``first``, ``first + step``, ... of the two tensors, counted over all experts."""

    nibbles: StoredTensor
    scales: StoredTensor
    first: int
    step: int

    def _read(self, start: int, stop: int) -> Bytes:
        count, groups = stop - start, self.info.shape[1] // MXFP4.block
        out = np.empty((count, groups, MXFP4.block_bytes), np.uint8)
        out[:, :, 0] = self._rows(self.scales, start, stop, groups)
        pairs = self._rows(self.nibbles, start, stop, groups * _HALF)
        pairs = pairs.reshape(count, groups, _HALF)
        out[:, :, 1:] = regrouped_nibbles(pairs)
        return out

    def _rows(self, tensor: StoredTensor, start: int, stop: int, width: int) -> Bytes:
        """(stop - start, width) bytes, from the one range of the file that holds them."""
        first, last = self.first + start * self.step, self.first + (stop - 1) * self.step
        data = tensor.file.read(tensor.offset + first * width, (last - first + 1) * width)
        return data.reshape(-1, width)[:: self.step]


_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_KINDS = ("gate", "up", "down")
_OURS: Mapping[str, str] = {
    # other name, of several families, to localrt's name; ``{}`` is the same number in both
    # Qwen, Hunyuan, Kimi
    **{
        f"{shared}.{kind}_proj.weight": f"mlp.shared_experts.{kind}_proj.weight"
        for shared in ("mlp.shared_expert", "mlp.shared_mlp", "block_sparse_moe.shared_experts")
        for kind in _KINDS
    },
    # Mixtral, LFM2-MoE
    **{
        f"{mlp}.experts.{{}}.{theirs}.weight": ours
        for mlp in ("block_sparse_moe", "mlp", "feed_forward", "ffn")
        for theirs, ours in zip(("w1", "w3", "w2"), (*GATE_UP, *DOWN), strict=True)
    },
    "block_sparse_moe.gate.weight": f"{ROUTER}.weight",
    "mlp.router.gate.weight": f"{ROUTER}.weight",  # Trinity, Hy3
    # Kimi; also transformers' dense layers
    **{f"block_sparse_moe.{kind}_proj.weight": f"mlp.{kind}_proj.weight" for kind in _KINDS},
    # MLX
    "self_attn.embed_q.weight": "self_attn.k_b_proj.weight",
    "self_attn.unembed_out.weight": "self_attn.v_b_proj.weight",
}
_STACKS: Mapping[str, Stack] = {
    # transformers 5's form of experts in memory, sometimes published: stacked, gate before up
    **{
        f"{mlp}experts.{kind}_proj": Stack(names)
        for mlp in ("mlp.", "", "feed_forward.", "block_sparse_moe.")  # without ".mlp": Gemma 4
        for kind, names in (("gate_up", GATE_UP), ("down", DOWN))
    },
    # MLX
    **{
        f"{mlp}.switch_mlp.{kind}_proj.weight": Stack((f"mlp.experts.{{}}.{kind}_proj.weight",))
        for mlp in ("mlp", "block_sparse_moe")
        for kind in _KINDS
    },
}
_TOP = {
    "model.embedding_norm.weight": "model.norm.weight",  # LFM2
    "model.final_layernorm.weight": "model.norm.weight",  # Falcon-H1
    "model.embeddings.weight": "model.embed_tokens.weight",  # Nemotron-H
    "model.norm_f.weight": "model.norm.weight",
    "model.word_embeddings.weight": "model.embed_tokens.weight",  # Ling
}
_QWEN3_VL = "Qwen3VLMoeForConditionalGeneration"
_QWEN3_VL_STACKS: Mapping[str, Stack] = {
    # as published; transformers saves stacks as in ``_STACKS``
    "mlp.experts.gate_up_proj": Stack(GATE_UP, transposed=True),
    "mlp.experts.down_proj": Stack(DOWN, transposed=True),
}
_MXFP4: Mapping[str, Stack] = {
    # gpt-oss: as two tensors, ``..._blocks`` and ``..._scales``
    "mlp.experts.gate_up_proj": Stack(GATE_UP, turns=True),
    "mlp.experts.down_proj": Stack(DOWN),
}
_LAYER = re.compile(r"(?P<prefix>model\.layers\.\d{1,9}\.)(?P<stem>.+)", re.DOTALL)
_CHOICE_BIASES = (".e_score_correction_bias", ".expert_bias")  # the ends of all its names
_NUMBER = re.compile(r"(?<=\.experts\.)\d{1,9}(?=\.)")
_BLOCKS, _SCALES = "_blocks", "_scales"


def plain_tensors(
    family: Family, architecture: str, config: Mapping[str, object], stored: Mapping[str, RowSource]
) -> dict[str, RowSource]:
    """``stored`` under localrt's names, with separate experts.

    Raises:
        CheckpointError: two tensors have the same name, or a stack does not fit the config.
    """
    named: dict[str, RowSource] = {}
    for tensor in stored.values():
        _add(named, _named(tensor, family), tensor.info.name)
    count = _expert_count(config)
    if count is None:
        return named
    stacks = {**_stacks(architecture, config, named), **family.stacks}
    plain: dict[str, RowSource] = {}
    for name, tensor in named.items():
        for part in _parts(stacks, name, tensor, named, count):
            _add(plain, part, name)
    return plain


def _add(tensors: dict[str, RowSource], tensor: RowSource, published: str) -> None:
    if tensors.setdefault(tensor.info.name, tensor) is not tensor:
        raise CheckpointError(f"tensor {published!r:.80} appears twice under names of one meaning")


def _named(tensor: RowSource, family: Family) -> RowSource:
    """Return the tensor under its localrt name, if it is not a stack."""
    theirs, shape = tensor.info.name, tensor.info.shape
    name, layer = family.tensors.get(theirs) or _TOP.get(theirs), _LAYER.fullmatch(theirs)
    if layer is not None:
        stem = layer["stem"]
        number = _NUMBER.search(stem)
        pattern = stem if number is None else _NUMBER.sub("{}", stem, count=1)
        ours = family.tensors.get(pattern) or _OURS.get(pattern)
        if stem.endswith(_CHOICE_BIASES):
            ours = CHOICE_BIAS
        if ours is not None:
            name = layer["prefix"] + (ours if number is None else ours.format(number[0]))
            if ours == CHOICE_BIAS and len(shape) == 2 and shape[0] == 1:
                shape = shape[1:]
    if name is None:
        return tensor
    return replace(tensor, info=replace(tensor.info, name=name, shape=shape))


def _expert_count(config: Mapping[str, object]) -> int | None:
    """The number of experts per layer, if the config has it."""
    values = (config.get(key) for key in _COUNT_KEYS)
    return next((value for value in values if type(value) is int), None)


def _stacks(
    architecture: str, config: Mapping[str, object], stored: Mapping[str, RowSource]
) -> Mapping[str, Stack]:
    """The stacks of a layer's experts, if they are stacked."""
    if architecture == _QWEN3_VL:
        for name, tensor in stored.items():
            if name.endswith("mlp.experts.gate_up_proj"):
                plain = tensor.info.shape[-1] == config.get("hidden_size")
                return _STACKS if plain else _QWEN3_VL_STACKS
    return _STACKS


def _split(tensor: RowSource, stack: Stack, prefix: str, count: int) -> list[RowSource]:
    """A stacked tensor's parts."""
    if isinstance(tensor, StoredTensor):
        return list(split_stack(tensor, stack, prefix, count))
    return list(split_rows(tensor, stack, prefix, count))


def _parts(
    stacks: Mapping[str, Stack],
    name: str,
    tensor: RowSource,
    stored: Mapping[str, RowSource],
    count: int,
) -> list[RowSource]:
    """localrt's tensors for one tensor; none if it belongs to another tensor."""
    match = _LAYER.fullmatch(name)
    if match is None:
        return [tensor]
    prefix, stem = match["prefix"], match["stem"]
    if (stack := stacks.get(stem)) is not None:
        return _split(tensor, stack, prefix, count)
    kind = stem[-len(_BLOCKS) :]
    packed = _MXFP4.get(stem.removesuffix(kind))
    if packed is not None and kind in (_BLOCKS, _SCALES):
        other = name.removesuffix(kind) + (_SCALES if kind == _BLOCKS else _BLOCKS)
        if other not in stored:
            raise CheckpointError(f"tensor {other!r:.80} of {name!r:.80} is missing")
        if kind == _SCALES:
            return []
        both = tensor, stored[other]
        if isinstance(both[0], StoredTensor) and isinstance(both[1], StoredTensor):
            return list(split_mxfp4(both[0], both[1], packed, prefix, count))
    return [tensor]
