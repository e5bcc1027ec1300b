"""Blocks of a sequence in a folder: what goes in comes out, or less of it, never something else."""

from __future__ import annotations

import errno
import tracemalloc
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import StorageError
from localrt.offload.kv.saved import BlockFile
from localrt.quant.cpu.kv import NativeKVCache
from localrt.quant.formats.packed import Bytes
from localrt.quant.ops.kv import ReadBlocks
from localrt.quant.ops.kv_formats import BLOCK_TOKENS
from localrt.quant.ops.states import SavedState

SIZE = 100  # bytes of a block
TOKENS = list(range(300))


def blocks_of(tokens: list[int]) -> Bytes:
    """Bytes that depend on all tokens up to the block's end, as keys and values do."""
    ends = range(BLOCK_TOKENS, len(tokens) + BLOCK_TOKENS, BLOCK_TOKENS)
    return np.array(
        [np.random.default_rng(tokens[:end]).integers(0, 256, SIZE, np.uint8) for end in ends],
        np.uint8,
    ).reshape(-1, SIZE)


def save(file: BlockFile, tokens: list[int], layout: str = "a") -> list[int]:
    """Write them; the blocks that were asked for."""
    blocks, taken = blocks_of(tokens), list[int]()

    def take(first: int, count: int) -> Bytes:
        taken.extend(range(first, first + count))
        return blocks[first : first + count]

    file.write(tokens, layout, SIZE, take)
    return taken


def save_with_state(folder: Path) -> None:
    file, blocks = BlockFile(folder), blocks_of(TOKENS)
    state = SavedState(256, 300, np.arange(64, dtype=np.uint8))
    file.write(TOKENS, "a", SIZE, lambda first, count: blocks[first : first + count], [state])


def use_all(folder: Path) -> None:
    """Read what is saved there: as much of it as is whole, and nothing else."""
    file = BlockFile(folder)
    for state in file.states(file.reach(len(file.tokens))):
        assert state.data.nbytes < 1 << 20
    length, got = read(file, min(len(file.tokens), 600))
    if file.tokens[:length].tolist() == TOKENS[:length]:
        whole = -(-length // BLOCK_TOKENS)
        assert np.array_equal(got[:whole], blocks_of(TOKENS)[:whole])
    file.touch(frozenset({"mark"}))


def read(file: BlockFile, length: int) -> tuple[int, Bytes]:
    got = np.zeros((-(-length // BLOCK_TOKENS), SIZE), np.uint8)

    def fill(first: int, count: int, read: ReadBlocks) -> None:
        read(first, got[first : first + count])

    return file.read(length, fill), got


@given(st.lists(st.tuples(st.integers(0, 1500), st.integers(0, 1500)), min_size=1, max_size=4))
def test_any_sequence(steps: list[tuple[int, int]]) -> None:
    with TemporaryDirectory() as folder:
        file, tokens = BlockFile(Path(folder) / "one"), list[int]()
        for number, (keep, more) in enumerate(steps):
            tokens = tokens[:keep] + [number + 7] * (more + 1)
            save(file, tokens)
            again = BlockFile(Path(folder) / "one")
            assert again.tokens.tolist() == tokens
            length, got = read(again, len(tokens))
            assert length == len(tokens)
            assert np.array_equal(got, blocks_of(tokens))


def test_new_blocks_only(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "one")
    tokens = list(range(1000))
    assert save(file, tokens) == [0, 1, 2, 3]
    assert save(file, [*tokens, 5, 6]) == [3]  # the last was partial
    assert save(file, [*tokens[:300], 1, 2]) == [1]
    assert save(file, tokens, layout="b") == [0, 1, 2, 3]
    length, got = read(file, 300)  # a part can be read
    assert length == 300
    assert np.array_equal(got, blocks_of(tokens)[:2])


@pytest.mark.parametrize("damage", ["short", "gone"])
def test_missing_blocks(tmp_path: Path, damage: str) -> None:
    file = BlockFile(tmp_path / "one")
    save(file, list(range(1000)))
    data = tmp_path / "one" / "blocks.bin"
    if damage == "short":
        data.write_bytes(data.read_bytes()[: 3 * SIZE + 1])
    else:
        data.unlink()
    assert read(file, 1000)[0] == 0


@pytest.mark.parametrize("name", ["tokens.json", "blocks.bin", "state-300.bin"])
def test_flipped_bits(tmp_path: Path, name: str) -> None:
    """No other token, block or state is made of what was saved."""
    save_with_state(tmp_path / "one")
    whole = (tmp_path / "one" / name).read_bytes()
    for bit in range(0, 8 * len(whole), 8 * len(whole) // 150 | 1):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "one" / name).write_bytes(damaged)
        again = BlockFile(tmp_path / "one")
        if not len(again.tokens):
            continue
        assert (again.tokens.tolist(), again.layout) == (TOKENS, "a")
        length, got = read(again, len(TOKENS))
        whole_blocks = length // BLOCK_TOKENS
        assert np.array_equal(got[:whole_blocks], blocks_of(TOKENS)[:whole_blocks])
        for found in again.states(len(TOKENS)):
            assert (found.position, found.length) == (256, 300)
            assert np.array_equal(found.data, np.arange(64, dtype=np.uint8))


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    file = BlockFile(tmp_path / "one")
    save(file, list(range(300)))

    def full(first: int, count: int) -> Bytes:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(StorageError, match="No space left"):
        file.write(list(range(900)), "a", SIZE, full)
    assert not (tmp_path / "one").exists()
    assert len(file.tokens) == 0
    assert save(file, [1, 2, 3]) == [0]


def test_a_killed_writer_leaves_no_description(tmp_path: Path) -> None:
    """The old one would stand for blocks of other tokens, with the marks of other messages."""
    file = BlockFile(tmp_path / "one")
    file.marks = frozenset({"mark"})
    save(file, list(range(300)))

    def killed(first: int, count: int) -> Bytes:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        file.write(list(range(900)), "a", SIZE, killed)
    again = BlockFile(tmp_path / "one")
    assert (len(again.tokens), again.marks) == (0, frozenset())
    assert again.delete()
    assert not (tmp_path / "one").exists()


def test_marks_are_added_to_marks_alone(tmp_path: Path) -> None:
    """Without marks, a file's messages are not known: a few more do not name all of them."""
    for name, marks in (("one", {"a"}), ("two", set())):
        file = BlockFile(tmp_path / name)
        file.marks = frozenset(marks)
        save(file, TOKENS)
        file.touch(frozenset({"b"}))
        assert BlockFile(tmp_path / name).marks == (frozenset({"a", "b"}) if marks else frozenset())


def test_read_in_place(tmp_path: Path) -> None:
    """A copy beside it would take memory that nobody has counted."""
    shapes = [(8, 128)] * 4
    tokens = list(range(2 * BLOCK_TOKENS))
    cache, again = NativeKVCache(shapes, len(tokens)), NativeKVCache(shapes, len(tokens))
    for each in (cache, again):
        each.reserve(len(tokens))
    cache.take_blocks(0, 2)[:] = np.random.default_rng(0).integers(
        0, 256, (2, cache.block_bytes), np.uint8
    )
    file = BlockFile(tmp_path / "one")
    file.write(tokens, "a", cache.block_bytes, cache.take_blocks)
    tracemalloc.start()
    try:
        assert file.read(len(tokens), again.fill_blocks) == len(tokens)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert np.array_equal(again.take_blocks(0, 2), cache.take_blocks(0, 2))
    assert peak < cache.block_bytes / 8
