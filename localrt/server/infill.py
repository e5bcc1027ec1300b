"""Fill-in-the-middle for editors: llama.cpp's ``/infill`` and Mistral's completions.

A small dialect in one file: calls, reply and endpoints. Requests may also have OpenAI's fields.
Answers have llama.cpp's fields, as far as they apply.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from localrt.engine.types import Chunk, Metrics
from localrt.server.dialect import (
    Endpoint,
    GenerationRequest,
    Payload,
    ResponseWriter,
    TokenBytes,
    event,
)
from localrt.server.generating import answer
from localrt.server.messages import Fields
from localrt.server.openai.calls import SAMPLING, completion_call
from localrt.server.openai.reply import ChatReply
from localrt.server.request_schema import (
    STRING,
    TEXT,
    Field,
    RequestSchema,
    integer,
    list_of,
    nullable,
    number,
    object_of,
    required,
    shared,
)
from localrt.server.service import read_request

FIM = RequestSchema(
    {
        **SAMPLING,
        "prompt": required(STRING),
        "suffix": Field(TEXT),
        "random_seed": shared("seed")["seed"],
    }
)
_PART = object_of("text", text=STRING, filename=TEXT)
INFILL = RequestSchema(
    {
        **{name: row for name, row in SAMPLING.items() if name not in ("n", "stream_options")},
        "input_prefix": required(STRING),
        "input_suffix": required(STRING),
        "input_extra": Field(nullable(list_of(_PART, maxItems=1024))),
        "prompt": Field(TEXT),
        "n_predict": Field(integer(-2)),
        "n_indent": Field(integer(0)),
        "t_max_predict_ms": Field(number(-1, 1 << 31)),
        "response_fields": Field(nullable(list_of(STRING, maxItems=256))),
    }
)
_FILE = "tmp"  # llama.cpp's name for a file without a name


def fim_call(fields: Fields) -> GenerationRequest:
    """Return the call for Mistral's ``/v1/fim/completions``."""
    known = _known(fields, FIM)
    if known.get("seed") is None:
        known["seed"] = fields.get("random_seed")
    call = completion_call({**known, "suffix": None})
    return _filling(call, fields["prompt"], fields.get("suffix") or "")


def infill_call(fields: Fields) -> GenerationRequest:
    """Return the call for llama.cpp's ``/infill``."""
    known = _known(fields, INFILL)
    count = fields.get("n_predict")
    if count is not None:  # negative: no limit; 0: only process the prompt
        known["max_tokens"] = max(1, count) if count >= 0 else None
    before = fields["input_prefix"] + (fields.get("prompt") or "")
    call = completion_call({**known, "prompt": before})
    files = [
        (each.get("filename") or _FILE, each["text"]) for each in fields.get("input_extra") or ()
    ]
    lines: dict[str, Any] = {}
    if fields.get("n_indent"):
        lines["min_indent"] = fields["n_indent"]
    if (fields.get("t_max_predict_ms") or 0) > 0:
        lines["line_seconds"] = fields["t_max_predict_ms"] / 1000
    # Editors send all their text, without knowing the context length.
    options = {**call.options, **lines, "overflow": "drop_oldest"}
    call = replace(call, options=options)
    return _filling(call, before, fields["input_suffix"], files=files)


def _known(fields: Fields, schema: RequestSchema) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name in schema.table}


def _filling(call: GenerationRequest, prefix: str, suffix: str, **more: Any) -> GenerationRequest:
    prompts = [{"prompt": prefix, "suffix": suffix, **more}]
    return replace(call, prompts=prompts, request_class="interactive")


# -- answers ---------------------------------------------------------------------------------------


class InfillWriter(ResponseWriter):
    """The reply to a request with ``fields``."""

    def __init__(
        self,
        call: GenerationRequest,
        model: str,
        tokenizer: TokenBytes,
        *,
        fields: Mapping[str, Any],
    ) -> None:
        super().__init__(call, model, tokenizer)
        self._chosen = fields.get("response_fields")
        self._only_read = fields.get("n_predict") == 0
        self._new_line = False

    def whole(self, chunks: Sequence[Chunk]) -> Payload:
        (chunk,) = chunks
        return self._last(chunk)

    def alive(self) -> bytes:
        return event({"index": 0, "content": "", "tokens": [], "stop": False})

    def delta(self, index: int, chunk: Chunk) -> Iterator[bytes]:
        """Return a piece of the text; the last event has all fields except the earlier text."""
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

    def _last(self, chunk: Chunk) -> Payload:
        metrics, text = chunk.metrics, "" if self._only_read else chunk.text
        limited = chunk.finish_reason == "length"
        stopped = "word" if chunk.stop_string is not None else "eos"
        payload: Payload = {
            "index": 0,
            "content": text,
            "tokens": [] if self._only_read else list(chunk.token_ids),
            "stop": True,
            "model": self.model,
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
    """Return milliseconds and tokens per second."""
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
    """Select the fields with these names; ``timings/prompt_n`` is inside another."""
    found: Payload = {}
    for name in names:
        value: Any = payload
        for part in name.split("/"):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found


# -- endpoints -------------------------------------------------------------------------------------


async def infill(request: Request) -> Response:
    """Fill in the middle (llama.cpp)."""
    asked = await read_request(request, INFILL)
    reply = partial(InfillWriter, fields=asked.fields)
    return await answer(asked, infill_call(asked.fields), reply)


async def fim_completions(request: Request) -> Response:
    """Fill in the middle (Mistral)."""
    asked = await read_request(request, FIM)
    return await answer(asked, fim_call(asked.fields), ChatReply)


ROUTES = (
    Endpoint("/infill", "POST", infill),
    Endpoint("/v1/infill", "POST", infill),
    Endpoint("/v1/fim/completions", "POST", fim_completions),
)
