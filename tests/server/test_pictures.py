"""Pictures of the web: which addresses are reached, and how far a server is followed."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from localrt.server import pictures
from localrt.server.errors import ApiError
from localrt.server.pictures import Fetcher, is_public

PUBLIC = ("8.8.8.8", "93.184.216.34", "1.1.1.1", "2606:4700::6810:85e5", "2a00:1450:4001::1")
OTHERS = (
    *("127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.0.1", "172.31.255.255"),
    *("192.168.1.1", "169.254.169.254", "100.64.0.1", "192.0.0.1", "192.0.2.1", "198.18.0.1"),
    *("198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
    *("::", "::1", "::127.0.0.1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:a00:1"),
    *("fe80::1", "fe80::1%1", "fc00::1", "fd00::1", "ff02::1", "ff0e::1", "2001:db8::1"),
    *("64:ff9b::7f00:1", "64:ff9b::808:808", "64:ff9b:1::1", "100::1", "2002:7f00:1::1"),
    *("2002:808:808::1", "2001:0:7f00:1::1", "fec0::1", "", "localhost", "8.8.8.8.", "0x7f.1"),
)
MOST = 100_000


@pytest.mark.parametrize("address", PUBLIC)
def test_public_address(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize("address", OTHERS)
def test_address_that_is_not_public(address: str) -> None:
    assert not is_public(address)


class Web:
    """A server of this machine; ``asked`` has the hosts and paths of its requests."""

    def __init__(self) -> None:
        web = self
        self.asked: list[tuple[str, str]] = []
        self.over = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                web.asked.append((self.headers["Host"].partition(":")[0], self.path))
                web.answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def answer(self, to: BaseHTTPRequestHandler) -> None:
        _, kind, *more = to.path.split("/")
        if kind == "moved":
            to.send_response(302)
            left = int(more[0])
            to.send_header("Location", "/picture" if left == 1 else f"/moved/{left - 1}")
            to.end_headers()
        elif kind == "to":
            to.send_response(301)
            to.send_header("Location", "/".join(more))
            to.end_headers()
        elif kind == "silent":
            self.over.wait(60)
        elif kind == "endless":
            to.send_response(200)
            to.end_headers()
            with suppress(OSError):
                while not self.over.is_set():
                    to.wfile.write(bytes(4096))
        elif kind == "chunked":
            to.protocol_version = "HTTP/1.1"
            to.send_response(200)
            to.send_header("Transfer-Encoding", "chunked")
            to.end_headers()
            to.wfile.write(b"3\r\nabc\r\n4\r\ndefg\r\n0\r\n\r\n")
        elif kind == "cut":
            to.send_response(200)
            to.send_header("Content-Length", "10")
            to.end_headers()
            to.wfile.write(b"abc")
        elif kind == "nonsense":
            to.wfile.write(b"SSH-2.0-server\r\n")
        elif kind == "status":
            to.send_response(int(more[0]))
            to.end_headers()
        else:
            to.send_response(200)
            to.send_header("Content-Type", "text/html")
            to.end_headers()
            to.wfile.write(b"a picture")


@pytest.fixture
def web() -> Iterator[Web]:
    made = Web()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.over.set()
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def fetch(url: str, most: int = MOST, allowed: Any = "127.0.0.1".__eq__, **more: Any) -> bytes:
    async def fetched() -> bytes:
        async with asyncio.timeout(30):
            return await Fetcher(allowed).fetch(url, "picture 1", most, **more)

    return asyncio.run(fetched())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/picture", b"a picture"),
        ("/picture?a=b c&d=\u00e9#there", b"a picture"),
        ("/\u00e4 b.png", b"a picture"),
        ("/chunked", b"abcdefg"),
        ("/moved/1", b"a picture"),
        ("/moved/3", b"a picture"),
    ],
)
def test_fetched(web: Web, path: str, body: bytes) -> None:
    counted: list[int] = []
    assert fetch(web.url(path), take=counted.append) == body
    assert sum(counted) == len(body)


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/moved/4", "redirects more than 3 times"),
        ("/endless", "larger than 100 kB"),
        ("/cut", "its server breaks off"),
        ("/nonsense", "its server breaks off"),
        ("/status/404", "answers 404"),
        ("/status/500", "answers 500"),
        ("/status/302", "answers 302"),
        ("/to/file:///etc/passwd", "only http and https"),
        ("/to/http://user:key@127.0.0.1/", "only http and https"),
        ("/to/http://127.0.0.2/", "its address is not public"),
        ("/to/http://[::1]/", "its address is not public"),
        ("/to/http://169.254.169.254/latest/", "its address is not public"),
    ],
)
def test_not_fetched(web: Web, path: str, why: str) -> None:
    with pytest.raises(ApiError, match=why) as caught:
        fetch(web.url(path))
    assert caught.value.status == 400
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        *("", "picture.png", "/etc/passwd", "file:///etc/passwd", "ftp://example.org/a"),
        *("http://", "http:///a", "http://[::1", "http://a:b/", "http://user@example.org/"),
        *("http://a:99999/", "javascript:1", "gopher://127.0.0.1/_", "http://x/" + "a" * 9000),
    ],
)
def test_not_a_url_of_the_web(url: str) -> None:
    with pytest.raises(ApiError, match="only http and https"):
        fetch(url)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "2130706433", "0x7f.1", "127.1", "0", "[::ffff:127.0.0.1]"],
)
def test_this_machine_is_not_reached(web: Web, host: str) -> None:
    with pytest.raises(ApiError, match=r"picture 1 (may not|cannot) be fetched"):
        fetch(web.url("/picture", host), allowed=is_public)
    assert not web.asked


def named(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Let every name be at the addresses; returns the names that are looked up."""
    looked: list[str] = []

    def getaddrinfo(host: str, port: int, *_: Any) -> list[Any]:
        looked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in addresses]

    monkeypatch.setattr(pictures.socket, "getaddrinfo", getaddrinfo)
    return looked


def test_name_is_looked_up_once(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = named(monkeypatch, "127.0.0.1")
    assert fetch(web.url("/moved/1", "pictures.example")) == b"a picture"
    assert looked == ["pictures.example"] * 2  # its redirect is checked anew
    assert web.asked == [("pictures.example", "/moved/1"), ("pictures.example", "/picture")]


def test_every_address_is_checked(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "127.0.0.1", "10.0.0.1")
    with pytest.raises(ApiError, match="its address is not public"):
        fetch(web.url("/picture", "pictures.example"))
    assert not web.asked


def test_next_address(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    named(monkeypatch, "127.0.0.3", "127.0.0.1")  # nothing listens at the first
    allowed = ("127.0.0.1", "127.0.0.3").__contains__
    assert fetch(web.url("/picture", "pictures.example"), allowed=allowed) == b"a picture"


@pytest.fixture
def trusted(web: Web, tmp_path: Path) -> ssl.SSLContext:
    """The server speaks TLS as pictures.example, and clients with this context trust it."""
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "pictures.example")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("pictures.example")]), False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    file = tmp_path / "certificate.pem"
    file.write_bytes(made.public_bytes(pem) + key.private_bytes(pem, form, secret))
    own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    own.load_cert_chain(file)
    web.server.socket = own.wrap_socket(
        web.server.socket, server_side=True, do_handshake_on_connect=False
    )
    return ssl.create_default_context(cafile=str(file))


def test_certificate_is_checked(
    web: Web, trusted: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    named(monkeypatch, "127.0.0.1")
    url = web.url("/picture", "pictures.example").replace("http:", "https:")
    with pytest.raises(ApiError, match="its server's TLS is not valid"):
        fetch(url)
    monkeypatch.setattr(pictures, "_certificates", lambda: trusted)
    assert fetch(url) == b"a picture"
    with pytest.raises(ApiError, match="its server's TLS is not valid"):
        fetch(url.replace("pictures.", "others."))
    assert web.asked == [("pictures.example", "/picture")]


def test_server_without_tls(web: Web) -> None:
    with pytest.raises(ApiError, match="cannot be fetched: its server's TLS is not valid"):
        fetch(web.url("/picture").replace("http:", "https:"))
