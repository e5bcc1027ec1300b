"""The servers of this user on this machine: each leaves a file that says where it listens.

So ``chat`` and ``run`` find a model that is loaded already. A file holds the server's key: only the
user can read it. Those of servers that are gone are ignored, and removed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from localrt.errors import LocalrtError
from localrt.files import private_folder, write_text
from localrt.settings import Settings

if TYPE_CHECKING:  # the client takes its time to import
    from localrt.remote.answer import ListedModel

__all__ = ["LocalServer", "announced", "local_servers", "models_of"]

_ANSWER_S = 10.0  # of a server of this machine


@dataclass(frozen=True, slots=True)
class LocalServer:
    """``models`` are its models' names by their paths; None: all of this machine's."""

    url: str
    pid: int
    key: str | None = field(default=None, repr=False)
    models: Mapping[str, str] | None = None


@contextmanager
def announced(server: LocalServer, settings: Settings) -> Iterator[None]:
    """Other processes of this user find ``server`` as long as the block runs."""
    file = _folder(settings) / f"{server.pid}.json"
    with suppress(OSError):  # a folder that cannot be written: nobody finds it
        private_folder(file.parent)
        write_text(file, json.dumps(asdict(server)), private=True)
    try:
        yield
    finally:
        with suppress(OSError):
            file.unlink(missing_ok=True)


def local_servers(settings: Settings) -> list[LocalServer]:
    """Those that run."""
    from psutil import pid_exists  # ten milliseconds, for those who have servers

    found = []
    with suppress(OSError):
        for file in sorted(_folder(settings).glob("*.json")):
            with suppress(OSError, ValueError, TypeError):
                server = LocalServer(**json.loads(file.read_text(encoding="utf-8")))
                if pid_exists(server.pid):
                    found.append(server)
                else:
                    file.unlink(missing_ok=True)
    return found


def models_of(server: LocalServer) -> list[ListedModel]:
    """What ``server`` lists.

    Raises:
        LocalrtError: it does not answer: it is starting, suspended, or gone.
    """
    from localrt.remote.address import read_address
    from localrt.remote.model import list_remote

    end = time.monotonic() + _ANSWER_S

    def look() -> None:
        if time.monotonic() > end:
            raise LocalrtError(f"{server.url} does not answer within {_ANSWER_S:g} s")

    return list_remote(read_address(server.url, server.key), look=look)


def _folder(settings: Settings) -> Path:
    return settings.data_dir / "servers"
