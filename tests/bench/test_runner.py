"""Runs of engines in processes of their own: what they report, and how each can fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from localrt import system
from localrt.bench.process import ChildProcess
from localrt.bench.report import to_chrome, to_json, to_table, write_trace
from localrt.bench.runner import run_bench
from localrt.bench.workload import BenchOptions, Outcome, Workload, make_prompts
from localrt.cli import main
from localrt.common.errors import OptionError, StorageError
from localrt.common.extras import install
from localrt.offload.hardware import probe
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


def _options(tmp_path: Path, behaviour: str, engines: str, **more: object) -> BenchOptions:
    path = tmp_path / behaviour
    path.write_bytes(b"a model")
    return BenchOptions(path=path, engines=engines.split(), workload=WORKLOAD, **more)  # type: ignore[arg-type]


def _run(options: BenchOptions, lines: list[str] | None = None) -> Outcome:
    notify = (lines if lines is not None else []).append
    return run_bench(options, notify=notify, start=lambda engine: ChildProcess(FAKE))


def _ended(pid: int) -> None:
    wait_for(lambda: not psutil.pid_exists(pid))


def test_every_engine_and_setting(tmp_path: Path) -> None:
    lines: list[str] = []
    options = _options(tmp_path, "good", "native llamacpp")
    outcome = _run(options, lines)
    assert outcome.skipped == []
    assert outcome.interleaved
    names = [(result.engine, result.setting) for result in outcome.results]
    assert names[0] == ("native", "q8")
    assert [engine for engine, _ in names].count("llamacpp") == 4
    for result in outcome.results:
        assert len(result.samples) == 3
        assert result.metrics["prompt_tokens"] == 20
        assert result.metrics["completion_tokens"] == 5
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

    report = json.loads(json.dumps(to_json(outcome, options)))
    best = [found for found in report["results"] if found["best"]]
    assert [found["engine"] for found in best] == ["native", "llamacpp"]
    assert best[1]["setting"].startswith("plain")

    def table(of: Outcome) -> str:
        return to_table(of, options, name="m", machine=probe())

    text = table(outcome)
    native = next(line for line in text.splitlines() if line.startswith("native"))
    assert native.count("2.00x") == 2
    assert text.count(" *") == 1
    # What else runs slows one engine more than the other, and devices are not compared.
    assert "2.00x" not in table(replace(outcome, busy=True))
    on = {"native": "cuda:0", "llamacpp": "cpu"}
    results = [
        replace(each, info={**each.info, "device": on[each.engine]}) for each in outcome.results
    ]
    text = table(replace(outcome, results=results))
    cells = {line.split()[0]: line for line in text.splitlines() if line.split()[:1]}
    assert " GPU " in cells["native"]
    assert "x " not in text


def test_interrupt(tmp_path: Path) -> None:
    options = _options(tmp_path, "good", "native llamacpp", **PLAIN)

    def notify(line: str) -> None:
        if line.startswith("llamacpp (plain), run 2"):
            raise KeyboardInterrupt

    outcome = run_bench(options, notify=notify, start=lambda engine: ChildProcess(FAKE))
    assert outcome.interrupted
    assert [len(result.samples) for result in outcome.results] == [2, 2]
    for result in outcome.results:
        _ended(result.info["pid"])
    table = to_table(outcome, options, name="m", machine=probe())
    assert "interrupted: median of 2 of 3 runs" in table
    assert to_json(outcome, options)["interrupted"]


def test_faults(tmp_path: Path) -> None:
    options = _options(tmp_path, "missing", "native llamacpp")
    outcome = _run(options)
    assert [result.engine for result in outcome.results] == ["native"]
    assert [(skip.engine, skip.missing) for skip in outcome.skipped] == [("llamacpp", True)]
    text = to_table(outcome, options, name="m", machine=probe())
    assert f"not installed: {install('llamacpp')}" in text
    outcome = _run(_options(tmp_path, "dies", "native llamacpp", **PLAIN))
    assert [result.engine for result in outcome.results] == ["llamacpp"]
    assert "died with code 3: the engine caught fire" in outcome.skipped[0].reason
    outcome = _run(_options(tmp_path, "unsupported", "native"))
    assert outcome.results == []
    assert outcome.skipped[0].reason == "this model is a teapot"


def test_native_options(tmp_path: Path) -> None:
    more = {"ram": 10**9, "gpu_memory": 2 * 10**9, "device": "cuda:1", "kv_format": "int8"}
    more |= {"ctx": 99}
    options = _options(tmp_path, "good", "native llamacpp", **PLAIN, **more, trace=True)
    outcome = _run(options)
    assert not outcome.interleaved  # what one streams, another must not find in the cache
    native, peer = outcome.results
    launch = native.info["launch"]
    assert launch["settings"] | {"ctx": launch["ctx"]} == more
    assert native.trace == [{"resource": "ssd", "name": "layer 3", "start_s": 3, "end_s": 3.5}]
    assert peer.info["launch"]["ctx"] == 99
    assert peer.info["launch"]["settings"].items() >= {"repack": False}.items()
    assert (peer.setting, peer.trace) == ("plain", None)
    text = to_table(outcome, options, name="m", machine=probe())
    assert "native (simulated)" in text
    report = to_json(outcome, options)
    result = report["results"][0]
    assert result["simulated"] is True
    assert result["of_predicted"] == result["decode_tok_s"] / 21
    assert f"{result['of_predicted']:.0%}" in text
    with pytest.raises(OptionError, match="must be at least 25"):
        _options(tmp_path, "good", "native", ctx=24)


@pytest.mark.skipif(system.disk_bytes_read() is None, reason="needs Linux's account of reads")
def test_bytes_read_while_decoding(tmp_path: Path) -> None:
    options = _options(tmp_path, "reads", "native")
    options.path.write_bytes(os.urandom(4 << 20))
    with options.path.open("rb") as file:
        os.fsync(file.fileno())
    (result,) = _run(options).results
    read = result.metrics["read_bytes_per_token"]
    if read == 0:
        pytest.skip("this file system has no disk behind it")
    assert (4 << 20) / 4 <= read < (5 << 20) / 4  # four tokens after the first
    assert result.metrics["ssd_read_bytes"] >= 4 << 20


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
@pytest.mark.slow
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


# -- prompts, traces, files ------------------------------------------------------------------------


def test_prompts() -> None:
    def tokens(text: str) -> list[int]:
        return list(text.encode())

    for length in (1, 300, 5000):
        workload = Workload(prompt_tokens=length, runs=3)
        prompts = make_prompts(workload, tokens)
        assert [len(prompt) for prompt in prompts] == [length] * 4
        assert prompts == make_prompts(workload, tokens)
        # No run may find half of its prompt in the cache of another.
        assert length == 1 or len({tuple(prompt[:16]) for prompt in prompts}) == 4
    for bad in ({"prompt_tokens": 0}, {"tokens": 1}, {"runs": 0}):
        with pytest.raises(OptionError, match=next(iter(bad))):
            Workload(**bad)


EVENTS = [
    {"resource": "cpu", "name": "layer 0 attention", "start_s": 10.002, "end_s": 10.003},
    {"resource": "ssd", "name": "layer 0 mlp", "start_s": 10.0, "end_s": 10.0025},
    {"resource": "cpu", "name": "layer 0 mlp", "start_s": 10.003, "end_s": 10.004},
]


def test_traces(tmp_path: Path) -> None:
    trace = to_chrome(EVENTS, process="localrt m")["traceEvents"]
    names = {e["args"]["name"]: e["tid"] for e in trace if e["name"] == "thread_name"}
    assert set(names) == {"ssd", "cpu"}
    complete = [event for event in trace if event["ph"] == "X"]
    assert [event["ts"] for event in complete] == pytest.approx([0, 2000, 3000], abs=1e-3)
    assert [event["dur"] for event in complete] == pytest.approx([2500, 1000, 1000], abs=1e-3)
    assert [event["tid"] for event in complete] == [names["ssd"], names["cpu"], names["cpu"]]
    write_trace(tmp_path / "trace.json", EVENTS, process="localrt")
    assert json.loads((tmp_path / "trace.json").read_text("utf-8"))["traceEvents"]
    with pytest.raises(StorageError, match="cannot write"):
        write_trace(tmp_path / "no/such/folder.json", EVENTS, process="localrt")
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


# -- the command -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--engines", "airllm"], 2, "choose from native, llamacpp"),
        (["no/such/file.gguf"], 1, "no/such/file.gguf"),
        (["--sweep", "batch=1", "--all"], 2, "--sweep and --all cannot be combined"),
        (["some.gguf", "--all"], 2, "--all measures every model: leave out MODEL"),
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
