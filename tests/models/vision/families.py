"""Tiny models of every family that sees, but Qwen's, and what transformers prepares for them."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from localrt.models.vision.picture import Picture, cut
from tests.models.tiny import random_model
from tests.models.tiny_configs import CONFIGS, MIXTURES, hf, with_text
from tests.models.vision.oracles import picture

PATCH = 4
IMAGE = 2  # a token that ``tokens`` does not give
BOTH_WAYS = {"use_bidirectional_attention": "vision"}
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
_PIXTRAL: dict[str, Any] = {**_VISION, "model_type": "pixtral", "image_size": 60}
_PIXTRAL |= {"hidden_act": "silu"}
_MISTRAL: dict[str, Any] = {**_TEXT, "model_type": "mistral", "sliding_window": None}
_MISTRAL |= {"vocab_size": 211, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}


@contextmanager
def _torchvision(*parts: str, **functional: Any) -> Iterator[None]:
    """An empty torchvision, for modules of transformers that ask for it and do without."""
    names = ["torchvision", *(f"torchvision.{part}" for part in parts)]
    sys.modules.update({name: ModuleType(name) for name in names})
    vars(sys.modules["torchvision.transforms.v2"]).update(functional)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _without(processor: type) -> Any:
    """A processor that is not made: there is no tokenizer."""
    return object.__new__(processor)


def _config(kind: str, text: dict[str, Any], vision: dict[str, Any], **values: Any) -> Any:
    config = with_text(getattr(hf, f"{kind}Config"), dict(text), **vision)
    for key, value in values.items():
        setattr(config, key, value)
    return config


@dataclass
class Theirs:
    """What transformers prepares of a picture: pixels, cut and flat, and text; rows and columns."""

    inputs: dict[str, Any]
    patches: np.ndarray
    text: str
    grid: tuple[int, int] | None = None


class Family(ABC):
    """A tiny model of a family, in a folder, and transformers' processor of it, of whose results
    the model takes those in ``taken``.
    """

    taken: tuple[str, ...]
    placeholder = "<image>"
    row: int | None = None  # the token that a picture's row stands as for what knows no pictures
    off = STEP
    shapes: Sequence[tuple[int, int]] = (
        *((32, 32), (61, 17), (9, 33), (250, 131), (40, 300), (5, 17), (129, 130)),
    )  # widths and heights
    pictures = picture(32, 24), picture(48, 72, seed=1)  # which LFM2-VL need not resize

    def __init__(self, folder: Path, config: Any, processor: Any) -> None:
        self.folder, self.config, self.processor = folder, config, processor
        self.model = random_model(config)
        self.model.save_pretrained(folder)
        processor.save_pretrained(folder)

    def inputs(self, *pictures: Picture) -> dict[str, Any]:
        """What the model takes of a prompt's pictures."""
        found = self.processor([[each.image() for each in pictures]], return_tensors="pt")
        return {name: found[name] for name in self.taken}

    def given(self, ids: torch.Tensor, *pictures: Picture) -> dict[str, Any]:
        """What the model takes beside a prompt's ids."""
        return self.inputs(*pictures) if pictures else {}

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
    placeholder = "<start_of_image>"

    def __init__(self, folder: Path) -> None:
        # two pixels more than whole patches, which the encoder leaves out
        vision = {**_VISION, "model_type": "siglip_vision_model", "image_size": 34}
        text = {**_TEXT, "head_dim": 16, "sliding_window": 8}
        config = _config("Gemma3", text, vision, mm_tokens_per_image=16, image_token_index=IMAGE)
        own = hf.Gemma3ImageProcessorPil(size={"height": 34, "width": 34})
        super().__init__(folder, config, own)

    def prepared(self, picture: Picture) -> Theirs:
        found = self.processor([picture.image()], return_tensors="pt")
        own = _without(hf.Gemma3Processor)
        row, start, end = "<image_soft_token>", "<start_of_image>", "<end_of_image>"
        own.full_image_sequence = f"\n\n{start}{row * 16}{end}\n\n"
        text = own.replace_image_token(found, 0).replace(row, "<image>")
        return Theirs(self.inputs(picture), _cut(found["pixel_values"]), text)

    def given(self, ids: torch.Tensor, *pictures: Picture) -> dict[str, Any]:
        return {"token_type_ids": (ids == IMAGE).long(), **super().given(ids, *pictures)}


class Idefics3(Family):
    taken = ("pixel_values", "pixel_attention_mask")
    kind, factor = "Idefics3", 2
    edges = 96, 24  # of pictures and tiles

    def __init__(self, folder: Path) -> None:
        text, vision = {**_TEXT, "model_type": "llama"}, {**_VISION, "image_size": 24}
        config = _config(self.kind, text, vision, scale_factor=self.factor, image_token_id=IMAGE)
        whole, tile = ({"longest_edge": edge} for edge in self.edges)
        processor = getattr(hf, f"{self.kind}ImageProcessorPil")
        super().__init__(folder, config, processor(size=whole, max_image_size=tile))

    def prepared(self, picture: Picture) -> Theirs:
        found = self.processor([picture.image()], return_tensors="pt", return_row_col_info=True)
        own = _without(hf.Idefics3Processor)
        own.fake_image_token, own.global_image_tag = "<fake_token_around_image>", "<global-img>"
        own.image_token, own.image_seq_len = "<image>", 9
        text = own.replace_image_token(found, 0)
        return Theirs(self.inputs(picture), _cut(found["pixel_values"][0]), text)


class SmolVlm(Idefics3):
    """A tile has more patches than positions, and some pixels too many."""

    kind, factor = "SmolVLM", 3
    edges = 152, 38


class Lfm2Vl(Family):
    taken = ("pixel_values", "spatial_shapes", "pixel_attention_mask")

    def __init__(self, folder: Path, **processor: Any) -> None:
        vision = {**_VISION, "model_type": "siglip2_vision_model", "num_patches": 25}
        text = {**_TEXT, "model_type": "lfm2", "layer_types": ["conv", "full_attention"]}
        normed = processor.pop("projector_use_layernorm", True)
        own = {"projector_hidden_size": 40, "projector_use_layernorm": normed}
        config = _config("Lfm2Vl", text, vision, **own, image_token_id=IMAGE)
        sizes = {"min_image_tokens": 4, "max_image_tokens": 16, "max_tiles": 6, "tile_size": 24}
        made = lfm2_vl_processor()(encoder_patch_size=4, **{**sizes, **processor})
        super().__init__(folder, config, made)

    def prepared(self, picture: Picture) -> Theirs:
        found = self.processor([picture.image()], return_tensors="pt", return_row_col_info=True)
        own = _without(hf.Lfm2VlProcessor)
        own.image_processor, own.image_token = self.processor, "<image>"
        own.image_start_token, own.image_end_token = "<|image_start|>", "<|image_end|>"
        own.image_thumbnail_token = "<|img_thumbnail|>"
        text = own.replace_image_token(found, 0, use_image_special_tokens=True)
        patches = found["pixel_values"][found["pixel_attention_mask"].bool()]
        return Theirs(self.inputs(picture), patches.numpy(), text)


class InternVl(Family):
    """Its processor makes tiles, whatever the image processor's settings say."""

    taken = ("pixel_values",)
    placeholder = "<IMG_CONTEXT>"

    def __init__(self, folder: Path) -> None:
        vision = {**_VISION, "attention_bias": True, "image_size": 24}
        config = _config("InternVL", {**_TEXT, "model_type": "qwen2"}, vision, image_token_id=IMAGE)
        own = hf.GotOcr2ImageProcessorPil(size={"height": 24, "width": 24})
        super().__init__(folder, config, own)

    def _processed(self, *pictures: Picture) -> Any:
        images = [each.image() for each in pictures]
        return self.processor(images, return_tensors="pt", **hf.InternVLProcessor.images_kwargs)

    def inputs(self, *pictures: Picture) -> dict[str, Any]:
        return {"pixel_values": self._processed(*pictures)["pixel_values"]}

    def prepared(self, picture: Picture) -> Theirs:
        found, own = self._processed(picture), _without(hf.InternVLProcessor)
        own.start_image_token, own.end_image_token = "<img>", "</img>"
        own.image_token, own.image_seq_length = "<IMG_CONTEXT>", 9
        text = own.replace_image_token(found, 0).replace("<IMG_CONTEXT>", "<image>")
        return Theirs(self.inputs(picture), _cut(found["pixel_values"]), text)


class MiniCpm(Family):
    taken = ("pixel_values", "target_sizes")
    placeholder = "<|image_pad|>"

    def __init__(self, folder: Path, layer: int = 1, **processor: Any) -> None:
        text = {**CONFIGS["qwen3.5"]().to_dict(), "hidden_size": 64, "vocab_size": 320}
        vision = {**_VISION, "num_hidden_layers": 3, "image_size": 28}
        own = {"insert_layer_id": layer, "downsample_mode": "16x", "image_token_id": IMAGE}
        config = _config("MiniCPMV4_6", text, vision, **own)
        config.vision_config.insert_layer_id = layer
        sizes = {"patch_size": PATCH, "scale_resolution": 48, "max_slice_nums": 7}
        super().__init__(folder, config, hf.MiniCPMV4_6ImageProcessorPil(**{**sizes, **processor}))

    def prepared(self, picture: Picture) -> Theirs:
        found, own = self.processor([picture.image()], return_tensors="pt"), minicpm_processor()
        own.slice_mode = self.processor.slice_mode
        text = own.replace_image_token(found, 0, image_token_divisor=16)
        pixels = found["pixel_values"][0].numpy()
        patches = pixels.reshape(3, PATCH, -1, PATCH).transpose(2, 0, 1, 3)
        patches = patches.reshape(len(patches), -1)
        return Theirs(self.inputs(picture), patches, text.replace("<|image_pad|>", "<image>"))


class Pixtral(Family):
    taken = ("pixel_values", "image_sizes")
    placeholder = "[IMG]"
    off = 1e-5
    shapes = ((60, 60), (61, 17), (9, 33), (250, 131), (40, 900), (5, 17))
    pictures = picture(50, 21), picture(16, 44, seed=1)

    def __init__(self, folder: Path, make: Callable[[], Any]) -> None:
        config = make()
        self.merge = getattr(config, "spatial_merge_size", 1)
        own = hf.PixtralImageProcessorPil(size={"longest_edge": 60}, patch_size=PATCH)
        super().__init__(folder, config, own)

    def inputs(self, *pictures: Picture) -> dict[str, Any]:
        images, square = [each.image() for each in pictures], PATCH * self.merge
        return dict(self.processor(images, patch_size=square, return_tensors="pt"))

    def prepared(self, picture: Picture) -> Theirs:
        found = self.inputs(picture)
        (pixels,), (size,) = found["pixel_values"], found["image_sizes"].tolist()
        # The module is not there without torchvision; the processor needs no more of it than this.
        with pytest.MonkeyPatch.context() as patch:
            name = "transformers.models.pixtral.image_processing_pixtral"
            patch.setitem(sys.modules, name, sys.modules[hf.PixtralImageProcessorPil.__module__])
            from transformers.models.pixtral.processing_pixtral import PixtralProcessor
        own = SimpleNamespace(
            patch_size=PATCH,
            spatial_merge_size=self.merge,
            image_token="<image>",
            image_break_token="[IMG_BREAK]",
            image_end_token="[IMG_END]",
        )
        text = PixtralProcessor.replace_image_token(own, {"image_sizes": [size]}, 0)
        grid = size[0] // PATCH, size[1] // PATCH
        patches = cut(pixels.numpy().transpose(1, 2, 0), PATCH)
        return Theirs(found, patches, str(text), grid)


def llava() -> Any:
    """A config of LLaVA's around Pixtral's encoder."""
    own = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    return _config("Llava", _MISTRAL, _PIXTRAL, **own, image_token_index=IMAGE)


def mistral3() -> Any:
    """A config of Mistral 3's."""
    return _config("Mistral3", _MISTRAL, _PIXTRAL, image_token_index=IMAGE)


class Gemma4(Family):
    placeholder = "<|image|>"
    row = 0
    off = 1e-5
    shapes = ((100, 100), (61, 17), (9, 33), (250, 131), (7, 900), (1200, 5))
    pictures = picture(50, 21), picture(16, 44, seed=1)
    named = "Gemma4Processor"

    def __init__(self, folder: Path, config: Any = None, **changes: Any) -> None:
        config = config or gemma4(**changes)
        self.pool = config.vision_config.pooling_kernel_size
        own = hf.Gemma4ImageProcessorPil(
            patch_size=PATCH, max_soft_tokens=70, pooling_kernel_size=self.pool
        )
        super().__init__(folder, config, own)
        for name, buffer in self.model.named_buffers():
            if name.endswith(("_min", "_max")):  # some values are beyond them
                torch.nn.init.uniform_(buffer, 0.5, 2.0).mul_(-1 if name.endswith("min") else 1)
            if name.endswith(("std_bias", "std_scale")):
                torch.nn.init.uniform_(buffer, 0.5, 2.0)
        self.model.save_pretrained(folder)

    def inputs(self, *pictures: Picture) -> dict[str, Any]:
        """Patches of all pictures, filled up, and their positions."""
        found = self.processor([each.image() for each in pictures], return_tensors="pt")
        return {name: found[name] for name in ("pixel_values", "image_position_ids")}

    def given(self, ids: torch.Tensor, *pictures: Picture) -> dict[str, Any]:
        return {"mm_token_type_ids": (ids == IMAGE).long(), **super().given(ids, *pictures)}

    def prepared(self, picture: Picture) -> Theirs:
        found = self.inputs(picture)
        positions = found["image_position_ids"][0]
        count = int((positions[:, 0] >= 0).sum())
        own = SimpleNamespace(boi_token="<|image>", image_token="<image>", eoi_token="<image|>")
        given = {"num_soft_tokens_per_image": [self.rows_of(count)]}
        text = getattr(hf, self.named).replace_image_token(own, given, 0)
        columns, rows = (positions.max(0).values + 1).tolist()
        return Theirs(found, found["pixel_values"][0, :count].numpy(), str(text), (rows, columns))

    def rows_of(self, patches: int) -> int:
        return patches // self.pool**2


def gemma4(text: str = "gemma4", own: dict[str, Any] | None = None, **vision: Any) -> Any:
    """A config; ``own`` are keys of its text model."""
    sizes = {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 20,
        "num_hidden_layers": 2,
        "patch_size": PATCH,
        "position_embedding_size": 256,
    }
    return hf.Gemma4Config(
        text_config={**(CONFIGS | MIXTURES)[text]().to_dict(), "pad_token_id": 0, **(own or {})},
        vision_config={**sizes, **vision},
        audio_config=None,
        image_token_id=IMAGE,
        video_token_id=1000,
        audio_token_id=1001,
    )


class Gemma4Unified(Gemma4):
    """Squares of patches take the place of an encoder."""

    row = None
    named = "Gemma4UnifiedProcessor"

    def __init__(self, folder: Path, **changes: Any) -> None:
        super().__init__(folder, gemma4_unified(**changes))

    def inputs(self, *pictures: Picture) -> dict[str, Any]:
        """Squares of all pictures, filled up to 70, and their positions."""
        found, merged = super().inputs(*pictures), []
        for patches, places in zip(found["pixel_values"], found["image_position_ids"], strict=True):
            count = int((places[:, 0] >= 0).sum())
            rows, own = _merge()(patches[:count], places[:count], count // self.pool**2)
            pad, more = torch.nn.functional.pad, 70 - len(rows)
            merged.append((pad(rows, (0, 0, 0, more)), pad(own, (0, 0, 0, more), value=-1)))
        pixels, places = (torch.stack(part) for part in zip(*merged, strict=True))
        return {"pixel_values": pixels, "image_position_ids": places}

    def rows_of(self, patches: int) -> int:
        return patches


def gemma4_unified(own: dict[str, Any] | None = None, **vision: Any) -> Any:
    """A config; transformers' windows do not hide a picture's rows from one another, ours do."""
    sizes = {**CONFIGS["gemma4-unified"]().to_dict(), "pad_token_id": 0, "sliding_window": 128}
    tiny = {"patch_size": PATCH, "mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 75}
    return hf.Gemma4UnifiedConfig(
        text_config={**sizes, **(own or {})},
        vision_config={**tiny, **vision},
        audio_config={"audio_embed_dim": 20},
        image_token_id=IMAGE,
        video_token_id=1000,
        audio_token_id=1001,
    )


@cache
def _merge() -> Callable[..., Any]:
    """Transformers' ``patches_merge``, whose module asks for torchvision."""
    name = "transformers.models.gemma4_unified.image_processing_gemma4_unified"
    functional = SimpleNamespace(InterpolationMode=int)
    with _torchvision("transforms", "transforms.v2", functional=functional):
        merge: Callable[..., Any] = import_module(name).patches_merge
    del sys.modules[name]
    return merge


def minicpm_processor() -> Any:
    """MiniCPM-V's processor without a tokenizer, and so with the names of its tokens alone."""
    own = _without(hf.MiniCPMV4_6Processor)
    own.image_token = "<|image_pad|>"
    for name in ("image", "slice", "image_id"):
        setattr(own, f"{name}_start_token", f"<{name}>")
        setattr(own, f"{name}_end_token", f"</{name}>")
    return own


@cache
def lfm2_vl_processor() -> Any:
    """LFM2-VL's image processor, which lets torchvision resize and normalize: here torch does."""
    with _torchvision(
        *("transforms", "transforms.v2", "transforms.v2.functional"), functional=None
    ):
        module = import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")

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
    "smolvlm": SmolVlm,
    "lfm2-vl": Lfm2Vl,
    "lfm2-vl-tiles": partial(Lfm2Vl, use_thumbnail=False, projector_use_layernorm=False),
    "internvl": InternVl,
    "minicpm-v": MiniCpm,
    "minicpm-v-whole": partial(MiniCpm, layer=2, slice_mode=False),
    "llava": partial(Pixtral, make=llava),
    "mistral3": partial(Pixtral, make=mistral3),
    "gemma4": Gemma4,
    "gemma4-clipped": partial(Gemma4, use_clipped_linears=True, standardize=True),
    "gemma4-both-ways": partial(Gemma4, text="gemma4-keys-as-values", own=BOTH_WAYS),
    "gemma4-moe-both-ways": partial(Gemma4, text="gemma4-moe", own=BOTH_WAYS),
    "gemma4-unified": Gemma4Unified,
    "gemma4-unified-causal": partial(Gemma4Unified, own={"use_bidirectional_attention": None}),
    "gemma4-unified-all-keys": partial(Gemma4Unified, own={"num_kv_shared_layers": 0}),
}
