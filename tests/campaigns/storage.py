"""Disks that fail, and kills and power cuts while localrt writes (``docs/reliability.md``).

*Power loss*: each workload (``workloads.py``) runs once under a recorder (``file_calls.cpp``). From
its log, the folder is made as an end at any moment may leave it. A kill leaves every call until
then. A power cut leaves what POSIX promises and no more: a file's bytes last once it was synced, a
name once its folder was. Of later changes any part is lost, in sectors of 512 bytes; a rename is
one change (ALICE, Pillai and others, 2014). Then the workload runs again, and has to leave what it
leaves in an empty folder.

*Faults*: a workload runs while call number N on its files misbehaves, and once more on what that
left. N goes through all calls, or through random ones of many. At last bits are flipped.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from benchmarks.common.command import ROOT
from localrt.common.errors import LocalrtError
from tests.campaigns import workloads
from tests.campaigns.campaign import Run, campaign
from tests.campaigns.workloads import (
    POWERLOSS,
    Workload,
    answer_of,
    attempt,
    note,
    preloaded,
    prepare,
)
from tests.history.machine import EXAMPLE_STEPS, drive
from tests.store.test_writer import contents

# -- power loss ------------------------------------------------------------------------------------

_SECTOR = 512
_MADE_AGAIN = {"saving kv caches", "indexing documents"}  # so a power cut may lose them
# Files with other bytes each time, and the name of a branch, without which a snapshot is found too.
_VARIES = re.compile(r".*\.(db|lock)|kv/.*|cache/checked\.json|.*/refs/main")
_MAY_STAY = re.compile(r".*\.lock|.*/manifest\.partial\.json|kv/.*")  # one a file, or limited


@dataclass(slots=True)
class Change:
    """What a call changed: names ``of`` folders, by path, or bytes of a file, by its number."""

    of: set[str | int]
    names: dict[str, int | None]
    at: int = 0
    data: bytes | None = None  # None: ``at`` is the new length
    lasts: float = inf  # from this call on


class Log:
    """The calls of one run below ``root``, as ``file_calls.cpp`` records them."""

    def __init__(self, file: Path, root: Path) -> None:
        self.changes: list[Change] = []  # by the number of the call
        self.said: list[tuple[int, Any]] = []
        self._root, self._made = root, dict[int, tuple[bytes, bytes]]()
        data, at, names = file.read_bytes(), 0, dict[str, int | None]()
        while at < len(data):
            end = data.index(b"\n", at)
            kind, *numbers = data[at:end].split()
            number, first, second = map(int, numbers)
            at = end + 1 + first + second
            path, text = data[end + 1 : at - second].decode(), data[at - second : at]
            if path == f"{root.parent}/said":
                self.said += [(len(self.changes), json.loads(text))] if kind == b"w" else []
            elif path.startswith(f"{root}/") and not path.endswith(" (deleted)"):
                self.changes.append(self._change(kind, number, path, text, names))
                names.update(self.changes[-1].names)

    def _change(
        self, kind: bytes, number: int, path: str, text: bytes, names: dict[str, int | None]
    ) -> Change:
        file, now = names.get(path), len(self.changes)
        if kind == b"s":
            for change in self.changes:
                if change.of & {path, file}:
                    change.lasts = min(change.lasts, now)
            return Change(set(), {})
        if file is not None and kind in (b"o", b"w", b"t"):
            if kind == b"o":
                return Change({file} if number else set(), {})  # emptied, or only opened
            return Change({file}, {}, number, text if kind == b"w" else None)
        moved: dict[str, int | None] = {path: None if kind == b"u" else now}
        of: set[str | int] = {str(Path(path).parent)}
        if kind == b"r":
            old = text.decode()
            of.add(str(Path(old).parent))
            inside = [each for each in names if each == old or each.startswith(f"{old}/")]
            moved = dict.fromkeys(inside)
            moved |= {path + each[len(old) :]: names[each] for each in inside}
        self._made[now] = kind, text
        # The folder of the run is older.
        return Change(of, moved, lasts=now if str(self._root) in of else inf)

    def write(self, folder: Path, moment: int, chance: random.Random | None = None) -> None:
        """Make ``folder`` as it is after ``moment`` calls: killed or, by ``chance``, cut."""
        names: dict[str, int | None] = {}
        files: defaultdict[str | int, bytearray] = defaultdict(bytearray)
        rules: dict[frozenset[str | int], tuple[int, float]] = {}

        def lasts(number: int, change: Change) -> bool:
            if chance is None or change.lasts < moment:
                return True
            until = chance.choice((0, moment, chance.randrange(moment)))  # all until here, and then
            rule = rules.setdefault(frozenset(change.of), (until, chance.choice((0, 0.5, 0.9))))
            return number < rule[0] or chance.random() < rule[1]

        for number, change in enumerate(self.changes[:moment]):
            if change.names:
                names.update(change.names if lasts(number, change) else {})
                continue
            for file in change.of:
                at, data = change.at, change.data or b""
                if change.data is None and lasts(number, change):
                    files[file] = files[file][:at].ljust(at, b"\0")
                for begin in range(-(at % _SECTOR), len(data), _SECTOR):
                    start, stop = max(begin, 0), begin + _SECTOR
                    if lasts(number, change):
                        files[file] = files[file].ljust(at + start, b"\0")
                        files[file][at + start : at + min(stop, len(data))] = data[start:stop]
        for name, made in sorted(names.items()):
            path = folder / Path(name).relative_to(self._root)
            if made is None or not path.parent.is_dir():  # lost with its folder
                continue
            kind, text = self._made[made]
            if kind == b"m":
                path.mkdir()
            elif kind == b"l":
                path.symlink_to(text.decode())
            else:
                path.write_bytes(files[made])


def record(name: str, folder: Path) -> Log:
    """Run a workload in ``folder`` under the recorder; the log has to give the same folder."""
    library, log, again = (folder.with_name(each) for each in ("file_calls.so", "log", "again"))
    log.write_bytes(b"")
    folder.mkdir()
    command = [sys.executable, "-m", "tests.campaigns.storage", "child", name, folder]
    given = preloaded(folder.parent, library, log=log)
    subprocess.run(command, check=True, cwd=ROOT, env=given, stdout=subprocess.DEVNULL)
    recorded = Log(log, folder)
    again.mkdir()
    recorded.write(again, len(recorded.changes))
    assert contents(again) == contents(folder), "the recorder missed calls"
    shutil.rmtree(again)
    return recorded


def start(name: str, folder: Path, said: Sequence[Any] = ()) -> str:
    """Run a workload in a process of its own; return its problem, if any."""
    status, out, err, _ = attempt(POWERLOSS[name], folder, said)
    return f"status {status}: {out}{err}" if status or status is None or "left out" in out else ""


def difference(now: Mapping[str, bytes], wanted: Mapping[str, bytes]) -> str:
    """What a second start has left that it should not, or made otherwise."""
    left = [name for name in now.keys() - wanted if not _MAY_STAY.fullmatch(name)]
    fixed = [name for name in wanted if not _VARIES.fullmatch(name)]
    other = [name for name in fixed if now.get(name) != wanted[name]]
    return f"left {sorted(left)}, other {sorted(other)}" if left or other else ""


def power_loss(run: Run) -> None:
    """Kill localrt and cut its power while it writes, and start it again."""
    with tempfile.TemporaryDirectory(prefix="localrt-powerloss-") as scratch:
        folder = Path(scratch).resolve() / "home"
        for name in POWERLOSS:
            log = record(name, folder)
            shutil.rmtree(folder)
            folder.mkdir()
            began = time.monotonic()
            problems = [start(name, folder)]
            seconds = time.monotonic() - began
            problems += [start(name, folder)]
            assert problems == ["", ""], problems
            wanted = contents(folder)
            for kind, share in (("power cut", 1.0), ("kill", 1.0), ("real kill", 0.2)):
                while run.goes_on(case := f"{name}: {kind}", share):
                    chance, cut = run.random(case), kind == "power cut"
                    shutil.rmtree(folder)
                    folder.mkdir()
                    moment = chance.randint(1, len(log.changes))
                    said = [what for at, what in log.said if at <= moment]
                    if kind == "real kill":
                        said = attempt(POWERLOSS[name], folder, (), chance.uniform(0, seconds)).said
                    else:
                        log.write(folder, moment, chance if cut else None)
                    for path in folder.rglob("*"):  # as if that was days ago
                        os.utime(path, (0, 0), follow_symlinks=False)
                    said = [] if cut and name in _MADE_AGAIN else said
                    problem = start(name, folder, said) or difference(contents(folder), wanted)
                    if problem:
                        run.found(case, f"after {moment} calls: {problem}")
                    run.tried(case)
            shutil.rmtree(folder)


def child(name: str, folder: str) -> None:
    """Workload, under the recorder."""
    note(Path(folder), POWERLOSS[name](Path(folder), ()) or ())


# -- faults ----------------------------------------------------------------------------------------

READ, WRITE, OPEN, CHANGE, SYNC, LOOK, ALL = *(1 << n for n in range(6)), (1 << 6) - 1
SHORT, SLOW = -1, -2  # effects on a call, beside errors by their numbers
ALWAYS, _SLOW_US, _FLIPS = 1 << 62, 10_000_000, 100.0  # flips for each try of a fault
_STEPS = 10_000.0  # with a history, the same
_OTHER_WORDS = ("full", "disk I/O error", "unable to open database file", "readonly", "malformed")
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


def preload() -> None:
    """Begin this process again with the library, which is compiled first."""
    if "LOCALRT_FILES" not in os.environ:
        root = Path(tempfile.mkdtemp(prefix="localrt-storage-"))
        control = root / "control"
        control.write_bytes(bytes(48))
        environ = preloaded(root / "folder", root / "file_calls.so", control=control)
        os.execve(sys.executable, sys.orig_argv, environ)


class FaultyDisk:
    """A folder whose files misbehave, for processes that this one forks."""

    def __init__(self) -> None:
        self.folder = Path(os.environ["LOCALRT_FILES"])
        self.root = self.folder.parent
        for name in ("DATA", "CONFIG"):
            os.environ[f"XDG_{name}_HOME"] = str(self.folder / name.lower())
        os.environ["LOCALRT_CACHE"] = str(self.folder / "cache")
        with (self.root / "control").open("r+b") as file:
            self._control = mmap.mmap(file.fileno(), 48)
        # In a process of its own, since this one forks.
        made = attempt(lambda _at, _said: prepare(self.root), self.folder)
        if made.status != 0:
            raise RuntimeError(made.err)

    def fault(self, kinds: int = 0, effect: int = 0, first: int = 0, last: int = 0) -> None:
        """Calls ``first`` to ``last`` from now on misbehave; none by default."""
        self._control[:] = struct.pack("6q", 0, first, last, kinds, effect, _SLOW_US)

    def recover(self) -> None:
        """Let no more calls misbehave; those of the kinds are counted on."""
        self._control[8:24] = bytes(16)

    @property
    def calls(self) -> int:
        """Calls of the kinds since ``fault``."""
        return int(struct.unpack("6q", self._control)[0])

    def renew(self) -> None:
        """Have the folder as it was prepared."""
        self.fault()
        self._said = list[Any]()
        shutil.rmtree(self.folder, ignore_errors=True)
        for name in ("model", "store", "texts"):
            shutil.copytree(self.root / name, self.folder / name)
        (self.folder / "kv").mkdir()

    def close(self) -> None:
        """Remove it."""
        shutil.rmtree(self.root, ignore_errors=True)

    def wrong(self, workload: Workload, wanted: str, effect: int = 0) -> str:
        """What is wrong with an attempt, on what the one before left; "" if nothing is."""
        status, out, err, self._said = attempt(workload, self.folder, self._said)
        last = err.strip().rpartition("\n")[2]
        words = (os.strerror(effect), *_OTHER_WORDS) if effect > 0 else ()
        if status not in (0, 1) or "Traceback" in err:
            return f"status {status}: {err[-3000:]}"
        if status == 0 and out != wanted and "left out" not in out:
            return f"another answer: {out[-500:]} {err[-500:]}"
        clear = str(self.folder) in last and any(word in last for word in words)
        return f"unclear: {last or out}" if status == 1 and not clear else ""


def faults(run: Run, disk: FaultyDisk) -> None:
    """Try every workload with every fault."""
    for name, workload in workloads.DISK.items():
        disk.renew()
        wanted = attempt(workload, disk.folder).out
        for fault, (kinds, effect, most, share) in FAULTS.items():
            case = f"{name}, {fault}"
            if not run.goes_on(case, share):
                continue
            disk.renew()
            disk.fault(kinds)
            if problem := disk.wrong(workload, wanted):
                run.found(case, f"without a fault: {problem}")
            calls = disk.calls
            while run.goes_on(case, share) and run.done(case) < calls:
                every = calls <= run.count * share
                first = run.done(case) + 1 if every else run.random(case).randint(1, calls)
                disk.renew()
                disk.fault(kinds, effect, first, first + most - 1)
                if problem := disk.wrong(workload, wanted, effect):
                    run.found(case, f"call {first} of {calls}: {problem}")
                disk.fault()
                if problem := disk.wrong(workload, wanted):
                    run.found(case, f"after call {first} of {calls}: {problem}")
                run.tried(case)


def _flips(run: Run, case: str, folder: Path, check: Callable[[], object]) -> None:
    """Flip bits of the files in ``folder``, one at a time: each is noticed, or changes nothing."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    while run.goes_on(case, _FLIPS):
        choice = run.random(case)
        (path,) = choice.choices(files, [path.stat().st_size for path in files])
        data = bytearray(path.read_bytes())
        whole, bit = bytes(data), choice.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        try:
            with suppress(LocalrtError):
                check()
        except AssertionError:
            run.found(case, f"another answer: bit {bit} of {path.relative_to(folder)}")
        path.write_bytes(whole)
        run.tried(case)


def flips(run: Run, folder: Path) -> None:
    """Flip bits of a packed model, and of a saved KV cache."""
    store, cache = folder / "store", folder / "cache"
    wanted = answer_of(store)

    def check_store() -> None:
        assert answer_of(store) == wanted

    _flips(run, "bits of a store", store, check_store)
    list(workloads.saving_kv_caches(cache, ()))
    _flips(run, "bits of a KV cache", cache, lambda: workloads.check_kv_cache(cache))


def histories(run: Run) -> None:
    """Change and harm one history in any order; a try is a step of the machine."""
    case, examples = "steps with a history", 100
    while run.goes_on(case, _STEPS):
        try:
            drive(examples)
        except Exception:  # noqa: BLE001 - whatever is wrong
            run.found(case, traceback.format_exc()[-5000:])
        run.tried(case, examples * EXAMPLE_STEPS)


# -- the campaign ----------------------------------------------------------------------------------


def storage(run: Run) -> None:
    """Kill localrt and cut its power while it writes; make disks fail; flip what is kept; harm a
    history while windows change it.
    """
    power_loss(run)
    disk = FaultyDisk()
    workloads.end_faults = disk.recover
    try:
        faults(run, disk)
        flips(run, disk.root)
        histories(run)
    finally:
        disk.close()


if __name__ == "__main__":
    preload()
    campaign("storage", storage, count=100, child=child)
