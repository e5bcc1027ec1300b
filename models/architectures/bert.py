"""BERT and its relatives, which embed texts (BGE, MiniLM, E5) or rank pairs of them.

RoBERTa's positions begin behind that of its padding token; GGUF files leave the rows before out.
Those of Nomic's BERT, Jina's v3 and ModernBERT are rotary.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from localrt.common.errors import UnsupportedModelError
from localrt.models.architectures.family import Config, Family, GgufFacts
from localrt.models.encoders import SCORE, TYPES, BlockConfig, BlockNames, EncoderConfig
from localrt.models.layers.rope import read_rope
from localrt.models.raw_config import RawConfig
from localrt.models.tensor_source import RowSource

_NAMES = BlockNames(norm1="post_attention_norm", norm2="post_mlp_norm", up=("mlp.up_proj",))
_FUSED = replace(_NAMES, qkv=("self_attn.qkv_proj",))
_GATED = replace(_FUSED, up=("mlp.gate_proj", "mlp.up_proj"))
_MODERN = BlockNames(qkv=_FUSED.qkv, up=_FUSED.up)
_ACTIVATIONS = {
    **{"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"},
    **{"silu": "silu", "swiglu": "silu"},
}
_NAME = re.compile(
    r"(?:(?:bert|roberta|nomic_bert|model)\.)?"
    r"((?:encoder\.)?layers?\.(\d+)\.)?(.+)\.(weight|bias|gamma|beta)"
)
_PUBLISHED = {
    # names in files, GGUF's of what scores too
    "model.embed_tokens": "embeddings.word_embeddings embeddings.tok_embeddings",
    "model.embed_positions": "embeddings.position_embeddings",
    "model.embed_types": "embeddings.token_type_embeddings",
    "model.embed_norm": "embeddings.LayerNorm embeddings.norm emb_ln",
    "model.norm": "final_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attention.self.query",
    "self_attn.k_proj": "attention.self.key",
    "self_attn.v_proj": "attention.self.value",
    "self_attn.qkv_proj": "attn.Wqkv mixer.Wqkv",
    "self_attn.o_proj": "attention.output.dense attn.out_proj mixer.out_proj attn.Wo",
    "post_attention_norm": "attention.output.LayerNorm norm1",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.up_proj": "intermediate.dense mlp.fc1 mlp.fc11 mlp.Wi",
    "mlp.down_proj": "output.dense mlp.fc2 mlp.Wo",
    "post_mlp_norm": "output.LayerNorm norm2",
    "pooler": "pooler.dense classifier.dense head.dense cls",
    "score_norm": "head.norm cls.norm",
    "classifier": "classifier.out_proj cls.output",
}
_TENSORS = {name: own for own, names in _PUBLISHED.items() for name in names.split()}
_KINDS = {"gamma": "weight", "beta": "bias"}  # old names
_LEFT_OUT = ("cls.predictions.", "cls.seq_relationship.", "lm_head.", "decoder.")
"""Heads that predict words, which training is done with."""
_NOMICS_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "layer_norm_epsilon": "layer_norm_eps",
    "activation_function": "hidden_act",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
"""Keys of Nomic's first published configs."""
_NOMICS_OTHERS = ("prenorm", "use_rms_norm", "rotary_emb_interleaved")


def read_config(raw: RawConfig) -> EncoderConfig:
    """Read the config of any of them."""
    kind = raw.architecture.lower()
    if kind.startswith("nomic"):
        raw = raw.renamed(_NOMICS_KEYS)
        if key := next(filter(raw.flag, _NOMICS_OTHERS), ""):
            raise UnsupportedModelError(f"{key} is not supported")
        block = _block(raw, _GATED, "silu", theta=1000.0)
        return _encoder(raw, replace(block, bias=False, mlp_bias=False))
    if kind.startswith("jina"):
        return _encoder(raw, _block(raw, _FUSED, theta=20_000.0))
    if kind.startswith("modern"):
        return _read_modern(raw)
    positions, first = raw.integer("max_position_embeddings"), 0
    if kind.startswith(("roberta", "xlmroberta")):
        first = raw.index("pad_token_id", 1) + 1
    if first >= positions:
        raise ValueError(f"max_position_embeddings must be more than {first}, is {positions}")
    raw.choice("position_embedding_type", "absolute", {"absolute": True})
    config, context = _encoder(raw, _block(raw, _NAMES)), positions - first
    return replace(config, context_length=context, positions=positions, first_position=first)


def _read_modern(raw: RawConfig) -> EncoderConfig:
    """ModernBERT: norms of inputs, but none in the first layer; a window in two of three layers."""
    raw = raw.renamed({"norm_eps": "layer_norm_eps", "hidden_activation": "hidden_act"})
    full = replace(
        _block(raw, _MODERN, theta=raw.number("global_rope_theta", 160_000.0)),
        norms_sums=False,
        norm_bias=raw.flag("norm_bias"),
        fused_gate=True,
        bias=raw.flag("attention_bias"),
        mlp_bias=raw.flag("mlp_bias"),
    )
    theta = raw.number("rope_local_base_freq", raw.number("local_rope_theta", 10_000.0))
    rope = read_rope(raw, full.size, parameters={"rope_theta": theta})
    if (each_way := raw.integer("local_attention", 128) // 2) == 0:
        raise ValueError("local_attention must be at least 2, is 1")
    sliding = replace(full, rope=rope, window=each_way)
    every, config = raw.integer("global_attn_every_n_layers", 3), _encoder(raw, full)
    windowed = raw.windowed([at % every > 0 for at in range(len(config.layers))])
    first, *others = (sliding if here else full for here in windowed)
    first = replace(first, names=replace(_MODERN, norm1=""))
    raw.choice("classifier_activation", "gelu", {"gelu": True})
    mean = raw.choice("classifier_pooling", "cls", {"cls": False, "mean": True})
    return replace(config, layers=(first, *others), mean_ranks=mean)


def _block(raw: RawConfig, names: BlockNames, act: str = "gelu", theta: float = 0) -> BlockConfig:
    """A layer's block. Defaults: its activation, and its rotary positions' base, 0 without them."""
    hidden, heads = raw.integer("hidden_size"), raw.integer("num_attention_heads")
    if hidden % heads and not raw.has("head_dim"):
        raise ValueError(f"hidden_size {hidden} is not a multiple of {heads} heads")
    size = raw.integer("head_dim", hidden // heads)
    return BlockConfig(
        hidden=hidden,
        inner=raw.integer("intermediate_size"),
        heads=heads,
        head_dim=size,
        eps=raw.number("layer_norm_eps"),
        activation=raw.choice("hidden_act", act, _ACTIVATIONS),
        names=names,
        norms_sums=True,
        rope=read_rope(raw, size, default_theta=theta) if theta else None,
    )


def _encoder(raw: RawConfig, block: BlockConfig) -> EncoderConfig:
    return EncoderConfig(
        vocab_size=raw.integer("vocab_size"),
        context_length=raw.integer("max_position_embeddings"),
        layers=(block,) * raw.integer("num_hidden_layers"),
        types=raw.integer("type_vocab_size") if raw.has("type_vocab_size") else 0,
        ranks=raw.has_tensor(SCORE),
        dense=raw.dense(),
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
        ranking = "pooler.", "score_norm."
        found = {name: own for name, own in found.items() if not name.startswith(ranking)}
    return found


def _gguf_config(config: Config, file: GgufFacts) -> None:
    config["layer_norm_eps"] = file.number("attention.layer_norm_epsilon")
    config["type_vocab_size"] = file.tensors[TYPES].rows if TYPES in file.tensors else None
    config["local_attention"] = config.get("sliding_window")
    config["global_attn_every_n_layers"] = config.get("sliding_window_pattern")


FAMILIES = (
    Family(
        name="bert",
        encoder=read_config,
        folders="BertModel BertForMaskedLM BertForSequenceClassification "
        "RobertaModel RobertaForMaskedLM RobertaForSequenceClassification "
        "XLMRobertaModel XLMRobertaForMaskedLM XLMRobertaForSequenceClassification "
        "NomicBertModel NomicBertForMaskedLM NomicBertForSequenceClassification "
        "ModernBertModel ModernBertForMaskedLM ModernBertForSequenceClassification "
        "JinaEmbeddingsV3Model JinaEmbeddingsV3ForMaskedLM "
        "JinaEmbeddingsV3ForSequenceClassification",
        gguf="bert nomic-bert modern-bert jina-bert-v3",
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
