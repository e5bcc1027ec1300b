"""BERT and RoBERTa, which embed texts (BGE, MiniLM, E5) or rank pairs of them.

RoBERTa's positions begin behind that of its padding token; GGUF files leave the rows before out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.encoders.block import BlockConfig, BlockNames
from localrt.models.encoders.text import SCORE, TYPES, EncoderConfig
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
_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_NAME = re.compile(
    r"(?:(?:bert|roberta)\.)?(encoder\.layer\.(\d+)\.)?(.+)\.(weight|bias|gamma|beta)"
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


def read_config(raw: RawConfig) -> EncoderConfig:
    """Read the keys that BERT and RoBERTa share."""
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    positions, first = raw.integer("max_position_embeddings"), 0
    if raw.architecture.startswith(("Roberta", "XLMRoberta")):
        first = raw.index("pad_token_id", 1) + 1
    if hidden % heads:
        raise ValueError(f"hidden_size {hidden} is not a multiple of {heads} heads")
    if first >= positions:
        raise ValueError(f"max_position_embeddings must be more than {first}, is {positions}")
    raw.choice("position_embedding_type", "absolute", {"absolute": True})
    return EncoderConfig(
        architecture="bert",
        vocab_size=raw.integer("vocab_size"),
        context_length=positions - first,
        layers=raw.integer("num_hidden_layers"),
        block=BlockConfig(
            hidden=hidden,
            inner=raw.integer("intermediate_size"),
            heads=heads,
            eps=raw.number("layer_norm_eps"),
            activation=raw.choice("hidden_act", "gelu", _ACTIVATIONS),
            names=_NAMES,
            norms_sums=True,
        ),
        positions=positions,
        first_position=first,
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


FAMILIES = (
    Family(
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
    ),
)
