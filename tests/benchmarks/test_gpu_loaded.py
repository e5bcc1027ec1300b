"""What makes a model through ``localrt.load`` pass on a GPU; its processes are made up here."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import disk, loaded
from benchmarks.gpu.configs import TINY
from benchmarks.gpu.loaded import BUDGET, WHOLE, Loaded, Size
from benchmarks.gpu.timing import Result, results_of
from tests.driver import rehearsal

ROWS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)
UNMOVED = "no weight moved"


def checked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    by_cpu: int = 0,
    off: float = 0.0,
    wrong: str = "",
    free: float = 80e9,
    peak: float = 3.9e9,
) -> dict[str, Result]:
    """The results by name. Logits are ``off`` where all weights are on the GPU; a token of those
    loaded as ``wrong`` says is another one.
    """

    def asked(model: Path, cache: Path, size: Size, job: dict[str, Any]) -> dict[str, Any]:
        resident, again = job["load"] == WHOLE, "placement" in job
        alone = resident and not again
        if job["logits"] is not None:
            np.save(job["logits"], ROWS + np.float32(off if alone else 0))
        ids = list(range(job.get("tokens", size.tokens)))
        kind = "disk" if job.get("on_disk") else "link" if job.get("link_bytes_s") else "RAM"
        ids[4] += kind == wrong and not again
        to = "" if by_cpu else "-to-gpu"
        placement = {"where": {"layers.0.mlp": ("ssd" if kind == "disk" else "ram") + to}}
        return {
            "token_ids": ids,
            "placement": None if alone else job.get("placement", placement),
            "computed_by_cpu": 0 if alone else by_cpu,
            "peak_vram_bytes": 60e9 if resident else peak,
            "predicted_tok_s": 30.0,
            "decode_tok_s": 24.0,
        }

    monkeypatch.setattr(loaded, "asked", asked)
    monkeypatch.setattr(loaded, "free_memory", lambda: int(free))
    size = Size("Qwen3ForCausalLM", TINY, bound=0.1)
    with ExitStack() as held:
        model = Loaded("14B", size, tmp_path, tmp_path, 8_300_000_000, held)
        results = results_of("dense", model.dense)
        return {result.name.removeprefix("loaded 14B, "): result for result in results}


def test_gpu_is_bit_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = checked(tmp_path, monkeypatch)
    assert all(result.ok for result in results.values())
    ways = {"kernels uncompiled", "compiled", "at 12 GB/s", "from the SSD", "resident"}
    assert ways <= set(results)
    assert results["kernels uncompiled as compiled"].values["of_tokens"] == 8
    assert results["compiled"].values["forecast_error"] == 0.25
    assert "predicted_tok_s" not in results[f"compiled, {UNMOVED}"].values
    results = checked(tmp_path, monkeypatch, off=1e-6)
    assert not results["compiled as resident"].ok
    assert results["kernels uncompiled as compiled"].ok


def test_cpu_may_round_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a GPU; not from itself."""
    results = checked(tmp_path, monkeypatch, by_cpu=12, off=0.05)
    assert all(result.ok for result in results.values())
    assert not checked(tmp_path, monkeypatch, by_cpu=12, off=0.5)["compiled as resident"].ok


@pytest.mark.parametrize(
    ("wrong", "fails"),
    [
        ("RAM", {"compiled"}),
        ("link", {"at 12 GB/s"}),
        ("disk", {"from the SSD", "from the SSD, at 12 GB/s"}),
    ],
)
def test_wrong_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str, fails: set[str]
) -> None:
    results = checked(tmp_path, monkeypatch, by_cpu=12, wrong=wrong)
    failed = {name for name, result in results.items() if not result.ok}
    assert {name.partition(" as ")[0] for name in failed} == fails


def test_peak_memory_and_small_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = checked(tmp_path, monkeypatch, peak=8.1e9)
    assert not results["compiled"].ok
    assert results["resident"].ok, "nothing bounds it"
    results = checked(tmp_path, monkeypatch, free=1000)
    assert "no room" in results["resident"].values["not run"]
    assert "compiled as resident" not in results
    results = checked(tmp_path, monkeypatch, free=1000, wrong="disk")
    assert not results[f"from the SSD as compiled, {UNMOVED}"].ok, "its weights are copied from RAM"


def test_room_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is looked for before anything is written, and named where there is none."""
    with pytest.raises(OSError, match=r"^1000000000.0 GB of a disk are needed: .* has .* GB, .*"):
        disk.find_disk(10**18)
    monkeypatch.setattr(loaded, "find_memory", lambda nbytes: None)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: SimpleNamespace(free=10**9))
    (result,) = results_of("dense", lambda: loaded.check_model("cuda", "32B", "dense"))
    assert result.values["not run"].startswith("24.0 GB of a disk are needed")


@pytest.mark.skipif(not rehearsal.has_driver(), reason="the driver cannot be built here")
def test_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a model's own process died of is said."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    monkeypatch.setattr(loaded.subprocess, "run", partial(rehearsal.run_apart, run=subprocess.run))
    size = rehearsal.tiny(loaded.LARGE["14B"])
    job = {"load": BUDGET, "logits": None}
    values = loaded.asked(tmp_path / "model", tmp_path / "cache", size, job)
    assert values.keys() == {"error", "traceback"}
    assert "no such file or folder" in values["error"]
    assert "loaded_child" in values["traceback"]


@pytest.mark.parametrize(
    ("late", "error"), [(False, "out of memory"), (True, "it took more than 110 seconds")]
)
def test_process_that_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool, error: str
) -> None:
    """What it measured before is kept; other ways still run."""

    def run(command: list[str], *, timeout: float, **_: Any) -> CompletedProcess[bytes]:
        out, said = b'{"load_s": 2}\n{"load_s": 3}\n{"load', b"Traceback\nout of memory\n"
        if late:
            raise subprocess.TimeoutExpired(command, timeout, out, said)
        return CompletedProcess(command, 1, out, said)

    monkeypatch.setattr(loaded.subprocess, "run", run)
    monkeypatch.setattr(loaded, "free_memory", lambda: 0)
    size = Size("Qwen3ForCausalLM", TINY, bound=0.1)
    with ExitStack() as held:
        model = Loaded("14B", size, tmp_path, tmp_path, 8_300_000_000, held)
        (result,) = results_of("dense", lambda: model.go("compiled", {"load": BUDGET}))
    assert not result.ok
    assert (result.values["load_s"], result.values["error"]) == (3, error)
    assert result.values["traceback"].startswith("Traceback")
    assert not model.found
