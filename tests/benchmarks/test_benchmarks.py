"""The measurements of ``benchmarks``: their commands, result files and tables."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import benchmarks
from benchmarks.common.command import RESULTS
from benchmarks.common.record import Results, load

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


@pytest.mark.slow
def test_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """All modules can be imported, each command has its help, and results cite such commands."""
    from benchmarks import tables

    for name in modules():
        import_module(name)
    for name in commands():
        folder = (ROOT.parent / name.replace(".", "/")).is_dir()
        main = import_module(f"{name}.__main__" if folder else name)
        assert f"python -m {name} " in main.__doc__
        with pytest.raises(SystemExit) as done:
            main.main(["--help"])
        assert done.value.code == 0
        assert main.__doc__.partition("\n")[0].split()[0] in capsys.readouterr().out
    known = set(commands())
    pages = "".join(page.read_text(encoding="utf-8") for page in tables.pages())
    for path in RESULTS.glob("*.json"):
        cited = json.loads(path.read_text("utf-8"))["command"]
        if cited.startswith("python -m benchmarks"):
            assert cited.split()[2] in known, path
        assert f"<!-- table: {path.stem} -->" in pages, path.name


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


@pytest.mark.slow
def test_a_figure_that_no_file_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import tables

    assert tables.main(["--check"]) == 0
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


@pytest.mark.parametrize("text", ["", "{}", "x", "[1]", "7", '{"turns": []}'])
def test_a_file_without_prompts(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (file := tmp_path / "chat.jsonl").write_text(text, encoding="utf-8")
    main = import_module("benchmarks.drafts").main  # brings the engine
    with pytest.raises(SystemExit) as done:
        main([str(file)])
    assert done.value.code == 2
    assert str(file) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_what_a_format_costs(
    tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.quality.__main__ import main

    text, file = tmp_path / "prose.txt", tmp_path / "quality.json"
    text.write_text("\n\n".join(f"{n} ships came in before noon." for n in range(40)), "utf-8")
    words = ["--text", str(text), "--models", str(tiny_folder), "--json", str(file)]
    words += ["--tokens", "64", "--ctx", "32", "--no-python-source"]
    assert main([*words, "--formats", "int4-g32,int8-g32", "--methods", "rtn"]) == 0
    four, eight = (row["scores"][0] for row in load(file)["rows"])
    assert four["kl"] > eight["kl"] > 0
    (plain,) = load(file)["references"].values()
    assert four["perplexity"] == pytest.approx(plain["prose"] * (1 + four["change"]))
    assert "| int4-g32 rtn | 4.50 |" in capsys.readouterr().out
