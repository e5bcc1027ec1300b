"""Units that the CPU computes: resident in RAM, or read from the SSD in each pass.

The lane owns the memory of both: a buffer for each resident unit, so that any one can be given back
alone, and the ring that the others pass through. It hands out parts that are ready; it does not
compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.decoder import Attention, GatedMlp
from localrt.offload.files import FileReader
from localrt.offload.ring import aligned_buffer
from localrt.offload.stages import Stage
from localrt.offload.trace import Trace
from localrt.offload.unit_parts import PartBuilder, verify_unit
from localrt.offload.unit_reader import UnitReader
from localrt.quant.ops.protocol import Ops, Weight

__all__ = ["CpuLane", "Part", "read_units"]

Bytes = npt.NDArray[np.uint8]
Part = Attention | GatedMlp | Weight
Check = Callable[[], None]
OnBytes = Callable[[int], None]

_KEPT_PLACES = 4  # of a streamed unit in the ring, for which its part is kept


class CpuLane:
    """``reader`` is needed as soon as a unit is streamed. Used by one thread at a time."""

    def __init__(
        self,
        ops: Ops,
        builder: PartBuilder,
        trace: Trace,
        reader: UnitReader | None,
        *,
        path: Path,
        verify: bool = True,
    ) -> None:
        self.ops = ops
        self._builder = builder
        self._trace = trace
        self._reader = reader
        self._path = path
        self._verify = verify
        self._verified: set[str] = set()
        self._buffers: dict[str, Bytes] = {}
        self._resident: dict[str, Part] = {}
        self._streamed: dict[str, dict[int, Part]] = {}

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    @property
    def bytes_read(self) -> int:
        """Bytes that passes have read from the SSD."""
        return 0 if self._reader is None else self._reader.bytes_read

    def put(self, stage: Stage, data: Bytes) -> None:
        """Make a unit resident whose bytes are ``data``."""
        self.verify(stage.unit, data)
        self._buffers[stage.name] = data
        self._resident[stage.name] = self.build(stage, data)

    def drop(self, name: str) -> int:
        """Free a resident unit; returns its bytes."""
        self._resident.pop(name, None)
        buffer = self._buffers.pop(name, None)
        return 0 if buffer is None else buffer.nbytes

    def keep(self, stage: Stage, data: Bytes) -> None:
        """Hold a unit's bytes alone: its rows are taken one by one."""
        self.verify(stage.unit, data)
        self._buffers[stage.name] = data

    def buffer(self, name: str) -> Bytes | None:
        """A resident unit's bytes; None where it is not."""
        return self._buffers.get(name)

    def stream(self, stages: Sequence[Stage]) -> None:
        """Read these units in each pass from now on."""
        if self._reader is not None:
            self._reader.schedule([stage.unit for stage in stages])

    def skip(self, stages: Sequence[Stage]) -> None:
        """The pass that begins does not need these units."""
        if self._reader is not None:
            self._reader.skip(stage.name for stage in stages)

    @contextmanager
    def part(self, stage: Stage, check: Check | None) -> Iterator[Part]:
        """The stage's part, ready to compute with until the end of the block."""
        part = self._resident.get(stage.name)
        if part is not None:
            yield part
            return
        assert self._reader is not None, "units are resident where nothing is streamed"
        data = self._reader.acquire(stage.name, check)
        try:
            self.verify(stage.unit, data)
            yield self._part_at(stage, data)
        finally:
            self._reader.release(stage.name)

    def rewind(self) -> None:
        """The pass was abandoned: the next one begins at the first unit."""
        if self._reader is not None:
            self._reader.rewind()

    def verify(self, unit: StoredUnit, data: Bytes) -> None:
        """Compare a unit's SHA-256 the first time that it is here.

        Raises:
            CheckpointError: it is damaged.
        """
        if self._verify and unit.name not in self._verified:
            verify_unit(self._path, unit, data)
            self._verified.add(unit.name)

    def build(self, stage: Stage, data: Bytes) -> Part:
        """The part whose weights are ``data``."""
        if stage.kind == "attention":
            return self._builder.attention(stage.layer, stage.unit, data)
        if stage.kind == "mlp":
            return self._builder.mlp(stage.layer, stage.unit, data)
        return self._builder.matrix(stage.unit, data)

    def close(self) -> None:
        """Free everything."""
        if self._reader is not None:
            self._reader.close()
        self._resident.clear()
        self._streamed.clear()
        self._buffers.clear()

    def _part_at(self, stage: Stage, data: Bytes) -> Part:
        """A part is built once for each place in the ring that its unit comes to lie at."""
        places = self._streamed.setdefault(stage.name, {})
        address: int = data.ctypes.data
        if address not in places:
            while len(places) >= _KEPT_PLACES:
                del places[next(iter(places))]
            places[address] = self.build(stage, data)
        return places[address]


def read_units(
    files: FileReader,
    stages: Sequence[Stage],
    done: Callable[[Stage, Bytes], None],
    *,
    threads: int,
    block: int,
    on_bytes: OnBytes | None = None,
) -> float:
    """Read whole units into buffers of their own, ``done`` being called for each in order.

    Returns the seconds that reading took, without ``done``.
    """
    seconds = 0.0

    def read(unit: StoredUnit, data: Bytes, start: int) -> int:
        part = data[start : start + block]
        files.read_into(unit.file, unit.offset + start, part)
        return part.nbytes

    with ThreadPoolExecutor(threads, thread_name_prefix="localrt-load") as pool:
        for stage in stages:
            data = aligned_buffer(stage.unit.nbytes)
            starts = range(0, stage.unit.nbytes, block)
            began = time.perf_counter()
            for count in pool.map(lambda s, d=data, u=stage.unit: read(u, d, s), starts):
                if on_bytes is not None:
                    on_bytes(count)
            seconds += time.perf_counter() - began
            done(stage, data)
    return seconds
