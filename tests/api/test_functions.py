"""What Python programs are spared: whole answers, types as schemas, functions as tools."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import pydoc
import rlcompleter
import subprocess
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

import localrt
from localrt import Chunk, Metrics, OptionError, ToolCall
from localrt.chat import ChatSession
from localrt.engine.options import OPTION_NAMES, read_options
from localrt.mcp import ROUNDS
from localrt.service.arguments import joined
from localrt.service.functions import tool_of

# -- answers, and types of answers -----------------------------------------------------------------


class City(BaseModel):
    name: str = Field(max_length=3)
    sunny: bool


@dataclasses.dataclass
class Trip:
    first: City
    days: list[int]
    next: Trip | None = None


class Pair(TypedDict):
    a: int
    b: Literal["x", "y"]


class Colour(Enum):
    RED = "red"


OS = '{"name": "Os", "sunny": true}'


@pytest.mark.parametrize(
    ("kind", "text", "parsed"),
    [
        (City, OS, City(name="Os", sunny=True)),
        (
            Trip,
            '{"first": {"name": "A", "sunny": false}, "days": [2]}',
            Trip(City(name="A", sunny=False), [2]),
        ),
        (Pair, '{"a": 1, "b": "x"}', {"a": 1, "b": "x"}),
        (list[int], "<think>2, or {}?</think>\n\n[1, 2]", [1, 2]),
        (Literal["yes", "no"], '"no"', "no"),
        (Colour, '"red"', Colour.RED),
        (int | None, "null", None),
        ({"type": "object"}, '{"a": [1]}', {"a": [1]}),
        (True, "3", 3),
    ],
)
def test_parsed(kind: Any, text: str, parsed: object) -> None:
    schema = json.loads(read_options({"json_schema": kind}).json_schema or "")
    assert schema is True or {"type", "$ref", "enum", "anyOf"} & set(schema)
    whole = [Chunk(text[:5], (1,), Metrics()), Chunk(text[5:], (2,), Metrics(), "stop")]
    answer = joined(whole, kind)
    assert answer.parsed == parsed
    assert (str(answer), answer.token_ids) == (text, (1, 2))
    with pytest.raises(OptionError, match="max_tokens"):
        _ = dataclasses.replace(answer, text=text[:-1] + "[", finish_reason="length").parsed


def test_an_answer_is_a_chunk_and_short_in_a_notebook() -> None:
    answer = joined([Chunk("The sky is blue. " * 9, (7, 8), Metrics(), "stop")])
    assert isinstance(answer, Chunk)
    assert repr(answer) == f"<localrt.Answer '{('The sky is blue. ' * 9)[:59]}…' (stop, 2 tokens)>"


def test_what_has_no_schema() -> None:
    with pytest.raises(OptionError, match="json_schema"):
        read_options({"json_schema": object()})


def test_a_model_follows_a_type(tiny: localrt.Model, tmp_path: Path) -> None:
    answer = tiny.generate("The weather?", json_schema=City, max_tokens=120, seed=1)
    assert isinstance(answer.parsed, City)
    chat = tiny.chat(json_schema=list[bool], max_tokens=200, temperature=0)
    assert all(isinstance(each, bool) for each in chat.send("Well?", stop="x").parsed or [])
    chat.save(tmp_path / "chat.json")
    assert tiny.load_chat(tmp_path / "chat.json").options["json_schema"]["type"] == "array"
    (one,) = tiny.generate_batch(["a"], json_schema=City, max_tokens=120, seed=1)
    with tiny.live() as live:
        two = live.generate("a", json_schema=City, max_tokens=120, seed=1)
    assert isinstance(one.parsed, City)
    assert isinstance(two.parsed, City)


# -- functions as tools ----------------------------------------------------------------------------


def google(city: str, days: int = 3, *, unit: Literal["c", "f"] = "c") -> str:
    """Tell the weather.

    It is a guess.

    Args:
        city: Its name.
        days: How many.
    """
    return f"{city} {days} {unit}"


def numpy(city: str | None, where: Annotated[list[City], Field(max_length=2)]) -> object:
    """Tell it.

    Parameters
    ----------
    city : str
        Its name.
    """
    return {"city": city, "where": where}


def rest(title: Any, more) -> None:  # type: ignore[no-untyped-def]
    """
    :param title: Of a book.
    """  # fmt: skip


@pytest.mark.parametrize(
    ("function", "text", "required", "described", "kinds"),
    [
        (google, "Tell the weather.\n\nIt is a guess.", ["city"],
         {"city": "Its name.", "days": "How many."}, ["string", "integer", "string"]),
        (numpy, "Tell it.", ["city", "where"], {"city": "Its name."}, [None, "array"]),
        (rest, "", ["title", "more"], {"title": "Of a book."}, [None, None]),
    ],
)  # fmt: skip
def test_a_function_as_a_tool(
    function: Any, text: str, required: list[str], described: dict[str, str], kinds: list[Any]
) -> None:
    tool = tool_of(function)["function"]
    properties = tool["parameters"]["properties"]
    assert (tool["name"], tool["description"]) == (function.__name__, text)
    assert tool["parameters"]["required"] == required
    assert {n: p["description"] for n, p in properties.items() if "description" in p} == described
    assert [each.get("type") for each in properties.values()] == kinds
    assert not any("title" in each for each in properties.values())


def test_functions_that_are_no_tools(tiny: localrt.Model) -> None:
    def many(*texts: str) -> None: ...
    def place(x: int, /) -> None: ...
    def strange(x: Iterator[object()]) -> None: ...  # type: ignore[valid-type]

    for function in (many, place, strange, lambda x: x):
        with pytest.raises(OptionError, match="tool"):
            tiny.chat(tools=[function])


class Calling:
    """A host whose model makes the ``calls`` of each round, then answers; it keeps what it saw."""

    name, ctx, takes_tools, tokens, kv_nbytes = "calling", 0, True, 0, 0

    def __init__(self, *calls: Sequence[tuple[str, str]]) -> None:
        self.calls, self.seen, self.tools = list(calls), list[Any](), list[Any]()

    def check(self, options: object) -> None: ...
    def open_chat(self) -> Calling:
        return self

    def answer(self, messages: Any, options: Any, *, tools: Any, **_: Any) -> Iterator[Chunk]:
        self.seen, self.tools = list(messages), tools
        now = self.calls.pop(0) if self.calls else ()
        calls = tuple(ToolCall(f"c{at}", *call) for at, call in enumerate(now))
        yield Chunk("Well.", (1,), Metrics(), "tool_calls" if calls else "stop", tool_calls=calls)


def _chat(*calls: Sequence[tuple[str, str]]) -> tuple[Calling, ChatSession]:
    host: Any = Calling(*calls)
    return host, ChatSession(host)


async def later(x: int) -> int:
    return x + 1


def test_functions_run() -> None:
    given = '{"city": "Oslo"}'
    host, chat = _chat([("google", given), ("google", '{"days": "x"}')], [("google", given)])
    answer = chat.send("Weather?", tools=[google], run_tools=True)
    assert answer.finish_reason == "stop"
    assert [tool["function"]["name"] for tool in host.tools] == ["google"]
    results = [message["content"] for message in host.seen if message["role"] == "tool"]
    assert results[0] == results[2] == "Oslo 3 c"
    assert results[1].startswith("Wrong arguments: city: Missing")
    assert [m["role"] for m in chat.messages] == [
        *("user", "assistant", "tool", "tool", "assistant", "tool", "assistant")
    ]


def test_calls_that_end_the_loop() -> None:
    _, chat = _chat([("google", "{}"), ("unknown", "{}")])
    assert chat.send("a", tools=[google], run_tools=True).finish_reason == "tool_calls"
    host, chat = _chat(*[[("google", "{}")]] * 99)
    assert chat.send("a", tools=[google], run_tools=True).finish_reason == "tool_calls"
    assert len(host.calls) == 99 - ROUNDS - 1

    def broken() -> None:
        raise ZeroDivisionError

    _, chat = _chat([("broken", "{}")])
    with pytest.raises(ZeroDivisionError):
        chat.send("a", tools=[broken], run_tools=True)
    _, chat = _chat([("later", '{"x": 1}')])
    with pytest.raises(OptionError, match="asend"):
        chat.send("a", tools=[later], run_tools=True)


async def test_coroutines_run() -> None:
    host, chat = _chat([("later", '{"x": 1}'), ("google", "{}"), ("later", "{}")])
    answer = await chat.asend("a", tools=[later, google], run_tools=True)
    assert answer.finish_reason == "stop"
    assert [m["content"][:5] for m in host.seen if m["role"] == "tool"] == ["2", "Wrong", "Wrong"]


# -- names and options -----------------------------------------------------------------------------


def test_names_are_completed_and_listed() -> None:
    names = set(localrt.__all__)
    assert names <= set(dir(localrt))
    completer = rlcompleter.Completer({"localrt": localrt})
    assert completer.complete("localrt.DocumentI", 0) == "localrt.DocumentIndex("
    told = pydoc.plain(pydoc.render_doc(localrt))
    assert all(name in told for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Modle'"):
        _ = localrt.Modle  # type: ignore[attr-defined]


def test_options_are_typed() -> None:
    hints = get_type_hints(localrt.GenerateOptions)
    assert set(hints) == set(OPTION_NAMES)
    for options in (localrt.Options, localrt.Sampling):
        for name, hint in get_type_hints(options).items():
            if name in hints and name not in ("stop", "json_schema", "thinking"):
                assert hint in (hints[name], *getattr(hints[name], "__args__", ())) or (
                    set(hint.__args__) <= set(hints[name].__args__)
                ), name
    for owner, name, kind in (
        (localrt.Model.stream, "generate", localrt.PromptOptions),
        (localrt.Model.stream_batch, "generate_batch", localrt.BatchOptions),
        (ChatSession.stream, "send", localrt.SendOptions),
    ):
        own = set(inspect.signature(owner).parameters) - {
            "self",
            "prompt",
            "prompts",
            "text",
            "options",
        }
        assert set(get_type_hints(kind)) - set(hints) == own, name


@pytest.mark.slow
def test_misspelt_options(tmp_path: Path) -> None:
    code = tmp_path / "code.py"
    code.write_text(
        "import localrt\nmodel = localrt.load()\nchat = model.chat(temperature=0.5)\n"
        "model.generate('a', temprature=1.0)\nmodel.generate('a', top_k='b')\n"
        "chat.send('a', max_token=1)\nlocalrt.Modle\n"
        "chat.send('a', top_k=1, json_schema=int, tools=[print], run_tools=True)\n"
    )
    command = [sys.executable, "-m", "mypy", "--strict", str(code)]
    built = (
        Path(localrt.__file__).parents[1] / "build"
    )  # scripts/lint's, whose cache saves a minute
    environment = {**os.environ, "MYPYPATH": str(built / "types")}
    said = subprocess.run(
        [*command, "--cache-dir", str(built / "mypy")],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    ).stdout
    assert [line.split(":")[1] for line in said.splitlines() if ": error:" in line] == [*"4567"], (
        said
    )
