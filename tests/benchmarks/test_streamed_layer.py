"""What a layer that comes over the link costs the host: calls, not time."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import streamed_layer
from localrt.quant.cpu.abi import find_library


@pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built")
@pytest.mark.parametrize("resident", [False, True])
def test_calls(resident: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed_layer, "_WARM", 8)
    monkeypatch.setattr(streamed_layer, "_PASSES", 2)
    monkeypatch.setattr(streamed_layer, "DEPTHS", (8, 16))
    calls = streamed_layer.of_a_layer(resident=resident)["calls"]
    # Each unit is one copy, and one graph that waits for it; of what stays, eight layers are one.
    streamed = dict.fromkeys(("copy", "event", "replay", "wait"), 2.0)
    assert calls == ({"replay": 0.12} if resident else streamed)
