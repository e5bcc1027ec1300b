"""Anthropic's own Python client against a running server."""

from __future__ import annotations

from typing import Any

import pytest

from localrt.server.anthropic.calls import messages_call
from localrt.server.openai.calls import chat_call
from localrt.server.options import ServeOptions
from localrt.server.pool import ModelPool
from tests.server.conftest import Running, serving
from tests.server.dialects import COLOUR, HI

anthropic = pytest.importorskip("anthropic")

GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}


def client_of(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)


@pytest.fixture
def client(server: Running) -> Any:
    with client_of(server) as made:
        yield made


def test_models_and_missing_model(client: Any) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("nothing")
    assert caught.value.body["type"] == "error"
    assert caught.value.body["error"]["type"] == "not_found_error"
    pool = ModelPool(lambda *_: pytest.fail("there is none"), lambda: [], ServeOptions())
    with serving(pool) as empty, client_of(empty) as other:
        assert list(other.models.list()) == []
        with pytest.raises(anthropic.NotFoundError, match="localrt pull"):
            other.messages.create(messages=HI, **GREEDY)


def test_events_of_a_message(client: Any, silence: bool) -> None:
    with client.messages.stream(messages=HI, **GREEDY) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert (final.type, final.role, final.model) == ("message", "assistant", "tiny")
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


def test_thinking_block(thinker: Running) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    fields: dict[str, Any] = {"model": thinker.name, "messages": HI, "max_tokens": 40}
    with client_of(thinker) as client:
        got = client.messages.create(thinking=thinking, **fields)
        assert [block.type for block in got.content] == ["thinking", "text"]
        assert got.content[0].signature
        assert got.usage.output_tokens_details.thinking_tokens == 5
        # Back to the model, and without thinking, which is how it is when nothing is said.
        messages = [*HI, {"role": "assistant", "content": got.content}, *HI]
        plain = client.messages.create(**{**fields, "messages": messages})
        assert [block.type for block in plain.content] == ["text"]


def test_stop_sequence(client: Any) -> None:
    text = client.messages.create(messages=HI, **GREEDY).content[0].text
    got = client.messages.create(messages=HI, stop_sequences=["@@@", text[3]], **GREEDY)
    assert (got.stop_reason, got.stop_sequence) == ("stop_sequence", text[3])


def test_tokens_are_counted_exactly(client: Any) -> None:
    fields: dict[str, Any] = {"model": "tiny", "system": "Be brief.", "messages": HI}
    for more in ({}, {"tools": [{"name": "paint", "input_schema": COLOUR}]}):
        counted = client.messages.count_tokens(**fields, **more).input_tokens
        usage = client.messages.create(max_tokens=1, **fields, **more).usage
        assert usage.input_tokens + usage.cache_read_input_tokens == counted


def test_models_have_anthropics_form(client: Any) -> None:
    (listed,) = client.models.list().data
    assert (listed.id, listed.type, listed.display_name) == ("tiny", "model", "tiny")
    assert client.models.retrieve("tiny").id == "tiny"


def test_errors_have_their_kinds(client: Any) -> None:
    def refused(kind: type[Exception], **fields: Any) -> Any:
        with pytest.raises(kind) as caught:
            client.messages.create(**{**GREEDY, "messages": HI, **fields})
        error: Any = caught.value
        assert error.body["type"] == "error"
        return error.body["error"]

    wrong = refused(anthropic.BadRequestError, messages=[{"role": "user", "content": []}])
    assert wrong["type"] == "invalid_request_error"
    assert wrong["message"] == "the messages have no content"


def test_the_key_may_be_anthropics(server: Running) -> None:
    with serving(server.model, name="tiny", api_key="secret") as running:
        for key, right in (("secret", True), ("wrong", False)):
            made = anthropic.Anthropic(base_url=running.url, api_key=key, max_retries=0)
            with made as client:
                if right:
                    assert client.messages.create(messages=HI, **GREEDY).usage.output_tokens
                    continue
                with pytest.raises(anthropic.AuthenticationError) as caught:
                    client.messages.create(messages=HI, **GREEDY)
                assert caught.value.body["error"]["type"] == "authentication_error"


@pytest.mark.parametrize("blocks", [True, False])
@pytest.mark.parametrize("dialect", ["messages", "chat"])
def test_billing_header_is_left_out(dialect: str, blocks: bool) -> None:
    def prompts(build: str) -> Any:
        first, rest = (
            f"x-anthropic-billing-header: cc_version=2.1; cch={build};",
            "You are an agent.",
        )
        texts = [{"type": "text", "text": text} for text in (first, rest)]
        system: Any = texts if blocks else f"{first}\n{rest}"
        hi = {"role": "user", "content": "x-anthropic-billing-header: what is that?"}
        if dialect == "messages":
            return messages_call({"model": "m", "system": system, "messages": [hi]}).prompts
        return chat_call({"messages": [{"role": "system", "content": system}, hi]}).prompts

    (prompt,) = prompts("00001")
    assert [prompt] == prompts("f00d2")
    assert [message["content"] for message in prompt["prompt"]] == [
        "You are an agent.",
        "x-anthropic-billing-header: what is that?",
    ]
