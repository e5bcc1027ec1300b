"""Hugging Face transformers in bfloat16 as an engine to compare with, on the same model files."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from localrt.engine.types import Metrics
from localrt.errors import MissingExtraError, UnsupportedModelError

__all__ = ["TransformersEngine"]


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
        for package in ("transformers", "torch", "accelerate"):  # the last to read GGUF files
            if find_spec(package) is None:
                raise MissingExtraError(
                    f"the transformers engine needs {package}: pip install 'localrt[bench]'"
                )
        import torch
        import transformers

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if threads is not None:
            torch.set_num_threads(threads)
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

    def generate(self, prompt: list[int], tokens: int) -> Metrics:
        """The plain greedy loop: one pass over the prompt, then one token a pass."""
        import torch

        from localrt.offload.memory import peak_rss

        with torch.inference_mode():
            started = time.perf_counter()
            step = torch.tensor([prompt])  # (batch, tokens)
            output = self._model(step, use_cache=True, logits_to_keep=1)
            prefilled = first = time.perf_counter()
            for index in range(tokens):
                step = output.logits[:, -1].argmax(-1, keepdim=True)  # (batch, 1)
                token = step.item()
                if index == 0:
                    first = time.perf_counter()
                if index + 1 < tokens:
                    cache = output.past_key_values
                    output = self._model(step, past_key_values=cache, logits_to_keep=1)
            ended = time.perf_counter()
        assert isinstance(token, int)
        per_token = (ended - first) / (tokens - 1)
        return Metrics(
            prompt_tokens=len(prompt),
            completion_tokens=tokens,
            ttft_s=first - started,
            tpot_s=per_token,
            prefill_tok_s=len(prompt) / (prefilled - started),
            decode_tok_s=1 / per_token,
            peak_ram_bytes=peak_rss(),
            exactness="approximate",
        )
