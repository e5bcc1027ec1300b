"""Result files (machine, versions, command, a row per measurement), and tables of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import localrt
from localrt.common.files import write_text
from localrt.offload import hardware

Record = dict[str, Any]


class Results:
    """A result file whose rows are saved one by one: a run continues where an earlier one stopped.

    Without ``path`` nothing is saved. ``more`` are facts about the run besides machine, versions
    and command.
    """

    def __init__(self, path: Path | None, command: str, *packages: str, **more: Any) -> None:
        self.path = path
        self.record: Record = {"rows": [], **(load(path) if path else {})}
        self._about = {**setting(command, *packages), **more}

    @property
    def rows(self) -> list[Record]:
        """All rows, including those of earlier runs."""
        rows: list[Record] = self.record["rows"]
        return rows

    def pending(
        self, names: Iterable[str], only: Sequence[str] = (), again: Sequence[str] = ()
    ) -> Iterator[str]:
        """Names to measure: those matching ``only`` (if given) that have no row yet or match
        ``again``. A ``skipped`` row does not count.
        """
        done = {row["name"] for row in self.rows if not row.get("skipped")}
        for name in names:
            anew = name not in done or any(word in name for word in again)
            if anew and (not only or any(word in name for word in only)):
                yield name

    def put(self, row: Record, order: Iterable[str] = ()) -> None:
        """Save ``row`` in place of any row of its name; rows named in ``order`` come first."""
        known = {old["name"]: old for old in self.rows}
        names = dict.fromkeys((*order, *known, row["name"]))
        known[row["name"]] = row
        rows = [known[name] for name in names if name in known]
        self.record = {**self.record, **self._about, "rows": rows}
        save(self.path, self.record)
        print(f"{row['name']} is done", flush=True)


def setting(command: str, *packages: str) -> Record:
    """The setting of a run: machine, versions of localrt and of ``packages``, command."""
    cpu = hardware.probe().cpu
    return {
        "machine": f"{cpu.name}, {cpu.usable_cores} cores",
        "versions": dict(_versions(packages)),
        "command": command,
    }


def load(path: Path) -> Record:
    """The saved results; empty if there are none."""
    if not path.exists():
        return {}
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def save(path: Path | None, record: Mapping[str, Any]) -> None:
    """Save the record atomically, since a run may be stopped at any time; None: do nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, _text(dict(record)) + "\n")


def _text(value: Any, indent: str = "\n") -> str:
    """JSON with one line per innermost list or object, for readable diffs."""
    inside = value.values() if isinstance(value, dict) else value
    nested = isinstance(value, dict | list | tuple) and any(
        isinstance(each, dict | list | tuple) for each in inside
    )
    if not nested:
        return json.dumps(value)
    deeper = indent + " "
    parts = [_text(each, deeper) for each in inside]
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {part}" for key, part in zip(value, parts, strict=True)]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    return opening + deeper + f",{deeper}".join(parts) + indent + closing


def _versions(packages: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield "localrt", localrt.__version__
    for package in packages:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue


# -- tables ----------------------------------------------------------------------------------------


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; cells are Markdown."""
    lines = [f"| {' | '.join(cells)} |" for cells in (headers, *rows)]
    return "\n".join([lines[0], f"|{'---|' * len(headers)}", *lines[1:]])


def captioned(record: Mapping[str, Any], table: str, about: str = "medians") -> str:
    """``table``, and below it the command, what it measures, the machine and versions."""
    machine = f" on {record['machine']}" if "machine" in record else ""
    command = record["command"].removesuffix(" --json")
    return f"{table}\n\n`{command}`: {about}{machine}. {versions_of(record)}."


def versions_of(record: Mapping[str, Any]) -> str:
    """The installed versions of packages."""
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items())
