"""A model as the planner sees it: its units in the order of a pass, and the size of its KV cache.

Everything is counted from shapes and formats; no weight is read. Exact bytes come from an opened
checkpoint, estimates from a ``config.json`` alone (``planning/models.py``). No machine is known
here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

from localrt.common.files import PAGE
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.config import DecoderConfig
from localrt.models.registry import read_config
from localrt.models.tensor_source import EMBEDDING, HEAD, Checkpoint, TensorInfo
from localrt.models.units import TABLES, Unit, list_units, packed_nbytes
from localrt.offload.placement import PlacedUnit, UnitKind, Where, host_piece, link_piece
from localrt.quant.choose import missing_on_gpu
from localrt.quant.cuda.formats import is_packed
from localrt.quant.formats.tiled import TILE_ROWS
from localrt.quant.ops.attention import CompressedSpec, IndexSpec, LatentSpec, scratch_nbytes
from localrt.quant.ops.kv import grown_capacity
from localrt.quant.ops.kv_formats import BLOCK_TOKENS, LATENT_FORMATS, KvFormat, block_nbytes
from localrt.quant.ops.protocol import LayerSpec
from localrt.quant.ops.recurrent import RecurrentSpec
from localrt.quant.ops.states import StateLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """Keys and values of one layer: ``groups`` heads of ``width``, seen by ``heads`` query heads.

    ``latent`` is DeepSeek's: one vector of ``width`` per token instead of keys and values, in bf16
    if ``compressed``; ``macs`` are the multiply-accumulates of one query row with one token held. A
    layer that ``reads`` another one's keys and values has none of its own, and neither has a layer
    with only ``states``, whose size does not depend on the number of tokens. With an ``index``,
    attention sees only the tokens it chooses, and its keys are cached too.
    """

    groups: int = 0
    width: int = 0
    macs: int = 0
    latent: bool = False
    compressed: bool = False
    reads: int | None = None
    states: tuple[RecurrentSpec, ...] = ()
    index: IndexSpec | None = None

    def token_nbytes(self, kv_format: KvFormat) -> int:
        """Bytes of one token in the layer's cache: 0 if it reads another layer's."""
        own = 0 if self.reads is not None else self.seen_nbytes(kv_format)
        return own + self._index_nbytes(kv_format)

    def held_nbytes(self, kv_format: KvFormat, held: int) -> int:
        """Bytes that a row reads of a sequence of ``held`` tokens, including states."""
        seen = held
        if self.index is not None:
            seen = min(held, self.index.most_tokens)
        # An index also reads a value for each block.
        blocks = 0 if self.index is None else held // self.index.block
        states = sum(2 * 4 * state.state_size for state in self.states)
        read = seen * self.seen_nbytes(kv_format) + blocks * self._index_nbytes(kv_format) // 2
        return read + states

    def held_macs(self, held: float) -> float:
        """Multiply-accumulates of a row that sees ``held`` tokens, without projections."""
        states = sum(state.macs for state in self.states)
        if self.index is None:
            return held * self.macs + states
        scores = held / self.index.block * self.index.heads * self.index.head_dim
        return min(held, self.index.most_tokens) * self.macs + scores + states

    def _index_nbytes(self, kv_format: KvFormat) -> int:
        if self.index is None:
            return 0
        kept = LATENT_FORMATS["bf16"] if self.latent else kv_format
        return block_nbytes(1, self.index.head_dim, kept) // BLOCK_TOKENS

    def seen_nbytes(self, kv_format: KvFormat) -> int:
        """Bytes that attention reads of one token."""
        if not self.width:
            return 0
        if not self.latent:
            return block_nbytes(self.groups, self.width, kv_format) // BLOCK_TOKENS
        # int8 is the fewest bits of a latent: ``make_plan`` does not take int4.
        kept = LATENT_FORMATS["bf16" if kv_format == "bf16" or self.compressed else "int8"]
        return block_nbytes(self.groups, self.width, kept) // BLOCK_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class PassSizes:
    """The sizes that determine the memory of a pass.

    ``inner`` is the widest MLP, ``query_nbytes`` the bytes per row of latent attention's queries
    and results (0 without), ``mixed_nbytes`` those of a recurrent layer's values; ``experts_used``
    and ``expert_inner`` are a mixture's. ``split_nbytes`` is the most that split attention of few
    rows keeps on a GPU until it is joined. ``beside`` counts a row's numbers outside the residual
    stream: layers' own inputs, and streams. ``parts`` are what a pass consists of.
    """

    hidden: int
    inner: int
    vocab: int
    parts: int = 0
    query_nbytes: int = 0
    mixed_nbytes: int = 0
    experts_used: int = 0
    expert_inner: int = 0
    split_nbytes: int = 0
    beside: int = 0

    @classmethod
    def of_config(cls, config: DecoderConfig) -> PassSizes:
        """The sizes of a model with this config."""
        mixtures = [mixture for mixture in config.mixtures if mixture is not None]
        widest = max(mixtures, key=lambda each: each.router.used * each.inner, default=None)
        latents = (getattr(spec, "row_nbytes", 0) for spec in config.memory)
        states = (spec for spec in config.memory if isinstance(spec, RecurrentSpec))
        return cls(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            vocab=config.vocab_size,
            parts=2 * config.layers + 1,
            query_nbytes=max(latents, default=0),
            mixed_nbytes=max((spec.pass_nbytes for spec in states), default=0),
            experts_used=0 if widest is None else widest.router.used,
            expert_inner=0 if widest is None else widest.inner,
            split_nbytes=_split_nbytes(map(_kv_shape, config.memories), config.context_length),
            beside=config.block.numbers_beside(config),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Experts of the sparse layers: ``used`` of ``count`` see a token; ``inner`` is the largest
    width.
    """

    count: int
    used: int
    inner: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Units in the order of a pass, and the few numbers that memory and time depend on.

    ``parameters`` counts every weight once. ``notes`` state assumptions. ``off_gpu`` says what our
    GPU kernels lack for this model, if anything. ``routed`` describes the experts; ``steps`` are
    what a pass computes one after another: a unit, or a layer's experts.
    """

    name: str
    architecture: str
    units: tuple[PlacedUnit, ...]
    sizes: PassSizes
    context_length: int
    kv: tuple[KvShape, ...]
    parameters: int
    experts: ExpertShape | None = None
    notes: tuple[str, ...] = ()
    off_gpu: str = ""
    routed: tuple[PlacedUnit, ...] = field(init=False, repr=False, compare=False)
    steps: tuple[tuple[PlacedUnit, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        computed = (unit for unit in self.units if unit.kind != "embedding")
        steps = groupby(computed, lambda u: u.layer if u.kind == "expert" else u.name)
        routed = tuple(unit for unit in self.units if unit.kind == "expert")
        object.__setattr__(self, "routed", routed)
        object.__setattr__(self, "steps", tuple(tuple(step) for _, step in steps))

    def split(self, shares: Mapping[str, tuple[float, float]]) -> ModelShape:
        """The same with MLPs in pieces: see ``Placement.split``. In a pass they follow one another:
        what is copied, the rest of the GPU, and the CPU's.
        """
        units = list[PlacedUnit]()
        for unit in self.units:
            if unit.name not in shares or unit.only is not None:
                units.append(unit)
                continue
            gpu, link = shares[unit.name]
            # Rows are whole tiles, and the CPU gets what is left over of two.
            tiles = 2 * TILE_ROWS / self.sizes.inner
            pieces = (
                (link_piece(unit.name), link, Where.LINK),
                (unit.name, gpu, Where.VRAM),
                (host_piece(unit.name), 1 - gpu - link + tiles, Where.RAM),
            )
            units += (
                replace(
                    unit,
                    name=name,
                    nbytes=aligned(round(unit.nbytes * share)),
                    macs=round(unit.macs * share),
                    only=place,
                )
                for name, share, place in pieces
                if share
            )
        return replace(self, units=tuple(units))

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.kv)

    @property
    def nbytes(self) -> int:
        """Packed bytes of all units."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def pass_nbytes(self) -> float:
        """Bytes that one row needs on average: no embedding table, experts by their use."""
        return sum(unit.nbytes * unit.use for unit in self.units)

    @property
    def active_parameters(self) -> int:
        """Weights that one row uses, without its embedding row."""
        return round(sum(unit.macs * unit.use for unit in self.units))

    @property
    def shares_caches(self) -> bool:
        """Whether layers read others' keys and values: all attention is then on one processor."""
        return any(layer.reads is not None for layer in self.kv)

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers that keep keys and values; others have a state, or nothing."""
        return tuple(number for number, layer in enumerate(self.kv) if layer.width)

    @property
    def on_ssd(self) -> tuple[int, ...]:
        """The layers whose keys and values may be on the SSD: those without states and without an
        index.
        """
        return tuple(
            layer
            for layer in self.attending
            if not self.kv[layer].states and self.kv[layer].index is None
        )

    def kv_token_nbytes(self, kv_format: KvFormat) -> tuple[int, ...]:
        """Bytes that one token takes in each layer."""
        return tuple(layer.token_nbytes(kv_format) for layer in self.kv)

    def kv_nbytes(self, kv_format: KvFormat, ctx: int) -> tuple[int, ...]:
        """Bytes of each layer's cache once it holds ``ctx`` tokens; caches grow in steps.

        States count every set, including those kept for trimming.
        """
        layout = StateLayout([state for layer in self.kv for state in layer.states])
        states = layout.layer_nbytes(ctx)
        return tuple(
            grown_capacity(ctx) * size + sum(next(states) for _ in layer.states)
            for layer, size in zip(self.kv, self.kv_token_nbytes(kv_format), strict=True)
        )


def aligned(nbytes: int) -> int:
    """A unit's place in a store: whole pages."""
    return -(-nbytes // PAGE) * PAGE


def shape_from_checkpoint(
    checkpoint: Checkpoint, experts: int | None = None, *, context: int | None = None
) -> ModelShape:
    """The exact shape of an opened model, with only the first ``experts`` of each layer if given.
    What layers remember may depend on ``context``, in tokens.

    Raises:
        UnsupportedModelError: the architecture is not known.
        CheckpointError: a tensor is missing.
    """
    config = read_config(checkpoint, context=context)
    units = list_units(checkpoint.tensors, config, experts)
    stored: Mapping[str, int] = {}
    if isinstance(checkpoint, StoreCheckpoint):
        stored = {unit.name: unit.nbytes for unit in checkpoint.manifest.units}
    kv = tuple(map(_kv_shape, config.memories))
    ignored, infos = HEAD if config.tied_head else "", checkpoint.tensors.values()
    sizes, mixture = PassSizes.of_config(config), None
    routers = [spec.router for spec in config.mixtures if spec is not None]
    if routers:
        first = routers[0]
        mixture = ExpertShape(count=first.count, used=first.used, inner=sizes.expert_inner)
    return ModelShape(
        name=checkpoint.path.name,
        architecture=config.architecture,
        units=tuple(_placed(unit, checkpoint.tensors, stored, mixture) for unit in units),
        sizes=sizes,
        context_length=config.context_length,
        kv=kv,
        parameters=sum(math.prod(i.shape) for i in infos if i.name != ignored),
        experts=mixture,
        off_gpu=missing_on_gpu(config.memory),
    )


def _kv_shape(memory: Sequence[LayerSpec]) -> KvShape:
    shape = KvShape()
    for spec in memory:
        if isinstance(spec, RecurrentSpec):
            shape = replace(shape, states=(*shape.states, spec))
        elif isinstance(spec, IndexSpec):
            shape = replace(shape, index=spec)
        elif isinstance(spec, LatentSpec):
            macs, width = spec.heads * (spec.head_dim + spec.latent), spec.head_dim
            shape = replace(shape, groups=1, width=width, macs=macs, latent=True)
            shape = replace(shape, compressed=spec.sparse)
        elif isinstance(spec, CompressedSpec):
            macs, width = 2 * spec.heads * spec.size // (spec.block or 64), spec.head_dim
            shape = replace(shape, groups=1, width=width, macs=macs, latent=True, compressed=True)
        else:
            macs, width = 2 * spec.heads * spec.head_dim, spec.head_dim
            shape = replace(shape, groups=spec.kv_heads, width=width, macs=macs, reads=spec.reads)
    return shape


def _split_nbytes(layers: Iterable[KvShape], context: int) -> int:
    """Latent attention's is part of its scratch on the CPU."""
    longest = grown_capacity(context)
    plain = (layer for layer in layers if layer.width and not layer.latent)
    heads = ((layer.macs // (2 * layer.width), layer.width) for layer in plain)
    return max((scratch_nbytes(count, width, longest) for count, width in heads), default=0)


def format_of_most_bytes(sizes: Mapping[str, int]) -> str:
    """The format of most bytes."""
    return max(sizes, key=lambda name: sizes[name]) if sizes else "f32"


def _placed(
    unit: Unit,
    tensors: Mapping[str, TensorInfo],
    stored: Mapping[str, int],
    experts: ExpertShape | None,
) -> PlacedUnit:
    nbytes, macs, unpacked, formats = 0, 0, 0, dict[str, int]()
    for name in unit.tensors:
        info = tensors[name]
        if unit.rows is not None:
            start, stop = unit.rows
            info = replace(info, shape=(stop - start, info.shape[1]))
        size = packed_nbytes(info)
        nbytes += size
        if len(info.shape) == 2:
            macs += info.shape[0] * info.shape[1]
            unpacked += 0 if is_packed(info.format, info.shape[1]) else 2 * math.prod(info.shape)
            formats[info.format.name] = formats.get(info.format.name, 0) + size
    kind = _kind(unit)
    by_row = kind == "embedding"
    share = experts.used / experts.count if kind == "expert" and experts is not None else 1.0
    return PlacedUnit(
        name=unit.name,
        kind=kind,
        # A slice of the head may be cut finer here than where it was stored.
        nbytes=aligned(nbytes) if unit.rows else stored.get(unit.name, aligned(nbytes)),
        macs=0 if by_row else macs,
        format=format_of_most_bytes(formats),
        layer=unit.layer,
        use=0.0 if by_row else share,
        unpacked=unpacked if kind == "expert" else 0,
    )


def _kind(unit: Unit) -> UnitKind:
    if unit.rows is not None:
        return "head"
    if unit.name in TABLES or unit.tensors[0] == EMBEDDING:
        return "embedding"
    if unit.layer is None:
        return "norm"
    if ".expert." in unit.name:
        return "expert"
    return "attention" if unit.name.endswith(".attention") else "mlp"
