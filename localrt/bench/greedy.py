"""Plain greedy decoding of a Hugging Face causal model: the loop that its peers are timed with.

One pass over the prompt, then one token a pass with the model's own cache. It does not know how the
model was loaded, nor where its weights lie. Imported in a child alone: it needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from localrt.engine.types import Metrics
from localrt.offload.memory.process import peak_rss

__all__ = ["generate_greedily"]


def generate_greedily(
    model: Callable[..., Any], prompt: list[int], tokens: int, on_first: Callable[[], None]
) -> Metrics:
    """Exactly ``tokens`` tokens after ``prompt``; ``on_first`` is called when the first is known.

    ``model`` is called as transformers' causal models are, on CPU tensors.
    """
    import torch

    with torch.inference_mode():
        started = time.perf_counter()
        step = torch.tensor([prompt])  # (batch, tokens)
        output = model(step, use_cache=True, logits_to_keep=1)
        prefilled = first = time.perf_counter()
        for index in range(tokens):
            step = output.logits[:, -1].argmax(-1, keepdim=True)  # (batch, 1)
            token = step.item()
            if index == 0:
                first = time.perf_counter()
                on_first()
            if index + 1 < tokens:
                cache = output.past_key_values
                output = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
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
