"""One GGUF file, or the parts of a split one, under ggml's own tensor names.

Opening reads the header only. Names and rows are as the file has them: Hugging Face's names and row
order are ``gguf_checkpoint.py``'s work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from localrt.errors import CheckpointError
from localrt.models.checkpoints.gguf_header import read_header
from localrt.models.checkpoints.gguf_metadata import GgufMetadata
from localrt.models.checkpoints.ranged_file import RangedFile
from localrt.models.checkpoints.stored_tensor import StoredTensor
from localrt.quant.formats import PackedTensor

__all__ = ["GgufFile", "open_gguf_parts", "split_part"]

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf", re.DOTALL)


class GgufFile:
    """An open GGUF file.

    Raises:
        CheckpointError: not a GGUF file, truncated or malformed.
        UnsupportedModelError: a version or tensor type that is not read here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = RangedFile(path)
        try:
            header = read_header(self._file)
        except BaseException:
            self._file.close()
            raise
        self.version: int = header.version
        self.alignment: int = header.alignment
        self.metadata: GgufMetadata = header.metadata
        self.tensors: Mapping[str, StoredTensor] = header.tensors

    def read(self, name: str, start: int = 0, stop: int | None = None) -> PackedTensor:
        """Rows ``start`` to ``stop`` of a tensor, as they lie in the file.

        Raises:
            CheckpointError: no such tensor, or the file is closed.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        return self.tensors[name].read(start, stop)

    def blocks(self, name: str, max_bytes: int = 2 << 20) -> Iterator[PackedTensor]:
        """A tensor's rows in order, in pieces of at most ``max_bytes`` (and at least one row)."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        for start, stop in self.tensors[name].row_ranges(max_bytes):
            yield self.read(name, start, stop)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def split_part(path: Path) -> tuple[str, int, int] | None:
    """``(stem, part, parts)`` of a name such as ``big-00002-of-00005.gguf``, else None."""
    match = _PART_NAME.fullmatch(path.name)
    return (match["stem"], int(match["part"]), int(match["parts"])) if match else None


def open_gguf_parts(path: Path) -> tuple[GgufFile, ...]:
    """The file at ``path``, or all parts, first to last, of the split file it belongs to.

    Raises:
        CheckpointError: a part is missing or belongs elsewhere, or as for ``GgufFile``.
    """
    opened = GgufFile(path)
    parts = [opened]
    try:
        count = _split_value(opened, "split.count", 1)
        if count <= 1:
            return (opened,)
        named = split_part(path)
        if named is None or named[2] != count:
            raise CheckpointError(
                f"{path} is one of {count} parts, but is not named like one: restore its name, "
                f"which ends in -00001-of-{count:05d}.gguf or so"
            )
        opened.close()
        parts = []
        for number in range(1, count + 1):
            part = path.with_name(f"{named[0]}-{number:05d}-of-{count:05d}.gguf")
            if not part.exists():
                raise CheckpointError(f"{part} is missing: the model is split into {count} parts")
            parts.append(GgufFile(part))
            if (
                _split_value(parts[-1], "split.no", -1) != number - 1
                or _split_value(parts[-1], "split.count", -1) != count
            ):
                raise CheckpointError(f"{part} is not part {number} of {count}, despite its name")
        expected = _split_value(parts[0], "split.tensors.count", -1)
        found = sum(len(part.tensors) for part in parts)
        if expected not in (-1, found):
            raise CheckpointError(
                f"the parts of {path} hold {found} tensors, {expected} are expected"
            )
    except BaseException:
        for part_file in (opened, *parts):
            part_file.close()
        raise
    return tuple(parts)


def _split_value(file: GgufFile, key: str, default: int) -> int:
    value = file.metadata.integer(key)
    return default if value is None else value
