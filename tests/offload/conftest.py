"""The models that most tests of placements share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.offload.placed import Model, pack_synthetic


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Three layers and a head of four slices, its own matrix."""
    folder = pack_synthetic(tmp_path_factory.mktemp("llama"), vocab=1500, layers=3, hidden=128)
    with closing(Model(folder)) as model:
        yield model
