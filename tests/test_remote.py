"""Models of a server, against localrt's own and against one that fails in every way."""

from __future__ import annotations

import io
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import localrt
from localrt.cli import main
from localrt.engine.types import Chunk
from localrt.errors import (
    CancelledError,
    ContextOverflowError,
    LocalrtError,
    OptionError,
)
from localrt.remote import RemoteModel, connect
from localrt.remote_address import read_address
from localrt.remote_answer import events
from localrt.streams import joined
from localrt.tui.plain import PlainChat
from tests.fake_endpoint import DONE, HEAD, Asked, Fake, delta, event, fake, listed, saying, whole
from tests.serve.conftest import Running, serving
from tests.tui import screen
from tests.tui.conftest import SIZE, until
from tests.tui.test_app import idle

KEY = "sk-very-secret"


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> Iterator[localrt.Model]:
    with localrt.load(tiny_folder, draft="off") as loaded:
        loaded.defaults["max_tokens"] = 12  # of requests that say nothing
        yield loaded


@pytest.fixture(scope="module")
def server(model: localrt.Model) -> Iterator[Running]:
    with serving(model, name="tiny") as running:
        yield running


def answer(running: Fake, text: str = "hi", **options: Any) -> Chunk:
    with connect(running.url) as remote:
        return joined(remote.chat().stream(text, **options))


# -- our own server --------------------------------------------------------------------------------


def test_answers_are_those_of_the_model_itself(model: localrt.Model, server: Running) -> None:
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
        assert there.park() == 0
        assert (remote.status(), remote.advise()) == (None, None)
        assert 1 <= remote.count(there.messages) < 1000
        there.close()
    here.close()


async def test_asyncio(server: Running) -> None:
    with connect(server.url) as remote:
        assert (
            await remote.chat().asend("hi", max_tokens=4, temperature=0.0)
        ).metrics.completion_tokens == 4


def test_a_key_is_wanted_and_never_shown(
    model: localrt.Model, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model, name="tiny", api_key=KEY) as running:
        with pytest.raises(LocalrtError, match=r"wants an API key.*--api-key.*OPENAI_API_KEY"):
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


def test_a_conversation_that_is_too_long(server: Running) -> None:
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


def test_two_answers_at_once_are_refused(server: Running) -> None:
    with connect(server.url) as remote:
        chat = remote.chat()
        stream = chat.stream("hi", max_tokens=8, temperature=0.0)
        next(stream)
        with pytest.raises(LocalrtError, match="already answering"):
            chat.stream("hi")
        list(stream)
        chat.send("hi", max_tokens=1)


# -- what is sent ----------------------------------------------------------------------------------


def test_options_that_were_chosen_are_sent_and_no_others() -> None:
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


def test_options_of_this_machine_are_refused() -> None:
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


def test_the_first_model_is_taken_and_the_others_told() -> None:
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


def test_thinking_of_its_own_field_is_folded_into_the_text() -> None:
    body = delta(reasoning="Two") + delta(reasoning_content=" and two.") + delta(content="Four.")
    with saying(HEAD + body + delta("stop") + DONE) as running:
        text = answer(running).text
    assert localrt.split_thinking(text) == localrt.Thinking("Two and two.", "Four.")
    with saying(HEAD + delta(reasoning="Hm") + delta("length") + DONE) as running:
        last = answer(running)
    assert localrt.split_thinking(last.text) == localrt.Thinking("Hm", "")
    assert last.finish_reason == "length"


def test_tool_calls_come_in_pieces() -> None:
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


def test_counts_are_the_servers_where_it_tells() -> None:
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
def test_events_do_not_depend_on_how_the_bytes_are_cut(cuts: list[int], crlf: bool) -> None:
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


def _hang(begin: bytes) -> Callable[[Asked, socket.socket], bytes | None]:
    def reply(asked: Asked, connection: socket.socket) -> bytes | None:
        connection.sendall(begin)
        connection.recv(1)  # until the other side goes away
        return None

    return reply


@pytest.mark.parametrize("begin", [b"", HEAD, HEAD + delta(content="some")])
def test_cancelling_takes_no_time_and_keeps_the_text(begin: bytes) -> None:
    gone = threading.Event()

    def reply(asked: Asked, connection: socket.socket) -> bytes | None:
        _hang(begin)(asked, connection)
        gone.set()
        return None

    with saying(reply) as running, connect(running.url) as remote:
        chat = remote.chat()
        stopped: list[float] = []

        def stop() -> None:
            stopped.append(time.monotonic())
            chat.cancel()

        timer = threading.Timer(0.3, stop)
        timer.start()
        last = joined(chat.stream("hi"))
        late = time.monotonic() - stopped[0]
        timer.join()
        assert last.finish_reason == "cancelled"
        assert late < 0.2
        assert last.text == ("some" if b"some" in begin else "")
        assert chat.messages[-1] == {"role": "assistant", "content": last.text}
        assert gone.wait(5)  # the server is told by the closed connection


def test_leaving_the_stream_or_closing_the_model_ends_the_request() -> None:
    with saying(_hang(HEAD + delta(content="a"))) as running:
        remote = connect(running.url)
        chat = remote.chat()
        stream: Any = chat.stream("hi")
        assert next(stream).text == "a"
        stream.close()
        assert chat.messages[-1]["content"] == "a"
        stream = chat.stream("again")
        next(stream)
        remote.close()
        assert joined(stream).finish_reason == "cancelled"
        chat.close()


def test_progress_is_asked_while_waiting_and_may_stop_it() -> None:
    def stop(progress: Any) -> None:
        raise CancelledError("no more")

    with fake(_hang(b"")) as running:
        with pytest.raises(CancelledError, match="no more"):
            connect(running.url, progress=stop)
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(CancelledError):
            connect(running.url, cancel=cancel)
    with saying(_hang(b"")) as running, connect(running.url) as remote:
        chat = remote.chat()

        def cancel_chat(progress: Any) -> None:
            chat.cancel()

        assert joined(chat.stream("hi", on_progress=cancel_chat)).finish_reason == "cancelled"


# -- failures --------------------------------------------------------------------------------------

BUSY = {"error": {"message": "too many requests.", "code": None}}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (whole(429, BUSY, Retry_After="12"), r"busy \(429: too many requests\): try again in 12 s"),
        (whole(429, BUSY), "busy .*try again later"),
        (whole(503, BUSY, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"), "try again in 1 s"),
        (whole(401, {"error": {"message": "no"}}), "wants an API key"),
        (whole(404, {"detail": "Not Found"}), r"no such thing \(404: Not Found\).*/v1"),
        (whole(404, b"<html>", "text/html"), "no such thing"),
        (whole(400, {"message": "top_k\x1b[2J is\nunknown"}), r"refused .*top_k\[2J is unknown"),
        (whole(400, b"<html>", "text/html"), "does not speak OpenAI's protocol"),
        (whole(400, {"error": {"message": "", "code": "context_length_exceeded"}}), "too long"),
        (whole(500, {"error": "out of memory"}), r"failed \(500: out of memory\)"),
        (whole(502, b"<html>", "text/html"), r"failed \(502\)"),
        (whole(200, b"<html>hello</html>", "text/html"), "does not speak OpenAI's protocol"),
        (whole(200, {"error": {"message": "no tokens left"}}), "failed: no tokens left"),
        (whole(200, {"fine": True}), "does not speak OpenAI's protocol"),
        (HEAD + b"data: never JSON\n\n", "does not speak OpenAI's protocol"),
        (HEAD + b"data: [1]\n\n", "does not speak OpenAI's protocol"),
        (HEAD + event(hello="there"), "does not speak OpenAI's protocol"),
        (HEAD, "ended in the middle"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "does not speak HTTP"),
        (b"", "closed the connection without an answer"),
        (whole(307, Location="/elsewhere"), "redirects without end"),
        (whole(302), "does not speak OpenAI's protocol"),
    ],
)
def test_a_server_that_fails_is_one_line(reply: bytes, said: str) -> None:
    with saying(reply) as running, connect(running.url) as remote:
        chat = remote.chat(system="S")
        with pytest.raises(LocalrtError, match=said) as caught:
            list(chat.stream("hi"))
        line = str(caught.value)
        assert line.isprintable()
        assert len(line) < 400
        assert chat.messages == [{"role": "system", "content": "S"}]


CUT = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (HEAD + delta(content="so far"), "ended in the middle"),
        (HEAD + delta(content="so far") + b'data: {"choi', "ended in the middle"),
        (CUT + b"Content-Length: 9999\r\n\r\n" + delta(content="so far"), "broke off"),
        (CUT + b"Transfer-Encoding: chunked\r\n\r\nfff\r\n" + delta(content="so far"), "broke off"),
        (HEAD + delta(content="so far") + event(error={"message": "it died"}), "failed: it died"),
        (HEAD + delta(content="so far") + event(object="error", message="oh"), "failed: oh"),
    ],
)
def test_a_stream_that_breaks_off_keeps_its_text(reply: bytes, said: str) -> None:
    with saying(reply) as running, connect(running.url) as remote:
        chat = remote.chat()
        came = []
        with pytest.raises(LocalrtError, match=said):
            came.extend(chunk.text for chunk in chat.stream("hi"))
        assert came == ["so far"]
        assert chat.messages[-1]["content"] == "so far"


def test_an_end_that_is_lost_loses_nothing() -> None:
    body = CUT + b"Content-Length: 9999\r\n\r\n" + delta(content="all") + delta("stop")
    with saying(body) as running:
        last = answer(running)
    assert (last.text, last.finish_reason) == ("all", "stop")
    with saying(HEAD + delta(content="all") + b"data: [DONE]") as running:
        assert answer(running).finish_reason == "stop"


def test_a_key_in_a_refusal_is_hidden() -> None:
    body = {"error": {"message": f"Incorrect API key provided: {KEY}"}}
    said = pytest.raises(LocalrtError, match=r"Incorrect API key provided: \.\.\.")
    with fake(lambda asked, connection: whole(401, body)) as running, said as caught:
        connect(running.url, api_key=KEY)
    assert KEY not in str(caught.value)
    assert KEY not in str(caught.value.__cause__)


def test_redirections_stay_at_home() -> None:
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
        for target in (
            other.url,
            other.url.replace("http", "https"),
            "file:///etc/passwd",
            "//x:y",
        ):
            away = whole(307, Location=f"{target}/v1/models?key=x")
            with (
                fake(lambda asked, connection, away=away: away) as running,
                pytest.raises(LocalrtError, match="where nothing was sent"),
            ):
                connect(running.url, api_key=KEY)
        assert other.asked == []


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(LocalrtError, match=r"nothing listens at .*: start the server"):
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
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with connect(url, api_key=KEY) as remote:
            assert remote.info.notes == ()
            assert remote.chat().send("hi").text == "safe"
        with pytest.raises(LocalrtError, match="is not trusted"):  # another name
            connect(url.replace("localhost", "127.0.0.1"))


# -- addresses -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "origin", "base"),
    [
        ("http://localhost:8000", "http://localhost:8000", "/v1"),
        ("http://localhost:8000/", "http://localhost:8000", "/v1"),
        (" https://API.example.org/v1/ ", "https://api.example.org", "/v1"),
        ("https://h/openai/v1/chat/completions", "https://h", "/openai/v1"),
        ("http://[::1]:80/v1", "http://[::1]", "/v1"),
        ("http://bücher.example/v1", "http://xn--bcher-kva.example", "/v1"),
    ],
)
def test_addresses(url: str, origin: str, base: str) -> None:
    address = read_address(url, KEY)
    assert (address.origin, address.base) == (origin, base)
    assert KEY not in repr(address)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://h",
        "http://",
        "http://h:99999",
        "http://me:pw@h",
        "http://[::1",
        "http://h/v1?x=1",
        "http://h/a b",
        "http://h/\r\nX: y",
        "http://a..b/",
        "http://h/é",
    ],
)
def test_no_addresses(url: str) -> None:
    with pytest.raises(OptionError) as caught:
        connect(url)
    assert str(caught.value).isprintable()


def test_keys_that_cannot_be() -> None:
    for key in ("a b", "a\r\nX: y", "schlüssel"):
        with pytest.raises(OptionError, match="API key"):
            connect("http://localhost", api_key=key)
    assert read_address("http://localhost", "").key is None
    assert read_address("http://localhost", f"{KEY}\n").key == KEY
    private = ("http://localhost", "http://127.0.0.9", "http://[::1]", "https://h")
    assert all(read_address(url).is_private for url in private)
    assert not read_address("http://10.0.0.1").is_private


# -- commands and the app --------------------------------------------------------------------------


def test_one_answer_on_stdout(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    fast = ["--endpoint", server.url, "--max-tokens", "4", "--temperature", "0"]
    assert main(["run", "tiny", "hi", *fast, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["model"], record["finish_reason"]) == ("tiny", "length")
    assert record["metrics"]["completion_tokens"] == 4
    assert main(["run", "tiny", "-c", "go on", *fast, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "answer 4 tokens" in err
    assert main(["chat", "-p", "hi", *fast]) == 0
    assert capsys.readouterr().out.strip() == record["text"].strip()


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["--endpoint", "nonsense"], 2, "must be a URL"),
        (["--endpoint", "http://h", "--ram", "4GB"], 2, "--ram is about models on this machine"),
        (["--endpoint", "http://h", "--offline"], 2, "--offline"),
        (["--endpoint", "http://h", "--draft", "ngram"], 2, "--draft"),
        (["--api-key", KEY], 2, "--api-key goes with --endpoint"),
        (["--endpoint", "http://h", "--batch", "x"], 2, "--batch"),
        (["--endpoint", "http://127.0.0.1:1"], 1, "nothing listens"),
    ],
)
def test_bad_usage_is_one_line(
    args: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "m", "hi", *args]) == status
    error = capsys.readouterr().err
    assert error.startswith("localrt: ")
    assert error.count("\n") == 1
    assert said in error
    assert KEY not in error


def test_plain_chat(server: Running) -> None:
    out = io.StringIO()
    chat = PlainChat(
        io.StringIO("/set max_tokens 4\nhello\n/set draft ngram\n/quit\n"),
        out,
        model_name="tiny",
        system=None,
        options={"temperature": 0.0},
    )
    assert chat.run(lambda progress: _as_model(connect(server.url, progress=progress))) == 0
    text = out.getvalue()
    assert f"tiny at 127.0.0.1:{server.port}, context 512" in text
    assert "(stopped at max_tokens" in text or "max_tokens" in text
    assert "Error: draft is for models on this machine" in text


def _as_model(remote: RemoteModel) -> Any:
    return remote


async def test_the_app_chats_through_it(server: Running) -> None:
    from localrt.tui import ChatApp

    app = ChatApp(
        lambda progress: _as_model(connect(server.url, progress=progress)),
        model_name="127.0.0.1",
        system=None,
        options={"temperature": 0.0, "max_tokens": 6},
    )
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: len(screen.answers(app)) == 1 and idle(app))
        await screen.say(pilot, "And?")
        await until(pilot, lambda: len(screen.answers(app)) == 2 and idle(app))
        assert all(screen.answers(app))
        assert "tiny · remote · ready" in screen.footer(app)
        assert "/512" in screen.footer(app)
        await pilot.press("f3")
        await pilot.press("f4")  # no models to choose from
        await until(pilot, lambda: "localrt chat MODEL" in "\n".join(screen.notices(app)))


async def test_the_app_tells_that_a_server_went_away() -> None:
    from localrt.tui import ChatApp

    replies = [HEAD + delta(content="Half a")]
    replies.append(HEAD + delta("stop", content="Whole.") + DONE)
    with saying(lambda asked, connection: replies.pop(0)) as running:
        app = ChatApp(
            lambda progress: _as_model(connect(running.url, progress=progress)),
            model_name="m",
            system=None,
            options={},
        )
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: idle(app))
            await screen.say(pilot, "Hi")
            await until(pilot, lambda: "ended in the middle" in "\n".join(screen.notices(app)))
            assert screen.answers(app) == ["Half a"]
            await screen.say(pilot, "Again")
            await until(pilot, lambda: "Whole." in screen.answers(app))
