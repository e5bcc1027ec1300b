"""Programs that use the server: how each is started so that it uses a model of ours.

``localrt launch`` starts them, and the recipes of docs/clients.md are made from the same rows of
``programs.toml``.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from textwrap import indent

from localrt.common.errors import OptionError


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientProgram:
    """A program, its command, and how it is installed.

    It gets ``arguments`` before the user's, and ``variables``. ``settings`` are the text of a
    settings file, which users who set it up themselves keep at ``place``. ``tokens`` is what it
    sends before the user types, ``tools`` whether it works by calling tools. ``port`` is where it
    looks for a server; 0: where it is told.
    """

    name: str
    title: str
    command: str
    install: str
    tokens: int = 0
    tools: bool = True
    port: int = 0
    arguments: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    settings: str = ""
    place: str = ""


_ROWS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
PROGRAMS = tuple(
    ClientProgram(name=name, **{"title": name, "command": name, **row})
    for name, row in _ROWS.items()
)


def find_program(name: str) -> ClientProgram:
    """Return the program of this name or command.

    Raises:
        OptionError: there is none.
    """
    found = next((each for each in PROGRAMS if name.lower() in (each.name, each.command)), None)
    if found is None:
        known = ", ".join(each.name for each in PROGRAMS)
        raise OptionError(f"no program {name!r:.80} is known: there are {known}")
    return found


@dataclass(frozen=True, slots=True)
class Start:
    """How a program is started. If ``file`` is not None, it is to hold ``settings``."""

    command: list[str]
    variables: dict[str, str]
    file: Path | None
    settings: str

    def shell(self) -> str:
        """Return the same as lines for a POSIX shell."""
        lines = []
        if self.file is not None:
            folder, file = shlex.quote(str(self.file.parent)), shlex.quote(str(self.file))
            lines = [f"mkdir -p -m 700 {folder}", f"cat > {file} <<'END'", f"{self.settings}END"]
        lines += [f"export {name}={shlex.quote(text)}" for name, text in self.variables.items()]
        return "\n".join([*lines, shlex.join(self.command)])


def start_of(
    program: ClientProgram, url: str, model: str, *, ctx: int, key: str | None, folder: Path
) -> Start:
    """Return how ``program`` is started with ``model`` of the server at ``url``, with ``/v1``.

    A file with its settings, if there must be one, is to be in ``folder``.
    """
    file = folder / Path(program.place or "settings").name
    values = {"url": url, "origin": url.removesuffix("/v1"), "model": model, "ctx": str(ctx)}
    values |= {"key": key or "any", "file": str(file), "folder": str(folder)}
    # JSON, YAML and TOML escape alike between double quotes.
    quoted = {name: json.dumps(value)[1:-1] for name, value in values.items()}
    values["settings"] = Template(program.settings).safe_substitute(quoted)
    overrides = [word for line in values["settings"].splitlines() for word in ("-c", line)]

    def filled(text: str) -> str:
        return Template(text).safe_substitute(values)

    command = [program.command]
    for text in program.arguments:
        command += overrides if text == "$overrides" else [filled(text)]
    own = "".join((*program.arguments, *program.variables.values()))
    written = file if "$file" in own or "$folder" in own else None
    variables = {name: filled(text) for name, text in program.variables.items()}
    return Start(command, variables, written, values["settings"])


def recipe(program: ClientProgram) -> str:
    """Return, as Markdown, how users set the program up for a server at its usual port."""
    url = f"http://127.0.0.1:{program.port or 8080}/v1"
    start = start_of(program, url, "local", ctx=32768, key=None, folder=Path())
    if not program.settings:
        return indent(start.shell(), "    ")
    named = ("$settings", "$folder")
    kept = {n: t for n, t in start.variables.items() if program.variables[n] not in named}
    bare = Start([program.command], kept, None, "")
    settings, lines = (indent(text, "    ") for text in (start.settings, bare.shell()))
    return f"In `{program.place}`:\n\n{settings}\nThen:\n\n{lines}"
