"""How long one unit takes on one resource of a machine: the only place where rates become seconds.

Disk and link are bytes over bandwidth; the CPU follows its measured kernels, and so does a GPU that
was measured; else it is a roofline. Nothing is faster than
its bytes over the rate of their memory, whatever a kernel measured at another time. It knows units
and rates, not how tasks overlap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

from localrt.offload.account import PACKED_ROWS
from localrt.offload.experts.scheduler import ExpertCosts, Ready, schedule
from localrt.offload.placement import PlacedUnit, UnitKind
from localrt.offload.planner.machine import MachineProfile
from localrt.offload.shapes import ModelShape
from localrt.quant.ops.kv_formats import KvFormat

# What the seconds of a unit depend on: format, macs, bytes, kind, layer of attention, rows, on_gpu.
_Key: TypeAlias = tuple[str, int, int, UnitKind, int | None, int, bool]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a pass of ``rows`` rows on ``machine`` where ``held`` tokens are in the cache.

    The rows belong to ``sequences``, each with a cache of its own. ``expert_hits`` is the share of
    the experts asked for that are in memory, where that is known better than from their number.
    """

    shape: ModelShape
    machine: MachineProfile
    rows: int = 1
    held: int = 0
    sequences: int = 1
    kv_format: KvFormat = "bf16"
    expert_hits: float | None = None
    _cached: dict[_Key, float] = field(default_factory=dict, repr=False)

    def copy(self, nbytes: float) -> float:
        """Over the link."""
        assert self.machine.link_bytes_s is not None, "there is no link without a GPU"
        return nbytes / self.machine.link_bytes_s

    def crossing(self) -> float:
        """Activations from one device to the other."""
        if self.machine.link_bytes_s is None:
            return 0.0
        return self.machine.link_latency_s + self.copy(4.0 * self.rows * self.shape.hidden)

    def reading_load(self, nbytes: float) -> float:
        """What reading takes from the CPU's arithmetic: its threads are shared."""
        return nbytes * self.machine.ssd_cpu_s / self.machine.threads

    def cpu(self, unit: PlacedUnit, rows: int | None = None) -> float:
        """Computing a unit on the CPU; ``rows`` where an expert sees fewer than the pass has."""
        return self._seconds(unit, self.rows if rows is None else rows, on_gpu=False)

    def gpu(self, unit: PlacedUnit, rows: int | None = None) -> float:
        """Computing a unit on the GPU."""
        return self._seconds(unit, self.rows if rows is None else rows, on_gpu=True)

    def compute(self, unit: PlacedUnit, *, on_gpu: bool, rows: int | None = None) -> float:
        """On either."""
        return self.gpu(unit, rows) if on_gpu else self.cpu(unit, rows)

    def per_pass(self) -> float:
        """On the CPU beside all units: the embedding's row, sampling, the loop itself."""
        return 1e-4 + self.machine.ssd_latency_s + self.machine.token_s * self.shape.vocab

    def kv_held(self, layer: int) -> int:
        """Bytes of keys and values that attention reads, and of a state, read and written."""
        kept = self.shape.kv[layer]
        return self.sequences * kept.held_nbytes(self.kv_format, self.held)

    def touched(self, use: float) -> tuple[float, int]:
        """The share of passes that need an expert of this ``use``, and the rows it then sees."""
        share = 1 - (1 - use) ** self.rows
        return share, max(1, round(self.rows * use / share)) if share else 1

    def _seconds(self, unit: PlacedUnit, rows: int, *, on_gpu: bool) -> float:
        if unit.kind == "head" and rows > PACKED_ROWS:
            rows = 1  # all rows pass the layers, but only one of a prompt's the head
        # Units of one class take the same time; there may be thousands.
        layer = unit.layer if unit.kind == "attention" else None
        key = (unit.format, unit.macs, unit.nbytes, unit.kind, layer, rows, on_gpu)
        seconds = self._cached.get(key)
        if seconds is None:
            seconds = self._gpu(unit, rows) if on_gpu else self._cpu(unit, rows)
            self._cached[key] = seconds
        return seconds

    def _cpu(self, unit: PlacedUnit, rows: int) -> float:
        if unit.macs == 0:
            return 0.0
        machine = self.machine
        seconds = max(
            unit.macs * machine.kernel(unit.format).at(rows), unit.nbytes / machine.ram_bytes_s
        )
        seconds += machine.call_s
        if unit.kind == "attention" and unit.layer is not None:
            macs = self._attention_macs(unit.layer, rows)
            rate = machine.attention.at(min(rows, machine.attention.rows[-1]))
            reading = self.kv_held(unit.layer) / machine.ram_bytes_s
            seconds += max(macs * rate, reading)
        return seconds

    def _gpu(self, unit: PlacedUnit, rows: int) -> float:
        gpu = self.machine.gpu
        assert gpu is not None, "there is no GPU"
        if unit.macs == 0:
            return 0.0
        seconds_of = partial(kernel_seconds, bytes_s=gpu.bytes_s, flops=gpu.flops)
        rate = gpu.kernel(unit.format)
        if rate is None:
            seconds = seconds_of(unit.nbytes, unit.macs, rows, unpacks=unit.kind != "expert")
        elif unit.kind == "expert" and rows > PACKED_ROWS:  # unpacked on the way
            seconds = unit.macs * rate.at(PACKED_ROWS) * rows / PACKED_ROWS
        else:
            seconds = unit.macs * rate.at(rows)
        seconds = max(seconds, unit.nbytes / gpu.bytes_s)
        if unit.kind == "attention" and unit.layer is not None:
            nbytes, macs = self.kv_held(unit.layer), self._attention_macs(unit.layer, rows)
            seconds += seconds_of(nbytes, macs, 1)
        return gpu.call_s + seconds

    def _attention_macs(self, layer: int, rows: int) -> float:
        """Each row sees what its sequence holds, and the rows before it."""
        kept, new = self.shape.kv[layer], max(1, rows // self.sequences)
        return rows * kept.held_macs(self.held + (new + 1) / 2)


def expert_costs(costs: Costs) -> ExpertCosts | None:
    """Of the largest expert on ``costs``' machine; None without experts, or without a GPU.

    What copying takes from the CPU's kernels, and they from it, is measured; else it is what both
    read of the same memory, and copies lose nothing.
    """
    experts, machine = costs.shape.routed, costs.machine
    if not experts or machine.gpu is None or machine.link_bytes_s is None:
        return None
    largest = max(experts, key=lambda unit: unit.nbytes)
    gpu = machine.gpu
    load = machine.link_bytes_s / machine.ram_bytes_s if gpu.busy_cpu is None else 1 - gpu.busy_cpu
    return ExpertCosts(
        cpu=partial(costs.cpu, largest),
        gpu=partial(costs.gpu, largest),
        fetch=costs.copy(largest.nbytes) / (gpu.busy_link or 1.0),
        link_load=min(0.5, load),
    )


def layer_seconds(costs: Costs, hybrid: ExpertCosts, use: float) -> tuple[float, float]:
    """Seconds of an equal part of a layer's experts: with none of them on the GPU, and with all.

    The activations' ways to the CPU and back are in the former.
    """
    assert costs.shape.experts is not None, "they are of a mixture"
    share, rows = costs.touched(use)
    count = max(1, round(costs.shape.experts.count * share))
    way = costs.crossing()
    ready = Ready(cpu=way, cpu_back=way)
    none, all_of_them = (
        schedule([rows] * count, [there] * count, hybrid, ready).end for there in (False, True)
    )
    return none / count, all_of_them / count


def kernel_seconds(
    nbytes: float, macs: float, rows: int, *, bytes_s: float, flops: float, unpacks: bool = True
) -> float:
    """Seconds of a unit's kernels on a GPU: ``rows`` rows with ``macs`` packed weights in
    ``nbytes``, without starting them.

    The larger of bytes over bandwidth and operations over arithmetic; ``bytes_s`` and ``flops`` are
    what kernels reach of the GPU. Kernels on packed weights take up to ``PACKED_ROWS`` rows at
    once; for more a matrix is unpacked to bf16 first (where it ``unpacks``), which is another pass
    over it, and multiplied by the vendor's library. An expert's long passes unpack on the way.
    """
    computing = 2 * macs * rows / flops
    if rows <= PACKED_ROWS or not unpacks:
        return max(nbytes / bytes_s, computing)
    dense = 2 * macs
    return (nbytes + dense) / bytes_s + max(dense / bytes_s, computing)
