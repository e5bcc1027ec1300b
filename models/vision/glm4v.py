"""The encoder of GLM-4.1V, GLM-4.5V and GLM-4.6V: Qwen's with interpolated positions, and patches
merged by a convolution and a gated MLP. GLM-OCR's has rotary positions only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from localrt.models.encoders import Linear, Norm
from localrt.models.vision.encoder import VisionEncoder, cubic
from localrt.models.vision.picture import integer, number
from localrt.models.vision.qwen_vl import GATED, QwenEncoder, Step, qwen_blocks, qwen_config
from localrt.models.weights import WeightLoader
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.vision import Rows, VisionSteps, activate

_NORMED = replace(GATED, q_norm="attn.q_norm", k_norm="attn.k_norm")
_EPS = 1e-5  # of the merger's norm; not in configs


def read_encoder(config: Mapping[str, Any], processor: Mapping[str, object]) -> VisionEncoder:
    """See ``registry.read_encoder``."""
    vision, ocr = config["vision_config"], config["model_type"] == "glm_ocr"
    if (biased := vision.get("attention_bias", ocr)) is not ocr:
        raise ValueError(f"attention_bias of the vision tower must be {ocr}, is {biased!r:.60}")
    hidden = integer(vision, "hidden_size", 1024 if ocr else 1536)
    out = integer(vision, "out_hidden_size", 1536 if ocr else 4096)
    inner = integer(vision, "intermediate_size", 4096 if ocr else 13696)
    blocks = replace(
        qwen_blocks(vision, hidden, inner if ocr else out, "silu", _NORMED if ocr else GATED),
        heads=integer(vision, "num_heads", 16 if ocr else 12),
        eps=number(vision, "rms_norm_eps", 1e-5),
        rms=True,
        bias=ocr,
        mlp_bias=ocr,
    )
    side = integer(vision, "image_size", 336) // integer(vision, "patch_size", 14)
    found = qwen_config(
        config,
        processor,
        blocks,
        out,
        depth=24,
        patch=14,
        pixels=(112**2, 15000 * 28**2),
        side=0 if ocr else side,
        inner=3 * out if ocr else inner,
    )
    least, most = (pixels // found.frames for pixels in found.pixels)  # those of all frames
    return Glm4vEncoder(replace(found, pixels=(least, most)))


class Glm4vEncoder(QwenEncoder):
    """See ``QwenEncoder``."""

    positions = "visual.embeddings.position_embedding"
    weights = staticmethod(cubic)
    placeholder = "<|image|>"
    picture_text = f"<|begin_of_image|>{placeholder}<|end_of_image|>"

    def _size(self, height: int, width: int) -> tuple[int, int]:
        """A picture with a side shorter than a square is enlarged first."""
        scale = self.config.patch * self.config.merge / min(height, width)
        if scale > 1:
            height, width = int(height * scale), int(width * scale)
        return super()._size(height, width)

    def _load_patches(self, weights: WeightLoader) -> Step:
        embed, blocks = super()._load_patches(weights), self.config.blocks
        if not self.config.side:  # GLM-OCR
            return embed
        norm = Norm.load(weights, "visual.post_conv_layernorm", blocks.hidden, blocks.eps, rms=True)
        return lambda x, steps: norm(embed(x, steps), steps)

    def _load_merger(self, name: str, weights: WeightLoader) -> Step:
        config, hidden, eps = self.config, self.config.blocks.hidden, self.config.blocks.eps
        out, inner, wide = config.out, config.inner, config.square * hidden

        def linear(shape: tuple[int, int], *names: str) -> Linear:
            return Linear.load(weights, shape, *(f"visual.{n}" for n in names), bias=False)

        last = Norm.load(weights, "visual.post_layernorm", hidden, eps, rms=True)
        merge = Linear.load(weights, (out, wide), "visual.downsample")
        project = linear((out, out), "merger.proj")
        norm = Norm.load(weights, "visual.merger.post_projection_norm", out, _EPS)
        up = linear((2 * inner, out), "merger.gate_proj", "merger.up_proj")
        down = linear((out, inner), "merger.down_proj")

        def merged(x: Rows, steps: VisionSteps) -> Floats:
            x = steps.get(last(x, steps)).reshape(-1, config.square, hidden).swapaxes(1, 2)
            x = norm(project(merge(x.reshape(-1, wide), steps), steps), steps)
            x = activate(steps.get(x), "gelu")
            return down(steps.gated(up(x, steps), config.blocks.activation), steps)

        return merged
