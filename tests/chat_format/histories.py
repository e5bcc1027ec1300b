"""Histories as clients send them, one for each situation that a chat template may not know."""

from __future__ import annotations

from typing import Any

from tests.chat_format.call_templates import calling, tool

_WHERE = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Where."}},
    "required": ["city"],
}
TOOLS = [
    tool(name, description=f"It does {name}.", parameters=_WHERE)
    for name in ("weather_now", "clock_time")
]


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
