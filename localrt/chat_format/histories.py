"""Rewrites histories that a chat template refuses or shows only in part.

A history is first rendered unchanged. If the template refuses it or leaves text out, the history is
rewritten for what the template can show. Short test histories find that out, one situation at a
time, so each message is treated in the same way in every turn and the beginning of a prompt stays
the same. No text is ever dropped: text that the template cannot show in its role becomes text of
the user or of the assistant.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from itertools import chain, takewhile
from typing import Any, TypeAlias

from localrt.chat_format.known_syntaxes import HERMES_CALL
from localrt.chat_format.messages import for_template
from localrt.chat_format.probing import FIRST, SECOND, TOOLS
from localrt.chat_format.templates.chat_template import MessageTemplate, Segment
from localrt.chat_format.thinking import THOUGHT_FIELDS, split_thinking
from localrt.common.errors import TemplateError

RULES = ("system", "developer")
"""The roles of messages that say how to answer."""
_NO_ANSWER = "(No answer.)"
_NO_QUESTION = "(The assistant begins.)"
_Message: TypeAlias = dict[str, Any]


class Situation(Enum):
    """A situation in a history that a chat template may or may not show."""

    DEVELOPER = auto()
    SYSTEM = auto()
    SYSTEM_ALONE = auto()
    SYSTEMS = auto()  # several in a row
    LATE_SYSTEM = auto()
    ASSISTANT_FIRST = auto()
    USERS = auto()
    ASSISTANTS = auto()
    EMPTY_ANSWER = auto()
    CALL = auto()
    CALLS = auto()  # several in a message
    WORDS_AND_CALL = auto()
    CALL_WITHOUT_RESULT = auto()
    RESULT_WITHOUT_CALL = auto()
    USER_BEHIND_RESULT = auto()


_ROWS = {"system": Situation.SYSTEMS, "user": Situation.USERS, "assistant": Situation.ASSISTANTS}
Can: TypeAlias = Callable[[Situation], bool]


def fitted(messages: Sequence[Mapping[str, object]], can: Can) -> list[_Message]:
    """Rewrite ``messages``, shaped by ``for_template``, so that ``can`` allows every situation."""
    return _in_turns(_with_calls(_with_rules(list(map(dict, messages)), can), can), can)


def rules_first(messages: Sequence[Mapping[str, object]]) -> int:
    """The number of system and developer messages at the beginning."""
    return sum(1 for _ in takewhile(lambda message: message["role"] in RULES, messages))


def text_of(message: Mapping[str, object]) -> str:
    """The text of a message; parts of its content are joined by new lines."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        texts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def calls_of(message: Mapping[str, Any]) -> list[str]:
    """The names of a message's calls, and the strings among their arguments."""
    found: list[str] = []
    for function in map(_function, message.get("tool_calls") or ()):
        given = function.get("arguments")
        values = given.values() if isinstance(given, Mapping) else ()
        found += [str(function.get("name")), *(each for each in values if isinstance(each, str))]
    return found


# -- system and developer ----------------------------------------------------------------------


def _with_rules(messages: list[_Message], can: Can) -> list[_Message]:
    if not can(Situation.DEVELOPER):
        renamed = {"developer": "system"}
        messages = [{**each, "role": renamed.get(each["role"], each["role"])} for each in messages]
    size = rules_first(messages)
    head, rest = messages[:size], messages[size:]
    if head and not can(Situation.SYSTEM if rest else Situation.SYSTEM_ALONE):
        first = [rest.pop(0)] if rest and rest[0]["role"] == "user" else []
        head = [{**_joined([*head, *first]), "role": "user"}]
    if any(message["role"] in RULES for message in rest) and not can(Situation.LATE_SYSTEM):
        rest = [_by_user(text_of(each)) if each["role"] in RULES else each for each in rest]
    return [*head, *rest]


# -- calls and results -------------------------------------------------------------------------


def _with_calls(messages: list[_Message], can: Can) -> list[_Message]:
    shown: list[_Message] = []
    at = 0
    while at < len(messages):
        message, first, at = messages[at], at, at + 1
        if calls := message.get("tool_calls"):
            while at < len(messages) and messages[at]["role"] == "tool":
                at += 1
            results = messages[first + 1 : at]
            cut = len(results) < len(calls) and at < len(messages)
            joins = first > 0 and shown[-1] is messages[first - 1] and _is_answer(shown[-1])
            if joins and not can(Situation.ASSISTANTS):
                message = _joined([shown.pop(), message])
            shown += _call(message, results, can, cut=cut)
        elif message["role"] == "tool" and not can(Situation.RESULT_WITHOUT_CALL):
            shown.append(_result(message))
        else:
            shown.append(message)
    return shown


def _call(message: _Message, results: list[_Message], can: Can, *, cut: bool) -> list[_Message]:
    """Rewrite a message with calls and their ``results``; ``cut``: some results are missing."""
    words = text_of(message).strip()
    apart = bool(words) and not can(Situation.WORDS_AND_CALL)
    if (
        not can(Situation.CALL)
        or (cut and not can(Situation.CALL_WITHOUT_RESULT))
        or (apart and not can(Situation.ASSISTANTS))
    ):
        said = [words, *map(_call_text, message["tool_calls"])]
        plain = {**message, "content": "\n\n".join(filter(None, said))}
        del plain["tool_calls"]
        return [plain, *map(_result, results)]
    before = [{"role": "assistant", "content": message["content"]}] if apart else []
    message = {**message, "content": ""} if apart else message
    calls = message["tool_calls"]
    if len(calls) == 1 or can(Situation.CALLS):
        return [*before, message, *results]
    turns = [[{"role": "assistant", "content": "", "tool_calls": [call]}] for call in calls]
    turns[0] = [{**message, "tool_calls": calls[:1]}]
    places = {str(call.get("id")): place for place, call in enumerate(calls)}
    for number, result in enumerate(results):
        place = places.get(str(result.get("tool_call_id")), min(number, len(calls) - 1))
        turns[place].append(result)
    return [*before, *chain.from_iterable(turns)]


def _is_answer(message: _Message) -> bool:
    return message["role"] == "assistant" and not message.get("tool_calls")


def _call_text(call: object) -> str:
    function = _function(call)
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return HERMES_CALL.call(function.get("name"), arguments)


def _function(call: object) -> Mapping[str, object]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _result(message: _Message) -> _Message:
    return _by_user(f"<tool_response>\n{text_of(message)}\n</tool_response>")


# -- turns -------------------------------------------------------------------------------------


def _in_turns(messages: list[_Message], can: Can) -> list[_Message]:
    rows: list[list[_Message]] = []
    begun = False  # whether a message of the user, the assistant or a tool has come
    for message in messages:
        role, last = message["role"], rows[-1][-1] if rows else {"role": ""}
        follows = role == last["role"] and role in _ROWS and not last.get("tool_calls")
        if follows and not can(_ROWS[role]):
            rows[-1].append(message)
            continue
        if role == "assistant" and not begun and not can(Situation.ASSISTANT_FIRST):
            rows.append([_by_user(_NO_QUESTION)])
        if role == "user" and last["role"] == "tool" and not can(Situation.USER_BEHIND_RESULT):
            rows.append([{"role": "assistant", "content": _NO_ANSWER}])
        silent = role == "assistant" and not (message.get("tool_calls") or text_of(message).strip())
        if silent and not can(Situation.EMPTY_ANSWER):
            message = {**message, "content": _NO_ANSWER}
        begun = begun or role not in RULES
        rows.append([message])
    return [row[0] if len(row) == 1 else _joined(row) for row in rows]


def _joined(messages: Sequence[_Message]) -> _Message:
    """Join the texts and thoughts of ``messages`` in one, with the role of the first."""
    whole = {key: value for message in messages[::-1] for key, value in message.items()}
    for key in ("content", *THOUGHT_FIELDS):
        if key in whole:
            texts = (text_of({"content": message.get(key)}) for message in messages)
            whole[key] = "\n\n".join(filter(None, texts))
    return whole


def _by_user(text: str) -> _Message:
    return {"role": "user", "content": text}


_AnyMessage: TypeAlias = Mapping[str, Any]
_ID = "call_zq_zq_zq_{}"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template wants calls: the form of ``ids``, and the ``empty`` content of calls alone."""

    ids: str = ""
    empty: str | None = ""

    def shaped(self, messages: Sequence[_AnyMessage]) -> list[dict[str, Any]]:
        """Return ``messages`` with such ids in calls and results, and such empty contents."""
        ids: dict[str, str] = {}
        found: list[dict[str, object]] = []
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


UNCHANGED = CallForm()
_FORMS = (
    UNCHANGED,
    CallForm(ids="{short}"),  # Mistral
    CallForm(ids="functions.{name}:{index}"),  # Kimi
    CallForm(empty=None),  # DeepSeek
)


def missing_messages(
    messages: Sequence[_AnyMessage], prompt: str, *, calls: bool = True
) -> list[_AnyMessage]:
    """Return the messages that ``prompt`` lacks or has only in part; at most 16.

    Thoughts may be missing. System messages at the beginning may be anywhere. Without ``calls``,
    only texts are looked for.
    """
    head = rules_first(messages)
    missing: list[_AnyMessage] = []
    at = start = 0
    before = ""  # the role of the message before
    for number, message in enumerate(messages):
        role, text = message["role"], text_of(message)
        if number == head:
            at = 0
        if number >= head and (role != "tool" or before != "tool"):
            start = at  # results may be in the order of their calls
        if role == "assistant":
            text = split_thinking(text).answer
        for said in (text, *(calls_of(message) if calls else ())):
            end = _end_of(said, prompt, at)
            if end < 0 and at > start:
                end = _end_of(said, prompt, start)
            if end < 0:
                missing.append(message)
                break
            at = max(at, end)
        before = role
        if len(missing) == _ENOUGH:
            break
    return missing


_ENOUGH = 16  # missing messages; each may have been searched for in the whole prompt
_QUOTED = re.compile(r"\\u[0-9a-fA-F]{4}|\\.|[^a-zA-Z0-9]+", re.DOTALL)
_COMPARED = 1000  # characters of a text that the template quotes in its own way
_NEAR = 1 << 16  # characters to search first, before the quoted form of the text


def _end_of(text: str, prompt: str, start: int) -> int:
    """The end of ``text`` after ``start``, or ``start`` if it is quoted there; -1: not found."""
    text = text.strip()
    for quotes, most in ((False, _NEAR), (True, _NEAR), (False, len(prompt))):
        form = json.dumps(text, ensure_ascii=False)[1:-1] if quotes else text
        if (found := prompt.find(form, start, start + len(form) + most)) >= 0:
            return found + len(form)
    words = re.sub("[^a-zA-Z0-9]+", "", text[:_COMPARED])
    near = prompt[start : start + 7 * _COMPARED]
    return start if words and words in _QUOTED.sub("", near) else -1


class HistoryProbe:
    """Finds out what ``render``, which may raise ``TemplateError``, can show.

    ``source`` is the template's source: the model knows the roles that it names.
    """

    def __init__(self, render: Callable[[Sequence[_AnyMessage]], str], source: str) -> None:
        self._render = render
        self._source = source
        self._results: dict[Situation, bool] = {}
        self._form = UNCHANGED

    @property
    def form(self) -> CallForm:
        """The form of calls that the template wants."""
        self.can(Situation.CALL)
        return self._form

    def can(self, situation: Situation) -> bool:
        """Whether the template can show ``situation``."""
        if situation not in self._results:
            self._results[situation] = self._finds(situation)
        return self._results[situation]

    def knows_developers(self) -> bool:
        """Whether the template names the developer role; copying any role's name does not count."""
        return re.search(r"""(["'])developer\1""", self._source) is not None

    def shows_alone(self, message: _AnyMessage) -> bool:
        """Whether the template shows the text of ``message`` in an otherwise usual history."""
        role, said = message["role"], {**_user(0), **message}
        if role in RULES:
            return self._shows([{**said, "role": "system"}, _user(1)])
        if role == "assistant":
            return self._shows([_user(0), {"role": role, "content": said["content"]}, _user(1)])
        if role != "tool" or not self.can(Situation.CALL):
            return self._shows([{**said, "role": "user"}])
        return self._shows([_user(0), _calling(0), {**_result_of(0), "content": said["content"]}])

    def _finds(self, situation: Situation) -> bool:
        if situation is Situation.DEVELOPER and not self.knows_developers():
            return False
        if situation is Situation.CALL:
            found = (form for form in _FORMS if self._show_all(situation, form))
            form = next(found, None)
            self._form = form or UNCHANGED
            return form is not None
        return self._show_all(situation, self.form)

    def _show_all(self, situation: Situation, form: CallForm) -> bool:
        return all(self._shows(history, form) for history in _PROBES[situation])

    def _shows(self, history: Sequence[_AnyMessage], form: CallForm | None = None) -> bool:
        try:
            written = self._render((form or self._form).shaped(history))
        except TemplateError:
            return False
        return not missing_messages(history, written)


def _says(role: str, number: int) -> dict[str, object]:
    return {"role": role, "content": f"Zq{role}{number} says."}


def _user(number: int) -> dict[str, object]:
    return _says("user", number)


def _calling(*numbers: int, text: str = "") -> dict[str, object]:
    calls = []
    for number in numbers:
        function = {"name": (FIRST, SECOND)[number], "arguments": {"zqa": f"zqvalue{number}"}}
        calls.append({"id": _ID.format(number), "type": "function", "function": function})
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _result_of(number: int) -> dict[str, object]:
    name = (FIRST, SECOND)[number]
    return {**_says("tool", number), "tool_call_id": _ID.format(number), "name": name}


def _probes() -> dict[Situation, tuple[list[dict[str, object]], ...]]:
    s0, s1, d0, d1, a0, a1 = (
        _says(role, number) for role in ("system", "developer", "assistant") for number in (0, 1)
    )
    u0, u1, u2 = map(_user, range(3))
    c0, c1, r0, r1 = _calling(0), _calling(1), _result_of(0), _result_of(1)
    both, with_words = _calling(0, 1), _calling(0, text="Zqwords say.")
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


class HistoryRenderer:
    """Renders histories with ``template``; ``as_text``: it prefers arguments of calls as text."""

    def __init__(self, template: MessageTemplate, *, as_text: bool) -> None:
        self._template = template
        self._as_text = as_text
        self._probes = {
            tools: HistoryProbe(partial(self._probe, tools), template.tool_source)
            for tools in (False, True)
        }

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        control_tokens: Iterable[str] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        **extra: object,
    ) -> list[Segment]:
        """``MessageTemplate.render_segments`` of a form of the history that the template can show.

        Raises:
            TemplateError: it refuses every form; the error is that of the first.
        """
        original = UNCHANGED.shaped(for_template(messages))
        options = {"control_tokens": control_tokens and list(control_tokens), "tools": tools}
        probe = self._probes[bool(tools)]
        refused: TemplateError | None = None
        attempts: list[tuple[int, list[object], list[Segment]]] = []
        for history in self._forms(original, probe):
            if attempts and attempts[-1][1] == history:
                segments = attempts[-1][2]
            else:
                try:
                    segments = self._segments(history, **options, **extra)
                except TemplateError as error:
                    refused = refused or error
                    continue
            prompt = "".join([text for text, _ in segments])
            missing = missing_messages(history, prompt, calls=history is original)
            # Text that the template leaves out in any history (/no_think) may be missing.
            if not any(map(probe.shows_alone, missing)):
                return segments
            attempts.append((len(missing), history, segments))
        if not attempts:
            assert refused is not None, "there is one form at least"
            raise refused
        return min(attempts, key=lambda each: each[0])[2]

    @staticmethod
    def _forms(original: list[Any], probe: HistoryProbe) -> Iterator[list[Any]]:
        """Yield ``original``, then simpler and simpler forms of it."""
        developers = any(message["role"] == "developer" for message in original)
        if not developers or probe.knows_developers():
            yield original
        yield probe.form.shaped(fitted(original, probe.can))
        yield fitted(original, lambda situation: False)

    def _segments(self, history: list[Any], **options: Any) -> list[Segment]:
        """Render one history, with arguments in the form that the template accepts."""
        as_text = self._as_text and any(message.get("tool_calls") for message in history)
        shaped = for_template(history, arguments_as_text=as_text)
        try:
            return self._template.render_segments(shaped, **options)
        except TemplateError:
            # Some templates want arguments as text, most as values.
            other = for_template(history, arguments_as_text=not as_text)
            if other == shaped:
                raise
            return self._template.render_segments(other, **options)

    def _probe(self, tools: bool, history: Sequence[Mapping[str, object]]) -> str:
        segments = self._segments(list(history), control_tokens=(), tools=TOOLS if tools else None)
        return "".join([text for text, _ in segments])
