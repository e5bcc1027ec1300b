"""The kernels run on the CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from localrt.quant.cuda.device import emulate
from tests.ops.cuda.emulator import Emulator


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    """Runs what is launched on the CPU."""
    launcher = Emulator()
    before = emulate(launcher)
    yield launcher
    emulate(before)
