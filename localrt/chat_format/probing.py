"""What a chat template writes for messages of ours: the renders that its syntax is found from."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localrt.common.errors import TemplateError

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]], bool], str]
"""Messages, tools, and whether the beginning of an answer is added; it may raise TemplateError."""

Asked = tuple[str, Mapping[str, Any]]
"""A call: the name and the arguments."""

FIRST, SECOND = "zq_alpha", "zq_beta"
"""The names of the probes' tools."""

TEXT = "Ztext zq¶"
"""What an answer says in probes."""

IDS = ("zid0call0", "zid1call1")
"""The ids of calls; nine characters, as Mistral's templates want."""

_SECONDS = 10.0  # for all probes; those of a usual template take a hundredth
_USER = "Zuser zq¶"


def _tool(name: str) -> dict[str, Any]:
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
    """What a template writes follows no pattern that is known."""


@dataclass(frozen=True, slots=True)
class Written:
    """A template under probes: everything is what it writes behind the user's words.

    ``prompt`` is the beginning of an answer, ``plain`` an answer that is ``TEXT``. ``as_text`` and
    ``id_form`` say how it is given calls: with arguments as JSON text, and with ids of this form.
    """

    render: Render
    until: float
    prompt: str = ""
    plain: str = ""
    as_text: bool = False
    id_form: str = ""

    @classmethod
    def by(cls, render: Render) -> Written:
        """The probes of ``render``.

        Raises:
            TemplateError: it refuses the simplest of them.
            UnreadableError: what was said is not in what it writes.
        """
        first = cls(render, time.monotonic() + _SECONDS)
        return cls(render, first.until, first._behind_user(None), first.message(TEXT))

    def calls(self, *calls: Asked, text: str = "", **fields: Any) -> str:
        """An answer with these calls."""
        given = [self._call(index, *call) for index, call in enumerate(calls)]
        return self.message(text, tool_calls=given, **fields)

    def optional(self, *calls: Asked, text: str = "") -> str:
        """``calls``; nothing where the template refuses them."""
        try:
            return self.calls(*calls, text=text)
        except TemplateError:
            return ""

    def message(self, text: str, **fields: Any) -> str:
        """An answer with this text."""
        return self._behind_user({"role": "assistant", "content": text, **fields})

    def _behind_user(self, answer: Mapping[str, Any] | None) -> str:
        if time.monotonic() > self.until:
            raise UnreadableError("the template takes too long")
        messages: list[Mapping[str, Any]] = [{"role": "user", "content": _USER}]
        if answer is not None:
            messages.append(answer)
        _, found, behind = self.render(messages, TOOLS, answer is None).rpartition(_USER)
        if not found:
            raise UnreadableError("the user's words are gone")
        return behind

    def _call(self, index: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        call_id = self.id_form.format(name=name, index=index) or IDS[index]
        given = json.dumps(arguments, ensure_ascii=False) if self.as_text else arguments
        return {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
