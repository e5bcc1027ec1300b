"""Image state of a loaded model: the encoder, cached pictures, and their memory.

A picture's rows are negative token ids in the prompt, derived from its contents. Code that compares
tokens (KV caches in memory and on disk, sequences that share a prefix) thereby compares pictures. A
picture is encoded when a pass first needs its rows, and cached while there is room.
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
from localrt.common.option_names import option
from localrt.models.encoders import Units
from localrt.models.vision.cost import EncoderSizes
from localrt.models.vision.encoder import EncodedPicture, PreparedPicture, VisionEncoder
from localrt.models.vision.picture import Patches, open_picture, read_picture
from localrt.models.vision.registry import VisionSource
from localrt.models.weights import WeightLoader
from localrt.quant.ops.protocol import Check, PictureRows
from localrt.quant.ops.vision import VisionSteps
from localrt.system import return_free_memory

Tokens = npt.NDArray[np.int64]
Take = Callable[[int, bool], None]
"""``take(nbytes, on_gpu)`` reserves memory in the budget; a negative size releases it. Raises
``MemoryBudgetError`` if the budget has too little.
"""

_MAX_PICTURES = 256
_MAX_NBYTES = 256 << 20  # limit of cached pictures, prepared and encoded
_RESERVED_NBYTES = 8 << 20  # part of that limit, reserved when the encoder is added
_Unit = TypeVar("_Unit")


@dataclass(slots=True, eq=False)
class PromptPicture:
    """A picture of a prompt and the ids of its rows; ``prepared`` has no patches once the picture
    is ``encoded``.
    """

    ids: tuple[int, ...]
    prepared: PreparedPicture
    encoded: EncodedPicture | None = None

    @property
    def nbytes(self) -> int:
        """Size of the cached picture in bytes."""
        return self.prepared.patches.nbytes + (0 if self.encoded is None else self.encoded.nbytes)


class VisionState:
    """See the module. Any thread may call ``prompt_picture``, only the engine's thread the rest.

    ``token`` is the id of the encoder's ``row_token``, which replaces picture ids in a pass.
    ``steps`` are implementations of the encoder's steps, fastest first; the first that has room for
    a picture encodes it.
    """

    def __init__(
        self,
        encoder: VisionEncoder,
        source: VisionSource,
        steps: Sequence[VisionSteps],
        token: int,
        take: Take,
    ) -> None:
        self.encoder = encoder
        self.token = token
        self._source = source
        self._take = take
        self._taken_nbytes = 0  # memory reserved for cached pictures
        self._readers = [EncoderUnitReader(source, each, take) for each in steps]
        self._lock = threading.Lock()
        self._pictures: OrderedDict[bytes, PromptPicture] = OrderedDict()
        self._rows: dict[int, tuple[bytes, int]] = {}  # picture and row by token id
        self._digests: OrderedDict[bytes, bytes] = OrderedDict()  # of pixels, by files'

    def prompt_picture(self, source: Any) -> PromptPicture:
        """The picture that ``open_picture`` reads from ``source``; equal pictures have equal ids.

        Raises:
            OptionError: ``source`` is not a picture, or the encoder does not support its shape.
        """
        if isinstance(source, str | Path):
            source = read_picture(source)
        file = None
        if isinstance(source, bytes | bytearray | memoryview):
            file = hashlib.sha256(source).digest()
        with self._lock:
            known = self._digests.get(file) if file is not None else None
            picture = None if known is None else self._cached(known)
            if picture is not None:
                return picture
        pixels = open_picture(source)
        digest = pixels.digest
        with self._lock:
            picture = self._cached(digest)
        if picture is None:
            prepared = self.encoder.prepare(pixels)
            picture = PromptPicture(_row_ids(digest, prepared), prepared)
        with self._lock:
            if file is not None:
                self._digests[file] = digest
            return self._cache(digest, picture)

    def _cached(self, digest: bytes) -> PromptPicture | None:
        """The picture, if its rows or its patches are cached."""
        picture = self._pictures.get(digest)
        if picture is None or (picture.encoded is None and not len(picture.prepared.patches)):
            return None
        self._pictures.move_to_end(digest)
        return picture

    def _cache(self, digest: bytes, picture: PromptPicture) -> PromptPicture:
        for row, token in enumerate(picture.ids):
            self._rows[token] = digest, row
        self._pictures[digest] = picture
        self._pictures.move_to_end(digest)
        while len(self._pictures) > _MAX_PICTURES:
            _, oldest = self._pictures.popitem(last=False)
            for token in oldest.ids:
                self._rows.pop(token, None)
        while len(self._digests) > _MAX_PICTURES:
            self._digests.popitem(last=False)
        self._evict(picture)
        return picture

    def _evict(self, current: PromptPicture) -> None:
        """Evict the oldest pictures but ``current``; they are prepared again if needed."""
        total = sum(each.nbytes for each in self._pictures.values())
        for picture in self._pictures.values():
            if total <= _MAX_NBYTES:
                break
            if picture is not current:
                total -= picture.nbytes
                picture.encoded, picture.prepared = None, _without_patches(picture.prepared)

    def close(self) -> None:
        """Free everything, and close the files."""
        self._pictures.clear()
        self._source.close()

    def has_row(self, token: int) -> bool:
        """Whether the id stands for a row of a picture."""
        return token in self._rows

    def picture_rows(self, tokens: Tokens, check: Check | None = None) -> PictureRows | None:
        """The rows of pictures among these tokens, encoded if needed; None if there are none."""
        index = np.flatnonzero(tokens < 0)
        if not len(index):
            return None
        places = [self._row(token) for token in tokens[index].tolist()]
        encoded = {digest: self._encoded(digest, check) for digest, _ in places}
        rows = np.stack([encoded[digest].rows[row] for digest, row in places])
        deep = tuple(
            np.stack([encoded[digest].deep[layer][row] for digest, row in places])
            for layer in range(self.encoder.deep_layers)
        )
        return PictureRows(index, rows, deep)

    def positions(
        self, tokens: Tokens, first: int, shift: int
    ) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64], int]:
        """The rotary positions of a sequence's tokens from index ``first`` on.

        ``shift`` is a token's index minus its position. Returns the positions on three axes (3, R),
        or None if the axes do not differ; the positions on the first axis (R,); and the new shift.
        """
        positions = np.arange(first - shift, first - shift + len(tokens))
        axes = None
        for index in np.flatnonzero(tokens < 0).tolist():
            digest, row = self._row(int(tokens[index]))
            prepared = self._pictures[digest].prepared
            if prepared.offsets is None:
                continue
            if axes is None:
                axes = np.repeat(positions[None], 3, 0)
            begin = first + index - row - shift
            axes[:, index] = begin + prepared.offsets[row]
            if row == len(prepared.offsets) - 1:
                shift += len(prepared.offsets) - prepared.advance
                axes[:, index + 1 :] = np.arange(first + index + 1, first + len(tokens)) - shift
        return axes, positions if axes is None else axes[0].copy(), shift

    def ahead(self, tokens: Tokens) -> npt.NDArray[np.int32] | None:
        """How many later tokens each row attends to, (R,); None if attention is causal."""
        index = np.flatnonzero(tokens < 0)
        if not self.encoder.bidirectional or not len(index):
            return None
        ahead = np.zeros(len(tokens), np.int32)
        for at in index.tolist():
            digest, row = self._row(int(tokens[at]))
            ahead[at] = min(len(self._pictures[digest].ids) - row, len(tokens) - at) - 1
        return ahead

    def pass_end(self, tokens: Sequence[int], first: int, end: int) -> int:
        """The end of a pass over ``tokens`` from index ``first``: ``end``, unless that would cut a
        picture with bidirectional attention. Then the pass ends before the picture, or after it if
        it begins with it.
        """
        if not self.encoder.bidirectional or end == len(tokens) or tokens[end - 1] >= 0:
            return end
        digest, row = self._row(tokens[end - 1])
        begin, rows = end - 1 - row, len(self._pictures[digest].ids)
        if row == rows - 1:
            return end
        return begin if begin > first else min(len(tokens), begin + rows)

    def _row(self, token: int) -> tuple[bytes, int]:
        """The digest of the token's picture, and the row's number."""
        row = self._rows.get(token)
        if row is None:
            raise OptionError("token ids below 0 stand for pictures, and there is no such picture")
        return row

    def _encoded(self, digest: bytes, check: Check | None) -> EncodedPicture:
        picture = self._pictures[digest]
        if picture.encoded is None:
            if not len(picture.prepared.patches):
                raise OptionError(
                    "too many pictures at once for the memory that they may take: ask again about "
                    "this one"
                )
            encoded = self._encode(picture.prepared, check)
            with self._lock:
                picture.encoded, picture.prepared = encoded, _without_patches(picture.prepared)
                self._evict(picture)
            self._charge(picture)
            return encoded
        return picture.encoded

    def _charge(self, current: PromptPicture) -> None:
        """Charge cached pictures to the budget, evicting the oldest if it has no room."""
        while True:
            with self._lock:
                evictable = [each for each in self._pictures.values() if each.encoded is not None]
                total = sum(each.nbytes for each in self._pictures.values())
            more = max(0, total - _RESERVED_NBYTES) - self._taken_nbytes
            try:
                self._take(more, False)
            except MemoryBudgetError:
                oldest = next((each for each in evictable if each is not current), current)
                nbytes, oldest.encoded = oldest.nbytes, None
                if oldest is not current:
                    continue
                raise MemoryBudgetError(
                    f"what the model sees of a picture takes {format_bytes(nbytes)}, and the "
                    f"budget leaves less: make it smaller, or raise {option('ram')}"
                ) from None
            self._taken_nbytes += more
            return

    def _encode(self, prepared: PreparedPicture, check: Check | None) -> EncodedPicture:
        for units in self._readers:
            try:
                with units.reserve(prepared):
                    return self.encoder.encode(prepared, units, units.steps, check)
            except MemoryBudgetError:
                if units is self._readers[-1]:
                    raise
        raise AssertionError("there are steps")


class EncoderUnitReader(Units):
    """Reads each unit when its step begins and does not keep it: a picture needs each unit once,
    and reading takes a small part of the step's time.
    """

    def __init__(self, source: VisionSource, steps: VisionSteps, take: Take | None = None) -> None:
        self.steps = steps
        self._source = source
        self._take: Take = take or (lambda nbytes, on_gpu: None)

    @contextmanager
    def reserve(self, prepared: PreparedPicture) -> Iterator[None]:
        """Reserve the memory for encoding a picture within this context.

        Raises:
            MemoryBudgetError: there is too little memory.
        """
        room = self._sizes.room(prepared)
        parts = [(room, False)]
        if self.steps.on_gpu:
            parts = [(self._sizes.host_room(prepared), False), (room, True)]
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
                traceback.clear_frames(error.__traceback__)  # frames refer to rows and weights
                raise

    @cached_property
    def _sizes(self) -> EncoderSizes:
        return EncoderSizes.of(self._source, self.steps.ops.weight_nbytes)

    def read(self, make: Callable[[WeightLoader], _Unit]) -> _Unit:
        self.steps.begin_unit()
        return make(WeightLoader(self._source, self.steps.ops))


def _without_patches(prepared: PreparedPicture) -> PreparedPicture:
    return replace(prepared, patches=Patches.none())


def _row_ids(digest: bytes, prepared: PreparedPicture) -> tuple[int, ...]:
    """Negative token ids derived from the picture's digest and size."""
    size = repr((prepared.rows, prepared.grid)).encode()
    stream = hashlib.shake_128(digest + size).digest(8 * prepared.rows)
    numbers = np.frombuffer(stream, np.int64) | np.int64(-(1 << 63))
    return tuple(numbers.tolist())
