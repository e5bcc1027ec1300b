"""What programs send, and what the model is shown of it: a new report is one more row."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.server.anthropic.calls import messages_call
from localrt.server.bodies import check_fields
from localrt.server.dialect import Generation
from localrt.server.errors import ApiError
from localrt.server.messages import text_of, unnoted
from localrt.server.ollama import calls as ollama
from localrt.server.openai.calls import chat_call
from localrt.server.responses.calls import items_of, responses_call
from tests.server.conftest import Running

HI: dict[str, Any] = {"role": "user", "content": "hi"}
PNG = "data:image/png;base64," + "iVBORw0K" * 50
NOTES = base64.b64encode(b"Buy milk.").decode()
PATHS = {
    "CHAT": "/v1/chat/completions",
    "MESSAGES": "/v1/messages",
    "RESPONSES": "/v1/responses",
    "OLLAMA_CHAT": "/api/chat",
}


def read(kind: str, **fields: Any) -> Generation:
    """The call that a body of a dialect is."""
    more = {"CHAT": {}, "RESPONSES": {}, "OLLAMA_CHAT": {"model": "m"}}
    checked = check_fields(kind, {**more.get(kind, {"model": "m", "max_tokens": 9}), **fields})
    if kind == "RESPONSES":
        return responses_call(checked, items_of(checked.get("input")))
    reading: Any = {"CHAT": chat_call, "MESSAGES": messages_call, "OLLAMA_CHAT": ollama.chat_call}
    found: Generation = reading[kind](checked)
    return found


def messages(kind: str, given: Any, **fields: Any) -> list[dict[str, Any]]:
    """The messages that a template gets; thoughts by one name."""
    call = read(kind, **{"input" if kind == "RESPONSES" else "messages": given}, **fields)
    return [
        {name: value for name, value in message.items() if name not in ("thinking", "reasoning")}
        for message in call.prompts[0]["prompt"]
    ]


def called(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def says(content: str, *calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": list(calls)} if calls else {}),
        **fields,
    }


def result(content: str, call_id: str = "c1", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **fields}


# -- parts of contents -----------------------------------------------------------------------------

PARTS: list[tuple[Any, str]] = [
    # Text, in the words of each dialect.
    ({"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, "a"),
    ({"type": "text", "text": None}, ""),
    ({"type": "input_text", "text": "a"}, "a"),
    ({"type": "output_text", "text": "a", "annotations": []}, "a"),
    ({"type": "refusal", "refusal": "No."}, "No."),
    ({"text": "a"}, "a"),
    ("a", "a"),
    # Pictures and sounds.
    ({"type": "image", "source": {"type": "base64", "data": "AAAA"}}, "[image left out]"),
    ({"type": "image_url", "image_url": {"url": PNG}}, "[image left out]"),
    ({"type": "input_image", "image_url": PNG, "detail": "auto"}, "[image left out]"),
    ({"type": "computer_screenshot", "image_url": PNG}, "[screenshot left out]"),
    ({"type": "input_audio", "input_audio": {"data": "AAAA"}}, "[audio left out]"),
    ({"type": "audio_url", "audio_url": {"url": "u"}}, "[audio left out]"),
    ({"type": "video_url", "video_url": {"url": "u"}}, "[video left out]"),
    # Documents and files: their text, if they are text.
    (
        {"type": "document", "title": "T", "source": {"type": "text", "data": "Buy milk."}},
        "T\nBuy milk.",
    ),
    (
        {
            "type": "document",
            "source": {"type": "content", "content": [{"type": "text", "text": "a"}]},
        },
        "a",
    ),
    (
        {
            "type": "document",
            "source": {"type": "base64", "media_type": "text/plain", "data": NOTES},
        },
        "Buy milk.",
    ),
    (
        {
            "type": "document",
            "title": "R",
            "source": {"type": "base64", "media_type": "application/pdf", "data": "JVBE"},
        },
        "[document left out: R]",
    ),
    (
        {
            "type": "file",
            "file": {"filename": "n.txt", "file_data": f"data:text/plain;base64,{NOTES}"},
        },
        "n.txt\nBuy milk.",
    ),
    ({"type": "file", "file": {"file_id": "file-1"}}, "[file left out]"),
    (
        {
            "type": "input_file",
            "filename": "r.pdf",
            "file_data": "data:application/pdf;base64,JVBE",
        },
        "[file left out: r.pdf]",
    ),
    (
        {
            "type": "search_result",
            "title": "T",
            "source": "https://example.org",
            "content": [{"type": "text", "text": "a"}],
        },
        "T\na",
    ),
    # What no model is shown as it is: without ids, and without what only its maker can read.
    ({"type": "redacted_thinking", "data": "x"}, ""),
    ({"type": "tool_reference", "tool_name": "look"}, '[tool_reference: {"tool_name": "look"}]'),
    (
        {
            "type": "web_search_result",
            "title": "T",
            "url": "https://example.org",
            "encrypted_content": "x" * 999,
        },
        '[web_search_result: {"title": "T", "url": "https://example.org"}]',
    ),
    ({"type": "compaction", "encrypted_content": "x"}, "[compaction left out]"),
    ({"type": "compaction", "content": "What was said."}, "What was said."),
    (
        {"type": "code_execution_result", "stdout": "4", "stderr": "", "return_code": 0},
        '[code_execution_result: {"stdout": "4", "return_code": 0}]',
    ),
    ({"type": "hologram", "id": "h1", "data": "A" * 999}, "[hologram left out]"),
    ({"stdout": "4"}, '{"stdout": "4"}'),
    (7, "7"),
]


@pytest.mark.parametrize(("part", "words"), PARTS)
def test_part_becomes_text(part: Any, words: str) -> None:
    assert text_of([part], unnoted) == words


@pytest.mark.parametrize("part", [part for part, _ in PARTS if isinstance(part, dict)])
def test_part_in_any_dialect_is_no_error(part: Any) -> None:
    words = text_of([part], unnoted)
    content = [{"type": "text", "text": "Look:"}, part]
    for kind, joint in (("CHAT", "\n"), ("MESSAGES", "\n\n"), ("RESPONSES", "\n")):
        expected = joint.join(filter(None, ("Look:", words)))
        (shown,) = messages(kind, [{"role": "user", "content": content}])
        if part.get("type") == "text":
            shown["content"] = shown["content"].rstrip("\n")
        assert shown == {"role": "user", "content": expected}, kind
    (shown,) = messages("OLLAMA_CHAT", [{"role": "user", "content": content}])
    assert shown["content"] == "\n\n".join(filter(None, ("Look:", words)))


def test_deep_content_is_no_error() -> None:
    part: Any = {"type": "text", "text": "a"}
    for _ in range(900):
        part = {"type": "document", "content": [part]}
    assert text_of([part], unnoted)


# -- messages --------------------------------------------------------------------------------------

USE = {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "a"}}
SEARCH = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {"query": "q"}}
FOUND = {
    "type": "web_search_tool_result",
    "tool_use_id": "s1",
    "content": [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "x"}],
}
RAN = {"type": "function_call_output", "call_id": "c1", "output": "done"}

MESSAGES: list[tuple[str, Any, list[dict[str, Any]]]] = [
    # Claude Code: what its tool search finds, pictures that it reads.
    (
        "MESSAGES",
        [
            {"role": "assistant", "content": [USE]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "tool_reference", "tool_name": "b"}],
                    },
                    {"type": "text", "text": "Tool loaded."},
                ],
            },
        ],
        [
            says("", called("look", '{"at": "a"}')),
            result('[tool_reference: {"tool_name": "b"}]'),
            {"role": "user", "content": "Tool loaded."},
        ],
    ),
    (
        "MESSAGES",
        [
            HI,
            {"role": "assistant", "content": [USE]},
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "c1",
                        "content": [{"type": "image", "source": {"type": "base64", "data": "A"}}],
                    }
                ],
            },
        ],
        [HI, says("", called("look", '{"at": "a"}')), result("[image left out]")],
    ),
    # A search that a vendor's server carried out.
    (
        "MESSAGES",
        [
            HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Let me look."},
                    SEARCH,
                    FOUND,
                    {"type": "text", "text": "Here."},
                ],
            },
            HI,
        ],
        [
            HI,
            says("Let me look.", called("web_search", '{"query": "q"}', "s1")),
            result('[web_search_result: {"title": "T", "url": "u"}]', "s1"),
            says("Here."),
            HI,
        ],
    ),
    # Thoughts that only their maker can read, results without content, empty messages.
    (
        "MESSAGES",
        [
            HI,
            {
                "role": "assistant",
                "content": [
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    USE,
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]},
            {"role": "assistant", "content": []},
            HI,
        ],
        [
            HI,
            says("", called("look", '{"at": "a"}'), reasoning_content="Hm."),
            result(""),
            HI,
        ],
    ),
    # Codex: its patches, its shell, its searches.
    (
        "RESPONSES",
        [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
            {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** P"},
            {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"},
            {
                "type": "local_shell_call",
                "call_id": "c2",
                "status": "completed",
                "action": {"type": "exec", "command": ["ls"], "env": None},
            },
            {"type": "local_shell_call_output", "call_id": "c2", "output": "a.py"},
            {
                "type": "web_search_call",
                "status": "completed",
                "action": {"type": "search", "query": "q"},
            },
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "So."}],
            },
            {"type": "compaction", "encrypted_content": "x"},
            HI,
        ],
        [
            HI,
            says("", called("apply_patch", '{"input": "*** P"}')),
            result("done"),
            says("", called("local_shell", '{"command": ["ls"], "env": null}', "c2")),
            result("a.py", "c2"),
            says('[web_search_call: {"action": {"query": "q"}}]\n\nSo.\n\n[compaction left out]'),
            HI,
        ],
    ),
    (
        "RESPONSES",
        [
            HI,
            {
                "type": "function_call",
                "call_id": "c1",
                "namespace": "mcp__files__",
                "name": "look",
                "arguments": "{}",
            },
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [
                    {"type": "input_text", "text": "Screen:"},
                    {"type": "input_image", "image_url": PNG},
                ],
            },
        ],
        [HI, says("", called("mcp__files__look", "{}")), result("Screen:\n\n[image left out]")],
    ),
    (
        "RESPONSES",
        [
            HI,
            {
                "type": "tool_search_call",
                "call_id": "c1",
                "execution": "client",
                "arguments": {"query": "q"},
            },
            {
                "type": "tool_search_output",
                "call_id": "c1",
                "tools": [{"type": "namespace", "name": "n", "tools": [{"name": "look"}]}],
            },
        ],
        [
            HI,
            says("", called("tool_search", '{"query": "q"}')),
            result("tools that can be called now: n__look"),
        ],
    ),
    # The shell and patches of OpenAI's newer models, an item of the next year, one that is gone.
    (
        "RESPONSES",
        [
            HI,
            {"type": "shell_call", "call_id": "c1", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c1", "output": [{"stdout": "a.py"}]},
            {"type": "telepathy", "id": "t1", "thought": "blue"},
            {"type": "item_reference", "id": "msg_gone"},
        ],
        [
            HI,
            says("", called("shell", '{"commands": ["ls"]}')),
            result('{"stdout": "a.py"}'),
            says('[telepathy: {"thought": "blue"}]\n\n[item_reference left out]'),
        ],
    ),
    # Open WebUI and others: pictures in a conversation that goes on without them.
    (
        "CHAT",
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "What is it?"},
                    {"type": "image_url", "image_url": {"url": PNG}},
                ],
            },
            says("I cannot see it."),
            HI,
        ],
        [
            {"role": "user", "content": "What is it?\n[image left out]"},
            says("I cannot see it."),
            HI,
        ],
    ),
    # Contents that are null, missing or empty, parts of a tool's result, a refusal, audio.
    (
        "CHAT",
        [
            HI,
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "audio": None,
                "tool_calls": [called("look", "{}")],
            },
            {
                "role": "tool",
                "tool_call_id": "c1",
                "name": "look",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant"},
            {"role": "assistant", "content": []},
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "Never."}]},
        ],
        [
            HI,
            says("", called("look", "{}")),
            result("a\nb", name="look"),
            says(""),
            says(""),
            says("No."),
            says("Never."),
        ],
    ),
    # The calls of before there were tools.
    (
        "CHAT",
        [
            HI,
            {
                "role": "assistant",
                "content": None,
                "function_call": {"name": "look", "arguments": "{}"},
            },
            {"role": "function", "name": "look", "content": "done"},
        ],
        [HI, says("", called("look", "{}", "call_1")), result("done", "call_1", name="look")],
    ),
    # A tool that takes a text; arguments as an object, or none; Anthropic's blocks in a chat.
    (
        "CHAT",
        [
            HI,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** P"}},
                    {"id": "c2", "function": {"name": "look", "arguments": {"at": "a"}}},
                    {"id": "c3", "function": {"name": "look"}},
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": {"ok": True}},
        ],
        [
            HI,
            says(
                "",
                called("patch", '{"input": "*** P"}'),
                called("look", '{"at": "a"}', "c2"),
                called("look", "{}", "c3"),
            ),
            result('{"ok": true}'),
        ],
    ),
    (
        "CHAT",
        [
            HI,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "Hm."}, USE]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "done"}],
            },
        ],
        [
            HI,
            says("", called("look", '{"at": "a"}'), reasoning_content="Hm."),
            result("done"),
        ],
    ),
    # LangChain: thoughts and calls as parts, and the calls once more; qwen-code: a picture that a
    # tool gave.
    (
        "CHAT",
        [
            HI,
            {
                "role": "assistant",
                "content": [
                    {
                        "type": "reasoning",
                        "id": "rs_1",
                        "summary": [{"type": "summary_text", "text": "Hm."}],
                    },
                    {"type": "text", "text": "So."},
                    {
                        "type": "function_call",
                        "name": "look",
                        "arguments": '{"at": "a"}',
                        "call_id": "c1",
                    },
                    {"type": "tool_call", "id": "c2", "name": "look", "args": {"at": "b"}},
                ],
                "tool_calls": [called("look", '{"at": "a"}')],
            },
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [
                    {"type": "text", "text": "Screen:"},
                    {"type": "image_url", "image_url": {"url": PNG}},
                ],
            },
        ],
        [
            HI,
            says(
                "So.",
                called("look", '{"at": "b"}', "c2"),
                called("look", '{"at": "a"}'),
                reasoning_content="Hm.",
            ),
            result("Screen:\n[image left out]"),
        ],
    ),
    # OpenRouter: thoughts as a list, some of which are encrypted.
    (
        "CHAT",
        [
            HI,
            {
                "role": "assistant",
                "content": "So.",
                "reasoning_details": [
                    {"type": "reasoning.summary", "summary": "H"},
                    {"type": "reasoning.text", "text": "m.", "signature": None},
                    {"type": "reasoning.encrypted", "data": "x"},
                ],
            },
        ],
        [HI, says("So.", reasoning_content="Hm.")],
    ),
    # The ``ai`` package and openai-agents: what a response said, with ids that mean nothing here.
    (
        "RESPONSES",
        [
            {"role": "system", "content": "Be brief."},
            HI,
            {
                "id": "__fake_id__",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [
                    {"type": "output_text", "text": "So.", "annotations": [], "logprobs": []}
                ],
            },
            {
                "id": "__fake_id__",
                "type": "function_call",
                "call_id": "c1",
                "name": "f",
                "arguments": "",
            },
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": {"content": "no", "success": False},
            },
            {"type": "mcp_call", "id": "m1", "name": "f", "arguments": "{}", "output": "4"},
        ],
        [
            {"role": "system", "content": "Be brief."},
            HI,
            says("So.", called("f", "")),
            result("no"),
            says('[mcp_call: {"name": "f", "arguments": "{}", "output": "4"}]'),
        ],
    ),
    # Ollama: roles, parts, pictures, ids of calls.
    (
        "OLLAMA_CHAT",
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "What is it?", "images": ["AAAA", "BBBB"]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c1", "function": {"name": "look", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
        ],
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "What is it?\n\n[image left out]\n\n[image left out]"},
            says("", called("look", '{"a": 1}')),
            result("done", name="look"),
        ],
    ),
]


@pytest.mark.parametrize(("kind", "given", "expected"), MESSAGES)
def test_history_is_shown(kind: str, given: Any, expected: Any) -> None:
    assert messages(kind, given) == expected


# -- tools -----------------------------------------------------------------------------------------

OBJECT = {"type": "object", "properties": {}}
AT = {"type": "object", "properties": {"at": {"type": "string"}}}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}


def takes(name: str, parameters: Any, **fields: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters, **fields}


TOOLS: list[tuple[str, list[Any], list[dict[str, Any]]]] = [
    ("CHAT", [{"type": "function", "function": takes("f", AT)}], [takes("f", AT)]),
    ("CHAT", [{"type": "function", "function": takes("f", None)}], [takes("f", OBJECT)]),
    ("CHAT", [{"type": "function", "function": {"name": "f"}}], [takes("f", OBJECT)]),
    ("CHAT", [{"type": "function", "function": takes("f", {})}], [takes("f", OBJECT)]),
    ("CHAT", [{"function": takes("f", AT)}], [takes("f", AT)]),
    ("CHAT", [{"type": "function", **takes("f", AT)}], [takes("f", AT)]),
    ("CHAT", [{"type": "web_search"}, {"type": "googleSearch", "googleSearch": {}}], []),
    ("MESSAGES", [{"name": "f", "input_schema": AT, "cache_control": {}}], [takes("f", AT)]),
    ("MESSAGES", [{"type": "custom", "name": "f", "input_schema": AT}], [takes("f", AT)]),
    ("MESSAGES", [{"name": "f", "defer_loading": True}], [takes("f", OBJECT)]),
    (
        "MESSAGES",
        [
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
            {"type": "web_fetch_20250910", "name": "web_fetch"},
            {"type": "code_execution_20250825", "name": "code_execution"},
            {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
            {"type": "mcp_toolset", "mcp_server_name": "m"},
            {"type": "computer_20250124", "name": "computer", "display_width_px": 9},
        ],
        [],
    ),
    ("OLLAMA_CHAT", [{"type": "function", "function": takes("f", None)}], [takes("f", OBJECT)]),
    ("RESPONSES", [{"type": "function", **takes("f", None)}], [takes("f", OBJECT)]),
    (
        "RESPONSES",
        [{"type": kind} for kind in ("web_search", "image_generation", "mcp", "code_interpreter")],
        [],
    ),
    (
        "RESPONSES",
        [
            {"type": "namespace", "name": "mcp__m__", "tools": [{"type": "function", "name": "f"}]},
            {
                "type": "namespace",
                "name": "functions",
                "tools": [{"type": "function", "name": "g"}],
            },
        ],
        [takes("mcp__m__f", OBJECT), takes("g", OBJECT)],
    ),
    (
        "RESPONSES",
        [{"type": "tool_search", "execution": "client", "parameters": AT, "description": "D"}],
        [takes("tool_search", AT, description="D")],
    ),
]


@pytest.mark.parametrize(("kind", "tools", "functions"), TOOLS)
def test_tools_become_functions(kind: str, tools: Any, functions: Any) -> None:
    asked = {"input": "hi"} if kind == "RESPONSES" else {"messages": [HI]}
    found = read(kind, tools=tools, **asked).prompts[0]["tools"]
    expected = [{"type": "function", "function": one} for one in functions]
    assert found == (expected or None)


@pytest.mark.parametrize(
    ("kind", "tool", "name"),
    [
        ("MESSAGES", {"type": "bash_20250124", "name": "bash"}, "bash"),
        ("MESSAGES", {"type": "text_editor_20250728", "name": "edit"}, "edit"),
        ("RESPONSES", {"type": "local_shell"}, "local_shell"),
    ],
)
def test_tools_of_clients_have_parameters(kind: str, tool: Any, name: str) -> None:
    asked = {"input": "hi"} if kind == "RESPONSES" else {"messages": [HI]}
    (found,) = read(kind, tools=[tool], **asked).prompts[0]["tools"]
    assert found["function"]["name"] == name
    assert "command" in found["function"]["parameters"]["properties"]


def test_tools_in_items_are_offered() -> None:
    loaded = [
        {
            "type": "additional_tools",
            "role": "developer",
            "tools": [
                {
                    "type": "namespace",
                    "name": "functions",
                    "tools": [{"type": "custom", "name": "exec"}],
                }
            ],
        },
        {
            "type": "tool_search_output",
            "call_id": "c",
            "tools": [{"type": "function", "name": "f"}],
        },
    ]
    call = read("RESPONSES", input=[HI, *loaded])
    assert [one["function"]["name"] for one in call.prompts[0]["tools"]] == ["exec", "f"]
    assert call.known["exec"].type == "custom"


FG = [{"type": "function", "function": {"name": name}} for name in "fg"]
CHOICES: list[tuple[str, Any, Any, str, str]] = [
    ("CHAT", FG, "any", "required", "fg"),
    ("CHAT", FG, {"type": "any"}, "required", "fg"),
    ("CHAT", FG, {"type": "auto"}, "auto", "fg"),
    ("CHAT", FG, {"type": "function", "function": {"name": "f"}}, "f", "fg"),
    ("CHAT", FG, {"type": "function", "name": "f"}, "f", "fg"),
    ("CHAT", FG, {"type": "tool", "name": "f"}, "f", "fg"),
    (
        "CHAT",
        FG,
        {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": FG[:1]}},
        "required",
        "f",
    ),
    (
        "RESPONSES",
        [{"type": "function", "name": "f"}, {"type": "function", "name": "g"}],
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]},
        "auto",
        "g",
    ),
    ("RESPONSES", [{"type": "custom", "name": "f"}], {"type": "custom", "name": "f"}, "f", "f"),
    ("RESPONSES", [{"type": "local_shell"}], {"type": "local_shell"}, "local_shell", ""),
    ("RESPONSES", [{"type": "web_search"}], {"type": "web_search"}, "auto", ""),
    ("RESPONSES", [{"type": "web_search"}], "required", "auto", ""),
    # Claude Code's web search asks for a tool of Anthropic's server.
    (
        "MESSAGES",
        [{"type": "web_search_20250305", "name": "web_search"}],
        {"type": "tool", "name": "web_search"},
        "auto",
        "",
    ),
]


@pytest.mark.parametrize(("kind", "tools", "given", "choice", "names"), CHOICES)
def test_tool_choice(kind: str, tools: Any, given: Any, choice: str, names: str) -> None:
    asked = {"input": "hi"} if kind == "RESPONSES" else {"messages": [HI]}
    call = read(kind, tools=tools, tool_choice=given, **asked)
    assert call.options.get("tool_choice", "auto") == choice
    found = [one["function"]["name"] for one in call.prompts[0]["tools"] or ()]
    assert not names or found == list(names)


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "h"}}, "tools": FG},
    ],
)
def test_tool_choice_without_such_a_tool_is_refused(fields: Any) -> None:
    with pytest.raises(ApiError, match="tool_choice"):
        read("CHAT", messages=[HI], **fields)


@pytest.mark.parametrize(
    ("kind", "tool"),
    [
        ("RESPONSES", {"type": "custom", "name": "p", "description": "D", "format": GRAMMAR}),
        (
            "CHAT",
            {
                "type": "custom",
                "custom": {
                    "name": "p",
                    "description": "D",
                    "format": {"type": "grammar", "grammar": GRAMMAR},
                },
            },
        ),
    ],
)
def test_tool_with_a_grammar_takes_a_text(kind: str, tool: Any) -> None:
    asked = {"input": "hi"} if kind == "RESPONSES" else {"messages": [HI]}
    (found,) = read(kind, tools=[tool], **asked).prompts[0]["tools"]
    function = found["function"]
    assert list(function["parameters"]["properties"]) == ["input"]
    assert function["description"].startswith("D\n")
    assert "lark" in function["description"]
    assert GRAMMAR["definition"] in function["description"]


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "fields", "options"),
    [
        ("CHAT", {"stop": ""}, {}),
        ("CHAT", {"stop": []}, {}),
        ("CHAT", {"stop": ["", "x"]}, {"stop": ["x"]}),
        ("CHAT", {"stop": "x"}, {"stop": ["x"]}),
        ("CHAT", {"reasoning_effort": "ultra"}, {"thinking": "high"}),
        ("MESSAGES", {"stop_sequences": [""]}, {"max_tokens": 9, "thinking": False}),
        (
            "MESSAGES",
            {"context_management": {"edits": []}, "mcp_servers": [], "container": "c"},
            {"max_tokens": 9, "thinking": False},
        ),
        ("RESPONSES", {"background": True, "client_metadata": {}, "prompt_cache_key": "k"}, {}),
        ("OLLAMA_CHAT", {"think": "max", "truncate": False}, {"thinking": "high"}),
        ("OLLAMA_CHAT", {"think": "deep", "truncate": False}, {"thinking": "high"}),
        ("OLLAMA_CHAT", {"think": "", "truncate": False}, {}),
        ("OLLAMA_CHAT", {"options": {"stop": [""]}, "truncate": False}, {}),
    ],
)
def test_fields_become_options(kind: str, fields: Any, options: Any) -> None:
    asked = {"input": "hi"} if kind == "RESPONSES" else {"messages": [HI]}
    assert read(kind, **asked, **fields).options == options


# -- whole requests --------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "given", "expected"), MESSAGES)
def test_history_is_answered(server: Running, kind: str, given: Any, expected: Any) -> None:
    few = {"max_output_tokens": 1} if kind == "RESPONSES" else {"max_tokens": 1}
    body = {"input" if kind == "RESPONSES" else "messages": given, "model": "tiny", **few}
    status, got, _ = server.request("POST", PATHS[kind], {**body, "stream": False})
    assert status == 200, got


def test_what_is_left_out_is_noted_once(server: Running) -> None:
    server.notes.clear()
    part = {"type": "hologram", "data": "x"}
    for _ in range(2):
        body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        body["tools"] = [{"type": "telescope"}]
        assert server.request("POST", PATHS["CHAT"], body)[0] == 200
    assert [note for note in server.notes if "hologram" in note or "telescope" in note] == [
        "a tool of the type telescope is left out: only its vendor's server can run it",
        "messages hold hologram: the model reads text only, and is shown words in its place",
    ]


@pytest.mark.parametrize(
    ("path", "given", "count"),
    [
        ("/v1/embeddings", "", 1),
        ("/v1/embeddings", ["", "a"], 2),
        ("/v1/embeddings", [], 0),
        ("/api/embed", "", 1),
        ("/api/embed", [], 0),
    ],
)
def test_empty_inputs_are_embedded(server: Running, path: str, given: Any, count: int) -> None:
    status, got, _ = server.request("POST", path, {"model": "tiny", "input": given})
    assert status == 200, got
    vectors = [one["embedding"] for one in got["data"]] if "data" in got else got["embeddings"]
    assert len(vectors) == count
    assert all(vectors)


COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def test_former_functions_are_called(server: Running) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    body = {
        "functions": [takes("paint", COLOUR)],
        "function_call": {"name": "paint"},
        "max_tokens": 300,
        "temperature": 0,
    }
    status, got, _ = server.chat(**body)
    assert status == 200, got
    (choice,) = got["choices"]
    assert choice["finish_reason"] == "function_call"
    assert choice["message"]["function_call"]["name"] == "paint"
    assert json.loads(choice["message"]["function_call"]["arguments"])["colour"] == "red"


PATCH = {
    "name": "paint",
    "format": {"type": "grammar", "syntax": "regex", "definition": "red|blue"},
}


def test_custom_tool_of_a_chat_is_called(server: Running) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    wanted = {"max_tokens": 300, "temperature": 0, "tool_choice": "required"}
    wanted["parallel_tool_calls"] = False
    grammar = {**PATCH, "format": {"type": "grammar", "grammar": PATCH["format"]}}
    tools = [{"type": "custom", "custom": grammar}]
    status, got, _ = server.chat(tools=tools, **wanted)
    assert status == 200, got
    (call,) = got["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]["name"]) == ("custom", "paint")
    assert call["custom"]["input"] in ("red", "blue")
    _, text, _ = server.chat(tools=tools, stream=True, **wanted)
    assert json.dumps(call["custom"], separators=(",", ":")) in text


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
_KINDS = st.sampled_from(
    [
        *("text", "image", "document", "file", "thinking", "reasoning", "tool_use", "tool_result"),
        *(
            "function",
            "custom",
            "namespace",
            "allowed_tools",
            "tool",
            "bash",
            "message",
            "compaction",
        ),
        *("function_call", "custom_tool_call", "local_shell_call", "function_call_output"),
        *("tool_search_output", "additional_tools", "item_reference", "hologram", "tool_search"),
    ]
)
_NAMES = (
    *("id", "name", "text", "content", "input", "call_id", "tool_use_id", "arguments", "action"),
    *("source", "file", "output", "tools", "function", "custom", "namespace", "parameters", "role"),
    *("input_schema", "format", "thinking", "summary", "title", "file_data", "mode", "data"),
)


def _things(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Objects with a type and the fields that blocks, items and tools have."""
    values = _JSON | inner | st.lists(inner, max_size=3)
    fields = st.dictionaries(st.sampled_from(_NAMES), values, max_size=5)
    return st.builds(lambda kind, more: {"type": kind, **more}, _KINDS, fields)


THING = _things(_things(_JSON))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(list(PATHS)), THING, THING, THING)
def test_any_thing_is_read_or_refused(kind: str, content: Any, tool: Any, choice: Any) -> None:
    """Whatever a body holds, it is a call, or an error that names a field."""
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": choice}
    asked = [{"role": "user", "content": [content]}, {"role": "assistant", "content": content}]
    more: dict[str, Any] = (
        {"input": [*asked, content]} if kind == "RESPONSES" else {"messages": asked}
    )
    found: list[Generation] = []
    with contextlib.suppress(ApiError):
        found.append(read(kind, **fields, **more))
    for call in found:
        for message in call.prompts[0]["prompt"]:
            assert isinstance(message["content"], str)
            json.dumps(message)
        json.dumps(call.prompts[0]["tools"])
