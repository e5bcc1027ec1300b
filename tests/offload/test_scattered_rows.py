"""Rows far apart in files: the right ones, each page read once, nothing of the table kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from localrt.common.errors import CheckpointError
from localrt.offload.pipeline.tables import RowRange, ScatteredRows
from localrt.offload.reading.files import StoreFiles

WIDTH = 160
PARTS = (RowRange("a", 1234, 700), RowRange("b", 0, 1), RowRange("a", 120_000, 300))
ROWS = sum(part.rows for part in PARTS)


class CountingFiles(StoreFiles):
    """Counts its reads, whose offsets and sizes direct reads could have."""

    count = 0

    def read_into(self, name: str, offset: int, out: np.ndarray, least: int | None = None) -> None:
        assert offset % 4096 == len(out) % 4096 == out.ctypes.data % 4096 == 0
        self.count += 1
        super().read_into(name, offset, out, least)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """The files, which end with their last row, and what the rows are."""
    folder = tmp_path_factory.mktemp("rows")
    random = np.random.default_rng(0)
    data = {
        name: random.integers(
            256,
            size=max(p.offset + p.rows * WIDTH for p in PARTS if p.file == name),
            dtype=np.uint8,
        )
        for name in "ab"
    }
    for name, values in data.items():
        (folder / name).write_bytes(values.tobytes())
    rows = [data[p.file][p.offset : p.offset + p.rows * WIDTH] for p in PARTS]
    return folder, np.concatenate(rows).reshape(ROWS, WIDTH)


@pytest.fixture(params=[False, True])
def files(
    table: tuple[Path, np.ndarray], request: pytest.FixtureRequest
) -> Iterator[CountingFiles]:
    with closing(CountingFiles(table[0], ["a", "b"], direct=request.param)) as files:
        yield files


def test_rows_are_those_of_the_files(table: tuple[Path, np.ndarray], files: CountingFiles) -> None:
    with closing(ScatteredRows(files, PARTS, WIDTH)) as rows:
        assert rows.rows == ROWS
        wanted = [
            np.array(some, np.int64)
            for some in ([], [ROWS - 1], [699, 700, 701], [5, 5, 0], range(ROWS))
        ]
        ahead = [rows.ask(some) for some in wanted]  # all on their way at once
        for some, asked in zip(wanted, ahead, strict=True):
            assert np.array_equal(asked.take(), table[1][some])


def test_a_page_is_read_once(files: CountingFiles) -> None:
    with closing(ScatteredRows(files, PARTS, WIDTH)) as rows:
        rows.ask(np.array([30, 30, 30], np.int64)).take()
        assert files.count == 1
        rows.ask(np.array([0, 999], np.int64)).take()
        assert files.count == 3


def test_rows_outside_are_refused(files: CountingFiles) -> None:
    with closing(ScatteredRows(files, PARTS, WIDTH)) as rows:
        for row in (-1, ROWS):
            with pytest.raises(ValueError, match=f"rows must be from 0 to {ROWS - 1}"):
                rows.ask(np.array([row], np.int64))


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(WIDTH * 2 - 1))
    with (
        closing(StoreFiles(tmp_path, ["a"])) as files,
        closing(ScatteredRows(files, [RowRange("a", 0, 2)], WIDTH)) as rows,
        pytest.raises(CheckpointError, match="was cut short"),
    ):
        rows.ask(np.array([1], np.int64)).take()
