"""This machine's rates as far as they were measured before: nothing is measured, little is read.

For whoever only wants to say something about a model, and must not load the machine for it. A file
of another processor or version is taken all the same: it is as good as any guess.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from localrt.offload.planner.machine import KernelRate, MachineProfile
from localrt.offload.planner.measure import _ROWS

__all__ = ["known_machine"]


def known_machine(cache: Path, folder: Path | None = None) -> MachineProfile | None:
    """What ``cache`` has, with the disk that ``folder`` lies on if it is known, else any."""
    try:
        known: dict[str, Any] = json.loads((cache / "machine.json").read_text(encoding="utf-8"))
        disks = dict(known["disks"])
        device = "" if folder is None else str(folder.stat().st_dev)
        ssd, ssd_cpu = disks.get(device) or next(iter(disks.values()))
        fingerprint = known.get("fingerprint") or ["", "this machine"]
        return MachineProfile(
            name=str(fingerprint[1]),
            ssd_bytes_s=ssd,
            ssd_cpu_s=ssd_cpu,
            ram_bytes_s=known["ram_bytes_s"],
            kernels={name: KernelRate(_ROWS, tuple(s)) for name, s in known["kernels"].items()},
            attention=KernelRate((1, 64), tuple(known["attention"])),
            call_s=known["call_s"],
            threads=_threads(),
            sources=dict.fromkeys(("ssd_bytes_s", "ram_bytes_s", "kernels"), "measured"),
        )
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return None


def _threads() -> int:
    import psutil

    return psutil.cpu_count(logical=False) or 1
