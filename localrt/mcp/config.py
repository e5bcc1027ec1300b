"""Reads MCP servers from ``config.toml``, and defines the values that this package shares.

    [mcp.servers.files]
    command = "npx"
    args = ["-y", "@modelcontextprotocol/server-filesystem", "/home/me/notes"]
    allow = ["read_file", "list_*"]  # run without a question
    deny = ["write_file"]  # never offered to the model

    [mcp.servers.web]
    url = "https://example.org/mcp"
    headers = { Authorization = "Bearer ${WEB_TOKEN}" }
    timeout = 20

``${NAME}`` in ``env`` and ``headers`` is an environment variable, so that secrets need not be in
the file. A server that cannot be used is left out, and a line says why.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from localrt.common.errors import OptionError, StorageError
from localrt.common.files import user_path
from localrt.common.formatting import one_line
from localrt.common.option_names import did_you_mean
from localrt.common.toml_file import TomlFile

Ending = Literal["done", "failed", "refused", "stopped"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as its server describes it; ``schema`` is the JSON schema of its arguments."""

    server: str
    name: str
    description: str
    schema: Mapping[str, object]

    @property
    def title(self) -> str:
        """The name shown to people, such as ``files.read_file``."""
        return f"{self.server}.{self.name}"


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The text that the model gets for a call, and how the call ended."""

    text: str
    ending: Ending = "done"

    def cut(self, most: int) -> ToolResult:
        """Cut the text to ``most`` characters, and add a line that says so."""
        if len(self.text) <= most:
            return self
        note = f"\n[cut: {most:,} of {len(self.text):,} characters]"
        return ToolResult(self.text[:most] + note, self.ending)


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """A server's state. ``problem`` follows its name in a sentence: why it failed, in one line."""

    name: str
    state: Literal["starting", "ready", "failed"]
    tools: tuple[Tool, ...] = ()
    problem: str = ""


_FILE = "config.toml"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
_VARIABLE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """A program to start (``command``), or an address to reach by streamable HTTP (``url``).

    ``allow`` and ``deny`` are names of tools, with ``*`` for any characters. Tools in ``deny`` are
    never offered; tools in ``allow`` run without a question. ``timeout``, in seconds, applies to
    the start and to each call.
    """

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    url: str = ""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout: float = 60.0
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if bool(self.command) == bool(self.url):
            raise OptionError("give either command (a program) or url (an address)")
        if self.url and not self.url.startswith(("http://", "https://")):
            raise OptionError(f"url must begin with http:// or https://, is {self.url!r}")
        try:
            urlsplit(self.url)
        except ValueError as error:
            raise OptionError(f"url cannot be read: {error}") from error
        if self.url and (self.args or self.env):
            raise OptionError("args and env go with command, not with url")
        if self.command and self.headers:
            raise OptionError("headers go with url, not with command")
        if not 0 < self.timeout < math.inf:
            raise OptionError(f"timeout must be more than 0 seconds, is {self.timeout:g}")

    def offers(self, tool: str) -> bool:
        """Whether a tool may be offered to the model."""
        return not _any(self.deny, tool)

    def allows(self, tool: str) -> bool:
        """Whether a tool runs without a question."""
        return _any(self.allow, tool)


def read_servers(
    folder: Path, environ: Mapping[str, str] = os.environ
) -> tuple[tuple[ServerConfig, ...], tuple[str, ...]]:
    """Read the servers of the config file in ``folder``; also return lines about those left out.

    ``environ`` has the variables for ``${NAME}``.
    """
    try:
        table = TomlFile(folder / _FILE).read().get("mcp", {})
    except StorageError as error:
        return (), (f"{one_line(error)}: no MCP servers are started",)
    entries = table.get("servers", {}) if isinstance(table, dict) else None
    if not isinstance(entries, dict) or table.keys() - {"servers"}:
        return (), (f"{_FILE}: [mcp] holds [mcp.servers.NAME] tables and nothing else: left out",)
    servers: list[ServerConfig] = []
    notes: list[str] = []
    for name, entry in entries.items():
        try:
            servers.append(_server(name, entry, environ))
        except OptionError as error:
            notes.append(f"{_FILE}, [mcp.servers.{name}]: {one_line(error)}: left out")
    return tuple(servers), tuple(notes)


def _server(name: str, entry: object, environ: Mapping[str, str]) -> ServerConfig:
    if _NAME.fullmatch(name) is None:
        raise OptionError("a server's name has 1 to 40 letters, digits, _ and -")
    if not isinstance(entry, dict):
        raise OptionError("it must be a table")
    known = [each.name for each in fields(ServerConfig) if each.name != "name"]
    for key in entry.keys() - set(known):
        hint = did_you_mean(key, known) or f"known: {', '.join(known)}"
        raise OptionError(f"{key!r} is not a setting ({hint})")
    values = {key: _value(key, value, environ) for key, value in entry.items()}
    return ServerConfig(name=name, **values)


def _value(key: str, value: object, environ: Mapping[str, str]) -> Any:
    """Return the checked value of a setting."""
    if key == "timeout":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise OptionError(f"timeout must be a number of seconds, is {value!r}")
        return float(value)
    if key in ("command", "url"):
        if not isinstance(value, str) or not value:
            raise OptionError(f"{key} must be a text, is {value!r}")
        return str(user_path(value)) if value.startswith("~") else value
    if key in ("env", "headers"):
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise OptionError(f"{key} must be a table of texts")
        return {name: _expanded(text, environ) for name, text in value.items()}
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise OptionError(f"{key} must be a list of texts, is {value!r:.60}")
    return tuple(value)


def _expanded(text: str, environ: Mapping[str, str]) -> str:
    """Replace the variables in ``text`` by their values."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in environ:
            raise OptionError(f"the environment has no variable {found[1]}")
        return environ[found[1]]

    return _VARIABLE.sub(value, text)


def _any(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
