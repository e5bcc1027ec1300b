"""What a decoder is: its shape and behaviour, and what its tensors are called.

An architecture's own file (``architectures/llama.py``, ...) reads a checkpoint's config into these.
Nothing here knows weights or computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from localrt.models.layers.ngrams import NgramHash, NgramSpec
from localrt.quant.ops.attention import IndexSpec
from localrt.quant.ops.experts import ExpertSpec, RouterSpec
from localrt.quant.ops.protocol import AttentionSpec, LayerSpec, MlpSpec, RecurrentSpec
from localrt.quant.ops.streams import StreamSpec

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
# Checkpoints present it with a row for each layer of each token: (vocabulary * layers, width)
LAYER_EMBEDDING = "model.embed_tokens_per_layer.weight"
# Checkpoints present it as one table
NGRAM_TABLE = "model.ngram_embedding.weight"

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
class LayerInputs:
    """Per-layer embeddings: ``width`` numbers for each layer, of each of ``vocab_size`` tokens."""

    width: int
    vocab_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Connections:
    """Hyper-connections: so many residual streams, of which layers read a mixture; its gates are
    projected in two steps, by way of ``rank`` numbers.
    """

    count: int
    rank: int

    def __post_init__(self) -> None:
        if self.count < 2:
            raise ValueError(f"hc_count must be at least 2, is {self.count}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramLayer:
    """Hashed n-grams before ``layer``: ``width`` numbers of a token, all rows of the table side by
    side. ``memory`` is what the layer remembers of a sequence.
    """

    layer: int
    width: int
    spec: NgramSpec
    memory: RecurrentSpec

    def __post_init__(self) -> None:
        if self.width % self.spec.rows_per_token:
            raise ValueError(
                f"ple_embed_dim must be a multiple of {self.spec.rows_per_token} (the heads of all "
                f"n-grams), is {self.width}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """Of the table."""
        return NgramHash(self.spec).rows, self.width // self.spec.rows_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """What a decoder is, whatever file it came from. ``attention`` has one entry per layer, which
    is a ``RecurrentSpec`` where the layer has a state in the place of keys and values, and None
    where it is an MLP alone. ``beside`` are recurrent layers side by side with each layer's
    attention.

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
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    norm_offset: float = 0.0  # added to every norm weight (Gemma publishes w - 1)
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    tied_head: bool = False
    mixtures: tuple[MixtureSpec | None, ...] = ()
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    layer_scale: bool = False  # a learned factor of the residual stream behind every layer
    inner_sizes: tuple[int, ...] = ()  # of each layer's MLP, where they differ
    cutoffs: tuple[float | None, ...] = ()  # of each layer's MLP, see ``MlpSpec``
    layer_inputs: LayerInputs | None = None
    streams: StreamSpec | None = None
    scaled_stream: bool = False  # the active stream is scaled before it gates a layer's inputs
    low_rank: int = 0  # of the residual beside attention, where there are streams
    names: LayerNames = LayerNames()
    recurrent: RecurrentNames | None = None
    beside: tuple[RecurrentSpec, ...] = ()
    multipliers: Multipliers = Multipliers()
    connections: Connections | None = None
    ngrams: NgramLayer | None = None
    index: IndexSpec | None = None  # of every layer that attends
    index_apart: bool = False  # queries and key are projected by two matrices

    @property
    def layers(self) -> int:
        """Number of blocks."""
        return len(self.attention)

    @property
    def attending(self) -> tuple[AttentionSpec, ...]:
        """The layers that keep keys and values."""
        return tuple(spec for spec in self.attention if isinstance(spec, AttentionSpec))

    def memory_of(self, layer: int) -> tuple[LayerSpec, ...]:
        """What a layer remembers of a sequence: nothing if it is an MLP alone.

        An indexer comes before its attention, n-grams behind all others; in between are attention,
        a recurrent layer, or several side by side.
        """
        own, ngrams = self.attention[layer], self.ngrams_of(layer)
        whole = (
            self.index if isinstance(own, AttentionSpec) else None,
            own,
            *self.beside[layer : layer + 1],
            None if ngrams is None else ngrams.memory,
        )
        return tuple(spec for spec in whole if spec is not None)

    def ngrams_of(self, layer: int) -> NgramLayer | None:
        """A layer's hashed n-grams, if it has some."""
        own = self.ngrams
        return own if own is not None and own.layer == layer else None

    @property
    def ngram_place(self) -> int:
        """Where the n-grams' memory lies in a cache of all layers, among what has a state."""
        assert self.ngrams is not None, "the model has n-grams"
        return self.cache_places[self.ngrams.layer][-1]

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

    @property
    def final_norm(self) -> bool:
        """Whether there is a norm before the head; what reads several streams has norms itself."""
        return self.connections is None

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
