"""Pictures against transformers: pixels, pieces, rows, logits and answers, but for Qwen's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import OptionError, UnsupportedModelError
from localrt.models.vision.registry import has_encoder, read_encoder
from tests.models.test_model import some
from tests.models.tiny import relative_error
from tests.models.tiny_configs import hf
from tests.models.vision import families
from tests.models.vision.families import FAMILIES, IMAGE
from tests.models.vision.oracles import check_logits, expanded, look, picture, renamed


@some(FAMILIES, ("gemma4", "idefics3", "internvl", "lfm2-vl-tiles", "mistral3", "minicpm-v"))
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


class Ids(dict[str, int]):
    """An id for any text of a picture's pieces."""

    def __missing__(self, text: str) -> int:
        return 3 + len(text) % 200


WHOLE = ("gemma3", "gemma4-moe-both-ways")  # of each kind of attention
CUT = ("gemma4-both-ways", "lfm2-vl-tiles", "minicpm-v")
# Pillow and torch round some bytes of LFM2-VL's thumbnails differently.
NOT_RESIZED = [name for name in FAMILIES if name != "lfm2-vl"]


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, 512) for name in WHOLE),
        *(pytest.param(n, 7, marks=() if n in CUT else pytest.mark.slow) for n in NOT_RESIZED),
    ],
)
def test_logits(name: str, rows: int, tmp_path: Path) -> None:
    tiny = FAMILIES[name](tmp_path)
    check_logits(
        tmp_path, tiny.model, tiny.pictures, tiny.given, IMAGE, Ids(), row=tiny.row, rows=rows
    )


@some(("gemma3", "smolvlm", "lfm2-vl", "internvl", "llava", "mistral3"), ("gemma3", "llava"))
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


@pytest.mark.parametrize(("name", "size"), [("lfm2-vl", (2000, 2)), ("llava", (1, 100))])
def test_too_narrow(name: str, size: tuple[int, int], tmp_path: Path) -> None:
    FAMILIES[name](tmp_path)
    with pytest.raises(OptionError, match=f"{size[0]} x {size[1]} pixels is too narrow"):
        look(tmp_path).encoder.prepare(picture(*size))


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


BASES = {"llava": families.llava, "gemma4": lambda: families.gemma4(position_embedding_size=1024)}
"""Whose keys have no defaults here; of others the decoder's width alone is given."""


@pytest.mark.parametrize(
    ("kind", "vision", "processor", "message"),
    [
        ("gemma3", {}, {}, "14 patches a side are no multiple of 16 rows a side"),
        ("gemma3", {"patch_size": 14, "num_channels": 1}, {}, "num_channels must be 3"),
        ("idefics3", {}, {}, "7 patches a side are no multiple of scale_factor 2"),
        ("minicpmv4_6", {"window_kernel_size": [4, 4]}, {}, r"size must be .2, 2., is .4, 4."),
        (
            "llava",
            {"config": {"vision_feature_layer": -2}},
            {},
            "vision_feature_layer must be -1, is -2",
        ),
        ("llava", {"hidden_act": "relu"}, {}, "hidden_act 'relu' is not supported"),
        ("llava", {"patch_size": 1 << 20}, {}, "pixels: the most is 64000000"),
        (
            "gemma4",
            {"position_embedding_size": 100},
            {},
            "at least 840 for 280 rows of a picture, is 100",
        ),
        ("qwen2_5_vl", {"out_hidden_size": 8}, {}, "have 8 columns, the decoder's 3584"),
        (
            "glm_ocr",
            {"attention_bias": False},
            {},
            "attention_bias of the vision tower must be True",
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
    more = vision.get("config", {})
    own = {key: value for key, value in vision.items() if key != "config"}
    config["vision_config"] = {**config.get("vision_config", {}), **own}
    with pytest.raises(UnsupportedModelError, match=message) as raised:
        read_encoder({**config, **more}, processor)
    assert "\n" not in str(raised.value)


def test_other_encoders_of_llava_are_not_known() -> None:
    config = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    assert not has_encoder(config)
    with pytest.raises(UnsupportedModelError, match="'llava'"):
        read_encoder(config, {})
