"""Kills and power cuts while localrt writes: the next start works and finds what was saved.

Each workload runs once under a recorder (``file_calls.cpp``). From its log, the folder is made as
an end at any moment may leave it. A kill leaves every call until then. A power cut leaves what
POSIX promises and no more: a file's bytes last once it was synced, a name once its folder was. Of
later changes any part is lost, in sectors of 512 bytes; a rename is one change (ALICE, Pillai and
others, 2014). Then the workload runs again, and has to leave what it leaves in an empty folder.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common.command import ROOT
from tests.campaigns.campaign import Run, campaign
from tests.campaigns.workloads import POWERLOSS, attempt, note, preloaded
from tests.store.test_writer import contents

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
    command = [sys.executable, "-m", "tests.campaigns.powerloss", "child", name, folder]
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


def body(run: Run, names: Iterable[str] = tuple(POWERLOSS)) -> None:
    """Kill localrt and cut its power while it writes, and start it again."""
    with TemporaryDirectory(prefix="localrt-powerloss-") as scratch:
        folder = Path(scratch).resolve() / "home"
        for name in names:
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


if __name__ == "__main__":
    campaign("powerloss", body, count=110, child=child)
