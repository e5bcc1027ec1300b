import json
from pathlib import Path

import pytest

from localrt.bench.report import to_chrome, write_trace
from localrt.common.errors import StorageError

EVENTS = [
    {"resource": "cpu", "name": "layer 0 attention", "start_s": 10.002, "end_s": 10.003},
    {"resource": "ssd", "name": "layer 0 mlp", "start_s": 10.0, "end_s": 10.0025},
    {"resource": "cpu", "name": "layer 0 mlp", "start_s": 10.003, "end_s": 10.004},
]


def test_trace_events() -> None:
    trace = to_chrome(EVENTS, process="localrt m")["traceEvents"]
    names = {e["args"]["name"]: e["tid"] for e in trace if e["name"] == "thread_name"}
    assert set(names) == {"ssd", "cpu"}
    complete = [event for event in trace if event["ph"] == "X"]
    assert [event["ts"] for event in complete] == pytest.approx([0, 2000, 3000], abs=1e-3)
    assert [event["dur"] for event in complete] == pytest.approx([2500, 1000, 1000], abs=1e-3)
    assert [event["tid"] for event in complete] == [names["ssd"], names["cpu"], names["cpu"]]


def test_trace_overlapping_tasks() -> None:
    spans = [(0.0, 3.0), (1.0, 2.0), (2.0, 4.0), (3.0, 5.0)]
    events = [{"resource": "ssd", "name": "n", "start_s": s, "end_s": e} for s, e in spans]
    trace = to_chrome(events, process="localrt")["traceEvents"]
    assert [e["tid"] for e in trace if e["ph"] == "X"] == [1, 2, 2, 1]
    names = {e["tid"]: e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert names == {1: "ssd", 2: "ssd 2"}


def test_write_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, EVENTS, process="localrt")
    assert json.loads(path.read_text("utf-8"))["traceEvents"]
    with pytest.raises(StorageError, match="cannot write"):
        write_trace(tmp_path / "no/such/folder.json", EVENTS, process="localrt")
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
