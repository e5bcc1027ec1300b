"""BERT and RoBERTa, which embed texts (BGE, MiniLM, E5) or rank pairs of them, and Nomic's BERT,
whose positions are rotary.

RoBERTa's positions begin behind that of its padding token; GGUF files leave the rows before out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.encoders.block import BlockConfig, BlockNames
from localrt.models.encoders.text import SCORE, TYPES, EncoderConfig, EncoderLayer
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig
from localrt.models.tensor_source import RowSource

_NAMES = BlockNames(
    norm1="post_attention_norm",
    norm2="post_mlp_norm",
    qkv=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    out="self_attn.o_proj",
    up=("mlp.up_proj",),
    down="mlp.down_proj",
)
_FUSED = replace(_NAMES, qkv=("self_attn.qkv_proj",))
_GATED = replace(_FUSED, up=("mlp.gate_proj", "mlp.up_proj"))
_ACTIVATIONS = {
    **{"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    **{"silu": "silu", "swiglu": "silu"},
}
_NAME = re.compile(
    r"(?:(?:bert|roberta|nomic_bert)\.)?"
    r"(encoder\.layers?\.(\d+)\.)?(.+)\.(weight|bias|gamma|beta)"
)
_TENSORS = {
    "embeddings.word_embeddings": "model.embed_tokens",
    "embeddings.position_embeddings": "model.embed_positions",
    "embeddings.token_type_embeddings": "model.embed_types",
    "embeddings.LayerNorm": "model.embed_norm",
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.o_proj",
    "attention.output.LayerNorm": "post_attention_norm",
    "intermediate.dense": "mlp.up_proj",
    "output.dense": "mlp.down_proj",
    "output.LayerNorm": "post_mlp_norm",
    # Nomic's
    "emb_ln": "model.embed_norm",
    "attn.Wqkv": "self_attn.qkv_proj",
    "attn.out_proj": "self_attn.o_proj",
    "norm1": "post_attention_norm",
    "mlp.fc11": "mlp.up_proj",
    "mlp.fc12": "mlp.gate_proj",
    "mlp.fc2": "mlp.down_proj",
    "norm2": "post_mlp_norm",
    # what scores: BERT's, RoBERTa's, and GGUF's
    "pooler.dense": "pooler",
    "classifier": "classifier",
    "classifier.dense": "pooler",
    "classifier.out_proj": "classifier",
    "cls": "pooler",
    "cls.output": "classifier",
}
_KINDS = {"gamma": "weight", "beta": "bias"}  # old names
_LEFT_OUT = ("cls.predictions.", "cls.seq_relationship.", "lm_head.")
"""Heads that predict words, which training is done with."""
_NOMICS_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "max_trained_positions": "max_position_embeddings",  # beyond them files ask for scaling
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
"""Keys of the first published configs."""


def read_config(raw: RawConfig) -> EncoderConfig:
    """Read the keys that BERT and RoBERTa share."""
    positions, first = raw.integer("max_position_embeddings"), 0
    if raw.architecture.startswith(("Roberta", "XLMRoberta")):
        first = raw.index("pad_token_id", 1) + 1
    if first >= positions:
        raise ValueError(f"max_position_embeddings must be more than {first}, is {positions}")
    raw.choice("position_embedding_type", "absolute", {"absolute": True})
    config = _encoder(raw, "bert", EncoderLayer(block=_block(raw, _NAMES)))
    context = positions - first
    return replace(config, context_length=context, positions=positions, first_position=first)


def read_nomic(raw: RawConfig) -> EncoderConfig:
    """Read Nomic's keys, or the first published ones."""
    raw = raw.renamed(_NOMICS_KEYS)
    if raw.flag("use_rms_norm") or raw.flag("prenorm") or raw.flag("rotary_emb_interleaved"):
        raise ValueError("only LayerNorm of sums, and rotary halves, are supported")
    block = replace(_block(raw, _GATED, "silu"), bias=False, mlp_bias=False)
    rope = read_rope(raw, block.size, default_theta=1000.0)
    return _encoder(raw, "nomic_bert", EncoderLayer(block=block, rope=rope))


def _block(raw: RawConfig, names: BlockNames, activation: str = "gelu") -> BlockConfig:
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    if hidden % heads and not raw.has("head_dim"):
        raise ValueError(f"hidden_size {hidden} is not a multiple of {heads} heads")
    return BlockConfig(
        hidden=hidden,
        inner=raw.integer("intermediate_size"),
        heads=heads,
        head_dim=raw.integer("head_dim", hidden // heads),
        eps=raw.number("layer_norm_eps"),
        activation=raw.choice("hidden_act", activation, _ACTIVATIONS),
        names=names,
        norms_sums=True,
    )


def _encoder(raw: RawConfig, architecture: str, layer: EncoderLayer) -> EncoderConfig:
    return EncoderConfig(
        architecture=architecture,
        vocab_size=raw.integer("vocab_size"),
        context_length=raw.integer("max_position_embeddings"),
        stack=(layer,) * raw.integer("num_hidden_layers"),
        types=raw.integer("type_vocab_size"),
        ranks=raw.has_tensor(SCORE),
    )


def _convert(stored: Mapping[str, RowSource], config: Mapping[str, object]) -> dict[str, RowSource]:
    """The tensors by localrt's names, without heads of words or a pooler that no score needs."""
    found = {}
    for name, tensor in stored.items():
        if name.startswith(_LEFT_OUT):
            continue
        match = _NAME.fullmatch(name)
        if match is not None and match[3] in _TENSORS:
            prefix = f"model.layers.{int(match[2])}." if match[1] else ""
            name = f"{prefix}{_TENSORS[match[3]]}.{_KINDS.get(match[4], match[4])}"
        found[name] = replace(tensor, info=replace(tensor.info, name=name))
    if SCORE not in found:
        found = {name: own for name, own in found.items() if not name.startswith("pooler.")}
    return found


def _gguf_config(config: Config, file: GgufFacts) -> None:
    config["layer_norm_eps"] = file.number("attention.layer_norm_epsilon")
    config["type_vocab_size"] = file.tensors[TYPES].rows if TYPES in file.tensors else None


_BERT = Family(
    name="bert",
    encoder=read_config,
    folders="BertModel BertForMaskedLM BertForSequenceClassification "
    "RobertaModel RobertaForMaskedLM RobertaForSequenceClassification "
    "XLMRobertaModel XLMRobertaForMaskedLM XLMRobertaForSequenceClassification",
    gguf="bert",
    convert=_convert,
    gguf_top={
        "token_embd_norm": "model.embed_norm",
        "position_embd": "model.embed_positions",
        "token_types": "model.embed_types",
    },
    gguf_layer={
        "attn_output_norm": "post_attention_norm",
        "layer_output_norm": "post_mlp_norm",
    },
    gguf_config=_gguf_config,
)
FAMILIES = (
    _BERT,
    replace(
        _BERT,
        name="nomic_bert",
        encoder=read_nomic,
        folders="NomicBertModel NomicBertForMaskedLM NomicBertForSequenceClassification",
        gguf="nomic-bert",
    ),
)
