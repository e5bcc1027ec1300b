"""Files of draft heads. ``localrt/drafts/heads`` reads their configs."""

from __future__ import annotations

from localrt.models.architectures.family import SANDWICH_NORMS, Config, Family, GgufFacts
from localrt.models.architectures.gemma4 import add_full_layers

_DFLASH_SIZES = ("block_size", "selector_top_k", "conv_kernel_size", "conv_group_size")


def _add_eagle(config: Config, file: GgufFacts) -> None:
    for name in ("target_hidden_size", "norm_before_residual", "norm_before_fc"):
        config[name] = file.value(name)
    config["eagle_aux_hidden_state_layer_ids"] = file.listed("target_layers") or []


def _add_assistant(config: Config, file: GgufFacts) -> None:
    add_full_layers(config, file)
    config["backbone_hidden_size"] = file.integer("embedding_length_out")
    if (clusters := file.tensors.get("model.masked_embedding.centroids.weight")) is not None:
        config["num_centroids"] = clusters.rows


def _add_dflash(config: Config, file: GgufFacts) -> None:
    """Add DFlash's options, including unknown ones. A file numbers layers' inputs, a folder their
    outputs.
    """
    layers = file.listed("target_layers") or ()
    config["use_sliding_window"] = config["sliding_window"] is not None
    config["is_causal"] = file.flag("attention.causal")
    config["sample_from_anchor"] = file.flag("sample_from_anchor")
    if "embedding_multiplier" in config:
        config["input_embedding_scale"] = config["embedding_multiplier"]
    config["dflash_config"] = {
        **{key: file.integer(key) for key in _DFLASH_SIZES},
        "mask_token_id": file.token("mask"),
        "target_layer_ids": [n - 1 if type(n) is int else n for n in layers],
        "hyper_connection": file.integer("hyper_connection.count"),
    }


FAMILIES = (
    Family(
        name="eagle3",
        gguf="eagle3",
        gguf_top={"fc": "model.fc", "enc.output_norm": "model.fc_norm"},
        gguf_layer={"attn_norm_2": "hidden_norm"},
        gguf_in_pairs=True,
        gguf_config=_add_eagle,
    ),
    Family(
        name="dflash",
        gguf="dflash",
        gguf_top={"fc": "model.fc", "enc.output_norm": "model.hidden_norm"},
        gguf_layer={
            "attn_conv_base": "attention_conv.base_kernel",
            "attn_conv_proj": "attention_conv.kernel_projection",
            "ffn_conv_base": "mlp_conv.base_kernel",
            "ffn_conv_proj": "mlp_conv.kernel_projection",
        },
        gguf_config=_add_dflash,
    ),
    Family(
        name="gemma4_assistant",
        gguf="gemma4-assistant",
        gguf_top={
            "nextn.pre_projection": "model.pre_projection",
            "nextn.post_projection": "model.post_projection",
            "masked_embd_centroids": "model.masked_embedding.centroids",
        },
        gguf_layer=SANDWICH_NORMS,
        gguf_config=_add_assistant,
    ),
)
