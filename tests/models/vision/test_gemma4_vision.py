"""Gemma 4's encoder against transformers: pixels, pieces and rows of pictures of odd shapes."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor

from localrt.common.errors import UnsupportedModelError
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_encoder
from tests.models.tiny import random_model, relative_error
from tests.models.tiny_configs import CONFIGS, MIXTURES
from tests.models.vision.oracles import check_logits, expanded, look, picture

IMAGE = 2  # a token that ``tokens`` does not give
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 20,
    "num_hidden_layers": 2,
    "patch_size": 4,
    "position_embedding_size": 256,
}
BOTH_WAYS = {"use_bidirectional_attention": "vision"}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"use_clipped_linears": True, "standardize": True},
    "pool-2": {"pooling_kernel_size": 2, "rope_parameters": {"rope_theta": 37.0}},
}
SHAPES = [(100, 100), (61, 17), (9, 33), (250, 131), (7, 900), (1200, 5)]  # widths and heights


def _config(text: str = "gemma4", own: dict[str, Any] | None = None, **vision: Any) -> Any:
    sizes = (CONFIGS | MIXTURES)[text]().to_dict() | {"pad_token_id": 0}
    return hf.Gemma4Config(
        text_config=sizes | (own or {}),
        vision_config={**_VISION, **vision},
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=1000,
        audio_token_id=1001,
    )


class Tiny:
    """A model in ``folder``, and what transformers prepares for it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        config = _config(**changes)
        self.folder, self.model = folder, random_model(config)
        for name, buffer in self.model.named_buffers():
            if name.endswith(("_min", "_max")):  # some values are beyond them
                torch.nn.init.uniform_(buffer, 0.5, 2.0).mul_(-1 if name.endswith("min") else 1)
            if name.endswith(("std_bias", "std_scale")):
                torch.nn.init.uniform_(buffer, 0.5, 2.0)
        self.model.save_pretrained(folder)
        self.processor = Gemma4ImageProcessorPil(
            patch_size=4,
            max_soft_tokens=70,
            pooling_kernel_size=config.vision_config.pooling_kernel_size,
        )
        self.processor.save_pretrained(folder)

    def inputs(self, *pictures: Picture) -> dict[str, Any]:
        """Patches of all pictures, filled up, and their numbers of rows."""
        return dict(self.processor([each.image() for each in pictures], return_tensors="pt"))

    def rows(self, *pictures: Picture) -> list[np.ndarray]:
        """The decoder's rows of every picture."""
        inputs = self.inputs(*pictures)
        with torch.no_grad():
            found = self.model.get_image_features(
                inputs["pixel_values"], inputs["image_position_ids"]
            )
        return [each.numpy() for each in found.pooler_output]


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind: str, tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, **KINDS[kind])
    pictures = [picture(*shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    opened = look(tmp_path, *pictures)
    assert (opened.encoder.placeholder, opened.encoder.row_token) == ("<|image|>", "<pad>")
    tokens = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
    for own, prepared, seen in zip(pictures, opened.prepared, opened.seen, strict=True):
        inputs = tiny.inputs(own)
        positions = inputs["image_position_ids"][0]
        count = int((positions[:, 0] >= 0).sum())
        assert (positions.max(0).values + 1).tolist() == [prepared.grid[1], prepared.grid[0]]
        assert np.abs(inputs["pixel_values"][0, :count].numpy() - prepared.patches[:]).max() < 1e-5
        text = Gemma4Processor.replace_image_token(tokens, inputs, 0)
        assert expanded(prepared, "<|image|>") == text
        (rows,) = tiny.rows(own)
        assert rows.shape == seen.rows.shape
        assert relative_error(seen.rows, rows) < 1e-4


PICTURES = picture(50, 21), picture(16, 44, seed=1)


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        pytest.param({"text": "gemma4", "use_clipped_linears": True}, 7, id="inputs-of-layers"),
        pytest.param({"text": "gemma4-keys-as-values", "own": BOTH_WAYS}, 7, id="both-ways"),
        pytest.param({"text": "gemma4-moe", "own": BOTH_WAYS}, 512, id="mixture-both-ways"),
    ],
)
def test_logits(changes: dict[str, Any], rows: int, tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, **changes)
    names = {"<|image>": 11, "<image|>": 12}

    def inputs(ids: torch.Tensor, *pictures: Picture) -> dict[str, Any]:
        own = {"mm_token_type_ids": (ids == IMAGE).long()}
        if pictures:
            own |= tiny.inputs(*pictures)
            del own["num_soft_tokens_per_image"]
        return own

    check_logits(tmp_path, tiny.model, PICTURES, inputs, IMAGE, names, row=0, rows=rows)


def test_larger_models_see_pictures_both_ways() -> None:
    for own in ({}, BOTH_WAYS):
        config = json.loads(_config(own=own).to_json_string())
        encoder = read_encoder(config, {"max_soft_tokens": 70})
        assert encoder.bidirectional is bool(own)
        assert encoder.full_layers_causal


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 1}, "num_key_value_heads must be 3, is 1"),
        ({"head_dim": 18}, "head_dim must be a multiple of 4, is 18"),
        ({"hidden_activation": "tanh"}, "hidden_activation 'tanh' is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be 'axial', is 'yarn'"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta must be a positive number"),
        ({"position_embedding_size": 100}, "at least 840 for 280 rows of a picture, is 100"),
        ({"patch_size": 1 << 19}, "pixels: the most is 64000000"),
        ({"pooling_kernel_size": -3}, "pooling_kernel_size must be an integer"),
        ({"pad": 3}, "pad_token_id must be 0, is 3"),
    ],
)
def test_bad_configs(changes: dict[str, Any], message: str) -> None:
    config = json.loads(_config(position_embedding_size=1024).to_json_string())
    config["text_config"]["pad_token_id"] = changes.pop("pad", 0)
    config["vision_config"] |= changes
    with pytest.raises(UnsupportedModelError, match=message):
        read_encoder(config, {})
