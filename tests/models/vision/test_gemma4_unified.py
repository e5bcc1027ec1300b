"""Gemma 4 12B's pictures against transformers: pixels, pieces, rows and logits."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.gemma4_unified.processing_gemma4_unified import Gemma4UnifiedProcessor

from localrt.common.errors import UnsupportedModelError
from localrt.models.vision.cost import SIDE, picture_cost
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_encoder
from tests.models.tiny import random_model, relative_error
from tests.models.tiny_configs import CONFIGS
from tests.models.vision.oracles import check_logits, expanded, look, picture
from tests.models.vision.test_gemma4_vision import SHAPES

IMAGE = 2  # a token that ``tokens`` does not give
WINDOW = 128  # transformers' windows do not hide a picture's rows from one another, ours do
HIDDEN = 40


def _merge() -> Callable[..., Any]:
    """Transformers' ``patches_merge``, whose module asks for torchvision, and does without it."""
    name = "transformers.models.gemma4_unified.image_processing_gemma4_unified"
    with pytest.MonkeyPatch.context() as patch:
        for part in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            patch.setitem(sys.modules, part, ModuleType(part))
        vars(sys.modules["torchvision.transforms.v2"])["functional"] = SimpleNamespace(
            InterpolationMode=int
        )
        patch.setitem(sys.modules, name, ModuleType(name))  # so that it is forgotten
        del sys.modules[name]
        merge: Callable[..., Any] = importlib.import_module(name).patches_merge
    return merge


MERGE = _merge()


def _config(own: dict[str, Any] | None = None, **vision: Any) -> Any:
    sizes = CONFIGS["gemma4-unified"]().to_dict()
    sizes |= {"pad_token_id": 0, "sliding_window": WINDOW, **(own or {})}
    tiny = {"patch_size": 4, "mm_embed_dim": HIDDEN, "output_proj_dims": HIDDEN}
    return hf.Gemma4UnifiedConfig(
        text_config=sizes,
        vision_config={**tiny, "mm_posemb_size": 75, **vision},
        audio_config={"audio_embed_dim": 20},
        image_token_id=IMAGE,
        video_token_id=1000,
        audio_token_id=1001,
    )


class Tiny:
    """A model in ``folder``, and what transformers prepares for it."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        config = _config(**changes)
        self.folder, self.model = folder, random_model(config)
        self.model.save_pretrained(folder)
        self.pool = config.vision_config.pooling_kernel_size
        self.processor = Gemma4ImageProcessorPil(
            patch_size=4, max_soft_tokens=70, pooling_kernel_size=self.pool
        )
        self.processor.save_pretrained(folder)

    def inputs(self, *pictures: Picture) -> dict[str, Any]:
        """Squares of all pictures, filled up to 70, and their positions."""
        given = dict(self.processor([each.image() for each in pictures], return_tensors="pt"))
        merged = []
        for patches, places in zip(given["pixel_values"], given["image_position_ids"], strict=True):
            count = int((places[:, 0] >= 0).sum())
            rows, own = MERGE(patches[:count], places[:count], count // self.pool**2)
            more = 70 - len(rows)
            pad = torch.nn.functional.pad
            merged.append((pad(rows, (0, 0, 0, more)), pad(own, (0, 0, 0, more), value=-1)))
        pixels, places = (torch.stack(part) for part in zip(*merged, strict=True))
        return {"pixel_values": pixels, "image_position_ids": places}


@pytest.mark.parametrize("changes", [{}, {"pooling_kernel_size": 2, "rms_norm_eps": 1e-2}])
def test_rows(changes: dict[str, Any], tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, **changes)
    pictures = [picture(*shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    opened = look(tmp_path, *pictures)
    assert opened.encoder.placeholder == "<|image|>"
    tokens = SimpleNamespace(boi_token="<|image>", image_token="<|image|>", eoi_token="<image|>")
    for own, prepared, seen in zip(pictures, opened.prepared, opened.seen, strict=True):
        inputs = tiny.inputs(own)
        positions = inputs["image_position_ids"][0]
        count = int((positions[:, 0] >= 0).sum())
        assert (positions.max(0).values + 1).tolist() == [prepared.grid[1], prepared.grid[0]]
        assert np.abs(inputs["pixel_values"][0, :count].numpy() - prepared.patches[:]).max() < 1e-5
        given = {"num_soft_tokens_per_image": [count]}
        text = Gemma4UnifiedProcessor.replace_image_token(tokens, given, 0)
        assert expanded(prepared, "<|image|>") == text
        with torch.no_grad():
            (rows,) = tiny.model.get_image_features(**inputs).pooler_output
        assert rows.shape == seen.rows.shape
        assert relative_error(seen.rows, rows.numpy()) < 1e-4


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize(
    ("own", "rows"),
    [
        pytest.param({}, 7, id="both-ways"),
        pytest.param({"use_bidirectional_attention": None}, 7, id="causal"),
        pytest.param({"num_kv_shared_layers": 0}, 512, id="one-pass"),
    ],
)
def test_logits(own: dict[str, Any], rows: int, tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, own=own)

    def inputs(ids: torch.Tensor, *pictures: Picture) -> dict[str, Any]:
        kinds = {"mm_token_type_ids": (ids == IMAGE).long()}
        return kinds | (tiny.inputs(*pictures) if pictures else {})

    shown = picture(50, 21), picture(16, 44, seed=1)
    names = {"<|image>": 11, "<image|>": 12}
    check_logits(tmp_path, tiny.model, shown, inputs, IMAGE, names, rows=rows)


def test_config_without_keys() -> None:
    """The published defaults: rows see one another, in all layers."""
    text = {"model_type": "gemma4_unified_text", "hidden_size": 64}
    config = {"model_type": "gemma4_unified", "vision_config": {}, "text_config": text}
    encoder: Any = read_encoder(config, {})
    assert (encoder.bidirectional, encoder.full_layers_causal) == (True, False)
    theirs = hf.Gemma4UnifiedConfig(vision_config={}).vision_config
    names = ("model_patch_size", "mm_embed_dim", "mm_posemb_size", "rms_norm_eps")
    ours = (encoder.patch, encoder.hidden, encoder.positions, encoder.eps)
    assert ours == tuple(getattr(theirs, name) for name in names)


def test_cost(tmp_path: Path) -> None:
    """It has no blocks: a row passes two matrices, and is as wide as the larger one."""
    tiny = Tiny(tmp_path)
    cost = picture_cost(tmp_path)
    assert cost is not None
    rows = look(tmp_path, Picture(np.zeros((SIDE, SIDE, 3), np.uint8))).prepared[0].rows
    pixels, out = 3 * 12**2, tiny.model.config.text_config.hidden_size
    assert cost.tokens == rows == 64
    assert cost.products == rows * HIDDEN * (pixels + out)
    assert cost.room_bytes > rows * pixels * (1 + 4)  # bytes and numbers
    names = tiny.model.model.embed_vision.state_dict()
    assert cost.encoder_bytes == sum(4 * values.numel() for values in names.values())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mm_posemb_size": 279}, "mm_posemb_size must be at least max_soft_tokens, is 279"),
        ({"mm_embed_dim": 0}, "mm_embed_dim must be an integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"patch_size": 1 << 19}, "pixels: the most is 64000000"),
    ],
)
def test_bad_configs(changes: dict[str, Any], message: str) -> None:
    config = json.loads(_config(mm_posemb_size=280).to_json_string())
    config["vision_config"] |= changes
    with pytest.raises(UnsupportedModelError, match=message):
        read_encoder(config, {})
