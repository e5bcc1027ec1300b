"""Result files: common fields, saving, and Markdown tables.

Existing rows are kept, so that a run continues where another one stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import localrt
from localrt.common.files import write_text
from localrt.offload import hardware

Record = dict[str, Any]


def setting(command: str, *packages: str) -> Record:
    """The setting of a run: machine, versions of localrt and of ``packages``, command."""
    return {
        "machine": hardware.probe().to_dict(),
        "versions": dict(_versions(packages)),
        "command": command,
    }


def load(path: Path, **empty: Any) -> Record:
    """The results so far; ``empty`` when there are none."""
    if not path.exists():
        return empty
    record: Record = json.loads(path.read_text(encoding="utf-8"))
    return record


def save(path: Path | None, record: Mapping[str, Any]) -> None:
    """Save the record atomically, since a run may be stopped at any time; None: do nothing."""
    if path is None:
        return
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


def save_row(
    path: Path, record: Record, row: Record, order: Sequence[str], **setting: Any
) -> Record:
    """Replace ``row`` in ``record`` and save it. ``order`` names all rows."""
    both = {old["name"]: old for old in record["rows"]} | {row["name"]: row}
    made = {**setting, "rows": [both[name] for name in order if name in both]}
    save(path, made)
    return made


def pending(
    rows: Sequence[Any], record: Mapping[str, Any], only: Sequence[str], again: Sequence[str]
) -> list[Any]:
    """Rows to measure: those without results or named by ``again``, filtered by ``only``.

    Both are words in a row's ``name``.
    """
    done = {row["name"] for row in record["rows"] if row["results"]}

    def named(row: Any, words: Sequence[str]) -> bool:
        return any(word in row.name for word in words)

    wanted = [row for row in rows if not only or named(row, only)]
    return [row for row in wanted if row.name not in done or named(row, again)]


def _versions(packages: Sequence[str]) -> list[tuple[str, str]]:
    found = [("localrt", localrt.__version__)]
    for package in packages:
        try:
            found.append((package, version(package)))
        except PackageNotFoundError:
            continue
    return found


def markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; cells are Markdown."""
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join(
        f"|{'|'.join(cells)}|" if cells is lines[1] else f"| {' | '.join(cells)} |"
        for cells in lines
    )


def machine_of(record: Mapping[str, Any]) -> str:
    """The processor and its cores."""
    cpu = record["machine"]["cpu"]
    return f"{cpu['name']}, {cpu['usable_cores']} cores"


def versions_of(record: Mapping[str, Any]) -> str:
    """The installed versions of packages."""
    return ", ".join(f"{name} {version}" for name, version in record["versions"].items())
