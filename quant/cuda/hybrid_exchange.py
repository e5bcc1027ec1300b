"""Exchanges rows and results between GPU and host in recorded layers whose experts both compute.

No card has run this yet.

A layer's kernels run the router and the experts that are on the GPU, tell the host, and wait until
it has computed the other experts: the host works while the graph runs. Rows, routing and results go
through pinned RAM at fixed addresses, which kernels read and write directly: no copy is a driver
call. The layers of a pass use that RAM in turn.

The host's work must call nothing of the driver that waits for the GPU, which waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.device import Device
from localrt.quant.cuda.experts import CudaExpertTable, run_present, write_tables
from localrt.quant.cuda.launch import arguments, launch, pointers
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.routing import CudaRouting
from localrt.quant.cuda.stream import Recording
from localrt.quant.cuda.tensor import INT32, Tensor, zeros
from localrt.quant.formats.packed import Floats
from localrt.quant.ops.experts import ExpertSpec, ExpertTable, MakeHostWork, Routing, SharedWords

_THREADS = 256
_MOST_THREADS = 1024
_LINE = 16  # words that processors exchange together

_ToHost = arguments("to_host.cu", "ToHost")
_WaitHost = arguments("wait_host.cu", "WaitHost")
_FromHost = arguments("from_host.cu", "FromHost")


class _Exchange:
    """The GPU's slots; and in pinned RAM the rows and the host's slots."""

    def __init__(self, device: Device, rows: Tensor, routing: CudaRouting) -> None:
        slots = len(rows) * routing.used, rows.shape[1]
        self.slots = zeros(*slots, device=device, pool=device.persistent)
        self.rows: Floats = device.pinned(rows.shape, np.float32)
        self.host_slots: Floats = device.pinned(slots, np.float32)


class _Layer:
    """A layer's words and the router's results in pinned RAM, and how often its kernels have run:
    on the GPU, and as the host counts.
    """

    def __init__(self, device: Device, results: int) -> None:
        words: npt.NDArray[np.int32] = device.pinned((2 * _LINE + results,), np.int32)
        self.ticket, self.done = words[:1], words[_LINE : _LINE + 1]
        self.results = words[2 * _LINE :]
        self.turn = np.zeros(1, np.int32)
        self.turn_on_gpu = zeros(1, dtype=INT32, device=device, pool=device.persistent)


class HybridExchange:
    """See ``Share``."""

    def __init__(
        self, recording: Recording, rows: Tensor, routing: CudaRouting, table: ExpertTable
    ) -> None:
        assert isinstance(table, CudaExpertTable), "tables belong to one implementation"
        self._recording = recording
        self._there, self._choice, self.table = rows, routing, table
        self.device = device = rows.device
        shape = (rows.shape[1], routing.used, len(routing.results))
        exchange = recording.shared.get(shape)
        if exchange is None:  # never during capture: the body has run once before
            exchange = recording.shared[shape] = _Exchange(device, rows, routing)
        self._exchange: _Exchange = exchange
        layer = recording.shared.get(table)
        if layer is None:
            layer = recording.shared[table] = _Layer(device, len(routing.results))
        self._layer: _Layer = layer
        stop = recording.shared.get("stop")  # whether GPU or host have given the pass up
        if stop is None:
            stop = recording.shared["stop"] = device.pinned((1,), np.int32)
        self.rows, self.host_slots = exchange.rows, exchange.host_slots
        self.slots = exchange.slots
        self.routing: Routing = routing.on_host(layer.results)
        self.words = SharedWords(layer.turn, layer.ticket, layer.done, stop)
        self._kinds = len(table.kinds)  # kinds that are recorded
        self._send()

    def serve(self, make: MakeHostWork, layer: object) -> None:
        self._recording.beside.setdefault(make, []).append(layer)

    def _send(self) -> None:
        exchange, rows, results = self._exchange, self._there, self._choice.results
        layer = self._layer
        args = _ToHost(
            *pointers(rows, results),
            exchange.rows.ctypes.data,
            layer.results.ctypes.data,
            layer.turn_on_gpu.address,
            layer.ticket.ctypes.data,
            rows.size,
            len(results),
        )
        most = max(rows.size, len(results))
        threads = min(_MOST_THREADS, -(-most // 32) * 32)
        if not self.device.recording:  # it runs now
            layer.turn += 1
        launch(self.device, _TO_HOST, (1, 1, 1), threads, args)

    def compute(self, spec: ExpertSpec) -> None:
        if not self.device.recording:  # it computes now, before any ``begin``
            write_tables(self.device, [self.table])
        run_present(self._there, self._choice, self.table, spec, self.slots)

    def present(self) -> npt.NDArray[np.bool_]:
        table = self.table
        if len(table.kinds) > self._kinds:  # experts of a kind that was not recorded
            self._recording.stale = True
            return table.present & (table.kind_of < self._kinds)
        return table.present

    def take(self) -> Tensor:
        layer, exchange, chosen = self._layer, self._exchange, self._choice.chosen_on_gpu
        entries = self.table.memory(self.device)
        count, width = self.slots.shape
        place = self._choice.used, chosen.strides[0], self._kinds
        wait = _WaitHost(
            *pointers(entries, chosen, layer.turn_on_gpu),
            layer.done.ctypes.data,
            self.words.stop.ctypes.data,
            count if self.device.recording else 0,  # now, the host would not come
            *place,
        )
        launch(self.device, _WAIT_HOST, (1, 1, 1), 32, wait)
        take = _FromHost(
            *pointers(entries, chosen),
            exchange.host_slots.ctypes.data,
            self.slots.address,
            width,
            *place,
        )
        launch(self.device, _FROM_HOST, (-(-width // _THREADS), count, 1), _THREADS, take)
        return self.slots

    def begin(self, shares: Sequence[HybridExchange], tables: Sequence[CudaExpertTable]) -> None:
        write_tables(self.device, tables)
        for share in shares:
            share.words.turn[0] += 1

    def check(self) -> None:
        event = self.device.event()
        assert event is not None, "only a GPU records"
        event.record()
        if event.query() and self.words.ticket[0] != self.words.turn[0]:
            raise AssertionError("the graph has ended without a word to the host")

    def give_up(self) -> None:
        self.words.stop[0] = 1
        self.device.synchronize()
        self.words.stop[0] = 0


_TO_HOST = Program.of("to_host")
_WAIT_HOST = Program.of("wait_host")
_FROM_HOST = Program.of("from_host")
