"""Reads a draft head: its config, checked against its target's, and its weights.

A head without its own embedding or output matrix uses the target's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.drafts.heads.assistant import AssistantBlock, AssistantHead, read_assistant
from localrt.drafts.heads.dflash import BlockDecoder, read_dflash
from localrt.drafts.heads.eagle3 import read_eagle3
from localrt.drafts.heads.files import HeadConfig, Ints, OpenHead
from localrt.drafts.heads.mtp import read_prediction
from localrt.models.checkpoints.text_model import ASSISTANTS, DFLASH, EAGLE3
from localrt.models.config import DecoderConfig, Part
from localrt.models.decoder import Decoder, load_attention, load_norm, load_resident_mlp
from localrt.models.layers.moe import ResidentExperts
from localrt.models.layers.parts import Embedding, Head
from localrt.models.tensor_source import EMBEDDING, HEAD, Checkpoint, TensorInfo, WeightBlock
from localrt.models.weight_store import ResidentWeights
from localrt.models.weights import WeightLoader
from localrt.quant.formats import BF16, F16, F32, Format, pack, unpack
from localrt.quant.formats.packed import PackedTensor
from localrt.quant.methods.quantize import quantized_format
from localrt.quant.ops.arrays import Weight
from localrt.quant.ops.protocol import Ops

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts of its target that a head uses: the embedding, and the output matrix or its rows
    for the head's tokens; None if not in memory.
    """

    embedding: Part
    head: Weight | None


def read_head_config(checkpoint: OpenHead, target: DecoderConfig) -> HeadConfig:
    """Read the config of a head, which must fit ``target``.

    Raises:
        UnsupportedModelError: it is for another model, or of an unknown kind.
    """
    own_readers = dict.fromkeys(DFLASH, read_dflash) | dict.fromkeys(EAGLE3, read_eagle3)
    own_readers |= dict.fromkeys(ASSISTANTS, read_assistant)
    head = own_readers.get(checkpoint.architecture, read_prediction)(checkpoint, target)
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


def _within(tokens: Ints, count: int) -> bool:
    return bool(tokens.size and tokens.min() >= 0 and tokens.max() < count)


_4_BITS, _8_BITS = quantized_format("int4-g32"), quantized_format("int8-g32")
_LARGE = 1 << 20  # weights of a large matrix


def kept_format(info: TensorInfo | PackedTensor) -> Format:
    """Return the format of a head's matrix in memory: matrices of 16 or 32 bits get 4 bits if
    large, else 8.

    Matrices are read at every step, and 4 bits do not lower the acceptance rate compared with 8.
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
    """Return the size of the first ``count`` rows of a model's output matrix in ``ops``, and a
    function that reads them.
    """
    name = EMBEDDING if config.tied_head else HEAD
    shape = (count, config.hidden_size)

    def load() -> Weight:
        edges = [*range(0, count, _ROWS_AT_ONCE), count]
        with ops.scope():
            return ops.weight(shape, (_kept(model.read(name, *r), ops) for r in pairwise(edges)))

    return ops.weight_nbytes(shape, kept_format(model.tensors[name])), load


def head_nbytes(checkpoint: Checkpoint, ops: Ops) -> int:
    """Return the size of a head's own weights in ``ops``."""
    packed = ops.compute_format == "packed"
    total = 0
    for info in checkpoint.tensors.values():
        shape = (math.prod(info.shape[:-1]), info.shape[-1])
        total += ops.weight_nbytes(shape, kept_format(info) if packed else info.format)
    return total


def load_head(checkpoint: Checkpoint, config: HeadConfig, ops: Ops, shared: Shared) -> Decoder:
    """Read a head's weights into ``ops``, and build it around what it shares.

    Raises:
        CheckpointError: a tensor is missing, or does not fit the config.
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
            made = BlockDecoder(made.weights, config, weights)
    weights.finish()
    return made
