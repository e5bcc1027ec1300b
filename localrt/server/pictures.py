"""Fetches pictures from URLs, for servers that allow it.

URLs are fetched only from public addresses. All addresses of a host, and of hosts that it redirects
to, are checked, and the connection goes to one of them, without a second lookup. No proxy is used,
and nothing is decompressed.
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

import httpx2

from localrt.common.formatting import format_bytes
from localrt.common.network import causes
from localrt.common.version import __version__
from localrt.server.errors import invalid

_MOST_REDIRECTS = 3
_MOST_URL = 8192  # characters
_HEADERS = {
    "Accept": "image/*",
    "Accept-Encoding": "identity",
    "User-Agent": f"localrt/{__version__}",
    "Connection": "close",
}
_UNICAST = ipaddress.ip_network("2000::/3")  # the allocated part of IPv6


def is_public(address: str) -> bool:
    """Whether an IP address is public: not private, loopback, link-local, multicast or reserved,
    nor an IPv6 address that represents an IPv4 address.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address) and (
        ip not in _UNICAST or ip.sixtofour is not None or ip.teredo is not None
    ):
        return False
    return ip.is_global and not (ip.is_multicast or ip.is_reserved)


class Fetcher:
    """Fetches pictures from addresses that are ``allowed``; for one event loop."""

    def __init__(self, allowed: Callable[[str], bool] = is_public) -> None:
        self._allowed = allowed
        # DNS lookups have no time limit, and must not occupy the shared threads.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="localrt-lookup")

    async def fetch(
        self, url: str, name: str, most: int, take: Callable[[int], None] = lambda nbytes: None
    ) -> bytes:
        """Return the content of ``url``, at most ``most`` bytes; ``take`` is called with sizes
        before data is kept. ``name`` is the picture's name in messages.

        Raises:
            ApiError: 400, it cannot or must not be fetched.
        """
        place = _read_url(url, None, name)
        try:
            for _ in range(_MOST_REDIRECTS + 1):
                addresses = await self._addresses(place, name)
                answer = await _get(place, addresses, name, most, take)
                if isinstance(answer, bytes):
                    return answer
                place = _read_url(answer, place, name)
        except (httpx2.HTTPError, OSError, ValueError) as error:
            why = "its server cannot be reached"
            if isinstance(error, httpx2.RemoteProtocolError):
                why = "its server breaks off"
            elif _is_of_tls(error):
                why = "its server's TLS is not valid"
            raise invalid(f"{name} cannot be fetched: {why}") from error
        raise invalid(f"{name} cannot be fetched: it redirects more than {_MOST_REDIRECTS} times")

    async def _addresses(self, place: httpx2.URL, name: str) -> list[str]:
        """Return the addresses of a host; all must be allowed."""
        loop = asyncio.get_running_loop()
        host, port = place.raw_host.decode(), place.port
        infos = await loop.run_in_executor(
            self._threads, socket.getaddrinfo, host, port, 0, socket.SOCK_STREAM
        )
        addresses = list(dict.fromkeys(str(each[4][0]) for each in infos))
        if not all(map(self._allowed, addresses)):
            raise invalid(f"{name} may not be fetched: its address is not public")
        return addresses


def _read_url(text: str, base: httpx2.URL | None, name: str) -> httpx2.URL:
    """Return the URL, which may be relative to ``base``.

    Raises:
        ApiError: 400, it is not an http or https URL.
    """
    with suppress(httpx2.InvalidURL, ValueError):
        url = httpx2.URL(text if len(text) <= _MOST_URL else "")
        url = url if base is None else base.join(url)
        port_exists = url.port is None or url.port < 1 << 16
        if url.scheme in ("http", "https") and url.host and not url.userinfo and port_exists:
            return url
    raise invalid(f"{name} is not at a URL that can be fetched: only http and https, no password")


async def _get(
    url: httpx2.URL, addresses: list[str], name: str, most: int, take: Callable[[int], None]
) -> bytes | str:
    """Return a body, or a redirect's location.

    The request goes to the first address that answers; the certificate must be for the host.
    """
    headers = {**_HEADERS, "Host": url.netloc.decode()}
    tls_name = {"sni_hostname": url.raw_host.decode()}
    # One client per host: connections are pooled by address, and must not be used for other hosts.
    tls = _certificates() if url.scheme == "https" else False
    transport = httpx2.AsyncHTTPTransport(verify=tls, trust_env=False)
    async with httpx2.AsyncClient(transport=transport, timeout=None, trust_env=False) as client:
        for address in addresses:
            there = url.copy_with(host=address)
            try:
                async with client.stream(
                    "GET", there, headers=headers, extensions=tls_name
                ) as response:
                    return await _read(response, name, most, take)
            except httpx2.ConnectError as error:
                if address == addresses[-1] or _is_of_tls(error):
                    raise
    raise OSError("the host has no address")


async def _read(
    response: httpx2.Response, name: str, most: int, take: Callable[[int], None]
) -> bytes | str:
    if response.has_redirect_location:
        return response.headers["location"]
    if response.status_code != 200:
        raise invalid(f"{name} cannot be fetched: its server answers {response.status_code}")
    body = bytearray()
    async for piece in response.aiter_raw():
        if len(body) + len(piece) > most:
            raise invalid(f"{name} is larger than {format_bytes(most)}: send a smaller one")
        take(len(piece))
        body += piece
    return bytes(body)


def _is_of_tls(error: Exception) -> bool:
    return any(isinstance(cause, ssl.SSLError) for cause in causes(error))


@cache
def _certificates() -> ssl.SSLContext:
    return ssl.create_default_context()
