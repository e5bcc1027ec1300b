"""The GPU check runs from a checkout with torch, CUDA's compiler and numpy; here on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHON": sys.executable}

# What a machine with nothing but torch has: other imports fail.
BARE = """
import runpy, sys
for name in ("safetensors", "tokenizers", "huggingface_hub", "jinja2", "gguf", "textual", "psutil"):
    sys.modules[name] = None
sys.meta_path = [f for f in sys.meta_path if "editable" not in repr(f)]
runpy.run_module("benchmarks.gpu", run_name="__main__", alter_sys=True)
"""


def test_an_unknown_check_is_refused(tmp_path: Path) -> None:
    command = [ROOT / "scripts/gpu_check", "--device", "cpu", "--only", "kernel"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 2
    assert "no check is called kernel" in done.stderr


@pytest.mark.slow
def test_it_runs_on_the_cpu_and_writes_its_json(tmp_path: Path) -> None:
    out = tmp_path / "check.json"
    command = [sys.executable, "-c", BARE, "--device", "cpu", "--out", out]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    record = json.loads(out.read_text())
    names = [result["name"] for result in record["results"]]
    assert "logits LlamaForCausalLM f32" in names
    assert {
        "product nvfp4",
        "attention",
        "resident 1.5B bf16",
        "resident int4-g32",
        "offload 24B int4 in 8 GB",
        "offload peer in bf16",
    } <= set(names)
    assert all(result["ok"] for result in record["results"])
