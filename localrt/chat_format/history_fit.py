"""A history rewritten for a chat template that cannot show it as it is.

Pure functions on messages. What a template can show is asked situation by situation, so that a
message is treated in the same way in every turn of a conversation, and the beginning of a prompt
stays what it was. No text is ever dropped: what has no place of its own becomes text of the user
or of the assistant.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from itertools import chain, takewhile
from typing import Any, TypeAlias

from localrt.chat_format.known_syntaxes import HERMES_CALL
from localrt.chat_format.thinking import THOUGHT_FIELDS

RULES = ("system", "developer")
"""The roles of messages that say how to answer."""

_NO_ANSWER = "(No answer.)"
_NO_QUESTION = "(The assistant begins.)"

_Message: TypeAlias = dict[str, Any]


class Situation(Enum):
    """What a chat template may show as it is written, or not."""

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


_ROWS = {
    "system": Situation.SYSTEMS,
    "user": Situation.USERS,
    "assistant": Situation.ASSISTANTS,
}

Can: TypeAlias = Callable[[Situation], bool]


def fitted(messages: Sequence[Mapping[str, Any]], can: Can) -> list[_Message]:
    """``messages``, as ``for_template`` shapes them, for a template that ``can`` show so much."""
    return _in_turns(_with_calls(_with_rules(list(map(dict, messages)), can), can), can)


def rules_first(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many messages at the beginning say how to answer."""
    return sum(1 for _ in takewhile(lambda message: message["role"] in RULES, messages))


def text_of(message: Mapping[str, Any]) -> str:
    """What a message says; parts of its content are joined by new lines."""
    content = message.get("content")
    if isinstance(content, list | tuple):
        texts = (part.get("text") if isinstance(part, Mapping) else part for part in content)
        return "\n".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def calls_of(message: Mapping[str, Any]) -> list[str]:
    """What a message calls: names, and the texts among their arguments."""
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
    """A message with calls and their ``results``; some are missing where it was ``cut``."""
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


def _call_text(call: Any) -> str:
    function = _function(call)
    arguments = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    name, spelling = function.get("name"), HERMES_CALL
    return f"{spelling.before}{name}{spelling.middle}{arguments}{spelling.after}"


def _function(call: Any) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _result(message: _Message) -> _Message:
    return _by_user(f"<tool_response>\n{text_of(message)}\n</tool_response>")


# -- turns -------------------------------------------------------------------------------------


def _in_turns(messages: list[_Message], can: Can) -> list[_Message]:
    rows: list[list[_Message]] = []
    begun = False  # by anybody but the system
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
    """One message of what all of them say and think; its role is that of the first."""
    whole = {key: value for message in messages[::-1] for key, value in message.items()}
    for key in ("content", *THOUGHT_FIELDS):
        if key in whole:
            texts = (text_of({"content": message.get(key)}) for message in messages)
            whole[key] = "\n\n".join(filter(None, texts))
    return whole


def _by_user(text: str) -> _Message:
    return {"role": "user", "content": text}
