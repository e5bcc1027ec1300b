"""What this machine reads and computes per second, measured once and kept in the cache folder.

Measuring takes some seconds and a hundred megabytes, so a short-lived process does it: neither
stays in the one that runs the model.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from localrt.common.files import write_text
from localrt.common.settings import Settings
from localrt.common.version import __version__
from localrt.machine import hardware
from localrt.offload.account import MEASURING_NBYTES
from localrt.offload.planner.machine import MachineProfile, typical_machine
from localrt.offload.planner.measure import WORKING_SET, is_busy, known_machine, measure_machine
from localrt.offload.reading.disk_speed import DiskProfile, measure_disk

_TIMEOUT_S = 120.0
_LEAST_WORKING_SET = 8 << 20
_DISKS = "disks.json"


def machine_profile(
    folder: Path,
    settings: Settings,
    *,
    formats: Iterable[str] = (),
    remeasure: bool = False,
    room: int | None = None,
) -> tuple[DiskProfile, MachineProfile]:
    """The disk that ``folder`` lies on, and the machine; ``formats`` are those to know kernels for.

    Measuring takes ``room`` bytes of RAM at most. With too little, what was not measured before is
    assumed.

    Raises:
        MissingExtraError: the kernels are not compiled.
        OSError: the disk cannot be read.
    """
    cache, wanted = settings.cache_dir, sorted(set(formats))
    memory = WORKING_SET if room is None else min(room - MEASURING_NBYTES, WORKING_SET)
    if remeasure or not _is_known(folder, cache, wanted, memory):
        if memory < _LEAST_WORKING_SET:
            disk = _known_disk(folder, cache) or DiskProfile.assumed()
            return disk, known_machine(cache, folder) or typical_machine()
        done = _measure_aside(folder, cache, wanted, remeasure, memory)
        remeasure = remeasure and not done
    return _measured(folder, cache, wanted, remeasure=remeasure, working_set=memory)


def fingerprint() -> list[str]:
    """What rates depend on, beside the kernels: another processor or version measures again."""
    cpu = hardware.probe().cpu
    return [cpu.name, *cpu.features, str(cpu.usable_cores), __version__]


def main(arguments: list[str]) -> None:
    """The process that measures: folder, cache folder, formats, and whether to measure again."""
    folder, cache, formats, remeasure, memory = json.loads(arguments[0])
    _measured(Path(folder), Path(cache), formats, remeasure=remeasure, working_set=memory)


def _measured(
    folder: Path, cache: Path, formats: list[str], *, remeasure: bool, working_set: int
) -> tuple[DiskProfile, MachineProfile]:
    machine = measure_machine(
        folder,
        cache=cache,
        disk_speed=lambda path: _disk(path, cache, remeasure=remeasure),
        identity=fingerprint(),
        formats=formats,
        remeasure=remeasure,
        working_set=working_set,
    )
    return _disk(folder, cache), machine


def _is_known(folder: Path, cache: Path, formats: list[str], memory: int) -> bool:
    """Whether nothing would be measured; a guess, for the measuring itself decides."""
    known, disks = _read(cache / "machine.json"), _read(cache / _DISKS)
    device = str(folder.stat().st_dev)
    return (
        not (known.get("busy") and not is_busy())
        and device in disks
        and device in known.get("disks", {})
        and set(formats) <= set(known.get("kernels", {}))
        and known.get("working_set", WORKING_SET) >= memory
    )


def _measure_aside(
    folder: Path, cache: Path, formats: list[str], remeasure: bool, memory: int
) -> bool:
    """Whether it was done."""
    if getattr(sys, "frozen", False):
        return False  # a packaged app has no interpreter: it would start itself again
    root = str(Path(__file__).resolve().parents[2])
    start = (
        "import sys; sys.path.insert(0, sys.argv[1]); "
        "from localrt.machine.measuring import main; main(sys.argv[2:])"
    )
    job = json.dumps([str(folder), str(cache), formats, remeasure, memory])
    try:
        done = subprocess.run(
            [sys.executable, "-c", start, root, job],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False  # it is measured here then
    return done.returncode == 0


def _disk(folder: Path, cache: Path, *, remeasure: bool = False) -> DiskProfile:
    """How the disk of ``folder`` is read best, by the files that lie in it."""
    if not remeasure and (found := _known_disk(folder, cache)) is not None:
        return found
    path, device = cache / _DISKS, str(folder.stat().st_dev)
    profile, known = measure_disk(_large_files(folder)), _read(path)
    with suppress(OSError):  # a cache that cannot be written is measured again
        write_text(
            path,
            json.dumps({**known, device: profile.to_dict()}),
            private=True,
            sync=False,
            folder=True,
        )
    return profile


def _known_disk(folder: Path, cache: Path) -> DiskProfile | None:
    """As it was measured before."""
    known = _read(cache / _DISKS)
    with suppress(KeyError, TypeError, ValueError):
        return DiskProfile.from_dict(known[str(folder.stat().st_dev)])
    return None


def _large_files(folder: Path) -> list[Path]:
    """The store's files, or the model's own."""
    if folder.is_file():
        return [folder]
    return sorted(
        (path for path in folder.iterdir() if path.is_file() and path.stat().st_size >= 1 << 20),
        key=lambda path: path.name,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
