"""This machine's rates, measured once: CPU kernels on random tiles, memory, and the disk.

The result is kept as JSON beside a fingerprint of all that it depends on; another processor, kernel
library or version measures again. How a disk is read best is the caller's to say.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from localrt.common.files import write_text
from localrt.offload.planner.machine import KernelRate, MachineProfile
from localrt.offload.reading.disk_speed import DiskProfile
from localrt.quant.cpu.abi import find_library, layout_of
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats import FORMATS
from localrt.quant.formats.tiled import TiledTensor, tile_span
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.protocol import AttentionSpec, AttentionWeights, Batch

DEFAULT_FORMATS = ("int4-g32", "q4_k", "q6_k", "q8_0")
WORKING_SET = 96 << 20
"""Bytes beyond any cache, so that weights come from memory."""

_ROWS = (1, 2, 4, 8, 16, 64, 512)
_SHAPE = (2048, 2048)
_BUDGET_S = 0.12  # of one rate
_VERSION = 1
_FILE = "machine.json"
_UNKNOWN_DISK = (1e9, 0.0)
_BUSY_PERCENT = 30.0
_WATCHED_S = 0.1


def known_machine(cache: Path, folder: Path | None = None) -> MachineProfile | None:
    """What ``cache`` has, with the disk that ``folder`` lies on if it is known, else any.

    For whoever must not load the machine: nothing is measured. A file of another processor or
    version is taken all the same, since it is as good as any guess.
    """
    import psutil  # most uses measure, and need it not

    try:
        known: dict[str, Any] = json.loads((cache / _FILE).read_text(encoding="utf-8"))
        disks = dict(known["disks"])
        device = "" if folder is None else str(folder.stat().st_dev)
        name = str((known.get("fingerprint") or ["", "this machine"])[1])
        threads = psutil.cpu_count(logical=False) or 1
        return _profile(known, name, disks.get(device) or next(iter(disks.values())), threads)
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return None


def is_busy(root: Path = Path("/")) -> bool:
    """Whether others use the processor now, so that rates would come out too low."""
    try:
        before = _cpu_times(root)
    except (OSError, ValueError):  # not Linux, where loading needs no package's help
        import psutil

        return psutil.cpu_percent(interval=_WATCHED_S) > _BUSY_PERCENT
    time.sleep(_WATCHED_S)
    busy, idle = (now - then for now, then in zip(_cpu_times(root), before, strict=True))
    return 100 * busy > _BUSY_PERCENT * (busy + idle)


def _cpu_times(root: Path) -> tuple[int, int]:
    """Ticks of all cores since the start, busy and idle, as Linux counts them."""
    with (root / "proc/stat").open(encoding="ascii") as file:
        _, *fields = file.readline().split()
    # user, nice, system, idle, iowait, irq, softirq, steal; guests' are in those of users
    user, nice, system, idle, iowait, *others = (int(each) for each in fields[:8])
    return user + nice + system + sum(others), idle + iowait


def measure_machine(
    folder: Path,
    *,
    cache: Path,
    disk_speed: Callable[[Path], DiskProfile] | None,
    identity: Sequence[str],
    formats: Iterable[str] = (),
    remeasure: bool = False,
    working_set: int = WORKING_SET,
    sample: bool = False,
) -> MachineProfile:
    """The machine that reads weights from ``folder``; what ``cache`` knows is not measured again.

    ``identity`` names the processor, its features, its cores and localrt's version: with the kernel
    library it makes the fingerprint. ``disk_speed`` is asked once for each disk; with None the disk
    is not measured, and the profile's figure means nothing until it is replaced. ``working_set`` is
    the memory to measure with: rates of a smaller one are measured again where there is more.
    ``sample``: the disk's speed is that of a file for the purpose; a model's own files tell better.
    Rates of a busy machine are marked, and measured again once it is not.

    Raises:
        MissingExtraError: the kernels are not compiled.
        OSError: the disk cannot be measured.
    """
    ops = NativeOps()
    count = _cores()
    fingerprint = [str(_VERSION), *identity, ops.isa, str(count), _library()]
    path = cache / _FILE
    known = {} if remeasure else _load(path, fingerprint)
    if known.get("busy") and not is_busy():
        known = {}
    if known.get("working_set", WORKING_SET) < working_set:
        known = {"disks": known["disks"]}
    kernels: dict[str, Any] = known.setdefault("kernels", {})
    wanted = {name for name in (*DEFAULT_FORMATS, *formats) if _measurable(name)}
    before = json.dumps(known)
    if (wanted - kernels.keys() or "ram_bytes_s" not in known) and is_busy():
        known["busy"] = True
    for name in sorted(wanted - kernels.keys()):
        kernels[name] = measure_kernel(ops, name, working_set)
    if "ram_bytes_s" not in known:
        known["ram_bytes_s"] = _measure_memory(ops, working_set)
        known["call_s"] = _measure_call(ops)
        known["attention"] = _measure_attention(ops)
    disks: dict[str, Any] = known.setdefault("disks", {})
    device = str(folder.stat().st_dev)
    is_sample = device in disks and len(disks[device]) > 2
    if disk_speed is not None and (device not in disks or (is_sample and not sample)):
        rate = disk_speed(folder)
        disks[device] = [rate.read_bytes_s, rate.cpu_s_per_byte, *(["sample"] if sample else [])]
    if json.dumps(known) != before:
        known["working_set"] = min(known.get("working_set", working_set), working_set)
        _save(path, {**known, "fingerprint": fingerprint})
    name = identity[0] if identity else "this machine"
    return _profile(known, name, disks.get(device, _UNKNOWN_DISK), count)


def _profile(
    known: dict[str, Any], name: str, disk: Sequence[float], threads: int
) -> MachineProfile:
    """The machine by what was measured of it; ``disk`` is bytes per second, CPU seconds a byte."""
    source = "measured while busy" if known.get("busy") else "measured"
    return MachineProfile(
        name=name,
        ssd_bytes_s=disk[0],
        ssd_cpu_s=disk[1],
        ram_bytes_s=known["ram_bytes_s"],
        kernels={n: KernelRate(_ROWS, tuple(seconds)) for n, seconds in known["kernels"].items()},
        attention=KernelRate((1, 64), tuple(known["attention"])),
        call_s=known["call_s"],
        threads=threads,
        sources={
            **dict.fromkeys(("ssd_bytes_s", "ram_bytes_s", "kernels"), source),
            "cores": "measured",
        },
    )


def measure_kernel(ops: NativeOps, format: str, working_set: int = WORKING_SET) -> list[float]:
    """Seconds per weight at each of the numbers of rows, from memory; about half a second."""
    rows, columns = _SHAPE
    nbytes = rows * FORMATS[format].row_bytes(columns)
    rng = np.random.default_rng(0)
    # Any two of these bytes are a sane float16: only NaN and denormals could change the speed.
    block = rng.integers(0x20, 0x40, nbytes, dtype=np.uint8)
    copies = aligned_buffer(max(2, working_set // nbytes) * nbytes).reshape(-1, nbytes)
    copies[:] = block
    weights = [
        ops.weight(_SHAPE, [TiledTensor("w", FORMATS[format], _SHAPE, data, 1.0)])
        for data in copies
    ]
    seconds = []
    for count in _ROWS:
        x = rng.standard_normal((count, columns)).astype(np.float32)
        out = np.empty((count, rows), np.float32)
        seconds.append(
            _best(lambda n, x=x, out=out: ops.linear(x, weights[n % len(weights)], out))  # type: ignore[misc]
            / (rows * columns)
        )
    return seconds


def _best(call: Callable[[int], object]) -> float:
    """Seconds of one call: the lower quartile of short runs: others disturb some."""
    call(0)
    samples, number, end = list[float](), 1, time.perf_counter() + _BUDGET_S
    while len(samples) < 5 or time.perf_counter() < end:
        started = time.perf_counter()
        call(number)
        samples.append(time.perf_counter() - started)
        number += 1
    return float(np.quantile(samples, 0.25))


def _measure_memory(ops: NativeOps, working_set: int) -> float:
    data = aligned_buffer(working_set)
    data[:] = 1
    return float(working_set / _best(lambda _: ops.read_all(data)))


def _measure_call(ops: NativeOps) -> float:
    """What a unit costs beside its weights: two small products, and adding the result."""
    shape = (256, 256)
    format_ = FORMATS["q8_0"]
    data = np.full(shape[0] * format_.row_bytes(shape[1]), 0x2C, np.uint8)
    weight = ops.weight(shape, [TiledTensor("w", format_, shape, data, 1.0)])
    x, out = np.ones((1, shape[1]), np.float32), np.empty((1, shape[0]), np.float32)

    def call(_: int) -> None:
        ops.linear(x, weight, out)
        ops.linear(out, weight, out.copy())
        ops.add(x, out.copy())

    return _best(call)


def _measure_attention(ops: NativeOps) -> list[float]:
    """Seconds per multiply-accumulate of a query with a held token, at 1 and at 64 rows."""
    hidden, held = 256, 2048
    spec = AttentionSpec(heads=16, kv_heads=4, head_dim=64, scale=0.125, eps=1e-6, rope=None)
    width = spec.heads * spec.head_dim
    format_ = FORMATS["q8_0"]

    def matrix(rows: int, columns: int) -> Any:
        data = np.full(rows * format_.row_bytes(columns), 0x2C, np.uint8)
        shape = (rows, columns)
        return ops.weight(shape, [TiledTensor("w", format_, shape, data, 1.0)])

    weights = AttentionWeights(
        norm=ops.vector(np.ones(hidden, np.float32)),
        qkv=matrix((spec.heads + 2 * spec.kv_heads) * spec.head_dim, hidden),
        out=matrix(hidden, width),
    )

    def seconds(tokens: int, rows: int) -> float:
        cache = ops.kv_cache([spec], held + rows)
        if tokens:
            cache.reserve(tokens)
            cache.advance(tokens)
        step = ops.begin(Batch.extend([(cache, [0] * rows)]))
        x = np.ones((rows, hidden), np.float32)

        def call(_: int) -> None:
            q = ops.norm_qkv_rope_append(x, weights, spec, step, 0)
            ops.attention_output(q, weights, spec, step, 0)

        return _best(call)

    macs = 2 * spec.heads * spec.head_dim * held
    return [
        max(1e-13, (seconds(held, rows) - seconds(0, rows)) / (rows * macs)) for rows in (1, 64)
    ]


def _measurable(name: str) -> bool:
    known = FORMATS.get(name)
    if known is None or known.name == "f32":  # vectors; whole models of it follow from the others
        return False
    return layout_of(known) is not None and not _SHAPE[1] % tile_span(known)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _library() -> str:
    path = find_library()
    status = path.stat() if path else None
    return f"{status.st_size}-{status.st_mtime_ns}" if status else "none"


def _load(path: Path, fingerprint: Sequence[str]) -> dict[str, Any]:
    """What is known of this very machine; a damaged or foreign file is as good as none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("fingerprint") != list(fingerprint):
            return {}
        _ = values["kernels"], values["disks"], values["attention"], values["call_s"]
        return dict(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _save(path: Path, values: dict[str, Any]) -> None:
    """A cache that cannot be written is measured again next time."""
    with suppress(OSError):
        write_text(path, json.dumps(values, indent=1), private=True, sync=False, folder=True)
