"""OpenAI's Responses, with OpenAI's own Python client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from localrt.server.service import ResponseStore
from tests.server.conftest import Running
from tests.server.dialects import PAINT, colours

openai = pytest.importorskip("openai")

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
TOOLS = [{"type": "function", "strict": True, **PAINT}]
RED = colours("red")
ONE_CALL: dict[str, Any] = {
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 300,
}
FORCED: dict[str, Any] = {"tools": TOOLS, **ONE_CALL}


def client_of(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with client_of(server) as made:
        yield made


def test_streamed_events(client: Any, silence: bool) -> None:
    whole = client.responses.create(input="hi", **GREEDY)
    assert (whole.object, whole.model, whole.status) == ("response", "tiny", "incomplete")
    with client.responses.stream(input="hi", **GREEDY) as stream:
        events = list(stream)
    assert events[-1].response.output_text == whole.output_text
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if not event.type.endswith("delta")]
    assert list(dict.fromkeys(kinds)) == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.content_part.added", "response.output_text.done"),
        *("response.content_part.done", "response.output_item.done", "response.incomplete"),
    ]


def test_log_probabilities(client: Any) -> None:
    got = client.responses.create(
        input="hi", include=["message.output_text.logprobs"], top_logprobs=2, **GREEDY
    )
    found = got.output[0].content[0].logprobs
    assert len(found) == 12
    assert all(len(one.top_logprobs) == 2 for one in found)


def test_previous_response(client: Any) -> None:
    first = client.responses.create(input="hi", **GREEDY)
    follows = {"previous_response_id": first.id}
    second = client.responses.create(input="why?", instructions="Be brief.", **follows, **GREEDY)
    items = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "why?"},
    ]
    by_hand = client.responses.create(input=items, instructions="Be brief.", **GREEDY)
    assert second.output_text == by_hand.output_text
    assert second.previous_response_id == first.id
    # What the client got can be sent back as it is.
    echoed = [items[0], *first.output, items[2]]
    again = client.responses.create(input=echoed, instructions="Be brief.", **GREEDY)
    assert again.output_text == by_hand.output_text
    unkept = client.responses.create(input="hi", store=False, **GREEDY)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="why?", previous_response_id=unkept.id, **GREEDY)
    assert caught.value.code == "previous_response_not_found"


def test_function_call_output(client: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    got = client.responses.create(input="hi", **{**GREEDY, **FORCED})
    (call,) = got.output
    assert (got.status, call.type) == ("completed", "function_call")
    with client.responses.stream(input="hi", **{**GREEDY, **FORCED}) as stream:
        kinds = [event.type for event in stream]
    assert "response.function_call_arguments.delta" in kinds
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    for before in ({"previous_response_id": got.id}, {}):
        items = [output] if before else [{"role": "user", "content": "hi"}, call, output]
        after = client.responses.create(input=items, tools=TOOLS, **before, **GREEDY)
        assert after.usage.output_tokens


def test_reasoning_item(thinker: Running) -> None:
    fields: dict[str, Any] = {"model": thinker.name, "input": "hi", "max_output_tokens": 30}
    with client_of(thinker) as client:
        got = client.responses.create(reasoning={"effort": "low"}, **fields)
        assert [item.type for item in got.output] == ["reasoning"]
        assert got.output[0].content[0].text
        assert got.usage.output_tokens_details.reasoning_tokens == 30
        with client.responses.stream(reasoning={"effort": "low"}, **fields) as stream:
            kinds = {event.type for event in stream}
        assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= kinds


def test_item_references(client: Any) -> None:
    """The ``ai`` package sends items back by their ids alone."""
    hi = {"role": "user", "content": "hi", "id": "msg_hi"}
    first = client.responses.create(input=[hi], **GREEDY)
    why = {"role": "user", "content": "why?"}
    second = client.responses.create(input=[hi, *first.output, why], **GREEDY)
    references = [{"type": "item_reference", "id": id} for id in ("msg_hi", first.output[0].id)]
    again = client.responses.create(input=[*references, why], **GREEDY)
    assert again.output_text == second.output_text
    bare = client.responses.create(input=[{"id": "msg_hi"}], **GREEDY)
    assert bare.output_text == first.output_text


def test_previous_response_without_input(client: Any) -> None:
    first = client.responses.create(input="hi", **GREEDY)
    then = client.responses.create(previous_response_id=first.id, **GREEDY)
    assert then.usage.input_tokens > first.usage.input_tokens
    done = client.responses.create(input="hi", background=True, **GREEDY)
    assert done.output_text == first.output_text


def test_small_sign_of_life(slow: None, client: Any, silence: bool) -> None:
    long = "Be brief. " * 15
    with client.responses.stream(input="hi", instructions=long, **GREEDY) as stream:
        events = list(stream)
    signs = [event for event in events if event.type == "response.in_progress"]
    assert all(len(sign.to_json(indent=None)) < 400 for sign in signs)
    assert len(signs) > 1 if silence else len(signs) == 1
    assert events[0].response.instructions == events[-1].response.instructions == long


CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {
            "type": "custom",
            "name": "paint",
            "format": {"type": "grammar", "syntax": "regex", "definition": "red"},
        },
        {"type": "custom_tool_call", "name": "paint", "input": "red"},
    ),
    (
        {
            "type": "namespace",
            "name": "mcp__art__",
            "tools": [{"type": "function", "name": "paint", "parameters": RED}],
        },
        {"type": "function_call", "namespace": "mcp__art__", "name": "paint"},
    ),
    (
        {"type": "tool_search", "execution": "client", "parameters": RED},
        {"type": "tool_search_call", "execution": "client", "arguments": {"colour": "red"}},
    ),
]


@pytest.mark.parametrize(("tool", "expected"), CALLS)
def test_call_types(client: Any, tool: Any, expected: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    fields = {**GREEDY, **ONE_CALL, "tools": [tool]}
    got = client.responses.create(input="hi", **fields)
    (call,) = [item.model_dump() for item in got.output]
    assert {name: call[name] for name in expected} == expected
    with client.responses.stream(input="hi", **fields) as stream:
        (streamed,) = stream.get_final_response().output
    same = {**streamed.model_dump(), "id": call["id"], "call_id": call["call_id"]}
    assert same | call == same
    output = {"type": expected["type"] + "_output", "call_id": call["call_id"], "output": "done"}
    after = client.responses.create(input=[output], previous_response_id=got.id, **GREEDY)
    assert after.usage.output_tokens


def test_store_limits() -> None:
    now = 0.0
    store = ResponseStore(most=2, most_bytes=500, seconds=10, now=lambda: now)
    for name in "abc":
        store.put({"id": name}, [{"id": f"item {name}"}, {"id": "both"}])
    assert [store.get(name) is not None for name in "abc"] == [False, True, True]
    assert [store.item(f"item {name}") is not None for name in "abc"] == [False, True, True]
    store.put({"id": "large", "text": "x" * 490}, [])
    assert store.get("c") is None
    now = 11.0
    assert store.get("large") is None
