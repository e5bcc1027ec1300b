"""A model that wants to say a text, and says it as far as it is let: what binds it shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import localrt
from localrt.chat_format.chat_template import ChatTemplate, MessageTemplate
from localrt.engine.batch.sequence import generate
from localrt.engine.protocol import EngineSession
from localrt.engine.types import Chunk
from localrt.service.requests import RequestBuilder
from tests.inside import core_of

__all__ = ["answer_to", "chunks_of", "with_template"]

ASK = [{"role": "user", "content": "?"}]


class _Wishing(EngineSession):
    """Wants the next of ``wishes`` until it has come; other tokens that come change nothing."""

    tokens: list[int] = []  # noqa: RUF012  an attribute, not a property
    nbytes = 0

    def __init__(self, wishes: Sequence[int], prompt: int, vocab: int) -> None:
        self.tokens = []
        self.capacity = 1 << 16
        self._wishes, self._prompt, self._vocab = list(wishes), prompt, vocab

    def extend(
        self, tokens: Sequence[int], *, check: Any = None, on_progress: Any = None
    ) -> np.ndarray:
        for token in tokens:
            self.tokens.append(token)
            if len(self.tokens) > self._prompt and self._wishes[:1] == [token]:
                del self._wishes[0]
        logits = np.zeros(self._vocab, np.float32)
        logits[self._wishes[0]] = 10.0
        return logits

    def trim(self, length: int) -> int:
        return 0

    def close(self) -> None:
        pass


def with_template(model: localrt.Model, template: MessageTemplate | str) -> RequestBuilder:
    """What makes the requests of ``model``, as if it came with another chat template."""
    shown = ChatTemplate(template) if isinstance(template, str) else template
    parts = core_of(model).requests._parts
    return RequestBuilder(replace(parts, template=shown, ctx=1 << 16), {})


def chunks_of(
    requests: RequestBuilder,
    wish: str,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    messages: Any = ASK,
    **options: Any,
) -> list[Chunk]:
    """The answer if the model wants to say ``wish`` and then to end."""
    given = {"draft": "off", "temperature": 0, **options}
    request = requests.make(messages, tools=tools, **given)
    tokenizer = requests.tokenizer
    (end, *_) = sorted(tokenizer.eos_ids)
    wishes = [*tokenizer.encode(wish, add_special=False, parse_special=True), end]
    session = _Wishing([*wishes, *[end] * 100], len(request.prompt), tokenizer.vocab_size)
    return list(generate(session, tokenizer, request))


def answer_to(
    requests: RequestBuilder, wish: str, **given: Any
) -> tuple[str, list[Any], str | None]:
    """``chunks_of`` as a text, its calls, and why it ended."""
    chunks = chunks_of(requests, wish, **given)
    last = chunks[-1]
    calls = [(call.name, call.arguments) for call in last.tool_calls]
    return "".join(chunk.text for chunk in chunks), calls, last.finish_reason
