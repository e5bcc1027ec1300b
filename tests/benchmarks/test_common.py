"""What every measurement shares: its command line, its turns, its result file, its tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import benchmarks
from benchmarks import tables
from benchmarks.common.command import RESULTS, cited_command, listed, make_parser
from benchmarks.common.record import Results, load, markdown_table, save
from benchmarks.common.turns import by_turns, ratios, summary

ROOT = Path(benchmarks.__file__).parent
PAGE = "<!-- table: cpu-avx2 -->\n<!-- end -->\n"


def modules() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def commands() -> Iterator[str]:
    for path in sorted(ROOT.rglob("*.py")):
        if "make_parser(" in path.read_text("utf-8") and path.parent.name != "common":
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


def test_command_line() -> None:
    words = ["/a/m.gguf", "--json", "/a/out.json", "--ssd", "3GB/s"]
    assert cited_command("x", words) == "python -m benchmarks.x m.gguf --ssd 3GB/s"
    parser = make_parser("What it does.\n\nMore.", results="x", runs=3, rows=True)
    parser.add_argument("--formats", type=listed(["a", "b"]))
    args = parser.parse_args(["--formats", "a,b", "--only", "m", "n", "--only", "o"])
    assert (args.formats, args.json, args.runs) == (["a", "b"], RESULTS / "x.json", 3)
    assert (args.only, args.again) == (["m", "n", "o"], [])
    with pytest.raises(SystemExit):
        parser.parse_args(["--formats", "c"])


def test_turns() -> None:
    order = list[str]()
    calls = {name: lambda n=name: order.append(n) or len(order) for name in "ab"}
    assert by_turns(calls, 2) == {"a": [4, 5], "b": [3, 6]}
    assert "".join(order) == "abbaab"
    assert by_turns(calls, 1, warm_up=False) == {"a": [7], "b": [8]}
    assert summary([1.0, 2.0, 6.0]) == {"median": 2.0, "low": 1.5, "high": 4.0}
    assert ratios([1.0, 6.0], [2.0, 2.0]) == [0.5, 3.0]


def test_a_run_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, order = tmp_path / "made.json", ["one", "two", "three"]
    results = Results(path, "python -m benchmarks.x", runs=5)
    assert list(results.pending(order)) == order
    results.put({"name": "three", "values": [1, 2]}, order)
    results.put({"name": "one", "skipped": "no room"}, order)
    assert capsys.readouterr().out == "three is done\none is done\n"
    results = Results(path, "python -m benchmarks.x --again")
    assert [row["name"] for row in results.rows] == ["one", "three"]
    assert list(results.pending(order)) == ["one", "two"], "what was skipped is tried again"
    assert list(results.pending(order, only=["t"])) == ["two"]
    assert list(results.pending(order, again=["three"])) == order
    results.put({"name": "two"}, order)
    record = load(path)
    assert [row["name"] for row in record["rows"]] == order
    assert (record["command"], record["runs"]) == ("python -m benchmarks.x --again", 5)
    assert {"machine", "versions"} <= record.keys()
    assert [file.name for file in tmp_path.iterdir()] == ["made.json"]
    Results(None, "c").put({"name": "nowhere"})


def test_saved_lines(tmp_path: Path) -> None:
    made = {"rows": [{"a": 1, "b": "x"}, {"a": [1, 2], "b": None}], "setting": {}}
    save(tmp_path / "made.json", made)
    lines = (tmp_path / "made.json").read_text("utf-8").splitlines()
    assert '  {"a": 1, "b": "x"},' in lines
    assert '   "a": [1, 2],' in lines
    assert load(tmp_path / "made.json") == made
    assert load(tmp_path / "none.json") == {}
    assert markdown_table(["a", "b"], [["1", "2"]]) == "| a | b |\n|---|---|\n| 1 | 2 |"


# -- the docs --------------------------------------------------------------------------------------


def test_cited_commands_exist() -> None:
    known = set(commands())
    for path in RESULTS.glob("*.json"):
        command = json.loads(path.read_text("utf-8"))["command"]
        if command.startswith("python -m benchmarks"):
            assert command.split()[2] in known, path


def test_every_result_is_shown() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.pages())
    for path in RESULTS.glob("*.json"):
        assert f"<!-- table: {path.stem} -->" in pages, path.name


def test_tables_of_docs() -> None:
    assert tables.main(["--check"]) == 0


def test_a_figure_that_no_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr(tables, "pages", lambda: [page])
    page.write_text(PAGE)
    assert tables.main([]) == 0
    made = page.read_text("utf-8")
    assert tables.main(["--check"]) == 0
    figure = "| 1.54x |"
    assert figure in made
    page.write_text(made.replace(figure, "| 9.99x |", 1))
    assert tables.main(["--check"]) == 1
    assert "the tables of page.md are out of date" in capsys.readouterr().out
    assert "9.99x" in page.read_text("utf-8"), "a check changes nothing"
    page.write_text("<!-- table: cpu-abacus -->\n<!-- end -->\n")
    with pytest.raises(SystemExit, match=r"cpu-abacus\.json, which is not in"):
        tables.main(["--check"])
