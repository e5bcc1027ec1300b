"""A model at work for a server: who may come in, what runs, and what that adds up to.

It knows the public API and counts. HTTP's words are the endpoints' business.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from localrt.api import Model
from localrt.engine.options import read_options
from localrt.errors import OptionError
from localrt.live import LiveModel
from localrt.offload.account import SERVER_NBYTES
from localrt.offload.memory.process import current_rss
from localrt.serve.bodies import BodyRoom
from localrt.serve.connections import Connections, most_connections
from localrt.serve.errors import ApiError
from localrt.serve.metrics import Metrics, render
from localrt.serve.options import ServeOptions

__all__ = ["Service"]

_BODIES = 8  # of the largest size, that may come at once
_WINDOW_S = 10  # of the gauge of tokens per second
_LONGEST_RETRY_S = 60
_UNREAD_CHUNKS = 128  # beyond what the network's buffers hold

_HELP = {
    "localrt_http_requests_total": "Requests, by path and status.",
    "localrt_http_request_seconds": "Time from a request to the end of its answer.",
    "localrt_time_to_first_token_seconds": "Time from a request to its first token.",
    "localrt_rejected_requests_total": "Requests that were told to come back later.",
    "localrt_cancelled_requests_total": "Answers that nobody waited for any more.",
}


class Service:
    """A loaded model, its running batch, and the counts of a server."""

    def __init__(self, model: Model, options: ServeOptions) -> None:
        self.model = model
        self.options = options
        self.name = options.name or model.name
        self.metrics = Metrics()
        self.bodies = BodyRoom(_BODIES * options.max_body)
        self.connections = Connections(most_connections(options.max_connections))
        self.started = int(time.time())
        self.stopping = False
        self.embedding = asyncio.Lock()  # one batch at a time: they share the engine with answers
        self._live: LiveModel | None = None
        self._inside = 0
        self._samples: deque[tuple[float, int]] = deque(maxlen=_WINDOW_S + 1)

    @property
    def live(self) -> LiveModel:
        """The running batch.

        Raises:
            ApiError: 503, the server has not started or is stopping.
        """
        if self._live is None or self.stopping:
            raise ApiError(503, "the server is stopping", code="stopping")
        return self._live

    def open(self) -> None:
        """Start the batch. A reader that is behind pauses long before it is cut off."""
        options = self.options
        self._live = self.model.live(
            most=options.max_running,
            buffer=_UNREAD_CHUNKS,
            patience_s=max(1.0, options.write_timeout_s),
            reserve_ram=SERVER_NBYTES,
        )

    def stop(self) -> None:
        """Every answer ends, and no new one begins."""
        self.stopping = True
        if self._live is not None:
            self._live.cancel_all()

    def close(self) -> None:
        """Free what the batch holds; blocks until the pass in flight has ended."""
        live, self._live = self._live, None
        if live is not None:
            live.close()

    @contextmanager
    def admitted(self, count: int = 1) -> Iterator[None]:
        """Room for ``count`` more answers, running or queued.

        Raises:
            ApiError: 429, there is none.
        """
        options = self.options
        most = options.max_running + options.max_queued
        if self._inside + count > most:
            self.metrics.count("localrt_rejected_requests_total")
            raise ApiError(
                429,
                f"{self._inside} answers are running or queued, and {most} are the most: try again "
                "later",
                code="overloaded",
                headers={"Retry-After": str(self._retry_after())},
            )
        self._inside += count
        try:
            yield
        finally:
            self._inside -= count

    @property
    def names(self) -> dict[str, str | None]:
        """The models that there are, and the adapter that each of them is."""
        own = {
            f"{self.name}+{adapter}"
            if adapter in (self.name, self.model.name)
            else adapter: adapter
            for adapter in self.model.adapters
        }
        return {self.name: None, **own}

    def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a model is; None and "" are the base.

        Raises:
            ApiError: 404, there is no such model.
        """
        names = {self.model.name: None, **self.names}
        if name and name not in names:
            here = ", ".join(map(repr, self.names))
            raise ApiError(
                404,
                f"the model {name[:200]!r} is not here: this server runs {here}",
                param="model",
                code="model_not_found",
            )
        return names[name] if name else None

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
        if self._live is not None:
            self._samples.append((time.monotonic(), self._live.stats().completion_tokens))

    def metrics_text(self) -> str:
        """All numbers, in Prometheus' text format."""
        lines = list(self.metrics.lines(_HELP))
        for name, help_text, value in self._gauges():
            kind = "counter" if name.endswith("_total") else "gauge"
            lines += render(name, kind, help_text, [((), value)])
        return "\n".join(lines) + "\n"

    def _gauges(self) -> Iterator[tuple[str, str, float]]:
        """Name, help text and value of what is known of the running batch."""
        if self._live is None:
            return
        stats = self._live.stats()
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
        yield "process_resident_memory_bytes", "Bytes in RAM.", current_rss()

    def _rate(self, tokens: int) -> float:
        since, before = self._samples[0] if self._samples else (0.0, tokens)
        return (tokens - before) / max(time.monotonic() - since, 1e-9)

    def _retry_after(self) -> int:
        """Seconds until about one of those inside has finished."""
        mean = self.metrics.mean("localrt_http_request_seconds") or 1.0
        return max(1, min(_LONGEST_RETRY_S, round(mean / self.options.max_running)))
