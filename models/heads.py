"""Draft heads: small decoders that draft for one model and read its features.

Two kinds: a block of multi-token prediction (MTP), which is published inside the model's own files
or in a file of its own, and an EAGLE-3 head, a folder. ``models/layers/heads.py`` computes them. A
head shares its target's embedding and output matrix where it has none of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, LocalrtError, UnsupportedModelError
from localrt.models.architectures import llama
from localrt.models.checkpoints.base import Checkpoint, StoredTensor, TensorInfo, WeightBlock
from localrt.models.checkpoints.gguf.checkpoint import GgufCheckpoint
from localrt.models.checkpoints.safetensors.folder import SafetensorsCheckpoint
from localrt.models.checkpoints.safetensors.header import read_json
from localrt.models.config import EMBEDDING, HEAD, DecoderConfig, Part
from localrt.models.decoder import Decoder, load_attention, load_norm, load_resident_mlp
from localrt.models.layers.block import ResidualBlock
from localrt.models.layers.heads import FeatureBlock, PredictionBlock
from localrt.models.layers.moe import ResidentExperts
from localrt.models.layers.parts import Embedding, Head
from localrt.models.raw_config import RawConfig
from localrt.models.registry import read_config
from localrt.models.weight_store import ResidentWeights
from localrt.models.weights import WeightLoader
from localrt.quant.formats import BF16, F16, F32, Format, pack, unpack
from localrt.quant.formats.packed import PackedTensor
from localrt.quant.methods.quantize import quantized_format
from localrt.quant.ops.arrays import Weight
from localrt.quant.ops.features import AFTER_LAST
from localrt.quant.ops.protocol import Ops

Ints = npt.NDArray[np.int64]

EAGLE3 = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator")
"""The architectures of EAGLE-3 heads in ``config.json``."""

_TOKENS = "d2t"  # how far each draft token's id is from the target's
_UNUSED = "t2d"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head. It reads the residual stream before ``layers`` of its target, the last one's output
    included, or, if ``normed``, what its target's final norm makes of it, and its own makes of its
    own output. ``tokens`` (V,) are the target's ids of its vocabulary; None is all of them.
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]
    normed: bool
    tokens: Ints | None = None


@dataclass(frozen=True, slots=True)
class Shared:
    """What a head uses of its target: how tokens are embedded, and the output matrix, if it is in
    memory.
    """

    embedding: Part
    head: Weight | None


class HeadFolder(SafetensorsCheckpoint):
    """A folder with an EAGLE-3 head, its layer as ``model.layers.0``. ``offsets`` (V,) are added to
    the ids of its tokens; None where they are the target's.
    """

    offsets: Ints | None = None

    def _located(self, *, multimodal: bool) -> dict[str, StoredTensor]:
        found = super()._located(multimodal=multimodal)
        if (offsets := found.pop(_TOKENS, None)) is not None:
            if offsets.info.format.name != "i64":
                raise CheckpointError(f"{self.path}: {_TOKENS} holds no 64-bit integers")
            self.offsets = np.array(offsets.read().data.view("<i8").reshape(-1), np.int64)
        renamed = {_plain(name): each for name, each in found.items()}
        return {
            name: replace(each, info=replace(each.info, name=name))
            for name, each in renamed.items()
        }

    def _wanted(self, name: str) -> bool:
        return name != _UNUSED and super()._wanted(name)


def _plain(name: str) -> str:
    if name.startswith(("midlayer.", "layers.0.")):
        return f"model.layers.0.{name.split('.', 2 if name[0] == 'l' else 1)[-1]}"
    return name if name.startswith("lm_head.") else f"model.{name.removeprefix('model.')}"


def open_head(path: Path) -> Checkpoint:
    """Open the head at ``path``: a folder with an EAGLE-3 head, or the MTP block in a model's
    files, or in a file of its own.

    Raises:
        CheckpointError: there is none.
    """
    if not path.is_dir():
        return GgufCheckpoint(path, predicts=True)
    names = read_json(path / "config.json").get("architectures")
    if isinstance(names, list) and names and names[0] in EAGLE3:
        return HeadFolder(path)
    return SafetensorsCheckpoint(path, predicts=True)


def has_prediction_block(path: Path) -> bool:
    """Whether the model at ``path`` has an MTP block that ``open_head`` opens."""
    try:
        open_head(path).close()
    except (LocalrtError, OSError):
        return False
    return True


def is_head(path: Path) -> bool:
    """Whether there is only a head at ``path``, and no model."""
    try:
        checkpoint = open_head(path)
    except (LocalrtError, OSError):
        return False
    checkpoint.close()
    alone = isinstance(checkpoint, GgufCheckpoint) and checkpoint.only_predicts
    return alone or isinstance(checkpoint, HeadFolder)


def read_head_config(checkpoint: Checkpoint, target: DecoderConfig) -> HeadConfig:
    """Read the config of a head, which must fit ``target``.

    Raises:
        UnsupportedModelError: it is another model's, or of an unknown kind.
    """
    read = _read_eagle3 if isinstance(checkpoint, HeadFolder) else _read_prediction
    head = read(checkpoint, target)
    own = head.decoder
    if own.hidden_size != target.hidden_size:
        raise UnsupportedModelError(
            f"it has {own.hidden_size} hidden numbers and the model {target.hidden_size}"
        )
    if head.tokens is None and own.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"it has {own.vocab_size} tokens and the model {target.vocab_size}"
        )
    if head.tokens is not None and not _within(head.tokens, target.vocab_size):
        raise UnsupportedModelError("its tokens are not all of the model's")
    return head


def _read_prediction(checkpoint: Checkpoint, target: DecoderConfig) -> HeadConfig:
    decoder = read_config(checkpoint)
    if type(decoder.block) is not ResidualBlock:
        raise UnsupportedModelError(f"the MTP block of {decoder.architecture} is not supported")
    decoder = replace(decoder, block=PredictionBlock(scale=decoder.block.scale))
    return HeadConfig(decoder=decoder, layers=(AFTER_LAST,), normed=True)


def _read_eagle3(checkpoint: Checkpoint, target: DecoderConfig) -> HeadConfig:
    assert isinstance(checkpoint, HeadFolder), "it was opened as one"
    config = checkpoint.config
    raw = RawConfig(checkpoint)
    own = llama.read_config(raw)
    if own.layers != 1:
        raise UnsupportedModelError(f"{checkpoint.path.name}: an EAGLE-3 head has one layer")
    layers = _feature_layers(config, target.layers)
    features = raw.integer("target_hidden_size", target.hidden_size) * len(layers)
    block = FeatureBlock(
        features=features,
        features_normed=raw.flag("norm_before_fc"),
        residual_normed=raw.flag("norm_before_residual"),
    )
    offsets = checkpoint.offsets
    tokens = None if offsets is None else np.arange(len(offsets)) + offsets
    size = target.vocab_size if tokens is None else len(tokens)
    names = replace(own.names, attention_norm="")
    decoder = replace(own, block=block, vocab_size=size, names=names, tied_head=False)
    return HeadConfig(decoder=decoder, layers=layers, normed=False, tokens=tokens)


def _feature_layers(config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """The layers whose inputs a head reads, by default those of the paper.

    SpecForge lists the layers whose outputs it reads, within ``eagle_config``; vLLM and llama.cpp
    count inputs.
    """
    own = config.get("eagle_config")
    inside = isinstance(own, dict)
    listed = (own if isinstance(own, dict) else config).get("eagle_aux_hidden_state_layer_ids")
    if listed is None:
        return (2, layers // 2, layers - 3)
    if not isinstance(listed, list) or any(type(number) is not int for number in listed):
        raise UnsupportedModelError(f"an EAGLE-3 head's layers are {listed!r}")
    inputs = [number + inside for number in listed]
    if not all(0 <= number <= layers for number in inputs):
        raise UnsupportedModelError(f"it reads layers {listed}, and the model has {layers}")
    return tuple(AFTER_LAST if number == layers else number for number in inputs)


def _within(tokens: Ints, count: int) -> bool:
    return bool(tokens.size and tokens.min() >= 0 and tokens.max() < count)


_8_BITS = quantized_format("int8-g32")


def _kept_format(info: TensorInfo) -> Format:
    """What a head's matrix is kept in: 8 bits where it has 16 or 32. It is read at every step."""
    plain = info.format in (F32, F16, BF16) and len(info.shape) > 1 and not info.shape[1] % 32
    return _8_BITS if plain else info.format


def head_nbytes(checkpoint: Checkpoint, ops: Ops) -> int:
    """The bytes that a head's own weights take in ``ops``."""
    packed = ops.compute_format == "packed"
    total = 0
    for info in checkpoint.tensors.values():
        shape = (math.prod(info.shape[:-1]), info.shape[-1])
        total += ops.weight_nbytes(shape, _kept_format(info) if packed else info.format)
    return total


def load_head(checkpoint: Checkpoint, config: HeadConfig, ops: Ops, shared: Shared) -> Decoder:
    """Read a head's weights into ``ops``, and build it around what it shares.

    Raises:
        CheckpointError: a tensor is missing, or not the config's.
    """
    decoder = config.decoder

    def kept(block: WeightBlock) -> WeightBlock:
        format_ = _kept_format(checkpoint.tensors[block.name])
        if ops.compute_format != "packed" or not isinstance(block, PackedTensor):
            return block
        return block if block.format == format_ else pack(unpack(block), format_, name=block.name)

    weights = WeightLoader(checkpoint, ops, repack=kept)
    shape = (decoder.vocab_size, decoder.hidden_size)
    with ops.scope():
        embedding = shared.embedding
        if EMBEDDING in checkpoint.tensors:
            rows = checkpoint.tensors[EMBEDDING].shape[0]
            embedding = Embedding(weights.matrix((rows, shape[1]), EMBEDDING), 1.0)
        experts = ResidentExperts()
        body = [
            embedding,
            load_attention(decoder, 0, weights),
            load_resident_mlp(decoder, 0, weights, ops, experts),
        ]
        head = weights.matrix(shape, HEAD) if HEAD in checkpoint.tensors else shared.head
        if head is None:
            raise CheckpointError(f"{checkpoint.path.name} has no output matrix of its own")
        end = Head(decoder, load_norm(decoder, weights), head)
    weights.finish()
    return Decoder(ResidentWeights(ops, decoder, body, end, experts))
