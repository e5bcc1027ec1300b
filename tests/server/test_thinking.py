"""How servers are told whether to think, by their own names and by others'."""

from __future__ import annotations

from typing import Any

import pytest

from localrt.client.model import connect
from tests.fake_endpoint import DONE, HEAD, delta, event, saying
from tests.server.conftest import Running


def test_thinking_limits(thinker: Running) -> None:
    for fields, thought in (
        ({}, 40),
        ({"thinking_tokens": 5}, 5),
        ({"chat_template_kwargs": {"enable_thinking": False}}, 0),
    ):
        status, got, _ = thinker.chat(**fields)
        assert status == 200, got
        assert got["usage"]["completion_tokens_details"] == {"reasoning_tokens": thought}
    # From another localrt, too.
    with connect(thinker.url) as remote:
        chat = remote.chat(thinking_tokens=5)
        assert chat.send("hi").metrics.thinking_tokens == 5
        chat.set(thinking="off", thinking_tokens=None)
        assert chat.send("hi").metrics.thinking_tokens == 0
        chat.close()


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        ({"thinking": "low"}, {"reasoning_effort": "low"}),
        ({"thinking": True}, {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}),
        (
            {"thinking": "off"},
            {
                "chat_template_kwargs": {"enable_thinking": False, "thinking": False},
                "reasoning_effort": "none",
            },
        ),
        (
            {"thinking_tokens": 9},
            dict.fromkeys(
                ("thinking_tokens", "thinking_token_budget", "thinking_budget_tokens"), 9
            ),
        ),
    ],
)
def test_thinking_of_other_servers(options: dict[str, Any], fields: dict[str, Any]) -> None:
    usage = {"completion_tokens": 4, "completion_tokens_details": {"reasoning_tokens": 3}}
    body = HEAD + delta(content="a") + delta("stop") + event(choices=[], usage=usage) + DONE
    with saying(body) as running, connect(running.url) as model:
        assert model.chat().send("hi", **options).metrics.thinking_tokens == 3
        sent = running.asked[-1].body
    assert {name: sent[name] for name in fields} == fields
    assert not {"thinking"} & set(sent)
