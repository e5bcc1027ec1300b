"""llama.cpp's llama-bench as a peer: a script with its options and JSON, and a GPU that is full."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localrt.bench import gpu, llama_bench
from localrt.bench.llama_bench import LlamaBench, PeerFailedError
from localrt.bench.workload import BenchOptions, Workload
from tests.bench.fake_nvml import FOLDER, FakeNvml
from tests.bench.test_runner import ROOT
from tests.conftest import needs_scripts

MB = 10**6
WORK = Workload(prompt_tokens=20, tokens=5, runs=3)

_SCRIPT = """#!{python}
import json, os, sys
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.bench.fake_nvml import take
words = sys.argv[1:]
def value(name):
    return int(words[words.index(name) + 1]) if name in words else 0
with Path(__file__).with_suffix(".calls").open("a") as calls:
    print(*words[2:], file=calls)
assert os.environ["CUDA_VISIBLE_DEVICES"] == "0"
experts = {experts} - value("-ncmoe")
taken = {base} + {layer} * value("-ngl") + {expert} * experts
if "{gpu}":
    take(taken * 10**6)
    if taken > {card}:
        print("main: error: failed to load model", file=sys.stderr)
        print("[\\n\\n]")
        sys.exit(1)
rate = 10.0 + value("-ngl") + experts + value("-fa")
if value("-p"):
    rate *= 10
rates = [rate * (1 + n) / 2 for n in range(value("-r"))]
test = dict(samples_ts=rates, build_commit="abc", gpu_info="{gpu}", n_prompt=value("-p"))
print(json.dumps([test]))
"""
DENSE = [100 * MB] * 8 + [100 * MB], [0] * 9, 0
MIXTURE = [350 * MB] * 4 + [50 * MB], [300 * MB] * 4 + [0], 0


def _program(folder: Path, **values: Any) -> Path:
    path = folder / "llama-bench"
    given = {"base": 300, "layer": 100, "expert": 0, "experts": 0, "card": 10**9, "gpu": "a GPU"}
    path.write_text(_SCRIPT.format(python=sys.executable, root=str(ROOT), **given | values))
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def given_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "good.gguf"
    path.write_bytes(b"a model")
    return path


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeNvml | None], None]:
    """Sets the library to use."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "vram"))
    (tmp_path / "vram").mkdir()

    def set_to(library: FakeNvml | None) -> None:
        monkeypatch.setattr(gpu, "library", lambda: library)
        if library is None:
            monkeypatch.delenv(FOLDER)

    return set_to


@needs_scripts
@pytest.mark.parametrize(
    ("sizes", "program", "budget", "library", "setting"),
    [
        pytest.param(DENSE, {"base": 800}, 1200, "lists", "-ngl 4", id="less than estimated"),
        pytest.param(DENSE, {"base": 800}, 1200, "counts", "-ngl 4", id="by the whole GPU"),
        pytest.param(DENSE, {"card": 1000}, None, "", "-ngl 7", id="until memory runs out"),
        pytest.param(
            *(MIXTURE, {"layer": 50, "expert": 300, "experts": 4}, 1500, "lists"),
            "-ngl 5 -ncmoe 1",
            id="experts of three layers",
        ),
    ],
)
def test_best_setting_within_memory(
    sizes: Any,
    program: dict[str, int],
    budget: int | None,
    library: str,
    setting: str,
    tmp_path: Path,
    model: Path,
    card: Callable[[FakeNvml | None], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(llama_bench, "layer_nbytes", lambda *_: sizes)
    card(FakeNvml(tmp_path / "vram", lists=library == "lists") if library else None)
    limit = None if budget is None else budget * MB
    options = BenchOptions(path=model, engines=(), workload=WORK, gpu_memory=limit, threads=2)
    path, lines = _program(tmp_path, **program), list[str]()
    found, samples, info = LlamaBench("peer", path, options, True, lines.append).measure()
    assert found == f"{setting} -fa 1"
    assert info["device"] == "a GPU"
    calls = path.with_suffix(".calls").read_text("utf-8").splitlines()
    assert len(calls) <= llama_bench._MOST_TRIALS + 3, "trials, one without flash attention, both"
    assert calls[-2].startswith(f"{setting} -fa 1 -p 20 -n 0 -r 3")
    assert calls[-1].startswith(f"{setting} -fa 1 -p 0 -n 5 -d 20 -r 3")
    assert len(samples) == 3
    first = samples[0]
    assert first["prefill_tok_s"] == 10 * first["decode_tok_s"]
    assert first["ttft_s"] * first["prefill_tok_s"] == pytest.approx(20)
    peak = first["peak_vram_bytes"]
    assert peak is None if not library else 0 < peak <= (budget or 0) * MB
    assert lines[-1] == f"peer ({found}): measuring"


@needs_scripts
@pytest.mark.parametrize(
    ("text", "line"),
    [
        (None, "llama-bench cannot be started: No such file or directory"),
        ("echo '[{}]'", "it printed no results as JSON (exit code 0)"),
        ("echo no memory >&2\nexit 1", "no memory"),
    ],
)
def test_bad_programs(
    text: str | None, line: str, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llama_bench, "layer_nbytes", lambda *_: DENSE)
    path = tmp_path / "llama-bench"
    if text is not None:
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    for gpu_memory in (None, 8000 * MB):
        options = BenchOptions(path=model, engines=(), workload=WORK, gpu_memory=gpu_memory)
        with pytest.raises(PeerFailedError) as failed:
            LlamaBench("llama-bench", path, options, True, lambda line: None).measure()
        assert str(failed.value) == line
