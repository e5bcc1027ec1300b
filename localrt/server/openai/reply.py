"""Converts chunks to OpenAI's completions: choices, deltas, log-probabilities, usage."""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from math import isnan

from starlette.requests import Request
from starlette.responses import Response

from localrt.chat_format.thinking import ThoughtStream, parted
from localrt.common.version import __version__
from localrt.engine.types import Chunk, Metrics
from localrt.server.dialect import (
    LEAST_LOGPROB,
    Endpoint,
    GenerationRequest,
    Payload,
    ResponseWriter,
    TokenBytes,
    event,
)
from localrt.server.generating import answer
from localrt.server.messages import text_argument
from localrt.server.openai.calls import CHAT, COMPLETION, chat_call, completion_call
from localrt.server.service import read_request

_DONE = b"data: [DONE]\n\n"


def usage(metrics: Iterable[Metrics], prompts: int = 1) -> dict[str, object]:
    """Return the token counts of a request from its final ``metrics``; each prompt counts once."""
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


class Completion(ResponseWriter):
    """A response with choices, whose form is defined by subclasses."""

    kind = stream_kind = prefix = ""

    def __init__(self, call: GenerationRequest, model: str, tokenizer: TokenBytes) -> None:
        super().__init__(call, model, tokenizer)
        self._head = {
            "id": f"{self.prefix}-{uuid.uuid4().hex}",
            "object": self.stream_kind if call.stream else self.kind,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"localrt-{__version__}",
        }
        self._usage: Payload = {"usage": None} if call.include_usage else {}
        self._ends: dict[int, Metrics] = {}

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        choices = [self.choice(index, chunk) for index, chunk in enumerate(chunks)]
        counts = usage([chunk.metrics for chunk in chunks], len(self.call.prompts))
        return {**self._head, "choices": choices, "usage": counts}

    def begin(self) -> Iterator[bytes]:
        for index in range(len(self.call.prompts) * self.call.choices):
            yield from self._events(self.first(index))

    def alive(self) -> bytes:
        """Return an empty choice as keep-alive, since some clients ignore comments."""
        return b"".join(self._events([self.idle()]))

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        if chunk.finish_reason is not None:
            self._ends[index] = chunk.metrics
        yield from self._events(self.pieces(index, chunk))

    def end(self) -> Iterator[bytes]:
        """Return the usage, if it was requested."""
        if self.call.include_usage:
            metrics = [self._ends[index] for index in sorted(self._ends)]
            counts = usage(metrics, len(self.call.prompts))
            yield event({**self._head, "choices": [], "usage": counts})
        yield _DONE

    def _events(self, choices: Sequence[Payload]) -> Iterator[bytes]:
        for choice in choices:
            yield event({**self._head, "choices": [choice], **self._usage})

    @abstractmethod
    def choice(self, index: int, chunk: Chunk) -> Payload:
        """Return the choice of a finished answer."""

    def first(self, index: int) -> list[Payload]:
        """Return what a stream sends for a choice before its text."""
        return []

    @abstractmethod
    def idle(self) -> Payload:
        """Return what a stream sends while there is nothing new."""

    @abstractmethod
    def pieces(self, index: int, chunk: Chunk) -> list[Payload]:
        """Return the choices that a stream sends for a chunk, if any."""


class ChatReply(Completion):
    """A chat completion."""

    kind, stream_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, call: GenerationRequest, model: str, tokenizer: TokenBytes) -> None:
        super().__init__(call, model, tokenizer)
        self._streams: dict[int, ThoughtStream] = {}

    def choice(self, index: int, chunk: Chunk) -> Payload:
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
        return [self._delta(index, {"role": "assistant", "content": ""})]

    def idle(self) -> Payload:
        return self._delta(0, {})

    def pieces(self, index: int, chunk: Chunk) -> list[Payload]:
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
        """Return the message field with a chunk's calls."""
        calls = [call.to_dict() for call in chunk.tool_calls]
        if self.call.legacy:
            return {"function_call": calls[0]["function"]}
        for call in calls:
            function, known = call["function"], self.call.known.get(call["function"]["name"])
            if known is not None and known.type == "custom":
                text = text_argument(function["arguments"])
                call |= {"type": "custom", "custom": {"name": known.name, "input": text}}
                del call["function"]
        return {"tool_calls": calls}

    def _reason(self, chunk: Chunk) -> str | None:
        legacy = self.call.legacy and chunk.finish_reason == "tool_calls"
        return "function_call" if legacy else chunk.finish_reason

    def _delta(self, index: int, delta: Payload, **more: object) -> Payload:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}

    def _shown(self, chunk: Chunk) -> Payload | None:
        if not self.call.logprobs:
            return None
        return {"content": self.logprobs(chunk), "refusal": None}


class TextReply(Completion):
    """A text completion; a prompt to be echoed is its first chunk."""

    kind, stream_kind, prefix = "text_completion", "text_completion", "cmpl"

    def __init__(self, call: GenerationRequest, model: str, tokenizer: TokenBytes) -> None:
        super().__init__(call, model, tokenizer)
        self._lengths: dict[int, int] = {}  # lengths of the texts so far, for offsets

    def idle(self) -> Payload:
        return {"index": 0, "text": "", "logprobs": None, "finish_reason": None}

    def pieces(self, index: int, chunk: Chunk) -> list[Payload]:
        return [self.choice(index, chunk)]

    def choice(self, index: int, chunk: Chunk) -> Payload:
        return {
            "index": index,
            "text": chunk.text,
            "logprobs": self._shown(index, chunk) if self.call.logprobs else None,
            "finish_reason": chunk.finish_reason,
        }

    def _shown(self, index: int, chunk: Chunk) -> Payload:
        """Return the log-probabilities; a prompt's first token has none, and no alternatives."""
        shown = list(chunk.logprobs)
        if self.call.echo and chunk.end_logprob is not None:
            # Clients that score prompts subtract the number of tokens they asked for.
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
                None if isnan(found.logprob) else max(found.logprob, LEAST_LOGPROB)
                for found in shown
            ],
            "top_logprobs": [
                None
                if isnan(found.logprob)
                else {
                    self._text(token): max(logprob, LEAST_LOGPROB)
                    # Of alternatives with the same text, the likeliest counts.
                    for token, _, logprob in reversed(found.top)
                }
                for found in shown
            ],
            "text_offset": offsets,
        }

    def _text(self, token: int) -> str:
        return self.tokenizer.token_bytes(token).decode("utf-8", "replace")


# -- endpoints -------------------------------------------------------------------------------------


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    asked = await read_request(request, CHAT)
    return await answer(asked, chat_call(asked.fields, asked.service.note_once), ChatReply)


async def completions(request: Request) -> Response:
    """Write on from a text."""
    asked = await read_request(request, COMPLETION)
    return await answer(asked, completion_call(asked.fields), TextReply)


ROUTES = (
    Endpoint("/v1/chat/completions", "POST", chat_completions),
    Endpoint("/v1/completions", "POST", completions),
)
