"""Hugging Face transformers in bfloat16 as an engine to compare with, on the same model files."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from localrt.bench.greedy import generate_greedily
from localrt.engine.types import Metrics
from localrt.errors import MissingExtraError, UnsupportedModelError

__all__ = ["TransformersEngine", "require", "set_up_torch"]


def require(engine: str, *packages: str) -> None:
    """Say what an engine of the ``bench`` extra lacks.

    Raises:
        MissingExtraError: a package is not installed.
    """
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError(
                f"the {engine} engine needs {package}: pip install 'localrt[bench]'"
            )


def set_up_torch(threads: int | None) -> None:
    """Threads of the CPU, and no talk from transformers."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)


class TransformersEngine:
    """A causal language model with its KV cache, greedily decoded on the CPU."""

    def __init__(self, model: Any, tokenizer: Any, path: Path) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self.info: Mapping[str, Any] = {
            "name": path.name,
            "architecture": model.config.model_type,
            "parameters": model.num_parameters(),
            "device": "cpu",
            "format": "bf16",
            "exactness": "approximate",
        }

    @classmethod
    def load(cls, path: Path, *, threads: int | None = None) -> TransformersEngine:
        """Load a Hugging Face folder, or a GGUF file through transformers' own conversion.

        Raises:
            MissingExtraError: transformers, torch or accelerate is not installed.
            UnsupportedModelError: transformers cannot read this model.
        """
        require("transformers", "transformers", "torch", "accelerate")  # the last for GGUF files
        import torch
        import transformers

        set_up_torch(threads)
        place, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
                model = transformers.AutoModelForCausalLM.from_pretrained(
                    place, dtype=torch.bfloat16, **options
                )
            except (ValueError, KeyError, OSError, NotImplementedError) as error:
                cause = str(error).strip().splitlines()[0] if str(error).strip() else "no reason"
                raise UnsupportedModelError(
                    f"transformers cannot load {path.name}: {cause}"
                ) from error
        return cls(model.eval(), tokenizer, path)

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return ids

    def generate(self, prompt: list[int], tokens: int, on_first: Callable[[], None]) -> Metrics:
        """The plain greedy loop."""
        return generate_greedily(self._model, prompt, tokens, on_first)
