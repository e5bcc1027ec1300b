"""Muse-Glimmer's pictures against transformers: pixels, pieces, rows and logits."""

from __future__ import annotations

import importlib
import random
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from PIL import Image
from transformers.models.muse_glimmer.processing_muse_glimmer import MuseGlimmerProcessor

from localrt.common.errors import UnsupportedModelError
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_encoder
from tests.models.tiny import random_model, relative_error
from tests.models.tiny_configs import CONFIGS
from tests.models.vision.oracles import check_logits, expanded, look, picture

IMAGE = 2  # a token that ``tokens`` does not give
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 5,
    "patch_size": 4,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
}
SHAPES = [(24, 24), (8, 8), (61, 17), (17, 90), (100, 70), (5, 300)]  # windows are 24 pixels wide
TOKENS = {f"image_{part}token": f"<|{name}|>" for part, name in
          (("", "patch"), ("start_", "image_start"), ("end_", "image_end"))}  # fmt: skip


def config_of(vision: dict[str, Any] | None = None, **own: Any) -> Any:
    """A tiny config that is whole."""
    text = CONFIGS["muse-glimmer"]().text_config.to_dict()
    sizes = {"out_hidden_size": 128, "projector_hidden_size": 40, "image_token_id": IMAGE}
    return hf.MuseGlimmerConfig(
        text_config=text, vision_config={**VISION, **(vision or {})}, **{**sizes, **own}
    )


@cache
def theirs() -> Any:
    """Transformers' module of the processor, which lets torchvision resize: here Pillow does."""
    name = "transformers.models.muse_glimmer.image_processing_muse_glimmer"
    with pytest.MonkeyPatch.context() as patch:
        for part in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
            patch.setitem(sys.modules, part, ModuleType(part))
        vars(sys.modules["torchvision.transforms.v2"])["functional"] = SimpleNamespace(
            InterpolationMode=int
        )
        return importlib.import_module(name)


def processor_of(**settings: Any) -> Any:
    """Transformers' processor."""

    class Backend(theirs().TorchvisionBackend):  # type: ignore[misc]
        def resize(self, image: Any, size: Any, resample: int, **_of_filters: Any) -> Any:
            images = (Image.fromarray(each.permute(1, 2, 0).numpy()) for each in image)
            made = [np.asarray(each.resize((size.width, size.height), resample)) for each in images]
            return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)

        def rescale_and_normalize(self, images: Any, *values: Any) -> Any:
            factor, mean, std = values[1], *map(torch.tensor, values[3:])
            return (images * factor - mean[:, None, None]) / std[:, None, None]

    class Processor(theirs().MuseGlimmerImageProcessor, Backend):  # type: ignore[misc]
        pass

    return Processor(patch_size=4, max_image_tokens=40, **settings)


class Tiny:
    """A model in ``folder``, and what transformers prepares for it."""

    def __init__(self, folder: Path, vision: dict[str, Any] | None = None) -> None:
        self.folder, self.model = folder, random_model(config_of(vision))
        self.model.save_pretrained(folder)
        self.processor = processor_of()
        self.processor.save_pretrained(folder)

    def inputs(self, *pictures: Picture) -> dict[str, Any]:
        """Patches of all pictures, and their grids."""
        return dict(self.processor([each.image() for each in pictures], return_tensors="pt"))


@pytest.mark.parametrize(
    "vision",
    [{}, {"pos_emb_height": 4, "pos_emb_width": 4, "layer_types": ["window_attention"] * 5}],
    ids=["usual", "windows"],
)
def test_rows(vision: dict[str, Any], tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, vision)
    pictures = [picture(*shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    opened = look(tmp_path, *pictures)
    own = SimpleNamespace(image_processor=tiny.processor, **TOKENS)
    for shown, prepared, seen in zip(pictures, opened.prepared, opened.seen, strict=True):
        inputs = tiny.inputs(shown)
        patches = inputs["pixel_values"].numpy()
        _, h, w = inputs["image_grid_thw"][0].tolist()
        assert prepared.grid == (h, w)
        squares = patches.reshape(h // 2, 2, w // 2, 2, 2, -1).swapaxes(1, 2).reshape(h * w, 2, -1)
        for frame in range(2):
            np.testing.assert_allclose(squares[:, frame], prepared.patches[:], rtol=0, atol=1e-5)
        text = MuseGlimmerProcessor.replace_image_token(own, inputs, 0)
        assert expanded(prepared, opened.encoder.placeholder) == text
        assert prepared.offsets is None
        with torch.no_grad():
            (rows,) = tiny.model.get_image_features(**inputs).pooler_output
        eps = tiny.model.config.text_config.rms_norm_eps  # of the norm that our decoder has
        ours = seen.rows / np.sqrt(np.square(seen.rows).mean(-1, keepdims=True) + eps)
        assert relative_error(ours, rows.numpy()) < 1e-4


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize("rows", [7, 512])
def test_logits(rows: int, tmp_path: Path) -> None:
    tiny = Tiny(tmp_path)

    def inputs(_ids: torch.Tensor, *pictures: Picture) -> dict[str, Any]:
        return tiny.inputs(*pictures) if pictures else {}

    shown = picture(50, 21), picture(16, 44, seed=1)
    names = {"<|image_start|>": 11, "<|image_end|>": 12}
    check_logits(tmp_path, tiny.model, shown, inputs, IMAGE, names, rows=rows)


def test_shapes() -> None:
    """The published defaults, whatever a picture's size."""
    config = {"model_type": "muse_glimmer", "vision_config": {}, "text_config": {}}
    encoder: Any = read_encoder(config, {})
    draw = random.Random(0)
    for _ in range(2000):
        height, width = (
            draw.choice((draw.randrange(1, 200), draw.randrange(1, 6000))) for _ in "hw"
        )
        wanted = theirs().smart_resize(height, width, 28, 4096)
        if wanted[0] * wanted[1] <= 4096 * 28**2:  # a thin picture may have more there
            assert encoder._size(height, width) == wanted, (height, width)
    for most in (4096, 9):
        height, width = encoder.with_max_rows(most)._size(1, 60_000)
        assert (height // 28) * (width // 28) <= most


def test_published_defaults() -> None:
    config = {"model_type": "muse_glimmer", "vision_config": {}, "text_config": {}}
    encoder: Any = read_encoder(config, {})
    ours, known = encoder.config, hf.MuseGlimmerConfig()
    own = known.vision_config
    kinds = ["full_attention" if n in ours.full else "window_attention" for n in range(ours.depth)]
    assert kinds == own.layer_types
    assert (ours.blocks.hidden, ours.blocks.inner) == (own.hidden_size, own.intermediate_size)
    assert (ours.blocks.heads, ours.blocks.eps) == (own.num_attention_heads, own.layer_norm_eps)
    assert (ours.patch, ours.frames, ours.merge) == (14, own.patch_temporal, own.merge_size)
    assert (ours.side, ours.inner, ours.out) == (32, known.projector_hidden_size, 6656)
    assert ours.theta == own.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("vision", "own", "message"),
    [
        ({"pos_emb_height": 5}, {}, "windows of 5 patches in blocks"),
        ({"layer_types": ["full_attention"]}, {}, "windows of 6 patches in blocks"),
        (
            {"layer_types": ["x"] * 5},
            {},
            r"in blocks \['x', 'x', 'x', 'x', 'x'\] are not supported",
        ),
        ({"layer_types": 5}, {}, "makes no sense"),
        ({"num_attention_heads": 3}, {}, "a multiple of 4 times its heads"),
        ({}, {"projector_hidden_act": "silu"}, "projector_hidden_act must be 'gelu', is 'silu'"),
        ({}, {"text_config": 5}, "makes no sense"),
    ],
)
def test_bad_configs(vision: dict[str, Any], own: dict[str, Any], message: str) -> None:
    config = {"model_type": "muse_glimmer", "text_config": {"hidden_size": 64}}
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        read_encoder({**config, "vision_config": {**VISION, **vision}, **own}, {})
    assert "\n" not in str(raised.value)
