"""Runs of engines in processes of their own, a knob in steps, and every model: what they report,
how each can fail, and the page that shows them.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import psutil
import pytest

from localrt.bench import gpu
from localrt.bench.page import to_html
from localrt.bench.process import ChildProcess
from localrt.bench.report import to_json, to_table
from localrt.bench.runner import run_bench
from localrt.bench.sweep import parse_sweep, run_sweep, swept
from localrt.bench.workload import BenchOptions, Outcome, Result, Skipped, Workload, make_prompts
from localrt.cli import bench, main
from localrt.common.errors import OptionError
from localrt.common.extras import install
from localrt.common.option_names import on_command_line
from localrt.hub.listing import LocalModel
from localrt.offload import hardware
from localrt.offload.hardware import GpuFacts, probe
from tests.bench.fake_nvml import FOLDER, FakeNvml
from tests.waits import wait_for

ROOT = Path(__file__).parents[2]
FAKE = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy;"
    "runpy.run_module('tests.bench.fake_child', run_name='__main__')",
]
WORKLOAD = Workload(prompt_tokens=20, tokens=5, runs=3)
PLAIN = {"settings": {"llamacpp": ["plain"]}}


def _options(
    tmp_path: Path, behaviour: str = "good", engines: str = "native", **more: Any
) -> BenchOptions:
    path = tmp_path / behaviour
    path.write_bytes(b"a model")
    return BenchOptions(path=path, engines=tuple(engines.split()), workload=WORKLOAD, **more)


def _run(options: BenchOptions, notify: Any = lambda line: None) -> Outcome:
    return run_bench(options, notify=notify, start=lambda engine: ChildProcess(FAKE))


def _table(outcome: Outcome, options: BenchOptions) -> str:
    return to_table(outcome, options, name="m", machine=probe())


def _ended(pid: int) -> None:
    wait_for(lambda: not psutil.pid_exists(pid))


def test_every_engine_and_setting(tmp_path: Path) -> None:
    lines: list[str] = []
    options = _options(tmp_path, "good", "native llamacpp")
    outcome = _run(options, lines.append)
    assert outcome.skipped == []
    assert outcome.interleaved
    names = [(result.engine, result.setting) for result in outcome.results]
    assert names[0] == ("native", "q8")
    assert [engine for engine, _ in names].count("llamacpp") == 4
    for result in outcome.results:
        assert len(result.samples) == 3
        # The warm-up was call 1, so the runs are calls 2 to 4: the median is call 3.
        assert result.metrics["ttft_s"] == sorted(s["ttft_s"] for s in result.samples)[1]
        # What one generation takes: later runs may keep more sessions.
        assert result.metrics["peak_ram_bytes"] == 1_000_000
    assert len({result.info["pid"] for result in outcome.results}) == 5
    assert re.fullmatch(
        r"llamacpp \(plain, flash attention\), run 3 of 3: prefill [\d.]+, decode [\d.]+ tok/s",
        lines[-1],
    )
    for result in outcome.results:
        _ended(result.info["pid"])
    best = [found for found in to_json(outcome, options)["results"] if found["best"]]
    assert [found["engine"] for found in best] == ["native", "llamacpp"]
    assert best[1]["setting"].startswith("plain")
    text = _table(outcome, options)
    native = next(line for line in text.splitlines() if line.startswith("native"))
    assert native.count("2.00x") == 2
    assert text.count(" *") == 1
    # What else runs slows one engine more than the other, and devices are not compared.
    assert "2.00x" not in _table(replace(outcome, busy=True), options)
    on = {"native": "cuda:0", "llamacpp": "cpu"}
    results = [
        replace(each, info={**each.info, "device": on[each.engine]}) for each in outcome.results
    ]
    assert "x " not in _table(replace(outcome, results=results), options)


@pytest.mark.slow
def test_interrupt(tmp_path: Path) -> None:
    options = _options(tmp_path, "good", "native llamacpp", **PLAIN)

    def notify(line: str) -> None:
        if line.startswith("llamacpp (plain), run 2"):
            raise KeyboardInterrupt

    outcome = _run(options, notify)
    assert outcome.interrupted
    assert [len(result.samples) for result in outcome.results] == [2, 2]
    for result in outcome.results:
        _ended(result.info["pid"])
    assert "interrupted: median of 2 of 3 runs" in _table(outcome, options)


def test_faults(tmp_path: Path) -> None:
    options = _options(tmp_path, "missing", "native llamacpp")
    outcome = _run(options)
    assert [result.engine for result in outcome.results] == ["native"]
    assert [(skip.engine, skip.missing) for skip in outcome.skipped] == [("llamacpp", True)]
    assert f"not installed: {install('llamacpp')}" in _table(outcome, options)
    outcome = _run(_options(tmp_path, "dies", "native llamacpp", **PLAIN))
    assert [result.engine for result in outcome.results] == ["llamacpp"]
    assert "died with code 3: the engine caught fire" in outcome.skipped[0].reason
    outcome = _run(_options(tmp_path, "unsupported"))
    assert outcome.results == []
    assert outcome.skipped[0].reason == "this model is a teapot"


def test_native_options(tmp_path: Path) -> None:
    more = {"ram": 10**9, "gpu_memory": 2 * 10**9, "device": "cuda:1", "kv_format": "int8"}
    more |= {"ctx": 99}
    options = _options(tmp_path, "good", "native llamacpp", **PLAIN, **more)
    outcome = _run(options)
    assert not outcome.interleaved  # what one streams, another must not find in the cache
    native, peer = outcome.results
    launch = native.info["launch"]
    assert launch["settings"] | {"ctx": launch["ctx"]} == more
    assert peer.info["launch"]["ctx"] == 99
    assert peer.info["launch"]["settings"].items() >= {"repack": False}.items()
    assert peer.setting == "plain"
    result = to_json(outcome, options)["results"][0]
    assert result["of_predicted"] == result["decode_tok_s"] / 21
    text = _table(outcome, options)
    assert f"{result['of_predicted']:.0%}" in text
    with pytest.raises(OptionError, match="must be at least 25"):
        _options(tmp_path, ctx=24)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
def test_child_ends_with_parent() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from localrt.bench.process import ChildProcess
with ChildProcess({FAKE!r}) as child:
    print(child.ask("load", launch=dict(engine="native", path="slow", ctx=1))["pid"], flush=True)
    child.ask("generate", prompt=[1], tokens=2)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait(10)
    parent.stdout.close()
    _ended(pid)


def test_prompts() -> None:
    for length in (1, 300, 5000):
        workload = Workload(prompt_tokens=length, runs=3)
        prompts = make_prompts(workload, lambda text: list(text.encode()))
        assert [len(prompt) for prompt in prompts] == [length] * 4
        # No run may find half of its prompt in the cache of another.
        assert length == 1 or len({tuple(prompt[:16]) for prompt in prompts}) == 4


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--engines", "airllm"], 2, "choose from native, llamacpp"),
        (["no/such/file.gguf"], 1, "no/such/file.gguf"),
        (["--sweep", "batch=1", "--all"], 2, "--sweep and --all cannot be combined"),
        (["some.gguf", "--all"], 2, "--all measures every model: leave out MODEL"),
        (["--mix", "stud"], 1, "no mix 'stud': give a .toml file, or student"),
        (["--mix", "student", "--model", "small"], 2, "--model takes NAME=PATH"),
        (["--seconds", "9"], 2, "--seconds and --out need --mix"),
    ],
)
def test_bad_usage(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(["bench", *arguments])
    except SystemExit as left:  # the parser refused it
        found = left.code
    assert found == status
    out, told = capsys.readouterr()
    assert words in told
    assert out == ""


# -- a knob in steps, and every model --------------------------------------------------------------


def _swept(options: BenchOptions, text: str, started: list[int]) -> Outcome:
    def start(engine: str) -> ChildProcess:
        child = ChildProcess(FAKE)
        started.append(child.pid)
        return child

    name, values = parse_sweep(text)
    points = swept(options, name, values)
    return run_sweep(points, name, notify=lambda line: None, start=start)


def test_answers_that_share_passes(tmp_path: Path) -> None:
    started, options = list[int](), _options(tmp_path)
    outcome = _swept(options, "batch=1,3", started)
    assert len(started) == 2, "a process for each value"
    assert [each.setting for each in outcome.results] == ["1", "3"]
    assert [each.metrics["decode_tok_s"] for each in outcome.results] == [40, 120]
    text = _table(outcome, options)
    assert text.splitlines()[2].startswith("batch  prefill tok/s")
    assert "m: 20 prompt and 5 answer tokens, median of 3" in text
    assert "decode tok/s is that of all together" in text
    assert "*" not in text, "none is the best for this workload: they are different ones"
    report = to_json(outcome, options)
    assert report["varied"] == "batch"
    assert not any(each["best"] for each in report["results"])


def test_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each budget has a process, whose GPU memory is watched. It needs a GPU that computes."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "vram"))
    (tmp_path / "vram").mkdir()
    monkeypatch.setattr(gpu, "library", lambda: FakeNvml(tmp_path / "vram"))
    monkeypatch.setattr(hardware, "gpus", lambda: (GpuFacts("RTX 4060"),))
    started, options = list[int](), _options(tmp_path)
    outcome = _swept(options, "gpu-memory=8GB,4GB", started)
    assert len(started) == 2
    peaks = [each.metrics["peak_vram_bytes"] for each in outcome.results]
    assert peaks == [64 * 10**8, 32 * 10**8]
    text = _table(outcome, options)
    assert [line.split()[0] for line in text.splitlines()[3:5]] == ["8GB", "4GB"]
    assert "experts in place" in text
    assert "4GB: busy while decoding: GPU 25%, link to the GPU 90%" in text
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    outcome = _swept(options, "gpu-memory=8GB", started)
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
    page, bad = tmp_path / "page.html", tmp_path / "bad.gguf"
    words = ["--prompt-tokens", "8", "--tokens", "2", "--runs", "1", "--threads", "1"]
    words += ["--html", str(page)]
    assert main(["bench", str(tiny_folder), "--sweep", "batch=1,2", *words]) == 0
    out, told = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[3:5]] == ["1", "2"]
    assert "Measured while busy" in out
    assert f"wrote {page}" in told
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


METRICS: dict[str, Any] = {
    **{"completion_tokens": 5, "ttft_s": 1.3, "tpot_s": 0.05, "prefill_tok_s": 400.0},
    **{"decode_tok_s": 25.0, "peak_ram_bytes": 2 * 10**9, "peak_vram_bytes": None},
    "joules_per_token": None,
}


@pytest.mark.parametrize("varied", ["", "model"])
def test_what_the_page_shows(varied: str) -> None:
    """Whatever names are: what they hold is text."""
    name = "a & b</svg></style><img src=x onerror=alert(1)>"
    info = {"device": "cuda:0", "streamed": True, "weight_bytes": 10**9, "parameters": 2 * 10**9}
    slow = Result("llamacpp", name, {**METRICS, "decode_tok_s": 5.0}, [METRICS], 0.1, info)
    results = [Result("native", name, METRICS, [METRICS, METRICS], 0.1, info), slow]
    failed = Skipped("native", name, f"{name} does not fit")
    outcome = Outcome(results, [failed], interleaved=False, varied=varied)
    options = BenchOptions(path=Path("m"), engines=("native",), workload=WORKLOAD)
    html = to_html(outcome, options, name=name, machine=probe())
    assert "<img" not in html
    assert html.count("</style>") == 1
    for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL):
        ET.fromstring(svg)
    text = unescape(html).replace(name, "a & b")
    assert "a & b: 20 prompt and 5 answer tokens, median of 3, on " in text
    assert "Decoding, tok/s" in text
    assert "Energy per token" not in text, "nobody measured it"
    assert "a & b does not fit" in text
    assert ("Streamed: some weights are" in text) == (varied == "model")
    plots = {svg.split('aria-label="')[1].split('"')[0]: svg for svg in html.split("<svg ")[1:]}
    if not varied:
        widths = re.findall(r'width="([\d.]+)"', plots["Decoding, tok/s"])
        assert float(widths[0]) == pytest.approx(5 * float(widths[1]), rel=0.01)
