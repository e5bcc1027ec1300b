"""Pictures against transformers: pixels, pieces, rows and logits of every family but Qwen's."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers as hf

from localrt.common.errors import OptionError, UnsupportedModelError
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision import cost
from localrt.models.vision.encoder_cache import EncoderUnitReader
from localrt.models.vision.registry import has_encoder, read_encoder
from localrt.quant.choose import vision_steps
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.vision import Heads, PatchLayout, VisionSteps
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import relative_error
from tests.models.vision import families
from tests.models.vision.families import BOTH_WAYS, FAMILIES, IMAGE
from tests.models.vision.oracles import check_logits, expanded, look, picture, renamed
from tests.ops.cuda.target import DEVICE

MINICPM = ("minicpm-v", "minicpm-v-whole", "minicpm-v-4x")
SIGLIP = tuple(
    name
    for name in FAMILIES
    if name.startswith(("gemma3", "idefics3", "smolvlm", "lfm2", "intern"))
)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name](tmp_path)
    pictures = [picture(*shape, seed=seed) for seed, shape in enumerate(family.shapes)]
    opened = look(tmp_path, *pictures)
    assert opened.encoder.placeholder == family.placeholder
    for own, prepared, seen in zip(pictures, opened.prepared, opened.seen, strict=True):
        theirs = family.prepared(own)
        assert expanded(prepared, "<image>") == theirs.text
        assert theirs.grid in (None, prepared.grid)
        assert prepared.patches[:].shape == theirs.patches.shape
        assert np.abs(prepared.patches[:] - theirs.patches).max() < family.off
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


@pytest.mark.parametrize("name", [*SIGLIP, *MINICPM])
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


class Ids(dict[str, int]):
    """An id for any text of a picture's pieces."""

    def __missing__(self, text: str) -> int:
        return 3 + len(text) % 200


CHATTING = (
    *("gemma3", "idefics3", "smolvlm", "lfm2-vl-tiles", "internvl", "internvl-positions"),
    *("minicpm-v", "llava", "mistral3", "ministral3"),
)
WHOLE = ("gemma3", "minicpm-v")  # pictures in passes of a whole prompt, of each kind of attention


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, 7) for name in CHATTING),
        *(
            pytest.param(name, 512, marks=() if name in WHOLE else pytest.mark.slow)
            for name in CHATTING
        ),
        ("gemma4-clipped", 7),
        ("gemma4-both-ways", 7),
        ("gemma4-moe-both-ways", 512),
        ("gemma4-unified", 7),
        ("gemma4-unified-causal", 7),
        ("gemma4-unified-all-keys", 512),
    ],
)
def test_logits(name: str, rows: int, tmp_path: Path) -> None:
    tiny = FAMILIES[name](tmp_path)
    check_logits(
        tmp_path, tiny.model, tiny.pictures, tiny.given, IMAGE, Ids(), row=tiny.row, rows=rows
    )


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


@pytest.mark.parametrize("name", ["gemma3", "smolvlm", "lfm2-vl", "internvl", "llava", "mistral3"])
def test_names_of_the_hub(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name](tmp_path)

    def published(tensor: str) -> str:
        if name in ("gemma3", "smolvlm", "lfm2-vl"):
            tensor = tensor.replace("vision_tower.", "vision_tower.vision_model.")
        if name in ("gemma3", "internvl", "llava", "mistral3"):
            tensor = tensor.removeprefix("model.")
        if name in ("llava", "mistral3"):
            tensor = tensor.replace("language_model.", "language_model.model.")
        return tensor

    own = picture(70, 31)
    (before,) = look(tmp_path, own).seen
    (ours,) = look(renamed(tmp_path, published), own).seen
    np.testing.assert_array_equal(ours.rows, before.rows)
    assert len(ours.rows) == len(family.rows(family.prepared(own)))


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


def test_no_tiles_of_crops() -> None:
    config = {"model_type": "gemma3", "text_config": {"hidden_size": 8}, "vision_config": {}}
    config["mm_tokens_per_image"] = 49
    assert read_encoder(config, {"do_pan_and_scan": None}).note == ""
    assert "pan and scan" in read_encoder(config, {"do_pan_and_scan": True}).note


@pytest.mark.parametrize(("name", "size"), [("lfm2-vl", (2000, 2)), ("llava", (1, 100))])
def test_too_narrow(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    FAMILIES[name](tmp_path)
    with pytest.raises(OptionError, match=f"{size[0]} x {size[1]} pixels is too narrow"):
        look(tmp_path).encoder.prepare(picture(*size))


def test_larger_models_see_pictures_both_ways() -> None:
    for own in ({}, BOTH_WAYS):
        config = json.loads(families.gemma4(own=own).to_json_string())
        encoder = read_encoder(config, {"max_soft_tokens": 70})
        assert encoder.bidirectional is bool(own)
        assert encoder.full_layers_causal
        assert encoder.row_token == "<pad>"


def test_gemma4_12b_without_keys() -> None:
    """The published defaults: rows see one another, in all layers."""
    text = {"model_type": "gemma4_unified_text", "hidden_size": 64}
    config = {"model_type": "gemma4_unified", "vision_config": {}, "text_config": text}
    encoder: Any = read_encoder(config, {})
    assert (encoder.bidirectional, encoder.full_layers_causal) == (True, False)
    theirs = hf.Gemma4UnifiedConfig(vision_config={}).vision_config
    names = ("model_patch_size", "mm_embed_dim", "mm_posemb_size", "rms_norm_eps")
    ours = (encoder.patch, encoder.hidden, encoder.positions, encoder.eps)
    assert ours == tuple(getattr(theirs, name) for name in names)


BASES = {
    "llava": families.llava,
    "gemma4": lambda: families.gemma4(position_embedding_size=1024),
    "gemma4_unified": lambda: families.gemma4_unified(mm_posemb_size=280),
}
"""Whose keys have no defaults here; of others the decoder's width alone is given."""


@pytest.mark.parametrize(
    ("kind", "vision", "processor", "message"),
    [
        ("gemma3", {}, {}, "14 patches a side are no multiple of 16 rows a side"),
        ("gemma3", {"image_size": 1 << 13}, {}, "image_size must be at most 4096"),
        ("gemma3", {"image_size": 1}, {}, "image_size is smaller than patch_size"),
        ("gemma3", {"patch_size": 14, "num_channels": 1}, {}, "num_channels must be 3"),
        ("gemma3", {"patch_size": 14, "num_attention_heads": 7}, {}, "not a multiple of 7 heads"),
        ("idefics3", {}, {}, "7 patches a side are no multiple of scale_factor 2"),
        ("smolvlm", {"patch_size": 28}, {"size": 9}, "makes no sense"),
        ("internvl", {"use_qk_norm": True}, {}, "use_qk_norm must be False, is True"),
        ("internvl", {"image_size": [448, 224]}, {}, "image_size must be an integer"),
        ("internvl", {}, {"min_patches": 13}, "min_patches 13 and max_patches 12 make no sense"),
        ("minicpmv4_6", {"window_kernel_size": [4, 4]}, {}, r"size must be .2, 2., is .4, 4."),
        ("minicpmv4_6", {"num_hidden_layers": 6}, {}, "insert_layer_id must be one of 6 blocks"),
        ("lfm2_vl", {"num_patches": 200}, {}, "num_patches must be a square, is 200"),
        ("lfm2_vl", {}, {"min_tiles": 20}, r"min_tiles must be at most max_tiles \(10\), is 20"),
        ("lfm2_vl", {}, {"max_tiles": 9999}, "max_tiles and max_image_tokens exceed 64000000 pix"),
        (
            "llava",
            {"config": {"vision_feature_layer": -2}},
            {},
            "vision_feature_layer must be -1, is -2",
        ),
        ("llava", {"config": {"text_config": 7}}, {}, "makes no sense"),
        ("llava", {"hidden_act": "relu"}, {}, "hidden_act 'relu' is not supported"),
        ("llava", {}, {"size": {"longest_edge": 9000}}, "may have 81072016 pixels"),
        ("llava", {"patch_size": 1 << 20}, {}, "pixels: the most is 64000000"),
        ("llava", {}, {"image_std": [0.5, 0, 0.5]}, "image_mean and image_std"),
        ("gemma4", {"num_key_value_heads": 1}, {}, "num_key_value_heads must be 3, is 1"),
        ("gemma4", {"head_dim": 18}, {}, "head_dim must be a multiple of 4, is 18"),
        (
            "gemma4",
            {"position_embedding_size": 100},
            {},
            "at least 840 for 280 rows of a picture, is 100",
        ),
        ("gemma4", {"pad": 3}, {}, "pad_token_id must be 0, is 3"),
        (
            "gemma4_unified",
            {"mm_posemb_size": 279},
            {},
            "mm_posemb_size must be at least max_soft_tokens, is 279",
        ),
        ("qwen2_5_vl", {"num_heads": 5}, {}, "a multiple of 4 times its heads"),
        ("qwen2_5_vl", {"out_hidden_size": 8}, {}, "have 8 columns, the decoder's 3584"),
        ("qwen2_5_vl", {"fullatt_block_indexes": 7}, {}, "must be a list of integers"),
        ("qwen2_5_vl", {"patch_size": 9000}, {}, "a picture of 18000 x 18000 pixels and more"),
        (
            "glm_ocr",
            {"attention_bias": False},
            {},
            "attention_bias of the vision tower must be True",
        ),
        ("qwen3_vl", {"num_position_embeddings": 5}, {}, "must be a square, is 5"),
        (
            "qwen3_vl",
            {"deepstack_visual_indexes": [8, 8]},
            {},
            "deepstack_visual_indexes must ascend",
        ),
    ],
)
def test_bad_configs(
    kind: str, vision: dict[str, Any], processor: dict[str, Any], message: str
) -> None:
    width = 3584 if kind.startswith(("qwen", "glm")) else 8
    config: dict[str, Any] = {"model_type": kind, "text_config": {"hidden_size": width}}
    if kind in BASES:
        config = json.loads(BASES[kind]().to_json_string())
    if "pad" in vision:
        config["text_config"]["pad_token_id"] = vision["pad"]
    more = vision.get("config", {})
    own = {key: value for key, value in vision.items() if key not in ("config", "pad")}
    config["vision_config"] = {**config.get("vision_config", {}), **own}
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        read_encoder({**config, **more}, processor)
    assert "\n" not in str(raised.value)


def test_other_encoders_of_llava_are_not_known() -> None:
    config = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    assert not has_encoder(config)
    with pytest.raises(UnsupportedModelError, match="'llava'"):
        read_encoder(config, {})


def test_text_config_is_missing() -> None:
    """As in transformers, the text model is then what its class takes."""
    found: Any = read_encoder({"model_type": "lfm2_vl", "vision_config": {}}, {})
    assert found.projector.out == hf.Lfm2VlConfig().text_config.hidden_size
