"""The addresses of servers with OpenAI's protocol, and this user's servers on this machine.

An address is one origin (scheme, host and port), a path and a key. The key is sent only there, and
never shown. Each server of this user on this machine leaves a file that says where it listens, so
that ``chat`` and ``run`` find a loaded model. The file holds the server's key: only the user can
read it. Files of servers that have ended are removed. In another container, or on another machine
that shares the user's folder, the address means another place: such servers are not found.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from localrt.common.errors import OptionError
from localrt.common.files import parse_json, private_folder, write_text
from localrt.common.formatting import one_line
from localrt.common.processes import is_alive, is_seen_alive, own_name
from localrt.common.settings import Settings

_PORTS = {"http": 80, "https": 443}
_CALLS = ("/chat/completions", "/completions", "/models")


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address. ``base`` is the path before ``/chat/completions``, such as ``/v1``."""

    scheme: str
    host: str
    port: int
    base: str
    key: str | None = field(default=None, repr=False)

    @property
    def place(self) -> str:
        """Host and port, as usually written."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def origin(self) -> str:
        """Scheme, host and port."""
        return f"{self.scheme}://{self.place}"

    @property
    def is_private(self) -> bool:
        """Whether no one on the network can read along: TLS, or this machine."""
        return self.scheme == "https" or self.host == "localhost" or _is_loopback(self.host)

    @property
    def headers(self) -> dict[str, str]:
        """The headers of every request."""
        found = {"User-Agent": "localrt", "Content-Type": "application/json"}
        found["Accept-Encoding"] = "identity"
        if self.key is not None:
            found["Authorization"] = f"Bearer {self.key}"
        return found

    def hide(self, text: str) -> str:
        """Return ``text`` without the key."""
        return text if self.key is None else text.replace(self.key, "...")


def read_address(url: str, key: str | None = None) -> Address:
    """Return the address in ``url``: ``http://localhost:8000`` and ``.../v1`` are the same.

    Raises:
        OptionError: ``url`` or ``key`` is malformed.
    """
    url = url.strip()
    try:
        parts = urlsplit(url)
        port = parts.port
        host = parts.hostname or ""
        host = host if ":" in host else host.encode("idna").decode()
    except ValueError as error:  # UnicodeError is one
        raise OptionError(
            f"the endpoint {one_line(url)!r} is not a URL: {one_line(error)}"
        ) from error
    if parts.scheme not in _PORTS or not host:
        raise OptionError(
            f"the endpoint must be a URL such as http://localhost:8000/v1, is {one_line(url)!r}"
        )
    if parts.username is not None or parts.password is not None:
        raise OptionError("the endpoint must not contain a name or a password: give an API key")
    if parts.query or parts.fragment:
        raise OptionError("the endpoint must end with its path, such as /v1: leave out ? and #")
    path = parts.path.rstrip("/")
    if not (path.isascii() and path.isprintable()) or " " in path or " " in host:
        raise OptionError(f"the endpoint {one_line(url)!r} has characters that no URL has")
    for call in _CALLS:
        path = path.removesuffix(call)
    return Address(
        parts.scheme,
        host,
        _PORTS[parts.scheme] if port is None else port,
        path or "/v1",
        _checked_key(key),
    )


def _checked_key(key: str | None) -> str | None:
    key = (key or "").strip()
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise OptionError("an API key must be printable ASCII text without spaces")
    return key or None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


# -- servers of this machine -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LocalServer:
    """A running server. ``models`` maps paths to names; None: all models of this machine."""

    url: str
    pid: int
    key: str | None = field(default=None, repr=False)
    models: Mapping[str, str] | None = None
    process: str | None = field(default=None, compare=False)  # a name that is not used again


@contextmanager
def announced(server: LocalServer, settings: Settings) -> Iterator[None]:
    """Let other processes of this user find ``server`` until the block ends."""
    named = replace(server, process=own_name())
    file = _folder(settings) / f"{named.process}.json"
    with suppress(OSError):  # the folder cannot be written: the server is not announced
        private_folder(file.parent)
        write_text(file, json.dumps(asdict(named)), private=True)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def local_servers(settings: Settings) -> list[LocalServer]:
    """Return the servers that run."""
    found = []
    with suppress(OSError):
        for file in sorted(_folder(settings).glob("*.json")):
            with suppress(OSError, ValueError, TypeError):
                server = LocalServer(**parse_json(file.read_text(encoding="utf-8")))
                if is_seen_alive(server.process):
                    found.append(server)
                elif not is_alive(server.process):
                    file.unlink(missing_ok=True)
    return found


def _folder(settings: Settings) -> Path:
    return settings.data_dir / "servers"
