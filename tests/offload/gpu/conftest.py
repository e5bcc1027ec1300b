"""What tests of CUDA's kernels share: a model in their format, and where they run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from localrt.quant.cuda.launch import emulate
from tests.offload.placed import Model, pack_synthetic
from tests.ops.cuda.emulator import Emulator


@pytest.fixture(scope="module")
def coded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Two layers and a head of five slices."""
    folder = pack_synthetic(
        tmp_path_factory.mktemp("llama"),
        vocab=2100,
        hidden=128,
        inner=64,
        layers=2,
        formats={"": "int4-g32"},
    )
    with closing(Model(folder)) as model:
        yield model


@pytest.fixture
def emulator() -> Iterator[Emulator]:
    """Runs the kernels on the CPU."""
    emulator = Emulator()
    before = emulate(emulator)
    yield emulator
    emulate(before)
