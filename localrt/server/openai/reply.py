"""From chunks to OpenAI's chat and text completions: choices, deltas, log-probabilities, usage.

The two differ in their ``Shape`` only. It does not know HTTP, or where chunks come from.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import isnan
from typing import Any, TypeAlias

from localrt.chat_format.messages import as_message_calls
from localrt.chat_format.thinking import ThoughtStream, parted
from localrt.common.version import __version__
from localrt.engine.types import Chunk, Metrics
from localrt.server.errors import ApiError, error_body
from localrt.server.functions import text_argument
from localrt.server.openai.calls import Generation
from localrt.server.replies import (
    EVENT_STREAM,
    Payload,
    TokenBytes,
    event,
)

_DONE = b"data: [DONE]\n\n"
# JSON knows no infinity; a token that cannot come has about this log-probability.
_LEAST_LOGPROB = -9999.0


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

    def __init__(self, tokenizer: TokenBytes, call: Generation) -> None:
        self._tokenizer, self._call = tokenizer, call
        self._streams: dict[int, ThoughtStream] = {}

    def whole(self, index: int, chunk: Chunk) -> Payload:
        """The choice of a finished answer."""
        thinking, text = parted(chunk.text)
        message: Payload = {"role": "assistant", "content": text, "refusal": None}
        if thinking:
            message["reasoning_content"] = thinking
        if chunk.tool_calls:
            message["content"] = text or None
            message |= self._calls(chunk)
        return {
            "index": index,
            "message": message,
            "logprobs": self._shown(chunk),
            "finish_reason": self._reason(chunk),
        }

    def first(self, index: int) -> list[Payload]:
        """What a stream says of a choice before its text."""
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def idle(self) -> Payload:
        """What a stream says while there is nothing new."""
        return self._delta(0, {})

    def delta(self, index: int, chunk: Chunk) -> list[Payload]:
        """What a stream says of a chunk: nothing, or choices."""
        found = []
        stream = self._streams.setdefault(index, ThoughtStream())
        thinking, text = stream.push(chunk.text, last=chunk.finish_reason is not None)
        if thinking:
            found.append(self._delta(index, {"reasoning_content": thinking}))
        if text or chunk.logprobs:
            found.append(self._delta(index, {"content": text}, logprobs=self._shown(chunk)))
        if chunk.tool_calls:
            calls = self._calls(chunk)
            if "tool_calls" in calls:
                numbered = enumerate(calls["tool_calls"])
                calls = {"tool_calls": [{"index": number, **call} for number, call in numbered]}
            found.append(self._delta(index, calls))
        if chunk.finish_reason is not None:
            found.append(self._delta(index, {}, finish_reason=self._reason(chunk)))
        return found

    def _calls(self, chunk: Chunk) -> Payload:
        """The field of a message with the calls of a chunk."""
        calls = as_message_calls(chunk.tool_calls)
        if self._call.legacy:
            return {"function_call": calls[0]["function"]}
        for call in calls:
            function, known = call["function"], self._call.known.get(call["function"]["name"])
            if known is not None and known.type == "custom":
                text = text_argument(function["arguments"])
                call |= {"type": "custom", "custom": {"name": known.name, "input": text}}
                del call["function"]
        return {"tool_calls": calls}

    def _reason(self, chunk: Chunk) -> str | None:
        legacy = self._call.legacy and chunk.finish_reason == "tool_calls"
        return "function_call" if legacy else chunk.finish_reason

    def _delta(self, index: int, delta: Payload, **more: Any) -> Payload:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def _shown(self, chunk: Chunk) -> Payload | None:
        if not self._call.logprobs:
            return None
        return {"content": token_payloads(self._tokenizer, chunk), "refusal": None}


def token_payloads(tokenizer: TokenBytes, chunk: Chunk) -> list[Payload]:
    """The log-probability of each token of ``chunk``, with its alternatives."""

    def one(token: int, logprob: float) -> Payload:
        spelled = tokenizer.token_bytes(token)
        return {
            "token": spelled.decode("utf-8", "replace"),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(spelled),
        }

    return [
        {
            **one(found.token_id, found.logprob),
            "top_logprobs": [one(token, logprob) for token, _, logprob in found.top],
        }
        for found in chunk.logprobs
    ]


class TextShape:
    """How a text completion looks. Methods as of ``ChatShape``."""

    kind, stream_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, tokenizer: TokenBytes, call: Generation) -> None:
        self._tokenizer, self._call = tokenizer, call
        self._lengths: dict[int, int] = {}  # of the texts so far, for offsets

    def whole(self, index: int, chunk: Chunk) -> Payload:
        """The choice of a finished answer."""
        return self._choice(index, chunk)

    def first(self, index: int) -> list[Payload]:
        """Nothing: a prompt that is to be shown is the first chunk."""
        return []

    def idle(self) -> Payload:
        """A choice without text."""
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": None}

    def delta(self, index: int, chunk: Chunk) -> list[Payload]:
        """A choice for every chunk."""
        return [self._choice(index, chunk)]

    def _choice(self, index: int, chunk: Chunk) -> Payload:
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": self._shown(index, chunk) if self._call.logprobs else None,
            "finish_reason": chunk.finish_reason,
        }

    def _shown(self, index: int, chunk: Chunk) -> Payload:
        """Of every token; the first of a prompt has no number, nor alternatives."""
        shown = list(chunk.logprobs)
        if self._call.echo and chunk.end_logprob is not None:
            # Who scores prompts takes away as many tokens as were to be written.
            shown.append(chunk.end_logprob)
        texts = [self._text(found.token_id) for found in shown]
        lengths = [len(text) for text in texts]
        if shown and isnan(shown[0].logprob) and not chunk.text.startswith(texts[0]):
            lengths[0] = 0  # a token that begins every text
        start = self._lengths.get(index, 0)  # offsets count characters
        *offsets, self._lengths[index] = accumulate(lengths, initial=start)
        return {
            "tokens": texts,
            "token_logprobs": [
                None if isnan(found.logprob) else max(found.logprob, _LEAST_LOGPROB)
                for found in shown
            ],
            "top_logprobs": [
                None
                if isnan(found.logprob)
                else {
                    self._text(token): max(logprob, _LEAST_LOGPROB)
                    # Of those that look the same the likeliest counts.
                    for token, _, logprob in reversed(found.top)
                }
                for found in shown
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")


Shape: TypeAlias = ChatShape | TextShape


class Completion:
    """The response to a ``call``, whose choices look as ``shape`` says. See ``Reply``."""

    media_type = EVENT_STREAM

    def __init__(self, shape: Shape, call: Generation, model: str) -> None:
        self._shape, self._call = shape, call
        self._head = {
            "id": f"{shape.prefix}-{uuid.uuid4().hex}",
            "object": shape.stream_kind if call.stream else shape.kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"localrt-{__version__}",
        }
        self._usage: Payload = {"usage": None} if call.include_usage else {}
        self._ends: dict[int, Metrics] = {}

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        """All choices, and what they took."""
        choices = [self._shape.whole(index, chunk) for index, chunk in enumerate(chunks)]
        counts = usage([chunk.metrics for chunk in chunks], len(self._call.prompts))
        return {**self._head, "choices": choices, "usage": counts}

    def begin(self) -> Iterator[bytes]:
        """The role, or the prompt, of each choice."""
        for index in range(len(self._call.prompts) * self._call.choices):
            yield from self._events(self._shape.first(index))

    def alive(self) -> bytes:
        """A choice without anything new: some clients count events, not comments."""
        return b"".join(self._events([self._shape.idle()]))

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """An event for each kind of content in it."""
        if chunk.finish_reason is not None:
            self._ends[index] = chunk.metrics
        yield from self._events(self._shape.delta(index, chunk))

    def end(self) -> Iterator[bytes]:
        """What the choices took, if that is wanted."""
        if self._call.include_usage:
            metrics = [self._ends[index] for index in sorted(self._ends)]
            counts = usage(metrics, len(self._call.prompts))
            yield event({**self._head, "choices": [], "usage": counts})
        yield _DONE

    def failed(self, error: ApiError) -> Iterator[bytes]:
        """An error in place of a choice."""
        yield event(error_body(error))

    def _events(self, choices: Sequence[Payload]) -> Iterator[bytes]:
        for choice in choices:
            yield event({**self._head, "choices": [choice], **self._usage})
