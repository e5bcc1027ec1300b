"""Pixtral's encoder against transformers: pixels, pieces and rows of pictures of odd shapes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.pixtral import image_processing_pil_pixtral as pil

from localrt.common.errors import OptionError, UnsupportedModelError
from localrt.models.vision.picture import Picture, cut
from localrt.models.vision.registry import has_encoder, read_encoder
from tests.models.tiny import random_model, relative_error
from tests.models.tiny_configs import with_text
from tests.models.vision.oracles import check_logits, expanded, look, picture, renamed

PATCH = 4
IMAGE = 2  # a token that ``tokens`` does not give
_VISION: dict[str, Any] = {
    "model_type": "pixtral",
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "patch_size": PATCH,
    "image_size": 60,
}
_TEXT = {
    "model_type": "mistral",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 512,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
SHAPES = [(60, 60), (61, 17), (9, 33), (250, 131), (40, 900), (5, 17)]  # widths and heights
PICTURES = picture(50, 21), picture(16, 44, seed=1)


def _llava(**values: Any) -> Any:
    config = with_text(hf.LlavaConfig, dict(_TEXT), **_VISION, hidden_act="silu")
    config.vision_feature_layer, config.vision_feature_select_strategy = -1, "full"
    config.image_token_index = IMAGE
    for key, value in values.items():
        setattr(config, key, value)
    return config


def _mistral3(text: dict[str, Any] = _TEXT, **values: Any) -> Any:
    config = with_text(hf.Mistral3Config, dict(text), **_VISION, hidden_act="silu")
    config.image_token_index = IMAGE
    for key, value in values.items():
        setattr(config, key, value)
    return config


CONFIGS = {
    "llava": _llava,
    "mistral3": _mistral3,
    "mistral3-plain": lambda: _mistral3(spatial_merge_size=1, multimodal_projector_bias=True),
    "ministral3": lambda: _mistral3({**_TEXT, "model_type": "ministral3", "head_dim": 16}),
    "mistral3-wide": lambda: _mistral3(spatial_merge_size=3),
}


class Tiny:
    """A model of a family in ``folder``, and what transformers prepares for it."""

    def __init__(self, family: str, folder: Path, **text: Any) -> None:
        config = CONFIGS[family]()
        for key, value in text.items():
            setattr(config.text_config, key, value)
        self.folder, self.model = folder, random_model(config)
        self.model.save_pretrained(folder)
        self.merge = getattr(config, "spatial_merge_size", 1)
        self.square = PATCH * self.merge
        self.processor = pil.PixtralImageProcessorPil(size={"longest_edge": 60}, patch_size=PATCH)
        self.processor.save_pretrained(folder)

    def inputs(self, *pictures: Picture) -> dict[str, torch.Tensor]:
        """Pixels of all pictures, and their sizes."""
        images = [each.image() for each in pictures]
        return dict(self.processor(images, patch_size=self.square, return_tensors="pt"))

    def rows(self, *pictures: Picture) -> list[np.ndarray]:
        """The decoder's rows of every picture."""
        with torch.no_grad():
            found = self.model.get_image_features(**self.inputs(*pictures)).pooler_output
        return [each.numpy() for each in found]

    def expansion(self, size: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> str:
        """What the processor writes for a picture of this (height, width), once resized."""
        # The module is not there without torchvision; the processor needs no more of it than this.
        name = "transformers.models.pixtral.image_processing_pixtral"
        monkeypatch.setitem(sys.modules, name, pil)
        from transformers.models.pixtral.processing_pixtral import PixtralProcessor

        own = SimpleNamespace(
            patch_size=PATCH,
            spatial_merge_size=self.merge,
            image_token="[IMG]",
            image_break_token="[IMG_BREAK]",
            image_end_token="[IMG_END]",
        )
        return str(PixtralProcessor.replace_image_token(own, {"image_sizes": [size.tolist()]}, 0))


@pytest.mark.parametrize("family", CONFIGS)
def test_rows(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = Tiny(family, tmp_path)
    pictures = [picture(*shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    opened = look(tmp_path, *pictures)
    assert opened.encoder.placeholder == "[IMG]"
    for own, prepared, seen in zip(pictures, opened.prepared, opened.seen, strict=True):
        inputs = tiny.inputs(own)
        (pixels,), (size,) = inputs["pixel_values"].numpy(), inputs["image_sizes"]
        assert [edge // PATCH for edge in size.tolist()] == list(prepared.grid)
        theirs = cut(pixels.transpose(1, 2, 0), PATCH)
        assert np.abs(prepared.patches[:] - theirs).max() < 1e-5
        assert expanded(prepared, "[IMG]") == tiny.expansion(size, monkeypatch)
        (rows,) = tiny.rows(own)
        assert rows.shape == seen.rows.shape == (prepared.rows, 64)
        assert relative_error(seen.rows, rows) < 1e-4


@pytest.mark.parametrize("family", ["llava", "mistral3"])
def test_two_pictures_and_names_of_the_hub(family: str, tmp_path: Path) -> None:
    tiny = Tiny(family, tmp_path)

    def published(name: str) -> str:
        name = name.removeprefix("model.")
        return name.replace("language_model.", "language_model.model.")

    seen = look(renamed(tmp_path, published), *PICTURES).seen
    for theirs, ours in zip(tiny.rows(*PICTURES), seen, strict=True):
        assert relative_error(ours.rows, theirs) < 1e-4


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize("rows", [512, 7])
@pytest.mark.parametrize("family", ["llava", "mistral3", "ministral3"])
def test_logits(family: str, rows: int, tmp_path: Path) -> None:
    tiny = Tiny(family, tmp_path)
    names = {"[IMG_BREAK]": 11, "[IMG_END]": 12}

    def inputs(ids: torch.Tensor, *pictures: Picture) -> dict[str, torch.Tensor]:
        return tiny.inputs(*pictures) if pictures else {}

    check_logits(tmp_path, tiny.model, PICTURES, inputs, IMAGE, names, rows=rows)


def test_publishers_defaults(tmp_path: Path) -> None:
    tiny = Tiny("mistral3", tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    own = picture(300, 90)
    (ours,) = look(tmp_path, own).seen
    assert relative_error(ours.rows, tiny.rows(own)[0]) < 1e-4  # the largest edge is image_size


def test_a_line_is_too_narrow(tmp_path: Path) -> None:
    Tiny("llava", tmp_path)
    with pytest.raises(OptionError, match="1 x 100 pixels is too narrow"):
        look(tmp_path, picture(1, 100))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_feature_layer": -2}, "vision_feature_layer must be -1, is -2"),
        ({"vision_feature_select_strategy": "default"}, "must be 'full', is 'default'"),
        ({"projector_hidden_act": "tanh"}, "projector_hidden_act 'tanh' is not supported"),
        ({"text_config": 7}, "makes no sense"),
        ({"vision": {"hidden_act": "relu"}}, "hidden_act 'relu' is not supported"),
        ({"vision": {"hidden_size": 50}}, "hidden_size must be a multiple of 12, is 50"),
        ({"vision": {"patch_size": 0}}, "patch_size must be an integer from 1"),
        ({"vision": {"num_hidden_layers": "2"}}, "num_hidden_layers must be an integer"),
        ({"vision": {"rope_parameters": {"rope_type": "yarn"}}}, "rope_type must be 'axial'"),
        ({"vision": {"rope_parameters": [1]}}, "makes no sense"),
        ({"processor": {"size": {"height": 3}}}, "width must be an integer"),
        ({"processor": {"size": 3}}, "makes no sense"),
        ({"processor": {"size": {"longest_edge": 9000}}}, "may have 81072016 pixels"),
        ({"vision": {"patch_size": 1 << 20}}, "pixels: the most is 64000000"),
        ({"processor": {"resample": 9}}, "resample must be a number from 1 to 5, is 9"),
        ({"processor": {"image_std": [0.5, 0, 0.5]}}, "image_mean and image_std"),
        ({"processor": {"image_mean": ["a", "b", "c"]}}, "makes no sense"),
        ({"processor": {"rescale_factor": None, "resample": -1}}, "resample must be"),
    ],
)
def test_bad_configs(changes: dict[str, Any], message: str) -> None:
    config = json.loads(_llava().to_json_string())
    config["vision_config"] |= changes.pop("vision", {})
    processor = changes.pop("processor", {})
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        read_encoder({**config, **changes}, processor)
    assert "\n" not in str(caught.value)


def test_other_encoders_of_llava_are_not_known() -> None:
    config = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    assert not has_encoder(config)
    with pytest.raises(UnsupportedModelError, match="'llava'"):
        read_encoder(config, {})
