"""Tiny models around SigLIP and InternVL's encoder, and what transformers prepares for them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import transformers as hf
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
    MiniCPMV4_6ImageProcessorPil,
)
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from localrt.models.vision.picture import Picture, cut
from tests.models.tiny import random_model
from tests.models.tiny_configs import CONFIGS, with_text

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


class MiniCpm(Family):
    taken = ("pixel_values", "target_sizes")

    def __init__(self, folder: Path, layer: int = 1, **processor: Any) -> None:
        text = {**CONFIGS["qwen3.5"]().to_dict(), "hidden_size": 64, "vocab_size": 320}
        vision = {**_VISION, "num_hidden_layers": 3, "image_size": 28}
        config = with_text(hf.MiniCPMV4_6Config, text, **vision)
        config.insert_layer_id = config.vision_config.insert_layer_id = layer
        config.downsample_mode = processor.get("downsample_mode", "16x")
        config.image_token_id = IMAGE
        sizes = {"patch_size": PATCH, "scale_resolution": 48, "max_slice_nums": 7}
        super().__init__(folder, config, MiniCPMV4_6ImageProcessorPil(**{**sizes, **processor}))

    def prepared(self, picture: Picture) -> Theirs:
        found, own = self.processor([picture.image()], return_tensors="pt"), minicpm_processor()
        own.slice_mode = self.processor.slice_mode
        divisor = 4 if self.config.downsample_mode == "4x" else 16
        text = own.replace_image_token(found, 0, image_token_divisor=divisor)
        pixels = found["pixel_values"][0].numpy()
        patches = pixels.reshape(3, PATCH, -1, PATCH).transpose(2, 0, 1, 3)
        patches = patches.reshape(len(patches), -1)
        return Theirs(self.inputs(picture), patches, text.replace("<|image_pad|>", "<image>"))


def minicpm_processor() -> Any:
    """MiniCPM-V's processor without a tokenizer, and so with the names of its tokens alone."""
    own = _without(MiniCPMV4_6Processor)
    own.image_token = "<|image_pad|>"
    for name in ("image", "slice", "image_id"):
        setattr(own, f"{name}_start_token", f"<{name}>")
        setattr(own, f"{name}_end_token", f"</{name}>")
    return own


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
    "minicpm-v": MiniCpm,
    "minicpm-v-many": partial(MiniCpm, layer=0, max_slice_nums=20, image_mean=[0.4, 0.5, 0.6]),
    "minicpm-v-whole": partial(MiniCpm, layer=2, slice_mode=False),
    "minicpm-v-4x": partial(MiniCpm, downsample_mode="4x"),
    "lfm2-vl-whole": partial(Lfm2Vl, do_image_splitting=False, image_mean=[0.4, 0.5, 0.6]),
}
