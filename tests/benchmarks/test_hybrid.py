"""What the host does for a mixture's layer that GPU and CPU share, as the benchmark counts it."""

from __future__ import annotations

import pytest

from benchmarks.moe import hybrid
from tests.offload.placed import needs_kernels

pytestmark = needs_kernels

MOST_CALLS = 4.5  # of the driver; two of them are graphs
MOST_US = 1_500  # of the thread's time: ten times what a slow core takes


@pytest.fixture(scope="module")
def layer() -> hybrid.Record:
    return hybrid.of_a_layer(0.3)


def test_calls_of_a_layer(layer: hybrid.Record) -> None:
    assert 2 <= layer["calls"]["replay"] < 2.5  # some layers begin a graph of their own
    assert sum(layer["calls"].values()) <= MOST_CALLS, layer["calls"]
    assert 0 < layer["hits"] < 1


def test_host_time_of_a_layer(layer: hybrid.Record) -> None:
    assert layer["host_us"] < MOST_US
