"""SigLIP in Gemma 3, Idefics3, SmolVLM, LFM2-VL and MiniCPM-V, and InternVL's encoder, against
transformers: pixels, pieces, rows.
"""

from __future__ import annotations

import itertools
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Lfm2VlConfig

from localrt.common.errors import MemoryBudgetError, OptionError, UnsupportedModelError
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision import cost
from localrt.models.vision.encoder_cache import EncoderUnitReader
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_encoder
from localrt.quant.choose import vision_steps
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.vision import Heads, PatchLayout, VisionSteps
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import relative_error
from tests.models.vision.oracles import check_logits, expanded, look, picture, renamed, settings
from tests.models.vision.siglip_families import (
    FAMILIES,
    IMAGE,
    SHAPES,
    STEP,
    Lfm2Vl,
    SmolVlm,
)
from tests.ops.cuda.target import DEVICE


@pytest.mark.parametrize("name", FAMILIES)
def test_rows(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name](tmp_path)
    pictures = [picture(*shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    opened = look(tmp_path, *pictures)
    for own, prepared, seen in zip(pictures, opened.prepared, opened.seen, strict=True):
        theirs = family.prepared(own)
        assert expanded(prepared, "<image>") == theirs.text
        assert prepared.patches[:].shape == theirs.patches.shape
        assert np.abs(prepared.patches[:] - theirs.patches).max() < STEP
        if "lfm2" in name:  # Pillow and torch round some bytes differently
            (seen,) = look(tmp_path, replace(prepared, patches=theirs.patches)).seen
        rows = family.rows(theirs)
        assert seen.rows.shape == rows.shape == (prepared.rows, 64)
        assert relative_error(seen.rows, rows) < 1e-4


class Counting(VisionSteps):
    """Counts multiplications, and leaves out attention."""

    products = 0.0

    def linear(self, x: Any, *weights: Any, **how: Any) -> Any:
        out = super().linear(x, *weights, **how)
        self.products += x.size * out.shape[-1]
        return out

    def heads(self, qkv: Any, heads: Heads, layout: PatchLayout) -> Any:
        columns = heads.count * heads.size
        for first, end in itertools.pairwise((0, *layout.ends)):
            self.products += 2 * columns * (end - first) ** 2
        return np.zeros((len(qkv), columns), np.float32)


@pytest.mark.parametrize("name", FAMILIES)
def test_products_of_a_picture(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans count them from shapes. MiniCPM's merger, one of so few blocks, is counted too low."""
    FAMILIES[name](tmp_path)
    monkeypatch.setattr(cost, "SIDE", 224)
    with closing(VisionFolder(tmp_path)) as source:
        encoder = read_encoder(source.config, source.processor)
        steps = Counting(TorchOps(compute_format="f32", device="cpu"))
        prepared = encoder.prepare(picture(224, 224))
        encoder.encode(prepared, EncoderUnitReader(source, steps), steps)
    found = cost.picture_cost(tmp_path)
    assert found is not None
    error = 0.4 if "minicpm" in name else 0.15
    assert found.products == pytest.approx(steps.products, rel=error)


INTERN = ("internvl", "internvl-few", "internvl-positions")
MINICPM = ("minicpm-v", "minicpm-v-many", "minicpm-v-whole", "minicpm-v-4x")


class Ids(dict[str, int]):
    """An id for any text of a picture's pieces."""

    def __missing__(self, text: str) -> int:
        return 3 + len(text) % 200


PICTURES = picture(32, 24), picture(48, 72, seed=1)  # which LFM2-VL need not resize


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize("rows", [512, 7])
@pytest.mark.parametrize(
    "name", ["gemma3", "idefics3", "smolvlm", "lfm2-vl-tiles", *INTERN, "minicpm-v"]
)
def test_logits(name: str, rows: int, tmp_path: Path) -> None:
    family = FAMILIES[name](tmp_path)

    def inputs(ids: torch.Tensor, *pictures: Picture) -> dict[str, Any]:
        own = {"token_type_ids": (ids == IMAGE).long()} if name == "gemma3" else {}
        return own | (family.inputs(*pictures) if pictures else {})

    check_logits(tmp_path, family.model, PICTURES, inputs, IMAGE, Ids(), rows=rows)


def test_rows_on_a_gpu(tmp_path: Path) -> None:
    """MiniCPM-V's; ``test_mmproj.py`` has those of others."""
    FAMILIES["minicpm-v"](tmp_path)
    own = picture(60, 50)
    (wanted,) = look(tmp_path, own).seen
    with closing(VisionFolder(tmp_path)) as source:
        encoder = read_encoder(source.config, source.processor)
        steps = vision_steps(CudaOps(device=str(DEVICE)))
        found = encoder.encode(encoder.prepare(own), EncoderUnitReader(source, steps), steps)
    assert 0 < relative_error(found.rows, wanted.rows) < 0.03


@pytest.mark.parametrize("name", ["gemma3", "smolvlm", "lfm2-vl", "internvl"])
def test_names_of_the_hub(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name](tmp_path)

    def published(tensor: str) -> str:
        if name != "internvl":
            tensor = tensor.replace("vision_tower.", "vision_tower.vision_model.")
        return tensor.removeprefix("model.") if name in ("gemma3", "internvl") else tensor

    own = picture(70, 31)
    (before,) = look(tmp_path, own).seen
    (ours,) = look(renamed(tmp_path, published), own).seen
    np.testing.assert_array_equal(ours.rows, before.rows)
    assert len(ours.rows) == len(family.rows(family.prepared(own)))


@pytest.mark.parametrize(
    "name", ["idefics3", "smolvlm", "lfm2-vl", "lfm2-vl-tiles", *INTERN, *MINICPM]
)
def test_pieces_of_many_shapes(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name](tmp_path)
    random = np.random.default_rng(0)
    shapes = [(int(w), int(h)) for w, h in np.exp(random.uniform(1.6, 5, (60, 2)))]
    shapes += [
        (48, 48),
        (72, 48),
        (36, 60),
        (60, 120),
    ]  # as near to one grid of tiles as to another
    shown = [Picture(np.zeros((h, w, 3), np.uint8)) for w, h in shapes if 1 / 20 < w / h < 20]
    (encoder,) = {look(tmp_path).encoder}
    for each in shown:
        theirs = family.prepared(each)
        ours = encoder.prepare(each)
        assert expanded(ours, "<image>") == theirs.text
        assert ours.patches[:].shape == theirs.patches.shape


def test_special_tokens_are_left_out(tmp_path: Path) -> None:
    Lfm2Vl(tmp_path)
    settings(tmp_path, "processor_config.json", use_image_special_tokens=False)
    (prepared,) = look(tmp_path, picture(150, 90)).prepared
    assert len(prepared.pieces) > 2
    assert {type(piece) for piece in prepared.pieces} == {int}


def test_publishers_defaults(tmp_path: Path) -> None:
    """Without a processor's settings, sizes are those of the encoder."""
    text = {"hidden_size": 8}
    small: dict[str, Any] = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}

    def pieces(kind: str, **vision: Any) -> tuple[str | int, ...]:
        config = {"model_type": kind, "text_config": text, "vision_config": {**small, **vision}}
        return read_encoder(config, {}).prepare(picture(90, 60)).pieces

    assert pieces("gemma3", image_size=896, patch_size=14)[1] == 256
    found = pieces("smolvlm", image_size=384, patch_size=16)  # 4 x 3 tiles and the whole
    assert [p for p in found if isinstance(p, int)] == [144] * 13
    found = pieces("minicpmv4_6", num_hidden_layers=7)
    assert found == ("<image>", 54, "</image>")  # enlarged to 576 x 384 pixels
    assert pieces("internvl") == ("<img>", 7 * 256, "</img>")  # 3 x 2 tiles and the whole
    assert pieces("lfm2_vl") == ("<|image_start|>", 70, "<|image_end|>")


def test_room_for_a_picture(tmp_path: Path) -> None:
    """It is asked for beforehand and given back; tiles pass one after another."""
    SmolVlm(tmp_path)
    taken: list[int] = []
    encoder: Any = look(tmp_path).encoder
    whole = replace(encoder, split=False).prepare(picture(30, 30))
    tiled = encoder.prepare(picture(250, 131))
    steps = VisionSteps(TorchOps(compute_format="f32", device="cpu"))
    with closing(VisionFolder(tmp_path)) as source:
        units = EncoderUnitReader(source, steps, lambda nbytes, on_gpu: taken.append(nbytes))
        for prepared in (whole, tiled):
            with units.reserve(prepared):
                assert taken[-1] > prepared.patches.nbytes
    assert sum(taken) == 0
    tiles = len(tiled.patches) // len(whole.patches)
    assert taken[0] < taken[2] < tiles * taken[0]

    def take(nbytes: int, on_gpu: bool) -> None:
        raise MemoryBudgetError("full")

    with closing(VisionFolder(tmp_path)) as source:
        units = EncoderUnitReader(source, steps, take)
        with pytest.raises(MemoryBudgetError, match="beside the model"), units.reserve(whole):
            raise AssertionError("there is no room")


def test_no_tiles_of_crops() -> None:
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 8}, "vision_config": {}}
    config["mm_tokens_per_image"] = 49
    assert read_encoder(config, {"do_pan_and_scan": None}).note == ""
    assert "pan and scan" in read_encoder(config, {"do_pan_and_scan": True}).note


def test_too_narrow(tmp_path: Path) -> None:
    Lfm2Vl(tmp_path)
    encoder = look(tmp_path).encoder
    with pytest.raises(OptionError, match="2000 x 2 pixels is too narrow for the model"):
        encoder.prepare(picture(2000, 2))


@pytest.mark.parametrize(
    ("kind", "config", "processor", "message"),
    [
        ("gemma3", {}, {}, "14 patches a side are no multiple of 16 rows a side"),
        ("gemma3", {"image_size": 1 << 13}, {}, "image_size must be at most 4096"),
        ("gemma3", {"image_size": 1}, {}, "image_size is smaller than patch_size"),
        ("gemma3", {"image_size": [224, 224]}, {}, "image_size must be an integer"),
        ("gemma3", {"patch_size": 14, "num_channels": 1}, {}, "num_channels must be 3"),
        ("gemma3", {"patch_size": 14, "hidden_act": "tanh"}, {}, "hidden_act 'tanh' is not supp"),
        ("gemma3", {"patch_size": 14, "num_attention_heads": 7}, {}, "not a multiple of 7 heads"),
        ("gemma3", {"patch_size": 14}, {"resample": 9}, "resample must be a number from 1 to 5"),
        ("idefics3", {}, {}, "7 patches a side are no multiple of scale_factor 2"),
        ("idefics3", {"patch_size": 28}, {"size": {"height": 9}}, "longest_edge must be an integ"),
        ("smolvlm", {"patch_size": 28}, {"size": 9}, "makes no sense"),
        ("smolvlm", {}, {"max_image_size": {"longest_edge": 16}}, "0 patches a side"),
        ("internvl", {"use_qk_norm": True}, {}, "use_qk_norm must be False, is True"),
        ("internvl", {"norm_type": "rms_norm"}, {}, "norm_type must be 'layer_norm', is 'rms_"),
        ("internvl", {"image_size": [448, 224]}, {}, "image_size must be an integer"),
        ("internvl", {"patch_size": [28, 28]}, {"size": {"height": 84}}, "a multiple of 2 patches"),
        ("internvl", {}, {"size": {"height": 448, "width": 224}}, "size must be a square"),
        ("internvl", {}, {"min_patches": 13}, "min_patches 13 and max_patches 12 make no sense"),
        ("internvl", {}, {"max_patches": 400}, "min_patches 1 and max_patches 400 make no sense"),
        ("minicpmv4_6", {"window_kernel_size": [4, 4]}, {}, r"size must be .2, 2., is .4, 4."),
        ("minicpmv4_6", {}, {"downsample_mode": "4x"}, "downsample_mode must be 16x, is '4x'"),
        ("minicpmv4_6", {"downsample_mode": "8x"}, {}, "downsample_mode must be 16x, is '8x'"),
        ("minicpmv4_6", {}, {"patch_size": 14}, "patch_size must be 16, is 14"),
        ("minicpmv4_6", {"num_hidden_layers": 6}, {}, "insert_layer_id must be one of 6 blocks"),
        ("lfm2_vl", {"num_patches": 200}, {}, "num_patches must be a square, is 200"),
        ("lfm2_vl", {}, {"encoder_patch_size": 14}, "encoder_patch_size must be 16, is 14"),
        ("lfm2_vl", {}, {"downsample_factor": 4}, "downsample_factor must be 2, is 4"),
        ("lfm2_vl", {}, {"tile_size": 100}, "tile_size must be a multiple of 32, is 100"),
        ("lfm2_vl", {}, {"min_tiles": 20}, r"min_tiles must be at most max_tiles \(10\), is 20"),
        ("lfm2_vl", {}, {"max_tiles": 9999}, "max_tiles and max_image_tokens exceed 64000000 pix"),
        ("lfm2_vl", {"layer_norm_eps": "1"}, {}, "layer_norm_eps must be a positive number"),
    ],
)
def test_bad_configs(
    kind: str, config: dict[str, Any], processor: dict[str, Any], message: str
) -> None:
    whole = {"model_type": kind, "vision_config": config, "text_config": {"hidden_size": 8}}
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        read_encoder(whole, processor)
    assert "\n" not in str(raised.value)


def test_text_config_is_missing() -> None:
    """As in transformers, the text model is then what its class takes."""
    found: Any = read_encoder({"model_type": "lfm2_vl", "vision_config": {}}, {})
    assert found.projector.out == Lfm2VlConfig().text_config.hidden_size
