"""The measurements of ``benchmarks``: command lines, result files, tables, and each in short."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import benchmarks
import localrt
from benchmarks.common.command import RESULTS
from benchmarks.common.record import Results, load
from localrt.bench.llama_bench import PeerFailedError
from tests.conftest import needs_scripts

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


# -- each measurement in short ---------------------------------------------------------------------


_SCRIPT = """#!{python}
import json, sys
from pathlib import Path
words = sys.argv[1:]
with Path(__file__).with_suffix(".calls").open("a") as calls:
    print(*words, file=calls)
if "-rtr 1 -fa 1" in " ".join(words):
    sys.exit("it cannot do that")
rate = 100.0 + (words[words.index("-fa") + 1] == "1")
print(json.dumps([{{"samples_ts": [rate / 2, rate], "build_commit": "abc"}}]))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Faster with flash attention; ik_llama.cpp fails with it and repacked weights."""
    path = tmp_path / "llama-bench"
    path.write_text(_SCRIPT.format(python=sys.executable))
    path.chmod(0o755)
    return path


@needs_scripts
def test_peer(program: Path) -> None:
    from benchmarks.cpu.__main__ import run_peer

    job = {"model": "m.gguf", "kind": "prompt", "tokens": 8192, "repeats": 2, "threads": 3}
    found = run_peer("ik_llama.cpp", program, "-rtr 0 -fa 1", job)
    assert found == {"value": 101.0, "build": "abc", "setting": "-rtr 0 -fa 1"}
    run_peer("llama.cpp", program, "--repack 0 -fa 1", {**job, "kind": "decode", "tokens": 128})
    assert program.with_suffix(".calls").read_text("utf-8").splitlines() == [
        "-m m.gguf -rtr 0 -fa 1 -p 8192 -n 0 -w 0 -r 2 -t 3 -o json",
        "-m m.gguf --repack 0 -fa 1 -p 0 -n 128 -r 2 -t 3 -o json",
    ]
    with pytest.raises(PeerFailedError, match=r"-rtr 1 -fa 1: it cannot do that"):
        run_peer("ik_llama.cpp", program, "-rtr 1 -fa 1", job)


WORDS = ["stone", "river", "light", "seven", "walks", "under", "great", "paper", "answer"]


def passages(count: int, seed: int = 0) -> str:
    rng = np.random.default_rng(seed)
    return "\n\n".join(" ".join(rng.choice(WORDS, 40)) + f" {i}." for i in range(count))


@pytest.mark.slow
def test_resume_run(
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from benchmarks.quality import __main__ as quality

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    elsewhere = SimpleNamespace(gettempdir=lambda: "/elsewhere")  # the tests' own folder is kept
    monkeypatch.setattr("localrt.hub.cache.tempfile", elsewhere)
    text = tmp_path / "prose.txt"
    text.write_text(passages(60))
    out = tmp_path / "quality.json"
    common = [
        *("--models", str(tiny_folder), "--text", str(text), "--no-python-source"),
        *("--tokens", "512", "--ctx", "128", "--calibration-tokens", "1024"),
        *("--cache", str(tmp_path / "cache"), "--json", str(out)),
    ]
    assert quality.main([*common, "--formats", "int8-g32", "--methods", "rtn"]) == 0
    first = json.loads(out.read_text("utf-8"))
    (made,) = first["rows"]
    (score,) = made["scores"]
    assert (made["weights"], score["text"]) == ("int8-g32 rtn", "prose")
    assert score["kl"] < 0.05
    assert score["top1"] > 0.8
    assert made["bits_per_weight"] == pytest.approx(8.5)
    assert first["references"][tiny_folder.name].keys() == {"prose"}
    assert str(tmp_path) not in first["command"]

    assert quality.main([*common, "--formats", "int8-g32,mxfp4", "--methods", "rtn"]) == 0
    second = json.loads(out.read_text("utf-8"))
    assert second["rows"][:1] == first["rows"]
    assert [row["weights"] for row in second["rows"][1:]] == ["mxfp4 rtn"]
    assert capsys.readouterr().out.count("int8-g32 rtn is done") == 1
    assert [Path(name) for name in localrt.uses()] == [tiny_folder]  # none that is gone by now
