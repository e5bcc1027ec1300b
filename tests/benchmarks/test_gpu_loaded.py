"""What makes a model through ``localrt.load`` pass on a GPU; its processes are made up here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.gpu import loaded
from benchmarks.gpu.configs import TINY
from benchmarks.gpu.loaded import Loaded, Size
from benchmarks.gpu.timing import Result

CONFIG = {
    **TINY,
    "vocab_size": 512,
    "head_dim": 64,
    "num_hidden_layers": 8,
    "tie_word_embeddings": False,
}
ROWS = np.linspace(-1, 1, 24, dtype=np.float32).reshape(2, 12)


def checked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    by_cpu: int = 0,
    off: float = 0.0,
    free: float = 80e9,
    peak: float = 7.9e9,
    disk: bool = True,
) -> dict[str, Result]:
    """The results by name, of ways that differ in a logit by ``off``."""

    def asked(model: Path, cache: Path, size: Size, job: dict[str, Any]) -> dict[str, Any]:
        resident = job["load"] == size.resident
        if job["logits"] is not None:
            np.save(job["logits"], ROWS + np.float32(off if resident else 0))
        return {
            "token_ids": list(range(job.get("tokens", size.tokens))),
            "placement": "all on the GPU" if resident else "placed",
            "computed_by_cpu": 0 if resident else by_cpu,
            "peak_vram_bytes": 60e9 if resident else peak,
        }

    monkeypatch.setattr(loaded, "asked", asked)
    monkeypatch.setattr(loaded, "free_memory", lambda: int(free))
    monkeypatch.setattr(loaded, "has_disk", lambda nbytes: disk)
    size = Size("Qwen3ForCausalLM", CONFIG, bound=0.1)
    found = Loaded("14B", size, tmp_path / "folder", tmp_path / "cache").results()
    return {result.name.removeprefix("loaded 14B, "): result for result in found}


def test_gpu_is_bit_exact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = checked(tmp_path, monkeypatch)
    assert all(result.ok for result in results.values())
    ways = {"kernels uncompiled", "compiled", "at 12 GB/s", "from the SSD", "resident"}
    assert ways <= set(results)
    assert results["kernels uncompiled as compiled"].values["of_tokens"] == 8
    results = checked(tmp_path, monkeypatch, off=1e-6)
    assert not results["compiled as resident"].ok
    assert results["kernels uncompiled as compiled"].ok


def test_cpu_may_round_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checked(tmp_path, monkeypatch, by_cpu=12, off=0.05)["compiled as resident"].ok
    assert not checked(tmp_path, monkeypatch, by_cpu=12, off=0.5)["compiled as resident"].ok


def test_peak_memory_and_small_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = checked(tmp_path, monkeypatch, peak=8.1e9)
    assert not results["compiled"].ok
    assert results["resident"].ok, "nothing bounds it"
    results = checked(tmp_path, monkeypatch, free=1000)
    assert "no room" in results["resident"].values["not run"]
    assert "compiled as resident" not in results
    results = checked(tmp_path, monkeypatch, disk=False)
    assert "no disk" in results["from the SSD"].values["not run"]
    assert "from the SSD as compiled" not in results
