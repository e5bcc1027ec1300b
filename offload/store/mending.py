"""Makes a damaged unit of a model's packed form again, from the model that it was made of.

What is packed follows from the model alone, so a unit is mended when its SHA-256 is the manifest's
again; another process that reads or mends it meets the same bytes. Knows no pipelines.
"""

from __future__ import annotations

import os
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localrt.common.errors import CheckpointError, LocalrtError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.base import Checkpoint
from localrt.models.checkpoints.store.manifest import StoredUnit
from localrt.offload.store.cached import discard_store
from localrt.offload.store.pack import fast_tiler, stored_pieces

Bytes = npt.NDArray[np.uint8]


def mend_unit(model: Path, store: Path, unit: StoredUnit, data: Bytes) -> None:
    """Fill ``data`` (bytes of the unit,) from the model at ``model``, and write it to ``store``.

    Raises:
        CheckpointError: the model is another by now, or damaged, or the store cannot be written;
            if it can be removed, it is packed anew when it is next asked for.
    """
    damaged = f"{store}: unit {unit.name} in {unit.file} is damaged"
    try:
        with closing(open_checkpoint(model)) as source:
            _fill(source, unit, data)
        if not unit.is_whole(data):
            raise CheckpointError("it is not the model that was packed")
        _write(store / unit.file, unit.offset, data)
    except (LocalrtError, OSError) as error:
        with suppress(OSError):
            discard_store(store)
        raise CheckpointError(
            f"{damaged}, and cannot be made again from {model} ({error}): load the model again, "
            "which packs it anew"
        ) from error


def _write(path: Path, offset: int, data: Bytes) -> None:
    with path.open("r+b") as stream:
        status = os.fstat(stream.fileno())
        stream.seek(offset)
        stream.write(data.data)
        stream.flush()
        # Nothing has changed for those who go by the time: the bytes are what they were.
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.fsync(stream.fileno())


def _fill(source: Checkpoint, unit: StoredUnit, data: Bytes) -> None:
    data[:] = 0  # between tensors, and behind the last
    tiler = fast_tiler()
    for tensor in unit.tensors:
        out = data[tensor.offset : tensor.offset + tensor.nbytes]
        at = -tensor.row * tensor.format.row_bytes(tensor.shape[-1]) if tensor.row else 0
        for piece in stored_pieces(source, tensor.name, tiler):
            rows = piece.data.reshape(-1).view(np.uint8)
            part = rows[max(0, -at) : max(0, len(out) - at)]
            out[max(0, at) : max(0, at) + len(part)] = part
            at += len(rows)
            if at >= len(out):
                break
