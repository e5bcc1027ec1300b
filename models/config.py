"""Describes a decoder: its shape, its behaviour, and the names of its tensors.

An architecture's own file (``architectures/llama.py``, ...) reads a checkpoint's config into these.
Nothing here computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, TypeAlias

from localrt.models.weights import WeightLoader
from localrt.quant.ops.arrays import Array, Weight
from localrt.quant.ops.attention import AttentionSpec, LatentSpec
from localrt.quant.ops.experts import ExpertSpec, RouterSpec
from localrt.quant.ops.protocol import LayerSpec, MlpSpec

# A sparse layer's tensors, below ``model.layers.N.``, in localrt's names
ROUTER = "mlp.gate"
CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
ROUTER_NORM = "mlp.gate.norm.weight"
EXPERT_SCALE = "mlp.gate.expert_scale"
FIRST_INDEXER = "model.layers.0.self_attn.indexer.wk.weight"
EXPERT_GATE_UP = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
EXPERT_DOWN = "mlp.experts.{}.down_proj"
SHARED_GATE_UP = ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj")
SHARED_DOWN = "mlp.shared_experts.down_proj"
SHARED_GATE = "mlp.shared_expert_gate"
LATENT_DOWN = "mlp.latent_down"
LATENT_UP = "mlp.latent_up"

Part: TypeAlias = Callable[[Any], None]
"""Changes a ``PassState``."""

Places: TypeAlias = Sequence[tuple[LayerSpec, int]]
"""What a layer remembers of a sequence, each with its number in the cache."""


class Layer(Protocol):
    """A part whose output is added to the residual stream: attention or an MLP."""

    def __call__(self, state: Any) -> Array:
        """Return (R, D), to be added to ``state.x`` of a ``PassState``."""

    def matrices(self) -> dict[str, Weight]:
        """The stacked matrices by the first name of each stack."""


def memory_places(layers: Iterable[Sequence[LayerSpec]]) -> Iterator[tuple[int, ...]]:
    """The indices of each layer's memory in a cache for all ``layers``.

    Layers with keys and values are numbered separately from layers with a state.
    """
    counts = Counter[bool]()
    for memory in layers:
        places = []
        for kind in (isinstance(spec, AttentionSpec) for spec in memory):
            places.append(counts[kind])
            counts[kind] += 1
        yield tuple(places)


def expert_matrices(number: int) -> tuple[str, ...]:
    """The matrices of one expert: gate, up, down."""
    return tuple(name.format(number) for name in (*EXPERT_GATE_UP, EXPERT_DOWN))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerNames:
    """A layer's tensors, below ``model.layers.N.``; the defaults are Llama's.

    Without ``attention_norm`` and ``mlp_norm``, inputs are not normed. A ``post_norm`` norms an
    output before it is added. A fourth name in ``qkv`` is for gates whose rows are the last.
    """

    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_post_norm: str = ""
    sinks: str = "self_attn.sinks"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentNames:
    """A recurrent layer's tensors, below ``model.layers.N.``. ``mix`` and ``taps`` are stacked in
    the order of ``RecurrentWeights``; ``decay_is_rate``: the decay is a rate, not its logarithm.
    ``biased``: both projections have a bias. ``block`` has the norms' names where they differ from
    those of attention layers.
    """

    mix: tuple[str, ...]
    taps: tuple[str, ...]
    out: str
    gate_up: str = ""
    decay_up: str = ""
    decay: str = ""
    decay_bias: str = ""
    skip: str = ""
    out_norm: str = ""
    decay_is_rate: bool = False
    biased: bool = False
    block: LayerNames | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """A layer's mixture. ``inner`` is an expert's width, ``shared`` that of the shared experts.

    ``beside_dense``: a dense MLP runs in parallel, with separate norms. With ``latent``, rows are
    projected to that width for the experts, and their output is projected back. With
    ``weigh_inputs``, the weight of a row's only expert is a factor of its input, not of its result.
    ``hashed``: a table has each token's experts; the router only weighs them.
    """

    router: RouterSpec
    expert: ExpertSpec
    inner: int
    shared: int = 0
    shared_gate: bool = False
    gate_bias: bool = False
    choice_bias: bool = False
    expert_bias: bool = False
    beside_dense: bool = False
    latent: int = 0
    weigh_inputs: bool = False
    hashed: bool = False

    def __post_init__(self) -> None:
        if self.weigh_inputs and self.router.used > 1:
            raise ValueError(
                "num_experts_per_tok must be 1 where weights are factors of experts' inputs, is "
                f"{self.router.used}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors of the inputs and outputs of a layer's parts (Falcon-H1).

    ``projected`` are the factors of a recurrent layer's projections: gates, values, keys, queries
    and time steps of ``ssm``.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_in: float = 1.0
    recurrent_out: float = 1.0
    mlp_out: float = 1.0
    projected: tuple[float, float, float, float, float] = (1.0,) * 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A further table of which passes read rows, like the embedding: the one tensor of ``unit``.

    Checkpoints present the table as one matrix of ``shape``.
    """

    unit: str
    tensor: str
    shape: tuple[int, int]

    def part(self, weight: Weight) -> Part:
        """The part that looks up a pass's rows in a table in memory."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How a model's layers are composed: what is computed around attention and MLPs.

    Most architectures use the ``ResidualBlock`` of ``layers/block.py``. Parts that run once,
    ``before`` the first layer or ``after`` the last, belong to that layer's unit. ``final_norm``:
    there is a norm before the head.
    """

    final_norm: ClassVar[bool] = True

    def attention(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, at: Places
    ) -> Part:
        """Build a layer's attention or recurrence; ``at`` are the cache places of its memory."""
        raise NotImplementedError

    def mlp(self, config: DecoderConfig, layer: int, weights: WeightLoader, mlp: Layer) -> Part:
        """Build the part that adds a layer's ``mlp`` to the residual stream."""
        raise NotImplementedError

    def before(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        """Build the parts that run once, before the first layer."""
        return ()

    def after(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        """Build the parts that run once, after the last layer."""
        return ()

    def attention_width(self, config: DecoderConfig) -> int:
        """Columns of what attention reads."""
        return config.hidden_size

    def memory(self, config: DecoderConfig, layer: int) -> tuple[LayerSpec, ...]:
        """A layer's memory of a sequence: none if it is only an MLP."""
        own = config.attention[layer]
        return () if own is None else (own,)

    def tables(self, config: DecoderConfig) -> Sequence[Table]:
        """The tables, besides the embedding, that passes read rows of."""
        return ()

    def numbers_beside(self, config: DecoderConfig) -> int:
        """How many numbers a row of a pass needs besides the residual stream."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """A decoder's config, independent of the file format. ``attention`` has one entry per layer: a
    ``RecurrentSpec`` if the layer has a state instead of keys and values, None if it is only an
    MLP. ``block`` composes the layers.

    ``mixtures`` has one entry per layer, None for a dense one; it is empty for a dense model. A
    layer without a mixture and with an inner size of 0 has no MLP.
    """

    architecture: str = ""  # the family's name, which ``registry.py`` adds
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    context_length: int
    norm_eps: float
    attention: tuple[LayerSpec | None, ...]
    mlp: MlpSpec
    block: Block
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0  # added to every norm weight (Gemma publishes w - 1)
    final_norm_offset: float | None = None  # of the norm before the head, if it differs
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    tied_head: bool = False
    mixtures: tuple[MixtureSpec | None, ...] = ()
    logit_scale: float = 1.0
    inner_sizes: tuple[int, ...] = ()  # of each layer's MLP, if they differ
    limits: tuple[float, ...] = ()  # of each layer's MLP or shared experts, see ``MlpSpec``
    names: LayerNames = LayerNames()
    recurrent: RecurrentNames | None = None
    multipliers: Multipliers = Multipliers()

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.attention)

    @property
    def attending(self) -> tuple[AttentionSpec, ...]:
        """The layers that keep keys and values."""
        return tuple(spec for spec in self.attention if isinstance(spec, AttentionSpec))

    def memory_of(self, layer: int) -> tuple[LayerSpec, ...]:
        """A layer's memory of a sequence, in the block's order; that of latents' indexer first."""
        own, spec = self.block.memory(self, layer), self.attention[layer]
        index = spec.index if isinstance(spec, LatentSpec) and spec.sparse else None
        return own if index is None else (index, *own)

    @property
    def memories(self) -> tuple[tuple[LayerSpec, ...], ...]:
        """Each layer's memory."""
        return tuple(map(self.memory_of, range(self.layers)))

    @property
    def cache_places(self) -> tuple[tuple[int, ...], ...]:
        """The places of each layer's memory in a cache for all layers."""
        own = tuple(memory_places(self.memories))
        return tuple(own[self.cache_of(layer)] for layer in range(self.layers))

    @property
    def memory(self) -> tuple[LayerSpec, ...]:
        """The memory of all layers, in order: the layout of a sequence's cache."""
        return tuple(spec for own in self.memories for spec in own)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or a mixture."""
        return self.mixture(layer) is not None or self.inner_size(layer) > 0

    @property
    def sparse(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(self.mixtures)

    def names_of(self, layer: int) -> LayerNames:
        """The names of a layer's tensors."""
        block = self.recurrent.block if self.recurrent else None
        recurrent = not isinstance(self.attention[layer], AttentionSpec)
        return block if block is not None and recurrent else self.names

    def inner_size(self, layer: int) -> int:
        """Width of a layer's dense MLP."""
        return self.inner_sizes[layer] if self.inner_sizes else self.intermediate_size

    def mlp_of(self, layer: int) -> MlpSpec:
        """Behaviour of a layer's dense MLP, or of its shared experts."""
        return replace(self.mlp, limit=self.limits[layer]) if self.limits else self.mlp

    def cache_of(self, layer: int) -> int:
        """The layer whose keys and values a layer uses: itself, or an earlier one."""
        spec = self.attention[layer]
        reads = spec.reads if isinstance(spec, AttentionSpec) else None
        return layer if reads is None else reads

    def mixture(self, layer: int) -> MixtureSpec | None:
        """A layer's mixture of experts; None if its MLP is dense."""
        return self.mixtures[layer] if self.mixtures else None

    @property
    def sparse_layers(self) -> dict[int, int]:
        """The layers with a mixture of experts, with their index among the sparse layers."""
        found = [layer for layer in range(self.layers) if self.mixture(layer) is not None]
        return {layer: place for place, layer in enumerate(found)}
