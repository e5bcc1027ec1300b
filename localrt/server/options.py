"""A server's start options: its address, its clients, and its limits."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field

from localrt.common.errors import OptionError
from localrt.common.option_names import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Limits of a server. Sizes in bytes, times in seconds.

    ``name`` is the model's name in requests (None: its own name). ``max_running`` answers share
    passes, ``max_queued`` wait; further ones are refused for now. At most ``max_connections``
    requests are open at a time. ``origins`` are the web pages that may send requests (CORS),
    ``"*"`` means all. A request's body must arrive within ``read_timeout_s``; a client that
    does not read for ``write_timeout_s`` is disconnected. With several models, one that is
    unused for ``keep_alive_s`` frees its memory (negative: never). ``strict_models`` refuses
    requests for unknown models, ``allow_pull`` lets clients download models. With
    ``conversations``, who has ``api_key`` reads and writes the user's conversations from other
    machines too. Answers get ``drain_s`` to finish when the server stops.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    name: str | None = None
    api_key: str | None = field(default=None, repr=False)
    origins: tuple[str, ...] = ()
    max_running: int = 16
    max_queued: int = 64
    max_connections: int = 1000
    max_body: int = 8 << 20
    max_header: int = 32 << 10
    max_choices: int = 16
    read_timeout_s: float = 30.0
    write_timeout_s: float = 60.0
    drain_s: float = 20.0
    keep_alive_s: float = 300.0
    strict_models: bool = False
    allow_pull: bool = False
    conversations: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("port", 0, 65535),
            ("max_running", 1, 1024),
            ("max_queued", 0, 1 << 20),
            ("max_connections", 1, 1 << 20),
            ("max_body", 1, 1 << 40),
            ("max_header", 1024, 1 << 20),
            ("max_choices", 1, 1024),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise OptionError(
                    f"{option(name)} must be an integer from {low} to {high}, is {value!r}"
                )
        for name in ("read_timeout_s", "write_timeout_s", "drain_s"):
            if not getattr(self, name) >= 0:
                raise OptionError(f"{option(name)} must be 0 or more, is {getattr(self, name)!r}")
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.strip()):
            raise OptionError(f"{option('api_key')} must be ASCII text and not empty")
        if not self.host:
            raise OptionError("host must not be empty: 127.0.0.1 is this machine, 0.0.0.0 all")
        if self.conversations and self.api_key is None and not is_loopback(self.host):
            raise OptionError(f"{option('conversations')} on {self.host} needs a key: set one")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
