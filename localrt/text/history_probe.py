"""What a chat template can show of a conversation, found by histories of ours that it renders.

Each situation is one short history: the template can show it if it takes it and writes all of its
texts in their order. Asked when a history needs to know, and then kept.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from localrt.errors import TemplateError
from localrt.text.history_fit import RULES, Situation, calls_of, rules_first, text_of
from localrt.text.probing import FIRST, SECOND
from localrt.text.thinking import split_thinking

__all__ = ["AS_GIVEN", "CallForm", "HistoryProbe", "left_out"]

_Message: TypeAlias = Mapping[str, Any]
_ID = "call_zq_zq_zq_{}"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template wants calls: with these ``ids``, and as ``empty`` content beside them."""

    ids: str = ""
    empty: str | None = ""

    def shaped(self, messages: Sequence[_Message]) -> list[dict[str, Any]]:
        """``messages`` with such ids, those of results included."""
        ids: dict[str, str] = {}
        found: list[dict[str, Any]] = []
        for message in messages:
            message = dict(message)
            if calls := message.get("tool_calls"):
                message["tool_calls"] = [self._call(call, ids) for call in calls]
                message["content"] = message.get("content") or self.empty
            if (given := str(message.get("tool_call_id"))) in ids:
                message["tool_call_id"] = ids[given]
            found.append(message)
        return found

    def _call(self, call: Any, ids: dict[str, str]) -> Any:
        given = call.get("id") if isinstance(call, Mapping) else None
        if not self.ids or not isinstance(given, str):
            return call
        name = call["function"]["name"]
        digest = hashlib.sha256(given.encode("utf-8", "replace")).hexdigest()[:9]
        short = given if re.fullmatch("[a-zA-Z0-9]{9}", given) else digest
        ids[given] = self.ids.format(name=name, index=len(ids), short=short)
        return {**call, "id": ids[given]}


AS_GIVEN = CallForm()
_FORMS = (
    AS_GIVEN,
    CallForm(ids="{short}"),  # Mistral's
    CallForm(ids="functions.{name}:{index}"),  # Kimi's
    CallForm(empty=None),  # DeepSeek's
)


def left_out(messages: Sequence[_Message], written: str, *, calls: bool = True) -> list[_Message]:
    """The messages of which something is not in ``written``, a prompt, in its place; some of them.

    Thoughts may be left out. What the system says at the beginning may stand anywhere. Without
    ``calls``, only texts are looked for.
    """
    head = rules_first(messages)
    missing: list[_Message] = []
    at = start = 0
    before = ""  # the role
    for number, message in enumerate(messages):
        role, text = message["role"], text_of(message)
        if number == head:
            at = 0
        if number >= head and (role != "tool" or before != "tool"):
            start = at  # results may stand in the order of their calls
        if role == "assistant":
            text = split_thinking(text).answer
        for said in (text, *(calls_of(message) if calls else ())):
            end = _end_of(said, written, at)
            if end < 0 and at > start:
                end = _end_of(said, written, start)
            if end < 0:
                missing.append(message)
                break
            at = max(at, end)
        before = role
        if len(missing) == _ENOUGH:
            break
    return missing


_ENOUGH = 16  # of what is missing; each may have been looked for in all that is written
_QUOTED = re.compile(r"\\u[0-9a-fA-F]{4}|\\.|[^a-zA-Z0-9]+", re.DOTALL)
_COMPARED = 1000  # characters of a text that is quoted in a way of its own
_NEAR = 1 << 16  # characters in which a text is looked for first: quoted ones cost little


def _end_of(text: str, written: str, start: int) -> int:
    """Where ``text`` ends behind ``start``, or ``start`` if it is quoted there; -1: it is not."""
    text = text.strip()
    for quotes, most in ((False, _NEAR), (True, _NEAR), (False, len(written))):
        form = json.dumps(text, ensure_ascii=False)[1:-1] if quotes else text
        if (found := written.find(form, start, start + len(form) + most)) >= 0:
            return found + len(form)
    words = re.sub("[^a-zA-Z0-9]+", "", text[:_COMPARED])
    near = written[start : start + 7 * _COMPARED]
    return start if words and words in _QUOTED.sub("", near) else -1


class HistoryProbe:
    """What ``render`` can show, which writes messages and may raise ``TemplateError``.

    ``source`` is the template's: roles that it names are those that its model knows.
    """

    def __init__(self, render: Callable[[Sequence[_Message]], str], source: str) -> None:
        self._render = render
        self._source = source
        self._known: dict[Situation, bool] = {}
        self._form = AS_GIVEN

    @property
    def form(self) -> CallForm:
        """How the template wants calls."""
        self.can(Situation.CALL)
        return self._form

    def can(self, situation: Situation) -> bool:
        """Whether the template can show it."""
        if situation not in self._known:
            self._known[situation] = self._finds(situation)
        return self._known[situation]

    def knows_developers(self) -> bool:
        """Whether the template names the role; where it writes any, the model knows none of it."""
        return re.search(r"""(["'])developer\1""", self._source) is not None

    def shows_alone(self, message: _Message) -> bool:
        """Whether the template shows what ``message`` says where everything else is usual."""
        role, said = message["role"], {**_user(0), **message}
        if role in RULES:
            return self._shows([{**said, "role": "system"}, _user(1)])
        if role == "assistant":
            return self._shows([_user(0), {"role": role, "content": said["content"]}, _user(1)])
        if role != "tool" or not self.can(Situation.CALL):
            return self._shows([{**said, "role": "user"}])
        return self._shows([_user(0), _call(0), {**_result(0), "content": said["content"]}])

    def _finds(self, situation: Situation) -> bool:
        if situation is Situation.DEVELOPER and not self.knows_developers():
            return False
        if situation is Situation.CALL:
            found = (form for form in _FORMS if self._show_all(situation, form))
            form = next(found, None)
            self._form = form or AS_GIVEN
            return form is not None
        return self._show_all(situation, self.form)

    def _show_all(self, situation: Situation, form: CallForm) -> bool:
        return all(self._shows(history, form) for history in _PROBES[situation])

    def _shows(self, history: Sequence[_Message], form: CallForm | None = None) -> bool:
        try:
            written = self._render((form or self._form).shaped(history))
        except TemplateError:
            return False
        return not left_out(history, written)


def _says(role: str, number: int) -> dict[str, Any]:
    return {"role": role, "content": f"Zq{role}{number} says."}


def _user(number: int) -> dict[str, Any]:
    return _says("user", number)


def _call(*numbers: int, text: str = "") -> dict[str, Any]:
    calls = []
    for number in numbers:
        asked = {"name": (FIRST, SECOND)[number], "arguments": {"zqa": f"zqvalue{number}"}}
        calls.append({"id": _ID.format(number), "type": "function", "function": asked})
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _result(number: int) -> dict[str, Any]:
    name = (FIRST, SECOND)[number]
    return {**_says("tool", number), "tool_call_id": _ID.format(number), "name": name}


def _probes() -> dict[Situation, tuple[list[dict[str, Any]], ...]]:
    s0, s1, d0, d1, a0, a1 = (
        _says(role, number) for role in ("system", "developer", "assistant") for number in (0, 1)
    )
    u0, u1, u2 = map(_user, range(3))
    c0, c1, r0, r1 = _call(0), _call(1), _result(0), _result(1)
    both, with_words = _call(0, 1), _call(0, text="Zqwords say.")
    return {
        Situation.SYSTEM: ([s0, u0, a0, u1],),
        Situation.SYSTEM_ALONE: ([s0],),
        Situation.SYSTEMS: ([s0, s1, u0],),
        Situation.LATE_SYSTEM: ([u0, a0, s0, u1, a1, u2, s1], [u0, s0, a0, u1]),
        Situation.DEVELOPER: ([d0, u0, a0, d1, u1], [s0, d0, u0]),
        Situation.ASSISTANT_FIRST: ([a0, u0, a1, u1],),
        Situation.USERS: ([u0, u1, a0, u2],),
        Situation.ASSISTANTS: ([u0, a0, a1, u1],),
        Situation.EMPTY_ANSWER: ([u0, {**a0, "content": ""}, u1],),
        Situation.CALL: ([u0, c0, r0], [u0, c0, r0, c1, r1, a0, u1]),
        Situation.CALLS: ([u0, both, r0, r1], [u0, both, r0, r1, a0, u1]),
        Situation.WORDS_AND_CALL: ([u0, with_words, r0], [u0, with_words, r0, a0, u1]),
        Situation.CALL_WITHOUT_RESULT: ([u0, c0, u1, a0, u2],),
        Situation.RESULT_WITHOUT_CALL: ([u0, a0, r0, a1, u1], [r0, a0, u0]),
        Situation.USER_BEHIND_RESULT: ([u0, c0, r0, u1, a0, u2],),
    }


_PROBES = _probes()
