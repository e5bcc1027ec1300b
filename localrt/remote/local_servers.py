"""The servers of this user on this machine: each leaves a file that says where it listens.

So ``chat`` and ``run`` find a model that is loaded already. A file holds the server's key: only the
user can read it. Those of servers that are gone are ignored, and removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from localrt.files import private_folder, write_text
from localrt.settings import Settings

__all__ = ["LocalServer", "announced", "local_servers"]


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


def _folder(settings: Settings) -> Path:
    return settings.data_dir / "servers"
