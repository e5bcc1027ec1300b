"""Traces: recorded layer by layer, stored whole, read only where they are right."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from benchmarks.moe.routing_trace import RoutingTrace, TraceHeader, TraceRecorder
from localrt.errors import OptionError, StorageError
from tests.offload.experts.routing import random_trace, traces


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trace=traces)
def test_a_file_holds_what_was_recorded(tmp_path: Path, trace: RoutingTrace) -> None:
    recorder = TraceRecorder(trace.header)
    for step in trace.steps():
        wider = np.pad(step.experts, ((0, 0), (0, 1))), np.pad(step.scores, ((0, 0), (0, 1)))
        recorder.add(step.number, step.layer, *wider)
    path = tmp_path / "run.npz"
    recorder.finish().save(path)
    loaded = RoutingTrace.load(path)
    assert loaded.header == trace.header
    for name in ("experts", "scores", "pass_of"):
        assert np.array_equal(getattr(loaded, name), getattr(trace, name))
    assert [p.name for p in tmp_path.iterdir()] == ["run.npz"]


def test_a_cancelled_pass_is_left_out() -> None:
    trace = random_trace(passes=(2, 3, 1))
    recorder = TraceRecorder(trace.header)
    for step in trace.steps():
        if (step.number, step.layer) != (1, 2):
            recorder.add(10 + step.number, step.layer, step.experts, step.scores)
    found = recorder.finish()
    assert [tokens.stop - tokens.start for tokens in found.passes()] == [2, 1]
    assert TraceRecorder(trace.header).finish().tokens == 0


def test_decoding_is_what_came_one_by_one() -> None:
    trace = random_trace(passes=(2, 1, 3, 1))
    assert np.array_equal(trace.decoding().experts, trace.experts[[2, 6]])


def one_line(error: pytest.ExceptionInfo[OptionError], path: Path) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    missing, text, other = tmp_path / "none.npz", tmp_path / "text.npz", tmp_path / "other.npz"
    text.write_text("not a zip")
    np.savez(other, weights=np.zeros(3))
    for path in (missing, text, other):
        with pytest.raises(OptionError) as error:
            RoutingTrace.load(path)
        message = "no trace" if path == missing else "not a routing trace"
        assert message in one_line(error, path)


def test_a_damaged_trace_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    random_trace().save(path)
    whole = path.read_bytes()
    for cut in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:cut])
        with pytest.raises(OptionError) as error:
            RoutingTrace.load(path)
        one_line(error, path)


def test_flipped_bytes_are_noticed_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    trace = random_trace()
    trace.save(path)
    whole = path.read_bytes()
    for at in range(0, len(whole), max(1, len(whole) // 60)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        with suppress(OptionError):
            assert np.array_equal(RoutingTrace.load(path).experts, trace.experts)


def test_impossible_contents_are_refused(tmp_path: Path) -> None:
    trace = random_trace()
    path = tmp_path / "run.npz"
    trace.save(path)
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    wrong = {
        "experts": [arrays["experts"] + 8, arrays["experts"][:, :2], arrays["experts"].astype(int),
                    np.zeros_like(arrays["experts"])],
        "scores": [arrays["scores"] * np.nan],
        "pass_of": [arrays["pass_of"][::-1], arrays["pass_of"][None]],
        "header": [np.array("{"), np.array('{"localrt_trace": 1, "layers": 3}')],
    }  # fmt: skip
    for name, values in wrong.items():
        for value in values:
            np.savez(path, **{**arrays, name: value})
            with pytest.raises(OptionError) as error:
                RoutingTrace.load(path)
            assert "damaged" in one_line(error, path)
    np.savez(path, **{**arrays, "header": np.array('{"localrt_trace": 2}')})
    with pytest.raises(OptionError, match="version 2"):
        RoutingTrace.load(path)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        random_trace().save(tmp_path / "none" / "run.npz")


def test_headers_check_themselves() -> None:
    with pytest.raises(ValueError, match="used must be"):
        TraceHeader(model="m", architecture="a", fingerprint="f", layers=1, count=4, used=5)
    recorder = TraceRecorder(random_trace().header)
    with pytest.raises(ValueError, match="layer must be"):
        recorder.add(0, 3, np.zeros((1, 4)), np.zeros((1, 4)))
    with pytest.raises(ValueError, match="4 columns"):
        recorder.add(0, 0, np.zeros((1, 3)), np.zeros((1, 3)))
