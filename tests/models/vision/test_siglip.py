"""SigLIP in Gemma 3, Idefics3, SmolVLM and LFM2-VL, and InternVL's encoder, against transformers:
pixels, pieces, rows.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from localrt.common.errors import MemoryBudgetError, OptionError, UnsupportedModelError
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision.encoder_cache import UnitReader
from localrt.models.vision.picture import Picture
from localrt.models.vision.pixels import cut
from localrt.models.vision.registry import read_encoder
from localrt.quant.ops.vision import VisionSteps
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import random_model, relative_error
from tests.models.tiny_configs import with_text
from tests.models.vision.oracles import check_logits, expanded, look, picture, renamed, settings

PATCH = 4
IMAGE = 2  # a token that ``tokens`` does not give
STEP = 2.01 / 255  # of a byte, once pixels are normalized
_VISION: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_attention_heads": 3,
    "num_hidden_layers": 2,
    "patch_size": PATCH,
}
_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
SHAPES = [(32, 32), (61, 17), (9, 33), (250, 131), (40, 300), (5, 17), (129, 130)]


def _without(processor: type) -> Any:
    """A processor that is not made: there is no tokenizer."""
    return object.__new__(processor)


@dataclass
class Theirs:
    """What transformers prepares of a picture: pixels, cut and flat, and text."""

    inputs: dict[str, Any]
    patches: np.ndarray
    text: str


class Family(ABC):
    """A tiny model of a family, in a folder, and transformers' processor of it, of whose results
    the model takes those in ``taken``.
    """

    taken: tuple[str, ...]

    def __init__(self, folder: Path, config: Any, processor: Any) -> None:
        self.folder, self.config, self.processor = folder, config, processor
        self.model = random_model(config)
        self.model.save_pretrained(folder)
        processor.save_pretrained(folder)

    def inputs(self, *pictures: Picture) -> dict[str, Any]:
        """What the model takes of a prompt's pictures."""
        found = self.processor([[each.image() for each in pictures]], return_tensors="pt")
        return {name: found[name] for name in self.taken}

    @abstractmethod
    def prepared(self, picture: Picture) -> Theirs:
        """What is prepared of one picture."""

    def rows(self, theirs: Theirs) -> np.ndarray:
        """The decoder's rows."""
        with torch.no_grad():
            found = self.model.get_image_features(**theirs.inputs).pooler_output
        return np.concatenate([each.numpy() for each in found])


class Gemma3(Family):
    taken = ("pixel_values",)

    def __init__(self, folder: Path, **processor: Any) -> None:
        # two pixels more than whole patches, which the encoder leaves out
        vision = {**_VISION, "model_type": "siglip_vision_model", "image_size": 34}
        text = {**_TEXT, "head_dim": 16, "sliding_window": 8}
        config = with_text(hf.Gemma3Config, text, **vision)
        config.mm_tokens_per_image = 16
        config.image_token_index = IMAGE
        own = Gemma3ImageProcessorPil(size={"height": 34, "width": 34}, **processor)
        super().__init__(folder, config, own)

    def prepared(self, picture: Picture) -> Theirs:
        found = self.processor([picture.image()], return_tensors="pt")
        own = _without(Gemma3Processor)
        row, start, end = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
        own.full_image_sequence = f"\n\n{start}{row * 16}{end}\n\n"
        text = own.replace_image_token(found, 0).replace(row, "<image>")
        return Theirs(self.inputs(picture), _cut(found["pixel_values"]), text)


class Idefics3(Family):
    taken = ("pixel_values", "pixel_attention_mask")

    def __init__(self, folder: Path, **processor: Any) -> None:
        config = with_text(
            hf.Idefics3Config, {**_TEXT, "model_type": "llama"}, **_VISION, image_size=24
        )
        config.image_token_id = IMAGE
        own = Idefics3ImageProcessorPil(
            size={"longest_edge": 96}, max_image_size={"longest_edge": 24}, **processor
        )
        super().__init__(folder, config, own)

    def prepared(self, picture: Picture) -> Theirs:
        found = self.processor([picture.image()], return_tensors="pt", return_row_col_info=True)
        own = _without(Idefics3Processor)
        own.fake_image_token, own.global_image_tag = "<fake_token_around_image>", "<global-img>"
        own.image_token, own.image_seq_len = "<image>", self.seq_len
        text = own.replace_image_token(found, 0)
        return Theirs(self.inputs(picture), _cut(found["pixel_values"][0]), text)

    @property
    def seq_len(self) -> int:
        return (24 // 4) ** 2 // self.config.scale_factor**2


class SmolVlm(Idefics3):
    """A tile has more patches than positions, and some pixels too many."""

    def __init__(self, folder: Path, **processor: Any) -> None:
        config = with_text(
            hf.SmolVLMConfig, {**_TEXT, "model_type": "llama"}, **_VISION, image_size=24
        )
        config.scale_factor = 3
        config.image_token_id = IMAGE
        own = SmolVLMImageProcessorPil(
            size={"longest_edge": 152}, max_image_size={"longest_edge": 38}, **processor
        )
        Family.__init__(self, folder, config, own)

    @property
    def seq_len(self) -> int:
        return 9


class Lfm2Vl(Family):
    taken = ("pixel_values", "spatial_shapes", "pixel_attention_mask")

    def __init__(self, folder: Path, **processor: Any) -> None:
        vision = {**_VISION, "model_type": "siglip2_vision_model", "num_patches": 25}
        text = {**_TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
        config = with_text(hf.Lfm2VlConfig, text, **vision)
        config.projector_hidden_size = 40
        config.image_token_id = IMAGE
        config.projector_use_layernorm = processor.pop("projector_use_layernorm", True)
        sizes = {"min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 6, "tile_size": 24}
        own = lfm2_vl_processor()(encoder_patch_size=4, **{**sizes, **processor})
        super().__init__(folder, config, own)

    def prepared(self, picture: Picture) -> Theirs:
        found = self.processor([picture.image()], return_tensors="pt", return_row_col_info=True)
        own = _without(Lfm2VlProcessor)
        own.image_processor, own.image_token = self.processor, "<image>"
        own.image_start_token, own.image_end_token = "<|image_start|>", "<|image_end|>"
        own.image_thumbnail_token = "<|img_thumbnail|>"
        text = own.replace_image_token(found, 0, use_image_special_tokens=True)
        patches = found["pixel_values"][found["pixel_attention_mask"].bool()]
        return Theirs(self.inputs(picture), patches.numpy(), text)


class InternVl(Family):
    """Its processor makes tiles, whatever the image processor's settings say."""

    taken = ("pixel_values",)

    def __init__(
        self, folder: Path, text: str = "qwen2", image_size: int = 24, **processor: Any
    ) -> None:
        vision = {**_VISION, "attention_bias": True, "image_size": image_size}
        config = with_text(hf.InternVLConfig, {**_TEXT, "model_type": text}, **vision)
        config.image_token_id = IMAGE
        own = GotOcr2ImageProcessorPil(size={"height": 24, "width": 24}, **processor)
        super().__init__(folder, config, own)

    def _processed(self, *pictures: Picture) -> Any:
        images = [each.image() for each in pictures]
        return self.processor(images, return_tensors="pt", **InternVLProcessor.images_kwargs)

    def inputs(self, *pictures: Picture) -> dict[str, Any]:
        return {"pixel_values": self._processed(*pictures)["pixel_values"]}

    def prepared(self, picture: Picture) -> Theirs:
        found, own = self._processed(picture), _without(InternVLProcessor)
        own.start_image_token, own.end_image_token = "<img>", "</img>"
        own.image_token, own.image_seq_length = "<IMG_CONTEXT>", 9
        text = own.replace_image_token(found, 0).replace("<IMG_CONTEXT>", "<image>")
        return Theirs(self.inputs(picture), _cut(found["pixel_values"]), text)


@cache
def lfm2_vl_processor() -> Any:
    """LFM2-VL's image processor, which lets torchvision resize and normalize: here torch does."""
    names = ["torchvision"]
    for part in ("transforms", "v2", "functional"):
        names.append(f"{names[-1]}.{part}")
    sys.modules.update({name: ModuleType(name) for name in names})
    vars(sys.modules[names[-2]])["functional"] = None
    try:
        module = import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    finally:
        for name in names:
            del sys.modules[name]

    class Backend(module.TorchvisionBackend):  # type: ignore[name-defined,misc]
        def resize(self, image: Any, size: Any, **_of_filters: Any) -> Any:
            made = torch.nn.functional.interpolate(
                image.float(), (size.height, size.width), mode="bilinear", antialias=True
            )
            return made.round().clamp(0, 255).to(torch.uint8)

        def rescale_and_normalize(self, images: Any, *values: Any) -> Any:
            factor, mean, std = values[1], *map(torch.tensor, values[3:])
            return (images * factor - mean[:, None, None]) / std[:, None, None]

    class Processor(module.Lfm2VlImageProcessor, Backend):  # type: ignore[name-defined,misc]
        pass

    return Processor


def _cut(pixels: torch.Tensor) -> np.ndarray:
    """Patches of tiles (T, 3, height, width)."""
    tiles = pixels.numpy().transpose(0, 2, 3, 1)
    used = tiles.shape[1] // PATCH * PATCH
    return np.concatenate([cut(tile[:used, :used], PATCH) for tile in tiles])


FAMILIES = {
    "gemma3": Gemma3,
    "idefics3": Idefics3,
    "idefics3-whole": partial(Idefics3, do_image_splitting=False),
    "smolvlm": SmolVlm,
    "lfm2-vl": Lfm2Vl,
    "lfm2-vl-tiles": partial(Lfm2Vl, use_thumbnail=False, projector_use_layernorm=False),
    "internvl": InternVl,
    "internvl-few": partial(InternVl, text="qwen3", min_patches=2, max_patches=6, resample=2),
    "internvl-positions": partial(
        InternVl, text="llama", image_size=36, image_mean=[0.4, 0.5, 0.6]
    ),
    "lfm2-vl-whole": partial(Lfm2Vl, do_image_splitting=False, image_mean=[0.4, 0.5, 0.6]),
}


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


INTERN = ("internvl", "internvl-few", "internvl-positions")


class Ids(dict[str, int]):
    """An id for any text of a picture's pieces."""

    def __missing__(self, text: str) -> int:
        return 3 + len(text) % 200


PICTURES = picture(32, 24), picture(48, 72, seed=1)  # which LFM2-VL need not resize


@pytest.mark.usefixtures("given_rates")
@pytest.mark.parametrize("rows", [512, 7])
@pytest.mark.parametrize("name", ["gemma3", "idefics3", "smolvlm", "lfm2-vl-tiles", *INTERN])
def test_logits(name: str, rows: int, tmp_path: Path) -> None:
    family = FAMILIES[name](tmp_path)

    def inputs(ids: torch.Tensor, *pictures: Picture) -> dict[str, Any]:
        own = {"token_type_ids": (ids == IMAGE).long()} if name == "gemma3" else {}
        return own | (family.inputs(*pictures) if pictures else {})

    check_logits(tmp_path, family.model, PICTURES, inputs, IMAGE, Ids(), rows=rows)


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


@pytest.mark.parametrize("name", ["idefics3", "smolvlm", "lfm2-vl", "lfm2-vl-tiles", *INTERN])
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
        units = UnitReader(source, steps, lambda nbytes, on_gpu: taken.append(nbytes))
        for prepared in (whole, tiled):
            with units.reserve(prepared):
                assert taken[-1] > prepared.patches.nbytes
    assert sum(taken) == 0
    tiles = len(tiled.patches) // len(whole.patches)
    assert taken[0] < taken[2] < tiles * taken[0]

    def take(nbytes: int, on_gpu: bool) -> None:
        raise MemoryBudgetError("full")

    with closing(VisionFolder(tmp_path)) as source:
        units = UnitReader(source, steps, take)
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
    whole = {"model_type": "lfm2_vl", "vision_config": {}}
    with pytest.raises(UnsupportedModelError, match="text_config"):
        read_encoder(whole, {})
