"""OpenAI's Responses, with OpenAI's own Python client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from localrt.serve.responses.calls import conversation, responses_call
from localrt.serve.responses.store import ResponseStore
from tests.serve.conftest import Running
from tests.waits import wait_for

openai = pytest.importorskip("openai")

GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_output_tokens": 12}
TOOLS = [
    {
        "type": "function",
        "name": "paint",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "blue"]}},
            "required": ["colour"],
            "additionalProperties": False,
        },
    }
]
FORCED: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 300}


def client_of(server: Running) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture
def client(server: Running) -> Iterator[Any]:
    with client_of(server) as made:
        yield made


def test_a_response_says_what_the_library_says(client: Any, server: Running) -> None:
    got = client.responses.create(input="hi", instructions="Be brief.", **GREEDY)
    messages: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    expected = server.model.generate(messages, temperature=0, max_tokens=12)
    assert got.output_text == expected.text
    assert (got.object, got.model, got.status) == ("response", "tiny", "incomplete")
    assert got.incomplete_details.reason == "max_output_tokens"
    assert got.usage.input_tokens == expected.metrics.prompt_tokens
    assert got.usage.output_tokens == 12
    counted = client.responses.input_tokens.count(
        model="tiny", input="hi", instructions="Be brief."
    )
    assert counted.input_tokens == got.usage.input_tokens


def test_a_streamed_response_is_the_same(client: Any, silence: bool) -> None:
    whole = client.responses.create(input="hi", **GREEDY)
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


def test_a_response_follows_on_an_earlier_one(client: Any) -> None:
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
    assert client.responses.retrieve(first.id).output_text == first.output_text
    client.responses.delete(first.id)
    for ask in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            ask(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(input="why?", **follows, **GREEDY)
    assert caught.value.code == "previous_response_not_found"
    unkept = client.responses.create(input="hi", store=False, **GREEDY)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_function_is_called_and_its_output_read(client: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the structured extra")
    got = client.responses.create(input="hi", **{**GREEDY, **FORCED})
    (call,) = got.output
    assert (got.status, call.type, call.name) == ("completed", "function_call", "paint")
    assert json.loads(call.arguments)["colour"] in ("red", "blue")
    with client.responses.stream(input="hi", **{**GREEDY, **FORCED}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output[0].arguments == call.arguments
    assert "response.function_call_arguments.delta" in kinds
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    for before in ({"previous_response_id": got.id}, {}):
        items = [output] if before else [{"role": "user", "content": "hi"}, call, output]
        after = client.responses.create(input=items, tools=TOOLS, **before, **GREEDY)
        assert after.usage.output_tokens
    wanted = {"format": {"type": "json_schema", "name": "c", "schema": TOOLS[0]["parameters"]}}
    bound = client.responses.create(input="hi", text=wanted, **{**GREEDY, "max_output_tokens": 300})
    assert json.loads(bound.output_text)["colour"] in ("red", "blue")


def test_reasoning_is_an_item_of_its_own(thinker: Running) -> None:
    fields: dict[str, Any] = {"model": thinker.name, "input": "hi", "max_output_tokens": 30}
    with client_of(thinker) as client:
        got = client.responses.create(reasoning={"effort": "low"}, **fields)
        assert [item.type for item in got.output] == ["reasoning"]
        assert got.output[0].content[0].text
        assert got.usage.output_tokens_details.reasoning_tokens == 30
        with client.responses.stream(reasoning={"effort": "low"}, **fields) as stream:
            kinds = {event.type for event in stream}
        assert {"response.reasoning_text.delta", "response.reasoning_text.done"} <= kinds
        none = client.responses.create(reasoning={"effort": "none"}, **fields)
        assert [item.type for item in none.output] == ["message"]


def test_items_become_messages() -> None:
    items = [
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "So"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "one"},
        {"role": "developer", "content": [{"type": "input_text", "text": "Brief."}]},
    ]
    said, result, told = conversation(items)
    assert (said["content"], said["reasoning_content"]) == ("So", "Hm")
    assert [call["id"] for call in said["tool_calls"]] == ["1", "2"]
    assert result == {"role": "tool", "tool_call_id": "1", "content": "one"}
    assert told == {"role": "system", "content": "Brief."}


def test_tools_that_are_no_functions_are_left_out() -> None:
    paint = {"type": "function", "name": "paint", "parameters": None}
    others = [{"type": "web_search"}, {"type": "namespace", "name": "n", "tools": [paint]}]
    call = responses_call({"tools": [*others, paint]}, [])
    (tool,) = call.prompts[0]["tools"]
    assert tool["function"]["name"] == "paint"
    assert responses_call({"tools": others}, []).prompts[0]["tools"] is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item_reference"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]},
            r"input\[0\] has a picture",
        ),
    ],
)
def test_what_is_not_supported_is_refused(client: Any, fields: Any, words: str) -> None:
    with pytest.raises(openai.BadRequestError, match=words):
        client.responses.create(**{"input": "hi", **GREEDY, **fields})


@pytest.mark.usefixtures("slow")
def test_a_stream_that_is_left_is_cancelled(client: Any, server: Running) -> None:
    with client.responses.stream(input="hi", model="tiny", max_output_tokens=400) as stream:
        next(event for event in stream if event.type == "response.output_text.delta")
    wait_for(server.idle)


def test_the_store_is_bounded() -> None:
    now = 0.0
    store = ResponseStore(most=2, most_bytes=500, seconds=10, now=lambda: now)
    for name in "abc":
        store.put({"id": name}, [])
    assert [store.get(name) is not None for name in "abc"] == [False, True, True]
    store.put({"id": "large", "text": "x" * 490}, [])
    assert store.get("c") is None
    now = 11.0
    assert store.get("large") is None
