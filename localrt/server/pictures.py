"""Pictures of the web, for servers that may fetch them.

A URL is fetched from public addresses alone. All addresses of its host, and of hosts that it
redirects to, are checked, and the connection goes to one of them: nothing is looked up a second
time. No proxy is used, and nothing is unpacked.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from typing import NamedTuple
from urllib.parse import quote, urljoin, urlsplit

import h11

from localrt.common.formatting import format_bytes
from localrt.common.version import __version__
from localrt.server.errors import invalid

_MOST_REDIRECTS = 3
_MOST_URL = 8192  # characters
_CHUNK = 64 << 10
_SAFE = "%/:=&?~+!$,;'@()*[]"  # characters of a URL that stay as they are
_PORTS = {"http": 80, "https": 443}
_UNICAST = ipaddress.ip_network("2000::/3")  # what is given out of IPv6


def is_public(address: str) -> bool:
    """Whether an IP address is one of the Internet.

    Not private, of this machine or link, multicast or reserved; nor an IPv6 address that stands for
    an IPv4 address.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address) and (
        found not in _UNICAST or found.sixtofour is not None or found.teredo is not None
    ):
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved)


class Fetcher:
    """Fetches pictures from addresses that are ``allowed``; for one event loop."""

    def __init__(self, allowed: Callable[[str], bool] = is_public) -> None:
        self._allowed = allowed
        # Look-ups have no time limit, and must not occupy the threads that everything else needs.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="localrt-lookup")

    async def fetch(
        self, url: str, name: str, most: int, take: Callable[[int], None] = lambda nbytes: None
    ) -> bytes:
        """Return what is at ``url``, at most ``most`` bytes, of which ``take`` is told before they
        are kept. ``name`` is the picture's in messages.

        Raises:
            ApiError: 400, it cannot be fetched, or may not be.
        """
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                place = _place(url, name)
                addresses = await self._addresses(place, name)
                found = await _get(place, addresses, name, most, take)
                if isinstance(found, bytes):
                    return found
                url = urljoin(url, found)
        except ssl.SSLError as error:
            raise invalid(f"{name} cannot be fetched: its server's TLS is not valid") from error
        except h11.ProtocolError as error:
            raise invalid(f"{name} cannot be fetched: its server breaks off") from error
        except (OSError, ValueError) as error:
            raise invalid(f"{name} cannot be fetched: its server cannot be reached") from error
        raise invalid(f"{name} cannot be fetched: it redirects more than {_MOST_REDIRECTS} times")

    async def _addresses(self, place: _Place, name: str) -> list[str]:
        """Return the addresses of a host, all of them allowed."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, socket.getaddrinfo, place.host, place.port, 0, socket.SOCK_STREAM
        )
        addresses = list(dict.fromkeys(str(each[4][0]) for each in found))
        if not all(map(self._allowed, addresses)):
            raise invalid(f"{name} may not be fetched: its address is not public")
        return addresses


class _Place(NamedTuple):
    """The parts of a URL: ``name`` is the host as requests name it."""

    scheme: str
    host: str
    port: int
    name: str
    target: str


def _place(url: str, name: str) -> _Place:
    """Return the parts of ``url``.

    Raises:
        ApiError: 400, it is no URL of the web.
    """
    with suppress(ValueError):
        parts = urlsplit(url) if len(url) <= _MOST_URL else urlsplit("")
        port, host = parts.port, parts.hostname
        if parts.scheme in _PORTS and host and "@" not in parts.netloc:
            if not host.isascii():
                host = host.encode("idna").decode()
            shown = f"[{host}]" if ":" in host else host
            target = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
            return _Place(
                parts.scheme,
                host,
                _PORTS[parts.scheme] if port is None else port,
                shown if port is None else f"{shown}:{port}",
                quote(target, safe=_SAFE),
            )
    raise invalid(f"{name} is not at a URL that can be fetched: only http and https, no password")


async def _get(
    place: _Place, addresses: list[str], name: str, most: int, take: Callable[[int], None]
) -> bytes | str:
    """Return a body, or where it has moved."""
    reader, writer = await _connect(place, addresses)
    try:
        http = h11.Connection(h11.CLIENT)
        headers = {
            "Host": place.name,
            "Accept": "image/*",
            "User-Agent": f"localrt/{__version__}",
            "Connection": "close",
        }
        for sent in (
            h11.Request(method="GET", target=place.target, headers=list(headers.items())),
            h11.EndOfMessage(),
        ):
            writer.write(http.send(sent) or b"")
        body: list[bytes] = []
        size = 0
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                http.receive_data(await reader.read(_CHUNK))
            elif isinstance(event, h11.Response):
                found = {key: value.decode("latin-1") for key, value in event.headers}
                if event.status_code in (301, 302, 303, 307, 308) and b"location" in found:
                    return found[b"location"]
                if event.status_code != 200:
                    raise invalid(
                        f"{name} cannot be fetched: its server answers {event.status_code}"
                    )
            elif isinstance(event, h11.Data):
                size += len(event.data)
                if size > most:
                    raise invalid(f"{name} is larger than {format_bytes(most)}: send a smaller one")
                take(len(event.data))
                body.append(bytes(event.data))
            elif isinstance(event, h11.EndOfMessage):
                return b"".join(body)
            elif not isinstance(event, h11.InformationalResponse):
                raise OSError("no answer")
    finally:
        writer.transport.abort()


async def _connect(
    place: _Place, addresses: list[str]
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connect to the first address that answers; a certificate must be the host's."""
    secure = place.scheme == "https"
    for address in addresses:
        try:
            return await asyncio.open_connection(
                address,
                place.port,
                ssl=_certificates() if secure else None,
                server_hostname=place.host if secure else None,
            )
        except ssl.SSLError:
            raise
        except OSError:
            if address == addresses[-1]:
                raise
    raise OSError("the host has no address")


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
