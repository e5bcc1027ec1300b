"""The GPU check runs from a checkout with numpy, torch and NVIDIA's compiler; here on the CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tables
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import loaded, phases
from benchmarks.gpu.encoders import check_encoders
from benchmarks.gpu.loaded import LARGE
from benchmarks.gpu.tables import gpu_tables
from benchmarks.gpu.timing import Result, results_of
from tests.driver import rehearsal
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


def test_unknown_check(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--only", "kernel"])
    with pytest.raises(SystemExit, match="2"):
        command.main()
    assert capsys.readouterr().err.endswith("no call or phase is called kernel: see --list\n")


def test_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that fit a machine lent for ten minutes; each phase is in one of them, by one name."""
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--list"])
    assert command.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("overlap: 5 minutes, 11 GB of a disk. ")
    assert len(lines) == len(command.CALLS)
    found = " ".join(call.phases for call in command.CALLS.values()).split()
    assert sorted({*found, *phases.PHASES}) == sorted(found)
    assert all(call.minutes < 8 for call in command.CALLS.values())
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8").splitlines()
    rows = [line.split("|")[1:4] for line in page if line.startswith("| `")]
    told = [(name.strip(" `"), minutes.strip(), disk.strip()) for name, minutes, disk in rows]
    assert told == [
        (name, str(call.minutes), f"{call.disk_gb} GB" if call.disk_gb else "")
        for name, call in command.CALLS.items()
    ]


def test_room_on_a_disk_is_enough() -> None:
    """What a call says that it needs."""
    for call in command.CALLS.values():
        models = [phase.partition("-")[2] for phase in call.phases.split()]
        for size in (LARGE[name] for name in models if name in LARGE):
            assert loaded._ROOM * size.nbytes < 1e9 * call.disk_gb


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


DENSE = ("compiled", "at 12 GB/s", "from the SSD", "from the SSD, at 12 GB/s")


@pytest.mark.slow
def test_check_on_cpu(tmp_path: Path) -> None:
    """All calls, rehearsed. Those that load models do so on the driver of the tests."""
    out = tmp_path / "results"
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "sitecustomize.py").write_text(BARE)
    bare = {**ENVIRONMENT, "PYTHONPATH": f"{tmp_path / 'bare'}:{ROOT}", "OUT": str(out)}
    check = [ROOT / "scripts/gpu_check", "--device", "cpu"]
    done = subprocess.run(check, capture_output=True, text=True, cwd=tmp_path, env=bare)
    assert done.returncode == 0, done.stdout + done.stderr
    records = {call: read(out / f"gpu_check-{call}.json") for call in command.CALLS}
    pages = {call: gpu_tables(record) for call, record in records.items()}
    found = {call: named(record) for call, record in records.items()}
    assert all(result["ok"] for call in found.values() for result in call.values())
    assert {"logits LlamaForCausalLM", "resident int4-g32"} <= found["resident"].keys()
    assert {"product nvfp4", "product q2_k"} <= found["kernels"].keys()
    assert "attention" in found["layers"]
    assert found["resident"]["adapters, model"]["values"]["others_keep_their_bits"]
    assert "| tok/s without, 1 at once |" in pages["resident"]
    assert records["large"]["command"] == "scripts/gpu_check --only large"
    if rehearsal.has_driver():
        for way in DENSE:
            (same,) = (
                result["values"]
                for name, result in found["overlap"].items()
                if name.startswith(f"loaded 14B, {way} as ") and name.endswith("no weight moved")
            )
            assert same["bitwise_equal"]
            assert same["units_on_cpu"]
        assert "forecast_error" in found["forecasts"]["loaded 14B, within 4GB"]["values"]
        assert "| facts, copies, gb_s_8_mb |" in pages["overlap"]
        assert "| off by |" in pages["forecasts"]
    else:
        assert "- loaded 14B, dense: it needs a GPU" in pages["overlap"]


def read(path: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def named(record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["name"]: result for result in record["results"]}


def test_files_are_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By phases of the same call, either. What was found is there before the next result."""
    seen = list[list[str]]()

    def found_apart(phase: str, *_: object, **__: object) -> Iterator[Result]:
        yield Result(phase, True)
        seen.append([result["name"] for result in read(latest())["results"]])
        yield Result("the last", phase != "attention")

    def latest() -> Path:
        return max(tmp_path.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)

    monkeypatch.setattr(command, "found_apart", found_apart)
    on_a_gpu(monkeypatch)
    for only, failed in (("kernels", 0), ("batches,attention", 1), ("kernels,attention", 1)):
        monkeypatch.setattr(sys, "argv", ["gpu_check", "--out", str(tmp_path), "--only", only])
        assert command.main() == failed
    assert seen[0] == ["products"]
    commands = {path.name: read(path)["command"] for path in tmp_path.glob("*.json")}
    assert commands == {
        "gpu_check-kernels.json": "scripts/gpu_check --only kernels",
        "gpu_check-kernels-2.json": "scripts/gpu_check --only batches",
        "gpu_check-kernels-3.json": "scripts/gpu_check --only kernels",
        "gpu_check-layers.json": "scripts/gpu_check --only attention",
        "gpu_check-layers-2.json": "scripts/gpu_check --only attention",
    }
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = tables.filled("<!-- table: gpu_check-kernels-2 -->\n<!-- end -->")
    assert "`scripts/gpu_check --only batches` on " in page


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """That torch finds; the CPU's kernels exist."""
    monkeypatch.setattr(command, "build_kernels", lambda: {"built": False})
    monkeypatch.setattr(command, "has_compiler", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")


@pytest.mark.slow
def test_encoders(capsys: pytest.CaptureFixture[str]) -> None:
    results = [asdict(result) for result in results_of("towers", lambda: check_encoders("cpu"))]
    assert results
    assert all(result["ok"] for result in results), capsys.readouterr().err
    about = {"machine": {"device": "a GPU", "cuda": "13", "driver": "1"}, "versions": {}}
    about |= {"date": "today", "command": "c", "seconds": 1.0}
    assert "| gemma-4-e4b |" in gpu_tables({**about, "results": results})


def test_minutes_are_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)
    arguments = ["--out", str(tmp_path), "--minutes", "0", "--only", "facts,dense-14B"]
    monkeypatch.setattr(sys, "argv", ["gpu_check", *arguments])
    assert command.main() == 0
    record = read(tmp_path / "gpu_check-overlap.json")
    assert list(named(record)) == [
        "CPU kernels",
        "facts, or the rest of it",
        "dense-14B, or the rest of it",
    ]
    assert "facts, or the rest of it: 0 minutes were up" in gpu_tables(record)


@pytest.mark.parametrize(
    ("torch_finds", "compiler", "message"),
    [
        (False, True, "gpu_check: torch finds no CUDA GPU\n"),
        (True, False, f"gpu_check: {command.NO_COMPILER}\n"),
    ],
)
def test_what_a_gpu_needs(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    torch_finds: bool,
    compiler: bool,
    message: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: torch_finds)
    monkeypatch.setattr(command, "has_compiler", lambda: compiler)
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert command.main() == 1
    assert capsys.readouterr().err == message


# -- phases that go wrong --------------------------------------------------------------------------


def died() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def hung() -> None:
    with subprocess.Popen(["sleep", "1000"]):  # which is ended too
        pass


def left() -> None:
    os._exit(3)


def hung_as_it_ended() -> None:
    threading.Thread(target=hung).start()


@pytest.mark.parametrize(
    ("end", "seconds", "quiet_s", "error"),
    [
        (died, 60, 60, "its process died: Segmentation fault"),
        (left, 60, 60, "its process died: exit status 3"),
        (hung, 60, 4, "nothing came of it for 4 seconds"),
        (hung, 4, 60, None),
        (hung_as_it_ended, 60, 60, None),
    ],
    ids=["died", "left", "hung", "the minutes are up", "hung as it ended"],
)
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_phase_that_ends_early(
    monkeypatch: pytest.MonkeyPatch,
    end: Callable[[], None],
    seconds: float,
    quiet_s: float,
    error: str | None,
) -> None:
    """What it found before counts, and the next one runs."""

    def found_by(phase: str, device: str) -> Iterator[Result]:
        yield Result("first", True)
        if phase == "copies":
            end()

    monkeypatch.setattr(phases, "found_by", found_by)
    monkeypatch.setattr(phases, "_GRACE_S", 1)
    options: dict[str, Any] = {"start": "fork", "quiet_s": quiet_s}
    first, *failed = phases.found_apart("copies", "cpu", seconds, **options)
    assert first.name == "first"
    assert [each.values["error"] for each in failed] == ([error] if error else [])
    (only,) = phases.found_apart("waits", "cpu", 60, **options)
    assert only.ok


def test_phase_in_a_fresh_process() -> None:
    """As on a GPU."""
    (result,) = phases.found_apart("facts", "cpu", 60)
    assert result.values == {"not run": "it needs a GPU"}
