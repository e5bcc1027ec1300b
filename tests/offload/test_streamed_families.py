"""Every architecture streamed: attention, MLPs, most experts and head, bit for bit as in memory."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from localrt.models.registry import ARCHITECTURES
from tests.offload.placed import (
    Model,
    assert_same,
    conversation,
    needs_kernels,
    pack_tiny,
    passing,
)

pytestmark = needs_kernels

# A tiny model of each.
STREAMED = {
    "apertus": "apertus",
    "cohere2": "cohere2",
    "cohere2_moe": "cohere2-moe-dense-first",
    "afmoe": "afmoe",
    "deepseek": "glm4-moe-lite",
    "deepseek_v4": "deepseek-v4",
    "ernie": "ernie-moe",
    "exaone4": "exaone4-window",
    "exaone_moe": "exaone-moe-groups",
    "falcon_h1": "falcon-h1",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma4": "gemma4-moe",
    "glm4": "glm4",
    "glm5_next": "glm5-next",
    "glm_dsa": "glm-dsa",
    "glm4_moe": "glm4-moe",
    "gpt_oss": "gpt-oss",
    "granite": "granite",
    "granite_hybrid": "granite-hybrid-moe",
    "granite_moe": "granite-moe-shared",
    "granite_swa": "granite-moe-swa",
    "hunyuan": "hunyuan",
    "hunyuan_moe": "hunyuan-moe-lists",
    "hy_v3": "hy-v3",
    "internvl": "internvl",
    "kimi_linear": "kimi-linear",
    "laguna": "laguna",
    "lfm2": "lfm2-moe",
    "lfm3": "lfm3",
    "ling": "ling",
    "llama": "llama",
    "llama4": "llama4-text",
    "llava": "llava",
    "mellum": "mellum-dense-first",
    "minimax_m2": "minimax-m2",
    "ministral3": "mistral3",
    "mistral4": "mistral4-text",
    "mixtral": "mixtral",
    "muse_glimmer": "muse-glimmer",
    "nemotron_h": "nemotron-h-groups",
    "olmo2": "olmo3",
    "olmo_hybrid": "olmo-hybrid",
    "olmoe": "olmoe",
    "phi3": "phi3",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2-moe",
    "qwen3": "qwen3-vl",
    "qwen3_5": "qwen3.5-moe",
    "qwen3_moe": "qwen3-vl-moe",
    "qwen4_exp": "qwen4-exp",
    "seed_oss": "seed-oss",
    "solar_open": "solar-open",
    "smollm3": "smollm3",
    "step": "step",
}


def test_none_is_left_out() -> None:
    assert set(STREAMED) == set(ARCHITECTURES.values())


@pytest.mark.parametrize("name", [*STREAMED.values(), "nemotron-h-latent"])
def test_streamed(name: str, tmp_path: Path) -> None:
    with closing(Model(pack_tiny(name, tmp_path))) as model:
        # The others of the experts are what their cache has room for.
        streamed = [n for n in passing(model.store) if not n.endswith(("expert.0", "expert.1"))]
        for names in (streamed, streamed[1::2]):
            with model.placed(names) as placed:
                assert_same(conversation(placed), model.expected)
