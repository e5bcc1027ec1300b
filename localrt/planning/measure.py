"""Benchmarks of this machine, measured once: CPU kernels, memory and the disk.

Rates are saved as JSON with a fingerprint of everything they depend on; if the processor, the
kernel library or the version changes, they are measured again. Measuring takes a few seconds and a
hundred megabytes, so a short-lived process does it, and the process that runs the model keeps none
of that memory. ``planned_hardware`` puts the machine to plan for together: this one's rates, or
those of a described PC, changed by options.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from localrt.common.cores import default_threads
from localrt.common.errors import OptionError, reason_of
from localrt.common.files import private_folder, read_cached, remove_stale, write_cached
from localrt.common.formatting import parse_size
from localrt.common.option_names import option
from localrt.common.processes import has_helpers, helper_command
from localrt.common.settings import Settings
from localrt.models.weight_files import files_nbytes
from localrt.offload import hardware as system_hardware
from localrt.offload.account import MEASURING_NBYTES, Budgets
from localrt.offload.memory import memory_state, ram_budget, share_for_models
from localrt.offload.reading.disk_speed import DiskProfile, measure_disk
from localrt.planning.describe_pc import parse_memory_speed, parse_pc
from localrt.planning.machine import (
    DEFAULT_GPU,
    GPU_SHARE,
    GpuModel,
    KernelRate,
    MachineProfile,
    OtherGpu,
    beside_desktop,
    find_gpu,
    measured_profile,
    other_gpu,
    parse_bandwidth,
    parse_gpu,
    typical_machine,
)
from localrt.quant.cpu.abi import best_isa, find_library, layout_of
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda.gpu_cache import known_rates
from localrt.quant.formats import FORMATS
from localrt.quant.formats.tiled import TiledTensor, tile_span
from localrt.quant.ops.arrays import aligned_buffer
from localrt.quant.ops.attention import AttentionSpec, AttentionWeights
from localrt.quant.ops.protocol import Batch

DEFAULT_FORMATS = ("int4-g32", "q4_k", "q6_k", "q8_0")
WORKING_SET = 96 << 20
"""The working set in bytes: larger than any CPU cache, so that weights come from memory."""

_ROWS = (1, 2, 4, 8, 16, 64, 512)
_SHAPE = (2048, 2048)
_BUDGET_S = 0.12  # seconds for measuring one rate
# If the host starts both in a layer that CPU and GPU share, the GPU waits for it as long as this
# many measured calls of 10 us: 0.12 ms on an H100 (docs/gpu.md). A streamed
# dense layer is assumed to take as long. In a recorded pass a mixture's layer takes the host one
# call: 8 us to learn and to choose copies, 0.4 to begin, as a CPU has shown.
_SHARED_CALLS, _RECORDED_CALLS = 12, 1
_VERSION = 1
_FILE, _DISKS = "machine.json", "disks.json"
_BUSY_PERCENT = 30.0
_WATCHED_S = 0.1
_TIMEOUT_S = 120.0
_LEAST_WORKING_SET = 8 << 20
_SAMPLE_BYTES = 128 << 20
_OWN_DISK_BYTES = 64 << 20  # a smaller model cannot show the speed of its disk


def machine_profile(
    folder: Path,
    settings: Settings,
    *,
    formats: Iterable[str] = (),
    remeasure: bool = False,
    room: int | None = None,
    sample: bool = False,
) -> tuple[DiskProfile, MachineProfile]:
    """Return the profiles of ``folder``'s disk and of the machine, with kernels for ``formats``.

    Rates saved in the cache folder are not measured again. Measuring takes at most ``room`` bytes
    of RAM; with too little room, unmeasured rates are assumed. The disk is measured with the files
    in ``folder``, or with a ``sample`` written there, which is less exact. Rates measured on a busy
    machine are marked, and measured again once it is idle.

    Raises:
        MissingExtraError: the kernels are not compiled.
        OSError: the disk cannot be measured.
    """
    cache, wanted = settings.cache_dir, sorted(set(formats))
    memory = WORKING_SET if room is None else min(room - MEASURING_NBYTES, WORKING_SET)
    disk = None if remeasure else _known_disk(folder, cache, sample=sample)
    known = {} if remeasure else _known(cache, memory)
    if disk is not None and "call_s" in known and not _missing(known, wanted):
        return disk, _profile(known, system_hardware.identity()[0], disk, default_threads())
    if memory < _LEAST_WORKING_SET:
        disk = disk or _known_disk(folder, cache, sample=True) or DiskProfile.assumed()
        return disk, known_machine(cache, folder) or typical_machine()
    if _measure_aside([str(folder), str(cache), wanted, remeasure, memory, sample]):
        remeasure = False
    return measure(folder, cache, wanted, remeasure, memory, sample)


def known_machine(cache: Path, folder: Path | None = None) -> MachineProfile | None:
    """Return the rates saved in ``cache``, with those of ``folder``'s disk, or of any disk if
    unknown.

    For callers that must not put load on the machine: nothing is measured. Rates of another
    processor or version are used too, since nothing better is known.
    """

    try:
        known, disks = read_cached(cache / _FILE), read_cached(cache / _DISKS)
        device = "" if folder is None else str(folder.stat().st_dev)
        disk = DiskProfile.from_dict(disks.get(device) or next(iter(disks.values())))
        name = str((known.get("fingerprint") or ["", "this machine"])[1])
        return _profile(known, name, disk, default_threads())
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return None


def measure(
    folder: Path, cache: Path, formats: list[str], remeasure: bool, working_set: int, sample: bool
) -> tuple[DiskProfile, MachineProfile]:
    """Measure in this process, as ``machine_profile``, with ``working_set`` bytes of memory.

    Rates that were measured with less memory are measured again.
    """
    ops, path = NativeOps(), cache / _FILE
    known = {} if remeasure else _known(cache, working_set)
    kernels: dict[str, object] = known.setdefault("kernels", {})
    missing = _missing(known, formats)
    if missing or "call_s" not in known:
        if is_busy():
            known["busy"] = True
        for name in missing:
            kernels[name] = measure_kernel(ops, name, working_set)
        if "call_s" not in known:
            known["ram_bytes_s"] = _measure_memory(ops, working_set)
            known["attention"] = _measure_attention(ops)
            known["call_s"] = _measure_call(ops)
        known["working_set"] = min(known.get("working_set", working_set), working_set)
        write_cached(path, {**known, "fingerprint": _fingerprint(ops)})
    disk = None if remeasure else _known_disk(folder, cache, sample=sample)
    if disk is None:
        disk = _measure_sample(folder) if sample else measure_disk(_large_files(folder))
        entry = {**disk.to_dict(), "sample": sample}
        write_cached(
            cache / _DISKS, {**read_cached(cache / _DISKS), str(folder.stat().st_dev): entry}
        )
    return disk, _profile(known, system_hardware.identity()[0], disk, default_threads())


def main() -> None:
    """Run the measuring process; its argument has the arguments of ``measure`` as JSON."""
    folder, cache, *others = json.loads(sys.argv[1])
    measure(Path(folder), Path(cache), *others)


def _measure_aside(job: list[object]) -> bool:
    """Measure in a separate process; return whether that worked."""
    if not has_helpers():
        return False
    try:
        done = subprocess.run(
            helper_command(__name__, json.dumps(job)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False  # the caller will measure in this process
    return done.returncode == 0


# -- saved rates -----------------------------------------------------------------------------------


def _known(cache: Path, working_set: int) -> dict[str, Any]:
    """Read the saved rates of this machine; empty if the file is damaged or another machine's."""
    values = read_cached(cache / _FILE)
    if values.pop("fingerprint", None) != _fingerprint(NativeOps()):
        return {}
    if values.get("working_set", WORKING_SET) < working_set or not isinstance(
        values.get("kernels"), dict
    ):
        return {}
    return {} if values.get("busy") and not is_busy() else values


def _fingerprint(ops: NativeOps) -> list[str]:
    path = find_library()
    status = path.stat() if path else None
    library = f"{status.st_size}-{status.st_mtime_ns}" if status else "none"
    return [str(_VERSION), *system_hardware.identity(), ops.isa, str(default_threads()), library]


def _missing(known: dict[str, Any], formats: list[str]) -> list[str]:
    """Return the formats without a rate, out of the default ones and ``formats``."""
    wanted = {name for name in (*DEFAULT_FORMATS, *formats) if _measurable(name)}
    return sorted(wanted - known.get("kernels", {}).keys())


def _known_disk(folder: Path, cache: Path, *, sample: bool) -> DiskProfile | None:
    """Return the disk's saved profile; one measured with a sample only if ``sample``."""
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        found = read_cached(cache / _DISKS)[str(folder.stat().st_dev)]
        if sample or not found.get("sample"):
            return DiskProfile.from_dict(found)
    return None


def _profile(known: dict[str, Any], name: str, disk: DiskProfile, threads: int) -> MachineProfile:
    source = "measured while busy" if known.get("busy") else "measured"
    return MachineProfile(
        name=name,
        ssd_bytes_s=disk.read_bytes_s,
        ssd_cpu_s=disk.cpu_s_per_byte,
        ram_bytes_s=known["ram_bytes_s"],
        kernels={n: KernelRate(_ROWS, tuple(seconds)) for n, seconds in known["kernels"].items()},
        attention=KernelRate((1, 64), tuple(known["attention"])),
        call_s=known["call_s"],
        shared_s=_SHARED_CALLS * known["call_s"],
        recorded_s=_RECORDED_CALLS * known["call_s"],
        threads=threads,
        sources={
            **dict.fromkeys(("ssd_bytes_s", "ram_bytes_s", "kernels"), source),
            "cores": "measured",
        },
    )


# -- measuring -------------------------------------------------------------------------------------


def is_busy() -> bool:
    """Whether other programs use the CPU now, so that measured rates would be too low."""
    import psutil  # takes ten milliseconds

    return psutil.cpu_percent(interval=_WATCHED_S) > _BUSY_PERCENT


def measure_kernel(ops: NativeOps, format: str, working_set: int = WORKING_SET) -> list[float]:
    """Measure the seconds per weight for each of ``_ROWS``, with weights read from memory."""
    rows, columns = _SHAPE
    nbytes = rows * FORMATS[format].row_bytes(columns)
    rng = np.random.default_rng(0)
    # Any two of these bytes make a normal float16: NaN and denormals could change the speed.
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
    """Return a call's seconds: the lower quartile, since other programs disturb some runs."""
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
    """Measure a unit's overhead besides its weights: two tiny products, and an addition."""
    shape = (256, 256)
    format_ = FORMATS["q8_0"]
    data = np.full(shape[0] * format_.row_bytes(shape[1]), 0x2C, np.uint8)
    weight = ops.weight(shape, [TiledTensor("w", format_, shape, data, 1.0)])
    x, out = np.ones((1, shape[1]), np.float32), np.empty((1, shape[0]), np.float32)

    def call(_: int) -> None:
        ops.linear(x, weight, out)
        ops.linear(out, weight, out.copy())
        ops.add(out, out.copy())

    return _best(call)


def _measure_attention(ops: NativeOps) -> list[float]:
    """Measure the seconds per multiply-accumulate of attention to the cache, for 1 and 64 rows."""
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
    if known is None or known.name == "f32":  # used for vectors; matrices scale from other formats
        return False
    return layout_of(known) is not None and not _SHAPE[1] % tile_span(known)


def _measure_sample(folder: Path) -> DiskProfile:
    """Measure the disk with a new file, and delete it."""
    remove_stale(folder, ".localrt-speed-*")
    descriptor, name = tempfile.mkstemp(dir=folder, prefix=".localrt-speed-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            block = os.urandom(4 << 20)  # random, as some disks compress
            for _ in range(_SAMPLE_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return measure_disk([Path(name)], rounds=0)  # not open twice, which Windows refuses
    finally:
        Path(name).unlink()


def _large_files(folder: Path) -> list[Path]:
    """Return the model's file, or the files in its folder of at least 1 MiB."""
    if folder.is_file():
        return [folder]
    return sorted(
        (path for path in folder.iterdir() if path.is_file() and path.stat().st_size >= 1 << 20),
        key=lambda path: path.name,
    )


# -- the machine to plan for: this one, or one that is described -----------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware to plan for, as written by the user; None means this machine's."""

    ram: str | int | None = None
    gpu_memory: str | int | None = None
    gpu: str | None = None
    link: str | None = None
    ssd: str | None = None
    pc: str | None = None
    ram_speed: str | None = None
    cores: int | None = None

    @property
    def hypothetical(self) -> tuple[str, ...]:
        """The given options that describe a machine other than this one."""
        imagined = {
            "--pc": self.pc is not None,
            "--ram-speed": self.ram_speed is not None,
            "--cores": self.cores is not None,
            "--ssd": self.ssd is not None,
            "--gpu": self.gpu is not None,
            "--gpu-memory": self.gpu is None and self.gpu_memory is not None and not gpu_here(),
            "--link": self.link is not None,
            "--ram": self.ram is not None
            and not self.pc
            and parse_size(self.ram) > memory_state().total,
        }
        return tuple(name for name, is_so in imagined.items() if is_so)


def planned_hardware(
    hardware: Hardware,
    settings: Settings,
    *,
    path: Path | None = None,
    formats: Iterable[str] = (),
    remeasure: bool = False,
    measure: bool = True,
) -> tuple[MachineProfile, Budgets, str]:
    """Return the machine to plan for, its budgets, and a note for the user.

    The machine is this one or ``hardware.pc``, changed by the other options of ``hardware``.
    ``path`` is the model, whose disk is used; ``formats`` are those of its weights. Without a model
    the RAM is what models should take of all there is, with one what is free now. Without
    ``measure``, rates that were never measured are a typical PC's.

    Raises:
        OptionError: a description is invalid.
    """
    ram = None if hardware.ram is None else parse_size(hardware.ram)
    if hardware.pc is not None:
        pc, vram, note = parse_pc(hardware.pc), 0, ""
        other = pc.other_gpu
        machine = _as_wanted(pc.machine(), hardware)
        if hardware.gpu is None and pc.gpu is not None:
            memory = hardware.gpu_memory or pc.vram_budget
            hardware = replace(hardware, gpu=pc.gpu.name, gpu_memory=memory)
        if hardware.gpu is not None or hardware.gpu_memory is not None:
            machine, vram = with_gpu(machine, replace(hardware, gpu=hardware.gpu or DEFAULT_GPU))
        source = "given" if ram else pc.sources.get("ram_bytes", "typical")
        ram = ram or pc.ram_budget
    else:
        own = path if hardware.ssd is None else None
        known = None if measure else known_machine(settings.cache_dir, settings.cache_dir)
        machine, note = known or typical_machine().with_cores(default_threads()), ""
        if measure:
            machine, note = machine_here(settings, own, formats, remeasure=remeasure)
        machine, vram = with_gpu(_as_wanted(machine, hardware), hardware, settings.cache_dir)
        source = "given" if ram else "measured"
        ram = ram or (share_for_models() if path is None else ram_budget(None))
        other = _other_here() if hardware.gpu is None and machine.gpu is None else None
    machine = _with_source(machine, ram_bytes=source)
    if machine.gpu is None and (other := other_gpu(hardware.gpu or "") or other):
        room = other.room_bytes and int(GPU_SHARE * other.room_bytes)
        machine = replace(machine, other_gpu=replace(other, room_bytes=room))
    return machine, budgets_of(machine, ram, vram), note


def with_formats(
    machine: MachineProfile,
    formats: Iterable[str],
    hardware: Hardware,
    settings: Settings,
    path: Path,
) -> MachineProfile:
    """Add the rates of more ``formats`` to a result of ``planned_hardware``."""
    if hardware.pc is not None:
        return machine
    here, _ = machine_here(settings, path if hardware.ssd is None else None, formats)
    return replace(machine, kernels=_as_wanted(here, hardware).kernels)


def machine_here(
    settings: Settings,
    path: Path | None = None,
    formats: Iterable[str] = (),
    *,
    remeasure: bool = False,
) -> tuple[MachineProfile, str]:
    """Return this machine, measured if necessary, and a note on assumed rates (or ``""``).

    Its disk is that of the model at ``path``, else that of localrt's cache.
    """
    cores = default_threads()
    typical = _with_source(typical_machine().with_cores(cores), cores="measured")
    if best_isa() is None:
        return typical, "the CPU kernels are not compiled: a typical desktop's rates are assumed"
    own = path is not None and files_nbytes(path) >= _OWN_DISK_BYTES
    folder = path if path is not None and own else settings.cache_dir
    try:
        private_folder(settings.cache_dir)
        _, machine = machine_profile(
            folder, settings, formats=formats, remeasure=remeasure, sample=not own
        )
    except OSError as error:  # the folder cannot be written, or the disk is full
        problem = reason_of(error)
        return typical, f"this machine cannot be measured ({problem}): typical rates are used"
    return machine, ""


def saved_machine(
    path: Path,
    settings: Settings,
    device: str = "auto",
    ram: str | int | None = None,
    gpu_memory: str | int | None = None,
) -> tuple[MachineProfile, Budgets]:
    """Return this machine by its saved rates, else as a typical desktop with as many cores, and its
    budgets. ``device``, ``ram`` and ``gpu_memory`` are those of ``load``; nothing is measured.
    """
    machine = known_machine(settings.cache_dir, path)
    machine = machine or typical_machine().with_cores(default_threads())
    vram = 0
    if device != "cpu" and gpu_here() is not None:
        machine, vram = with_gpu(machine, Hardware(gpu_memory=gpu_memory), settings.cache_dir)
    return machine, budgets_of(machine, ram_budget(None if ram is None else parse_size(ram)), vram)


def _as_wanted(machine: MachineProfile, hardware: Hardware) -> MachineProfile:
    """Return ``machine`` with the given disk, RAM speed and cores."""
    if hardware.ssd is not None:
        machine = replace(machine, ssd_bytes_s=parse_bandwidth(hardware.ssd))
        machine = _with_source(machine, ssd_bytes_s="given")
    if hardware.ram_speed is not None:
        machine = machine.with_ram_speed(parse_memory_speed(hardware.ram_speed))
        machine = _with_source(machine, ram_bytes_s="given")
    if hardware.cores is not None:
        if hardware.cores < 1:
            raise OptionError(f"{option('cores')} must be at least 1, is {hardware.cores}")
        machine = _with_source(machine.with_cores(hardware.cores), cores="given")
    return machine


def _with_source(machine: MachineProfile, **sources: str) -> MachineProfile:
    return replace(machine, sources={**machine.sources, **sources})


def gpu_here() -> tuple[GpuModel, int] | None:
    """Return this machine's first GPU with the table's rates, and its free bytes of memory.

    None if there is no GPU.
    """
    here = system_hardware.gpus()
    if not here or other_gpu(here[0].name):
        return None
    gpu = find_gpu(here[0].name, here[0].memory_bytes) or parse_gpu(DEFAULT_GPU)
    free = here[0].free_bytes or here[0].memory_bytes or gpu.vram_bytes
    return replace(gpu, name=here[0].name, vram_bytes=here[0].memory_bytes or free), free


def _other_here() -> OtherGpu | None:
    """Return this machine's first GPU that only llama.cpp can use; its room is what is free."""
    for each in (*system_hardware.gpus(), *system_hardware.other_gpus()):
        found = other_gpu(each.name, each.memory_bytes) or OtherGpu(name=each.name)
        return replace(found, room_bytes=each.free_bytes or each.memory_bytes)
    return None


def with_gpu(
    machine: MachineProfile, hardware: Hardware, cache: Path | None = None
) -> tuple[MachineProfile, int]:
    """Return ``machine`` with the named GPU, else this machine's, and the GPU's memory budget.

    This machine's GPU has the rates saved in ``cache``, else those of the table. If there is no
    GPU, but GPU memory or a link is given, the default GPU is assumed.

    Raises:
        OptionError: an unknown GPU, or more memory than it has.
    """
    asked = None if hardware.gpu_memory is None else parse_size(hardware.gpu_memory)
    link = None if hardware.link is None else parse_bandwidth(hardware.link)
    here = gpu_here() if hardware.gpu is None else None
    source, rates = "typical", None
    if hardware.gpu is not None and other_gpu(hardware.gpu):
        return machine, 0
    if here is not None:
        gpu, free = here
        vram = min(int(GPU_SHARE * free), asked or free)
        rates = None if cache is None else known_rates(cache, gpu.name)
    elif hardware.gpu is not None or asked is not None or link is not None:
        gpu = parse_gpu(hardware.gpu or DEFAULT_GPU)
        source = "given" if gpu.reached == 1.0 else source
        vram = asked or beside_desktop(gpu)
        if hardware.gpu is None:
            gpu = replace(gpu, vram_bytes=max(vram, gpu.vram_bytes))
    else:
        return machine, 0
    if vram > gpu.vram_bytes:
        raise OptionError(
            f"{option('gpu_memory', hardware.gpu_memory)} is more than {gpu.name} has: "
            f"{gpu.vram_bytes / 1e9:.3g} GB"
        )
    profile, rate, latency = gpu.profile, gpu.link_bytes_s, machine.link_latency_s
    if rates is not None:
        profile = measured_profile(gpu.name, gpu.vram_bytes, rates)
        rate, latency, source = rates.to_gpu_bytes_s, rates.crossing_s, "measured"
    machine = replace(machine, gpu=profile, link_bytes_s=link or rate, link_latency_s=latency)
    return _with_source(machine, gpu=source, link_bytes_s="given" if link else source), vram


def budgets_of(machine: MachineProfile, ram: int, vram: int) -> Budgets:
    """Return budgets of ``ram`` bytes for the whole process and ``vram`` bytes of GPU memory."""
    # A virtual GPU needs no driver: it calls no kernels.
    context = 0 if machine.gpu is not None and machine.gpu.call_s == 0 else None
    return Budgets(ram=ram, vram=vram, cuda_context=context)
