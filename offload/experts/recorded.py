"""The host's part of recorded passes: it works while a graph of many layers runs on the GPU.

Each layer's kernels give the host a ticket when its rows and choice are in RAM, compute the experts
in the layer's table, and wait until the host has computed the others. So there is one launch for
many layers, and Python does nothing in between if the experts are in RAM. Tables change between
passes only: GPU and host agree on who computes. What the routers chose is learned after the pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from localrt.models.layers.moe import Routed
from localrt.quant.ops.arrays import Array
from localrt.quant.ops.experts import Share, SharedLayers
from localrt.quant.ops.protocol import Check, PassLostError

_LOOK_S = 0.05  # after so long, the host looks whether the GPU has failed


class RecordedPass:
    """One layer in all passes that replay a recording: see ``ExpertPass``.

    ``findable`` are the experts that the GPU computes in the current replay; for ``demanded``
    layers the others were asked for in it, as some were not in RAM.
    """

    findable: npt.NDArray[np.bool_]
    demanded = False
    check: Check | None = None

    def __init__(self, routed: Routed, share: Share[Array]) -> None:
        self.routed, self.share = routed, share
        self.routing, self.slots_array = share.routing, share.slots
        self.label = f"layers.{routed.layer}.experts"

    def absent(self) -> list[int]:
        """The chosen experts that the host computes."""
        chosen = np.unique(self.routing.chosen)
        return cast("list[int]", chosen[~self.findable[chosen]].tolist())

    def slots(self) -> Array:
        """The slots of all chosen experts."""
        self.share.compute(self.routed.spec)
        return self.share.take()

    def end(self) -> None:
        """Nothing to do: no copies were begun."""

    def rows(self) -> Array:
        """The rows on the host."""
        return cast(Array, self.share.rows)

    def host_slots(self, rows: Array) -> Array:
        """The array for the host's results."""
        return cast(Array, self.share.host_slots)

    def deliver(self, slots: Array, filled: npt.NDArray[np.bool_]) -> None:
        """Nothing to do: the GPU reads the slots where they are."""


class HostExperts(Protocol):
    """What recorded layers ask of the owner of the experts."""

    def begin_recorded(self, first: int) -> Sequence[Any]:
        """Before a graph whose first layer is ``first``: learn from the last pass, and enter
        experts that have arrived. Returns the tables that may have changed.
        """

    def compute_absent(self, layer_pass: RecordedPass) -> None:
        """Compute the chosen experts that the GPU does not, reading those that are on the SSD."""

    def served(self, layers: Sequence[RecordedPass], busy_s: float) -> None:
        """Note that the host's part of a graph's layers is done, in ``busy_s`` seconds."""


class RecordedLayers:
    """The host's part of the layers of one graph: see ``HostWork``. ``quick`` does all of it that
    can be done without Python.
    """

    def __init__(
        self, experts: HostExperts, layers: Sequence[RecordedPass], quick: SharedLayers | None
    ) -> None:
        self._experts, self._layers, self._quick = experts, list(layers), quick
        self._shares = [layer.share for layer in layers]

    def begin(self, check: Check | None) -> None:
        """Fix which experts the GPU computes."""
        if check is not None:
            check()
        tables = self._experts.begin_recorded(self._layers[0].routed.place)
        for number, layer in enumerate(self._layers):
            layer.findable, layer.demanded = layer.share.present(), False
            if self._quick is not None:
                self._quick.present(number, layer.findable)
        self._shares[0].begin(self._shares, tables)

    def __call__(self, check: Check | None) -> None:
        """Compute the other experts of each layer.

        Raises:
            PassLostError: the GPU has waited too long.
        """
        quick, at = self._quick, 0
        before = 0.0 if quick is None else quick.busy_s
        try:
            while at < len(self._layers):
                if quick is not None:
                    at = quick.run(at)
                if at < len(self._layers):
                    self._serve(self._layers[at], check)
                    at += 1
            if self._shares[0].words.stop[0]:
                raise _lost()
        except BaseException:
            self._shares[0].give_up()
            raise
        self._experts.served(self._layers, 0.0 if quick is None else quick.busy_s - before)

    def _serve(self, layer: RecordedPass, check: Check | None) -> None:
        """Compute one layer's experts, which may be on the SSD."""
        self._await(layer.share, check)
        layer.check = check
        self._experts.compute_absent(layer)
        layer.share.words.done[0] = layer.share.words.turn[0]

    def _await(self, share: Share[Array], check: Check | None) -> None:
        """Wait for the GPU's ticket."""
        words, looked = share.words, time.perf_counter()
        while words.ticket[0] != words.turn[0]:
            if words.stop[0]:
                raise _lost()
            time.sleep(0)
            if time.perf_counter() - looked > _LOOK_S:
                looked = time.perf_counter()
                share.check()
                if check is not None:
                    check()


def _lost() -> PassLostError:
    return PassLostError("the GPU has waited too long for the CPU, which others need: ask again")
