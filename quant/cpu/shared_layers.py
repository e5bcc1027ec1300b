"""The CPU's part of a mixture's layers that a GPU computes too, for a whole graph in one call."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from localrt.quant.cpu.abi import ACTIVATIONS, SharedLayer
from localrt.quant.cpu.weights import NativeExpertTable, locate
from localrt.quant.ops.experts import ExpertSpec, Share

_PATIENCE_US = 50_000  # after so long, Python looks what is wrong


class NativeSharedLayers:
    """See ``SharedLayers``."""

    def __init__(
        self,
        library: Any,
        handle: Any,
        layers: Sequence[tuple[Share[Any], NativeExpertTable, ExpertSpec]],
    ) -> None:
        self._library, self._handle = library, handle
        self._args = (SharedLayer * len(layers))()
        self._busy = ctypes.c_double()
        self._kept: list[object] = [layers]  # what the arguments point to
        self._present: list[npt.NDArray[np.bool_] | None] = [None] * len(layers)
        for args, (share, table, spec) in zip(self._args, layers, strict=True):
            assert table.takes(spec), "the experts have a gate, or none"
            routing = share.routing
            asked = np.zeros(table.args.count, np.int32)
            self._kept.append(asked)
            experts = args.experts
            experts.x, experts.slots = locate(share.rows), locate(share.host_slots)
            experts.table, experts.count = table.args.table, table.args.count
            experts.chosen, experts.used = locate(routing.experts), routing.used
            experts.rows, experts.stride = routing.experts.shape
            experts.activation, experts.limit = ACTIVATIONS[spec.activation], spec.limit
            args.asked = locate(asked)
            for name, word in share.words._asdict().items():
                setattr(args, name, locate(word))

    @property
    def busy_s(self) -> float:
        return self._busy.value

    def present(self, layer: int, mask: npt.NDArray[np.bool_]) -> None:
        if mask is not self._present[layer]:
            self._present[layer] = mask
            self._args[layer].present = locate(mask)

    def run(self, first: int) -> int:
        count = len(self._args)
        busy = ctypes.addressof(self._busy)
        return int(
            self._library.lrt_share_layers(
                self._handle, self._args[0], first, count, _PATIENCE_US, busy
            )
        )
