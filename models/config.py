"""What a decoder is: its shape and behaviour, and what its tensors are called.

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
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.experts import ExpertSpec, RouterSpec
from localrt.quant.ops.protocol import LayerSpec, MlpSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"

# A sparse layer's tensors, below ``model.layers.N.``, whatever a file calls them
ROUTER = "mlp.gate"
CHOICE_BIAS = "mlp.gate.e_score_correction_bias"
ROUTER_NORM = "mlp.gate.norm.weight"
EXPERT_SCALE = "mlp.gate.expert_scale"
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
    """What joins the residual stream: attention or an MLP."""

    def __call__(self, state: Any) -> Array:
        """(R, D), for ``state.x`` of a ``PassState``."""

    def matrices(self) -> dict[str, Weight]:
        """The stacked matrices by the first name in each."""


def memory_places(layers: Iterable[Sequence[LayerSpec]]) -> Iterator[tuple[int, ...]]:
    """Of what each layer remembers, the numbers in a cache that is made for all ``layers``.

    What keeps keys and values is numbered for itself, and so is what has a state.
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

    Without ``attention_norm`` and ``mlp_norm``, the residual stream is read as it is. What has a
    ``post_norm`` is normed before it joins the stream. Behind three of ``qkv`` come the gates of
    heads that have one each.
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
    """A recurrent layer's tensors, below ``model.layers.N.``. ``mix`` are stacked in the order of
    ``RecurrentWeights``, as are ``taps``; ``decay_is_rate``: it is not the logarithm of one.
    ``biased``: both projections have a bias. ``block`` names what is around such a layer, where
    this differs from what is around those that attend.
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

    ``beside_dense``: a dense MLP runs beside it, and each has norms of its own. With ``latent``,
    experts see so many numbers that a row is projected to, and what they give is projected back.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Multipliers:
    """Factors of what parts of a layer see and give, where these are not 1 (Falcon-H1).

    ``projected`` are those of what a recurrent layer projects a row to: gates, values, keys,
    queries and time steps of ``ssm``.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    recurrent_in: float = 1.0
    recurrent_out: float = 1.0
    mlp_out: float = 1.0
    projected: tuple[float, float, float, float, float] = (1.0,) * 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table beside the embedding, of which passes take rows: the one tensor of ``unit``.

    Checkpoints present it as one matrix of ``shape``.
    """

    unit: str
    tensor: str
    shape: tuple[int, int]

    def part(self, weight: Weight) -> Part:
        """What takes a pass's rows of a table that is in memory."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """How a model's layers are put together: what is computed around attention and MLPs.

    Most architectures have ``layers/block.py``'s ``ResidualBlock``. What runs once, ``before`` the
    first layer or ``after`` the last one, belongs to that layer's unit. ``final_norm``: there is a
    norm before the head.
    """

    final_norm: ClassVar[bool] = True

    def attention(
        self, config: DecoderConfig, layer: int, weights: WeightLoader, at: Places
    ) -> Part:
        """A layer's attention or recurrence; ``at`` is where the cache has what it remembers."""
        raise NotImplementedError

    def mlp(self, config: DecoderConfig, layer: int, weights: WeightLoader, mlp: Layer) -> Part:
        """How a layer's ``mlp`` joins the residual stream."""
        raise NotImplementedError

    def before(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        """What is computed before the first layer."""
        return ()

    def after(self, config: DecoderConfig, weights: WeightLoader) -> Sequence[Part]:
        """What is computed behind the last layer."""
        return ()

    def memory(self, config: DecoderConfig, layer: int) -> tuple[LayerSpec, ...]:
        """What a layer remembers of a sequence: nothing if it is an MLP alone."""
        own = config.attention[layer]
        return () if own is None else (own,)

    def tables(self, config: DecoderConfig) -> Sequence[Table]:
        """What passes take rows of, beside the embedding."""
        return ()

    def numbers_beside(self, config: DecoderConfig) -> int:
        """How many numbers a row of a pass has beside the residual stream."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What a decoder is, whatever file it came from. ``attention`` has one entry per layer, which
    is a ``RecurrentSpec`` where the layer has a state in the place of keys and values, and None
    where it is an MLP alone. ``block`` puts layers together.

    ``mixtures`` has one entry per layer, None for a dense one; it is empty for a dense model. A
    layer without a mixture whose ``inner_sizes`` are 0 has no MLP.
    """

    architecture: str
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
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    tied_head: bool = False
    mixtures: tuple[MixtureSpec | None, ...] = ()
    logit_scale: float = 1.0
    inner_sizes: tuple[int, ...] = ()  # of each layer's MLP, where they differ
    cutoffs: tuple[float | None, ...] = ()  # of each layer's MLP, see ``MlpSpec``
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
        """What a layer remembers of a sequence, in the block's order."""
        return self.block.memory(self, layer)

    @property
    def memories(self) -> tuple[tuple[LayerSpec, ...], ...]:
        """What each layer remembers."""
        return tuple(map(self.memory_of, range(self.layers)))

    @property
    def cache_places(self) -> tuple[tuple[int, ...], ...]:
        """Where each layer finds what it remembers in a cache of all layers."""
        own = tuple(memory_places(self.memories))
        return tuple(own[self.cache_of(layer)] for layer in range(self.layers))

    @property
    def memory(self) -> tuple[LayerSpec, ...]:
        """What the cache of a sequence is made for: what all layers remember, in order."""
        return tuple(spec for own in self.memories for spec in own)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP, or a mixture in its place."""
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
        """Behaviour of a layer's dense MLP."""
        return replace(self.mlp, cutoff=self.cutoffs[layer]) if self.cutoffs else self.mlp

    def cache_of(self, layer: int) -> int:
        """The layer whose keys and values a layer attends to: itself, or an earlier one."""
        spec = self.attention[layer]
        reads = spec.reads if isinstance(spec, AttentionSpec) else None
        return layer if reads is None else reads

    def mixture(self, layer: int) -> MixtureSpec | None:
        """A layer's mixture of experts; None where its MLP is dense."""
        return self.mixtures[layer] if self.mixtures else None

    @property
    def sparse_layers(self) -> dict[int, int]:
        """The layers with a mixture of experts, each with its number among them."""
        found = [layer for layer in range(self.layers) if self.mixture(layer) is not None]
        return {layer: place for place, layer in enumerate(found)}
