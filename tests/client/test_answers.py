"""Answers of a server, its own or one that says what a test wants."""

from __future__ import annotations

import base64
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import localrt
from localrt.cli import main
from localrt.client.answer import events
from localrt.client.model import connect
from localrt.client.servers import read_address
from localrt.common.errors import ContextOverflowError, LocalrtError, OptionError
from localrt.service.arguments import joined
from tests.client.conftest import KEY, answer
from tests.fake_endpoint import DONE, HEAD, Asked, delta, event, fake, listed, saying, whole
from tests.server.conftest import Running, serving

# -- our own server --------------------------------------------------------------------------------


async def test_same_answers_as_local(model: localrt.Model, server: Running) -> None:
    here = model.chat(system="Be brief.")
    with connect(server.url) as remote:
        assert remote.info.name == "tiny"
        assert remote.info.ctx == model.info.ctx
        there = remote.chat(system="Be brief.", temperature=0.0)
        for text in ("first", "and then?"):
            mine = here.send(text, temperature=0.0)
            theirs = joined(there.stream(text))
            assert theirs.text == mine.text
            assert theirs.finish_reason == mine.finish_reason == "length"
            assert theirs.metrics.completion_tokens == mine.metrics.completion_tokens == 12
            assert theirs.metrics.prompt_tokens == mine.metrics.prompt_tokens
            assert theirs.metrics.ttft_s is not None
        assert there.messages == here.messages
        assert there.tokens_used == theirs.metrics.prompt_tokens + 12
        assert joined(there.stream("more", max_tokens=3)).metrics.completion_tokens == 3
        assert (await there.asend("more", max_tokens=4)).metrics.completion_tokens == 4
        assert there.park() == 0
        assert (remote.status(), remote.advise()) == (None, None)
        assert 1 <= remote.count(there.messages) < 1000
        there.close()
    here.close()


def test_api_key(
    model: localrt.Model, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model, name="tiny", api_key=KEY) as running:
        with pytest.raises(LocalrtError, match=r"wants an API key.*api_key.*OPENAI_API_KEY"):
            connect(running.url)
        with pytest.raises(LocalrtError, match="refuses the API key") as caught:
            connect(running.url, api_key="sk-another")
        assert "sk-another" not in str(caught.value)
        with connect(running.url, api_key=KEY) as remote:
            assert KEY not in repr(vars(remote))
            assert remote.chat(temperature=0.0).send("hi").text
        ask = ["chat", "--endpoint", running.url, "-p", "hi", "--temperature", "0"]
        assert main(ask) == 1
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        assert main(ask) == 0
        assert main([*ask, "--api-key", ""]) == 1
    out, err = capsys.readouterr()
    assert out.strip()
    assert KEY not in out + err


def test_too_long_conversation(server: Running) -> None:
    with connect(server.url) as remote:
        chat = remote.chat()
        with pytest.raises(ContextOverflowError, match="too long for the server"):
            list(chat.stream("word " * 600))
        assert chat.messages == []


def test_saved_chats(server: Running, tmp_path: Path) -> None:
    with connect(server.url) as remote:
        chat = remote.chat(temperature=0.0, max_tokens=4)
        chat.send("hi")
        chat.save(tmp_path / "chat.json")
        again = remote.load_chat(tmp_path / "chat.json")
        assert (again.messages, again.options) == (chat.messages, chat.options)
        assert again.send("go on").metrics.completion_tokens == 4


# -- what is sent ----------------------------------------------------------------------------------


def test_sent_options() -> None:
    reply = HEAD + delta("stop", content="yes") + DONE
    with saying(reply) as running, connect(running.url) as remote:
        chat = remote.chat(system="S", top_k=5, temperature=0.8)
        chat.send("a", min_p=0.1, stop="x", seed=None, json_schema={"type": "object"})
        chat.messages[-1]["content"] = "<think>hm</think>yes"
        chat.set(top_k=None)
        chat.send("b", repetition_penalty=1.1)
        first, second = (asked.body for asked in running.asked[1:])
    assert first["messages"] == [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
    ]
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "b"},
    ]
    given = {"top_k", "temperature", "min_p", "stop", "response_format"}
    always = {"model", "messages", "stream", "stream_options"}
    assert set(first) == given | always
    assert first["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert first["stop"] == ["x"]
    assert set(second) == {"temperature", "repetition_penalty"} | always
    assert "authorization" not in running.asked[0].headers


def test_sent_pictures(tmp_path: Path) -> None:
    path = tmp_path / "red.jpg"
    image = Image.new("RGB", (4, 2), "red")
    image.save(path)
    reply = HEAD + delta("stop", content="Red.") + DONE
    with saying(reply) as running, connect(running.url) as remote:
        chat = remote.chat()
        text = {"type": "text", "text": "What color?"}
        given = [{"type": "image", "image": each} for each in (path, path.read_bytes(), image)]
        chat.messages = [{"role": "user", "content": [*given, text]}]
        assert remote.count(chat.messages) == remote.count("What color?") + 4
        assert chat.send().text == "Red."
        (message,) = running.asked[1].body["messages"]
    jpeg = "data:image/jpeg;base64," + base64.b64encode(path.read_bytes()).decode()
    *pictures, last = message["content"]
    assert pictures[:2] == [{"type": "image_url", "image_url": {"url": jpeg}}] * 2
    assert pictures[2]["image_url"]["url"].startswith("data:image/png;base64,")
    assert last == text


def test_local_options() -> None:
    with saying(HEAD) as running, connect(running.url) as remote:
        chat = remote.chat()
        for options in ({"draft": "ngram"}, {"regex": "a+"}, {"overflow": "drop_oldest"}):
            with pytest.raises(OptionError, match="this machine"):
                chat.set(**options)
            with pytest.raises(OptionError, match="this machine"):
                chat.stream("hi", **options)
        with pytest.raises(OptionError, match="did you mean temperature"):
            chat.set(temperatur=1)
        with pytest.raises(OptionError, match="top_p"):
            chat.set(top_p=3.0)
        assert chat.options == {}


def test_choice_of_model() -> None:
    with fake(lambda asked, connection: listed("org/a", "b", max_model_len=4096)) as running:
        with connect(running.url) as remote:
            assert remote.info.name == "org/a"
            assert remote.info.ctx == 4096
            assert "org/a, b" in remote.info.notes[0]
        with connect(running.url, "b") as remote:
            assert (remote.name, remote.info.notes) == ("b", ())
        with connect(running.url, "c") as remote:
            assert "does not list c" in remote.info.notes[0]
    with fake(lambda asked, connection: whole(404)) as running:
        assert connect(running.url, "named").name == "named"
        with pytest.raises(LocalrtError, match="/v1"):
            connect(running.url)
    empty = fake(lambda asked, connection: listed())
    with empty as running, pytest.raises(LocalrtError, match="lists no models"):
        connect(running.url)


# -- what comes ------------------------------------------------------------------------------------


def test_reasoning_fields() -> None:
    body = delta(reasoning="Two") + delta(reasoning_content=" and two.") + delta(content="Four.")
    with saying(HEAD + body + delta("stop") + DONE) as running:
        text = answer(running).text
    assert localrt.split_thinking(text) == localrt.Thinking("Two and two.", "Four.")
    with saying(HEAD + delta(reasoning="Hm") + delta("length") + DONE) as running:
        last = answer(running)
    assert localrt.split_thinking(last.text) == localrt.Thinking("Hm", "")
    assert last.finish_reason == "length"


def test_tool_calls_in_pieces() -> None:
    def call(**fields: Any) -> bytes:
        return delta(tool_calls=[{"index": 0, **fields}])

    body = call(id="c1", function={"name": "add", "arguments": ""})
    body += call(function={"arguments": '{"a": '}) + call(function={"arguments": "1}"})
    reply = HEAD + body + delta("tool_calls") + DONE
    with saying(reply) as running, connect(running.url) as remote:
        chat = remote.chat(tools=[{"type": "function", "function": {"name": "add"}}])
        last = joined(chat.stream("go"))
        assert last.tool_calls == (localrt.ToolCall("c1", "add", '{"a": 1}'),)
        assert last.finish_reason == "tool_calls"
        chat.add_tool_result("c1", 2)
        list(chat.stream())
        sent = running.asked[-1].body
    assert [m["role"] for m in sent["messages"]] == ["user", "assistant", "tool"]
    assert sent["messages"][1]["content"] is None
    assert sent["tools"][0]["function"]["name"] == "add"


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
    assert "thinking" not in sent


def test_usage() -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 40,
        "prompt_tokens_details": {"cached_tokens": 64},
    }
    with saying(HEAD + delta(content="a") + delta("stop", content="b")) as running:
        metrics = answer(running).metrics
        assert (metrics.completion_tokens, metrics.cached_tokens) == (2, 0)
        assert metrics.prompt_tokens > 0
    body = HEAD + delta(content="a") + delta("stop") + event(choices=[], usage=usage) + DONE
    with saying(body) as running:
        metrics = answer(running).metrics
    assert (metrics.prompt_tokens, metrics.completion_tokens) == (100, 40)
    assert metrics.cached_tokens == 64


@given(st.lists(st.integers(1, 200)), st.booleans())
def test_events_in_any_pieces(cuts: list[int], crlf: bool) -> None:
    data = b": a comment\n\nevent: x\nid: 3\n" + event(a="ä€🙂") + b'data: {"b":\ndata: 1}\n\n'
    data += DONE + b"data: never read\n\n"
    data = data.replace(b"\n", b"\r\n") if crlf else data
    pieces, at = [], 0
    for size in [*cuts, len(data)]:
        pieces.append(data[at : at + size])
        at += size
    found = list(events(pieces, read_address("http://h")))
    assert found == [{"a": "ä€🙂"}, {"b": 1}, None]


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [b"", HEAD, HEAD + delta(content="some")])
def test_cancel(begin: bytes) -> None:
    begun, gone = threading.Event(), threading.Event()

    def reply(asked: Asked, connection: socket.socket) -> bytes | None:
        connection.settimeout(120)  # so long would it take whoever waited for the other side
        connection.sendall(begin)
        begun.set()
        connection.recv(1)
        gone.set()
        return None

    with saying(reply) as running, connect(running.url) as remote:
        chat = remote.chat()

        def stop() -> None:
            begun.wait(60)
            chat.cancel()

        stream = chat.stream("hi")
        first = next(stream).text if b"some" in begin else ""
        stopping = threading.Thread(target=stop)
        stopping.start()
        last = joined(stream)
        stopping.join()
        assert last.finish_reason == "cancelled"
        assert first + last.text == ("some" if b"some" in begin else "")
        assert chat.messages[-1] == {"role": "assistant", "content": first}
        assert gone.wait(60)  # the server is told by the closed connection
