import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localrt.bench.process import ChildError, ChildProcess
from localrt.bench.report import to_json, to_table
from localrt.bench.runner import BenchOptions, Outcome, run_bench
from localrt.bench.workload import Workload
from localrt.engine.types import Metrics
from localrt.errors import LocalrtError
from localrt.hardware import probe

ROOT = Path(__file__).parents[2]
FAKE = [
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {str(ROOT)!r}); import runpy;"
    "runpy.run_module('tests.bench.fake_child', run_name='__main__')",
]
WORKLOAD = Workload(prompt_tokens=20, tokens=5, runs=3)


def _options(tmp_path: Path, behaviour: str, engines: str, **more: object) -> BenchOptions:
    path = tmp_path / behaviour
    path.write_bytes(b"a model")
    return BenchOptions(path=path, engines=engines.split(), workload=WORKLOAD, **more)  # type: ignore[arg-type]


def _run(options: BenchOptions, lines: list[str] | None = None) -> Outcome:
    notify = (lines if lines is not None else []).append
    return run_bench(options, notify=notify, command=FAKE)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while _alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not _alive(pid)


def test_every_engine_and_setting_is_measured_the_same_number_of_times(tmp_path: Path) -> None:
    lines: list[str] = []
    outcome = _run(_options(tmp_path, "good", "native llamacpp transformers"), lines)
    assert outcome.skipped == []
    assert outcome.interleaved
    names = [(result.engine, result.setting) for result in outcome.results]
    assert names[0] == ("native", "q8")
    assert names[-1] == ("transformers", "q8")
    assert [engine for engine, _ in names].count("llamacpp") == 4
    for result in outcome.results:
        assert len(result.samples) == 3
        assert result.metrics["prompt_tokens"] == 20
        assert result.metrics["completion_tokens"] == 5
        # The warm-up was call 1, so the runs are calls 2 to 4: the median is call 3.
        assert result.metrics["ttft_s"] == sorted(s["ttft_s"] for s in result.samples)[1]
        # What one generation takes: later runs may keep more sessions.
        assert result.metrics["peak_ram_bytes"] == 1_000_000
    assert len({result.info["pid"] for result in outcome.results}) == 6
    assert lines[-1] == "run 3 of 3"
    assert all(_gone(result.info["pid"]) for result in outcome.results)


def test_json_has_the_names_of_metrics_and_flags_the_best_setting(tmp_path: Path) -> None:
    options = _options(tmp_path, "good", "native llamacpp")
    outcome = _run(options)
    report = to_json(
        outcome, options, name="m", machine=probe(), versions={"localrt": "1"}, command="localrt"
    )
    report = json.loads(json.dumps(report))
    assert {"machine", "versions", "command", "results"} <= report.keys()
    assert (report["prompt_tokens"], report["tokens"], report["runs"]) == (20, 5, 3)
    for result in report["results"]:
        assert Metrics().to_dict().keys() <= result.keys()
        assert len(result["samples"]) == 3
    best = [result for result in report["results"] if result["best"]]
    assert [result["engine"] for result in best] == ["native", "llamacpp"]
    assert best[1]["setting"].startswith("plain")


def test_the_table_compares_with_the_best_of_llamacpp(tmp_path: Path) -> None:
    options = _options(tmp_path, "good", "native llamacpp")
    text = to_table(_run(options), options, name="m", machine=probe())
    native = next(line for line in text.splitlines() if line.startswith("native"))
    assert native.count("2.00x") == 2
    assert text.count(" *") == 1
    assert "median of 3" in text


def test_an_engine_that_is_not_installed_is_said_once_and_stops_nothing(tmp_path: Path) -> None:
    options = _options(tmp_path, "missing", "native llamacpp transformers")
    outcome = _run(options)
    assert [result.engine for result in outcome.results] == ["native"]
    assert [(skip.engine, skip.missing) for skip in outcome.skipped] == [
        ("llamacpp", True),
        ("transformers", True),
    ]
    text = to_table(outcome, options, name="m", machine=probe())
    assert "not installed: pip install 'localrt[llamacpp]'" in text


def test_an_engine_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    outcome = _run(_options(tmp_path, "dies", "native transformers"))
    assert [result.engine for result in outcome.results] == ["transformers"]
    assert "died with code 3: the engine caught fire" in outcome.skipped[0].reason


def test_a_model_that_no_engine_reads_leaves_no_results(tmp_path: Path) -> None:
    outcome = _run(_options(tmp_path, "unsupported", "native"))
    assert outcome.results == []
    assert outcome.skipped[0].reason == "this model is a teapot"


def test_models_too_large_to_be_loaded_together_run_one_after_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localrt.bench import runner
    from localrt.offload.budget import MemoryState

    monkeypatch.setattr(runner, "memory_state", lambda: MemoryState(10**9, 10**9))
    lines: list[str] = []
    outcome = _run(_options(tmp_path, "good", "native transformers"), lines)
    assert not outcome.interleaved
    assert len(outcome.results) == 2
    assert lines.index("run 3 of 3") < lines.index("loading transformers")


def test_a_limit_that_cannot_be_set_is_one_clear_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localrt.bench import memory_limit

    monkeypatch.setattr(memory_limit, "_parents", lambda root: iter(()))
    with pytest.raises(LocalrtError, match="cannot limit memory to 500 MB"):
        _run(_options(tmp_path, "good", "native", memory_limit=500_000_000))


def test_a_child_ends_with_its_block() -> None:
    with ChildProcess(FAKE) as child:
        child.ask("load", launch={"engine": "native", "path": "good", "ctx": 1})
        assert _alive(child.pid)
    assert _gone(child.pid)


def test_a_request_before_a_model_is_an_error_and_not_the_end() -> None:
    with ChildProcess(FAKE) as child:
        with pytest.raises(ChildError, match="no engine is loaded"):
            child.ask("encode", text="x")
        child.ask("load", launch={"engine": "native", "path": "good", "ctx": 1})
        assert child.ask("encode", text="ab") == [97, 98]


@pytest.mark.skipif(sys.platform == "win32", reason="sends POSIX signals")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_its_parent(number: signal.Signals) -> None:
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
