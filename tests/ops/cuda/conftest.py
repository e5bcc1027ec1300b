"""The kernels run on a GPU where there is one, else on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localrt.quant.cuda.device import emulate
from tests.ops.cuda.emulator import Emulator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem != "test_compiled":
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    """Runs what is launched on the CPU."""
    launcher = Emulator()
    before = emulate(launcher)
    yield launcher
    emulate(before)
