import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from localrt import system
from localrt.bench.process import ChildError, ChildProcess
from localrt.bench.report import to_json, to_table
from localrt.bench.runner import run_bench
from localrt.bench.workload import BenchOptions, Outcome, Workload
from localrt.common.errors import OptionError
from localrt.common.extras import install
from localrt.engine.types import Metrics
from localrt.offload.hardware import probe

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


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not psutil.pid_exists(pid)


def test_every_engine_and_setting(tmp_path: Path) -> None:
    lines: list[str] = []
    outcome = _run(_options(tmp_path, "good", "native llamacpp"), lines)
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
    assert all(_gone(result.info["pid"]) for result in outcome.results)


def test_interrupt(tmp_path: Path) -> None:
    options = _options(tmp_path, "good", "native llamacpp", **PLAIN)

    def notify(line: str) -> None:
        if line.startswith("llamacpp (plain), run 2"):
            raise KeyboardInterrupt

    outcome = run_bench(options, notify=notify, start=lambda engine: ChildProcess(FAKE))
    assert outcome.interrupted
    assert [len(result.samples) for result in outcome.results] == [2, 2]
    assert all(_gone(result.info["pid"]) for result in outcome.results)
    table = to_table(outcome, options, name="m", machine=probe())
    assert "interrupted: median of 2 of 3 runs" in table
    assert to_json(outcome, options)["interrupted"]


def test_to_json(tmp_path: Path) -> None:
    options = _options(tmp_path, "good", "native llamacpp")
    outcome = _run(options)
    report = to_json(outcome, options)
    report = json.loads(json.dumps(report))
    assert (report["prompt_tokens"], report["tokens"], report["runs"]) == (20, 5, 3)
    for result in report["results"]:
        assert Metrics().to_dict().keys() <= result.keys()
        assert len(result["samples"]) == 3
    best = [result for result in report["results"] if result["best"]]
    assert [result["engine"] for result in best] == ["native", "llamacpp"]
    assert best[1]["setting"].startswith("plain")


def test_to_table(tmp_path: Path) -> None:
    options = _options(tmp_path, "good", "native llamacpp")
    text = to_table(_run(options), options, name="m", machine=probe())
    for word in ("tok/s: tokens per second", "Prefill: ", "Decode: ", "TTFT: the time to"):
        assert word in text
    native = next(line for line in text.splitlines() if line.startswith("native"))
    assert native.count("2.00x") == 2
    assert text.count(" *") == 1
    assert "median of 3" in text
    # What else runs slows one engine more than the other.
    text = to_table(replace(_run(options), busy=True), options, name="m", machine=probe())
    assert "native" in text
    assert "2.00x" not in text


def test_no_ratio_across_devices(tmp_path: Path) -> None:
    options = _options(tmp_path, "good", "native llamacpp", **PLAIN)
    outcome = _run(options)
    on = {"native": "cuda:0", "llamacpp": "cpu"}
    results = [
        replace(each, info={**each.info, "device": on[each.engine]}) for each in outcome.results
    ]
    text = to_table(replace(outcome, results=results), options, name="m", machine=probe())
    cells = {line.split()[0]: line for line in text.splitlines() if line.split()[:1]}
    assert " GPU " in cells["native"]
    assert "x " not in text
    peer = {"engine": "llama-bench", "info": {"device": "cuda:0", "peer": "llama-bench"}}
    results.append(replace(results[1], **peer))
    text = to_table(replace(outcome, results=results), options, name="m", machine=probe())
    assert "against its best figure in the column on the same device" in text
    results = [replace(each, info={**each.info, "device": "cuda:0"}) for each in outcome.results]
    text = to_table(replace(outcome, results=results), options, name="m", machine=probe())
    assert "2.00x" in text


def test_missing_engine(tmp_path: Path) -> None:
    options = _options(tmp_path, "missing", "native llamacpp")
    outcome = _run(options)
    assert [result.engine for result in outcome.results] == ["native"]
    assert [(skip.engine, skip.missing) for skip in outcome.skipped] == [("llamacpp", True)]
    text = to_table(outcome, options, name="m", machine=probe())
    assert f"not installed: {install('llamacpp')}" in text


def test_engine_dies(tmp_path: Path) -> None:
    outcome = _run(_options(tmp_path, "dies", "native llamacpp", **PLAIN))
    assert [result.engine for result in outcome.results] == ["llamacpp"]
    assert "died with code 3: the engine caught fire" in outcome.skipped[0].reason


def test_unsupported_model(tmp_path: Path) -> None:
    outcome = _run(_options(tmp_path, "unsupported", "native"))
    assert outcome.results == []
    assert outcome.skipped[0].reason == "this model is a teapot"


def test_models_too_large_to_run_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localrt.bench import runner
    from localrt.offload.memory import MemoryState

    monkeypatch.setattr(runner, "memory_state", lambda: MemoryState(10**9, 10**9))
    lines: list[str] = []
    outcome = _run(_options(tmp_path, "good", "native llamacpp", **PLAIN), lines)
    assert not outcome.interleaved
    assert len(outcome.results) == 2
    last = next(i for i, line in enumerate(lines) if "native (q8), run 3 of 3" in line)
    assert last < lines.index("loading llamacpp (plain)")


def test_native_options(tmp_path: Path) -> None:
    more = {"ram": 10**9, "gpu_memory": 2 * 10**9, "device": "cpu", "kv_format": "int8", "ctx": 99}
    outcome = _run(_options(tmp_path, "good", "native llamacpp", **PLAIN, **more))
    assert not outcome.interleaved  # what one streams, another must not find in the cache
    native, peer = (result.info["launch"] for result in outcome.results)
    assert native["settings"] | {"ctx": native["ctx"]} == more
    assert peer["ctx"] == 99
    assert peer["settings"] == {"repack": False, "flash_attention": False}
    with pytest.raises(OptionError, match="must be at least 25"):
        _options(tmp_path, "good", "native", ctx=24)


def test_settings(tmp_path: Path) -> None:
    options = _options(
        tmp_path, "good", "native llamacpp", ram=10**9, settings={"llamacpp": ["plain"]}
    )
    outcome = _run(options)
    names = [(result.engine, result.setting) for result in outcome.results]
    assert names == [("native", "q8"), ("llamacpp", "plain")]
    assert [r.info["launch"]["settings"].get("ram") for r in outcome.results] == [10**9, None]


def test_trace_of_last_run(tmp_path: Path) -> None:
    outcome = _run(_options(tmp_path, "good", "native llamacpp", **PLAIN, ram=10**9, trace=True))
    native, peer = outcome.results
    assert native.trace == [
        {"resource": "ssd", "name": "layer 3", "start_s": 3, "end_s": 3.5},
    ]
    assert peer.trace is None
    without = _run(_options(tmp_path, "good", "native", trace=True))
    assert not without.results[0].trace


def test_pipeline_columns(tmp_path: Path) -> None:
    options = _options(tmp_path, "good", "native", ram=10**9, device="cuda:1")
    outcome = _run(options)
    text = to_table(outcome, options, name="m", machine=probe())
    assert "native (simulated)" in text
    assert "not measured on one" in text
    assert "predicted  of predicted" in text
    assert "97%" in text
    report = to_json(outcome, options)
    assert report["ram"] == 10**9
    assert report["device"] == "cuda:1"
    (result,) = report["results"]
    assert result["simulated"] is True
    assert result["of_predicted"] == result["decode_tok_s"] / 21
    assert f"{result['of_predicted']:.0%}" in text
    plain = _options(tmp_path, "good", "native")
    text = to_table(_run(plain), plain, name="m", machine=probe())
    assert "predicted" not in text
    assert "simulated" not in text


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


def test_child_closed() -> None:
    with ChildProcess(FAKE) as child:
        child.ask("load", launch={"engine": "native", "path": "good", "ctx": 1})
        assert psutil.pid_exists(child.pid)
    assert _gone(child.pid)


def test_request_before_load() -> None:
    with ChildProcess(FAKE) as child:
        with pytest.raises(ChildError, match="no engine is loaded"):
            child.ask("encode", text="x")
        child.ask("load", launch={"engine": "native", "path": "good", "ctx": 1})
        assert child.ask("encode", text="ab") == [97, 98]


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGKILL", 9)])
def test_child_ends_with_parent(number: signal.Signals) -> None:
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
    parent.send_signal(number)
    parent.wait(10)
    parent.stdout.close()
    assert _gone(pid)


def test_long_prompt_and_gpu_use(tmp_path: Path) -> None:
    work = Workload(prompt_tokens=20, tokens=5, runs=2, long_prompt_tokens=300)
    options = replace(
        _options(tmp_path, "good", "native llamacpp", **PLAIN, gpu_memory=8_000_000_000),
        workload=work,
    )
    outcome = _run(options)
    launched = {r.engine: r.info["launch"]["ctx"] for r in outcome.results}
    assert set(launched.values()) == {302}
    report = to_json(outcome, options)
    ours, theirs = report["results"]
    assert report["long_prompt_tokens"] == 300
    assert ours["long_ttft_s"] == pytest.approx(1.0), "the fourth call"
    assert theirs["long_ttft_s"] == pytest.approx(2.0)
    assert ours["busy"] == {"gpu": 0.25, "link": 0.9}
    assert "busy" not in theirs
    table = to_table(outcome, options, name="m", machine=probe())
    assert "TTFT of 300" in table
    assert "GPU 25%, link to the GPU 90%. Busiest" in table
    assert "Busiest is the link to the GPU" in table
