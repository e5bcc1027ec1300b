"""The files that a draft head learns from: sequences of tokens with the target's hidden states.

Sequences lie in shards, in the order of their numbers, and a shard is there whole or not at all, so
that a run that was ended goes on behind the last one. Hidden states are kept in bfloat16. It knows
numpy arrays and files, neither models nor text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localrt.errors import StorageError
from localrt.files import atomic_write

__all__ = ["SHARD", "SequenceFiles", "to_bfloat16"]

SHARD = 32  # sequences

Tokens = npt.NDArray[np.int32]
Halves = npt.NDArray[np.uint16]


def to_bfloat16(values: npt.NDArray[np.float32]) -> Halves:
    """The upper halves of float32 numbers, rounded to nearest (ties away from zero)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    halves: Halves = ((bits + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
    return halves


class SequenceFiles:
    """The shards of a folder. ``count`` sequences of ``length`` tokens are wanted in all."""

    def __init__(self, folder: Path, count: int, length: int) -> None:
        self._folder = folder
        self.count = count
        self.length = length
        self._waiting: dict[int, tuple[Tokens, Halves]] = {}
        self._open: list[tuple[Tokens, Halves]] = []

    @property
    def missing(self) -> list[int]:
        """The numbers of the sequences that no shard holds yet, in order."""
        return [
            number
            for shard in range(-(-self.count // SHARD))
            if not self._tokens_file(shard).exists()
            for number in self._numbers(shard)
        ]

    def add(self, number: int, tokens: Tokens, features: npt.NDArray[np.float32]) -> None:
        """Take sequence ``number``; its shard is written with the last of it.

        Raises:
            StorageError: the disk is full or fails.
        """
        self._waiting[number] = (tokens, to_bfloat16(features))
        shard = number // SHARD
        numbers = self._numbers(shard)
        if all(n in self._waiting for n in numbers):
            parts = [self._waiting.pop(n) for n in numbers]
            self._write(self._features_file(shard), np.stack([halves for _, halves in parts]))
            self._write(self._tokens_file(shard), np.stack([ids for ids, _ in parts]))

    def tokens(self) -> Tokens:
        """All tokens, (count, length)."""
        shards = range(-(-self.count // SHARD))
        return np.concatenate([np.load(self._tokens_file(shard)) for shard in shards])

    def read(self, numbers: Sequence[int]) -> tuple[Tokens, Halves]:
        """Some sequences: tokens (n, length) and features (n, length, hidden)."""
        if not self._open:
            self._open = [
                (np.load(self._tokens_file(shard)), np.load(self._features_file(shard), "r"))
                for shard in range(-(-self.count // SHARD))
            ]
        places = [divmod(number, SHARD) for number in numbers]
        return (
            np.stack([self._open[shard][0][row] for shard, row in places]),
            np.stack([self._open[shard][1][row] for shard, row in places]),
        )

    def _numbers(self, shard: int) -> range:
        return range(shard * SHARD, min((shard + 1) * SHARD, self.count))

    def _tokens_file(self, shard: int) -> Path:
        return self._folder / f"{shard:05}.tokens.npy"

    def _features_file(self, shard: int) -> Path:
        return self._folder / f"{shard:05}.features.npy"

    def _write(self, path: Path, array: npt.NDArray[np.generic]) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as stream:
                np.save(stream, array)
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}") from error
