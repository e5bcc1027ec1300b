import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from localrt.bench import nvml
from localrt.bench.process import ChildProcess
from localrt.bench.sweep import (
    SETTINGS,
    SweepOptions,
    describe,
    parse_vary,
    run_sweep,
    to_table,
)
from localrt.cli import bench_reports, main
from localrt.common.errors import OptionError
from localrt.common.option_names import on_command_line
from localrt.offload import hardware
from localrt.offload.hardware import Gpu
from tests.bench.fake_nvml import FOLDER, FakeNvml
from tests.bench.test_runner import FAKE, ROOT

VARY = "prompt_tokens=20,64 batch=1,3 threads=1,2"


def _options(tmp_path: Path, behaviour: str = "good", vary: str = VARY) -> SweepOptions:
    path = tmp_path / behaviour
    if not path.exists():
        path.write_bytes(b"wait")
    return SweepOptions(
        path=path,
        file=tmp_path / "sweep.json",
        vary=parse_vary(vary),
        fixed={"tokens": 5},
        runs=2,
        identity={"model": "abc", "machine": ["a CPU", "8"]},
        facts={"model": "m", "command": "localrt bench"},
    )


def _run(options: SweepOptions, started: list[int] | None = None) -> dict[str, Any]:
    def start() -> ChildProcess:
        child = ChildProcess(FAKE)
        if started is not None:
            started.append(child.pid)
        return child

    return run_sweep(options, notify=lambda line: None, start=start)


def _settings(report: dict[str, Any], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(point[name] for name in names) for point in report["points"]]


def test_every_combination(tmp_path: Path) -> None:
    started: list[int] = []
    lines: list[str] = []
    options = _options(tmp_path)
    report = run_sweep(
        options, notify=lines.append, start=lambda: started.append(1) or ChildProcess(FAKE)
    )
    assert report == json.loads(options.file.read_text("utf-8"))
    assert not report["interrupted"]
    assert len(started) == 2, "a process for each number of threads"
    assert len(set(_settings(report, "prompt_tokens", "batch", "threads"))) == 8
    # In a process, points that take more memory come later.
    assert _settings(report, "prompt_tokens", "batch")[:4] == [(20, 1), (64, 1), (20, 3), (64, 3)]
    assert [point["decode_tok_s"] for point in report["points"][:4]] == [40, 40, 120, 120]
    assert all(point["ttft_s"] > 0 and point["peak_ram_bytes"] for point in report["points"])
    assert lines[0].startswith("1 of 8: prompt_tokens=20 batch=1 threads=1: prefill")
    assert "left" in lines[0]
    assert "left" not in lines[-1]
    text = to_table(report)
    assert "120 (1)" in text
    assert text.endswith("in brackets: threads")
    assert len(text.splitlines()) == 8


def test_same_command_again(tmp_path: Path) -> None:
    options = _options(tmp_path)
    before = _run(options)
    started: list[int] = []
    assert _run(options, started) == before
    assert not started


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_after_a_kill(tmp_path: Path) -> None:
    options = _options(tmp_path, "waits", "prompt_tokens=20,64 batch=1,3")
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path, PosixPath
from tests.bench.test_sweep import _options, _run
_run(_options(Path({str(tmp_path)!r}), "waits", "prompt_tokens=20,64 batch=1,3"))
"""
    parent = subprocess.Popen([sys.executable, "-c", code])
    while not options.file.exists() and parent.poll() is None:
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    before = json.loads(options.file.read_text("utf-8"))
    assert before["interrupted"]
    assert _settings(before, "prompt_tokens", "batch") == [(20, 1)]
    options.path.write_bytes(b"go on")
    after = _run(options)
    assert after["points"][0] == before["points"][0]
    assert _settings(after, "prompt_tokens", "batch") == [(20, 1), (64, 1), (20, 3), (64, 3)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sweep.json", "waits"]


def test_interrupt(tmp_path: Path) -> None:
    def notify(line: str) -> None:
        if line.startswith("3 of 8"):
            raise KeyboardInterrupt

    options = _options(tmp_path)
    report = run_sweep(options, notify=notify, start=lambda: ChildProcess(FAKE))
    assert report["interrupted"]
    assert len(report["points"]) == 3
    assert "3 points, medians of 2, interrupted" in to_table(report)
    assert len(_run(options)["points"]) == 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"identity": {"model": "abc", "machine": ["a CPU", "9"]}}, "is of another machine"),
        ({"identity": {"model": "abd", "machine": ["a CPU", "8"]}}, "is of another model"),
        ({"runs": 3}, "made with other settings (runs differs)"),
        ({"fixed": {"tokens": 6}}, "made with other settings (fixed differs)"),
        ({"vary": {"batch": [1]}}, "made with other settings (vary differs)"),
    ],
)
def test_file_of_another_sweep(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    options = _options(tmp_path, vary="batch=1,2")
    _run(options)
    before = options.file.read_bytes()
    with pytest.raises(OptionError) as refused:
        _run(replace(options, **change))
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
    assert options.file.read_bytes() == before


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "mix"}', '{"results": []}'])
def test_file_of_something_else(tmp_path: Path, text: str) -> None:
    options = _options(tmp_path)
    options.file.write_text(text)
    with pytest.raises(OptionError, match="is no sweep and stays as it is"):
        _run(options)
    assert options.file.read_text("utf-8") == text


def test_damaged_points(tmp_path: Path) -> None:
    options = _options(tmp_path, vary="batch=1,2")
    report = _run(options)
    for points in (None, 3, [None], [{"batch": 1}]):
        options.file.write_text(json.dumps({**report, "points": points}))
        with pytest.raises(OptionError, match="is damaged"):
            _run(options)
    options.file.write_text(json.dumps({**report, "points": report["points"][1:]}))
    assert len(_run(options)["points"]) == 2, "a point that was deleted is measured again"


def test_points_that_cannot_run(tmp_path: Path) -> None:
    started: list[int] = []
    vary = "prompt_tokens=20,64 batch=1,2 ram=1kB,2GB ctx=30,100"
    report = _run(_options(tmp_path, "dies-if-long", vary), started)
    reasons = {
        key: point["reason"]
        for key, point in zip(
            _settings(report, "prompt_tokens", "batch", "ram", "ctx"), report["points"], strict=True
        )
    }
    assert len(reasons) == 16
    assert reasons[64, 1, 2 * 10**9, 30] == "needs 69 tokens of a context of 30"
    assert reasons[20, 2, 1000, 100] == "1 kB holds no model"
    assert "died with code 3" in reasons[64, 1, 2 * 10**9, 100]
    assert reasons[20, 2, 2 * 10**9, 100] is None
    assert len(started) == 2 + 1 + 2, "two refused, and after each death a new one"
    assert "not run: prompt_tokens=64 batch=1" in to_table(report)


def test_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each budget has a process, whose GPU memory is watched. It needs a GPU that computes."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "vram"))
    (tmp_path / "vram").mkdir()
    monkeypatch.setattr(nvml, "library", lambda: FakeNvml(tmp_path / "vram"))
    started: list[int] = []
    report = _run(_options(tmp_path, vary="gpu_memory=8GB,6GB,4GB batch=1,2"), started)
    assert len(started) == 3
    assert _settings(report, "gpu_memory", "batch", "peak_vram_bytes") == [
        (budget * 10**9, batch, budget * 8 * 10**8) for budget in (8, 6, 4) for batch in (1, 2)
    ]
    assert "3.2 GB (4 GB)" in to_table(report)
    assert _settings(report, "batch", "expert_hit_rate")[::2] == [(1, 0.8), (1, 0.6), (1, 0.4)]
    assert "80% (8 GB)" in to_table(report)
    options = replace(_options(tmp_path, vary="gpu_memory=8GB"), file=tmp_path / "cpu.json")
    report = _run(replace(options, fixed={"tokens": 5, "device": "cpu"}))
    assert report["points"][0]["reason"] == "gpu_memory: no GPU computes here"
    assert not any(name in to_table(report) for name in ("peak VRAM", "experts in place"))


@pytest.mark.parametrize(
    ("gpus", "words", "varied"),
    [
        ((), [], {"prompt_tokens", "batch"}),
        ((Gpu("RTX 4060"),), [], {"gpu_memory", "batch"}),
        ((Gpu("RTX 4060"),), ["--device", "cpu"], {"prompt_tokens", "batch"}),
        ((Gpu("RTX 4060"),), ["--gpu-memory", "8GB"], {"prompt_tokens", "batch"}),
    ],
)
def test_what_varies_by_default(
    gpus: tuple[Gpu, ...],
    words: list[str],
    varied: set[str],
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[SweepOptions] = []

    def run(options: SweepOptions, **more: Any) -> Any:
        seen.append(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(hardware, "gpus", lambda: gpus)
    monkeypatch.setattr(bench_reports, "run_sweep", run)
    main(["bench", str(tiny_folder), "--sweep", str(tmp_path / "sweep.json"), *words])
    assert set(seen[0].vary) == varied


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--vary names no setting: write NAME=VALUE,VALUE"),
        ("threads", "--vary: write NAME=VALUE,VALUE instead of 'threads'"),
        ("promt_tokens=8", f"--vary: no setting 'promt_tokens'; there are {', '.join(SETTINGS)}"),
        ("batch=1 batch=2", "--vary: batch is there twice; join its values by commas"),
        ("batch=1,,2", "--vary: batch must be a whole number from 1, is ''"),
        ("batch=0", "--vary: batch must be a whole number from 1, is '0'"),
        ("tokens=1", "--vary: tokens must be a whole number from 2, is '1'"),
        ("threads=-1", "--vary: threads must be a whole number from 1, is '-1'"),
        ("ctx=²", "--vary: ctx must be a whole number from 1, is '²'"),
        ("ram=much", "--vary: ram must be a size, is 'much': write it like 8GB, 1.5GB or 512MiB"),
        ("ram=0", "--vary: ram must be above zero, is '0'"),
        ("format=f16", "--vary: format must be one of file, bf16, f32, is 'f16'"),
        ("kv_format=q8", "--vary: kv_format must be one of bf16, int8, int4, is 'q8'"),
        ("draft=", "--vary: draft must be a value, is ''"),
    ],
)
def test_bad_vary(text: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_vary(text)
    assert refused.value.told(on_command_line) == message


def test_parse_vary() -> None:
    assert parse_vary(" ram=1GB,2GB\tformat=file,bf16  batch=2,2,1 draft=off,auto\n") == {
        "ram": [10**9, 2 * 10**9],
        "format": [None, "bf16"],
        "batch": [2, 1],
        "draft": ["off", "auto"],
    }


def test_settings_are_shown_as_they_are_written() -> None:
    point = {"format": None, "threads": None, "ram": 10**9, "draft": "off"}
    assert describe(point, [*point]) == "format=file threads=auto ram=1 GB draft=off"
