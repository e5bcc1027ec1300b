"""Segments of stages: what is recorded of one is forgotten with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

from localrt.offload.pipeline.stage import Segment


def test_pieces_are_forgotten() -> None:
    """Of mixtures whose experts are not recorded, the parts between them are."""
    recorder = Mock()
    lane: Any = Mock(recorder=recorder)
    experts: Any = Mock()
    experts.records.return_value = False
    segment = Segment(lane, [("a", Mock(), None), ("b", Mock(), experts), ("c", Mock(), None)])
    state: Any = SimpleNamespace(
        rows=1, features=None, inputs=None, step=None, check=None, enter=Mock()
    )
    segment(state)
    recorded = [call.args[0] for call in lane.run.call_args_list]
    assert [piece.name for piece in recorded] == ["a", "c"]
    segment.forget()
    forgotten = [call.args[0] for call in recorder.forget.call_args_list]
    assert forgotten[0] is segment
    assert set(recorded) <= set(forgotten)
