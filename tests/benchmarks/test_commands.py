"""Every benchmark can be imported and says what it does; results cite commands that exist."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import benchmarks
from benchmarks import tables
from benchmarks.common.command import RESULTS, cited_command, listed, make_parser

ROOT = Path(benchmarks.__file__).parent


def modules() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def commands() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        if "make_parser(" in path.read_text() and path.parent.name != "common":
            name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
            yield name.removesuffix(".__main__")


@pytest.mark.parametrize("name", modules())
def test_import(name: str) -> None:
    import_module(name)


@pytest.mark.parametrize("name", commands())
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{name}.__main__" if (ROOT.parent / name.replace(".", "/")).is_dir() else name
    main = import_module(target)
    assert f"python -m {name} " in main.__doc__
    with pytest.raises(SystemExit) as done:
        main.main(["--help"])
    assert done.value.code == 0
    assert main.__doc__.partition("\n")[0].split()[0] in capsys.readouterr().out


def test_cited_commands_exist() -> None:
    known = set(commands())
    for path in RESULTS.glob("*.json"):
        record = json.loads(path.read_text())
        for cited in [record, *(record.get("results") or [])]:
            command = cited.get("command", "") if isinstance(cited, dict) else ""
            if command.startswith("python -m benchmarks"):
                assert command.split()[2] in known, path


def test_cited_command() -> None:
    words = ["/a/m.gguf", "--json", "/a/out.json", "--ssd", "3GB/s"]
    assert cited_command("x", words) == "python -m benchmarks.x m.gguf --ssd 3GB/s"
    parser = make_parser("What it does.\n\nMore.", results="x")
    parser.add_argument("--formats", type=listed(["a", "b"]))
    args = parser.parse_args(["--formats", "a,b"])
    assert (args.formats, args.json) == (["a", "b"], RESULTS / "x.json")
    with pytest.raises(SystemExit):
        parser.parse_args(["--formats", "c"])


def test_tables_of_docs() -> None:
    assert tables.main(["--check"]) == 0
