"""Memory that weights share: arrays side by side that never overlap."""

from __future__ import annotations

from weakref import ref

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from localrt.quant.ops.arrays import Regions

WANTED = st.tuples(st.integers(0, 200_000), st.integers(0, 100), st.booleans())


@given(st.lists(WANTED, max_size=40))
def test_overlaps(wanted: list[tuple[int, int, bool]]) -> None:
    """Arrays keep what is written to them, whether they were cut at once, later or never."""
    regions = Regions()
    arrays: list[npt.NDArray[np.uint8]] = []
    for number, (nbytes, percent, later) in enumerate(wanted, start=1):
        taken = regions.take(nbytes)
        assert taken.size == nbytes
        taken[:] = number
        if later and arrays:
            arrays[0] = regions.cut(arrays[0], arrays[0].size // 2)
        arrays.append(regions.cut(taken, nbytes * percent // 100))
    for number, array in enumerate(arrays, start=1):
        assert (array == number).all()


def test_nothing_is_kept() -> None:
    """A region ends with its last array, also the one that would be taken from next."""
    regions = Regions()
    first = regions.take(1 << 20)
    region = ref(first.base)
    kept = first.view(np.float32)[:4]
    del first
    assert region() is not None
    del kept
    assert region() is None
    assert regions.take(100).size == 100


def test_reuse() -> None:
    """Bytes that are given back are taken next."""
    regions = Regions()
    first = regions.cut(regions.take(1 << 20), 100)
    second = regions.take(1 << 20)
    assert second.ctypes.data - first.ctypes.data == 128
