"""Disks that fail at one call, from one call on, or slowly; and flipped bits in what is kept.

A try is a process that works on a fresh folder (``disk_works.py``) while call number N on its files
misbehaves (``faulty_disk.py``), and then once more on what that left. N goes through all calls, or
through random ones of many.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from localrt.common.errors import LocalrtError
from localrt.offload.kv.block_file import BlockFile
from localrt.quant.ops.states import SavedState
from tests.campaigns import disk_works
from tests.campaigns.campaign import Run, campaign
from tests.campaigns.faulty_disk import (
    CHANGE,
    LOOK,
    OPEN,
    READ,
    SHORT,
    SLOW,
    SYNC,
    WRITE,
    FaultyDisk,
    preload,
)

ALL, ALWAYS = READ | WRITE | OPEN | CHANGE | SYNC | LOOK, 1 << 62
_FLIPS = 100.0  # tries for each of a fault
FAULTS = {  # which calls misbehave, how, how many of them, and the share of tries
    "read fails": (READ, errno.EIO, 1, 1.0),
    "short read": (READ, SHORT, 1, 1.0),
    "slow read": (READ, SLOW, 1, 0.01),
    "open fails": (OPEN | LOOK, errno.EIO, 1, 1.0),
    "write fails": (WRITE, errno.EIO, 1, 1.0),
    "short write": (WRITE, SHORT, 1, 1.0),
    "sync fails": (SYNC, errno.EIO, 1, 1.0),
    "full": (WRITE | CHANGE, errno.ENOSPC, ALWAYS, 1.0),
    "over quota": (WRITE, errno.EDQUOT, ALWAYS, 1.0),
    "read-only": (CHANGE, errno.EROFS, ALWAYS, 1.0),
    "vanished": (ALL, errno.ENODEV, ALWAYS, 1.0),
    "stale": (ALL, errno.ESTALE, ALWAYS, 1.0),
}


def faults(run: Run, disk: FaultyDisk) -> None:
    """Try every workload with every fault."""
    for work in disk_works.WORKLOADS:
        disk.renew()
        wanted = disk.attempt(work)[1]
        for name, (kinds, effect, most, share) in FAULTS.items():
            case = f"{work.__name__}, {name}"
            if not run.goes_on(case, share):
                continue
            disk.renew()
            disk.fault(kinds)
            if problem := disk.wrong(work, wanted):
                run.found(case, f"without a fault: {problem}")
            calls = disk.calls
            while run.goes_on(case, share) and run.done(case) < calls:
                every = calls <= run.count * share
                first = run.done(case) + 1 if every else run.random(case).randint(1, calls)
                disk.renew()
                disk.fault(kinds, effect, first, first + most - 1)
                if problem := disk.wrong(work, wanted, effect):
                    run.found(case, f"call {first} of {calls}: {problem}")
                disk.fault()
                if problem := disk.wrong(work, wanted):
                    run.found(case, f"after call {first} of {calls}: {problem}")
                run.tried(case)


def _flips(run: Run, case: str, folder: Path, check: Callable[[], bool]) -> None:
    """Flip bits of the files in ``folder``, one at a time: each is noticed, or changes nothing."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    while run.goes_on(case, _FLIPS):
        choice = run.random(case)
        (path,) = choice.choices(files, [path.stat().st_size for path in files])
        data = bytearray(path.read_bytes())
        whole, bit = bytes(data), choice.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        with suppress(LocalrtError):
            if not check():
                run.found(case, f"another answer: bit {bit} of {path.relative_to(folder)}")
        path.write_bytes(whole)
        run.tried(case)


def flips(run: Run, folder: Path) -> None:
    """Flip bits of a packed model, and of a saved KV cache."""
    store, cache = folder / "store", folder / "cache"
    wanted = disk_works.answer_of(store)
    _flips(run, "bits of a store", store, lambda: disk_works.answer_of(store) == wanted)

    random = np.random.default_rng(1)
    tokens, blocks = random.integers(0, 50_000, 1000), random.integers(0, 256, (4, 512), np.uint8)
    states = [SavedState(n, n, random.integers(0, 256, 400, np.uint8)) for n in (256, 512)]
    BlockFile(cache).write(tokens, "a", 512, lambda first, n: blocks[first : first + n], states)

    def same() -> bool:
        file, got = BlockFile(cache), np.zeros_like(blocks)
        if file.layout != "a" or not len(file.tokens):
            return True  # nothing is restored from it
        count = -(-file.read(1000, lambda first, n, read: read(first, got) and None) // 256)
        kept = {state.length: state.data.tobytes() for state in file.states(1000)}
        return (
            np.array_equal(file.tokens, tokens)
            and np.array_equal(got[:count], blocks[:count])
            and all(kept.get(s.length, s.data.tobytes()) == s.data.tobytes() for s in states)
        )

    _flips(run, "bits of a KV cache", cache, same)


def disk(run: Run) -> None:
    """Make disks fail at every kind of call, and flip bits of what is kept."""
    faulty = FaultyDisk()
    disk_works.end_faults = faulty.recover
    try:
        faults(run, faulty)
        flips(run, faulty.root)
    finally:
        faulty.close()


if __name__ == "__main__":
    preload()
    campaign("disk", disk, count=100)
