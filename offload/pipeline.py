"""Puts a store's units where a placement wants them, and makes the decoder that runs them.

Everything that a pipeline holds is made here and freed by the decoder's ``close``: files, reader
threads, ring, buffers. It does not choose the placement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from localrt.models.checkpoints.store_checkpoint import StoreCheckpoint
from localrt.models.decoder import DecoderConfig
from localrt.models.registry import find_architecture
from localrt.models.units import EMBEDDING
from localrt.models.weights import WeightLoader
from localrt.offload.cpu_lane import CpuLane, read_units
from localrt.offload.decoder import PlacedDecoder
from localrt.offload.files import FileReader, ReadMode, StoreFiles
from localrt.offload.placement import Placement, Where
from localrt.offload.ram_budget import RamBudget
from localrt.offload.ring import Ring, aligned_buffer
from localrt.offload.row_table import RowTable
from localrt.offload.stages import Stage, list_stages
from localrt.offload.trace import Trace
from localrt.offload.unit_parts import PartBuilder, UnitMemory
from localrt.offload.unit_reader import UnitReader
from localrt.quant.ops.protocol import Ops, Vector

__all__ = ["open_pipeline"]


def open_pipeline(
    store: StoreCheckpoint,
    ops: Ops,
    config: DecoderConfig,
    placement: Placement,
    *,
    mode: ReadMode,
    budget: int,
    files: FileReader | None = None,
    trace: Trace | None = None,
    verify: bool = True,
    stall_s: float = 60.0,
    on_bytes: Callable[[int], None] | None = None,
) -> PlacedDecoder:
    """Load what is resident, start reading what is streamed.

    ``budget`` bounds resident units and KV caches together, in bytes. ``files`` stands in for the
    store's own. ``on_bytes`` gets the bytes of resident units as they are read, and may raise.

    Raises:
        CheckpointError: a file is truncated or damaged.
    """
    units = {unit.name: unit for unit in store.manifest.units}
    stages = list_stages(store.manifest.units, placement.where)
    names = dict.fromkeys(unit.file for unit in units.values())
    trace = trace or Trace()
    opened = files or StoreFiles(store.path, names, direct=mode.direct)
    rows = StoreFiles(store.path, names)  # a row is no whole page: never direct
    reader: UnitReader | None = None
    lane: CpuLane | None = None
    table: RowTable | None = None

    def close() -> None:
        if lane is not None:
            lane.close()
        if table is not None:
            table.close()
        opened.close()
        rows.close()

    try:
        if placement.ram_ring:
            ring = Ring(placement.ram_ring, mode.block)
            reader = UnitReader(opened, ring, threads=mode.threads, trace=trace, stall_s=stall_s)
        builder = PartBuilder(store, config, find_architecture(store.architecture).names, ops)
        lane = CpuLane(ops, builder, trace, reader, path=store.path, verify=verify)
        how: dict[str, Any] = {
            "threads": mode.threads,
            "block": mode.block,
            "on_bytes": on_bytes,
        }
        lane.stream([stage for stage in stages if stage.where.read])
        load_s = read_units(
            opened,
            [stage for stage in stages if stage.where is Where.RAM],
            lane.put,
            **how,
        )
        if placement.where.get("embedding") is Where.RAM and "embedding" in units:
            read_units(opened, [Stage(units["embedding"], "head", Where.RAM)], lane.keep, **how)
        table = RowTable(store, EMBEDDING, rows, lane.buffer)
        with ops.scope():
            norm = _final_norm(store, ops, config, opened)
    except BaseException:
        close()
        raise
    return PlacedDecoder(
        config,
        lane,
        stages,
        embedding=table,
        norm=norm,
        budget=RamBudget(budget, placement.ram_ring),
        trace=trace,
        load_s=load_s,
        before_pass=opened.check_unchanged,
        close=close,
    )


def _final_norm(
    store: StoreCheckpoint, ops: Ops, config: DecoderConfig, files: FileReader
) -> Vector:
    unit = next(unit for unit in store.manifest.units if unit.name == "norm")
    data = aligned_buffer(unit.nbytes)
    files.read_into(unit.file, unit.offset, data)
    memory = UnitMemory(store.path, store.architecture, unit, data)
    name = "model.norm.weight"
    return WeightLoader(memory, ops).vector(config.hidden_size, name, offset=config.norm_offset)
