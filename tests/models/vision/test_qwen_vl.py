"""Qwen's towers, pictures and positions against transformers' own."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from localrt.common.errors import OptionError, UnsupportedModelError
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_tower
from localrt.models.vision.sight import LoadedUnits
from localrt.models.vision.tower import Seen, Tower
from localrt.quant.ops.vision import VisionSteps
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import relative_error

TEXT = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CHUNKED = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 3]}
MIXED = {**CHUNKED, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
IDS = {"image_token_id": 110, "video_token_id": 111, "vision_start_token_id": 112}
VISION = {"depth": 3, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 48}
LEARNED = {**VISION, "intermediate_size": 56, "num_position_embeddings": 49, "patch_size": 4}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}
TINY: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: hf.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": CHUNKED},
        vision_config={
            "depth": 3,
            "embed_dim": 32,
            "hidden_size": 48,
            "mlp_ratio": 2,
            "num_heads": 2,
            "patch_size": 4,
        },
        **IDS,
    ),
    "qwen2_5_vl": lambda: hf.Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": CHUNKED},
        vision_config={
            **VISION,
            "intermediate_size": 56,
            "patch_size": 4,
            "window_size": 24,
            "fullatt_block_indexes": [1],
        },
        **IDS,
    ),
    "qwen3_vl": lambda: hf.Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 16, "rope_parameters": MIXED},
        vision_config={**LEARNED, "deepstack_visual_indexes": [0, 2]},
        **IDS,
    ),
    "qwen3_vl_moe": lambda: hf.Qwen3VLMoeConfig(
        text_config={**TEXT, **EXPERTS, "head_dim": 16, "rope_parameters": MIXED},
        vision_config={**LEARNED, "deepstack_visual_indexes": [1]},
        **IDS,
    ),
    "qwen3_5": lambda: hf.Qwen3_5Config(
        text_config={
            **TEXT,
            **DELTA,
            "head_dim": 32,
            "rope_parameters": {**MIXED, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
        },
        vision_config=LEARNED,
        **IDS,
    ),
}
SIZES = [(40, 40), (13, 90), (131, 37), (8, 8), (23, 301)]
PIXELS = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}


def save_tiny_vl(kind: str, folder: Path, seed: int = 0) -> Any:
    """Write a random model as a folder; returns transformers' own."""
    torch.manual_seed(seed)
    config = TINY[kind]()
    config._attn_implementation = "eager"
    model = hf.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
            if parameter.ndim == 1:
                parameter.add_(0.5)
    model = model.float().eval()
    model.save_pretrained(folder)
    settings = {"patch_size": 4, "size": PIXELS, "image_mean": [0.4, 0.5, 0.6]}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return model


def processor_of(folder: Path) -> Any:
    """Transformers' image processor of a folder of ``save_tiny_vl``."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    if "qwen3" in json.loads((folder / "config.json").read_text())["model_type"]:
        settings.setdefault("image_std", [0.5, 0.5, 0.5])
    return Qwen2VLImageProcessorPil(**settings)


def picture(width: int, height: int, seed: int = 0) -> Picture:
    """Smooth colours with some noise."""
    random = np.random.default_rng(seed)
    x, y = np.meshgrid(np.linspace(0, 4, width), np.linspace(0, 3, height))
    waves = np.stack([np.sin(x + y), np.cos(x * y), np.sin(3 * x - y)], -1)
    noise = random.normal(0, 0.2, waves.shape)
    return Picture(((waves + noise) * 60 + 128).clip(0, 255).astype(np.uint8))


def see(tower: Tower, source: VisionFolder, *pictures: Picture) -> list[Seen]:
    """What the tower makes of pictures, in float32."""
    ops = TorchOps(compute_format="f32", device="cpu")
    units, steps = LoadedUnits(source, ops, None), VisionSteps(ops)
    return [tower.see(tower.prepare(each), units, steps) for each in pictures]


@pytest.fixture(scope="module")
def tiny_vl(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Any]]:
    made: dict[str, tuple[Path, Any]] = {}

    def make(kind: str) -> tuple[Path, Any]:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            made[kind] = folder, save_tiny_vl(kind, folder)
        return made[kind]

    return make


@pytest.mark.parametrize("kind", TINY)
def test_rows(kind: str, tiny_vl: Callable[[str], tuple[Path, Any]]) -> None:
    folder, model = tiny_vl(kind)
    processor = processor_of(folder)
    pictures = [picture(*size, seed=seed) for seed, size in enumerate(SIZES)]
    with closing(VisionFolder(folder)) as source:
        tower = read_tower(source.config, source.processor)
        ours = see(tower, source, *pictures)
    for some in ([0], [1, 2], [3, 4]):
        inputs = processor([pictures[each].image() for each in some], return_tensors="pt")
        with torch.no_grad():
            theirs = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        rows = np.concatenate([ours[each].rows for each in some])
        assert relative_error(rows, torch.cat(list(theirs.pooler_output)).numpy()) < 1e-4
        deep = getattr(theirs, "deepstack_features", None) or []
        assert tower.deep_layers == len(deep)
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
        tower = read_tower(source.config, source.processor)
    prepared = tower.prepare(shown)
    wanted = processor_of(folder)(shown.image(), return_tensors="np")
    _, h, w = wanted["image_grid_thw"][0].tolist()
    assert prepared.grid == (h, w)
    assert prepared.pieces == (h * w // 4,)
    frames = wanted["pixel_values"].reshape(h * w, 3, 2, 16)
    ours = prepared.patches.reshape(h * w, 3, 16)
    for frame in (0, 1):
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
    text = {"hidden_size": 3584}
    tower = read_tower({"model_type": kind, "vision_config": {}, "text_config": text}, {})
    theirs = type(TINY[kind]())().vision_config
    ours: Any = tower.config  # type: ignore[attr-defined]
    assert ours.depth == theirs.depth
    assert (ours.patch, ours.merge) == (theirs.patch_size, theirs.spatial_merge_size)
    assert ours.deep == tuple(getattr(theirs, "deepstack_visual_indexes", ()))


def test_aspect() -> None:
    tower = read_tower({"model_type": "qwen2_vl", "vision_config": {}, "hidden_size": 3584}, {})
    with pytest.raises(OptionError, match=r"2010 x 10 pixels: .* more than 200 times as long"):
        tower.prepare(Picture(np.zeros((10, 2010, 3), np.uint8)))


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen2_5_vl", {"depth": 0}, "depth must be an integer from 1"),
        ("qwen2_5_vl", {"num_heads": 5}, "a multiple of 4 times its heads"),
        ("qwen2_5_vl", {"hidden_act": "relu"}, "'relu' is not known"),
        ("qwen2_5_vl", {"out_hidden_size": 8}, "have 8 columns, the decoder's 3584"),
        ("qwen2_5_vl", {"in_channels": 4}, "the vision tower has 4"),
        ("qwen2_5_vl", {"fullatt_block_indexes": 7}, "must be a list of integers"),
        ("qwen2_5_vl", {"patch_size": 9000}, "a picture of 18000 x 18000 pixels and more"),
        ("qwen2_5_vl", {"temporal_patch_size": 99}, "temporal_patch_size must be at most 16"),
        ("qwen2_5_vl", {"rope_parameters": 3}, "the vision config makes no sense"),
        ("qwen3_vl", {"num_position_embeddings": 5}, "must be a square, is 5"),
        ("qwen3_vl", {"deepstack_visual_indexes": [8, 8]}, "deepstack_visual_indexes must ascend"),
        ("qwen3_vl", {"deepstack_visual_indexes": [27]}, r"ascend below depth \(27\)"),
    ],
)
def test_bad_configs(kind: str, changes: dict[str, Any], message: str) -> None:
    config = {"model_type": kind, "vision_config": changes, "text_config": {"hidden_size": 3584}}
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        read_tower(config, {})
    assert "\n" not in str(raised.value)
