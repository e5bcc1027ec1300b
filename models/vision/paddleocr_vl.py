"""PaddleOCR-VL's encoder: SigLIP with rotary positions, on pictures as Qwen's encoders see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localrt.models.encoders import Linear, Norm
from localrt.models.vision.encoder import VisionEncoder, linear
from localrt.models.vision.picture import integer
from localrt.models.vision.qwen_vl import Merger, QwenEncoder, Step, qwen_config
from localrt.models.vision.siglip import read_siglip
from localrt.models.weights import WeightLoader

_EPS = 1e-5  # of the projector's norm; not in configs


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, object]) -> VisionEncoder:
    """See ``registry.read_encoder``."""
    vision = {"temporal_patch_size": 1, **config["vision_config"]}
    side = integer(vision, "image_size", 384) // integer(vision, "patch_size", 14)
    blocks = read_siglip(
        vision, side=side, prefixes=(), hidden=1152, heads=16, inner=4304, layers=27
    )
    found = qwen_config(
        {**config, "vision_config": {**vision, "depth": blocks.layers}},
        processor,
        blocks.block,
        integer(config["text_config"], "hidden_size"),
        depth=blocks.layers,
        patch=14,
        pixels=(384**2, 1536**2),
        side=side,
    )
    return PaddleOcrEncoder(found)


class PaddleOcrEncoder(QwenEncoder):
    """See ``QwenEncoder``."""

    patches = "visual.vision_model.embeddings.patch_embedding"
    positions = "visual.vision_model.embeddings.position_embedding"
    prefix = "visual.vision_model.encoder.layers."
    weights = staticmethod(linear)
    placeholder = "<|IMAGE_PLACEHOLDER|>"
    picture_text = f"<|IMAGE_START|>{placeholder}<|IMAGE_END|>"

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """A side shorter than a square is enlarged first, and the other one with it."""
        side = self.config.patch * self.config.merge
        if height < side:
            height, width = side, round(width * side / height)
        if width < side:
            height, width = round(height * side / width), side
        return super()._size(height, width)

    def _load_merger(self, name: str, weights: WeightLoader) -> Step:
        config, hidden = self.config, self.config.blocks.hidden
        wide = config.square * hidden
        last = Norm.load(weights, "visual.vision_model.post_layernorm", hidden, config.blocks.eps)
        merger = Merger(
            Norm.load(weights, "mlp_AR.pre_norm", hidden, _EPS),
            Linear.load(weights, (wide, wide), "mlp_AR.linear_1", activation="gelu"),
            Linear.load(weights, (config.out, wide), "mlp_AR.linear_2"),
            joined=False,
            wide=wide,
        )
        return lambda x, steps: merger(steps.get(last(x, steps)), steps)
