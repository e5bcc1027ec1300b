"""From chunks to the objects of OpenAI's protocol: choices, deltas, log-probabilities, usage.

Plain dictionaries. Chat and text completions differ in their ``Shape`` only. It does not know HTTP,
or where chunks come from.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeAlias

from localrt.engine.types import Chunk, Metrics
from localrt.models.tokenizers import Tokenizer
from localrt.serve.calls import Call
from localrt.text.tools import as_message_calls
from localrt.version import __version__

__all__ = ["ChatShape", "Envelope", "Shape", "TextShape", "usage"]

Payload: TypeAlias = dict[str, Any]

# JSON knows no infinity; a token that cannot come has about this log-probability.
_LEAST_LOGPROB = -9999.0


class Envelope:
    """What all objects of one response have in common."""

    def __init__(self, kind: str, prefix: str, model: str) -> None:
        self.id = f"{prefix}-{uuid.uuid4().hex}"
        self._head = {
            "id": self.id,
            "object": kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"localrt-{__version__}",
        }

    def __call__(self, choices: Sequence[Mapping[str, Any]], **more: Any) -> dict[str, Any]:
        """The object with its choices."""
        return {**self._head, "choices": list(choices), **more}


def usage(metrics: Iterable[Metrics], prompts: int = 1) -> dict[str, Any]:
    """Tokens of a request whose answers had these final ``metrics``; each prompt counts once."""
    found = list(metrics)
    choices = max(1, len(found) // prompts)
    read = sum(m.prompt_tokens for m in found[::choices])
    written = sum(m.completion_tokens for m in found)
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "completion_tokens_details": {"reasoning_tokens": sum(m.thinking_tokens for m in found)},
        "prompt_tokens_details": {"cached_tokens": sum(m.cached_tokens for m in found[::choices])},
    }


class ChatShape:
    """How a chat completion looks."""

    kind, stream_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, tokenizer: Tokenizer, call: Call) -> None:
        self._tokenizer, self._call = tokenizer, call

    def whole(self, index: int, chunk: Chunk) -> Payload:
        """The choice of a finished answer."""
        message: Payload = {"role": "assistant", "content": chunk.text, "refusal": None}
        if chunk.tool_calls:
            message["content"] = chunk.text or None
            message["tool_calls"] = as_message_calls(chunk.tool_calls)
        return {
            "index": index,
            "message": message,
            "logprobs": self._shown(chunk),
            "finish_reason": chunk.finish_reason,
        }

    def first(self, index: int) -> list[Payload]:
        """What a stream says of a choice before its text."""
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def delta(self, index: int, chunk: Chunk) -> list[Payload]:
        """What a stream says of a chunk: nothing, or choices."""
        found = []
        if chunk.text or chunk.logprobs:
            found.append(self._delta(index, {"content": chunk.text}, logprobs=self._shown(chunk)))
        if chunk.tool_calls:
            calls = as_message_calls(chunk.tool_calls)
            numbered = [{"index": number, **call} for number, call in enumerate(calls)]
            found.append(self._delta(index, {"tool_calls": numbered}))
        if chunk.finish_reason is not None:
            found.append(self._delta(index, {}, finish_reason=chunk.finish_reason))
        return found

    def _delta(self, index: int, delta: Payload, **more: Any) -> Payload:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def _shown(self, chunk: Chunk) -> Payload | None:
        if not self._call.logprobs:
            return None
        content = [
            {
                **self._token(found.token_id, found.logprob),
                "top_logprobs": [self._token(token, logprob) for token, _, logprob in found.top],
            }
            for found in chunk.logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> Payload:
        spelled = self._tokenizer.token_bytes(token)
        return {
            "token": spelled.decode("utf-8", "replace"),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(spelled),
        }


class TextShape:
    """How a text completion looks. Methods as of ``ChatShape``."""

    kind, stream_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, tokenizer: Tokenizer, call: Call) -> None:
        self._tokenizer, self._call = tokenizer, call
        self._lengths: dict[int, int] = {}  # of the texts so far, for offsets

    def whole(self, index: int, chunk: Chunk) -> Payload:
        """The choice of a finished answer."""
        echo = "" if self._call.echo is None else self._call.echo[index]
        return self._choice(index, chunk, echo + chunk.text)

    def first(self, index: int) -> list[Payload]:
        """The prompt, where it is to be shown."""
        if self._call.echo is None:
            return []
        text = self._call.echo[index]
        return [{"index": index, "text": text, "logprobs": None, "finish_reason": None}]

    def delta(self, index: int, chunk: Chunk) -> list[Payload]:
        """A choice for every chunk."""
        return [self._choice(index, chunk, chunk.text)]

    def _choice(self, index: int, chunk: Chunk, text: str) -> Payload:
        return {
            "index": index,
            "text": text,
            "logprobs": self._shown(index, chunk) if self._call.logprobs else None,
            "finish_reason": chunk.finish_reason,
        }

    def _shown(self, index: int, chunk: Chunk) -> Payload:
        texts = [self._text(found.token_id) for found in chunk.logprobs]
        start = self._lengths.get(index, 0)  # offsets count characters
        *offsets, self._lengths[index] = accumulate(map(len, texts), initial=start)
        return {
            "tokens": texts,
            "token_logprobs": [max(found.logprob, _LEAST_LOGPROB) for found in chunk.logprobs],
            "top_logprobs": [
                {
                    self._text(token): max(logprob, _LEAST_LOGPROB)
                    # Of those that look the same the likeliest counts.
                    for token, _, logprob in reversed(found.top)
                }
                for found in chunk.logprobs
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


Shape: TypeAlias = ChatShape | TextShape
