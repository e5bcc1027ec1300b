"""The GPU check runs from a checkout with numpy, torch and NVIDIA's compiler; here on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.adapters import check_adapters
from benchmarks.gpu.kernels import AS_PUBLISHED, FOUR_BIT, LOW_BIT, OTHERS
from benchmarks.gpu.tables import gpu_tables
from benchmarks.gpu.timing import Result
from benchmarks.gpu.towers import check_towers
from localrt.quant.cuda.formats import TYPES
from tests.ops.cuda import target  # noqa: F401  kernels run on the CPU

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}

# What a machine with nothing but torch has: other imports fail, in every process.
BARE = """
import sys
for name in ("safetensors", "tokenizers", "huggingface_hub", "jinja2", "gguf", "textual", "psutil",
             "scipy", "transformers", "httpx2", "rich", "tomlkit"):
    sys.modules[name] = None
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]
"""


def test_unknown_check(tmp_path: Path) -> None:
    check = [ROOT / "scripts/gpu_check", "--device", "cpu", "--only", "kernel"]
    done = subprocess.run(check, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 2
    assert "no check is called kernel" in done.stderr


def test_python_without_torch(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    environment = {**ENVIRONMENT, "PYTHON": str(python)}
    command = [ROOT / "scripts/gpu_check", "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert done.stderr.startswith(f"gpu_check: {python} has no torch: name a Python that has it")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_check_on_cpu(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE)
    bare = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path / 'bare'}:{ROOT}"}
    check = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--out", out]
    done = subprocess.run(check, capture_output=True, text=True, cwd=tmp_path, env=bare)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    names = [result["name"] for result in record["results"]]
    assert "logits LlamaForCausalLM f32" in names
    assert {
        "product nvfp4",
        "attention",
        "resident 1.5B bf16",
        "resident int4-g32",
        "adapters, decode",
    } <= set(names)
    page = gpu_tables(record)
    assert f"on {record['date']}" in page
    assert "- loaded: it needs a GPU" in page
    assert all(result["ok"] for result in record["results"])


def test_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    found = {result.name: result for result in check_adapters("cpu")}
    assert all(result.ok for result in found.values()), capsys.readouterr().err
    assert found["adapters, model"].values["others_keep_their_bits"]
    assert found["adapters, model"].values["changed_by"] > 0.05
    machine = {"device": "a GPU"}
    results = [asdict(result) for result in found.values()]
    record = {"machine": machine, "command": "c", "seconds": 1.0, "results": results}
    assert "| decode, 1 at once |" in gpu_tables(record)


def test_towers(capsys: pytest.CaptureFixture[str]) -> None:
    results = [asdict(result) for result in check_towers("cpu")]
    assert all(result["ok"] for result in results), capsys.readouterr().err
    assert any("tflops" in result["values"] for result in results)
    about = {"machine": {"device": "a GPU"}, "command": "c", "seconds": 1.0}
    assert "| gemma-4-e4b |" in gpu_tables({**about, "results": results})
    assert "- pictures through vision towers" in gpu_tables({**about, "results": []})


def test_formats() -> None:
    def kinds(names: Iterable[str]) -> set[str]:  # but for the columns that share a scale
        return {TYPES[name].rpartition(",")[0] for name in names}

    assert kinds([*FOUR_BIT, *LOW_BIT, *AS_PUBLISHED, *OTHERS]) == kinds(TYPES)


def test_minutes_are_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "check.json"
    found = iter([Result("copy", True), Result("copy again", True), Result("logits", True)])
    monkeypatch.setattr(command, "found_by", lambda *_: found)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    arguments = ["gpu_check", "--out", str(out), "--minutes", "0", "--only", "copy,logits"]
    monkeypatch.setattr(sys, "argv", arguments)
    assert command.main() == 0
    results = json.loads(out.read_text())["results"]
    assert [result["name"] for result in results] == [
        "copy, or the rest of it",
        "logits, or the rest of it",
    ]
    assert "copy, or the rest of it: 0 minutes were up" in gpu_tables(json.loads(out.read_text()))
