"""A loaded model at work for a server: its running batch, and the names that clients know it by.

It knows the public API and counts. Who may come in, and which models there are, are others'
business.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from localrt.api import Model
from localrt.engine.options import read_options
from localrt.errors import OptionError
from localrt.offload.account import SERVER_NBYTES
from localrt.serve.options import ServeOptions

__all__ = ["Gauge", "ServedModel"]

Gauge = tuple[str, str, float]
"""A metric's name, its help text, and its value."""

_WINDOW_S = 10  # of the gauge of tokens per second
_UNREAD_CHUNKS = 128  # beyond what the network's buffers hold


class ServedModel:
    """``model`` under ``name``, with a batch that runs until ``close``; the model stays loaded.

    A reader that is behind pauses long before it is cut off.
    """

    def __init__(self, model: Model, name: str, options: ServeOptions) -> None:
        self.model = model
        self.name = name
        self.embedding = asyncio.Lock()  # one batch at a time: they share the engine with answers
        self.live = model.live(
            most=options.max_running,
            buffer=_UNREAD_CHUNKS,
            patience_s=max(1.0, options.write_timeout_s),
            reserve_ram=SERVER_NBYTES,
        )
        self._samples: deque[tuple[float, int]] = deque(maxlen=_WINDOW_S + 1)

    def close(self) -> None:
        """Free what the batch holds; blocks until the pass in flight has ended."""
        self.live.close()

    @property
    def names(self) -> dict[str, str | None]:
        """What clients may ask for, and the adapter that each of them is."""
        own = {
            f"{self.name}+{adapter}"
            if adapter in (self.name, self.model.name)
            else adapter: adapter
            for adapter in self.model.adapters
        }
        return {self.name: None, **own}

    def check_options(self, **options: Any) -> None:
        """Whether the library takes these options of a generation.

        Raises:
            OptionError: it does not.
        """
        read_options(options)
        vocab = self.model.info.vocab_size
        wrong = next((token for token in options.get("logit_bias", ()) if token >= vocab), None)
        if wrong is not None:
            raise OptionError(f"logit_bias names token {wrong}; the model has {vocab}")

    def sample(self) -> None:
        """Take note of the tokens so far; called once a second."""
        self._samples.append((time.monotonic(), self.live.stats().completion_tokens))

    def gauges(self) -> Iterator[Gauge]:
        """What is known of the running batch."""
        stats = self.live.stats()
        cached_help = "Tokens of prompts that a kept KV cache held."
        rate_help = f"Tokens of answers in the last {_WINDOW_S} seconds, per second."
        yield "localrt_requests_running", "Answers that share passes.", stats.running
        yield "localrt_requests_waiting", "Answers that wait for a turn.", stats.waiting
        yield "localrt_requests_paused", "Answers that nobody reads.", stats.paused
        yield "localrt_prompt_tokens_total", "Tokens of prompts.", stats.prompt_tokens
        yield "localrt_cached_prompt_tokens_total", cached_help, stats.cached_tokens
        yield "localrt_generated_tokens_total", "Tokens of answers.", stats.completion_tokens
        yield "localrt_passes_total", "Passes over the weights.", stats.passes
        yield "localrt_tokens_per_second", rate_help, self._rate(stats.completion_tokens)
        yield "localrt_kv_bytes", "Bytes of KV caches.", stats.kv_bytes
        if (counts := stats.pipeline) is not None:
            yield "localrt_ssd_read_bytes_total", "Read by the pipeline.", counts.ssd_read_bytes
            yield "localrt_link_bytes_total", "Copied to a card.", counts.link_bytes

    def _rate(self, tokens: int) -> float:
        since, before = self._samples[0] if self._samples else (0.0, tokens)
        return (tokens - before) / max(time.monotonic() - since, 1e-9)
