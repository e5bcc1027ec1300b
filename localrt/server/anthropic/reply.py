"""Turn chunks into Anthropic's message: its blocks, whole or as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence

from localrt.chat_format.messages import arguments_of
from localrt.chat_format.thinking import ThoughtStream, parted
from localrt.engine.types import Chunk, Metrics, ToolCall
from localrt.server.dialect import Generation, Payload, Reply, TokenBytes, event
from localrt.server.errors import ApiError, anthropic_error

_SIGNATURE = "localrt"  # clients send it back with a thought, and it is not checked


class MessageReply(Reply):
    """A message."""

    def __init__(self, call: Generation, model: str, tokenizer: TokenBytes) -> None:
        super().__init__(call, model, tokenizer)
        self._head: Payload = {
            "id": f"msg_{uuid.uuid4().hex[:24]}",
            "type": "message",
            "role": "assistant",
            "model": model,
        }
        self._thoughts = ThoughtStream()
        self._begun = False
        self._open = ""  # the type of the block in progress
        self._index = -1  # the index of that block

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        (chunk,) = chunks
        thinking, text = parted(chunk.text)
        content: list[Payload] = []
        if thinking:
            content.append({"type": "thinking", "thinking": thinking, "signature": _SIGNATURE})
        if text:
            content.append({"type": "text", "text": text})
        content += [_call_block(call, arguments_of(call)) for call in chunk.tool_calls]
        return {
            **self._head,
            "content": content,
            **self._stop(chunk),
            "usage": {**_read(chunk.metrics), **_written(chunk.metrics)},
        }

    def alive(self) -> bytes:
        return _event("ping")

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """Return events of blocks that begin, grow and end; the last chunk has the stop reason."""
        if not self._begun:
            self._begun = True
            message = {
                **self._head,
                "content": [],
                "stop_reason": None,
                "stop_sequence": None,
                "usage": {**_read(chunk.metrics), "output_tokens": 0},
            }
            yield _event("message_start", message=message)
            yield _event("ping")
        ends = chunk.finish_reason is not None
        thinking, text = self._thoughts.push(chunk.text, last=ends)
        if thinking:
            empty = {"type": "thinking", "thinking": "", "signature": ""}
            yield from self._grow(empty, {"type": "thinking_delta", "thinking": thinking})
        if text:
            yield from self._grow(
                {"type": "text", "text": ""}, {"type": "text_delta", "text": text}
            )
        for call in chunk.tool_calls:
            yield from self._close()
            pieces = {"type": "input_json_delta", "partial_json": json.dumps(arguments_of(call))}
            yield from self._grow(_call_block(call, {}), pieces)
        if ends:
            yield from self._close()
            yield _event("message_delta", delta=self._stop(chunk), usage=_written(chunk.metrics))

    def end(self) -> Iterator[bytes]:
        yield _event("message_stop")

    def failed(self, error: ApiError) -> Iterator[bytes]:
        yield event(anthropic_error(error), "error")

    def _grow(self, empty: Payload, delta: Payload) -> Iterator[bytes]:
        """Return a ``delta`` of the open block, which has the type of ``empty``."""
        if self._open != empty["type"]:
            yield from self._close()
            self._open, self._index = empty["type"], self._index + 1
            yield _event("content_block_start", index=self._index, content_block=empty)
        yield _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> Iterator[bytes]:
        """End the open block, if there is one."""
        if self._open == "thinking":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield _event("content_block_delta", index=self._index, delta=delta)
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _stop(self, chunk: Chunk) -> Payload:
        """Return why the answer ended."""
        options, matched = self.call.options, chunk.stop_string
        if chunk.finish_reason == "tool_calls":
            reason, matched = "tool_use", None
        elif chunk.finish_reason == "length":
            room = chunk.metrics.completion_tokens < options["max_tokens"]
            reason = "model_context_window_exceeded" if room else "max_tokens"
        elif matched is not None and matched in options.get("stop", ()):
            reason = "stop_sequence"
        else:
            reason, matched = "end_turn", None
        return {"stop_reason": reason, "stop_sequence": matched}


def _event(name: str, **fields: object) -> bytes:
    return event({"type": name, **fields}, name)


def _call_block(call: ToolCall, given: object) -> Payload:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _read(metrics: Metrics) -> Payload:
    cached = metrics.cached_tokens
    return {
        "input_tokens": metrics.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
    }


def _written(metrics: Metrics) -> Payload:
    details = {"thinking_tokens": metrics.thinking_tokens}
    return {"output_tokens": metrics.completion_tokens, "output_tokens_details": details}
