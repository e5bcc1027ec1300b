"""Top-k gating on a GPU: a router's logits, the choice of experts, and the sum of their results.

The choice stays on the GPU, for kernels that start before the host knows it; the host copies it on
first use. A row's bits depend on that row alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from localrt.quant.cuda.device import Device, Event
from localrt.quant.cuda.launch import arguments, declarations, launch, pointers
from localrt.quant.cuda.products import OUT
from localrt.quant.cuda.programs import Program
from localrt.quant.cuda.tensor import FLOAT32, INT32, Tensor, empty, upload
from localrt.quant.ops.experts import RouterSpec, Routing


class CudaRouting(Routing):
    """See ``Routing``; ``results`` are those of ``choose``.

    ``chosen_on_gpu`` (R, K) int32 and ``weights_on_gpu`` (R, K) float32 are on the GPU.
    """

    def __init__(self, results: Tensor, rows: int, ranked: int, used: int) -> None:
        plane = rows * ranked
        self._results, self._shape = results, (rows, ranked, used)
        self.chosen_on_gpu = results[:plane].view(rows, ranked)[:, :used]
        self.weights_on_gpu = results[2 * plane :].typed(FLOAT32).view(rows, used)
        self._away = True
        self._copied: Event | None = None  # the event after which ``_host`` has the results
        self._host: npt.NDArray[np.int32] | None = None

    def copy_to(self, host: npt.NDArray[np.int32], copied: Event | None) -> None:
        """``host`` has the results once the event ``copied`` has happened (None: now)."""
        self._host, self._copied = host, copied

    def on_host(self, values: npt.NDArray[np.int32]) -> Routing:
        """A routing whose arrays are views of ``values``: results in RAM, or a buffer for them."""
        rows, ranked, used = self._shape
        plane = rows * ranked
        return Routing(
            values[:plane].reshape(rows, ranked),
            values[plane : 2 * plane].view(np.float32).reshape(rows, ranked),
            values[2 * plane :].view(np.float32).reshape(rows, used),
        )

    @property
    def results(self) -> Tensor:
        """All results, on the GPU: (n,) int32."""
        return self._results

    @property
    def away(self) -> bool:
        return self._away

    @property
    def rows(self) -> int:
        return self._shape[0]

    @property
    def used(self) -> int:
        return self._shape[2]

    @property
    def experts(self) -> npt.NDArray[np.int32]:
        rows, ranked, _ = self._shape
        return self._read()[: rows * ranked].reshape(rows, ranked)

    @property
    def scores(self) -> npt.NDArray[np.float32]:
        rows, ranked, _ = self._shape
        plane = rows * ranked
        return self._read()[plane : 2 * plane].view(np.float32).reshape(rows, ranked)

    @property
    def weights(self) -> npt.NDArray[np.float32]:
        rows, ranked, used = self._shape
        return self._read()[2 * rows * ranked :].view(np.float32).reshape(rows, used)

    @property
    def chosen(self) -> npt.NDArray[np.int32]:
        return self.experts[:, : self.used]

    def _read(self) -> npt.NDArray[np.int32]:
        if self._away:
            if self._host is None:
                self._host = self._results.to_host()
            elif self._copied is not None:
                self._copied.synchronize()
            self._away = False
        assert self._host is not None
        return self._host


def on_gpu(routing: Routing, device: Device) -> CudaRouting:
    """``routing`` in GPU memory, copied if it is on the host."""
    if isinstance(routing, CudaRouting):
        return routing
    parts = routing.experts, routing.scores.view(np.int32), routing.weights.view(np.int32)
    flat = np.concatenate([part.reshape(-1) for part in parts])
    rows, ranked = routing.experts.shape
    return CudaRouting(upload(flat, device), rows, ranked, routing.used)


MOST_EXPERTS = declarations("choose.cu").constants["MOST_EXPERTS"]
"""Most experts of a layer."""
_THREADS = 256
_MOST_PLACES = declarations("put.cu").constants["MOST_PLACES"]
_SCORINGS = {"softmax": 0, "sigmoid": 1, "softmax-chosen": 2}

_Router = arguments("router.cu", "Router")
_Put = arguments("put.cu", "Put")
_Combine = arguments("combine.cu", "Combine")
_Choose = arguments("choose.cu", "Choose")


def router_logits(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """out (R, E) = x (R, D), float32, @ gate.T; gate (E, D) is bf16 or float32."""
    rows, width = x.shape
    args = _Router(*pointers(x, gate, out), gate.shape[0], width, out.strides[0])
    program = Program.of("router", GATE_IN=OUT[gate.dtype])
    launch(x.device, program, (-(-gate.shape[0] // 8), rows, 1), _THREADS, args)


def choose(
    logits: Tensor,
    gate_bias: Tensor | None,
    choice_bias: Tensor | None,
    spec: RouterSpec,
    factors: Tensor | None = None,
) -> Tensor:
    """Choose each row's experts by its logits (R, E), float32, plus ``gate_bias`` (E,). ``factors``
    (E,) multiply the weights of the chosen.

    Returns int32: experts (R, W), then scores (R, W) and weights (R, K), both float32 bits.
    Non-finite logits give non-finite weights. There are at most ``MOST_EXPERTS`` experts.
    """
    rows, count = logits.shape
    assert count <= MOST_EXPERTS, "each has a thread of a block"
    plane = rows * spec.ranked
    results = empty(2 * plane + rows * spec.used, dtype=INT32, device=logits.device)
    address = results.address
    args = _Choose(
        *pointers(logits, gate_bias, choice_bias, factors),
        address,
        address + 4 * plane,
        address + 8 * plane,
        count,
        spec.used,
        spec.ranked,
        _SCORINGS[spec.scoring],
        spec.normalize,
        spec.groups,
        spec.used_groups,
        min(spec.group_top, count // spec.groups),
        spec.scale,
        spec.softcap or 0.0,
    )
    launch(logits.device, _CHOOSE, (rows, 1, 1), -(-count // 32) * 32, args)
    return results


def put_rows(rows: Tensor, places: npt.NDArray[np.intp], out: Tensor) -> None:
    """Write rows (n, D) to the rows ``places`` (n,) of ``out``; all float32 and contiguous."""
    width = out.shape[1]
    for first in range(0, len(places), _MOST_PLACES):
        some = places[first : first + _MOST_PLACES]
        args = _Put(rows.address + 4 * width * first, out.address, width)
        np.ctypeslib.as_array(args.places)[: len(some)] = some
        launch(out.device, _PUT, (-(-width // _THREADS), len(some), 1), _THREADS, args)


def combined(slots: Tensor, weights: Tensor | None, shared: Tensor | None, used: int) -> Tensor:
    """The sum over k of slots (R * K, D), in order, plus shared (R, D). Slots are multiplied by
    ``weights`` (R, K) if they are given; K is ``used``.
    """
    rows, width = len(slots) // used, slots.shape[1]
    y = empty(rows, width, device=slots.device)
    args = _Combine(*pointers(slots, weights, shared, y), used, width)
    launch(y.device, _COMBINE, (-(-width // _THREADS), rows, 1), _THREADS, args)
    return y


_CHOOSE = Program.of("choose")
_COMBINE = Program.of("combine")
_PUT = Program.of("put")
