"""Processes: those that run a part of localrt, programs, and names that are never used again.

A program that PyInstaller made has no interpreter to start. It starts itself instead, if its main
script imports ``run_helper`` and calls it first, as ``localrt/__main__.py`` does. No other packaged
program has helpers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from localrt import system

if TYPE_CHECKING:
    import subprocess

_INTERNAL = "--internal"
_BEGAN = int(time.time())
_UNSEEN_S = 86_400.0
_START = (
    "import json, sys; sys.path{} = json.loads(sys.argv.pop(1)); "
    "from importlib import import_module; sys.exit(import_module(sys.argv.pop(1)).main())"
)
# What Python needs, and where it finds its libraries: variables of users, packages and systems.
_NEEDED = re.compile(
    r"PATH|HOME|LANG|LC_\w+|TZ|TE?MP(DIR)?|PYTHON[A-Z0-9]+|LD_LIBRARY_PATH|DYLD_\w+|NIX_LD\w*|"
    r"_PYI_\w+|SYSTEM(ROOT|DRIVE)|WINDIR|USERPROFILE|(LOCAL)?APPDATA"
)


def is_packaged() -> bool:
    """Whether this is a program that has no Python of its own to install into."""
    return bool(getattr(sys, "frozen", False))


def has_helpers() -> bool:
    """Whether this program can start helpers."""
    own = getattr(sys.modules["__main__"], "run_helper", None) is run_helper
    return bool(sys.executable) and (own or not is_packaged())


def localrt_command(*arguments: str) -> list[str]:
    """The command line of ``localrt ARGUMENTS``."""
    start = [sys.executable] if is_packaged() else helper_command("localrt.cli")
    return [*start, *arguments]


def helper_command(
    module: str, *arguments: str, folders: Sequence[Path] | None = None
) -> list[str]:
    """The command line that calls ``main()`` of a module, which finds ``arguments`` in sys.argv.

    It is this copy of localrt. With ``folders``, the interpreter ignores the environment and
    imports from them and the standard library alone, which starts sooner.
    """
    if is_packaged():
        return [sys.executable, _INTERNAL, module, *arguments]
    python = sys.executable if folders is None else system.bare_python()
    root = str(Path(__file__).resolve().parents[2])
    flags, place = (["-P"], "[:0]") if folders is None else (["-I", "-S"], "[len(sys.path):]")
    path = json.dumps([root, *map(str, folders or ())])
    return [python, *flags, "-c", _START.format(place), path, module, *arguments]


def run_helper() -> bool:
    """Be the helper that ``helper_command`` of this packaged program started; False if none."""
    if not is_packaged() or sys.argv[1:2] != [_INTERNAL] or len(sys.argv) < 3:
        return False
    module = sys.argv[2]
    del sys.argv[1:3]
    import_module(module).main()
    return True


def confined_process(command: Sequence[str], stderr: int | None = None) -> subprocess.Popen[bytes]:
    """Start a helper that reads strangers' files, with pipes, and without keys of the environment.
    By default its stderr is dropped.
    """
    import subprocess  # half a megabyte

    needed = {name: text for name, text in os.environ.items() if _NEEDED.fullmatch(name)}
    pipe, stderr = subprocess.PIPE, stderr or subprocess.DEVNULL
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=needed)


def keep_path_absolute() -> None:
    """Remove from PATH, for this process and those it starts, what means the current folder."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(filter(os.path.isabs, folders)) or "/usr/bin"


def program_path(name: str, path: str | None = None) -> str | None:
    """The absolute path of a program in ``path``, by default PATH; it may be the name itself.

    None if there is none, or the first one found lies in the current folder.
    """
    found = shutil.which(name, path=path)
    return found if found and Path(found).is_absolute() else None


def process_name(number: int) -> str | None:
    """A name for a process that no other ever has; None if there is none with this id.

    It also says when this process began, for ``is_alive``, and may be part of a file's name.
    """
    start = system.process_start(number)
    return start and "+".join([str(number), start, *system.process_place(), str(_BEGAN)])


def own_name() -> str | None:
    """This process's name, the same at every call."""
    return process_name(os.getpid())


def is_alive(name: str | None) -> bool:
    """Whether the process with this ``process_name`` still runs.

    One that cannot be seen from here counts as alive for a day after it began: to end the work of a
    living process harms more than to wait for a dead one.
    """
    alive = is_seen_alive(name)
    if alive is None:
        began = (name or "").rpartition("+")[2]
        return began.isdecimal() and abs(time.time() - float(began)) < _UNSEEN_S
    return alive


def is_seen_alive(name: str | None) -> bool | None:
    """Like ``is_alive``, but None for a process that cannot be seen from here: one in another
    container (PID namespace), or on another machine that shares this user's folder.
    """
    import psutil  # takes ten milliseconds

    try:
        number, *parts = (name or "").split("+")
        if not parts:  # of an earlier version; it moves with the clock
            number, began = number.split("@")
            process = psutil.Process(int(number))
            same = abs(process.create_time() - float(began)) < 1.0
            return same and process.status() != psutil.STATUS_ZOMBIE
        start, namespace, boot, machine, _ = parts
        own = system.process_place()
        if (namespace, boot) == own[:2]:
            return system.process_start(int(number)) == start
        return False if boot != own[1] and machine == own[2] else None
    except (ValueError, psutil.Error):
        return False


def port_holder(port: int) -> str:
    """Name and id of the process that listens on a TCP port; empty if the system does not say."""
    import psutil  # as above

    with suppress(psutil.Error, OSError):  # macOS tells only root
        for each in psutil.net_connections("tcp"):
            listens = each.laddr and each.laddr.port == port and each.status == psutil.CONN_LISTEN
            if listens and each.pid:
                return f"{psutil.Process(each.pid).name()} (process {each.pid})"
    return ""
