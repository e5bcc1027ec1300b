"""Which units stay in memory as a pipeline runs: given back as caches grow or memory runs short.

What was given back is kept again when there is room, without an extra read: it passes through the
ring anyway. All changes happen between passes. It moves units; it does not compute.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.errors import MemoryBudgetError
from localrt.formatting import format_bytes
from localrt.offload.account import growing_ring_nbytes
from localrt.offload.experts.memory import ExpertMemory
from localrt.offload.experts.pools import ExpertPools
from localrt.offload.pipeline.giving_back import choose_units
from localrt.offload.pipeline.lane import Lane
from localrt.offload.pipeline.stages import Stage
from localrt.offload.placement import Where
from localrt.offload.ring import Ring
from localrt.quant.ops.aligned import aligned_buffer

__all__ = ["Residency"]

Bytes = npt.NDArray[np.uint8]

_IN_RAM = (Where.RAM, Where.LINK)
_RAM_TO_SSD = {Where.RAM: Where.SSD, Where.LINK: Where.SSD_LINK}


class Residency:
    """The present place of every stage. ``host`` are the units in RAM that a card copies from.

    ``budget`` is for resident units and caches, in bytes. ``rings`` are the bytes of the CPU's and
    the card's ring: larger units cannot pass through. ``shortage`` says how many bytes of RAM
    (below zero: how many are spare again) and of the card's memory others need now. ``forget``
    ends what copies wait for, before other units are streamed. ``chunk`` is that of the CPU's ring,
    which is made larger where only larger units are left to be given back. ``experts`` are a
    mixture's slots.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        cpu: Lane,
        card: Lane | None,
        host: dict[str, Bytes],
        budget: int,
        rings: tuple[int, int],
        shortage: Callable[[], tuple[int, int]] = lambda: (0, 0),
        forget: Callable[[], None] = lambda: None,
        chunk: int = 2 << 20,
        experts: ExpertMemory | ExpertPools | None = None,
    ) -> None:
        self.stages = list(stages)
        self._cpu, self._card, self._host = cpu, card, host
        self._budget = budget
        self._ram_ring, self._vram_ring = rings
        self._shortage = shortage
        self._forget = forget
        self._chunk = chunk
        self._ring_growth = 0  # bytes that the ring takes beyond what was planned
        self._withheld = 0  # bytes of the budget that others have needed
        self._given: list[str] = []  # the latest last
        self._adopting: dict[str, Bytes] = {}
        self._experts = experts
        self._most_experts = 0 if experts is None else experts.nbytes
        self._at_load = self.ram_nbytes
        self._changed = ""  # the budget, and to what
        self._why = ""  # what was given back was
        self._card_given = 0

    @property
    def note(self) -> str:
        """What is no longer where it was at load, and why, in a sentence; empty if nothing is."""
        ram, vram = self._at_load - self.ram_nbytes, self._card_given
        parts: list[str] = []
        if ram > 0 and self._why:
            parts.append(f"{format_bytes(ram)} more of the weights are read for every token")
        if ram < 0 and self._changed:
            parts.append(f"{format_bytes(-ram)} less of the weights are read for every token")
        if vram:
            parts.append(f"{format_bytes(vram)} more are copied to the card")
        return f"{' and '.join(parts)}: {self._why if ram > 0 else self._changed}" if parts else ""

    def set_budget(self, nbytes: int, caches: int, words: str) -> None:
        """From now on ``nbytes`` of RAM for resident units and caches, which take ``caches`` now.

        ``words`` say of it what a person would. With more than before, units that were read for
        every token stay as they pass, as far as there is room.

        Raises:
            MemoryBudgetError: what cannot be streamed takes more; all is as before then.
        """
        before = self._budget, self._changed, self._why
        self._budget, self._changed = nbytes, words
        try:
            self.make_room(caches)
        except MemoryBudgetError:
            self._budget, self._changed, self._why = before
            raise
        read = [stage.name for stage in self.stages if stage.where is Where.SSD]
        self._given = [*(name for name in read if name not in self._given), *self._given]
        self._choose_adopted(caches)

    def take(self, nbytes: int, caches: int) -> None:
        """Something else in this process needs ``nbytes`` of the budget; below zero: no longer.

        Raises:
            MemoryBudgetError: they cannot be given; nothing changes then.
        """
        before, why = self._budget, self._why
        self._budget = max(0, before - nbytes)
        missing = self._missing(caches)
        try:
            self.make_room(caches)
        except MemoryBudgetError:
            self._budget, self._why = before, why
            raise
        if missing:
            self._why = "what keeps answers in their form needs memory"

    def shrink_card(self, nbytes: int, words: str) -> int:
        """Have ``nbytes`` less of the card's memory from now on; returns the bytes that are free.

        0 where that is not possible.
        """
        freed = self.give_back_card(nbytes)
        if freed:
            self._changed = self._why = words
        return freed

    @property
    def ram_nbytes(self) -> int:
        """Weights in RAM, without the ring."""
        experts = 0 if self._experts is None else self._experts.nbytes
        host = sum(data.nbytes for data in self._host.values())
        return self._cpu.resident_nbytes + host + experts

    @property
    def reclaimable(self) -> int:
        """Bytes of RAM that could be given back."""
        experts = 0 if self._experts is None else self._experts.reclaimable
        if self._ram_ring == 0:
            return experts
        return experts + sum(s.unit.nbytes for s in self.stages if s.where in _IN_RAM)

    def make_room(self, caches: int) -> None:
        """Before a pass whose caches take ``caches`` bytes of RAM: give back what is missing.

        Raises:
            MemoryBudgetError: all that can be streamed would not be enough.
        """
        ram, vram = self._shortage()
        if ram > 0:
            self._withheld += self.give_back(ram)
            self._why = "other programs need the memory"
        elif ram < 0:  # as much again as we would take is free
            self._withheld = max(0, self._withheld + ram)
        if vram:
            self.give_back_card(vram)
        missing = self._missing(caches)
        if missing > 0:
            self._why = self._changed or "keys and values have grown"
        if missing > 0 and self.give_back(missing) < missing and not self._widen(missing):
            raise self._too_small(caches)
        self._choose_adopted(caches)
        self._grow_experts(caches)

    def _missing(self, caches: int) -> int:
        """Bytes of weights to give back so that they and the caches fit."""
        return max(0, self.ram_nbytes + self._ring_growth + caches - self._budget)

    def _too_small(self, caches: int) -> MemoryBudgetError:
        """The caches alone are too large."""
        return MemoryBudgetError(
            f"the context has grown to {format_bytes(caches)} of keys and values and "
            f"{format_bytes(self._budget)} is left for them and for what cannot be streamed: use a "
            "shorter --ctx, --kv-format int8, or more --ram"
        )

    def adopt(self, stage: Stage, memory: Any) -> None:
        """A unit is in the ring: copy it if it is to stay from now on."""
        if stage.name in self._adopting:
            data = aligned_buffer(stage.unit.nbytes)
            data[:] = memory
            self._adopting[stage.name] = data

    def settle(self) -> None:
        """After a pass: what was copied is resident, and no longer read."""
        adopted = {name: data for name, data in self._adopting.items() if data.nbytes}
        self._adopting.clear()
        if not adopted:
            return
        for index, stage in enumerate(self.stages):
            if stage.name in adopted:
                self._given.remove(stage.name)
                self.stages[index] = replace(stage, where=Where.RAM)
                self._cpu.put(self.stages[index], adopted[stage.name])
        self._schedule()

    def give_back(self, nbytes: int) -> int:
        """Free at least ``nbytes`` of RAM from now on; 0 if that is not possible.

        Slots of experts go first: they cost the least, and come back the easiest.
        """
        if self._experts is not None:
            freed = self._experts.resize(self._experts.nbytes - nbytes)
            if freed >= nbytes:
                return freed
            return freed + self._give_back_units(nbytes - freed)
        return self._give_back_units(nbytes)

    def _give_back_units(self, nbytes: int) -> int:
        """Stream units from now on."""
        return self._move(choose_units(self.stages, nbytes, self._able()), _RAM_TO_SSD)

    def give_back_card(self, nbytes: int) -> int:
        """The same of the card's memory: its units are then read and copied in each pass."""
        limit = min(self._ram_ring, self._vram_ring)
        able = [s for s in self.stages if s.where is Where.VRAM and s.unit.nbytes <= limit]
        freed = self._move(choose_units(self.stages, nbytes, able), {Where.VRAM: Where.SSD_LINK})
        self._card_given += freed
        return freed

    def _able(self) -> list[Stage]:
        return [
            stage
            for stage in self.stages
            if stage.where in _IN_RAM and stage.unit.nbytes <= self._ram_ring
        ]

    def _widen(self, missing: int) -> bool:
        """Give ``missing`` bytes back with a ring that larger units pass through too."""
        largest = max((s.unit.nbytes for s in self.stages if s.where in _IN_RAM), default=0)
        size = growing_ring_nbytes(largest)
        more = size - self._ram_ring
        if more <= 0 or self._ram_ring == 0:
            return False
        before, self._ram_ring = self._ram_ring, size
        names = choose_units(self.stages, missing + more, self._able())
        if not names:
            self._ram_ring = before
            return False
        self._ring_growth += more
        self._move(names, _RAM_TO_SSD, Ring(size, self._chunk))
        return True

    def _move(
        self, names: frozenset[str], change: Mapping[Where, Where], ring: Ring | None = None
    ) -> int:
        freed = 0
        for index, stage in enumerate(self.stages):
            if stage.name not in names:
                continue
            self.stages[index] = replace(stage, where=change[stage.where])
            lane = self._cpu if stage.where is Where.RAM else self._card
            assert lane is not None, "these places are a card's"
            if stage.where is Where.LINK:
                freed += lane.free_host(self._host.pop(stage.name))
            else:
                freed += lane.drop(stage.name)
            if stage.where is Where.RAM:
                self._given.append(stage.name)
        if names:
            self._schedule(ring)
        return freed

    def _schedule(self, ring: Ring | None = None) -> None:
        self._forget()
        self._cpu.stream([stage for stage in self.stages if stage.where.read], ring)
        if self._card is not None:
            self._card.stream([stage for stage in self.stages if stage.where.copied])

    def _grow_experts(self, caches: int) -> None:
        """Slots that were given back, as far as there is room for them again."""
        experts = self._experts
        if experts is None or experts.nbytes >= self._most_experts:
            return
        taken = self._withheld + self._ring_growth + self.ram_nbytes + caches
        room = self._budget - taken
        if room >= experts.slot_nbytes:
            experts.resize(min(self._most_experts, experts.nbytes + room))

    def _choose_adopted(self, caches: int) -> None:
        """Of what was given back, the latest first, as much as there is room for now."""
        self._adopting.clear()
        if not self._given:
            return
        taken = self._withheld + self._ring_growth + self.ram_nbytes + caches
        room = self._budget - taken
        sizes = {stage.name: stage.unit.nbytes for stage in self.stages}
        for name in reversed(self._given):
            if sizes[name] <= room:
                self._adopting[name] = np.empty(0, np.uint8)
                room -= sizes[name]
