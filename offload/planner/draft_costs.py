"""What a draft model takes beside its target: seconds of a pass of its own.

On a card its weights are in the card's memory: token ids go there and logits come back, nothing
else crosses the link. On the CPU it follows the measured kernels. The same seconds are planned with
and charged on a virtual clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from localrt.offload.planner.costs import Costs
from localrt.offload.planner.machine import MachineProfile
from localrt.offload.shapes import ModelShape

_TOKEN_BYTES = 8
_LOGIT_BYTES = 4
# Choosing the likeliest of a row of logits, on the CPU: seconds for each entry of the vocabulary.
_CHOOSE_S = 4e-9


@dataclass(frozen=True, slots=True)
class DraftCosts:
    """Seconds of a resident draft's passes on ``machine``; on its card where ``on_card``."""

    shape: ModelShape
    machine: MachineProfile
    on_card: bool
    _known: dict[tuple[int, int, int], float] = field(default_factory=dict, repr=False)

    def computing(self, rows: int, wanted: int, held: int) -> float:
        """A pass of ``rows`` rows, ``wanted`` of them with logits, behind ``held`` tokens."""
        key = rows, wanted, held
        if key not in self._known:
            costs = Costs(shape=self.shape, machine=self.machine, rows=rows, held=held)
            seconds = 0.0
            for unit in self.shape.units:
                if unit.kind != "head":
                    seconds += costs.compute(unit, on_gpu=self.on_card)
                elif wanted:
                    seconds += costs.compute(unit, on_gpu=self.on_card, rows=wanted)
            self._known[key] = seconds
        return self._known[key]

    def there(self, rows: int) -> float:
        """Token ids to the card."""
        return self._crossing(_TOKEN_BYTES * rows)

    def back(self, wanted: int) -> float:
        """Logits from the card."""
        return self._crossing(_LOGIT_BYTES * self.shape.vocab * wanted) if wanted else 0.0

    def choosing(self, wanted: int) -> float:
        """On the CPU, from logits to the next level's nodes."""
        return _CHOOSE_S * self.shape.vocab * wanted

    def tree(self, guesses: int, levels: int, held: int) -> float:
        """Drafting a tree: one pass for its root, and one for each level that has children."""
        per_level = -(-guesses // levels) if levels else 0
        seconds = 0.0
        for level in range(levels):
            rows = per_level if level else 1
            seconds += (
                self.there(rows)
                + self.computing(rows, rows, held)
                + self.back(rows)
                + self.choosing(rows)
            )
        return seconds

    def _crossing(self, nbytes: float) -> float:
        machine = self.machine
        if not self.on_card or machine.link_bytes_s is None:
            return 0.0
        return machine.link_latency_s + nbytes / machine.link_bytes_s
