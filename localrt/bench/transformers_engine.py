"""A Hugging Face model in bf16: a folder, or a GGUF file as read by transformers. On a GPU,
Accelerate places its layers there and in RAM; bitsandbytes may pack a folder's weights as NF4.

Imported only in a child process, once torch and transformers are known to be installed.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate.utils import get_max_memory

from localrt.common.errors import UnsupportedModelError
from localrt.engine.types import Metrics
from localrt.offload.memory import peak_rss

_FAILURES = (ValueError, KeyError, OSError, RuntimeError, TypeError, NotImplementedError)


class HuggingFaceEngine:
    """A causal model with its own tokenizer and KV cache, in the process that loaded it."""

    def __init__(self, model: Any, tokenizer: Any, **info: Any) -> None:
        self._model, self._tokenizer = model, tokenizer
        # Accelerate's hooks move what goes into a model whose weights are not all in one place.
        weight = model.get_input_embeddings().weight
        self._place = "cpu" if weight.is_meta else weight.device
        self.info: Mapping[str, Any] = {
            "architecture": model.config.model_type,
            "exactness": "approximate",
            "parameters": model.num_parameters(),
            **info,
        }

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def generate(self, prompt: list[int], tokens: int, on_first: Callable[[], None]) -> Metrics:
        """Generate exactly ``tokens`` greedy tokens: a pass over the prompt, then one per token."""

        with torch.inference_mode():
            started = time.perf_counter()
            step = torch.tensor([prompt], device=self._place)  # (batch, tokens)
            output = self._model(step, use_cache=True, logits_to_keep=1)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
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
            peak_vram_bytes=torch.cuda.max_memory_reserved() or None,
            exactness="approximate",
        )


def load_transformers(
    path: Path,
    *,
    threads: int | None = None,
    device: str = "cpu",
    gpu_memory: int | None = None,
    ram: int | None = None,
    nf4: bool = False,
) -> HuggingFaceEngine:
    """Load a Hugging Face folder, or a GGUF file through transformers' own conversion.

    Unless ``device`` is the CPU, Accelerate places weights within ``gpu_memory`` and ``ram`` bytes,
    by default nine tenths of what is free.

    Raises:
        UnsupportedModelError: transformers cannot read this model, or has no room for it.
    """
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if threads is not None:
        torch.set_num_threads(threads)
    place, file = (path, {}) if path.is_dir() else (path.parent, {"gguf_file": path.name})
    own: dict[str, Any] = {}
    if device != "cpu":
        given = {int(device.partition(":")[2] or 0): gpu_memory, "cpu": ram}
        free = {key: size for key, size in get_max_memory().items() if key in given}
        own["max_memory"] = {key: given[key] or int(0.9 * size) for key, size in free.items()}
        own["device_map"] = "auto"
    if nf4:
        packed = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.bfloat16}
        packed |= {"load_in_4bit": True, "llm_int8_enable_fp32_cpu_offload": True}  # layers in RAM
        own["quantization_config"] = transformers.BitsAndBytesConfig(**packed)
    warnings.simplefilter("ignore")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **file)
        own |= {"dtype": torch.bfloat16, **file}
        model = transformers.AutoModelForCausalLM.from_pretrained(place, **own)
    except _FAILURES as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UnsupportedModelError(f"transformers cannot load {path.name}: {reason}") from error
    places = {str(each) for each in getattr(model, "hf_device_map", {}).values()}
    return HuggingFaceEngine(
        model.eval(),
        tokenizer,
        name=path.name,
        device="cuda" if places - {"cpu", "disk"} else "cpu",
        format="nf4" if nf4 else "bf16",
    )
