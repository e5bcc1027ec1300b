"""Whatever is said of an encoder and its pictures, seeing one works or ends in one line."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision.encoder_cache import EncoderUnitReader
from localrt.models.vision.registry import read_encoder
from localrt.quant.ops.vision import VisionSteps
from localrt.quant.reference.ops import TorchOps
from tests.models.vision import (
    siglip_families,
    test_gemma4_unified,
    test_gemma4_vision,
    test_pixtral,
    tiny_qwen,
)
from tests.models.vision.oracles import picture
from tests.mutations import FUZZ, changed, changes_of, is_line, paths, refusal

_SIGLIP = ("gemma3", "idefics3", "smolvlm", "lfm2-vl", "internvl", "minicpm-v")
FOLDERS: dict[str, Callable[[Path], object]] = {
    "llava": partial(test_pixtral.Tiny, "llava"),
    "mistral3": partial(test_pixtral.Tiny, "mistral3"),
    "gemma4": test_gemma4_vision.Tiny,
    "gemma4_unified": test_gemma4_unified.Tiny,
    **{kind: partial(tiny_qwen.save_tiny_vl, kind) for kind in tiny_qwen.TINY},
    **{name: siglip_families.FAMILIES[name] for name in _SIGLIP},
}
MORE = "do_rescale do_normalize image_mean image_std rescale_factor resample size max_image_size"
MORE += " min_pixels max_pixels do_image_splitting use_thumbnail min_tiles max_tiles tile_size"
MORE += " max_image_tokens max_soft_tokens min_patches max_patches"
MORE += " max_slice_nums scale_resolution slice_mode use_image_id"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], VisionFolder]]:
    with ExitStack() as stack:

        @cache
        def of(name: str) -> VisionFolder:
            folder = tmp_path_factory.mktemp(name)
            FOLDERS[name](folder)
            return stack.enter_context(closing(VisionFolder(folder)))

        yield of


@FUZZ
@given(data=st.data(), name=st.sampled_from(sorted(FOLDERS)))
def test_any_settings(opened: Callable[[str], VisionFolder], data: Any, name: str) -> None:
    source = opened(name)
    published = {"config": dict(source.config), "processor": source.processor}
    del published["config"]["model_type"]
    more = [("processor", key) for key in MORE.split()]
    places = [path for path in [*paths(published), *more] if len(path) > 1]
    own = changed(published, data.draw(changes_of(places)))
    config = {**own["config"], "model_type": source.config["model_type"]}

    def seen() -> None:
        ops = TorchOps(compute_format="f32", device="cpu")
        encoder = read_encoder(config, own["processor"])
        prepared = encoder.prepare(picture(37, 50))
        with np.errstate(all="ignore"):  # pixels times a wrong number may be too large
            steps = VisionSteps(ops)
            encoder.encode(prepared, EncoderUnitReader(source, steps), steps)

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        assert is_line(refusal(seen))
