"""Anthropic's own Python client against a running server."""

from __future__ import annotations

from typing import Any

import pytest

from localrt.server.options import ServeOptions
from localrt.server.pool import ModelPool
from tests.server.conftest import Running, serving
from tests.server.dialects import HI

anthropic = pytest.importorskip("anthropic")

GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "extra_body": {"temperature": 0}}


def client_of(server: Running) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)


@pytest.fixture
def client(server: Running) -> Any:
    with client_of(server) as made:
        yield made


def test_models_and_missing_model(client: Any) -> None:
    (listed,) = client.models.list()
    assert (listed.id, listed.type, listed.display_name) == ("tiny", "model", "tiny")
    assert client.models.retrieve("tiny").id == "tiny"
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
