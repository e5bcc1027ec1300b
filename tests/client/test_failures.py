"""Servers that fail in every way, and addresses that are none."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path
from typing import Any

import pytest

from localrt.client.model import connect
from localrt.client.servers import read_address
from localrt.common.errors import LocalrtError, OptionError
from tests.client.conftest import KEY, answer
from tests.fake_endpoint import DONE, HEAD, Asked, delta, event, fake, listed, nobody, saying, whole
from tests.server.conftest import Running

# -- failures --------------------------------------------------------------------------------------

BUSY = {"error": {"message": "too many requests.", "code": None}}


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (whole(429, BUSY, Retry_After="12"), r"busy \(429: too many requests\): try again in 12 s"),
        (whole(503, BUSY, Retry_After="Wed, 21 Oct 2015 07:28:00 GMT"), "try again in 1 s"),
        (whole(401, {"error": {"message": "no"}}), "wants an API key"),
        (whole(404, {"detail": "Not Found"}), r"no such thing \(404: Not Found\).*/v1"),
        (whole(400, {"message": "top_k\x1b[2J is\nunknown"}), r"refused .*top_k\[2J is unknown"),
        (whole(400, {"error": {"message": "", "code": "context_length_exceeded"}}), "too long"),
        (whole(500, {"error": "out of memory"}), r"failed \(500: out of memory\)"),
        (whole(200, b"<html>hello</html>", "text/html"), "does not speak OpenAI's protocol"),
        (whole(200, {"error": {"message": "no tokens left"}}), "failed: no tokens left"),
        (HEAD + b"data: never JSON\n\n", "does not speak OpenAI's protocol"),
        (HEAD + event(hello="there"), "does not speak OpenAI's protocol"),
        (HEAD, "ended in the middle"),
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
        (CUT + b"Transfer-Encoding: chunked\r\n\r\nfff\r\n" + delta(content="so far"), "broke off"),
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


def test_lost_end() -> None:
    body = CUT + b"Content-Length: 9999\r\n\r\n" + delta(content="all") + delta("stop")
    with saying(body) as running:
        last = answer(running)
    assert (last.text, last.finish_reason) == ("all", "stop")
    with saying(HEAD + delta(content="all") + b"data: [DONE]") as running:
        assert answer(running).finish_reason == "stop"


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
        sent_on, no_http = "where nothing was sent", "does not speak HTTP"
        for target, said in (
            (other.url, sent_on),
            (other.url.replace("http", "https"), sent_on),
            ("file:///etc/passwd", sent_on),
            ("//x:y", f"{sent_on}|{no_http}"),  # httpx2 itself refuses it before 2.16.1
        ):
            away = whole(307, Location=f"{target}/v1/models?key=x")
            with (
                fake(lambda asked, connection, away=away: away) as running,
                pytest.raises(LocalrtError, match=said),
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
        for file in (tmp_path / "missing.pem", tmp_path):
            monkeypatch.setenv("SSL_CERT_FILE", str(file))
            with pytest.raises(LocalrtError, match=r"SSL_CERT_FILE .* is no file of certificates"):
                connect(url, api_key=KEY)
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
        "http://me:pw@h",
        "http://[::1",
        "http://h/v1?x=1",
        "http://h/\r\nX: y",
        "http://h/é",
    ],
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
