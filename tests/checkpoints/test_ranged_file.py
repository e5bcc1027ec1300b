import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from localrt.common.errors import CheckpointError
from localrt.models.tensor_source import RangedFile

DATA = np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(DATA.tobytes())
    return RangedFile(path)


def test_threads(file):
    def same(start):
        return np.array_equal(file.read(start, 1000), DATA[start : start + 1000])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(same, range(0, 99_000, 300)))


def test_bad_ranges(file):
    assert len(file.read(100_000, 0)) == 0
    for offset, count in ((0, 100_001), (99_999, 2), (0, 1 << 62), (-1, 1)):
        with pytest.raises(CheckpointError, match="is truncated"):
            file.read(offset, count)


def test_truncated_while_open(file):
    os.truncate(file.path, 10)
    with pytest.raises(CheckpointError, match="was cut short"):
        file.read(0, 20)


def test_closed(file):
    file.close()
    file.close()
    with pytest.raises(CheckpointError, match="is closed"):
        file.read(0, 1)
