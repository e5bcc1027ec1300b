"""What caches and passes take is counted while other threads open sessions."""

from __future__ import annotations

import threading
from typing import Any

from localrt.engine.native.meters import RamForecast, RamMeter
from localrt.offload.shapes import PassSizes


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
