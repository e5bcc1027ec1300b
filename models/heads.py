"""Draft heads: small decoders that draft for one model and read its features.

A block of multi-token prediction (MTP) is published inside the model's own files or in a file of
its own, an EAGLE-3 head, an assistant of Gemma 4 and DFlash as a folder or a GGUF file.
``models/layers/heads.py`` computes them. A head shares its target's embedding and output matrix
where it has none of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, LocalrtError, UnsupportedModelError
from localrt.common.formatting import format_bytes
from localrt.models.architectures import gemma4, llama, qwen
from localrt.models.checkpoints.base import Checkpoint, StoredTensor, TensorInfo, WeightBlock
from localrt.models.checkpoints.gguf.checkpoint import GgufCheckpoint
from localrt.models.checkpoints.safetensors.folder import SafetensorsCheckpoint
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import MANIFEST_NAME
from localrt.models.checkpoints.text_model import ASSISTANTS, DFLASH, EAGLE3, DraftHeadError
from localrt.models.config import EMBEDDING, HEAD, DecoderConfig, Part
from localrt.models.decoder import Decoder, load_attention, load_norm, load_resident_mlp
from localrt.models.layers.block import ResidualBlock
from localrt.models.layers.heads import (
    AssistantBlock,
    AssistantHead,
    ContextKeys,
    FeatureBlock,
    PredictionBlock,
)
from localrt.models.layers.moe import ResidentExperts
from localrt.models.layers.parts import Embedding, Head
from localrt.models.raw_config import RawConfig
from localrt.models.registry import read_config
from localrt.models.weight_store import ResidentWeights, WeightStore
from localrt.models.weights import WeightLoader
from localrt.quant.formats import BF16, F16, F32, Format, pack, unpack
from localrt.quant.formats.packed import PackedTensor
from localrt.quant.methods.quantize import quantized_format
from localrt.quant.ops.arrays import Weight
from localrt.quant.ops.features import AFTER_LAST
from localrt.quant.ops.protocol import Ops

Ints = npt.NDArray[np.int64]

_TOKENS = "d2t"  # ids of the target's tokens; in folders, how far they are from the head's own
# An assistant's tokens, cluster by cluster, in folders and in GGUF files
_ORDER, _FILES_ORDER = "masked_embedding.token_ordering", "masked_embd_ordering"
_UNUSED = "t2d"
_ROWS_AT_ONCE = 4096
_INTEGERS = {"i32": "<i4", "i64": "<i8"}
_SPECULATORS = ("Eagle3Speculator", "Eagle3DraftModel")
# Of ``dflash_config``; others are of kinds that are not known
_BLOCK_OPTIONS = {"mask_token_id", "target_layer_ids", "block_size"}
_BLOCK_OPTIONS |= {"input_embedding_scale", "final_logit_softcapping"}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """A head. It reads the residual stream before ``layers`` of its target, the last one's output
    included, or, if ``normed``, what its target's final norm makes of it; and of its own output
    what, if ``own_normed``, its own final norm does. ``tokens`` (V,) are the target's ids of its
    vocabulary; None is all of them. ``output`` is its own output matrix, where it has one.

    An assistant's layers read the keys and values at ``places`` of its target's cache: its rows
    stand at the last known token and see all before it.

    DFlash drafts a ``block`` at once: the last known token, and ``mask`` in place of those that it
    drafts. Its rows see each other, and what ``ContextKeys`` made of the tokens before.
    """

    decoder: DecoderConfig
    layers: tuple[int, ...]
    normed: bool = False
    own_normed: bool = False
    tokens: Ints | None = None
    output: str = HEAD
    places: tuple[int, ...] = ()
    block: int = 0
    mask: int = 0


@dataclass(frozen=True, slots=True)
class Shared:
    """What a head uses of its target: how tokens are embedded, and the output matrix, or the rows
    of it that are the head's tokens; None if there is none in memory.
    """

    embedding: Part
    head: Weight | None


class HeadFolder(SafetensorsCheckpoint):
    """A folder with a head, its layers as ``model.layers.N``. ``tokens`` is as in ``HeadConfig``;
    ``order`` lists them cluster by cluster.
    """

    tokens: Ints | None = None
    order: Ints | None = None

    def _located(self, *, multimodal: bool) -> dict[str, StoredTensor]:
        found = super()._located(multimodal=multimodal and not self.only_predicts)
        if (offsets := _integers(found, _TOKENS)) is not None:
            self.tokens = np.arange(len(offsets)) + offsets
        self.order = _integers(found, _ORDER)
        renamed = {_plain(name): each for name, each in found.items()}
        return {
            name: replace(each, info=replace(each.info, name=name))
            for name, each in renamed.items()
        }

    def _wanted(self, name: str) -> bool:
        return name != _UNUSED and super()._wanted(name)


class HeadFile(GgufCheckpoint):
    """A GGUF file with a head. ``tokens`` and ``order`` are as in ``HeadFolder``."""

    tokens: Ints | None = None
    order: Ints | None = None

    def _rename(
        self, predicting: frozenset[int], *, of_block: int | None = None
    ) -> dict[str, StoredTensor]:
        found = super()._rename(predicting, of_block=of_block)
        self.tokens = _integers(found, _TOKENS)
        self.order = _integers(found, _FILES_ORDER)
        return found


class HeadStore(StoreCheckpoint):
    """A store with an MTP block. ``tokens`` and ``order`` are as in ``HeadFolder``."""

    tokens: Ints | None = None
    order: Ints | None = None


OpenHead: TypeAlias = HeadFolder | HeadFile | HeadStore


def _integers(found: dict[str, StoredTensor], name: str) -> Ints | None:
    """The integers under ``name``, taken out of ``found``."""
    if (tensor := found.pop(name, None)) is None:
        return None
    if (kind := _INTEGERS.get(tensor.info.format.name)) is None:
        raise CheckpointError(f"{tensor.file.path}: {name} holds no integers")
    return tensor.read().data.view(kind).reshape(-1).astype(np.int64)


def _plain(name: str) -> str:
    if name.startswith("input_norm."):
        return f"model.fc_norm.{name.removeprefix('input_norm.')}"
    if name.startswith(("midlayer.", "layers.0.")):
        return f"model.layers.0.{name.split('.', 2 if name[0] == 'l' else 1)[-1]}"
    return name if name.startswith("lm_head.") else f"model.{name.removeprefix('model.')}"


def open_head(path: Path) -> OpenHead:
    """Open the head at ``path``: what only drafts for a model, or the MTP block in a model's files.

    Raises:
        CheckpointError: there is none.
    """
    if (path / MANIFEST_NAME).is_file():
        return HeadStore(path, predicts=True)
    return (HeadFolder if path.is_dir() else HeadFile)(path, predicts=True)


def has_prediction_block(model: Checkpoint) -> bool:
    """Whether an open model has an MTP block. Of a GGUF file its header has said so."""
    if isinstance(model, GgufCheckpoint):
        return model.has_block
    try:
        open_head(model.path).close()
    except (LocalrtError, OSError):
        return False
    return True


def prediction_notes(path: Path) -> tuple[str, ...]:
    """What plans and descriptions of the model at ``path`` say of its MTP block, if it has one."""
    try:
        with closing(open_head(path)) as checkpoint:
            nbytes = sum(info.nbytes for info in checkpoint.tensors.values())
    except (LocalrtError, OSError):
        return ()
    return (f"its MTP block of {format_bytes(nbytes)} drafts for it",)


def is_head(path: Path) -> bool:
    """Whether there is only a head at ``path``, and no model."""
    open_model = SafetensorsCheckpoint if path.is_dir() else GgufCheckpoint
    try:
        open_model(path).close()
    except DraftHeadError:
        return True
    except (LocalrtError, OSError):
        pass
    return False


def read_head_config(checkpoint: OpenHead, target: DecoderConfig) -> HeadConfig:
    """Read the config of a head, which must fit ``target``.

    Raises:
        UnsupportedModelError: it is another model's, or of an unknown kind.
    """
    own_readers = dict.fromkeys(DFLASH, _read_dflash) | dict.fromkeys(EAGLE3, _read_eagle3)
    own_readers |= dict.fromkeys(ASSISTANTS, _read_assistant)
    head = own_readers.get(checkpoint.architecture, _read_prediction)(checkpoint, target)
    own = head.decoder
    width = own.block.width if isinstance(own.block, AssistantBlock) else own.hidden_size
    if width != target.hidden_size:
        raise UnsupportedModelError(
            f"it has {width} hidden numbers and the model {target.hidden_size}"
        )
    if head.tokens is None and own.vocab_size != target.vocab_size:
        raise UnsupportedModelError(
            f"it has {own.vocab_size} tokens and the model {target.vocab_size}"
        )
    if head.tokens is not None and not _within(head.tokens, target.vocab_size):
        raise UnsupportedModelError("its tokens are not all of the model's")
    return head


def _read_prediction(checkpoint: OpenHead, target: DecoderConfig) -> HeadConfig:
    decoder = read_config(checkpoint)
    if decoder.architecture != target.architecture:
        raise UnsupportedModelError(
            f"it is an MTP block of {decoder.architecture}, and the model is {target.architecture}"
        )
    if type(decoder.block) is not ResidualBlock:
        raise UnsupportedModelError(f"the MTP block of {decoder.architecture} is not supported")
    decoder = replace(decoder, block=PredictionBlock(scale=decoder.block.scale))
    return HeadConfig(decoder=decoder, layers=(AFTER_LAST,), normed=True, own_normed=True)


def _read_eagle3(checkpoint: OpenHead, target: DecoderConfig) -> HeadConfig:
    config, tokens = checkpoint.config, checkpoint.tokens
    raw = RawConfig(checkpoint)
    own = llama.read_config(raw)
    if own.layers != 1:
        raise UnsupportedModelError(f"{checkpoint.path.name}: an EAGLE-3 head has one layer")
    if raw.flag("fc_norm"):
        raise UnsupportedModelError("an EAGLE-3 head with a norm for each layer is not supported")
    layers = _feature_layers(config, target.layers)
    features = raw.integer("target_hidden_size", target.hidden_size) * len(layers)
    block = FeatureBlock(
        features=features,
        features_normed=raw.flag("norm_before_fc") or raw.has_tensor("model.fc_norm.weight"),
        residual_normed=raw.flag(
            "norm_before_residual", default=checkpoint.architecture in _SPECULATORS
        ),
    )
    size = target.vocab_size if tokens is None else len(tokens)
    names = replace(own.names, attention_norm="")
    decoder = replace(own, block=block, vocab_size=size, names=names, tied_head=False)
    return HeadConfig(
        decoder=decoder,
        layers=layers,
        own_normed=raw.flag("norm_output"),
        tokens=tokens,
    )


def _read_assistant(checkpoint: OpenHead, target: DecoderConfig) -> HeadConfig:
    # Its layers share what the target has, and not each other's
    checkpoint.config = {**checkpoint.config, "num_kv_shared_layers": 0}
    raw, clusters = RawConfig(checkpoint), checkpoint.order
    own, count = gemma4.read_config(raw), raw.integer("num_centroids", 2048)
    last = {spec.window is None: layer for layer, spec in enumerate(target.attending)}
    attention, places = [], list[int]()
    for spec in own.attending:
        layer = last.get(spec.window is None, 0)
        sizes = {(each.kv_heads, each.head_dim) for each in (spec, target.attending[layer])}
        if len(sizes) > 1 or target.architecture != own.architecture:
            raise UnsupportedModelError("its layers do not fit the model's keys and values")
        places += target.cache_places[layer]
        # A window reaches this far back from the row, and the row stands after all that it sees
        window = None if spec.window is None else spec.window + 1
        attention.append(replace(spec, reads=layer, window=window))
    if clusters is not None:
        if clusters.size % count or not np.array_equal(np.sort(clusters), range(own.vocab_size)):
            raise UnsupportedModelError(f"its {clusters.size} tokens do not fill {count} clusters")
        clusters = clusters.reshape(count, -1)
    used = min(raw.integer("centroid_intermediate_top_k", 32), count)
    width = raw.integer("backbone_hidden_size", 1536)
    block = AssistantBlock(inputs=None, width=width, clusters=clusters, used=used)
    return HeadConfig(
        decoder=replace(own, block=block, attention=tuple(attention), final_softcap=None),
        layers=(AFTER_LAST,),
        normed=True,
        output=EMBEDDING if own.tied_head else HEAD,
        places=tuple(places),
    )


def _read_dflash(checkpoint: OpenHead, target: DecoderConfig) -> HeadConfig:
    options = RawConfig(checkpoint).mapping("dflash_config")
    config = checkpoint.config = {"rope_is_neox_style": True, **checkpoint.config, **options}
    unknown = {key for key, value in options.items() if value} - _BLOCK_OPTIONS
    if config.get("is_causal") or not config["rope_is_neox_style"] or unknown:
        what = min(unknown, default="is_causal or rope_is_neox_style")
        raise UnsupportedModelError(f"a DFlash draft with its {what} is not supported")
    raw, tokens = RawConfig(checkpoint), checkpoint.tokens
    own, mask = qwen.read_qwen3(raw), raw.index("mask_token_id", None)
    block = raw.integer("block_size", 16)
    scale = raw.number("input_embedding_scale", target.embedding_scale)
    if mask >= target.vocab_size or not math.isclose(scale, target.embedding_scale, rel_tol=1e-3):
        raise UnsupportedModelError(f"its mask is token {mask}, and embeddings times {scale:g}")
    # A row sees the whole block: a window ends with the block, and begins with the first row's
    attention = tuple(
        spec if spec.window is None else replace(spec, window=spec.window + block - 1)
        for spec in own.attending
    )
    vocab = target.vocab_size if tokens is None else len(tokens)
    return HeadConfig(
        decoder=replace(
            own,
            attention=attention,
            vocab_size=vocab,
            tied_head=False,
            final_softcap=raw.optional_number("final_logit_softcapping"),
        ),
        layers=_inputs(config.get("target_layer_ids"), 1, target.layers),
        tokens=tokens,
        block=block,
        mask=mask,
    )


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
    return _inputs(listed, int(inside), layers)


def _inputs(listed: object, first: int, layers: int) -> tuple[int, ...]:
    """The layers before which a head reads, of a list that counts inputs from ``first`` on."""
    if not isinstance(listed, list) or {type(number) for number in listed} != {int}:
        raise UnsupportedModelError(f"the layers that it reads are {listed!r}")
    inputs = [number + first for number in listed]
    if not all(0 <= number <= layers for number in inputs):
        raise UnsupportedModelError(f"it reads layers {listed}, and the model has {layers}")
    return tuple(AFTER_LAST if number == layers else number for number in inputs)


def _within(tokens: Ints, count: int) -> bool:
    return bool(tokens.size and tokens.min() >= 0 and tokens.max() < count)


_4_BITS, _8_BITS = quantized_format("int4-g32"), quantized_format("int8-g32")
_LARGE = 1 << 20  # weights of a matrix whose bytes are worth sparing


def kept_format(info: TensorInfo | PackedTensor) -> Format:
    """What a head's matrix is kept in where it has 16 or 32 bits: 4 if it is large, else 8.

    It is read at every step, and as many tokens are accepted with 4 bits as with 8.
    """
    if info.format not in (F32, F16, BF16) or len(info.shape) < 2 or info.shape[1] % 32:
        return info.format
    return _4_BITS if math.prod(info.shape) >= _LARGE else _8_BITS


def _kept(block: WeightBlock, ops: Ops) -> WeightBlock:
    if ops.compute_format != "packed" or not isinstance(block, PackedTensor):
        return block
    format_ = kept_format(block)
    return block if block.format == format_ else pack(unpack(block), format_, name=block.name)


def output_rows(
    model: Checkpoint, config: DecoderConfig, ops: Ops, count: int
) -> tuple[int, Callable[[], Weight]]:
    """The bytes that the first ``count`` rows of a model's output matrix take in ``ops``, and what
    reads them.
    """
    name = EMBEDDING if config.tied_head else HEAD
    shape = (count, config.hidden_size)

    def load() -> Weight:
        edges = [*range(0, count, _ROWS_AT_ONCE), count]
        with ops.scope():
            return ops.weight(shape, (_kept(model.read(name, *r), ops) for r in pairwise(edges)))

    return ops.weight_nbytes(shape, kept_format(model.tensors[name])), load


def head_nbytes(checkpoint: Checkpoint, ops: Ops) -> int:
    """The bytes that a head's own weights take in ``ops``."""
    packed = ops.compute_format == "packed"
    total = 0
    for info in checkpoint.tensors.values():
        shape = (math.prod(info.shape[:-1]), info.shape[-1])
        total += ops.weight_nbytes(shape, kept_format(info) if packed else info.format)
    return total


def load_head(checkpoint: Checkpoint, config: HeadConfig, ops: Ops, shared: Shared) -> Decoder:
    """Read a head's weights into ``ops``, and build it around what it shares.

    Raises:
        CheckpointError: a tensor is missing, or not the config's.
    """
    decoder = config.decoder
    weights = WeightLoader(checkpoint, ops, repack=partial(_kept, ops=ops))
    shape = (decoder.vocab_size, decoder.hidden_size)
    with ops.scope():
        embedding = shared.embedding
        if EMBEDDING in checkpoint.tensors and not config.places:
            rows = checkpoint.tensors[EMBEDDING].shape[0]
            embedding = Embedding(weights.matrix((rows, shape[1]), EMBEDDING), 1.0)
        experts = ResidentExperts()
        body = [embedding]
        for layer in range(decoder.layers):
            at = config.places[layer : layer + 1] or None
            body.append(load_attention(decoder, layer, weights, at))
            body.append(load_resident_mlp(decoder, layer, weights, ops, experts))
        head = shared.head
        if config.output in checkpoint.tensors:
            head = weights.matrix(shape, config.output)
        if head is None:
            raise CheckpointError(f"{checkpoint.path.name} has no output matrix of its own")
        end = Head(decoder, load_norm(decoder, weights), head)
        if isinstance(decoder.block, AssistantBlock):
            weights.skip(HEAD if config.output == EMBEDDING else EMBEDDING)
            end = AssistantHead(end, decoder.block, decoder, weights)
        made = Decoder(ResidentWeights(ops, decoder, body, end, experts))
        if config.block:
            features = decoder.hidden_size * len(config.layers)
            context = ContextKeys(decoder, features, weights, body[1::2])
            made = BlockDecoder(made.weights, context)
    weights.finish()
    return made


class BlockDecoder(Decoder):
    """DFlash. A pass of its ``context`` appends what it is given of known tokens to their cache."""

    def __init__(self, weights: WeightStore, context: ContextKeys) -> None:
        super().__init__(weights)
        end, ops = Head(self.config, weights.norm, None), weights.ops
        self.context = Decoder(ResidentWeights(ops, self.config, [context], end, ResidentExperts()))
