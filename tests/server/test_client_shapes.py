"""What programs send, and what the model is shown of it: a new report is one more row."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from localrt.server import anthropic, ollama
from localrt.server.anthropic import messages_call
from localrt.server.dialect import GenerationRequest
from localrt.server.media import in_words
from localrt.server.messages import text_of, unnoted
from localrt.server.openai.calls import CHAT, chat_call
from localrt.server.request_schema import RequestSchema
from localrt.server.responses.calls import RESPONSES, items_of, responses_call
from tests.server.conftest import Running
from tests.server.dialects import colours

HI: dict[str, Any] = {"role": "user", "content": "hi"}
RECORDED = json.loads(
    Path(__file__).parent.parent.joinpath("data/client_messages.json").read_text("utf-8")
)
PNG = "data:image/png;base64," + "iVBORw0K" * 50
NOTES = base64.b64encode(b"Buy milk.").decode()
PATHS = {
    "CHAT": "/v1/chat/completions",
    "MESSAGES": "/v1/messages",
    "RESPONSES": "/v1/responses",
    "OLLAMA_CHAT": "/api/chat",
}


SCHEMAS: dict[str, RequestSchema] = {
    "CHAT": CHAT,
    "MESSAGES": anthropic.MESSAGES,
    "RESPONSES": RESPONSES,
    "OLLAMA_CHAT": ollama.CHAT,
}
ASKED: dict[str, dict[str, Any]] = {
    "CHAT": {"messages": [HI]},
    "MESSAGES": {"messages": [HI], "model": "m", "max_tokens": 9},
    "RESPONSES": {"input": "hi"},
    "OLLAMA_CHAT": {"messages": [HI], "model": "m"},
}


def read(kind: str, **fields: Any) -> GenerationRequest:
    """The call that a body of a dialect is."""
    checked = SCHEMAS[kind].check({**ASKED[kind], **fields})
    if kind == "RESPONSES":
        return responses_call(checked, items_of(checked.get("input")))
    reading: Any = {"CHAT": chat_call, "MESSAGES": messages_call, "OLLAMA_CHAT": ollama.chat_call}
    found: GenerationRequest = reading[kind](checked)
    return found


def messages(kind: str, given: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages that the template of a model without sight gets; thoughts by one name."""
    call = read(kind, **{"input" if kind == "RESPONSES" else "messages": given}, **fields)
    return [
        {name: value for name, value in message.items() if name not in ("thinking", "reasoning")}
        for message in in_words(call.prompts[0])["prompt"]
    ]


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": kind, **fields}


def text(words: str | None) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*content: Any) -> dict[str, Any]:
    """One text as it is, else a list of parts."""
    whole = len(content) == 1 and isinstance(content[0], str)
    return {"role": "user", "content": content[0] if whole else list(content)}


def said(*content: Any) -> dict[str, Any]:
    return {**user(*content), "role": "assistant"}


# -- parts of contents -----------------------------------------------------------------------------

PARTS: list[tuple[Any, str]] = [
    # Text, in the words of each dialect.
    (block("text", text="a", cache_control=block("ephemeral")), "a"),
    (text(None), ""),
    (block("input_text", text="a"), "a"),
    (block("refusal", refusal="No."), "No."),
    ("a", "a"),
    # Pictures and sounds.
    (block("image", source=block("base64", data="AAAA")), "[image left out]"),
    (block("image_url", image_url={"url": PNG}), "[image left out]"),
    (block("input_audio", input_audio={"data": "AAAA"}), "[audio left out]"),
    # Documents and files: their text, if they are text.
    (block("document", title="T", source=block("text", data="Buy milk.")), "T\nBuy milk."),
    (block("document", source=block("base64", media_type="text/plain", data=NOTES)), "Buy milk."),
    (
        block("file", file={"filename": "n.txt", "file_data": f"data:text/plain;base64,{NOTES}"}),
        "n.txt\nBuy milk.",
    ),
    (
        block("input_file", filename="r.pdf", file_data="data:application/pdf;base64,JVBE"),
        "[file left out: r.pdf]",
    ),
    # What no model is shown as it is: without ids, and without what only its maker can read.
    (block("tool_reference", tool_name="look"), '[tool_reference: {"tool_name": "look"}]'),
    (
        block(
            "web_search_result", title="T", url="https://example.org", encrypted_content="x" * 999
        ),
        '[web_search_result: {"title": "T", "url": "https://example.org"}]',
    ),
    (block("compaction", content="What was said."), "What was said."),
    (block("hologram", id="h1", data="A" * 999), "[hologram left out]"),
]


@pytest.mark.parametrize(("part", "words"), PARTS)
def test_part_becomes_text(part: Any, words: str) -> None:
    assert text_of([part], unnoted) == words


def test_deep_content() -> None:
    part: Any = text("a")
    for _ in range(900):
        part = block("document", content=[part])
    assert text_of([part, 7], unnoted).endswith("\n\n7")


# -- messages --------------------------------------------------------------------------------------

# What programs sent: whoever reports one adds what was recorded.
MESSAGES: list[tuple[str, Any, list[dict[str, Any]]]] = [
    (row["dialect"], row["given"], row["expected"]) for row in RECORDED
]


@pytest.mark.parametrize(
    ("kind", "given", "expected"), MESSAGES, ids=[row["about"] for row in RECORDED]
)
def test_history(server: Running, kind: str, given: Any, expected: Any) -> None:
    assert messages(kind, given) == expected
    few = {"max_output_tokens": 1} if kind == "RESPONSES" else {"max_tokens": 1}
    body = {"input" if kind == "RESPONSES" else "messages": given, "model": "tiny", **few}
    status, got, _ = server.request("POST", PATHS[kind], {**body, "stream": False})
    assert status == 200, got


BILLED = "x-anthropic-billing-header: cc_version=2.1; cch=00001;"


@pytest.mark.parametrize(
    "system", [f"{BILLED}\nYou are an agent.", [text(BILLED), text("You are an agent.")]]
)
def test_billing_header_is_left_out(system: Any) -> None:
    hi = user("x-anthropic-billing-header: what is that?")
    expected = [{"role": "system", "content": "You are an agent."}, hi]
    assert messages("MESSAGES", [hi], system=system) == expected
    assert messages("CHAT", [{"role": "system", "content": system}, hi]) == expected


def test_notes_of_left_out_parts(server: Running) -> None:
    server.notes.clear()
    part = block("hologram", data="x")
    for _ in range(2):
        body = {"messages": [user(part)], "max_tokens": 1}
        body["tools"] = [block("telescope")]
        assert server.request("POST", PATHS["CHAT"], body)[0] == 200
    assert [note for note in server.notes if "hologram" in note or "telescope" in note] == [
        "a tool of the type telescope is left out: only its vendor's server can run it",
        "messages hold hologram: the model is shown words in its place",
    ]


# -- tools -----------------------------------------------------------------------------------------

OBJECT = {"type": "object", "properties": {}}
AT = {"type": "object", "properties": {"at": {"type": "string"}}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}


def takes(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters, **fields}


TOOLS: list[tuple[str, list[Any], list[dict[str, Any]]]] = [
    ("CHAT", [{"type": "function", "function": takes("f", AT)}], [takes("f", AT)]),
    ("CHAT", [{"type": "function", "function": takes("f", None)}], [takes("f", OBJECT)]),
    ("CHAT", [{"function": takes("f", AT)}], [takes("f", AT)]),
    ("CHAT", [{"type": "function", **takes("f", AT)}], [takes("f", AT)]),
    ("CHAT", [block("web_search"), block("googleSearch", googleSearch={})], []),
    ("MESSAGES", [{"name": "f", "input_schema": AT, "cache_control": {}}], [takes("f", AT)]),
    ("MESSAGES", [{"name": "f", "defer_loading": True}], [takes("f", OBJECT)]),
    (
        "MESSAGES",
        [
            block("web_search_20250305", name="web_search", max_uses=8),
            block("mcp_toolset", mcp_server_name="m"),
            block("computer_20250124", name="computer", display_width_px=9),
        ],
        [],
    ),
    ("RESPONSES", [{"type": kind} for kind in ("web_search", "image_generation")], []),
    (
        "RESPONSES",
        [
            block("namespace", name="mcp__m__", tools=[{"type": "function", "name": "f"}]),
            block("namespace", name="functions", tools=[{"type": "function", "name": "g"}]),
        ],
        [takes("mcp__m__f", OBJECT), takes("g", OBJECT)],
    ),
    (
        "RESPONSES",
        [block("tool_search", execution="client", parameters=AT, description="D")],
        [takes("tool_search", AT, description="D")],
    ),
]


@pytest.mark.parametrize(("kind", "tools", "functions"), TOOLS)
def test_tools_become_functions(kind: str, tools: Any, functions: Any) -> None:
    found = read(kind, tools=tools).prompts[0]["tools"]
    expected = [{"type": "function", "function": one} for one in functions]
    assert found == (expected or None)


def test_tools_in_items_are_offered() -> None:
    loaded = [
        block(
            "additional_tools",
            role="developer",
            tools=[block("namespace", name="functions", tools=[block("custom", name="exec")])],
        ),
        block("tool_search_output", call_id="c", tools=[{"type": "function", "name": "f"}]),
    ]
    call = read("RESPONSES", input=[HI, *loaded])
    assert [one["function"]["name"] for one in call.prompts[0]["tools"]] == ["exec", "f"]
    assert call.known["exec"].type == "custom"


FG = [{"type": "function", "function": {"name": name}} for name in "fg"]
CHOICES: list[tuple[str, Any, Any, str, str]] = [
    ("CHAT", FG, "any", "required", "fg"),
    ("CHAT", FG, block("any"), "required", "fg"),
    ("CHAT", FG, {"type": "function", "function": {"name": "f"}}, "f", "fg"),
    (
        "CHAT",
        FG,
        block("allowed_tools", allowed_tools={"mode": "required", "tools": FG[:1]}),
        "required",
        "f",
    ),
    ("RESPONSES", [block("web_search")], "required", "auto", ""),
    # Claude Code's web search asks for a tool of Anthropic's server.
    (
        "MESSAGES",
        [block("web_search_20250305", name="web_search")],
        block("tool", name="web_search"),
        "auto",
        "",
    ),
]


@pytest.mark.parametrize(("kind", "tools", "given", "choice", "names"), CHOICES)
def test_tool_choice(kind: str, tools: Any, given: Any, choice: str, names: str) -> None:
    call = read(kind, tools=tools, tool_choice=given)
    assert call.options.get("tool_choice", "auto") == choice
    found = [one["function"]["name"] for one in call.prompts[0]["tools"] or ()]
    assert not names or found == list(names)


def test_tool_with_grammar() -> None:
    tool = block("custom", name="p", description="D", format=GRAMMAR)
    (found,) = read("RESPONSES", tools=[tool]).prompts[0]["tools"]
    function = found["function"]
    assert list(function["parameters"]["properties"]) == ["input"]
    assert function["description"].startswith("D\n")
    assert "lark" in function["description"]
    assert GRAMMAR["definition"] in function["description"]


# -- options ---------------------------------------------------------------------------------------


def told(**variables: Any) -> dict[str, Any]:
    return {"chat_template_kwargs": variables}


@pytest.mark.parametrize(
    ("kind", "fields", "options"),
    [
        ("CHAT", {"stop": ""}, {}),
        ("CHAT", {"stop": ["", "x"]}, {"stop": ["x"]}),
        ("CHAT", {"reasoning_effort": None, "chat_template_kwargs": None}, {}),
        ("CHAT", {"reasoning_effort": "none"}, {"thinking": False}),
        ("CHAT", {"reasoning_effort": "minimal"}, {"thinking": "low"}),
        ("CHAT", {"reasoning_effort": "ultra"}, {"thinking": "high"}),
        ("CHAT", told(enable_thinking=False), {"thinking": False}),
        ("CHAT", told(thinking=True, other=1), {"thinking": True}),
        ("CHAT", {"reasoning_effort": "low", **told(enable_thinking=False)}, {"thinking": False}),
        ("CHAT", {"thinking_tokens": 8}, {"thinking_tokens": 8}),
        ("CHAT", {"thinking_token_budget": 0}, {"thinking_tokens": 0}),
        ("CHAT", {"thinking_budget_tokens": -1}, {}),
        ("CHAT", {"max_tokens": -1, "seed": -1, "top_k": -1}, {"top_k": 0}),  # as in llama.cpp
        (
            "CHAT",
            {"logit_bias": {"70": 9}, "presence_penalty": 2},
            {"logit_bias": {70: 9}, "presence_penalty": 2},
        ),
        ("CHAT", {"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ("CHAT", {"json_schema": "{}"}, {"json_schema": "{}"}),  # SGLang
        ("CHAT", {"format": AT, "json_schema": AT, "regex": ""}, {"json_schema": AT}),  # Ollama
        *[
            (kind, fields, {**more, "json_schema": schema})
            for form, schema in [
                ({"type": "json_schema", "json_schema": {"name": "at", "schema": AT}}, AT),
                ({"type": "json_schema", "schema": AT}, AT),  # llama.cpp's
                ({"type": "json_object", "schema": AT}, AT),
                ({"type": "json_object"}, {"type": "object"}),
            ]
            for kind, fields, more in [
                ("CHAT", {"response_format": form}, {}),
                ("RESPONSES", {"text": {"format": form}}, {}),
            ]
        ],
        (
            "MESSAGES",
            {"output_config": {"format": {"type": "json_schema", "schema": AT}}},
            {"max_tokens": 9, "thinking": False, "json_schema": AT},
        ),
        ("MESSAGES", {"stop_sequences": [""]}, {"max_tokens": 9, "thinking": False}),
        (
            "MESSAGES",
            {"context_management": {"edits": []}, "mcp_servers": [], "container": "c"},
            {"max_tokens": 9, "thinking": False},
        ),
        *[
            (
                "MESSAGES",
                {
                    "output_config": {"effort": "low"},
                    "messages": [HI, {"role": "system", "content": "x", "output_config": own}],
                },
                {"max_tokens": 9, "thinking": thinking},
            )
            for own, thinking in [({"effort": "high"}, "high"), (None, "low")]
        ],
        ("RESPONSES", {"background": True, "client_metadata": {}, "prompt_cache_key": "k"}, {}),
        ("OLLAMA_CHAT", {"think": "max", "truncate": False}, {"thinking": "high"}),
        ("OLLAMA_CHAT", {"options": {"stop": [""]}, "truncate": False}, {}),
        ("OLLAMA_CHAT", {"format": "json", "truncate": False}, {"json_schema": {"type": "object"}}),
        ("OLLAMA_CHAT", {"options": {"seed": 3}, "truncate": False}, {"seed": 3}),
    ],
)
def test_fields_become_options(kind: str, fields: Any, options: Any) -> None:
    assert read(kind, **fields).options == options


@pytest.mark.parametrize("content", ["", [{"type": "text", "text": ""}]])
def test_an_empty_system_message_is_no_turn(content: Any) -> None:
    call = read("MESSAGES", messages=[HI, {"role": "system", "content": content}])
    assert [each["role"] for each in call.prompts[0]["prompt"]] == ["user"]


# -- whole requests --------------------------------------------------------------------------------


def test_former_function_call(server: Running) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    body = {
        "functions": [takes("paint", colours("red"))],
        "function_call": {"name": "paint"},
        "max_tokens": 300,
        "temperature": 0,
    }
    status, got, _ = server.chat(**body)
    assert status == 200, got
    (choice,) = got["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("function_call", None)
    assert choice["message"]["function_call"]["name"] == "paint"
    assert json.loads(choice["message"]["function_call"]["arguments"])["colour"] == "red"


def test_custom_tool_call(server: Running) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    wanted = {"max_tokens": 300, "temperature": 0, "tool_choice": "required"}
    wanted["parallel_tool_calls"] = False
    grammar = {"syntax": "regex", "definition": "red|blue"}
    custom = {"name": "paint", "format": {"type": "grammar", "grammar": grammar}}
    tools = [block("custom", custom=custom)]
    status, got, _ = server.chat(tools=tools, **wanted)
    assert status == 200, got
    (call,) = got["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "paint")
    assert call["custom"]["input"] in ("red", "blue")
    _, text, _ = server.chat(tools=tools, stream=True, **wanted)
    assert json.dumps(call["custom"], separators=(",", ":")) in text
