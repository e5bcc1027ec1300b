"""The file that ``localrt doctor --report`` writes for an issue, with nothing private in it.

It is made of what is known to be harmless: numbers, versions, and names of packages, models and
variables. Names of the user and the machine are replaced wherever they occur.
"""

from __future__ import annotations

import getpass
import os
import platform
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from localrt import system
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.files import read_text, write_text
from localrt.common.formatting import format_bytes
from localrt.common.option_names import option
from localrt.common.settings import CRASH_REPORT, Settings
from localrt.hub import list_models

FILE = "localrt-report.txt"
_HEAD = "A report of localrt doctor"
_VARIABLES = ("LOCALRT_", "HF_", "XDG_", "CUDA_", "TERM", "COLORTERM", "LANG", "LC_")
# The folder of a file of code, up to the package that it is of.
_PLACE = re.compile(r'File "(?:.*[/\\](?:site-packages|python3\.\d+|localrt)[/\\])?([^"]*)"')


def shareable(report: dict[str, Any]) -> dict[str, Any]:
    """Return doctor's report without paths, and without advice, which names them."""
    folders = [{**folder, "path": "-"} for folder in report["folders"]]
    demo = report["demo_model"] and "here"
    return {**report, "folders": folders, "demo_model": demo, "advice": []}


def write_report(path: Path, lines: Iterable[str]) -> str:
    """Write a report with these lines and what belongs to them; return what to tell the user.

    Raises:
        OptionError: another file is there.
        StorageError: it cannot be written.
    """
    with suppress(FileNotFoundError), path.open("rb") as file:
        if file.read(len(_HEAD)) != _HEAD.encode():
            raise OptionError(f"{path} is there already: give {option('report')} another name")
    settings = Settings.from_environment()
    text = "\n".join([_HEAD, "", *lines, *_more(settings), ""])
    for name in _private_names():
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text)
    write_text(path, text, private=True)
    return (
        f"{path.absolute()} has what this machine is, versions of packages, names and sizes of "
        "models, which variables are set, and where the app last crashed. It has no folders, names "
        "of users or machines, keys, values of variables or conversations. Read it before you send "
        "it"
    )


def _more(settings: Settings) -> Iterator[str]:
    yield "\nVersions"
    with suppress(PackageNotFoundError):  # a checkout that is not installed
        for name in [re.split(r"[^\w.-]", each)[0] for each in requires("localrt") or ()]:
            with suppress(PackageNotFoundError):
                yield f"  {name} {version(name)}"
    yield "\nModels"
    for model in list_models(settings):
        name = model.path.name if model.place == "yours" else model.name
        yield f"  {Path(name).name if Path(name).is_absolute() else name}, {model.kind}, " + (
            f"{model.quantization or 'unquantized'}, {format_bytes(model.bytes)}, {model.place}"
        )
    yield "\nVariables that are set"
    yield f"  {' '.join(sorted(name for name in os.environ if name.startswith(_VARIABLES)))}"
    with suppress(LocalrtError, OSError):
        lines = read_text(settings.data_dir / CRASH_REPORT).splitlines()
        # Without lines of code: they may be of a file of the user's own.
        crash = "\n".join(line for line in lines if not line.startswith("    "))
        yield f"\nThe app's last crash\n{_PLACE.sub(_code_place, crash)}"


def _code_place(match: re.Match[str]) -> str:
    """``File "localrt/tui/app.py"``; nothing of a file that is no package's."""
    known = match[0] != f'File "{match[1]}"'
    return f'File "{match[1] if known else "..."}"'


def _private_names() -> Iterator[str]:
    """The user's folder, name and machine, longest first."""
    names = {str(system.home_folder()), platform.node(), platform.node().partition(".")[0]}
    with suppress(OSError, KeyError, ImportError):
        names.add(getpass.getuser())
    yield from sorted((name for name in names if len(name) > 1), key=len, reverse=True)
