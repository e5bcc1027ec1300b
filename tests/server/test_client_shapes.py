"""What programs send, and what the model is shown of it: a new report is one more row."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.server import anthropic, ollama
from localrt.server.anthropic import messages_call
from localrt.server.dialect import GenerationRequest
from localrt.server.errors import ApiError
from localrt.server.media import in_words
from localrt.server.messages import text_of, unnoted
from localrt.server.openai.calls import CHAT, chat_call
from localrt.server.request_schema import RequestSchema
from localrt.server.responses.calls import RESPONSES, items_of, responses_call
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


def called(name: str, arguments: str, call_id: str = "c1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


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


def says(content: Any, *calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": content,
        **({"tool_calls": list(calls)} if calls else {}),
        **fields,
    }


def result(content: Any, call_id: str = "c1", **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content, **fields}


# -- parts of contents -----------------------------------------------------------------------------

PARTS: list[tuple[Any, str]] = [
    # Text, in the words of each dialect.
    (block("text", text="a", cache_control=block("ephemeral")), "a"),
    (text(None), ""),
    (block("input_text", text="a"), "a"),
    (block("output_text", text="a", annotations=[]), "a"),
    (block("refusal", refusal="No."), "No."),
    ({"text": "a"}, "a"),
    ("a", "a"),
    # Pictures and sounds.
    (block("image", source=block("base64", data="AAAA")), "[image left out]"),
    (block("image_url", image_url={"url": PNG}), "[image left out]"),
    (block("input_image", image_url=PNG, detail="auto"), "[image left out]"),
    (block("computer_screenshot", image_url=PNG), "[screenshot left out]"),
    (block("input_audio", input_audio={"data": "AAAA"}), "[audio left out]"),
    (block("audio_url", audio_url={"url": "u"}), "[audio left out]"),
    (block("video_url", video_url={"url": "u"}), "[video left out]"),
    # Documents and files: their text, if they are text.
    (block("document", title="T", source=block("text", data="Buy milk.")), "T\nBuy milk."),
    (block("document", source=block("content", content=[text("a")])), "a"),
    (block("document", source=block("base64", media_type="text/plain", data=NOTES)), "Buy milk."),
    (
        block(
            "document", title="R", source=block("base64", media_type="application/pdf", data="JVBE")
        ),
        "[document left out: R]",
    ),
    (
        block("file", file={"filename": "n.txt", "file_data": f"data:text/plain;base64,{NOTES}"}),
        "n.txt\nBuy milk.",
    ),
    (block("file", file={"file_id": "file-1"}), "[file left out]"),
    (
        block("input_file", filename="r.pdf", file_data="data:application/pdf;base64,JVBE"),
        "[file left out: r.pdf]",
    ),
    (block("search_result", title="T", source="https://example.org", content=[text("a")]), "T\na"),
    # What no model is shown as it is: without ids, and without what only its maker can read.
    (block("redacted_thinking", data="x"), ""),
    (block("tool_reference", tool_name="look"), '[tool_reference: {"tool_name": "look"}]'),
    (
        block(
            "web_search_result", title="T", url="https://example.org", encrypted_content="x" * 999
        ),
        '[web_search_result: {"title": "T", "url": "https://example.org"}]',
    ),
    (block("compaction", encrypted_content="x"), "[compaction left out]"),
    (block("compaction", content="What was said."), "What was said."),
    (
        block("code_execution_result", stdout="4", stderr="", return_code=0),
        '[code_execution_result: {"stdout": "4", "return_code": 0}]',
    ),
    (block("hologram", id="h1", data="A" * 999), "[hologram left out]"),
    ({"stdout": "4"}, '{"stdout": "4"}'),
]


@pytest.mark.parametrize(("part", "words"), PARTS)
def test_part_becomes_text(part: Any, words: str) -> None:
    assert text_of([part], unnoted) == words
    content = [text("Look:"), part]
    for kind, joint in (("CHAT", "\n"), ("MESSAGES", "\n\n"), ("RESPONSES", "\n")):
        expected = joint.join(filter(None, ("Look:", words)))
        (shown,) = messages(kind, [user(*content)])
        if part == text(None):
            shown["content"] = shown["content"].rstrip("\n")
        assert shown == user(expected), kind
    (shown,) = messages("OLLAMA_CHAT", [user(*content)])
    assert shown["content"] == "\n\n".join(filter(None, ("Look:", words)))


def test_deep_content() -> None:
    part: Any = text("a")
    for _ in range(900):
        part = block("document", content=[part])
    assert text_of([part, 7], unnoted).endswith("\n\n7")


# -- messages --------------------------------------------------------------------------------------

USE = block("tool_use", id="c1", name="look", input={"at": "a"})
SEARCH = block("server_tool_use", id="s1", name="web_search", input={"query": "q"})
FOUND = block(
    "web_search_tool_result",
    tool_use_id="s1",
    content=[block("web_search_result", title="T", url="u", encrypted_content="x")],
)

MESSAGES: list[tuple[str, Any, list[dict[str, Any]]]] = [
    # Claude Code: what its tool search finds, pictures that it reads.
    (
        "MESSAGES",
        [
            said(USE),
            user(
                block(
                    "tool_result",
                    tool_use_id="c1",
                    content=[block("tool_reference", tool_name="b")],
                ),
                text("Tool loaded."),
            ),
        ],
        [
            says("", called("look", '{"at": "a"}')),
            result('[tool_reference: {"tool_name": "b"}]'),
            user("Tool loaded."),
        ],
    ),
    (
        "MESSAGES",
        [
            HI,
            said(USE),
            user(
                block(
                    "tool_result",
                    tool_use_id="c1",
                    content=[block("image", source=block("base64", data="A"))],
                )
            ),
        ],
        [HI, says("", called("look", '{"at": "a"}')), result("[image left out]")],
    ),
    # A search that a vendor's server carried out.
    (
        "MESSAGES",
        [HI, said(text("Let me look."), SEARCH, FOUND, text("Here.")), HI],
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
            said(
                block("redacted_thinking", data="x"),
                block("thinking", thinking="Hm.", signature="s"),
                USE,
            ),
            user(block("tool_result", tool_use_id="c1")),
            said(),
            HI,
        ],
        [HI, says("", called("look", '{"at": "a"}'), reasoning_content="Hm."), result(""), HI],
    ),
    # Neighbours of one role.
    ("MESSAGES", [HI, user("more"), HI], [user("hi\n\nmore\n\nhi")]),
    # Codex: its patches, its shell, its searches.
    (
        "RESPONSES",
        [
            block("message", role="user", content=[block("input_text", text="hi")]),
            block("reasoning", summary=[], encrypted_content="x"),
            block("custom_tool_call", call_id="c1", name="apply_patch", input="*** P"),
            block("custom_tool_call_output", call_id="c1", output="done"),
            block(
                "local_shell_call",
                call_id="c2",
                status="completed",
                action=block("exec", command=["ls"], env=None),
            ),
            block("local_shell_call_output", call_id="c2", output="a.py"),
            block("web_search_call", status="completed", action=block("search", query="q")),
            block("message", role="assistant", content=[block("output_text", text="So.")]),
            block("compaction", encrypted_content="x"),
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
            block(
                "function_call", call_id="c1", namespace="mcp__files__", name="look", arguments="{}"
            ),
            block(
                "function_call_output",
                call_id="c1",
                output=[block("input_text", text="Screen:"), block("input_image", image_url=PNG)],
            ),
        ],
        [HI, says("", called("mcp__files__look", "{}")), result("Screen:\n\n[image left out]")],
    ),
    (
        "RESPONSES",
        [
            HI,
            block("tool_search_call", call_id="c1", execution="client", arguments={"query": "q"}),
            block(
                "tool_search_output",
                call_id="c1",
                tools=[block("namespace", name="n", tools=[{"name": "look"}])],
            ),
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
            block("shell_call", call_id="c1", action={"commands": ["ls"]}),
            block("shell_call_output", call_id="c1", output=[{"stdout": "a.py"}]),
            block("telepathy", id="t1", thought="blue"),
            block("item_reference", id="msg_gone"),
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
            user(text("What is it?"), block("image_url", image_url={"url": PNG})),
            says("I cannot see it."),
            HI,
        ],
        [user("What is it?\n[image left out]"), says("I cannot see it."), HI],
    ),
    # Contents that are null, missing or empty, parts of a tool's result, a refusal, audio.
    (
        "CHAT",
        [
            HI,
            says(None, called("look", "{}"), refusal=None, audio=None),
            result([text("a"), text("b")], name="look"),
            {"role": "assistant"},
            said(),
            says(None, refusal="No."),
            said(block("refusal", refusal="Never.")),
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
            says(None, function_call={"name": "look", "arguments": "{}"}),
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
            result({"ok": True}),
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
            said(block("thinking", thinking="Hm."), USE),
            user(block("tool_result", tool_use_id="c1", content="done")),
        ],
        [HI, says("", called("look", '{"at": "a"}'), reasoning_content="Hm."), result("done")],
    ),
    # LangChain: thoughts and calls as parts, and the calls once more; qwen-code: a picture that a
    # tool gave.
    (
        "CHAT",
        [
            HI,
            says(
                [
                    block("reasoning", id="rs_1", summary=[block("summary_text", text="Hm.")]),
                    text("So."),
                    block("function_call", name="look", arguments='{"at": "a"}', call_id="c1"),
                    block("tool_call", id="c2", name="look", args={"at": "b"}),
                ],
                called("look", '{"at": "a"}'),
            ),
            result([text("Screen:"), block("image_url", image_url={"url": PNG})]),
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
    # vLLM: a thought beside its text.
    (
        "CHAT",
        [HI, says("So.", reasoning_content="Hm."), HI],
        [HI, says("So.", reasoning_content="Hm."), HI],
    ),
    # The ``ai`` package and openai-agents: what a response said, with ids that mean nothing here.
    (
        "RESPONSES",
        [
            {"role": "system", "content": "Be brief."},
            HI,
            {
                **said(block("output_text", text="So.", annotations=[], logprobs=[])),
                **block("message", id="__fake_id__", status="completed"),
            },
            block("function_call", id="__fake_id__", call_id="c1", name="f", arguments=""),
            block("function_call_output", call_id="c1", output={"content": "no", "success": False}),
            block("mcp_call", id="m1", name="f", arguments="{}", output="4"),
        ],
        [
            {"role": "system", "content": "Be brief."},
            HI,
            says("So.", called("f", "")),
            result("no"),
            says('[mcp_call: {"name": "f", "arguments": "{}", "output": "4"}]'),
        ],
    ),
    (
        "RESPONSES",
        [
            block("reasoning", summary=[], content=[block("reasoning_text", text="Hm")]),
            said(block("output_text", text="So")),
            block("function_call", call_id="1", name="f", arguments="{}"),
            block("function_call", call_id="2", name="g", arguments="{}"),
            block("function_call_output", call_id="1", output="one"),
            {"role": "developer", "content": [block("input_text", text="Brief.")]},
        ],
        [
            says("So", called("f", "{}", "1"), called("g", "{}", "2"), reasoning_content="Hm"),
            result("one", "1"),
            {"role": "developer", "content": "Brief."},
        ],
    ),
    # Ollama: calls without ids, whose results have the tools' names.
    (
        "OLLAMA_CHAT",
        [
            HI,
            says(
                None,
                {"function": {"name": "look", "arguments": {}}},
                {"function": {"name": "paint", "arguments": {"colour": "red"}}},
                thinking="Hm.",
            ),
            {"role": "tool", "content": "done", "tool_name": "paint"},
            {"role": "tool", "content": "seen", "tool_name": "look"},
        ],
        [
            HI,
            says(
                "",
                called("look", "{}", "call_2_0"),
                called("paint", '{"colour": "red"}', "call_2_1"),
                reasoning_content="Hm.",
            ),
            result("done", "call_2_1", name="paint"),
            result("seen", "call_2_0", name="look"),
        ],
    ),
    # Ollama: roles, parts, pictures, ids of calls.
    (
        "OLLAMA_CHAT",
        [
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "What is it?", "images": ["AAAA", "BBBB"]},
            says(None, {"id": "c1", "function": {"name": "look", "arguments": '{"a": 1}'}}),
            result("done"),
        ],
        [
            {"role": "developer", "content": "Be brief."},
            user("[image left out]\n\n[image left out]\n\nWhat is it?"),
            says("", called("look", '{"a": 1}')),
            result("done", name="look"),
        ],
    ),
]


@pytest.mark.parametrize(("kind", "given", "expected"), MESSAGES)
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


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
_KINDS = st.sampled_from(
    [
        *("text", "image", "document", "file", "thinking", "reasoning", "tool_use", "tool_result"),
        *("function", "custom", "namespace", "allowed_tools", "tool", "bash", "message"),
        *("function_call", "custom_tool_call", "local_shell_call", "function_call_output"),
        *("tool_search_output", "additional_tools", "item_reference", "hologram", "tool_search"),
        "compaction",
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


@settings(deadline=None)
@given(st.sampled_from(list(PATHS)), THING, THING, THING)
def test_any_content_and_tools(kind: str, content: Any, tool: Any, choice: Any) -> None:
    """Whatever a body holds, it is a call, or an error that names a field."""
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": choice}
    asked = [user(content), said(content)]
    more = {"input": [*asked, content]} if kind == "RESPONSES" else {"messages": asked}
    found: list[GenerationRequest] = []
    with contextlib.suppress(ApiError):
        found.append(read(kind, **fields, **more))
    for call in found:
        for message in in_words(call.prompts[0])["prompt"]:
            assert isinstance(message["content"], str)
            json.dumps(message)
        json.dumps(call.prompts[0]["tools"])
