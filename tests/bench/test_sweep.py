import json
from pathlib import Path
from typing import Any

import pytest

from localrt.bench import gpu
from localrt.bench.process import ChildProcess
from localrt.bench.report import to_json, to_table
from localrt.bench.sweep import KNOBS, parse_sweep, run_sweep, swept
from localrt.bench.workload import BenchOptions, Outcome, Workload
from localrt.cli import bench, main
from localrt.common.errors import OptionError
from localrt.common.option_names import on_command_line
from localrt.hub.listing import LocalModel
from localrt.offload import hardware
from localrt.offload.hardware import GpuFacts, probe
from tests.bench.fake_nvml import FOLDER, FakeNvml
from tests.bench.test_runner import FAKE

WORK = Workload(prompt_tokens=20, tokens=5, runs=2)


def _options(tmp_path: Path, behaviour: str = "good", **more: Any) -> BenchOptions:
    path = tmp_path / behaviour
    path.write_bytes(b"a model")
    return BenchOptions(path=path, engines=("native",), workload=WORK, **more)


def _run(options: BenchOptions, text: str, started: list[int] | None = None) -> Outcome:
    def start(engine: str) -> ChildProcess:
        child = ChildProcess(FAKE)
        if started is not None:
            started.append(child.pid)
        return child

    name, values = parse_sweep(text)
    points = swept(options, name, values)
    return run_sweep(points, name, notify=lambda line: None, start=start)


def _table(outcome: Outcome, options: BenchOptions) -> str:
    return to_table(outcome, options, name="m", machine=probe())


def test_answers_that_share_passes(tmp_path: Path) -> None:
    started: list[int] = []
    options = _options(tmp_path)
    outcome = _run(options, "batch=1,3", started)
    assert len(started) == 2, "a process for each value"
    assert [each.setting for each in outcome.results] == ["1", "3"]
    assert [each.metrics["decode_tok_s"] for each in outcome.results] == [40, 120]
    assert all(len(each.samples) == 2 for each in outcome.results)
    text = _table(outcome, options)
    assert text.splitlines()[2].startswith("batch  prefill tok/s")
    assert "m: 20 prompt and 5 answer tokens, median of 2" in text
    assert "decode tok/s is that of all together" in text
    assert "*" not in text, "none is the best for this workload: they are different ones"
    report = json.loads(json.dumps(to_json(outcome, options)))
    assert report["varied"] == "batch"
    assert [each["setting"] for each in report["results"]] == ["1", "3"]
    assert not any(each["best"] for each in report["results"])


def test_prompts_of_different_lengths(tmp_path: Path) -> None:
    options = _options(tmp_path)
    outcome = _run(options, "prompt-tokens=20,64")
    assert [each.metrics["prompt_tokens"] for each in outcome.results] == [20, 64]
    assert [each.info["launch"]["ctx"] for each in outcome.results] == [25, 69]
    text = _table(outcome, options)
    assert "m: 5 answer tokens, median of 2" in text
    assert "prompt-tokens  " in text


def test_options_of_loading(tmp_path: Path) -> None:
    outcome = _run(_options(tmp_path), "draft=off,auto")
    drafts = [each.info["launch"]["settings"]["draft"] for each in outcome.results]
    assert drafts == ["off", "auto"]
    outcome = _run(_options(tmp_path, format="f32"), "format=file,bf16")
    settings = [each.info["launch"]["settings"] for each in outcome.results]
    assert [each.get("format") for each in settings] == [None, "bf16"]
    outcome = _run(_options(tmp_path), "threads=1,2")
    assert [each.info["launch"]["threads"] for each in outcome.results] == [1, 2]
    assert " with " not in _table(outcome, _options(tmp_path)).splitlines()[0]


def test_interrupt(tmp_path: Path) -> None:
    def notify(line: str) -> None:
        if line.startswith("2 (2 of 3)"):
            raise KeyboardInterrupt

    options = _options(tmp_path)
    points = swept(options, *parse_sweep("threads=1,2,3"))
    outcome = run_sweep(points, "threads", notify=notify, start=lambda engine: ChildProcess(FAKE))
    assert outcome.interrupted
    assert [each.setting for each in outcome.results] == ["1"]


def test_points_that_cannot_run(tmp_path: Path) -> None:
    options = _options(tmp_path)
    outcome = _run(options, "ram=1kB,2GB")
    assert [(each.setting, each.reason) for each in outcome.skipped] == [
        ("1kB", "1 kB holds no model")
    ]
    assert [each.setting for each in outcome.results] == ["2GB"]
    assert "1kB  1 kB holds no model" in _table(outcome, options)
    options = _options(tmp_path, "dies-if-long")
    outcome = _run(options, "prompt-tokens=64,20")
    assert "died with code 3" in outcome.skipped[0].reason
    assert [each.setting for each in outcome.results] == ["20"]


def test_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each budget has a process, whose GPU memory is watched. It needs a GPU that computes."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "vram"))
    (tmp_path / "vram").mkdir()
    monkeypatch.setattr(gpu, "library", lambda: FakeNvml(tmp_path / "vram"))
    monkeypatch.setattr(hardware, "gpus", lambda: (GpuFacts("RTX 4060"),))
    started: list[int] = []
    options = _options(tmp_path)
    outcome = _run(options, "gpu-memory=8GB,4GB", started)
    assert len(started) == 2
    peaks = [each.metrics["peak_vram_bytes"] for each in outcome.results]
    assert peaks == [64 * 10**8, 32 * 10**8]
    text = _table(outcome, options)
    assert [line.split()[0] for line in text.splitlines()[3:5]] == ["8GB", "4GB"]
    assert "experts in place" in text
    assert "40%" in text
    assert "4GB: busy while decoding" in text
    outcome = _run(_options(tmp_path, device="cpu"), "gpu-memory=8GB")
    assert outcome.skipped[0].reason == "no GPU computes here"
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    outcome = _run(_options(tmp_path), "gpu-memory=8GB", started)
    assert outcome.skipped[0].reason == "there is no GPU here"
    assert len(started) == 2, "nothing was loaded to find that out"


def test_command(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(bench, "is_busy", lambda: True)
    page = tmp_path / "page.html"
    words = ["--prompt-tokens", "8", "--tokens", "2", "--runs", "1", "--threads", "1"]
    words += ["--html", str(page)]
    assert main(["bench", str(tiny_folder), "--sweep", "batch=1,2", *words]) == 0
    out, told = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[3:5]] == ["1", "2"]
    assert "Measured while busy" in out
    assert f"wrote {page}" in told
    assert page.read_text("utf-8").startswith("<!DOCTYPE html>")
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF")
    models = [
        LocalModel(name, path, 1, "safetensors", "f32", 0.0, place)
        for name, path, place in (("tiny", tiny_folder, "localrt"), (str(bad), bad, "yours"))
    ]
    monkeypatch.setattr(bench, "list_models", lambda settings: models)
    assert main(["bench", "--all", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["varied"], report["busy"]) == ("all models", "model", True)
    assert [each["setting"] for each in report["results"]] == ["tiny"]
    assert [each["setting"] for each in report["skipped"]] == ["bad.gguf"]
    assert "bits per weight" in page.read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "--sweep takes NAME=VALUE,VALUE, not ''; there are prompt-tokens, "),
        ("threads", "--sweep: threads must be a whole number from 1, is ''"),
        ("promt_tokens=8", "--sweep takes NAME=VALUE,VALUE, not 'promt_tokens=8'; there are "),
        ("batch=1,,2", "--sweep: batch must be a whole number from 1, is ''"),
        ("batch=0", "--sweep: batch must be a whole number from 1, is '0'"),
        ("tokens=1", "--sweep: tokens must be a whole number from 2, is '1'"),
        ("threads=-1", "--sweep: threads must be a whole number from 1, is '-1'"),
        ("ctx=²", "--sweep: ctx must be a whole number from 1, is '²'"),
        ("ram=much", "--sweep: ram must be a size, is 'much': write it like 8GB, 1.5GB or 512MiB"),
        ("ram=0", "--sweep: ram must be above zero, is '0'"),
        ("format=f16", "--sweep: format must be one of file, bf16, f32, is 'f16'"),
        ("kv-format=q8", "--sweep: kv-format must be one of bf16, int8, int4, is 'q8'"),
        ("draft=", "--sweep: draft must be a value, is ''"),
    ],
)
def test_bad_sweep(text: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_sweep(text)
    assert refused.value.told(on_command_line).startswith(message)


def test_parse_sweep() -> None:
    assert parse_sweep("ram=1GB, 2GB") == ("ram", {"1GB": 10**9, "2GB": 2 * 10**9})
    assert parse_sweep("kv-format=bf16,int8,bf16") == (
        "kv_format",
        {"bf16": "bf16", "int8": "int8"},
    )
    options = BenchOptions(path=Path("m"), engines=("native",))
    for name in KNOBS:
        value = {"ram": "1GB", "gpu_memory": "1GB", "ctx": "900", "format": "f32"}.get(name, "2")
        if name not in ("kv_format",):
            ((_, point),) = swept(options, *parse_sweep(f"{name}={value}"))
            assert point != options
