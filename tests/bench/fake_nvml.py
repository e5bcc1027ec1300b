"""NVIDIA's management library for tests: processes write what they take of a GPU to a folder."""

from __future__ import annotations

import ctypes
import os
import time
from pathlib import Path
from typing import Any

FOLDER = "LOCALRT_TEST_VRAM"
"""The environment variable that names the folder."""


def take(nbytes: int) -> None:
    """Take GPU memory in this process, and wait until the library was asked for it."""
    if FOLDER not in os.environ:
        return
    folder, until = Path(os.environ[FOLDER]), time.monotonic() + 20
    (folder / "written").write_text(str(nbytes))
    (folder / "written").replace(folder / str(os.getpid()))
    while not (folder / f"{os.getpid()}.seen").exists() and time.monotonic() < until:
        time.sleep(0.005)


class FakeNvml:
    """Two GPUs, of which the second reports less. ``lists``: the first one's processes, too."""

    def __init__(self, folder: Path | None = None, *, lists: bool = True) -> None:
        self._folder, self._lists = folder, lists
        self.millijoules = 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, device: Any) -> int:  # noqa: N802
        device._obj.value = index
        return 0

    def nvmlDeviceGetUtilizationRates(self, device: Any, use: Any) -> int:  # noqa: N802
        use._obj.gpu = 50 if device.value else 30
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: Any, energy: Any) -> int:  # noqa: N802
        energy._obj.value = self.millijoules
        return 3 if device.value else 0

    def nvmlDeviceGetMemoryInfo(self, device: Any, memory: Any) -> int:  # noqa: N802
        if device.value:
            return 3
        memory._obj.used = 100 + sum(self._taken().values())
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(  # noqa: N802
        self, device: Any, count: ctypes.c_uint, listed: Any
    ) -> int:
        if device.value or not self._lists:
            return 3
        taken: Any = count
        found = self._taken()
        assert taken._obj.value >= len(found)
        taken._obj.value = len(found)
        for entry, (pid, nbytes) in zip(listed._obj, found.items(), strict=False):
            entry.pid, entry.used = pid, nbytes
        self._say(found)
        return 0

    def _taken(self) -> dict[int, int]:
        files = [] if self._folder is None else self._folder.glob("*")
        found = {int(each.name): int(each.read_text()) for each in files if each.name.isdigit()}
        if not self._lists:
            self._say(found)
        return found

    def _say(self, found: dict[int, int]) -> None:
        for pid in found:
            assert self._folder is not None
            (self._folder / f"{pid}.seen").touch()
