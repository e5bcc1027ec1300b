"""Renders probes with a chat template: conversations with names, texts and ids found nowhere else.

Knows what a probe looks like, but not what the text around it tells.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from localrt.common.errors import TemplateError

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""Messages, tools, and whether the beginning of an answer is added; it may raise TemplateError."""
FIRST, _SECOND = "zq_alpha", "zq_beta"
"""The name of the tool that is called."""
KEY, VALUE = "zqa", "zvc"
"""The argument of calls in probes."""
TEXT = "Ztext zq¶"
"""The text of an answer in probes."""
_SECONDS = 10.0  # for all probes; a usual template takes a hundredth of it
_USER = "Zuser zq¶"
_ARGUMENTS = {KEY: VALUE}


def _tool(name: str) -> dict[str, object]:
    properties = {
        "zqa": {"type": "string", "description": "A word."},
        "zqc": {"type": "integer", "description": "A count."},
    }
    parameters = {"type": "object", "properties": properties, "required": ["zqa"]}
    return {
        "type": "function",
        "function": {"name": name, "description": "A probe.", "parameters": parameters},
    }


TOOLS = (_tool(FIRST), _tool(_SECOND))
"""The probes' tools."""


class UnreadableError(Exception):
    """A template writes calls in an unknown way."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Renders probes with a template: all results are the text after the user's message.

    ``prompt`` is the beginning of an answer, ``plain`` the answer ``TEXT``. ``as_text`` passes the
    arguments of calls as JSON text, ``empty`` is the content beside calls without text.
    """

    render: Render
    until: float
    prompt: str = ""
    plain: str = ""
    as_text: bool = False
    call_id: str = "zid0call0"  # nine characters, as Mistral's templates want
    empty: str | None = ""

    @classmethod
    def of(cls, render: Render) -> Probes:
        """Start probing ``render``.

        Raises:
            TemplateError: it refuses the simplest probes.
            UnreadableError: the user's message is missing in its text.
        """
        first = cls(render, time.monotonic() + _SECONDS)
        return cls(render, first.until, first._behind_user(None), first.message(TEXT))

    def call(self, text: str = "", **fields: object) -> str:
        """Render an answer with a call."""
        arguments = json.dumps(_ARGUMENTS) if self.as_text else _ARGUMENTS
        function = {"name": FIRST, "arguments": arguments}
        made = {"id": self.call_id, "type": "function", "function": function}
        return self.message(text or self.empty, tool_calls=[made], **fields)

    def written_call(self) -> tuple[str, bool]:
        """Render one call in the first form that the template takes; empty if it writes none.

        Also says whether arguments have to be passed as JSON text.
        """
        forms = product(("", None), (False, True), (self.call_id, f"functions.{FIRST}:0"))
        for empty, as_text, call_id in forms:
            form = replace(self, empty=empty, as_text=as_text, call_id=call_id)
            try:
                text = form.call()
            except (TemplateError, UnreadableError):
                continue
            if FIRST in text and VALUE in text and f"{{'{KEY}'" not in text:
                return text, as_text
        return "", False

    def message(self, text: str | None, **fields: object) -> str:
        """Render an answer with this text."""
        return self._behind_user({"role": "assistant", "content": text, **fields})

    def _behind_user(self, answer: Mapping[str, object] | None) -> str:
        if time.monotonic() > self.until:
            raise UnreadableError("the template takes too long")
        messages: list[Mapping[str, object]] = [{"role": "user", "content": _USER}]
        if answer is not None:
            messages.append(answer)
        _, found, behind = self.render(messages, TOOLS, answer is None).rpartition(_USER)
        if not found:
            raise UnreadableError("the user's words are gone")
        return behind
