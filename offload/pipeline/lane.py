"""Units that one processor computes: resident in its memory, or passing through its ring.

A lane hands out parts that are ready, each for as long as a stage takes; it does not compute. The
CPU's ring is filled from the SSD, a card's over the link. It knows parts and their memory, neither
files nor the order of a pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import CheckpointError
from localrt.models.checkpoints.store_manifest import StoredUnit
from localrt.models.decoder import Attention, GatedMlp
from localrt.models.latent import LatentAttention
from localrt.models.moe import SparseMlp
from localrt.offload.cards.accelerator import Accelerator
from localrt.offload.pipeline.stages import Stage
from localrt.offload.reading.unit_reader import UnitReader
from localrt.offload.ring import Mark, Ring
from localrt.offload.trace import Resource
from localrt.offload.unit_parts import PartBuilder, verify_unit
from localrt.quant.ops.protocol import Ops, Weight

__all__ = ["Lane", "Part", "StoreDiscardedError", "Verifier"]

Bytes = npt.NDArray[np.uint8]
Part = Attention | LatentAttention | GatedMlp | SparseMlp | Weight
Check = Callable[[], None]

_KEPT_PLACES = 4  # of a streamed unit in the ring, for which its part is kept


class StoreDiscardedError(CheckpointError):
    """A packed copy was damaged, and is made anew when the model is loaded again."""


class Verifier:
    """Compares each unit of the store at ``path`` with its SHA-256, once.

    ``discard`` forgets a store that is damaged and can be made again.
    """

    def __init__(
        self, path: Path, *, enabled: bool = True, discard: Callable[[], None] | None = None
    ) -> None:
        self._path = path
        self._enabled = enabled
        self._discard = discard
        self._seen: set[str] = set()

    def __call__(self, unit: StoredUnit, data: Bytes) -> None:
        """Raises CheckpointError when the unit is damaged."""
        if self._enabled and unit.name not in self._seen:
            try:
                verify_unit(self._path, unit, data)
            except CheckpointError as error:
                if self._discard is None:
                    raise
                self._discard()
                raise StoreDiscardedError(
                    f"{self._path}: unit {unit.name} in {unit.file} is damaged: load the model "
                    "again, which packs it anew"
                ) from error
            self._seen.add(unit.name)


class Lane:
    """``reader`` fills the ring; without one, everything is resident. Used by one thread at a time.

    ``verify`` is called for what the reader brings. ``card`` is the accelerator, None on the CPU.
    """

    def __init__(
        self,
        ops: Ops,
        builder: PartBuilder,
        reader: UnitReader | None,
        *,
        verify: Callable[[StoredUnit, Bytes], None] | None = None,
        card: Accelerator | None = None,
    ) -> None:
        self.ops = ops
        self.card = card
        self.resource: Resource = "cpu" if card is None else "gpu"
        self._builder = builder
        self._reader = reader
        self._verify = verify
        self.resident_nbytes = 0  # bytes of resident units
        self._memory: dict[str, Any] = {}
        self._parts: dict[str, Part] = {}
        self._passing: dict[str, dict[int, Part]] = {}
        self._joined: dict[tuple[str, ...], Weight] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes that came through the ring."""
        return 0 if self._reader is None else self._reader.bytes_read

    def put(self, stage: Stage, memory: Any) -> None:
        """Make a unit resident whose bytes are ``memory``."""
        self.keep(stage.name, memory)
        self._parts[stage.name] = self._build(stage, memory)
        self._joined.clear()

    def keep(self, name: str, memory: Any) -> None:
        """Hold a unit's bytes alone: its rows are taken one by one."""
        self._memory[name] = memory
        self.resident_nbytes += _nbytes(memory)

    def memory(self, name: str) -> Any | None:
        """A resident unit's bytes; None where it is not."""
        return self._memory.get(name)

    def drop(self, name: str) -> int:
        """Free a resident unit; returns its bytes."""
        self._parts.pop(name, None)
        self._joined.clear()
        memory = self._memory.pop(name, None)
        if memory is None:
            return 0
        self.resident_nbytes -= _nbytes(memory)
        if self.card is not None:
            self.card.free(memory)
        return _nbytes(memory)

    def part(self, name: str) -> Part | None:
        """A resident unit's part; None where it is not."""
        return self._parts.get(name)

    def free_host(self, memory: Bytes) -> int:
        """RAM that the card copied a unit from is not needed any more; returns its bytes."""
        assert self.card is not None, "a card copies"
        return self.card.free_host(memory)

    def holds(self, stage: Stage) -> bool:
        """Whether the stage's unit is resident."""
        return stage.name in self._parts

    def joined(self, stages: Sequence[Stage]) -> Weight:
        """Resident slices of the head that follow one another, as one matrix."""
        key = tuple(stage.name for stage in stages)
        if key not in self._joined:
            slices = [(stage.unit, self._memory[stage.name]) for stage in stages]
            self._joined = {key: self._builder.joined(slices)} | self._joined
        return self._joined[key]

    def stream(self, stages: Sequence[Stage], ring: Ring | None = None) -> None:
        """Have these units pass through the ring, or a new one, from now on, in each pass."""
        if self._reader is not None:
            if ring is not None:
                self._passing.clear()  # they point into the old one
            self._reader.schedule([stage.unit for stage in stages], ring)

    def skip(self, names: Iterable[str]) -> None:
        """The pass that begins does not need these units.

        A card fetches what it has begun to, since the CPU's ring holds it until it is copied.
        """
        if self._reader is not None:
            self._reader.skip(names, finish=self.card is not None)

    def acquire(self, stage: Stage, check: Check | None) -> tuple[Part, Mark, Any | None]:
        """The stage's part, the mark by which its weights are there, its bytes in the ring."""
        part = self._parts.get(stage.name)
        if part is not None:
            return part, None, None
        assert self._reader is not None, "units are resident where nothing is streamed"
        memory, there = self._reader.acquire(stage.name, check)
        try:
            if self._verify is not None:
                self._verify(stage.unit, memory)
            if self.card is not None:
                self.card.wait(there)
            return self._part_at(stage, memory), there, memory
        except BaseException:
            self._reader.release(stage.name)
            raise

    def release(self, stage: Stage, ended: Mark) -> None:
        """The stage is done: its place in the ring may be filled again."""
        if stage.name not in self._parts:
            assert self._reader is not None, "see acquire"
            mark = ended if self.card is None else self.card.mark(ended)
            self._reader.release(stage.name, mark)

    @property
    def failed(self) -> bool:
        """Whether what was read ahead of the next pass has failed."""
        return self._reader is not None and self._reader.failed

    def rewind(self) -> None:
        """The pass was abandoned: the next one begins at the first unit."""
        if self._reader is not None:
            self._reader.rewind()

    def close(self) -> None:
        """End the threads and free everything."""
        if self._reader is not None:
            self._reader.close()
        for name in list(self._memory):
            self.drop(name)
        self._parts.clear()
        self._passing.clear()

    def _build(self, stage: Stage, memory: Any) -> Part:
        if stage.kind == "attention":
            return self._builder.attention(stage.layer, stage.unit, memory)
        if stage.kind == "mlp":
            return self._builder.mlp(stage.layer, stage.unit, memory)
        return self._builder.matrix(stage.unit, memory)

    def _part_at(self, stage: Stage, memory: Any) -> Part:
        """A part is built once for each place in the ring that its unit comes to lie at."""
        places = self._passing.setdefault(stage.name, {})
        address = _address(memory)
        if address not in places:
            while len(places) >= _KEPT_PLACES:
                del places[next(iter(places))]
            places[address] = self._build(stage, memory)
        return places[address]


def _nbytes(memory: Any) -> int:
    return int(memory.nbytes)


def _address(memory: Any) -> int:
    return int(memory.ctypes.data if isinstance(memory, np.ndarray) else memory.data_ptr())
