"""A knob in steps and every model, each a row of the table; and the page that shows them."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from localrt.bench import gpu
from localrt.bench.page import to_html
from localrt.bench.process import ChildProcess
from localrt.bench.report import to_json, to_table
from localrt.bench.sweep import parse_sweep, run_sweep, swept
from localrt.bench.workload import BenchOptions, Outcome, Result, Skipped, Workload
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


def _run(
    options: BenchOptions, text: str, started: list[int] | None = None, notify: Any = None
) -> Outcome:
    def start(engine: str) -> ChildProcess:
        child = ChildProcess(FAKE)
        if started is not None:
            started.append(child.pid)
        return child

    name, values = parse_sweep(text)
    points = swept(options, name, values)
    return run_sweep(points, name, notify=notify or (lambda line: None), start=start)


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


@pytest.mark.slow
def test_points_that_cannot_run(tmp_path: Path) -> None:
    options = _options(tmp_path)
    outcome = _run(options, "ram=1kB,2GB")
    assert [(each.setting, each.reason) for each in outcome.skipped] == [
        ("1kB", "1 kB holds no model")
    ]
    assert [each.setting for each in outcome.results] == ["2GB"]
    assert "1kB  1 kB holds no model" in _table(outcome, options)

    def notify(line: str) -> None:
        if line.startswith("2 (2 of 3)"):
            raise KeyboardInterrupt

    outcome = _run(_options(tmp_path), "threads=1,2,3", notify=notify)
    assert outcome.interrupted
    assert [each.setting for each in outcome.results] == ["1"]
    assert outcome.results[0].info["launch"]["threads"] == 1
    assert " with " not in _table(outcome, _options(tmp_path)).splitlines()[0]


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
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    outcome = _run(_options(tmp_path), "gpu-memory=8GB", started)
    assert outcome.skipped[0].reason == "there is no GPU here"
    assert len(started) == 2, "nothing was loaded to find that out"


@pytest.mark.slow
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
        ("promt_tokens=8", "--sweep takes NAME=VALUE,VALUE, not 'promt_tokens=8'; there are "),
        ("tokens=1", "--sweep: tokens must be a whole number from 2, is '1'"),
        ("kv-format=q8", "--sweep: kv-format must be one of bf16, int8, int4, is 'q8'"),
    ],
)
def test_bad_sweep(text: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_sweep(text)
    assert refused.value.told(on_command_line).startswith(message)


def test_parse_sweep() -> None:
    assert parse_sweep("ram=1GB, 2GB") == ("ram", {"1GB": 10**9, "2GB": 2 * 10**9})
    name, values = parse_sweep("kv-format=bf16,int8,bf16")
    assert (name, values) == ("kv_format", {"bf16": "bf16", "int8": "int8"})
    options = BenchOptions(path=Path("m"), engines=("native",), format="f32")
    ((_, point),) = swept(options, *parse_sweep("format=file"))
    assert point.format is None


# -- the page --------------------------------------------------------------------------------------

OPTIONS = BenchOptions(path=Path("m"), engines=("native",), workload=WORK)
MACHINE = probe()
object.__setattr__(MACHINE, "gpus", (GpuFacts("a GPU", 8 << 30, driver="580.1"),))
METRICS: dict[str, Any] = {
    **{"completion_tokens": 5, "ttft_s": 1.3, "tpot_s": 0.05, "prefill_tok_s": 400.0},
    **{"decode_tok_s": 25.0, "peak_ram_bytes": 2 * 10**9, "peak_vram_bytes": 7 * 10**9},
    "joules_per_token": None,
}
INFO = {"device": "cuda:0", "streamed": True, "weight_bytes": 10**9, "parameters": 2 * 10**9}


@pytest.mark.parametrize("varied", ["", "model"])
def test_what_the_page_shows(varied: str) -> None:
    """Whatever names are: what they hold is text."""
    name = "a & b</svg></style><img src=x onerror=alert(1)>"
    result = Result("native", name, METRICS, [METRICS, METRICS], 0.1, INFO)
    failed = Skipped("native", name, f"{name} does not fit")
    outcome = Outcome([result], [failed], interleaved=False, varied=varied)
    html = to_html(outcome, OPTIONS, name=name, machine=MACHINE)
    assert "<img" not in html
    assert html.count("</style>") == 1
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(svg)
    text = unescape(html).replace(name, "a & b")
    assert "a & b: 20 prompt and 5 answer tokens, median of 2, on " in text
    assert "a GPU (8.6 GB of VRAM, driver 580.1)" in text
    for title in ("Decoding, tok/s", "First token (less is better)", "Peak VRAM (less is better)"):
        assert title in text
    assert "Energy per token" not in text, "nobody measured it"
    assert "a & b does not fit" in text
    assert ("Streamed: some weights are" in text) == (varied == "model")
