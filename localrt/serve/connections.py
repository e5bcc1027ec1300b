"""Who is connected to a server, and who has to leave when there are too many.

A connection is idle while no request runs in it: it says nothing, or sends a request's head. Those
leave first, the longest idle before the others. It does not know HTTP.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Protocol

from localrt.serve.options import is_loopback

__all__ = ["CONNECTION", "Connection", "Connections", "most_connections"]

CONNECTION = "localrt.connection"
"""Where a request's state has the connection that it came by."""

_RESERVE = 16  # connections that are let in to ask how the server is
_FEWEST = 8
_HERE = ("", 0)  # a socket without an address; ::1 by its network
_OTHER_FILES = 256  # that the process opens later, and connections that have just come


class Connection(Protocol):
    """What can be closed."""

    def give_up(self) -> None:
        """Close it at once."""


class Connections:
    """All connections. An address that is not this machine's gets half of ``most``.

    A few more than ``most`` are let in, so that somebody who asks for the server's health is heard
    when all are busy: ``crowded`` says who may ask for nothing else.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._clients: dict[Connection, Hashable] = {}
        self._idle: dict[Connection, None] = {}  # the longest idle first
        self._counts: Counter[Hashable] = Counter()
        self._busy: Counter[Hashable] = Counter()
        self._crowded: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._clients)

    def join(self, one: Connection, host: str) -> bool:
        """Take in an idle connection; False: there is no room, although idle ones were closed."""
        client = _client(host)
        if self._counts[client] >= self._share(client) + _RESERVE and not self._close_idle(client):
            return False
        if len(self) >= self._most + _RESERVE and not self.make_room():
            return False
        self._clients[one] = client
        self._counts[client] += 1
        self._idle[one] = None
        return True

    def leave(self, one: Connection) -> None:
        """Forget a connection that has been closed."""
        if one not in self._clients:
            return
        self.set_busy(one, busy=False)
        del self._idle[one]
        client = self._clients.pop(one)
        self._counts[client] -= 1
        if not self._counts[client]:
            del self._counts[client], self._busy[client]

    def set_busy(self, one: Connection, *, busy: bool) -> None:
        """Note whether a request runs in it."""
        if one not in self._clients or busy is (one not in self._idle):
            return
        client = self._clients[one]
        if not busy:
            self._busy[client] -= 1
            self._idle[one] = None
            self._crowded.discard(one)
            return
        self._busy[client] += 1
        del self._idle[one]
        if len(self) - len(self._idle) > self._most or self._busy[client] > self._share(client):
            self._crowded.add(one)

    def crowded(self, one: Connection) -> bool:
        """Whether its request began when as many ran as there is room for."""
        return one in self._crowded

    def make_room(self) -> bool:
        """Close the connection that has been idle for the longest; False: none is."""
        return self._close_idle()

    def _close_idle(self, client: Hashable = None) -> bool:
        for one in self._idle:
            if client in (None, self._clients[one]):
                self.leave(one)
                one.give_up()
                return True
        return False

    def _share(self, client: Hashable) -> int:
        return self._most if client in _HERE or is_loopback(str(client)) else -(-self._most // 2)


def most_connections(wanted: int) -> int:
    """``wanted``, or as many as the system lets this process have open files for."""
    try:
        import resource  # not on every system
    except ImportError:
        return wanted
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    taken = 0
    with suppress(OSError):
        taken = sum(1 for _ in Path("/dev/fd").iterdir())
    others = min(_OTHER_FILES, limit // 4)
    return min(wanted, max(_FEWEST, limit - taken - others - _RESERVE))


def _client(host: str) -> Hashable:
    """An address, or the network that a client with an IPv6 address has for itself."""
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if not isinstance(address, IPv6Address):
        return str(address)
    return str(address.ipv4_mapped) if address.ipv4_mapped else int(address) >> 64
