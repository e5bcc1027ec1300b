"""Renders probes with a chat template: conversations with names, texts and ids found nowhere else.

Knows what a probe looks like, but not what the text around it tells.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.common.errors import TemplateError

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""Messages, tools, and whether the beginning of an answer is added; it may raise TemplateError."""
ProbeCall = tuple[str, Mapping[str, Any]]
"""A call: the name and the arguments."""
FIRST, SECOND = "zq_alpha", "zq_beta"
"""The names of the probes' tools."""
TEXT = "Ztext zq¶"
"""The text of an answer in probes."""
IDS = ("zid0call0", "zid1call1")
"""The ids of calls; nine characters, as Mistral's templates want."""
_SECONDS = 10.0  # for all probes; a usual template takes a hundredth of it
_USER = "Zuser zq¶"


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


TOOLS = (_tool(FIRST), _tool(SECOND))
"""The probes' tools."""


class UnreadableError(Exception):
    """A template writes calls in an unknown way."""


@dataclass(frozen=True, slots=True)
class Probes:
    """Renders probes with a template: all results are the text after the user's message.

    ``prompt`` is the beginning of an answer, ``plain`` the answer ``TEXT``. ``as_text`` passes the
    arguments of calls as JSON text, ``id_form`` is the form of their ids, ``empty`` the content
    beside calls without text.
    """

    render: Render
    until: float
    prompt: str = ""
    plain: str = ""
    as_text: bool = False
    id_form: str = ""
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

    def calls(self, *calls: ProbeCall, text: str = "", **fields: object) -> str:
        """Render an answer with these calls."""
        made = [self._call(index, *call) for index, call in enumerate(calls)]
        return self.message(text or self.empty, tool_calls=made, **fields)

    def optional(self, *calls: ProbeCall, text: str = "") -> str:
        """Render ``calls``; empty if the template refuses them."""
        try:
            return self.calls(*calls, text=text)
        except TemplateError:
            return ""

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

    def _call(self, index: int, name: str, arguments: Mapping[str, object]) -> dict[str, Any]:
        call_id = self.id_form.format(name=name, index=index) or IDS[index]
        value = json.dumps(arguments, ensure_ascii=False) if self.as_text else arguments
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": value}}
