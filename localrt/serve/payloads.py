"""From chunks to the objects of OpenAI's protocol: choices, deltas, log-probabilities, usage.

Plain dictionaries. It does not know requests, HTTP, or where chunks come from.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from localrt.engine.types import Chunk, Metrics, TokenLogprob
from localrt.models.tokenizers import Tokenizer
from localrt.version import __version__

__all__ = [
    "Envelope",
    "chat_logprobs",
    "completion_logprobs",
    "to_json",
    "tool_calls",
    "usage",
]

# JSON knows no infinity; a token that cannot come has about this log-probability.
_LEAST_LOGPROB = -9999.0


def to_json(value: Any) -> bytes:
    """One line of ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


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
        "prompt_tokens_details": {"cached_tokens": sum(m.cached_tokens for m in found[::choices])},
    }


def tool_calls(chunk: Chunk, *, streamed: bool = False) -> list[dict[str, Any]]:
    """The calls that a last chunk asks for."""
    return [
        {
            **({"index": index} if streamed else {}),
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for index, call in enumerate(chunk.tool_calls)
    ]


def chat_logprobs(logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer) -> dict[str, Any]:
    """The ``logprobs`` of a chat's choice."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        spelled = tokenizer.token_bytes(token)
        return {
            "token": spelled.decode("utf-8", "replace"),
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(spelled),
        }

    content = [
        {
            **one(found.token_id, found.logprob),
            "top_logprobs": [one(token, logprob) for token, _, logprob in found.top],
        }
        for found in logprobs
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    logprobs: Sequence[TokenLogprob], tokenizer: Tokenizer, *, start: int = 0
) -> dict[str, Any]:
    """The ``logprobs`` of a text completion; offsets count characters from ``start``."""
    texts = [_text(tokenizer, found.token_id) for found in logprobs]
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(found.logprob, _LEAST_LOGPROB) for found in logprobs],
        "top_logprobs": [
            {
                _text(tokenizer, token): max(logprob, _LEAST_LOGPROB)
                # Of those that look the same the likeliest counts.
                for token, _, logprob in reversed(found.top)
            }
            for found in logprobs
        ],
        "text_offset": offsets,
    }


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
