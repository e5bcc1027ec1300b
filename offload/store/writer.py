"""Writes a store file by file: the layout is planned first, so an interrupted run can continue.

One safetensors file for the embedding, each layer, the head with the final norm, and the MTP block
if there is one. The format
forbids holes: units are aligned by spaces at the end of the header and by explicit ``_pad``
tensors. Tiles are one-dimensional ``U8`` tensors, vectors ``F32``. Everything is written in
``NAME.partial``, each file whole or not at all; a later run of the same packing keeps the files
whose SHA-256 are right, and the folder gets its own name last.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

from localrt import system
from localrt.common.closing import Closing
from localrt.common.errors import CancelledError, LocalrtError, OptionError, StorageError, reason_of
from localrt.common.files import PAGE, atomic_write, locked, make_folder
from localrt.common.formatting import format_bytes
from localrt.models.checkpoints.store.checkpoint import StoreCheckpoint
from localrt.models.checkpoints.store.manifest import (
    LAYOUT,
    PREDICTION,
    Manifest,
    StoredUnit,
    UnitTensor,
    read_manifest,
)
from localrt.models.tensor_source import EMBEDDING, TensorInfo, WeightBlock
from localrt.models.units import Unit
from localrt.models.weight_files import MANIFEST_NAME, PARTIAL_NAME
from localrt.quant.formats import F32
from localrt.quant.formats.tiled import TILE_ROWS, TiledTensor

_TENSOR_ALIGNMENT = 64  # alignment within a unit: a cache line, the widest vector


@dataclass(frozen=True, slots=True)
class UnitPlan:
    """A unit's place in its file, in bytes, and its tensors (without scales and rotations)."""

    name: str
    offset: int
    nbytes: int
    tensors: tuple[UnitTensor, ...]


@dataclass(frozen=True, slots=True)
class FilePlan:
    """A file: ``header`` is followed by the units, one after another."""

    name: str
    header: bytes
    units: tuple[UnitPlan, ...]
    layer: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return len(self.header) + sum(unit.nbytes for unit in self.units)


def plan_files(units: Sequence[Unit], tensors: Mapping[str, TensorInfo]) -> tuple[FilePlan, ...]:
    """The files of a store, layers first; ``tensors`` are as they will be stored.

    Layers come first because they take longest: the first of them shows how long the rest takes.
    """
    files: dict[str, list[Unit]] = {}
    for unit in sorted(units, key=lambda unit: unit.layer is None):
        files.setdefault(_file_name(unit), []).append(unit)
    return tuple(_plan_file(name, group, tensors) for name, group in files.items())


def _file_name(unit: Unit) -> str:
    if unit.layer is not None:
        return f"layer-{unit.layer:04d}.safetensors"
    if unit.name == PREDICTION:
        return f"{PREDICTION}.safetensors"
    embedding = unit.name == "embedding" or EMBEDDING in unit.tensors
    return "embedding.safetensors" if embedding else "head.safetensors"


def _plan_file(name: str, units: Sequence[Unit], tensors: Mapping[str, TensorInfo]) -> FilePlan:
    planned: list[UnitPlan] = []
    extents: dict[str, tuple[str, int, int]] = {}  # safetensors type, first and end byte
    position = 0
    for unit in units:
        begin = position
        inside: list[UnitTensor] = []
        for tensor in unit.tensors:
            position = _pad(extents, position, _TENSOR_ALIGNMENT)
            placed = _place(tensors[tensor], unit, position - begin)
            inside.append(placed)
            # The slices of a head are one tensor of the file.
            first = extents.get(tensor, ("", position, position))[1]
            kind = "F32" if len(placed.shape) == 1 else "U8"
            extents[tensor] = (kind, first, position + placed.nbytes)
            position += placed.nbytes
        position = _pad(extents, position, PAGE)
        planned.append(UnitPlan(unit.name, begin, position - begin, tuple(inside)))
    header = _header(extents)
    shifted = (
        UnitPlan(unit.name, len(header) + unit.offset, unit.nbytes, unit.tensors)
        for unit in planned
    )
    return FilePlan(name, header, tuple(shifted), units[0].layer)


def _place(info: TensorInfo, unit: Unit, offset: int) -> UnitTensor:
    if len(info.shape) == 1:
        return UnitTensor(info.name, F32, info.shape, offset)
    start, stop = unit.rows or (0, info.shape[0])
    return UnitTensor(info.name, info.format, (stop - start, info.shape[1]), offset, row=start)


def _pad(extents: dict[str, tuple[str, int, int]], position: int, alignment: int) -> int:
    """The next multiple of ``alignment``, with a tensor for the bytes before it."""
    end = -(-position // alignment) * alignment
    if end > position:
        number = sum(name.startswith("_pad.") for name in extents)
        extents[f"_pad.{number}"] = ("U8", position, end)
    return end


def _header(extents: Mapping[str, tuple[str, int, int]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"localrt.layout": LAYOUT}}
    for name, (kind, begin, end) in extents.items():
        size = (end - begin) // (4 if kind == "F32" else 1)
        entries[name] = {"dtype": kind, "shape": [size], "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    total = -(-(8 + len(text)) // PAGE) * PAGE
    return (total - 8).to_bytes(8, "little") + text.ljust(total - 8)


Pieces: TypeAlias = Callable[[str], Iterable[WeightBlock]]
"""The consecutive pieces of a tensor, by its name."""
ProgressFunction: TypeAlias = Callable[[int, int, str], None]
"""Called with bytes written, all bytes, and the file at hand."""
_ASIDE = ".writing"
_HASH_BLOCK = 8 << 20
_SUMMED = ("embedding", "inputs")  # tables whose tiles have sums; n-grams have millions of tiles


def partial_folder(out: Path) -> Path:
    """The folder of the store ``out`` until it is finished."""
    return out.with_name(out.name + ".partial")


class StoreWriter(Closing):
    """Writes one store: ``write`` all of ``pending``, then ``finish``. Use it with ``with``.

    ``manifest`` has no units; ``files`` are all files of the store, but for ``beside`` bytes that
    the caller writes by ``write_pieces``. A partial store of the same packing is continued; any
    other is begun again, after a ``note`` if the source's files have changed meanwhile.

    Raises:
        OptionError: ``out`` exists already.
        StorageError: the folder cannot be written, has too little room, or another process is
            writing the same store.
    """

    def __init__(
        self,
        out: Path,
        manifest: Manifest,
        files: Sequence[FilePlan],
        *,
        beside: int = 0,
        progress: ProgressFunction | None = None,
        note: Callable[[str], None] = lambda line: None,
        cancel: threading.Event | None = None,
    ) -> None:
        self.out = out
        self.folder = partial_folder(out)
        self._files = files
        self._total = sum(file.nbytes for file in files)
        self._done = 0
        self._texts: dict[str, str] = {}
        self._progress = progress
        self._note = note
        self._cancel = cancel
        self._stack = ExitStack()
        if out.exists():
            raise OptionError(f"{out} exists already: remove it, or choose another folder")
        try:
            with _storage_errors(self.folder):
                make_folder(self.folder)
                self._stack.enter_context(locked(self.folder, 0.0))
                self._stack.enter_context(suppress(OSError))  # some systems remove it
                self._stack.callback(self.folder.with_name(self.folder.name + ".lock").unlink)
                self._manifest = self._resumed(manifest)
                self._require_room(beside)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unlock the folder. Finished files stay."""
        self._stack.close()

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return self._total

    @property
    def pending(self) -> list[FilePlan]:
        """The files that are not finished, in order."""
        finished = {unit.file for unit in self._manifest.units}
        return [file for file in self._files if file.name not in finished]

    def report(self, detail: str) -> None:
        """Report progress, and stop if cancelled.

        Raises:
            CancelledError: ``cancel`` is set.
        """
        if self._cancel is not None and self._cancel.is_set():
            raise CancelledError(f"cancelled: the next run goes on from {self.folder}")
        if self._progress is not None:
            self._progress(self._done, self._total, detail)

    def write_bytes(self, name: str, data: bytes) -> None:
        """A small file of the store, such as its tokenizer."""
        self.write_pieces(name, [data])
        self._texts[name] = hashlib.sha256(data).hexdigest()

    def write_pieces(self, name: str, pieces: Iterable[bytes]) -> None:
        """Write a file of the store that is not in ``pending``."""
        with _storage_errors(self.folder), self._aside(name) as stream:
            for data in pieces:
                stream.write(data)

    def write(self, file: FilePlan, pieces: Pieces) -> None:
        """Write one file; ``pieces`` is called once for each of its tensors, in file order.

        Raises:
            StorageError: the disk is full, or fails.
            CancelledError: ``cancel`` is set.
            ValueError: the pieces do not match the plan.
        """
        begun = self._done
        try:
            with _storage_errors(self.folder), self._aside(file.name) as stream:
                stream.write(file.header)
                self._done += len(file.header)
                tiles: dict[str, _Tiles] = {}
                units = [self._write_unit(stream, file.name, u, tiles, pieces) for u in file.units]
                if any(tensor.rest for tensor in tiles.values()):
                    raise ValueError(f"{file.name}: more rows than the plan says")
            self._save(replace(self._manifest, units=(*self._manifest.units, *units)))
        except BaseException:
            self._done = begun
            raise
        self.report(file.name)

    def reader(self, file: FilePlan | None = None) -> StoreCheckpoint:
        """A reader of the tensors of one finished file, or of all finished files."""
        units = tuple(u for u in self._manifest.units if file is None or u.file == file.name)
        return StoreCheckpoint(
            self.folder, manifest=replace(self._manifest, units=units), verify=False
        )

    def finish(self) -> Path:
        """Give the store its final name.

        Raises:
            StorageError: the disk fails.
        """
        assert not self.pending, "all files are written"
        with _storage_errors(self.folder):
            order = {file.name: number for number, file in enumerate(self._files)}
            units = sorted(self._manifest.units, key=lambda unit: order[unit.file])
            self._manifest = replace(self._manifest, units=tuple(units))
            if (source := self._manifest.source).path is None:  # no copy that follows its source
                self._manifest = replace(self._manifest, source=replace(source, stamp=None))
            self._manifest = replace(self._manifest, texts=self._texts)
            self.write_pieces(MANIFEST_NAME, [self._manifest.to_json().encode()])
            system.sync_folder(self.folder)
            system.replace(self.folder, self.out)
            # Last: until then it has the stamp by which a killed run is continued.
            (self.out / PARTIAL_NAME).unlink(missing_ok=True)
            system.sync_folder(self.out.parent)
        self.close()
        return self.out

    # -- one file --------------------------------------------------------------------------------

    def _write_unit(
        self, stream: BinaryIO, file: str, unit: UnitPlan, tiles: dict[str, _Tiles], pieces: Pieces
    ) -> StoredUnit:
        digest = hashlib.sha256()
        position = 0

        def put(data: memoryview | bytes) -> None:
            nonlocal position
            stream.write(data)
            digest.update(data)
            position += len(data)
            self._done += len(data)
            self.report(file)

        tensors: list[UnitTensor] = []
        names = [tensor.name for tensor in unit.tensors]
        by_row = len(names) == 1 and (unit.name in _SUMMED or names[0] == EMBEDDING)
        sums = bytearray()
        for tensor in unit.tensors:
            put(bytes(tensor.offset - position))
            if tensor.name not in tiles:
                tiles[tensor.name] = _Tiles(tensor, pieces(tensor.name))
            source = tiles[tensor.name]
            tile = TILE_ROWS * tensor.format.row_bytes(tensor.shape[-1])
            step = tile if by_row else tensor.nbytes
            for _ in range(0, tensor.nbytes, step):
                sum_ = 0
                for data in source.take(step):
                    put(data)
                    sum_ = zlib.crc32(data, sum_) if by_row else 0
                sums += sum_.to_bytes(4, "big")
            tensors.append(replace(tensor, scale=source.scale, hadamard=source.hadamard))
        put(bytes(unit.nbytes - position))
        digests = digest.hexdigest(), tuple(tensors), sums.hex() if by_row else ""
        return StoredUnit(unit.name, file, unit.offset, unit.nbytes, *digests)

    def _resumed(self, manifest: Manifest) -> Manifest:
        """``manifest`` with the units of files that are finished already."""
        changed = False
        for name in (MANIFEST_NAME, PARTIAL_NAME):
            try:
                earlier = read_manifest(self.folder / name)
            except LocalrtError:
                continue
            if not earlier.describes_same(manifest):
                earlier = replace(earlier, source=manifest.source)
                changed = changed or earlier.describes_same(manifest)
                continue
            kept = [unit for file in self._files for unit in self._kept(file, earlier)]
            # With the final name, the folder could be mistaken for a model.
            self._save(replace(manifest, units=tuple(kept)))
            (self.folder / MANIFEST_NAME).unlink(missing_ok=True)
            return self._manifest
        if changed:
            name = manifest.source.name
            self._note(f"{name} has changed since {self.out.name} was begun: starting anew")
        self._clear()
        self._save(manifest)
        return manifest

    def _kept(self, file: FilePlan, earlier: Manifest) -> list[StoredUnit]:
        """A file's units, if they match the plan and the saved checksums."""
        units = [unit for unit in earlier.units if unit.file == file.name]
        planned = [(unit.name, unit.offset, unit.nbytes) for unit in file.units]
        path = self.folder / file.name
        if [(unit.name, unit.offset, unit.nbytes) for unit in units] != planned:
            return []
        if not path.is_file() or path.stat().st_size != file.nbytes:
            return []
        for unit in units:
            self.report(f"checking {file.name}")
            if _digest(path, unit) != unit.sha256:
                return []
        self._done += file.nbytes
        return units

    def _clear(self) -> None:
        """Remove the files of another packing: only those that belong to a partial store."""
        names = [path.name for path in self.folder.iterdir()]
        ours = {MANIFEST_NAME, PARTIAL_NAME, PARTIAL_NAME + _ASIDE}
        if names and not ours & set(names):
            raise StorageError(
                f"{self.folder} is in the way and not localrt's: move it, or choose another folder"
            )
        for name in names:
            path = self.folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _require_room(self, beside: int) -> None:
        free = shutil.disk_usage(self.folder).free
        missing = self._total - self._done + beside
        if missing > free:
            raise StorageError(
                f"{self.out} needs {format_bytes(missing)} more and the disk has "
                f"{format_bytes(free)} free: make room, or choose another folder"
            )

    def _save(self, manifest: Manifest) -> None:
        self.write_pieces(PARTIAL_NAME, [manifest.to_json().encode()])
        self._manifest = manifest

    @contextmanager
    def _aside(self, name: str) -> Iterator[BinaryIO]:
        """Yield a temporary path for the file ``name``; it is renamed when complete."""
        aside = self.folder / (name + _ASIDE)
        make_folder(aside.parent)
        # All processes use one name, so leftovers of a killed one are overwritten.
        with atomic_write(self.folder / name, aside=aside) as stream:
            yield stream


class _Tiles:
    """The bytes of one tensor, read in one piece for each of its units."""

    def __init__(self, tensor: UnitTensor, pieces: Iterable[WeightBlock]) -> None:
        self._tensor = tensor
        self._pieces = iter(pieces)
        self._left = memoryview(b"")
        self.scale, self.hadamard = 1.0, 0
        self._begun = False

    def take(self, count: int) -> Iterator[memoryview]:
        """The next ``count`` bytes."""
        while count:
            if not self._left:
                self._left = self._next()
            data, self._left = self._left[:count], self._left[count:]
            count -= len(data)
            yield data

    @property
    def rest(self) -> bool:
        """Whether any bytes are left."""
        return bool(self._left) or next(self._pieces, None) is not None

    def _next(self) -> memoryview:
        piece = next(self._pieces, None)
        name = self._tensor.name
        if piece is None:
            raise ValueError(f"{name}: fewer rows than the plan says")
        hadamard = piece.hadamard if isinstance(piece, TiledTensor) else 0
        if self._begun and (self.scale, self.hadamard) != (piece.scale, hadamard):
            raise ValueError(f"{name}: pieces with different scales or rotations")
        if piece.format != self._tensor.format or piece.shape[1:] != self._tensor.shape[1:]:
            raise ValueError(f"{name}: {piece.format.name} {piece.shape} is not what was planned")
        self.scale, self.hadamard, self._begun = piece.scale, hadamard, True
        return piece.data.reshape(-1).data.cast("B")


def _digest(path: Path, unit: StoredUnit) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        stream.seek(unit.offset)
        left = unit.nbytes
        while left and (data := stream.read(min(left, _HASH_BLOCK))):
            digest.update(data)
            left -= len(data)
    return digest.hexdigest()


@contextmanager
def _storage_errors(folder: Path) -> Iterator[None]:
    """Report the system's disk errors in one line. Finished files stay for the next run."""
    try:
        yield
    except LocalrtError:
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"the disk of {folder} is full: make room and run again, which goes on from here"
            ) from error
        raise StorageError(
            f"{error.filename or folder} cannot be written: {reason_of(error)}"
        ) from error
