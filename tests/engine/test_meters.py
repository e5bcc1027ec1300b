"""Recent rates of the disk and the processor, and the count of RAM while sessions open."""

from __future__ import annotations

import threading
from typing import Any

from localrt.engine.native.meters import RamForecast, RamMeter, RecentRates
from localrt.engine.protocol import Rates
from localrt.models.weight_store import PipelineCounts
from localrt.offload.shapes import PassSizes


def counts(
    read: int = 0,
    ssd_s: float = 0.0,
    passes: int = 0,
    cpu_s: float = 0.0,
    experts: tuple[int, int] = (0, 0),
) -> PipelineCounts:
    return PipelineCounts(
        ssd_read_bytes=read,
        link_bytes=0,
        busy_s={"ssd": ssd_s},
        passes=passes,
        clock_s=0.0,
        decode_passes=passes,
        decode_cpu_s=cpu_s,
        expert_uses=experts[0],
        expert_hits=experts[1],
    )


def test_until_enough_was_seen() -> None:
    rates = RecentRates(1e9)
    assert rates.now(counts(read=1 << 20, ssd_s=1.0, passes=3, cpu_s=1.0)) == Rates(1e9)
    assert rates.now(counts(read=1 << 30, ssd_s=2.0, passes=20, cpu_s=1.0)) == Rates(2**29, 0.05)


def test_new_counts() -> None:
    rates = RecentRates(1e9)
    rates.now(counts(read=1 << 30, ssd_s=1.0, passes=100, cpu_s=1.0))
    assert rates.now(counts(read=2 << 30, ssd_s=3.0, passes=200, cpu_s=4.0)) == Rates(2**29, 0.03)


def test_expert_hits() -> None:
    rates = RecentRates(1e9)
    assert rates.now(counts(experts=(100, 10))).expert_hits is None
    assert rates.now(counts(experts=(1000, 100))).expert_hits == 0.1
    assert rates.now(counts(experts=(2000, 1000))).expert_hits == 0.9


def test_a_session_may_open_while_a_pass_is_counted() -> None:
    sizes = PassSizes(hidden=8, inner=8, vocab=8)
    meter = RamMeter(RamForecast(process=0, weights=0, sizes=sizes))
    kept: list[Any] = []

    class Cache:
        @property
        def nbytes(self) -> int:
            if len(kept) < 8:  # somebody else's, in the middle of the sum
                opened = threading.Thread(target=lambda: kept.append(meter.holds(Cache())))  # type: ignore[type-var]
                opened.start()
                opened.join()
            return 100

    kept += [meter.holds(Cache()), meter.holds(Cache())]  # type: ignore[type-var]
    meter.passed(1, 1)
    assert (meter.forecast() or 0) >= 200
