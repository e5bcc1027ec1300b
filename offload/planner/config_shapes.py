"""A model's shape from its ``config.json`` alone: no weights are needed to plan for a machine.

Sizes of matrices follow the published implementations; parameter counts agree with the published
totals. Packed sizes are estimates: one format for all matrices, or for experts and for the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from localrt.errors import CheckpointError, UnsupportedModelError
from localrt.offload.placement import PlacedUnit, UnitKind
from localrt.offload.shapes import (
    Experts,
    KvShape,
    ModelShape,
    aligned,
    format_of_most_bytes,
)
from localrt.quant.formats import FORMATS, Format
from localrt.quant.formats.tiled import TILE_ROWS, padded_rows
from localrt.quant.methods.choices import fitting_format

__all__ = ["DEFAULT_FORMAT", "HEAD_SLICE", "MODEL_TYPES", "shape_from_config"]

DEFAULT_FORMAT = "int4-g32"
HEAD_SLICE = 8 << 20
"""Bytes: no slice of the head is larger, so that a small ring can hold it."""


@dataclass(frozen=True, slots=True)
class _Family:
    """How a ``model_type`` differs from Llama. ``experts`` is the key of their number."""

    experts: str = ""
    qkv_bias: bool = False
    out_bias: bool = False
    sinks: bool = False
    router_bias: bool = False
    expert_bias: bool = False
    qk_norm: bool = False
    joint_norms: bool = False
    post_norms: bool = False
    tied: bool = False
    head_dim: int | None = None
    latent: bool = False


MODEL_TYPES: Mapping[str, _Family] = {
    "llama": _Family(),
    "mistral": _Family(),
    "mixtral": _Family(experts="num_local_experts"),
    "phi3": _Family(),
    "smollm3": _Family(tied=True),
    "qwen2": _Family(qkv_bias=True),
    "qwen2_moe": _Family(experts="num_experts", qkv_bias=True),
    "qwen3": _Family(qk_norm=True, head_dim=128),
    "qwen3_moe": _Family(experts="num_experts", qk_norm=True),
    "olmoe": _Family(experts="num_experts", qk_norm=True, joint_norms=True),
    "granitemoe": _Family(experts="num_local_experts"),
    "granitemoeshared": _Family(experts="num_local_experts"),
    "gpt_oss": _Family(
        experts="num_local_experts",
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        router_bias=True,
        expert_bias=True,
        head_dim=64,
    ),
    "gemma": _Family(tied=True, head_dim=256),
    "gemma2": _Family(tied=True, post_norms=True, head_dim=256),
    "gemma3_text": _Family(tied=True, post_norms=True, qk_norm=True, head_dim=256),
    "gemma3": _Family(tied=True, post_norms=True, qk_norm=True, head_dim=256),
    "deepseek_v2": _Family(experts="n_routed_experts", latent=True),
    "deepseek_v3": _Family(experts="n_routed_experts", router_bias=True, latent=True),
}
_MULTIMODAL = {"mistral3": "mistral", "gemma3": "gemma3_text"}

# What checkpoints quantized by others come closest to among localrt's formats.
_PUBLISHED = {("gptq", 4): "int4-g128m", ("awq", 4): "int4-g128m"}
# What quantizes a mixture's experts alone, and what the other matrices are then.
_EXPERTS_ALONE = {"mxfp4": ("mxfp4", "bf16")}

Matrix = tuple[int, int]


class _Config:
    """Typed access to the keys, with one-line errors."""

    def __init__(self, values: Mapping[str, Any], name: str) -> None:
        self.values, self.name = values, name

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
            raise CheckpointError(
                f"{self.name}: config {key} must be an integer, is {value!r}"
                if value is not None
                else f"{self.name}: {key} is missing from the config"
            )
        return value

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value < 1:
            raise CheckpointError(f"{self.name}: config {key} must be at least 1, is {value}")
        return value


def shape_from_config(
    config: Mapping[str, Any],
    *,
    name: str,
    format: str | None = None,
    head_slice: int = HEAD_SLICE,
) -> ModelShape:
    """The shape of a model that is described by a Hugging Face ``config``.

    ``format`` packs every matrix; None takes what the config says that the weights, or experts
    alone, were quantized to, else ``int4-g32``.

    Raises:
        UnsupportedModelError: a ``model_type`` or format that is not known here.
        CheckpointError: a key is missing or malformed.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **text}
    raw = _Config(config, name)
    kind = str(config.get("model_type", ""))
    kind = kind if kind in MODEL_TYPES else _MULTIMODAL.get(kind, kind)
    if kind not in MODEL_TYPES:
        raise UnsupportedModelError(
            f"{name}: model_type {kind!r} cannot be planned from its config (known: "
            f"{', '.join(MODEL_TYPES)}); give the weights"
        )
    notes: list[str] = []
    expert_format, rest = (format, format) if format else _published_formats(config, notes)
    if rest not in FORMATS:
        raise UnsupportedModelError(f"format {format!r} is not known: one of {', '.join(FORMATS)}")
    formats = FORMATS[expert_format], FORMATS[rest]
    return _Builder(raw, kind, *formats, head_slice, notes).build()


def _published_formats(config: Mapping[str, Any], notes: list[str]) -> tuple[str, str]:
    """Of experts, and of all other matrices."""
    quantized = config.get("quantization_config")
    if isinstance(quantized, Mapping):
        method = str(quantized.get("quant_method"))
        bits = quantized.get("bits", 4)
        if (known := _PUBLISHED.get((method, bits))) is not None:
            notes.append(f"weights as published: {method}, planned as {known}")
            return known, known
        if (both := _EXPERTS_ALONE.get(method)) is not None:
            notes.append(f"weights as published: experts in {both[0]}, the rest in {both[1]}")
            return both
    notes.append(f"weights are taken to be packed as {DEFAULT_FORMAT}: --format says otherwise")
    return DEFAULT_FORMAT, DEFAULT_FORMAT


class _Builder:
    """Units of one config, in the order of a pass."""

    def __init__(
        self,
        raw: _Config,
        kind: str,
        expert_format: Format,
        format: Format,
        head_slice: int,
        notes: list[str],
    ) -> None:
        self.raw, self.kind, self.notes = raw, kind, notes
        self.expert_format, self.format = expert_format, format
        self.family = MODEL_TYPES[kind]
        self.head_slice = head_slice
        self.parameters = 0
        self.hidden = raw.positive("hidden_size")
        self.vocab = raw.positive("vocab_size")
        self.layers = raw.positive("num_hidden_layers")
        self.heads = raw.positive("num_attention_heads")
        self.inner = raw.positive("intermediate_size")
        self.tied = bool(raw.values.get("tie_word_embeddings", self.family.tied))

    def build(self) -> ModelShape:
        experts = self._experts()
        units: list[PlacedUnit] = []
        table = (self.vocab, self.hidden)
        if not self.tied:
            units.append(self._unit("embedding", "embedding", [table]))
        for layer in range(self.layers):
            units.append(self._attention(layer))
            units += self._mlp(layer, experts)
        units.append(self._unit("norm", "norm", [], vectors=self.hidden))
        units += self._head(table)
        return ModelShape(
            name=self.raw.name,
            architecture=self.kind,
            units=tuple(units),
            hidden=self.hidden,
            vocab=self.vocab,
            inner=self.inner,
            context_length=self.raw.positive("max_position_embeddings", 4096),
            kv=(self._kv(),) * self.layers,
            parameters=self.parameters,
            experts=experts,
            notes=tuple(self.notes),
        )

    def _unit(
        self,
        name: str,
        kind: UnitKind,
        matrices: list[Matrix],
        *,
        vectors: int = 0,
        layer: int | None = None,
        use: float = 1.0,
    ) -> PlacedUnit:
        nbytes, macs, formats = 4 * vectors, 0, dict[str, int]()
        wanted = self.expert_format if kind == "expert" else self.format
        for rows, columns in matrices:
            whole = columns % wanted.block == 0
            fitting = wanted if whole else fitting_format(wanted, columns)
            size = padded_rows(rows) * fitting.row_bytes(columns)
            nbytes, macs = nbytes + size, macs + rows * columns
            formats[fitting.name] = formats.get(fitting.name, 0) + size
        self.parameters += macs + vectors
        by_row = kind == "embedding"
        return PlacedUnit(
            name=name,
            kind=kind,
            nbytes=aligned(nbytes),
            macs=0 if by_row else macs,
            format=format_of_most_bytes(formats),
            layer=layer,
            use=0.0 if by_row else use,
        )

    # -- attention -------------------------------------------------------------------------------

    @property
    def head_dim(self) -> int:
        default = self.family.head_dim or self.hidden // self.heads
        return self.raw.positive("head_dim", default)

    @property
    def kv_heads(self) -> int:
        return self.raw.positive("num_key_value_heads", self.heads)

    def _attention(self, layer: int) -> PlacedUnit:
        name = f"layers.{layer}.attention"
        if self.family.latent:
            return self._latent_attention(name, layer)
        rows = (self.heads + 2 * self.kv_heads) * self.head_dim
        vectors = self.hidden * (2 if self.family.post_norms else 1)
        if self.family.qkv_bias or self.raw.values.get("attention_bias"):
            vectors += rows
        if self.family.out_bias:
            vectors += self.hidden
        if self.family.sinks:
            vectors += self.heads
        if self.family.qk_norm:
            normed = self.heads + self.kv_heads if self.family.joint_norms else 2
            vectors += normed * self.head_dim
        matrices = [(rows, self.hidden), (self.hidden, self.heads * self.head_dim)]
        return self._unit(name, "attention", matrices, vectors=vectors, layer=layer)

    def _latent_attention(self, name: str, layer: int) -> PlacedUnit:
        """DeepSeek-V2's: low-rank projections of queries, and of keys and values together."""
        latent, rope, nope, value = self._latent_sizes()
        rows = self.heads * (nope + rope)
        low = self.raw.integer("q_lora_rank", 0)
        queries = [(low, self.hidden), (rows, low)] if low else [(rows, self.hidden)]
        matrices = [
            *queries,
            (latent + rope, self.hidden),
            (self.heads * latent, nope),
            (self.heads * value, latent),
            (self.hidden, self.heads * value),
        ]
        vectors = self.hidden + low + latent
        return self._unit(name, "attention", matrices, vectors=vectors, layer=layer)

    def _latent_sizes(self) -> tuple[int, int, int, int]:
        return (
            self.raw.positive("kv_lora_rank"),
            self.raw.positive("qk_rope_head_dim"),
            self.raw.positive("qk_nope_head_dim"),
            self.raw.positive("v_head_dim"),
        )

    def _kv(self) -> KvShape:
        if self.family.latent:
            latent, rope, nope, value = self._latent_sizes()
            macs = self.heads * (2 * latent + rope)
            row = 4 * self.heads * (nope + rope + value)
            return KvShape(groups=1, width=latent + rope, macs=macs, latent=True, row_nbytes=row)
        macs = 2 * self.heads * self.head_dim
        return KvShape(groups=self.kv_heads, width=self.head_dim, macs=macs)

    # -- MLP and experts -------------------------------------------------------------------------

    def _experts(self) -> Experts | None:
        if not self.family.experts:
            return None
        count = self.raw.positive(self.family.experts)
        used = self.raw.positive("num_experts_per_tok")
        if used > count:
            raise CheckpointError(
                f"{self.raw.name}: {used} experts for each token (top-k) cannot be chosen of "
                f"{count}"
            )
        return Experts(count=count, used=used)

    def _is_sparse(self, layer: int) -> bool:
        if self.family.latent:
            frequency = self.raw.positive("moe_layer_freq", 1)
            return layer >= self.raw.integer("first_k_dense_replace", 0) and layer % frequency == 0
        if layer in (self.raw.values.get("mlp_only_layers") or ()):
            return False
        return (layer + 1) % self.raw.positive("decoder_sparse_step", 1) == 0

    def _mlp(self, layer: int, experts: Experts | None) -> Iterator[PlacedUnit]:
        name = f"layers.{layer}.mlp"
        norms = self.hidden * (2 if self.family.post_norms else 1)
        if experts is None or not self._is_sparse(layer):
            yield self._unit(name, "mlp", self._gated(self.inner), vectors=norms, layer=layer)
            return
        inner = self.raw.positive("moe_intermediate_size", self.inner)
        shared = self._shared_inner(inner)
        matrices = [(experts.count, self.hidden), *(self._gated(shared) if shared else [])]
        if self.kind == "qwen2_moe":
            matrices.append((1, self.hidden))  # the shared expert's own gate
        vectors = norms + (experts.count if self.family.router_bias else 0)
        yield self._unit(name, "mlp", matrices, vectors=vectors, layer=layer)
        share = experts.used / experts.count
        biases = 2 * inner + self.hidden if self.family.expert_bias else 0
        for number in range(experts.count):
            label = f"layers.{layer}.expert.{number}"
            yield self._unit(
                label, "expert", self._gated(inner), vectors=biases, layer=layer, use=share
            )

    def _shared_inner(self, inner: int) -> int:
        """Columns of the experts that every token sees, taken as one MLP."""
        if self.kind == "qwen2_moe":
            return self.raw.integer("shared_expert_intermediate_size", 0)
        if self.kind == "granitemoeshared":
            return self.raw.integer("shared_intermediate_size", 1024)
        return self.raw.integer("n_shared_experts", 0) * inner if self.family.latent else 0

    def _gated(self, inner: int) -> list[Matrix]:
        return [(2 * inner, self.hidden), (self.hidden, inner)]

    # -- head ------------------------------------------------------------------------------------

    def _head(self, table: Matrix) -> Iterator[PlacedUnit]:
        rows, columns = table
        block = self.format.block
        tile = TILE_ROWS * self.format.row_bytes(-(-columns // block) * block)
        step = max(1, self.head_slice // tile) * TILE_ROWS
        for number, start in enumerate(range(0, rows, step)):
            part = (min(step, rows - start), columns)
            yield self._unit(f"head.{number}", "head", [part])
