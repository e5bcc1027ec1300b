"""Chat histories for templates that refuse them or leave messages out.

A history is rendered as it is. If the template refuses it or a message is missing in the prompt,
rewritten forms are rendered, in a fixed order, until one shows every message. No text is dropped:
what the template cannot show in its role becomes text of the user or of the assistant.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, takewhile
from typing import Any, TypeAlias

from localrt.chat_format.call_syntaxes import FIRST, HERMES_CALL, TOOLS
from localrt.chat_format.chat_template import MessageTemplate, Segment
from localrt.chat_format.messages import for_template
from localrt.chat_format.thinking import THOUGHT_FIELDS, split_thinking
from localrt.common.errors import TemplateError

RULES = ("system", "developer")
"""The roles of messages that say how to answer."""
_NO_ANSWER = "(No answer.)"
_NO_QUESTION = "(The assistant begins.)"
_Message: TypeAlias = dict[str, Any]
_History: TypeAlias = list[_Message]


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


def with_thoughts_joined(messages: Sequence[object]) -> list[object]:
    """Shape ``messages`` for a template of gpt-oss, which takes thoughts or text with calls, but
    not both: text before calls is appended to the thoughts.
    """
    shaped: list[object] = []
    for message in messages:
        if isinstance(message, Mapping) and message.get("tool_calls") and message.get("content"):
            thought = next(filter(None, map(message.get, THOUGHT_FIELDS)), "")
            said = "\n\n".join(filter(None, (thought, text_of(message))))
            message = {**message, "content": "", **dict.fromkeys(THOUGHT_FIELDS, said)}
        shaped.append(message)
    return shaped


# -- rewrites --------------------------------------------------------------------------------------


def _system_at_head(messages: _History) -> _History:
    """One system message at the beginning; later ones become the user's."""
    size = rules_first(messages)
    head = [{**_joined(messages[:size]), "role": "system"}] if size else []
    late = (_by_user(text_of(m)) if m["role"] in RULES else m for m in messages[size:])
    return [*head, *late]


def _system_in_user(messages: _History) -> _History:
    """The system message becomes the beginning of the user's first."""
    size = rules_first(messages)
    if not size:
        return messages
    size += messages[size : size + 1] != [] and messages[size]["role"] == "user"
    return [{**_joined(messages[:size]), "role": "user"}, *messages[size:]]


def _calls_alone(messages: _History) -> _History:
    """One call a message, with its result behind it, and text in a message before."""
    turns: list[_History] = []
    places: dict[str, _History] = {}  # of calls, by their ids
    for message in messages:
        if calls := message.get("tool_calls"):
            if text_of(message).strip():
                turns.append([{"role": "assistant", "content": message["content"]}])
            made = [[{**message, "content": "", "tool_calls": [call]}] for call in calls]
            places |= {str(call.get("id")): turn for call, turn in zip(calls, made, strict=True)}
            turns += made
        elif message["role"] == "tool" and turns:
            places.get(str(message.get("tool_call_id")), turns[-1]).append(message)
        else:
            turns.append([message])
    return list(chain.from_iterable(turns))


def _calls_as_text(messages: _History) -> _History:
    """Calls become text of the assistant, and results text of the user."""
    return [
        _result(message) if message["role"] == "tool" else _without_calls(message)
        for message in messages
    ]


def _alternating(messages: _History) -> _History:
    """Neighbours of one role become one message; the user begins, and no answer is empty."""
    rows: list[_History] = []
    for message in messages:
        role, last = message["role"], rows[-1][-1] if rows else {"role": ""}
        if role == last["role"] and role != "tool" and not last.get("tool_calls"):
            rows[-1].append(message)
            continue
        if role == "assistant" and (last["role"] or "system") in RULES:
            rows.append([_by_user(_NO_QUESTION)])
        if role == "user" and last["role"] == "tool":
            rows.append([{"role": "assistant", "content": _NO_ANSWER}])
        if role == "assistant" and not (message.get("tool_calls") or text_of(message).strip()):
            message = {**message, "content": _NO_ANSWER}
        rows.append([message])
    return [row[0] if len(row) == 1 else _joined(row) for row in rows]


_Rewrite: TypeAlias = Callable[[_History], _History]
_REWRITES: tuple[tuple[_Rewrite, ...], ...] = (
    (),
    (_calls_alone,),
    (_system_at_head,),
    (_system_at_head, _calls_alone),
    (_system_at_head, _calls_alone, _alternating),
    (_system_at_head, _system_in_user, _calls_alone, _alternating),
    (_system_at_head, _calls_as_text),
    (_system_at_head, _calls_as_text, _alternating),
    (_system_at_head, _system_in_user, _calls_as_text, _alternating),
)
"""What is tried, in this order."""


def _joined(messages: _History) -> _Message:
    """Join the texts, thoughts and calls of ``messages`` in one, with the role of the first."""
    whole = {key: value for message in messages[::-1] for key, value in message.items()}
    for key in ("content", *THOUGHT_FIELDS):
        if key in whole:
            texts = (text_of({"content": message.get(key)}) for message in messages)
            whole[key] = "\n\n".join(filter(None, texts))
    return whole


def _by_user(text: str) -> _Message:
    return {"role": "user", "content": text}


def _result(message: _Message) -> _Message:
    return _by_user(f"<tool_response>\n{text_of(message)}\n</tool_response>")


def _without_calls(message: _Message) -> _Message:
    if not message.get("tool_calls"):
        return message
    said = [text_of(message).strip(), *map(_call_text, message["tool_calls"])]
    plain = {**message, "content": "\n\n".join(filter(None, said))}
    del plain["tool_calls"]
    return plain


def _call_text(call: object) -> str:
    function = _function(call)
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return HERMES_CALL.call(function.get("name"), arguments)


def _function(call: object) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


# -- forms of calls --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a template wants calls: the form of ``ids``, and the ``empty`` content of calls alone."""

    ids: str = ""
    empty: str | None = ""

    def shaped(self, messages: Sequence[_Message]) -> _History:
        """Return ``messages`` with such ids in calls and results, and such empty contents."""
        ids: dict[str, str] = {}
        found: _History = []
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
_CALL = {"function": {"name": FIRST, "arguments": {"zqa": "zqvalue"}}, "type": "function"}
_PROBE: _History = [
    _by_user("Zquser says."),
    {"role": "assistant", "content": "", "tool_calls": [{**_CALL, "id": "call_zq_zq_zq_0"}]},
    {"role": "tool", "content": "Zqtool says.", "tool_call_id": "call_zq_zq_zq_0", "name": FIRST},
]


# -- what a prompt shows ---------------------------------------------------------------------------


def _shown_in(messages: _History, prompt: str, tag: str = "") -> bool:
    """Whether ``prompt`` has the texts and calls of all ``messages``, in their order.

    System messages at the beginning may be anywhere, and results in the order of their calls.
    With a ``tag``, the tags that ``_tagged`` has added are looked for instead of texts.
    """
    head = rules_first(messages)
    at = start = 0
    for number, message in enumerate(messages):
        own = tag.format(number)
        text = split_thinking(text_of(message)).answer.strip()
        names = [f"{_function(call).get('name')}{own}" for call in message.get("tool_calls") or ()]
        if number <= head:
            at = 0
        if message["role"] != "tool" or messages[number - 1]["role"] != "tool":
            start = at
        said = ([f"{own}t" if own else text] if text else []) + names
        begin = start if message["role"] == "tool" else at
        places = [prompt.find(each, begin) for each in said]
        if -1 in places:
            return False
        at = max([at, *(place + len(each) for place, each in zip(places, said, strict=True))])
    return True


_TAG = "_zq{}q"


def _tagged(messages: _History) -> _History:
    """Return ``messages`` with a numbered tag behind each text and each name of a call."""
    found: _History = []
    for number, message in enumerate(messages):
        message, tag = dict(message), _TAG.format(number)
        content = message.get("content")
        if isinstance(content, list | tuple):
            message["content"] = [*content, {"type": "text", "text": f"{tag}t"}]
        elif text_of(message).strip():
            message["content"] = f"{content}{tag}t"
        if calls := message.get("tool_calls"):
            named = ({**_function(c), "name": f"{_function(c).get('name')}{tag}"} for c in calls)
            pairs = zip(calls, named, strict=True)
            message["tool_calls"] = [{**call, "function": function} for call, function in pairs]
        found.append(message)
    return found


class HistoryRenderer:
    """Renders histories with ``template``; ``as_text``: it prefers arguments of calls as text."""

    def __init__(self, template: MessageTemplate, *, as_text: bool) -> None:
        self._template = template
        self._as_text = as_text
        # A role that a template copies without naming it is none that its model knows.
        self._knows_developers = bool(re.search(r"""(["'])developer\1""", template.tool_source))

    def segments(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        control_tokens: Iterable[str] | None = None,
        tools: Sequence[Mapping[str, object]] | None = None,
        **extra: object,
    ) -> list[Segment]:
        """``MessageTemplate.render_segments`` of the first form of the history that the template
        shows whole, else of the first that it accepts.

        Raises:
            TemplateError: it refuses every form; the error is that of the first.
        """
        history: _History = for_template(messages)
        if not self._knows_developers:
            renamed = {"developer": "system"}
            history = [{**m, "role": renamed.get(m["role"], m["role"])} for m in history]
        options = {"control_tokens": control_tokens and list(control_tokens), "tools": tools}
        refused: TemplateError | None = None
        first: list[Segment] | None = None
        for form in self._forms(history):
            try:
                segments = self._segments(form, **options, **extra)
            except TemplateError as error:
                refused = refused or error
                continue
            if self._shows(form, segments, **options, **extra):
                return segments
            first = first or segments
        if first is None:
            assert refused is not None, "there is one form at least"
            raise refused
        return first

    def _forms(self, history: _History) -> Iterator[_History]:
        """Yield ``history``, then its rewritten forms."""
        seen = [UNCHANGED.shaped(history)]
        yield seen[0]
        shape = self._form if any(m.get("tool_calls") for m in history) else UNCHANGED
        for rewrites in _REWRITES:
            form = history
            for rewrite in rewrites:
                form = rewrite(form)
            if (form := shape.shaped(form)) not in seen:
                seen.append(form)
                yield form

    @cached_property
    def _form(self) -> CallForm:
        """The form of calls that the template wants."""
        for form in _FORMS:
            history = form.shaped(_PROBE)
            try:
                segments = self._segments(history, control_tokens=(), tools=TOOLS)
            except TemplateError:
                continue
            if self._shows(history, segments, control_tokens=(), tools=TOOLS):
                return form
        return UNCHANGED

    def _shows(self, history: _History, segments: list[Segment], **options: Any) -> bool:
        """Whether the rendered ``segments`` show all messages."""
        if _shown_in(history, "".join([text for text, _ in segments])):
            return True
        # The template may quote texts, trim them or take words out (/no_think).
        try:
            segments = self._segments(_tagged(history), **options)
        except TemplateError:
            return False
        return _shown_in(history, "".join([text for text, _ in segments]), _TAG)

    def _segments(self, history: _History, **options: Any) -> list[Segment]:
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
