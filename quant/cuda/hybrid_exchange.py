"""Exchanges rows and results between GPU and host in a recorded layer whose experts are computed by
both.

A replay runs the router and the experts that are then on the GPU, and reads the results of the
host's experts. Rows and routing go through pinned RAM at fixed addresses, which kernels read and
write directly: no copy is a driver call. The layers of a pass use that RAM in turn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.experts import CudaExpertTable, run_present
from localrt.quant.cuda.launch import arguments, launch, pointers
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.routing import CudaRouting
from localrt.quant.cuda.stream import Recording
from localrt.quant.cuda.tensor import Tensor, zeros
from localrt.quant.cuda.weight import ExpertTable
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.experts import ExpertSpec, Routing

_THREADS = 256

_ToHost = arguments("to_host.cu", "ToHost")
_FromHost = arguments("from_host.cu", "FromHost")


class _Exchange:
    """The GPU's slots; and in RAM the rows, the router's results, and the host's slots."""

    def __init__(self, device: Device, rows: Tensor, routing: CudaRouting) -> None:
        slots = len(rows) * routing.used, rows.shape[1]
        self.slots = zeros(*slots, device=device, pool=device.persistent)
        self.rows: Floats = device.pinned(rows.shape, np.float32)
        self.results: npt.NDArray[np.int32] = device.pinned(routing.results.shape, np.int32)
        self.host_slots: Floats = device.pinned(slots, np.float32)
        event = device.event()
        assert event is not None, "only a GPU records"
        self.event = event


class HybridExchange:
    """See ``Share``."""

    def __init__(
        self, recording: Recording, rows: Tensor, routing: CudaRouting, table: ExpertTable
    ) -> None:
        assert isinstance(table, CudaExpertTable), "tables belong to one implementation"
        self._recording, self.cut = recording, recording.cut
        self._there, self._choice, self._table = rows, routing, table
        self._device = device = rows.device
        shape = (rows.shape[1], routing.used, len(routing.results))
        exchange = recording.shared.get(shape)
        if exchange is None:  # never during capture: the body has run once before
            exchange = recording.shared[shape] = _Exchange(device, rows, routing)
        self._exchange: _Exchange = exchange
        self.rows, self.host_slots = exchange.rows, exchange.host_slots
        # Not shared: the host may write it while the GPU reads an earlier layer's slots.
        filled = recording.shared.get(table)
        if filled is None:
            filled = recording.shared[table] = device.pinned((len(exchange.slots),), np.int32)
        self.filled: npt.NDArray[np.int32] = filled
        self.slots = exchange.slots
        self.routing: Routing = routing.on_host(exchange.results)
        self._kinds = len(table.kinds)  # kinds that are recorded
        self._send()

    def _send(self) -> None:
        exchange, rows, results = self._exchange, self._there, self._choice.results
        args = _ToHost(
            *pointers(rows, results),
            exchange.rows.ctypes.data,
            exchange.results.ctypes.data,
            rows.size,
            len(results),
        )
        most = max(rows.size, len(results))
        launch(self._device, _TO_HOST, (-(-most // _THREADS), 1, 1), _THREADS, args)

    def compute(self, spec: ExpertSpec) -> None:
        run_present(self._there, self._choice, self._table, spec, self.slots)

    def begin(self) -> npt.NDArray[np.bool_]:
        self._exchange.event.record()
        table = self._table
        table.entries(self._device)
        if len(table.kinds) > self._kinds:  # experts of a kind that was not recorded
            self._recording.stale = True
            return table.present & (table.kind_of < self._kinds)
        return table.present

    def receive(self) -> None:
        self._exchange.event.synchronize()

    def take(self) -> Tensor:
        count, width = self.slots.shape
        args = _FromHost(
            self.host_slots.ctypes.data, self.filled.ctypes.data, self.slots.address, width
        )
        launch(self._device, _FROM_HOST, (-(-width // _THREADS), count, 1), _THREADS, args)
        return self.slots


_TO_HOST = Program.of("to_host")
_FROM_HOST = Program.of("from_host")
