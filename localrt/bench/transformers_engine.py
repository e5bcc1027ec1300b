"""A Hugging Face model in bf16 on the CPU: a folder, or a GGUF file as read by transformers.

Imported only in a child process, once torch and transformers are known to be installed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from localrt.common.errors import LocalrtError, UnsupportedModelError
from localrt.engine.types import Metrics
from localrt.models.checkpoints import open_checkpoint
from localrt.models.tokenizers import load_tokenizer
from localrt.offload.memory import peak_rss

_FAILURES = (ValueError, KeyError, OSError, RuntimeError, TypeError, NotImplementedError)


class HuggingFaceEngine:
    """A causal model with its own KV cache. ``path`` is the model under test.

    ``encode`` returns token ids without special tokens; the default is localrt's tokenizer.
    ``owner`` keeps alive the object whose hooks load the weights.
    """

    def __init__(
        self,
        model: Any,
        path: Path,
        *,
        encode: Callable[[str], list[int]] | None = None,
        owner: object = None,
        **info: Any,
    ) -> None:
        self._model, self._path, self._owner = model, path, owner
        self._encode = encode
        self.info: Mapping[str, Any] = {
            "name": path.name,
            "architecture": model.config.model_type,
            "device": "cpu",
            "format": "bf16",
            "exactness": "approximate",
            **info,
        }

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens."""
        if self._encode is not None:
            return self._encode(text)
        with closing(open_checkpoint(self._path)) as checkpoint:
            return load_tokenizer(checkpoint).encode(text, add_special=False)

    def generate(self, prompt: list[int], tokens: int, on_first: Callable[[], None]) -> Metrics:
        """Generate exactly ``tokens`` greedy tokens: a pass over the prompt, then one per token."""

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
                    on_first()
                if index + 1 < tokens:
                    cache = output.past_key_values
                    output = self._model(
                        step, past_key_values=cache, use_cache=True, logits_to_keep=1
                    )
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


def load_transformers(path: Path, *, threads: int | None = None) -> HuggingFaceEngine:
    """Load a Hugging Face folder, or a GGUF file through transformers' own conversion.

    Raises:
        UnsupportedModelError: transformers cannot read this model.
    """
    set_up_torch(threads)
    place, options = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    with loading("transformers", path, UnsupportedModelError):
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, dtype=torch.bfloat16, **options
        )

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    count = model.num_parameters()
    return HuggingFaceEngine(model.eval(), path, encode=encode, parameters=count)


@contextmanager
def loading(peer: str, path: Path, kind: type[LocalrtError]) -> Iterator[None]:
    """A context in which failures become one-line errors and warnings are hidden."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except _FAILURES as error:
            raise kind(f"{peer} cannot load {path.name}: {first_line(error)}") from error


def set_up_torch(threads: int | None) -> None:
    """Set the number of CPU threads, and silence transformers."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class if that is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
