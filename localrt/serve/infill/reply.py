"""From chunks to what llama.cpp's ``/infill`` answers, whole or as events.

Its fields are llama.cpp's, as far as they mean something here. It does not know HTTP.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localrt.engine.types import Chunk, Metrics
from localrt.serve.errors import ApiError, error_body
from localrt.serve.replies import EVENT_STREAM, Payload, event

__all__ = ["InfillReply"]


class InfillReply:
    """The response of the model that is called ``model`` to a request with ``fields``."""

    media_type = EVENT_STREAM

    def __init__(self, model: str, fields: Mapping[str, Any]) -> None:
        self._model = model
        self._chosen = fields.get("response_fields")
        self._only_read = fields.get("n_predict") == 0
        self._new_line = False

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        """The text, and what it took."""
        (chunk,) = chunks
        return self._last(chunk)

    def begin(self) -> Iterator[bytes]:
        """Nothing: the first event has text."""
        yield from ()

    def alive(self) -> bytes:
        """A piece without text."""
        return event({"index": 0, "content": "", "tokens": [], "stop": False})

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """A piece of the text; the last event has all but the text before."""
        if chunk.finish_reason is not None:
            yield event(self._last(chunk))
        elif not self._only_read:
            self._new_line |= "\n" in chunk.text
            metrics = chunk.metrics
            yield event(
                {
                    "index": index,
                    "content": chunk.text,
                    "tokens": list(chunk.token_ids),
                    "stop": False,
                    "tokens_predicted": metrics.completion_tokens,
                    "tokens_evaluated": metrics.prompt_tokens,
                }
            )

    def end(self) -> Iterator[bytes]:
        """Nothing: the last event has said so."""
        yield from ()

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """An error in place of a piece."""
        yield event(error_body(error))

    def _last(self, chunk: Chunk) -> Payload:
        metrics, text = chunk.metrics, "" if self._only_read else chunk.text
        limited = chunk.finish_reason == "length"
        stopped = "word" if chunk.stop_string is not None else "eos"
        payload: Payload = {
            "index": 0,
            "content": text,
            "tokens": [] if self._only_read else list(chunk.token_ids),
            "stop": True,
            "model": self._model,
            "tokens_predicted": 0 if self._only_read else metrics.completion_tokens,
            "tokens_evaluated": metrics.prompt_tokens,
            "has_new_line": self._new_line or "\n" in text,
            "truncated": False,
            "stop_type": "limit" if limited else stopped,
            "stopping_word": chunk.stop_string or "",
            "tokens_cached": metrics.prompt_tokens + metrics.completion_tokens,
            "timings": _timings(metrics),
        }
        return payload if self._chosen is None else _chosen(payload, self._chosen)


def _timings(metrics: Metrics) -> Payload:
    """Milliseconds, and tokens per second."""
    read = metrics.prompt_tokens - metrics.cached_tokens
    written = metrics.completion_tokens
    read_rate, write_rate = metrics.prefill_tok_s or 0.0, metrics.decode_tok_s or 0.0
    read_ms = 1000 * read / read_rate if read_rate else 0.0
    write_ms = 1000 * (written - 1) / write_rate if write_rate else 0.0
    return {
        "cache_n": metrics.cached_tokens,
        "prompt_n": read,
        "prompt_ms": read_ms,
        "prompt_per_token_ms": read_ms / read if read else 0.0,
        "prompt_per_second": read_rate,
        "predicted_n": written,
        "predicted_ms": write_ms,
        "predicted_per_token_ms": write_ms / written if written else 0.0,
        "predicted_per_second": write_rate,
    }


def _chosen(payload: Payload, names: Sequence[str]) -> Payload:
    """The fields of these names; ``timings/prompt_n`` is one within another."""
    found: Payload = {}
    for name in names:
        value: Any = payload
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found
