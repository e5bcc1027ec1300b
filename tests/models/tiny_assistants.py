"""Gemma 4's assistants of tiny random models, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.models.tiny import save_tiny
from tests.models.tiny_configs import SIZES, WINDOW

HIDDEN = 32
CLUSTERS = {"num_centroids": 211, "centroid_intermediate_top_k": 40}  # 211 is a prime


def sharing_modes(config: Any) -> list[str | None]:
    """Those of transformers, which has no word for layers that all read another model's."""
    if config.num_kv_shared_layers == config.num_hidden_layers:
        return ["reuse"] * config.num_hidden_layers
    found: list[str | None] = SHARING_MODES.fget(config)
    return found


SHARING_MODES: Any = transformers.Gemma4TextConfig.kv_sharing_modes


class TinyAssistant:
    """An assistant of the tiny model ``name``, as a folder, and transformers' own."""

    def __init__(self, name: str, target: Path, folder: Path, **options: Any) -> None:
        self.target = save_tiny(name, target)
        theirs = self.target.config.get_text_config()
        unified = "unified" in theirs.model_type
        kind = "Gemma4Unified" if unified else "Gemma4"
        inputs = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
        text = getattr(transformers, f"{kind}TextConfig")(
            **{**SIZES, "hidden_size": HIDDEN, "num_hidden_layers": 4},
            **({} if unified else dict.fromkeys(inputs, 0)),
            num_kv_shared_layers=4,
            head_dim=16,
            global_head_dim=theirs.per_layer_config[-1].head_dim,
            sliding_window=WINDOW,
            layer_types=["sliding_attention"] * 3 + ["full_attention"],
            attention_k_eq_v=theirs.attention_k_eq_v,
            num_global_key_value_heads=theirs.per_layer_config[-1].num_key_value_heads,
        )
        config = getattr(transformers, f"{kind}AssistantConfig")(
            text_config=text, backbone_hidden_size=theirs.hidden_size, **options
        )
        config._attn_implementation = "eager"
        torch.manual_seed(5)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                transformers.Gemma4TextConfig, "kv_sharing_modes", property(sharing_modes)
            )
            model = getattr(transformers, f"{kind}AssistantForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.2)
                if parameter.ndim == 1:
                    parameter.add_(0.7)
            for each in model.model.layers:
                each.layer_scalar.copy_(torch.rand(1) + 0.5)
            if config.use_ordered_embeddings:
                order = torch.randperm(theirs.vocab_size)
                model.masked_embedding.token_ordering.copy_(order)
        self.model = model.float().eval()
        self.model.save_pretrained(folder)

    def levels(self, ids: list[int], drafts: list[int]) -> list[np.ndarray]:
        """Logits of each level below ``ids``, whose last token the target has not seen."""
        with torch.no_grad():
            held = torch.tensor([ids[:-1]])
            seen = self.target(
                held, output_hidden_states=True, return_shared_kv_states=True, use_cache=True
            )
            hidden, found = seen.hidden_states[-1][:, -1:], []
            for token in (ids[-1], *drafts):
                embedded = self.target.get_input_embeddings()(torch.tensor([[token]]))
                made = self.model(
                    inputs_embeds=torch.cat([embedded, hidden], -1),
                    position_ids=torch.tensor([[len(ids) - 1]]),
                    attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                    shared_kv_states=seen.shared_kv_states,
                )
                hidden = made.last_hidden_state
                found.append(made.logits[0, 0].numpy())
        return found
