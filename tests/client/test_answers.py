"""Answers and failures of a server, its own or one that says what a test wants; addresses."""

from __future__ import annotations

import base64
import gzip
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import localrt
from localrt.cli import main
from localrt.client.answer import events
from localrt.client.model import connect, list_remote
from localrt.client.servers import read_address
from localrt.common.errors import ContextOverflowError, LocalrtError, OptionError
from localrt.service.arguments import joined
from tests.client.conftest import KEY, answer
from tests.fake_endpoint import (
    DONE,
    HEAD,
    MOST,
    Asked,
    answer_head,
    delta,
    endless,
    event,
    fake,
    listed,
    nobody,
    saying,
    whole,
)
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
        assert (await there.asend("more", max_tokens=4)).metrics.completion_tokens == 4
        cut = there.send("go on", max_tokens=4).text
        assert joined(there.continue_answer(max_tokens=4)).text == there.messages[-1]["content"]
        assert there.messages[-1]["content"].startswith(cut)
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


@pytest.mark.parametrize(
    ("old", "begun", "got"),
    [
        ("Well,", {"role": "assistant", "content": "Well,", "prefix": True}, "Well, yes"),
        (
            "<think>hm</think>Well,",
            {"role": "assistant", "content": "Well,", "prefix": True},
            "<think>hm</think>Well, yes",
        ),
        ("<think>hm", None, " yes"),  # no server goes on with a thought
    ],
)
def test_continued_answer(old: str, begun: Any, got: str) -> None:
    with saying(HEAD + delta("stop", content=" yes") + DONE) as running, connect(running.url) as it:
        chat = it.chat()
        chat.messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": old}]
        assert joined(chat.continue_answer()).text == got
        assert [each["content"] for each in chat.messages] == ["a", got]
        sent = running.asked[1].body
    assert sent["messages"][1:] == [begun] * (begun is not None)
    names = {"continue_final_message": True, "add_generation_prompt": False}
    assert {name: sent[name] for name in names if name in sent} == (names if begun else {})


def test_sent_pictures(tmp_path: Path) -> None:
    path = tmp_path / "red.jpg"
    Image.new("RGB", (4, 2), "red").save(path)
    reply = HEAD + delta("stop", content="Red.") + DONE
    with saying(reply) as running, connect(running.url) as remote:
        assert remote.chat().send("What color?", images=[path]).text == "Red."
        (message,) = running.asked[1].body["messages"]
    jpeg = "data:image/jpeg;base64," + base64.b64encode(path.read_bytes()).decode()
    picture, text = message["content"]
    assert picture == {"type": "image_url", "image_url": {"url": jpeg}}
    assert text == {"type": "text", "text": "What color?"}


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


def test_events_in_pieces() -> None:
    data = b": a comment\n\nevent: x\nid: 3\n" + event(a="ä€🙂") + b'data: {"b":\ndata: 1}\n\n'
    data += DONE + b"data: never read\n\n"
    for sent in (data, data.replace(b"\n", b"\r\n")):
        for size in (1, 7, len(sent)):
            pieces = [sent[at : at + size] for at in range(0, len(sent), size)]
            found = list(events(pieces, read_address("http://h")))
            assert found == [{"a": "ä€🙂"}, {"b": 1}, None]


# -- cancelling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("begin", [b"", HEAD + delta(content="some")])
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


# -- failures --------------------------------------------------------------------------------------

BUSY = {"error": {"message": "too many requests.", "code": None}}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (whole(429, BUSY, Retry_After="12"), r"busy \(429: too many requests\): try again in 12 s"),
        (whole(401, {"error": {"message": "no"}}), "wants an API key"),
        (whole(404, {"detail": "Not Found"}), r"no such thing \(404: Not Found\).*/v1"),
        (whole(400, {"message": "top_k\x1b[2J is\nunknown"}), r"refused .*top_k\[2J is unknown"),
        (whole(400, {"error": {"message": "", "code": "context_length_exceeded"}}), "too long"),
        (whole(500, {"error": "out of memory"}), r"failed \(500: out of memory\)"),
        (whole(200, b"<html>hello</html>", "text/html"), "does not speak OpenAI's protocol"),
        (HEAD + b"data: never JSON\n\n", "does not speak OpenAI's protocol"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "does not speak HTTP"),
        (b"", "closed the connection without an HTTP answer"),
        (whole(307, Location="/elsewhere"), "redirects without end"),
    ],
)
def test_failures_are_one_line(reply: bytes, said: str) -> None:
    with saying(reply) as running, connect(running.url) as remote:
        chat = remote.chat(system="S")
        with pytest.raises(LocalrtError, match=said) as caught:
            list(chat.stream("hi"))
        line = str(caught.value)
        assert line.isprintable()
        assert len(line) < 400
        assert chat.messages == [{"role": "system", "content": "S"}]


def test_server_refuses_tools() -> None:
    with saying(whole(400, {"error": {"message": "no tools here"}})) as running:
        remote = connect(running.url)
        assert remote.takes_tools
        with remote, pytest.raises(LocalrtError, match="no tools here"):
            list(remote.chat(tools=[{"type": "function", "function": {"name": "a"}}]).stream("hi"))
        assert not remote.takes_tools


CUT = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (HEAD + delta(content="so far"), "ended in the middle"),
        (CUT + b"Content-Length: 9999\r\n\r\n" + delta(content="so far"), "broke off"),
        (HEAD + delta(content="so far") + event(error={"message": "it died"}), "failed: it died"),
    ],
)
def test_broken_stream_keeps_text(reply: bytes, said: str) -> None:
    with saying(reply) as running, connect(running.url) as remote:
        chat = remote.chat()
        came = []
        with pytest.raises(LocalrtError, match=said):
            came.extend(chunk.text for chunk in chat.stream("hi"))
        assert came == ["so far"]
        assert chat.messages[-1]["content"] == "so far"


JSON, EVENTS = "application/json", "text/event-stream"
PACKED = gzip.compress(b"data: " + b"x" * MOST)
# how a server answers: what is said of its list of models, of its answer to a chat
HOSTILE: dict[str, tuple[Callable[[Asked, socket.socket], bytes | None], str, str]] = {
    "body": (endless(b" " * 9999, answer_head(JSON)), *["does not speak OpenAI's"] * 2),
    "line": (endless(b"x" * 9999, HEAD + b"data: "), *["does not speak OpenAI's"] * 2),
    "event": (endless(b"data: x\n", HEAD), *["does not speak OpenAI's"] * 2),
    "values": (
        lambda *_: HEAD + b"data: [" + b"[]," * 250_000 + b"0]\n\n",
        *["does not speak OpenAI's"] * 2,
    ),
    "events": (endless(delta(content="x" * 999), HEAD), "does not speak OpenAI's", "has no end"),
    "calls": (
        endless(delta(tool_calls=[{"index": 0, "function": {"arguments": "x" * 999}}]), HEAD),
        "does not speak OpenAI's",
        "has no end",
    ),
    "gzip": (
        lambda *_: answer_head(EVENTS, Content_Encoding="gzip") + PACKED,
        "does not speak OpenAI's",
        "ended in the middle",
    ),
    "refusal": (endless(b"x" * 9999, answer_head(JSON, 500)), *[r"failed \(500\)"] * 2),
    "head": (endless(b"A: b\r\n", b"HTTP/1.1 200 OK\r\n"), *["does not speak HTTP"] * 2),
}


@pytest.mark.parametrize("way", HOSTILE)
def test_hostile_servers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has no end, or takes much memory, is one error."""
    monkeypatch.setattr("localrt.client.model._LONGEST_LIST", MOST)
    monkeypatch.setattr("localrt.client.answer._LONGEST_EVENT", MOST)
    monkeypatch.setattr("localrt.client.answer._LONGEST_ANSWER", 2 * MOST)
    reply, of_list, of_chat = HOSTILE[way]
    with fake(reply) as running, pytest.raises(LocalrtError, match=of_list) as caught:
        connect(running.url)
    assert str(caught.value).isprintable()
    with saying(reply) as running, connect(running.url) as remote:
        with pytest.raises(LocalrtError, match=of_chat) as caught:
            list(remote.chat().stream("hi"))
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("head", [answer_head(JSON), b"HTTP/1.1 200 OK\r\nA: "])
def test_list_that_drips(head: bytes) -> None:
    def drip(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(head)
        while not running.over.wait(0.01):
            connection.sendall(b" ")

    with fake(drip) as running, pytest.raises(LocalrtError, match=r"not answer within 0\.3 s"):
        list_remote(read_address(running.url), most_s=0.3)


def test_lost_end() -> None:
    body = CUT + b"Content-Length: 9999\r\n\r\n" + delta(content="all") + delta("stop")
    with saying(body) as running:
        last = answer(running)
    assert (last.text, last.finish_reason) == ("all", "stop")


def test_key_in_refusal() -> None:
    body = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
    said = pytest.raises(LocalrtError, match=r"Incorrect API key provided: \.\.\.")
    with fake(lambda asked, connection: whole(401, body)) as running, said as caught:
        connect(running.url, api_key=KEY)
    assert KEY not in str(caught.value)
    assert KEY not in str(caught.value.__cause__)


def test_redirects() -> None:
    def moving(asked: Asked, connection: socket.socket) -> bytes:
        if asked.path.startswith("/v1"):
            return whole(308, Location="/api" + asked.path)
        if asked.path.endswith("/models"):
            return listed("m")
        return HEAD + delta("stop", content="here") + DONE

    with fake(moving) as running, connect(running.url, api_key=KEY) as remote:
        assert remote.chat().send("hi").text == "here"
        assert running.asked[-1].path == "/api/v1/chat/completions"
        assert running.asked[-1].body["messages"]
    with fake(lambda asked, connection: listed("m")) as other:
        for target in (other.url, "file:///etc/passwd"):
            away = whole(307, Location=f"{target}/v1/models?key=x")
            with (
                fake(lambda asked, connection, away=away: away) as running,
                pytest.raises(LocalrtError, match="where nothing was sent"),
            ):
                connect(running.url, api_key=KEY)
        assert other.asked == []


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = pytest.raises(LocalrtError, match=r"nothing listens at .*: start the server")
    with nobody() as port, refused:
        connect(f"http://127.0.0.1:{port}")

    def unknown(*arguments: Any, **more: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(LocalrtError, match=r"no host 'no\.invalid'"):
        connect("http://no.invalid/v1")


def test_tls(server: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocalrtError, match="does not speak TLS: is it http://"):
        connect(server.url.replace("http", "https"))
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    command += f" -keyout {key} -out {certificate} -subj /CN=localhost"
    command += " -addext subjectAltName=DNS:localhost"
    subprocess.run(command.split(), check=True, capture_output=True)
    with saying(HEAD + delta("stop", content="safe") + DONE) as running:
        running.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        running.context.load_cert_chain(certificate, key)
        url = f"https://localhost:{running.port}/v1"
        with pytest.raises(
            LocalrtError, match=r"certificate of localhost is not trusted.*SSL_CERT"
        ):
            connect(url, api_key=KEY)
        with pytest.raises(LocalrtError, match=r"closed the connection|does not speak HTTP"):
            connect(url.replace("https", "http"))
        assert running.asked == []
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "missing.pem"))
        with pytest.raises(LocalrtError, match=r"SSL_CERT_FILE .* is no file of certificates"):
            connect(url, api_key=KEY)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with connect(url, api_key=KEY) as remote:
            assert remote.chat().send("hi").text == "safe"


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "origin", "base"),
    [
        ("http://localhost:8000", "http://localhost:8000", "/v1"),
        (" https://API.example.org/v1/ ", "https://api.example.org", "/v1"),
        ("https://h/openai/v1/chat/completions", "https://h", "/openai/v1"),
        ("http://bücher.example/v1", "http://xn--bcher-kva.example", "/v1"),
    ],
)
def test_addresses(url: str, origin: str, base: str) -> None:
    address = read_address(url, KEY)
    assert (address.origin, address.base) == (origin, base)
    assert KEY not in repr(address)


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "http://me:pw@h", "http://[::1", "http://h/\r\nX: y"]
)
def test_invalid_addresses(url: str) -> None:
    with pytest.raises(OptionError) as caught:
        connect(url)
    assert str(caught.value).isprintable()


def test_invalid_keys() -> None:
    for key in ("a b", "a\r\nX: y", "schlüssel"):
        with pytest.raises(OptionError, match="API key"):
            connect("http://localhost", api_key=key)
    assert read_address("http://localhost", "").key is None
    assert read_address("http://localhost", f"{KEY}\n").key == KEY
    private = ("http://localhost", "http://127.0.0.9", "http://[::1]", "https://h")
    assert all(read_address(url).is_private for url in private)
    assert not read_address("http://10.0.0.1").is_private
