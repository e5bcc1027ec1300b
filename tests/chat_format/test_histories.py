"""Histories as clients send them, on templates that refuse some and leave out parts of others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.chat_format.chat_template import ChatTemplate, MessageTemplate, PlainTemplate
from localrt.chat_format.histories import HistoryRenderer
from localrt.chat_format.template_syntax import TemplateSyntax
from localrt.common.errors import TemplateError
from tests.chat_format.call_templates import calling


def system(number: int, role: str = "system") -> dict[str, Any]:
    return {"role": role, "content": f"Rule {number}: be brief."}


def user(number: int) -> dict[str, Any]:
    return {"role": "user", "content": f"Question {number}?"}


def assistant(number: int) -> dict[str, Any]:
    return {"role": "assistant", "content": f"Answer {number}."}


def calls(*numbers: int, text: str | None = "", arguments: Any = None) -> dict[str, Any]:
    made = [
        (name, {"city": f"Oslo{number}"} if arguments is None else arguments)
        for name, number in zip(("weather_now", "clock_time"), numbers, strict=False)
    ]
    message = calling(*made, text=text)
    for call, number in zip(message["tool_calls"], numbers, strict=True):
        call["id"] = f"call_{number}zq"
    return message


def result(number: int) -> dict[str, Any]:
    return {
        "role": "tool",
        "tool_call_id": f"call_{number}zq",
        "content": f"Result {number} is 20 C",
    }


_BAD = {"nothing": "", "null": "null", "list": "[]", "string": '"x"', "cut off": '{"city": "Oslo1'}

HISTORIES: dict[str, list[dict[str, Any]]] = {
    "usual": [system(1), user(1), assistant(1), user(2)],
    "system alone": [system(1)],
    "system twice": [system(1), system(2), user(1), assistant(1), user(2)],
    "system late": [system(1), user(1), assistant(1), system(2), user(2)],
    "system late only": [user(1), assistant(1), system(1), user(2)],
    "system last": [system(1), user(1), assistant(1), user(2), system(2)],
    "system between": [system(1), user(1), system(2), assistant(1), user(2)],
    "systems late": [user(1), assistant(1), system(1), user(2), assistant(2), system(2), user(3)],
    "developer": [system(1, "developer"), user(1), assistant(1), user(2)],
    "developer late": [system(1), user(1), assistant(1), system(2, "developer"), user(2)],
    "system and developer": [system(1), system(2, "developer"), user(1), assistant(1), user(2)],
    "users in a row": [system(1), user(1), user(2), assistant(1), user(3), user(4)],
    "assistants in a row": [user(1), assistant(1), assistant(2), user(2)],
    "assistant first": [assistant(1), user(1), assistant(2), user(2)],
    "system, assistant": [system(1), assistant(1), user(1)],
    "assistant last": [user(1), assistant(1)],
    "empty answer": [user(1), {"role": "assistant", "content": ""}, user(2)],
    "no answer": [user(1), {"role": "assistant", "content": None}, user(2)],
    "call": [system(1), user(1), calls(1), result(1)],
    "call, no content": [user(1), calls(1, text=None), result(1), assistant(1), user(2)],
    "call with words": [user(1), calls(1, text="Answer 1."), result(1), assistant(2), user(2)],
    "calls in turn": [user(1), calls(1), result(1), calls(2), result(2), assistant(1), user(2)],
    "two calls": [user(1), calls(1, 2), result(1), result(2), assistant(1), user(2)],
    "user behind a result": [user(1), calls(1), result(1), user(2)],
    "system behind a result": [user(1), calls(1), result(1), system(1), user(2)],
    "system before a result": [user(1), calls(1), system(1), result(1)],
    "call without a result": [user(1), calls(1), user(2)],
    "result without a call": [user(1), result(1), assistant(1), user(2)],
    "result first": [result(1), assistant(1), user(2)],
    **{
        f"call of {name}": [user(1), calls(1, arguments=given), result(1), assistant(1), user(2)]
        for name, given in _BAD.items()
    },
    "everything": [
        *(system(1), system(2, "developer"), assistant(1), user(1), calls(1, text="Answer 2.")),
        *(result(1), system(3), user(2), user(3), assistant(3), calls(2), result(2)),
        *(assistant(4), system(4, "developer"), user(4)),
    ],
}


def texts_of(history: list[dict[str, Any]]) -> list[str]:
    """What must be in a prompt: all that is said, and the names of what is called."""
    names = [c["function"]["name"] for m in history for c in m.get("tool_calls", ())]
    return [*(m["content"] for m in history if m["content"]), *names]


_NO = "{{ raise_exception('no') }}"
_CALLS = (
    "{% for c in m.tool_calls or [] %}"
    "<{{ c.function.name }} {{ c.function.arguments }}>{% endfor %}"
)


def turns(
    system: str = "[s {{ m.content }}]",
    user: str = "[u {{ m.content }}]",
    assistant: str = "[a {{ m.content }}" + _CALLS + "]",
    tool: str = "[t {{ m.content }}]",
    other: str = "",
    each: str = "",
) -> str:
    """A template that writes each turn by its role; ``each`` comes before all of them."""
    roles = {"system": system, "user": user, "assistant": assistant, "tool": tool}
    bodies = "".join(f"{{% elif m.role == '{role}' %}}{text}" for role, text in roles.items())
    return (
        f"{{% for m in messages %}}{each}{{% if false %}}{bodies}{{% else %}}{other}{{% endif %}}"
        "{% endfor %}{% if add_generation_prompt %}[a {% endif %}"
    )


_FIRST = "{% if not loop.first %}" + _NO + "{% endif %}"
# System messages do not count, nor do calls and results.
_ALTERNATE = (
    "{% if m.role == 'user' or m.role == 'assistant' and not m.tool_calls %}"
    "{% if m.role == ns.last %}" + _NO + "{% endif %}{% set ns.last = m.role %}{% endif %}"
)
_ID = "{% if ID | length != 9 %}" + _NO + "{% endif %}"

KINDS: dict[str, MessageTemplate] = {
    "any role": ChatTemplate(
        "{% for m in messages %}[{{ m.role }} {{ m.content }}]{% endfor %}"
        "{% if add_generation_prompt %}[assistant {% endif %}"
    ),
    "strict": ChatTemplate(turns(_FIRST + "[s {{ m.content }}]", other=_NO)),
    "developers": ChatTemplate(
        turns(other="{% if m.role == 'developer' %}[d {{ m.content }}]{% endif %}")
    ),
    "alternating": ChatTemplate(
        "{% set ns = namespace(last='assistant') %}"
        + turns(
            _FIRST + "[s {{ m.content }}]",
            assistant="{% if m.tool_calls %}"
            + _CALLS.replace("<", _ID.replace("ID", "c.id") + "<", 1)
            + "{% else %}[a {{ m.content }}]{% endif %}",
            tool=_ID.replace("ID", "m.tool_call_id") + "[t {{ m.content }}]",
            other=_NO,
            each=_ALTERNATE,
        )
    ),
    "no system": ChatTemplate(
        "{% set ns = namespace(last='assistant') %}"
        + turns(_NO, assistant="[a {{ m.content }}]", tool=_NO, other=_NO, each=_ALTERNATE)
    ),
    "last system": ChatTemplate(
        "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}"
        "{% set ns.s = m.content %}{% endif %}{% endfor %}[s {{ ns.s }}]" + turns("")
    ),
    "no tools": ChatTemplate(turns(assistant="[a {{ m.content }}]", tool="")),
    "one call": ChatTemplate(
        turns(
            assistant="{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}"
            + _NO
            + "{% endif %}"
            "[a " + _CALLS + "]{% else %}[a {{ m.content }}]{% endif %}"
        )
    ),
    "ids alone": ChatTemplate(
        turns(assistant="[a {{ m.content }}" + _CALLS.replace("c.function.name", "c.id") + "]")
    ),
    "calls without content": ChatTemplate(
        turns(
            assistant="[a {% if m.content is none %}"
            + _CALLS
            + "{% else %}{{ m.content }}{% endif %}]"
        )
    ),
    "quoted": ChatTemplate(turns(tool="[t {{ m.content | tojson }}]")),
    "plain": PlainTemplate(),
}


def renderer(template: MessageTemplate) -> HistoryRenderer:
    return HistoryRenderer(template, as_text=TemplateSyntax.of(template).calls.as_text)


def written(of: HistoryRenderer, history: Sequence[Any], **options: Any) -> str:
    return "".join(text for text, _ in of.segments(history, **options))


def brief(text: str) -> str:
    """``text`` with short names for what the histories of this test say."""
    text = re.sub(r"Rule (\d+): be brief\.", r"S\1", text)
    text = re.sub(r"(Question|Answer|Result) (\d+)(\?|\.| is 20 C)", lambda m: m[1][0] + m[2], text)
    text = re.sub(r"""{["']city["']: ["'](\w+)["']}""", r"\1", text)
    call = r'<tool_call>\n{"name": "(\w+)", "arguments": (\w+|{})}\n</tool_call>'
    text = re.sub(call, r"CALL(\1 \2)", text)
    text = re.sub(r"<tool_response>\n(.*?)\n</tool_response>", r"RESULT(\1)", text)
    return " ".join(text.replace("\n\n", "+").replace("[", " [").split())


# What is written, in short: S1 for a rule, Q1 for a question, and so on; + for a blank line.
RIGHT = {
    "any role": """
        system late -> [system S1] [user Q1] [assistant A1] [system S2] [user Q2] [assistant
        developer -> [system S1] [user Q1] [assistant A1] [user Q2] [assistant
        users in a row -> [system S1] [user Q1] [user Q2] [assistant A1] [user Q3] [user Q4]
            [assistant
        call -> [system S1] [user Q1] [assistant CALL(weather_now Oslo1)] [user RESULT(R1)]
            [assistant
        result first -> [tool R1] [assistant A1] [user Q2] [assistant
    """,
    "strict": """
        system twice -> [s S1+S2] [u Q1] [a A1] [u Q2] [a
        system late -> [s S1] [u Q1] [a A1] [u S2] [u Q2] [a
        system between -> [s S1] [u Q1] [u S2] [a A1] [u Q2] [a
        system last -> [s S1] [u Q1] [a A1] [u Q2] [u S2] [a
        two calls -> [u Q1] [a <weather_now Oslo1><clock_time Oslo2>] [t R1] [t R2] [a A1] [u Q2]
            [a
        call of nothing -> [u Q1] [a <weather_now {}>] [t R1] [a A1] [u Q2] [a
        call of cut off -> [u Q1] [a <weather_now {"arguments": "{\\"city\\": \\"Oslo1"}>] [t R1] [a
            A1] [u Q2] [a
    """,
    "developers": """
        developer -> [d S1] [u Q1] [a A1] [u Q2] [a
        developer late -> [s S1] [u Q1] [a A1] [d S2] [u Q2] [a
        system and developer -> [s S1] [d S2] [u Q1] [a A1] [u Q2] [a
    """,
    "alternating": """
        system alone -> [s S1] [a
        system twice -> [s S1+S2] [u Q1] [a A1] [u Q2] [a
        system late -> [s S1] [u Q1] [a A1] [u S2+Q2] [a
        systems late -> [u Q1] [a A1] [u S1+Q2] [a A2] [u S2+Q3] [a
        system between -> [s S1] [u Q1+S2] [a A1] [u Q2] [a
        users in a row -> [s S1] [u Q1+Q2] [a A1] [u Q3+Q4] [a
        assistants in a row -> [u Q1] [a A1+A2] [u Q2] [a
        assistant first -> [u (The assistant begins.)] [a A1] [u Q1] [a A2] [u Q2] [a
        system, assistant -> [s S1] [u (The assistant begins.)] [a A1] [u Q1] [a
        call -> [s S1] [u Q1]<weather_now Oslo1> [t R1] [a
        two calls -> [u Q1]<weather_now Oslo1><clock_time Oslo2> [t R1] [t R2] [a A1] [u Q2] [a
        call with words -> [u Q1] [a A1+CALL(weather_now Oslo1)] [u RESULT(R1)] [a A2] [u Q2] [a
        user behind a result -> [u Q1]<weather_now Oslo1> [t R1] [a (No answer.)] [u Q2] [a
        system behind a result -> [u Q1]<weather_now Oslo1> [t R1] [a (No answer.)] [u S1+Q2] [a
        call without a result -> [u Q1] [a CALL(weather_now Oslo1)] [u Q2] [a
        result without a call -> [u Q1+RESULT(R1)] [a A1] [u Q2] [a
        everything -> [s S1+S2] [u (The assistant begins.)] [a A1] [u Q1] [a A2+CALL(weather_now
            Oslo1)] [u RESULT(R1)+S3+Q2+Q3] [a A3+CALL(weather_now Oslo2)] [u RESULT(R2)] [a A4]
            [u S4+Q4] [a
    """,
    "no system": """
        usual -> [u S1+Q1] [a A1] [u Q2] [a
        system alone -> [u S1] [a
        system twice -> [u S1+S2+Q1] [a A1] [u Q2] [a
        system late -> [u S1+Q1] [a A1] [u S2+Q2] [a
        developer late -> [u S1+Q1] [a A1] [u S2+Q2] [a
        users in a row -> [u S1+Q1+Q2] [a A1] [u Q3+Q4] [a
        system, assistant -> [u S1] [a A1] [u Q1] [a
        call -> [u S1+Q1] [a CALL(weather_now Oslo1)] [u RESULT(R1)] [a
        two calls -> [u Q1] [a CALL(weather_now Oslo1)+CALL(clock_time Oslo2)] [u
            RESULT(R1)+RESULT(R2)] [a A1] [u Q2] [a
        user behind a result -> [u Q1] [a CALL(weather_now Oslo1)] [u RESULT(R1)+Q2] [a
        result first -> [u RESULT(R1)] [a A1] [u Q2] [a
        everything -> [u S1+S2] [a A1] [u Q1] [a A2+CALL(weather_now Oslo1)] [u
            RESULT(R1)+S3+Q2+Q3] [a A3+CALL(weather_now Oslo2)] [u RESULT(R2)] [a A4] [u S4+Q4] [a
    """,
    "last system": """
        system twice -> [s S1+S2] [u Q1] [a A1] [u Q2] [a
        system late -> [s S1] [u Q1] [a A1] [u S2] [u Q2] [a
        system and developer -> [s S1+S2] [u Q1] [a A1] [u Q2] [a
        developer late -> [s S1] [u Q1] [a A1] [u S2] [u Q2] [a
        system late only -> [s ] [u Q1] [a A1] [u S1] [u Q2] [a
    """,
    "no tools": """
        call -> [s S1] [u Q1] [a CALL(weather_now Oslo1)] [u RESULT(R1)] [a
        call with words -> [u Q1] [a A1+CALL(weather_now Oslo1)] [u RESULT(R1)] [a A2] [u Q2] [a
        two calls -> [u Q1] [a CALL(weather_now Oslo1)+CALL(clock_time Oslo2)] [u RESULT(R1)] [u
            RESULT(R2)] [a A1] [u Q2] [a
        result without a call -> [u Q1] [u RESULT(R1)] [a A1] [u Q2] [a
    """,
    "one call": """
        call with words -> [u Q1] [a A1] [a <weather_now Oslo1>] [t R1] [a A2] [u Q2] [a
        two calls -> [u Q1] [a <weather_now Oslo1>] [t R1] [a <clock_time Oslo2>] [t R2] [a A1]
            [u Q2] [a
    """,
    "ids alone": """
        calls in turn -> [u Q1] [a <functions.weather_now:0 Oslo1>] [t R1] [a
            <functions.weather_now:1 Oslo2>] [t R2] [a A1] [u Q2] [a
        two calls -> [u Q1] [a <functions.weather_now:0 Oslo1><functions.clock_time:1 Oslo2>] [t
            R1] [t R2] [a A1] [u Q2] [a
    """,
    "calls without content": """
        call, no content -> [u Q1] [a <weather_now Oslo1>] [t R1] [a A1] [u Q2] [a
        call with words -> [u Q1] [a A1] [a <weather_now Oslo1>] [t R1] [a A2] [u Q2] [a
        two calls -> [u Q1] [a <weather_now Oslo1><clock_time Oslo2>] [t R1] [t R2] [a A1] [u Q2]
            [a
    """,
    "quoted": """
        call -> [s S1] [u Q1] [a <weather_now Oslo1>] [t "R1"] [a
    """,
    "plain": """
        developer late -> System: S1 User: Q1 Assistant: A1 System: S2 User: Q2 Assistant:
        call with words -> User: Q1 Assistant: A1+CALL(weather_now Oslo1) User: RESULT(R1)
            Assistant: A2 User: Q2 Assistant:
    """,
}


def rows() -> list[tuple[str, str, str]]:
    found = []
    for kind, table in RIGHT.items():
        lines = re.sub(r"\n {12}", " ", table).strip().splitlines()
        found += [(kind, *map(str.strip, line.split(" -> "))) for line in lines]
    return found


@cache
def renderer_of(kind: str) -> HistoryRenderer:
    return renderer(KINDS[kind])


@pytest.mark.parametrize(("kind", "situation", "right"), rows())
def test_fitted_history(kind: str, situation: str, right: str) -> None:
    assert brief(written(renderer_of(kind), HISTORIES[situation])) == right


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_out(kind: str) -> None:
    for situation, history in HISTORIES.items():
        shown = written(renderer_of(kind), history)
        assert not [text for text in texts_of(history) if text not in shown], situation


@st.composite
def histories(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Turns in any order, as clients never send them all at once."""
    history = [system(0)] if draw(st.booleans()) else []
    kinds = st.sampled_from(["user", "assistant", "system", "developer", "call", "words", "two"])
    for number, kind in enumerate(draw(st.lists(kinds, min_size=1, max_size=7)), 1):
        first, second = 2 * number, 2 * number + 1
        match kind:
            case "user":
                history.append(user(first))
            case "assistant":
                history.append(assistant(first))
            case "system" | "developer":
                history.append(system(first, kind))
            case "two":
                history += [calls(first, second), result(first), result(second)]
            case _:
                words = f"Answer {first}." if kind == "words" else ""
                history += [calls(first, text=words), result(first)]
    return [*history, user(99)]


# Those whose prompts may be written anew once: they refuse or drop calls, and a later message can
# need a rewrite that changes earlier ones.
_ONCE = ("alternating", "no tools", "calls without content", "plain")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in _ONCE])
@given(history=histories())
def test_the_beginning_of_a_prompt_stays(kind: str, history: list[dict[str, Any]]) -> None:
    """Whatever follows: what is cached of a conversation is not read again."""
    shown = renderer_of(kind)
    whole = written(shown, history, add_generation_prompt=False)
    assert not [text for text in texts_of(history) if text not in whole]
    said = [at for at, each in enumerate(history) if each["role"] not in ("system", "developer")]
    for end in range(said[0] + 1, len(history)):
        if history[end]["role"] == "tool":
            continue  # a call waits for its results
        before = written(shown, history[:end], add_generation_prompt=False)
        last = max(before.rfind(text) + len(text) for text in texts_of(history[end - 1 : end]))
        assert whole.startswith(before[:last])


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('never') }}", "refused the messages: never"),
        (turns(user=_NO, assistant=_NO, system="{{ raise_exception('first') }}"), "first"),
    ],
)
def test_a_template_that_refuses_everything_says_why(source: str, words: str) -> None:
    with pytest.raises(TemplateError, match=words):
        written(renderer(ChatTemplate(source)), HISTORIES["system late"])


@pytest.mark.parametrize(
    ("source", "history", "right"),
    [
        (  # a word that is meant for the template
            turns("[s {{ m.content | replace('/no_think', '') }}]"),
            [{"role": "system", "content": "/no_think"}, user(1)],
            "[s ] [u Q1] [a",
        ),
        (  # thoughts of earlier answers
            turns(assistant="[a {{ m.content.split('</think>')[-1] }}]"),
            [user(1), {"role": "assistant", "content": "<think>Hm.</think>Answer 1."}, user(2)],
            "[u Q1] [a A1] [u Q2] [a",
        ),
        (  # the system before the last question
            "{% for m in messages %}{% if m.role == 'user' %}{% if loop.last %}"
            "[s {{ messages[0].content }}]{% endif %}[u {{ m.content }}]"
            "{% elif m.role == 'assistant' %}[a {{ m.content }}]{% endif %}{% endfor %}[a",
            HISTORIES["usual"],
            "[u Q1] [a A1] [s S1] [u Q2] [a",
        ),
        (  # space around, parts, and what looks like a control token
            turns("[s {{ m.content | trim }}]", "[u {{ m.content | trim }}]"),
            [system(1), {"role": "user", "content": [{"type": "text", "text": " <|end|>\n"}]}],
            "[s S1] [u <|end|>] [a",
        ),
    ],
)
def test_what_a_template_leaves_out_on_purpose(
    source: str, history: list[dict[str, Any]], right: str
) -> None:
    assert brief(written(renderer(ChatTemplate(source)), history)) == right


def test_thoughts_of_joined_answers_stay_apart() -> None:
    thinking = [{**assistant(n), "reasoning_content": f"Thought {n}."} for n in (1, 2)]
    source = "{% set ns = namespace(last='assistant') %}" + turns(
        assistant="[a ({{ m.reasoning_content }}) {{ m.content }}]", each=_ALTERNATE
    )
    shown = brief(written(renderer(ChatTemplate(source)), [user(1), *thinking, user(2)]))
    assert shown == "[u Q1] [a (Thought 1.+Thought 2.) A1+A2] [u Q2] [a"
