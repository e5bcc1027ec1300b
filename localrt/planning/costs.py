"""Computes the seconds of a unit on one resource; rates become seconds only here.

Disk and link take bytes over bandwidth. The CPU takes the time of its measured kernels, and so does
a measured GPU; another GPU takes a roofline estimate, with the instructions that products of packed
weights issue. No unit is faster than its bytes over the memory's bandwidth, even if its kernel was
measured faster. This module does not know how tasks overlap.

In passes of many rows, the GPU computes the CPU's units if that pays off: a CPU that is fast enough
for a token is slow for a prompt, for which all rows share the cost of the copies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from localrt.offload.account import PACKED_ROWS
from localrt.offload.experts.cache import ExpertCosts
from localrt.offload.placement import LEAST_GPU_ROWS, PlacedUnit, Placement, UnitKind, Where
from localrt.offload.shapes import ModelShape
from localrt.planning.machine import GpuProfile, MachineProfile
from localrt.quant.cuda.formats import PRODUCT_MACS, TYPES, product_instructions
from localrt.quant.ops.kv_formats import KvFormat

# Starting to copy an expert is taken to cost the host as much time as this many shared layers.
_COPY_LAYERS = 2
# Overhead besides kernels on an H100 limited to 8 GB (docs/gpu.md): the
# host's time between two tokens, and a visit to the CPU between units of the GPU.
_GPU_PASS_S = 1e-3
_VISIT_S = 6e-4
# The seconds of a unit depend on: format, macs, bytes, kind, layer (attention only), rows, on_gpu.
_Key: TypeAlias = tuple[str, int, int, UnitKind, int | None, int, bool]


Resource = Literal["ssd", "link", "cpu", "gpu"]
RESOURCES: tuple[Resource, ...] = ("ssd", "link", "cpu", "gpu")
READ_CHUNK = 2 << 20
"""Bytes of one request to the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """The seconds of a pass, and the bytes moved over each path: a formula's or a replay's.

    ``busy``: each resource's seconds of work per pass. ``chain``: seconds of computing and
    crossing, which cannot overlap. ``waits``: seconds per pass for which computing waited, by
    cause.
    """

    seconds: float
    busy: Mapping[Resource, float]
    chain: float
    nbytes: Mapping[str, float]
    waits: Mapping[str, float]
    total_seconds: float = 0.0

    @property
    def bound(self) -> float:
        """The least seconds that any schedule of this placement can take."""
        return max(self.busy["ssd"], self.busy["link"], self.chain)

    @property
    def efficiency(self) -> float:
        """The share of the pass for which the busiest resource works."""
        return max(self.busy.values()) / self.seconds if self.seconds else 1.0


def disk_share(room: int) -> float:
    """Return the share of a disk's rate that is reached if the ring has ``room`` besides its
    largest unit.

    Two requests are in flight at a time. If there is room for only one, the disk idles in between:
    a measured loss of 9 %.
    """
    return 1.0 - 0.13 * max(0.0, 1.0 - room / (3 * READ_CHUNK))


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a pass of ``rows`` rows on ``machine`` with ``held`` tokens in the cache.

    The rows belong to ``sequences``, each with its own cache. ``expert_hits`` is the measured share
    of used experts that are in memory; None estimates it from the placement.
    """

    shape: ModelShape
    machine: MachineProfile
    rows: int = 1
    held: int = 0
    sequences: int = 1
    kv_format: KvFormat = "bf16"
    expert_hits: float | None = None
    _cached: dict[_Key, float] = field(default_factory=dict, init=False, repr=False)

    @property
    def link_bytes_s(self) -> float:
        """The rate of copies of units over the link; 0 without a GPU."""
        return self.machine.link_bytes_s or 0.0

    def copy(self, nbytes: float) -> float:
        """Return the seconds of copying ``nbytes`` over the link."""
        return nbytes / self.link_bytes_s

    def of(self, placement: Placement) -> Costs:
        """Return the costs of the model as placed."""
        if not placement.split or any(unit.only is not None for unit in self.shape.units):
            return self
        return replace(self, shape=self.shape.split(placement.split))

    def of_rows(self, rows: int) -> Costs:
        """Return the costs of a prompt's first pass, of ``rows`` rows of one sequence."""
        return Costs(shape=self.shape, machine=self.machine, rows=rows, kv_format=self.kv_format)

    def crossing(self, width: int | None = None) -> float:
        """Return the seconds of moving the activations (rows of ``width`` elements) to the other
        device.
        """
        if self.machine.link_bytes_s is None:
            return 0.0
        width = self.shape.sizes.hidden if width is None else width
        return self.machine.link_latency_s + self.copy(4.0 * self.rows * width)

    def splitting(self) -> float:
        """Return the overhead of an MLP that is split between GPU and CPU: the host's time, and
        moving input, inner values and output.
        """
        return self.sharing() + self.crossing(2 * self.shape.sizes.hidden + self.shape.sizes.inner)

    def of_host(self, seconds: float) -> float:
        """Return ``seconds`` of the host's work for a GPU; 0 without a GPU or with an ideal one."""
        gpu = self.machine.gpu
        return seconds if gpu is not None and gpu.call_s else 0.0

    def sharing(self) -> float:
        """Return the host's seconds for a layer that CPU and GPU share, if the host starts both."""
        return self.of_host(self.machine.shared_s)

    def sharing_experts(self, unit: PlacedUnit) -> float:
        """Return the host's seconds for a layer of experts like ``unit`` that CPU and GPU share.
        Passes of a few rows are recorded, if kernels read the experts' format.
        """
        if self.rows > PACKED_ROWS or unit.unpacked:
            return self.sharing()
        return self.of_host(self.machine.recorded_s)

    def streaming(self, unit: PlacedUnit) -> float:
        """Return the host's seconds for a dense unit streamed to the GPU: a layer's two units take
        as long as one shared layer. Pieces are counted with their MLP.
        """
        if unit.only is not None:
            return 0.0
        return self.sharing() / 2 / self._calling(unit)

    def visit(self) -> float:
        """Return the host's seconds for units that the CPU computes between the GPU's."""
        return self.of_host(_VISIT_S)

    def beside(self) -> tuple[float, float]:
        """Return the shares of their rates that copies and the CPU reach while both read RAM.

        Without measurements, the CPU is assumed to lose the bandwidth that copies use, and copies
        nothing.
        """
        gpu, machine = self.machine.gpu, self.machine
        if gpu is None or machine.link_bytes_s is None:
            return 1.0, 1.0
        keeps = 1 - machine.link_bytes_s / machine.ram_bytes_s
        return gpu.busy_link or 1.0, max(0.5, keeps if gpu.busy_cpu is None else gpu.busy_cpu)

    def reading_load(self, nbytes: float) -> float:
        """Return the seconds by which reading slows arithmetic on the same threads."""
        return nbytes * self.machine.ssd_cpu_s / self.machine.threads

    def cpu(self, unit: PlacedUnit, rows: int | None = None) -> float:
        """Return a unit's seconds on the CPU; ``rows`` if an expert has fewer than the pass."""
        return self.compute(unit, on_gpu=False, rows=rows)

    def gpu(self, unit: PlacedUnit, rows: int | None = None) -> float:
        """Return a unit's seconds on the GPU."""
        return self.compute(unit, on_gpu=True, rows=rows)

    def compute(self, unit: PlacedUnit, *, on_gpu: bool, rows: int | None = None) -> float:
        """Return a unit's seconds on the GPU or the CPU."""
        rows = self.rows if rows is None else rows
        if unit.kind == "head" and rows > PACKED_ROWS:
            rows = 1  # in prefill, only one row needs the head
        # Units of one class take the same time; there may be thousands.
        layer = unit.layer if unit.kind == "attention" else None
        key = (unit.format, unit.macs, unit.nbytes, unit.kind, layer, rows, on_gpu)
        seconds = self._cached.get(key)
        if seconds is None:
            seconds = self._gpu(unit, rows) if on_gpu else self._cpu(unit, rows)
            self._cached[key] = seconds
        return seconds

    def per_pass(self) -> float:
        """Return the CPU's seconds outside units: the embedding's row, sampling, the loop."""
        own = 1e-4 + self.machine.ssd_latency_s + self.machine.token_s * self.shape.sizes.vocab
        return own + self.of_host(_GPU_PASS_S)

    def kv_held(self, layer: int) -> int:
        """Return the bytes that attention reads of the KV cache, or of a recurrent state."""
        kept = self.shape.kv[layer]
        return self.sequences * kept.held_nbytes(self.kv_format, self.held)

    def touched(self, use: float) -> tuple[float, int]:
        """Return the share of passes that use an expert of this ``use``, and its rows in those."""
        share = 1 - (1 - use) ** self.rows
        return share, max(1, round(self.rows * use / share)) if share else 1

    def _cpu(self, unit: PlacedUnit, rows: int) -> float:
        if unit.macs == 0:
            return 0.0
        machine = self.machine
        seconds = max(
            unit.macs * machine.kernel(unit.format).at(rows), unit.nbytes / machine.ram_bytes_s
        )
        seconds += machine.call_s / self._calling(unit)
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
        read, rate = unit.unpacked or unit.nbytes, gpu.kernel(unit.format)
        if rate is None and gpu.instructions_s is not None and unit.format in TYPES:
            products = unit.macs * rows / PRODUCT_MACS
            seconds = products * product_instructions(unit.format) / gpu.instructions_s
        elif rate is None:
            unpacks = rows > PACKED_ROWS and unit.kind != "expert" and unit.format in TYPES
            seconds = _bf16_seconds(unit, rows, gpu, unpacks=unpacks)
        elif unit.kind == "expert" and rows > PACKED_ROWS:  # its kernel unpacks on the fly
            seconds = unit.macs * rate.at(PACKED_ROWS) * rows / PACKED_ROWS
        else:
            seconds = unit.macs * rate.at(rows)
        seconds = max(seconds, read / gpu.bytes_s)
        if unit.kind == "attention" and unit.layer is not None:
            nbytes, macs = self.kv_held(unit.layer), self._attention_macs(unit.layer, rows)
            seconds += max(nbytes / gpu.bytes_s, 2 * macs / (gpu.attention_flops or gpu.flops))
        return gpu.call_s / self._calling(unit) + seconds

    def _calling(self, unit: PlacedUnit) -> float:
        """Count the units that share a call: a layer's experts in a pass, or the head's slices."""
        if unit.kind == "head":
            return float(sum(step[0].kind == "head" for step in self.shape.steps))
        if unit.kind != "expert" or self.shape.experts is None:
            return 1.0
        return max(1.0, self.shape.experts.count * self.touched(unit.use)[0])

    def _attention_macs(self, layer: int, rows: int) -> float:
        """Count the MACs: each row attends to its sequence's cache and the rows before it."""
        kept, new = self.shape.kv[layer], max(1, rows // self.sequences)
        return rows * kept.held_macs(self.held + (new + 1) / 2)


def expert_costs(costs: Costs) -> ExpertCosts | None:
    """Return the costs of the largest expert; None without experts, or without a GPU."""
    experts, machine = costs.shape.routed, costs.machine
    if not experts or machine.gpu is None or machine.link_bytes_s is None:
        return None
    largest = max(experts, key=lambda unit: unit.nbytes)
    link, cpu = costs.beside()
    fetch = costs.copy(largest.nbytes) / link
    return ExpertCosts(
        cpu=costs.cpu(largest, 1),
        gpu=costs.gpu(largest, 1),
        fetch=fetch,
        slowdown=_COPY_LAYERS * costs.sharing() + (1 - cpu) * fetch,
    )


def layer_seconds(costs: Costs, unit: PlacedUnit) -> tuple[float, float]:
    """Return the seconds per used expert of a layer of experts like ``unit``: with no expert on the
    GPU, and with all on it.

    The former includes moving the activations to the CPU and back, and the host's time.
    """
    assert costs.shape.experts is not None, "they are of a mixture"
    share, rows = costs.touched(unit.use)
    count = max(1, round(costs.shape.experts.count * share))
    known = 2 * costs.crossing() + costs.sharing_experts(unit)
    return known / count + costs.cpu(unit, rows), costs.gpu(unit, rows)


def _bf16_seconds(unit: PlacedUnit, rows: int, gpu: GpuProfile, *, unpacks: bool) -> float:
    """Return the seconds of a product in 16-bit arithmetic. If it ``unpacks``, the matrix is first
    unpacked, in another pass over it.
    """
    computing = 2 * unit.macs * rows / gpu.flops
    if not unpacks:
        return max(unit.nbytes / gpu.bytes_s, computing)
    dense = 2 * unit.macs
    return (unit.nbytes + dense) / gpu.bytes_s + max(dense / gpu.bytes_s, computing)


# -- passes of many rows ---------------------------------------------------------------------------

_ROWS = (LEAST_GPU_ROWS, 80, 96, 128, 160, 192, 256, 320, 384, 512, 768, 1024, 1536, 2048)


def with_long_passes(costs: Costs, placement: Placement) -> Placement:
    """Set the fewest rows from which passes compute the CPU's MLPs or experts on the GPU, if that
    pays off.

    These are the MLPs that the GPU's ring can hold, and a mixture's experts. Attention stays where
    its keys and values are; only one row of a prompt passes the head.
    """
    shape, where = costs.shape, placement.where
    if costs.machine.gpu is None or not placement.uses_gpu:
        return placement
    if shape.experts is not None:
        routers = (where[unit.name] for unit in shape.units if unit.kind == "mlp")
        if not all(place.on_gpu for place in routers):  # a layer stays with its router
            return placement
        crossing = frozenset[str]()
    else:
        copied = {u.layer: u.nbytes for u in shape.units if u.only is Where.LINK}
        crossing = frozenset(
            unit.name
            for unit in shape.units
            if unit.kind == "mlp"
            and not where[unit.name].on_gpu
            and unit.nbytes + copied.get(unit.layer, 0) <= placement.vram_ring
        )
        if not crossing:
            return placement
    rows = _gpu_rows(costs, where, crossing)
    if not LEAST_GPU_ROWS <= rows <= placement.prefill_rows:
        return placement
    return replace(placement, gpu_rows=rows, crossing=crossing)


def _gpu_rows(costs: Costs, where: Mapping[str, Where], crossing: frozenset[str]) -> int:
    """Return the fewest rows for which copying weights to the GPU is no slower than the CPU.

    0 if there are none. Copies and the GPU's work overlap; the CPU's and the GPU's work alternate,
    except on the experts of a mixture. Those on the SSD are never copied. A faster link never gives
    more rows.
    """
    alike: Counter[tuple[PlacedUnit, Where, bool]] = Counter()
    first: dict[tuple[object, ...], PlacedUnit] = {}
    for unit in costs.shape.units:
        place = where[unit.name]
        if not unit.macs:
            continue
        layer = unit.layer if unit.kind == "attention" else None
        key = (unit.kind, unit.nbytes, unit.macs, unit.format, unit.use, layer)
        crosses = unit.name in crossing or (unit.kind == "expert" and place is Where.RAM)
        alike[first.setdefault(key, unit), place, crosses] += 1
    for rows in _ROWS:
        seconds = costs.of_rows(rows)
        copying = stays = held = by_cpu = by_gpu = 0.0
        for (unit, place, crosses), count in alike.items():
            share, each = 1.0, rows
            if unit.kind == "expert":
                share, each = seconds.touched(unit.use)
            used = count * share
            if crosses:
                by_cpu += used * seconds.cpu(unit, each)
                by_gpu += used * seconds.gpu(unit, each)
            elif unit.kind == "expert" and place.on_gpu:
                held += used * seconds.gpu(unit, each)
            else:
                stays += used * seconds.compute(unit, on_gpu=place.on_gpu, rows=each)
            if crosses or place.copied:
                copying += used * seconds.copy(unit.nbytes)
        if max(copying, stays + held + by_gpu) <= stays + max(held, by_cpu):
            return rows
    return 0
