"""Short names of models that people run: ``llama3.2:3b`` stands for a repository of the hub.

A name is a family and a tag, as Ollama has them; a family alone means the first of its models here.
Each entry names a repository of GGUF files and the public page that names it. The model's published
config is in ``known_configs.json``, so that it can be planned for without the network. People add
names of their own in ``config.toml`` (``names.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from localrt.hub.names import close_to

_CONFIGS = Path(__file__).with_name("known_configs.json")
_FIRST = "latest"  # a tag for the first of a family
_THINKING = frozenset(
    {
        *("qwen3", "qwen3.5", "qwen3.6", "deepseek-r1", "gpt-oss", "smollm3"),
        *("glm-4.7-flash", "nemotron-3-nano", "nemotron-nano"),
    }
)
_THINKS = re.compile(r"thinking|reasoning|\bR1\b|QwQ|gpt-oss|magistral", re.IGNORECASE)

_HUB = "https://huggingface.co"
_GITHUB = "https://github.com"
_LEMONADE = f"{_GITHUB}/lemonade-sdk/lemonade/blob/main/src/cpp/resources/server_models.json"
_LLAMA_BARN = f"{_GITHUB}/ggml-org/LlamaBarn"
_LLAMA_CPP = f"{_GITHUB}/ggml-org/llama.cpp/blob/master/docs/multimodal.md"
_LLMFIT = f"{_GITHUB}/AlexsJones/llmfit/blob/main/llmfit-core/src/providers.rs"
_UNSLOTH = "https://unsloth.ai/docs/get-started/unsloth-model-catalog"


@dataclass(frozen=True, slots=True)
class KnownModel:
    """``parameters`` are billions, of the text part alone. ``shape`` names its config.

    ``source`` is the public page where ``repo`` was found; None: the repository's own.
    """

    name: str
    repo: str
    parameters: float
    shape: str
    source: str | None = None

    @property
    def family(self) -> str:
        """The name without its tag: ``"llama3.2"``."""
        return self.name.partition(":")[0]

    @property
    def page(self) -> str:
        """Where to read that the repository is this model's."""
        return self.source or f"{_HUB}/{self.repo}"

    def config(self) -> Mapping[str, Any]:
        """The published ``config.json``, as far as it says the shape of the text model."""
        return _configs()[self.shape]


_Row = tuple[str, str, float, str, str | None]
_ROWS: tuple[_Row, ...] = (
    ("llama3.2:3b", "unsloth/Llama-3.2-3B-Instruct-GGUF", 3.2, "llama-3.2-3b", _LEMONADE),
    ("llama3.2:1b", "unsloth/Llama-3.2-1B-Instruct-GGUF", 1.2, "llama-3.2-1b", _LEMONADE),
    ("llama3.1:8b", "unsloth/Llama-3.1-8B-Instruct-GGUF", 8.0, "llama-3.1-8b", _UNSLOTH),
    ("llama3.3:70b", "bartowski/Llama-3.3-70B-Instruct-GGUF", 70.6, "llama-3.1-70b", _LLMFIT),
    ("qwen3.5:9b", "unsloth/Qwen3.5-9B-GGUF", 9.0, "qwen3.5-9b", _LEMONADE),
    ("qwen3.5:0.8b", "unsloth/Qwen3.5-0.8B-GGUF", 0.75, "qwen3.5-0.8b", _LEMONADE),
    ("qwen3.5:2b", "unsloth/Qwen3.5-2B-GGUF", 1.9, "qwen3.5-2b", _LEMONADE),
    ("qwen3.5:4b", "unsloth/Qwen3.5-4B-GGUF", 4.2, "qwen3.5-4b", _LEMONADE),
    ("qwen3.5:27b", "unsloth/Qwen3.5-27B-GGUF", 26.9, "qwen3.5-27b", _LEMONADE),
    ("qwen3.5:35b", "unsloth/Qwen3.5-35B-A3B-GGUF", 34.7, "qwen3.5-35b-a3b", _LEMONADE),
    ("qwen3.6:35b", "unsloth/Qwen3.6-35B-A3B-GGUF", 34.7, "qwen3.5-35b-a3b", _LEMONADE),
    ("qwen3.6:27b", "unsloth/Qwen3.6-27B-GGUF", 26.9, "qwen3.5-27b", _LEMONADE),
    ("qwen3:8b", "unsloth/Qwen3-8B-GGUF", 8.2, "qwen3-8b", _LEMONADE),
    ("qwen3:0.6b", "unsloth/Qwen3-0.6B-GGUF", 0.6, "qwen3-0.6b", _LEMONADE),
    ("qwen3:1.7b", "unsloth/Qwen3-1.7B-GGUF", 1.7, "qwen3-1.7b", _LEMONADE),
    ("qwen3:4b", "unsloth/Qwen3-4B-GGUF", 4.0, "qwen3-4b", _LEMONADE),
    ("qwen3:14b", "unsloth/Qwen3-14B-GGUF", 14.8, "qwen3-14b", _LEMONADE),
    ("qwen3:30b", "unsloth/Qwen3-30B-A3B-GGUF", 30.5, "qwen3-30b-a3b", _LEMONADE),
    (
        "qwen3-coder:30b",
        "unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF",
        30.5,
        "qwen3-coder-30b-a3b",
        _LEMONADE,
    ),
    (
        "qwen3-coder-next:80b",
        "unsloth/Qwen3-Coder-Next-GGUF",
        79.7,
        "qwen3-next-80b-a3b",
        _LEMONADE,
    ),
    (
        "qwen3-next:80b",
        "unsloth/Qwen3-Next-80B-A3B-Instruct-GGUF",
        79.7,
        "qwen3-next-80b-a3b",
        _LEMONADE,
    ),
    ("qwen2.5:7b", "bartowski/Qwen2.5-7B-Instruct-GGUF", 7.6, "qwen2.5-7b", _LLMFIT),
    ("qwen2.5:1.5b", "bartowski/Qwen2.5-1.5B-Instruct-GGUF", 1.5, "qwen2.5-1.5b", _LLMFIT),
    ("qwen2.5:3b", "bartowski/Qwen2.5-3B-Instruct-GGUF", 3.1, "qwen2.5-3b", _LLMFIT),
    ("qwen2.5:14b", "bartowski/Qwen2.5-14B-Instruct-GGUF", 14.8, "qwen2.5-14b", _LLMFIT),
    ("qwen2.5-coder:7b", "bartowski/Qwen2.5-Coder-7B-Instruct-GGUF", 7.6, "qwen2.5-7b", _LLMFIT),
    ("qwen2.5-coder:1.5b", "unsloth/Qwen2.5-Coder-1.5B-Instruct-GGUF", 1.5, "qwen2.5-1.5b", None),
    (
        "qwen2.5-coder:14b",
        "bartowski/Qwen2.5-Coder-14B-Instruct-GGUF",
        14.8,
        "qwen2.5-14b",
        _LLMFIT,
    ),
    ("qwen2.5-coder:32b", "Qwen/Qwen2.5-Coder-32B-Instruct-GGUF", 32.8, "qwen2.5-32b", _LEMONADE),
    ("gemma4:e4b", "unsloth/gemma-4-E4B-it-GGUF", 7.5, "gemma-4-e4b", _LEMONADE),
    ("gemma4:e2b", "unsloth/gemma-4-E2B-it-GGUF", 4.6, "gemma-4-e2b", _LEMONADE),
    ("gemma4:26b", "unsloth/gemma-4-26B-A4B-it-GGUF", 25.2, "gemma-4-26b-a4b", _LEMONADE),
    ("gemma4:31b", "unsloth/gemma-4-31B-it-GGUF", 30.7, "gemma-4-31b", _LEMONADE),
    ("gemma3:4b", "ggml-org/gemma-3-4b-it-GGUF", 3.9, "gemma-3-4b", _LLAMA_CPP),
    ("gemma3:1b", "ggml-org/gemma-3-1b-it-qat-GGUF", 1.0, "gemma-3-1b", _LLAMA_BARN),
    ("gemma3:12b", "ggml-org/gemma-3-12b-it-GGUF", 11.8, "gemma-3-12b", _LLAMA_CPP),
    ("gemma3:27b", "ggml-org/gemma-3-27b-it-GGUF", 27.0, "gemma-3-27b", _LLAMA_CPP),
    ("gemma3n:e4b", "unsloth/gemma-3n-E4B-it-GGUF", 6.8, "gemma-3n-e4b", _LLAMA_BARN),
    ("gemma3n:e2b", "unsloth/gemma-3n-E2B-it-GGUF", 4.4, "gemma-3n-e2b", _LLAMA_BARN),
    ("gpt-oss:20b", "ggml-org/gpt-oss-20b-GGUF", 20.9, "gpt-oss-20b", _LLAMA_BARN),
    ("gpt-oss:120b", "ggml-org/gpt-oss-120b-GGUF", 116.8, "gpt-oss-120b", _LLAMA_BARN),
    ("mistral:7b", "bartowski/Mistral-7B-Instruct-v0.3-GGUF", 7.2, "mistral-7b", _LLMFIT),
    (
        "mistral-nemo:12b",
        "bartowski/Mistral-Nemo-Instruct-2407-GGUF",
        12.2,
        "mistral-nemo-12b",
        None,
    ),
    (
        "mistral-small3.2:24b",
        "unsloth/Mistral-Small-3.2-24B-Instruct-2506-GGUF",
        23.6,
        "mistral-small-24b",
        None,
    ),
    (
        "devstral-small-2:24b",
        "unsloth/Devstral-Small-2-24B-Instruct-2512-GGUF",
        23.6,
        "devstral-small-2-24b",
        None,
    ),
    ("ministral-3:8b", "mistralai/Ministral-3-8B-Instruct-2512-GGUF", 8.5, "ministral-3-8b", None),
    (
        "ministral-3:3b",
        "mistralai/Ministral-3-3B-Instruct-2512-GGUF",
        3.4,
        "ministral-3-3b",
        _LEMONADE,
    ),
    (
        "ministral-3:14b",
        "mistralai/Ministral-3-14B-Instruct-2512-GGUF",
        13.5,
        "ministral-3-14b",
        None,
    ),
    ("phi4:14b", "bartowski/phi-4-GGUF", 14.7, "phi-4", _LLMFIT),
    ("phi4-mini:3.8b", "unsloth/Phi-4-mini-instruct-GGUF", 3.8, "phi-4-mini", _LEMONADE),
    ("deepseek-r1:8b", "unsloth/DeepSeek-R1-0528-Qwen3-8B-GGUF", 8.2, "qwen3-8b", _LEMONADE),
    ("deepseek-r1:7b", "bartowski/DeepSeek-R1-Distill-Qwen-7B-GGUF", 7.6, "qwen2.5-7b", _LLMFIT),
    (
        "deepseek-r1:14b",
        "bartowski/DeepSeek-R1-Distill-Qwen-14B-GGUF",
        14.8,
        "qwen2.5-14b",
        _LLMFIT,
    ),
    (
        "deepseek-r1:32b",
        "bartowski/DeepSeek-R1-Distill-Qwen-32B-GGUF",
        32.8,
        "qwen2.5-32b",
        _LLMFIT,
    ),
    ("smollm2:1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF", 1.7, "smollm2-1.7b", None),
    ("smollm3:3b", "ggml-org/SmolLM3-3B-GGUF", 3.1, "smollm3-3b", None),
    ("glm-4.7-flash:30b", "unsloth/GLM-4.7-Flash-GGUF", 29.9, "glm-4.7-flash", _LEMONADE),
    ("lfm2:8b", "LiquidAI/LFM2-8B-A1B-GGUF", 8.3, "lfm2-8b-a1b", _LEMONADE),
    ("lfm2:1.2b", "LiquidAI/LFM2-1.2B-GGUF", 1.2, "lfm2-1.2b", _LEMONADE),
    ("granite4:tiny-h", "unsloth/granite-4.0-h-tiny-GGUF", 6.9, "granite-4-h-tiny", _LEMONADE),
    (
        "nemotron-3-nano:30b",
        "unsloth/Nemotron-3-Nano-30B-A3B-GGUF",
        31.6,
        "nemotron-3-nano-30b-a3b",
        _LEMONADE,
    ),
    (
        "nemotron-nano:9b",
        "bartowski/nvidia_NVIDIA-Nemotron-Nano-9B-v2-GGUF",
        8.9,
        "nemotron-nano-9b",
        None,
    ),
)

KNOWN_MODELS: tuple[KnownModel, ...] = tuple(KnownModel(*row) for row in _ROWS)
"""All of them; the first of a family is what the family's name alone means."""


def find_known(name: str) -> KnownModel | None:
    """The model of this short name, in any case: ``"llama3.2:3b"``, ``"llama3.2"``."""
    name = name.strip().lower().removesuffix(f":{_FIRST}")
    return next((model for model in KNOWN_MODELS if name in (model.name, model.family)), None)


def known_repo(repo: str) -> Mapping[str, Any] | None:
    """The published config of the model in this repository, where it is one of these."""
    found = (model for model in KNOWN_MODELS if model.repo.lower() == repo.lower())
    return next((model.config() for model in found), None)


def repo_thinks(repo: str) -> bool:
    """Whether the model in this repository thinks before it answers: answers then take longer."""
    known = next((model for model in KNOWN_MODELS if model.repo.lower() == repo.lower()), None)
    if known is not None:
        return known.family in _THINKING
    return _THINKS.search(repo) is not None


def close_names(name: str, others: Iterable[str] = ()) -> list[str]:
    """Up to three short names, or some of ``others``, that ``name`` may have been meant for."""
    known = [each for model in KNOWN_MODELS for each in (model.family, model.name)]
    return close_to(name, [*others, *known])


@cache
def _configs() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = json.loads(_CONFIGS.read_text(encoding="utf-8"))
    return found
