"""Qwen's encoders, pictures and positions against transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from localrt.common.errors import OptionError, UnsupportedModelError
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision.encoder import EncodedPicture, VisionEncoder
from localrt.models.vision.encoder_cache import EncoderUnitReader
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_encoder
from localrt.quant.ops.vision import VisionSteps
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import relative_error
from tests.models.vision.tiny_qwen import TINY, picture, processor_of

SIZES = [(40, 40), (13, 90), (131, 37), (8, 8), (23, 301)]

WIDTHS = {"glm4v": 4096, "glm4v_moe": 4096, "glm_ocr": 1536, "paddleocr_vl": 1024}
"""Of the decoder that a tower is made for, by default."""


def encode(
    encoder: VisionEncoder, source: VisionFolder, *pictures: Picture
) -> list[EncodedPicture]:
    """What the encoder makes of pictures, in float32."""
    ops = TorchOps(compute_format="f32", device="cpu")
    steps = VisionSteps(ops)
    units = EncoderUnitReader(source, steps)
    return [encoder.encode(encoder.prepare(each), units, steps) for each in pictures]


@pytest.mark.parametrize("kind", TINY)
def test_rows(kind: str, tiny_vl: Callable[[str], tuple[Path, Any]]) -> None:
    folder, model = tiny_vl(kind)
    processor = processor_of(folder)
    pictures = [picture(*size, seed=seed) for seed, size in enumerate(SIZES)]
    with closing(VisionFolder(folder)) as source:
        encoder = read_encoder(source.config, source.processor)
        ours = encode(encoder, source, *pictures)
    for some in ([0], [1, 2], [3, 4]):
        inputs = processor([pictures[each].image() for each in some], return_tensors="pt")
        with torch.no_grad():
            theirs = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        rows = np.concatenate([ours[each].rows for each in some])
        assert relative_error(rows, torch.cat(list(theirs.pooler_output)).numpy()) < 1e-4
        deep = getattr(theirs, "deepstack_features", None) or []
        assert encoder.deep_layers == len(deep)
        for layer, wanted in enumerate(deep):
            found = np.concatenate([ours[each].deep[layer] for each in some])
            assert relative_error(found, torch.cat(list(wanted)).numpy()) < 1e-4


@pytest.mark.parametrize("kind", TINY)
@pytest.mark.parametrize("size", [*SIZES, (1, 1), (640, 480)])
def test_prepared(
    kind: str, size: tuple[int, int], tiny_vl: Callable[[str], tuple[Path, Any]]
) -> None:
    folder, model = tiny_vl(kind)
    shown = picture(*size)
    with closing(VisionFolder(folder)) as source:
        encoder = read_encoder(source.config, source.processor)
    prepared = encoder.prepare(shown)
    wanted = processor_of(folder)(shown.image(), return_tensors="np")
    _, h, w = wanted["image_grid_thw"][0].tolist()
    assert prepared.grid == (h, w)
    assert prepared.pieces == (h * w // 4,)
    frames = wanted["pixel_values"].reshape(h * w, 3, -1, 16)
    if kind == "paddleocr_vl":  # line by line, not square by square
        squares = frames.reshape(h // 2, 2, w // 2, 2, 3, 1, 16).swapaxes(1, 2)
        frames = squares.reshape(frames.shape)
    ours = prepared.patches[:].reshape(h * w, 3, 16)
    for frame in range(frames.shape[2]):
        np.testing.assert_allclose(frames[:, :, frame], ours, rtol=0, atol=1e-5)

    before, behind = 3, 4
    kinds = torch.tensor([[0] * before + [1] * prepared.rows + [0] * behind])
    grid = torch.tensor(wanted["image_grid_thw"])
    (positions,) = model.model.get_rope_index(torch.zeros_like(kinds), kinds, grid)[0].swapaxes(
        0, 1
    )
    assert prepared.offsets is not None
    picture_ends = before + prepared.rows
    np.testing.assert_array_equal(positions[:, before:picture_ends].T, before + prepared.offsets)
    text = before + prepared.advance + np.arange(behind)
    np.testing.assert_array_equal(positions[:, picture_ends:], np.tile(text, (3, 1)))


@pytest.mark.parametrize("kind", TINY)
def test_published_defaults(kind: str) -> None:
    text = {"hidden_size": WIDTHS.get(kind, 3584)}
    encoder = read_encoder({"model_type": kind, "vision_config": {}, "text_config": text}, {})
    theirs = type(TINY[kind]())().vision_config
    ours: Any = encoder.config  # type: ignore[attr-defined]
    assert ours.depth == theirs.to_dict().get("depth", theirs.to_dict().get("num_hidden_layers"))
    assert (ours.patch, ours.merge) == (theirs.patch_size, theirs.spatial_merge_size)
    assert ours.deep == tuple(getattr(theirs, "deepstack_visual_indexes", ()))


@pytest.mark.parametrize("kind", TINY)
def test_attended(kind: str) -> None:
    """The products of attention, as the steps are asked for them."""
    text = {"hidden_size": WIDTHS.get(kind, 3584)}
    encoder = read_encoder({"model_type": kind, "vision_config": {}, "text_config": text}, {})
    prepared = encoder.prepare(Picture(np.zeros((448, 672, 3), np.uint8)))
    config: Any = encoder.config  # type: ignore[attr-defined]
    _, ends = encoder._windows(*(n // 2 for n in prepared.grid))  # type: ignore[attr-defined]
    sizes, patches = np.diff([0, *ends]), len(prepared.patches)
    windowed = config.depth - len(config.full) if config.window else 0
    pairs = windowed * (sizes**2).sum() + (config.depth - windowed) * patches**2
    assert encoder.block_work("blocks.0.", 3, prepared) == pytest.approx(
        (patches, 2 * 3 * pairs / patches / config.depth)
    )


@pytest.mark.parametrize(
    ("kind", "size", "most"),
    [
        ("qwen2_vl", 3584, 16384),
        ("qwen3_vl", 3584, 16384),
        ("mistral3", 64, 3025),
        ("glm_ocr", 1536, 10699),  # half of the pixels
        ("paddleocr_vl", 1024, 21399),
    ],
)
def test_large_photo(kind: str, size: int, most: int) -> None:
    """Made smaller where a context has no room for all of its rows."""
    text = {"hidden_size": size, "num_attention_heads": 4}
    config = {"model_type": kind, "vision_config": {}, "text_config": text}
    processor = {"max_pixels": 4096**2, "size": {"longest_edge": 1540}}
    encoder = read_encoder(config, processor)
    photo, small = (Picture(np.zeros((h, w, 3), np.uint8)) for h, w in ((3024, 4032), (300, 400)))
    for rows in (2048, 500):
        bounded = encoder.with_max_rows(rows)
        prepared = bounded.prepare(photo)
        assert 0.6 * rows < prepared.rows <= min(rows, most)
        assert prepared.grid[1] / prepared.grid[0] == pytest.approx(4 / 3, rel=0.06)
        assert bounded.prepare(small).pieces == encoder.prepare(small).pieces
    assert encoder.prepare(photo).rows > 1800


def test_aspect() -> None:
    encoder = read_encoder({"model_type": "qwen2_vl", "vision_config": {}, "hidden_size": 3584}, {})
    with pytest.raises(OptionError, match=r"2010 x 10 pixels: .* more than 200 times as long"):
        encoder.prepare(Picture(np.zeros((10, 2010, 3), np.uint8)))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen2_5_vl", {"depth": 0}, "depth must be an integer from 1"),
        ("qwen2_5_vl", {"num_heads": 5}, "a multiple of 4 times its heads"),
        ("qwen2_5_vl", {"hidden_act": "relu"}, "'relu' is not supported"),
        ("qwen2_5_vl", {"out_hidden_size": 8}, "have 8 columns, the decoder's 3584"),
        ("qwen2_5_vl", {"in_channels": 4}, "the vision tower has 4"),
        ("qwen2_5_vl", {"fullatt_block_indexes": 7}, "must be a list of integers"),
        ("qwen2_5_vl", {"patch_size": 9000}, "a picture of 18000 x 18000 pixels and more"),
        ("qwen2_5_vl", {"temporal_patch_size": 99}, "temporal_patch_size must be at most 16"),
        ("qwen2_5_vl", {"rope_parameters": 3}, "the vision config makes no sense"),
        ("glm_ocr", {"attention_bias": False}, "attention_bias of the vision tower must be True"),
        ("qwen3_vl", {"num_position_embeddings": 5}, "must be a square, is 5"),
        ("qwen3_vl", {"deepstack_visual_indexes": [8, 8]}, "deepstack_visual_indexes must ascend"),
        ("qwen3_vl", {"deepstack_visual_indexes": [27]}, r"ascend below depth \(27\)"),
    ],
)
def test_bad_configs(kind: str, changes: dict[str, Any], message: str) -> None:
    config = {"model_type": kind, "vision_config": changes, "text_config": {"hidden_size": 3584}}
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        read_encoder(config, {})
    assert "\n" not in str(raised.value)
