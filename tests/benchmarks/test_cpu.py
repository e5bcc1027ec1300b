"""Whole models beside peers: a script is ``llama-bench``; our own process runs a real file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import command
from benchmarks.cpu import __main__ as cpu
from benchmarks.cpu import child
from benchmarks.cpu.__main__ import cpu_table, run_peer
from localrt.bench.llama_bench import PeerFailedError
from localrt.quant.cpu.abi import find_library
from localrt.quant.cpu.ops import NativeOps
from tests.conftest import needs_scripts
from tests.real_models import real_model

native_only = pytest.mark.skipif(find_library() is None, reason="needs the compiled kernels")

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


@needs_scripts
@native_only
def test_command(
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = {"prompt": 202.0, "decode": 303.0}

    def ours(name: str, words: Any, job: dict[str, Any], **_: Any) -> dict[str, Any]:
        floor = {"of_floor": 0.98} if job["kind"] == "decode" else {}
        return {"value": values[job["kind"]], **floor}

    monkeypatch.setattr(command, "run_child", ours)
    monkeypatch.setattr(command, "find_model", Path)
    file = tmp_path / "cpu.json"
    words = ["--isa", "portable", "--ik", str(program), "--llamacpp", str(program)]
    words += ["--runs", "3", "--json", str(file)]
    assert cpu.main([*words, "--models", "qwen1.5b", "--only", "pass-64"]) == 0
    assert cpu.main([*words, "--models", "smollm2", "b/a.gguf"]) == 0
    record = json.loads(file.read_text("utf-8"))
    rows = {row["name"]: row for row in record["rows"]}
    assert list(rows)[:2] == [
        "Qwen2.5-1.5B Q4_K_M, pass of 64 rows",
        "SmolLM2-135M Q4_1, prompt of 512",
    ]
    assert list(rows)[-2:] == ["a, prompt of 512", "a, decode"]
    prompt = rows["SmolLM2-135M Q4_1, prompt of 512"]
    assert prompt["peers"]["ik_llama.cpp"]["setting"] == "-rtr 0 -fa 1"
    assert prompt["peers"]["llama.cpp"]["ratio"]["median"] == 2.0
    shown = capsys.readouterr().out
    assert "ik_llama.cpp -rtr 1 -fa 1: it cannot do that" in shown
    for cells in (
        "prompt of 512 | 202 | 101 (plain, flash attention) | 2.00x | 101 (repacked, flash attenti",
        "decode | 303 | 101 (plain, flash attention) | 3.00x |",
        "| 3.00x | 98 % |",
        "ik_llama.cpp abc",
    ):
        assert cells in cpu_table(record)


@native_only
@pytest.mark.real
def test_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeOps, "__init__", NativeOps.__init__)  # put back what is forced
    isa = NativeOps(threads=1).isa
    job = {"kind": "decode", "tokens": 4, "repeats": 1, "threads": 2, "isa": isa}
    found = child.main({**job, "model": str(real_model("smollm2"))})
    assert found["value"] > 0
    assert found["of_floor"] > 0


@native_only
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--isa", "abacus"], "'abacus' cannot run here; "),
        (["--only", "decode,4 rows"], "'4 rows' is not one of prompt-512, decode, "),
        (["--models", "./none.gguf"], "no such file or folder"),
        (["--ik", "./none"], "none is not a file"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cpu.main(words)
    assert told in f"{left.value}{capsys.readouterr().err}"
