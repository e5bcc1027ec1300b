"""What one model sees: its tower, the pictures of its conversations, and the tower's weights.

A picture's rows stand in a prompt as negative token ids, made from its contents: whatever compares
tokens (kept and saved caches, sequences that share a prefix) thereby compares pictures. A picture
is encoded when a pass first needs its rows, and kept while there is room.
"""

from __future__ import annotations

import hashlib
import threading
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.formatting import format_bytes
from localrt.common.free_memory import return_free_memory
from localrt.common.option_names import option
from localrt.models.vision.cost import TowerSizes
from localrt.models.vision.picture import open_picture, read_picture
from localrt.models.vision.pixels import Patches
from localrt.models.vision.source import VisionSource
from localrt.models.vision.tower import Prepared, Seen, Tower, Units
from localrt.models.weights import WeightLoader
from localrt.quant.ops.protocol import Check, Given
from localrt.quant.ops.vision import VisionSteps

Tokens = npt.NDArray[np.int64]
Take = Callable[[int, bool], None]
"""Leaves bytes of the budget to a tower, of the GPU's if true, below zero gives them back; raises
``MemoryBudgetError`` if there are not so many.
"""

_PLACED = 256  # pictures whose rows' ids are known
_MOST_NBYTES = 256 << 20  # of encoded pictures, and of prepared ones that wait
_COUNTED_NBYTES = 8 << 20  # of these, which the memory budget leaves to a model that sees
_Unit = TypeVar("_Unit")


@dataclass(slots=True, eq=False)
class Placed:
    """A picture of a prompt: the ids of its rows, in order, and what they stand for.

    ``prepared`` has no patches any more once it is ``seen``.
    """

    ids: tuple[int, ...]
    prepared: Prepared
    seen: Seen | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept of it."""
        return self.prepared.patches.nbytes + (0 if self.seen is None else self.seen.nbytes)


class Sight:
    """See above. ``place`` may be called at any time, the rest within the engine's turns.

    ``token`` is the id of the tower's ``row_token``, which passes see in the place of pictures.
    ``steps`` are the ways to compute the tower, best first: the first that has room for a picture
    is taken.
    """

    def __init__(
        self,
        tower: Tower,
        source: VisionSource,
        steps: Sequence[VisionSteps],
        token: int,
        take: Take,
    ) -> None:
        self.tower = tower
        self.token = token
        self._source = source
        self._take = take
        self._taken = 0  # bytes of the budget, for pictures that are kept
        self._ways = [ReadUnits(source, each, take) for each in steps]
        self._lock = threading.Lock()
        self._placed: OrderedDict[bytes, Placed] = OrderedDict()
        self._where: dict[int, tuple[bytes, int]] = {}  # a row's picture and number, by its id
        self._files: OrderedDict[bytes, bytes] = OrderedDict()  # pictures of files, by digests

    def place(self, given: Any) -> Placed:
        """The picture that ``open_picture`` takes, as a prompt has it: the same has the same ids.

        Raises:
            OptionError: it is no picture, or not one that the tower can see.
        """
        if isinstance(given, str | Path):
            given = read_picture(given)
        file = None
        if isinstance(given, bytes | bytearray | memoryview):
            file = hashlib.sha256(given).digest()
        with self._lock:
            known = self._files.get(file) if file is not None else None
            placed = None if known is None else self._kept(known)
            if placed is not None:
                return placed
        picture = open_picture(given)
        digest = picture.digest
        with self._lock:
            placed = self._kept(digest)
        if placed is None:
            prepared = self.tower.prepare(picture)
            placed = Placed(_row_ids(digest, prepared), prepared)
        with self._lock:
            if file is not None:
                self._files[file] = digest
            return self._keep(digest, placed)

    def _kept(self, digest: bytes) -> Placed | None:
        """A picture that can still be seen."""
        placed = self._placed.get(digest)
        if placed is None or (placed.seen is None and not len(placed.prepared.patches)):
            return None
        self._placed.move_to_end(digest)
        return placed

    def _keep(self, digest: bytes, placed: Placed) -> Placed:
        for row, number in enumerate(placed.ids):
            self._where[number] = digest, row
        self._placed[digest] = placed
        self._placed.move_to_end(digest)
        while len(self._placed) > _PLACED:
            _, gone = self._placed.popitem(last=False)
            for number in gone.ids:
                self._where.pop(number, None)
        while len(self._files) > _PLACED:
            self._files.popitem(last=False)
        self._shrink(placed)
        return placed

    def _shrink(self, but: Placed) -> None:
        """Forget what old pictures look like: they are prepared again when they come again."""
        total = sum(each.nbytes for each in self._placed.values())
        for placed in self._placed.values():
            if total <= _MOST_NBYTES:
                break
            if placed is not but:
                total -= placed.nbytes
                placed.seen, placed.prepared = None, _without_patches(placed.prepared)

    def close(self) -> None:
        """Free everything, and close the files."""
        self._placed.clear()
        self._source.close()

    def knows(self, token: int) -> bool:
        """Whether the id stands for a row of a picture."""
        return token in self._where

    def given(self, tokens: Tokens, check: Check | None = None) -> Given | None:
        """What a pass over these tokens gets from pictures; None if there are none."""
        index = np.flatnonzero(tokens < 0)
        if not len(index):
            return None
        found = [self._find(token) for token in tokens[index].tolist()]
        seen = {digest: self._look(digest, check) for digest, _ in found}
        rows = np.stack([seen[digest].rows[row] for digest, row in found])
        deep = tuple(
            np.stack([seen[digest].deep[layer][row] for digest, row in found])
            for layer in range(self.tower.deep_layers)
        )
        return Given(index, rows, deep)

    def places(
        self, tokens: Tokens, first: int, shift: int
    ) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64], int]:
        """The rotary positions of a sequence's tokens from number ``first`` on.

        ``shift`` is how much further the numbers are than the positions. Returns the positions on
        three axes (3, R), if pictures make them differ, along one (R,), and the new shift.
        """
        positions = np.arange(first - shift, first - shift + len(tokens))
        axes = None
        for index in np.flatnonzero(tokens < 0).tolist():
            digest, row = self._find(int(tokens[index]))
            prepared = self._placed[digest].prepared
            if prepared.offsets is None:
                continue
            if axes is None:
                axes = np.repeat(positions[None], 3, 0)
            begin = first + index - row - shift
            axes[:, index] = begin + prepared.offsets[row]
            if row == len(prepared.offsets) - 1:
                shift += len(prepared.offsets) - prepared.advance
                behind = np.arange(first + index + 1, first + len(tokens)) - shift
                axes[:, index + 1 :] = behind
        return axes, positions if axes is None else axes[0].copy(), shift

    def ahead(self, tokens: Tokens) -> npt.NDArray[np.int32] | None:
        """How many of the tokens behind it a row sees too, (R,); None if they see none."""
        index = np.flatnonzero(tokens < 0)
        if not self.tower.both_ways or not len(index):
            return None
        ahead = np.zeros(len(tokens), np.int32)
        for at in index.tolist():
            digest, row = self._find(int(tokens[at]))
            ahead[at] = min(len(self._placed[digest].ids) - row, len(tokens) - at) - 1
        return ahead

    def uncut(self, tokens: Sequence[int], first: int, end: int) -> int:
        """Where a pass ends that begins with number ``first`` of ``tokens``: at ``end``, or if a
        picture would be cut there whose rows see one another, before it, or else behind it.
        """
        if not self.tower.both_ways or end == len(tokens) or tokens[end - 1] >= 0:
            return end
        digest, row = self._find(tokens[end - 1])
        begin, rows = end - 1 - row, len(self._placed[digest].ids)
        if row == rows - 1:
            return end
        return begin if begin > first else min(len(tokens), begin + rows)

    def _find(self, token: int) -> tuple[bytes, int]:
        found = self._where.get(token)
        if found is None:
            raise OptionError("token ids below 0 stand for pictures, and there is no such picture")
        return found

    def _look(self, digest: bytes, check: Check | None) -> Seen:
        placed = self._placed[digest]
        if placed.seen is None:
            if not len(placed.prepared.patches):
                raise OptionError(
                    "too many pictures at once for the memory that they may take: ask again about "
                    "this one"
                )
            seen = self._encode(placed.prepared, check)
            with self._lock:
                placed.seen, placed.prepared = seen, _without_patches(placed.prepared)
                self._shrink(placed)
            self._count(placed)
            return seen
        return placed.seen

    def _count(self, but: Placed) -> None:
        """Have the budget know what is kept; where it has no room, the oldest pictures go."""
        while True:
            with self._lock:
                kept = [each for each in self._placed.values() if each.seen is not None]
                total = sum(each.nbytes for each in self._placed.values())
            more = max(0, total - _COUNTED_NBYTES) - self._taken
            try:
                self._take(more, False)
            except MemoryBudgetError:
                oldest = next((each for each in kept if each is not but), but)
                nbytes, oldest.seen = oldest.nbytes, None
                if oldest is not but:
                    continue
                raise MemoryBudgetError(
                    f"what the model sees of a picture takes {format_bytes(nbytes)}, and the "
                    f"budget leaves less: make it smaller, or raise {option('ram')}"
                ) from None
            self._taken += more
            return

    def _encode(self, prepared: Prepared, check: Check | None) -> Seen:
        for units in self._ways:
            try:
                with units.beside(prepared):
                    return self.tower.see(prepared, units, units.steps, check)
            except MemoryBudgetError:
                if units is self._ways[-1]:
                    raise
        raise AssertionError("there is a way")


class ReadUnits(Units):
    """Units that are read for their step alone: a picture needs each of them once, and reading one
    takes a small part of the time that a picture's rows spend in it.
    """

    def __init__(self, source: VisionSource, steps: VisionSteps, take: Take | None = None) -> None:
        self.steps = steps
        self._source = source
        self._take: Take = take or (lambda nbytes, on_gpu: None)

    @contextmanager
    def beside(self, prepared: Prepared) -> Iterator[None]:
        """Have room for a picture on its way through the tower.

        Raises:
            MemoryBudgetError: there is too little.
        """
        wanted = self._sizes.room(prepared)
        parts = [(wanted, False)]
        if self.steps.on_gpu:
            parts = [(self._sizes.host_room(prepared), False), (wanted, True)]
        with ExitStack() as stack:
            for nbytes, on_gpu in parts:
                try:
                    self._take(nbytes, on_gpu)
                except MemoryBudgetError:
                    raise MemoryBudgetError(
                        f"a picture of this size needs {format_bytes(nbytes)} beside the model, "
                        "and the budget leaves less: make it smaller, or raise "
                        f"{option('gpu_memory' if on_gpu else 'ram')}"
                    ) from None
                stack.callback(self._take, -nbytes, on_gpu)
            stack.callback(return_free_memory)
            stack.callback(self.steps.end)
            try:
                with self.steps.ops.scope():
                    yield
            except BaseException as error:
                traceback.clear_frames(error.__traceback__)  # which hold rows and weights
                raise

    @cached_property
    def _sizes(self) -> TowerSizes:
        return TowerSizes.of(self._source, self.steps.ops.weight_nbytes)

    def read(self, make: Callable[[WeightLoader], _Unit]) -> _Unit:
        self.steps.begin_unit()
        return make(WeightLoader(self._source, self.steps.ops))


def _without_patches(prepared: Prepared) -> Prepared:
    return replace(prepared, patches=Patches.none())


def _row_ids(digest: bytes, prepared: Prepared) -> tuple[int, ...]:
    """Ids below 0 that no other picture has, nor the same one in another size."""
    size = repr((prepared.rows, prepared.grid)).encode()
    stream = hashlib.shake_128(digest + size).digest(8 * prepared.rows)
    numbers = np.frombuffer(stream, np.int64) | np.int64(-(1 << 63))
    return tuple(numbers.tolist())
