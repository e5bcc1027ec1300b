"""Inputs that nobody meant, for everything that reads what strangers made (``tests/readers.py``).

An input is its kind, a line feed, and bytes. If atheris is installed, its libFuzzer looks for
inputs that reach new code; otherwise changes are random. If coverage is installed, what all inputs
reach is measured. Readers run in processes of their own, which a crash may end.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from contextlib import ExitStack, chdir, nullcontext
from importlib.util import find_spec
from pathlib import Path

from tests.campaigns.campaign import ROOT, Run, campaign
from tests.mutations import is_line, mutated, refusal
from tests.readers import READERS

MOST_MEMORY = 1 << 30  # bytes more than before the first input
_MOST_S = 300  # of one process, after its start
_STUCK_S = 100  # of one input that waits for what does not come
_LONGEST = 64 << 10  # bytes of an input
_TRACED = ("h11", "json", "tomllib", "zipfile")  # besides the reader's own modules


class Late(BaseException):
    """An input took too much time; no code of the product catches it."""


class Attempts:
    """Gives inputs to a reader in ``folder``; ``seeds`` are its valid ones."""

    def __init__(self, name: str, folder: Path, stack: ExitStack, *, patience: float = 1.0) -> None:
        self._seconds = patience * READERS[name].seconds
        self._empty = folder / "empty"
        for path in (folder / "own", self._empty):
            path.mkdir()
        prepared, self._use = READERS[name].prepare(folder / "own", stack)
        inputs = list(prepared)
        self._kinds = sorted({kind for kind, _ in inputs})
        self.seeds = [
            f"{kind}\n".encode() + (data.encode() if isinstance(data, str) else data)
            for kind, data in inputs
        ]
        stack.callback(signal.signal, signal.SIGPROF, signal.signal(signal.SIGPROF, _late))
        stack.enter_context(chdir(self._empty))
        stack.callback(setattr, tempfile, "tempdir", tempfile.tempdir)
        tempfile.tempdir = str(self._empty)

    def __call__(self, data: bytes) -> str:
        """Return what is wrong with how reading ``data`` ends, and where; "" if nothing is."""
        head, _, body = data.partition(b"\n")
        kind = head.decode("latin-1")
        if kind not in self._kinds:
            kind = self._kinds[len(kind) % len(self._kinds)]
        signal.setitimer(signal.ITIMER_PROF, self._seconds)
        try:
            told = refusal(lambda: self._use(kind, body))
            problem = "" if is_line(told) else f"{kind}: this is not one short line: {told[:20]!r}"
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - a native library's panic too
            problem = f"{type(error).__name__}{_place(error)}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        for left in self._empty.iterdir():
            problem = problem or f"left a file in {left.parent.name}"
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return problem

    def smallest(self, data: bytes, problem: str) -> bytes:
        """Return ``data`` without parts that the same ``problem`` does not need."""
        size, left = len(data) // 2, 500
        while size and left > 0:
            for at in range(0, len(data), size):
                less, left = data[:at] + data[at + size :], left - 1
                if self(less) == problem:
                    data = less
                    break
            else:
                size //= 2
        return data


def _late(*_: object) -> None:
    raise Late


def _place(error: BaseException) -> str:
    """Return the last line of the product in a traceback, or else of its tests."""
    frames = traceback.extract_tb(error.__traceback__)
    here = [frame for frame in frames if frame.filename.startswith(f"{ROOT}/")]
    own = [frame for frame in here if not frame.filename.startswith(f"{ROOT}/tests/")] or here
    return f" at {Path(own[-1].filename).relative_to(ROOT)}: {own[-1].line}" if own else ""


# -- a process for one reader ----------------------------------------------------------------------


def child(name: str, place: str, *numbers: str) -> None:
    """Try inputs: the valid ones, and those in a folder, which grows. Problems become lines of
    ``found``; ``state`` has the number of inputs and the last one, also after a crash.
    """
    folder, (tries, seed, seconds) = Path(place), map(int, numbers)
    state = mmap.mmap(os.open(folder / "state", os.O_RDWR), 16 + _LONGEST)
    known, count, reader = set[str](), 0, READERS[name]
    traced, stack = tries > 0 and find_spec("atheris") is not None, ExitStack()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None
    space = stack.enter_context(tempfile.TemporaryDirectory(dir=memory))

    def once(data: bytes) -> None:
        nonlocal count
        count, data = count + 1, data[:_LONGEST]
        state[: 16 + len(data)] = struct.pack("<QQ", count, len(data)) + data
        if (problem := attempts(data)) and problem not in known:
            known.add(problem)
            with (folder / "found").open("a") as file:
                line = json.dumps([problem, attempts.smallest(data, problem).hex()])
                file.write(line + "\n")

    if traced:
        import atheris
    places = [Path("localrt", each.removeprefix("localrt/")) for each in reader.modules.split()]
    own = [".".join((p.parent if "*" in p.name else p.with_suffix("")).parts) for p in places]
    with atheris.instrument_imports(include=[*own, *_TRACED]) if traced else nullcontext():
        attempts = Attempts(name, Path(space), stack)
        for data in attempts.seeds:
            once(data)  # with imports that wait for use
    corpus, draw = folder / "corpus", random.Random(seed)
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[0])
    most = pages * resource.getpagesize() + MOST_MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
    if traced:
        for number, data in enumerate(attempts.seeds):
            (corpus / f"valid-{number}").write_bytes(data)

        def change(data: bytes, most: int, number: int) -> bytes:
            draw.seed(number)
            if draw.random() < 0.5:
                return bytes(atheris.Mutate(data, most))
            return mutated(data, draw, attempts.seeds)[:most]

        flags = {"runs": tries, "seed": seed, "max_total_time": seconds, "timeout": _STUCK_S}
        flags |= {"verbosity": 0, "rss_limit_mb": 0, "max_len": _LONGEST, "len_control": 1}
        given = [f"-{flag}={value}" for flag, value in flags.items()]
        prefix = f"-artifact_prefix={space}/"
        atheris.Setup([sys.argv[0], *given, prefix, str(corpus)], once, custom_mutator=change)
        atheris.Fuzz()  # ends the process
    inputs = [*attempts.seeds, *(path.read_bytes() for path in sorted(corpus.iterdir()))]
    for data in () if tries else inputs:
        once(data)
    while count < tries and sum(resource.getrusage(resource.RUSAGE_SELF)[:2]) < seconds:
        signal.alarm(_STUCK_S)
        once(mutated(draw.choice(inputs), draw, inputs))
    stack.close()


# -- the campaign ----------------------------------------------------------------------------------


def fuzz(run: Run) -> None:
    """Give changed files and requests to everything that reads them; ``--count`` is of all."""
    while going := [name for name in READERS if run.goes_on(name, READERS[name].share)]:
        for name in going:
            tries = max(1, int(run.count * READERS[name].share) - run.done(name))
            seconds = int(min(_MOST_S, max(1, run.seconds - run.elapsed)))
            count, problems = _started(run, name, tries, seconds)
            for problem, data in problems:
                if f"{name}: {problem}" not in run.failures:
                    run.found(name, problem, data)
            run.tried(name, count)
    if find_spec("coverage") is not None:
        for name, reader in READERS.items():
            files = [f"--include={','.join(str(ROOT / each) for each in reader.modules.split())}"]
            tool = [sys.executable, "-m", "coverage"]
            data_file = f"--data-file={run.folder / run.name / 'coverage'}"
            _started(run, name, 0, 0, [*tool, "run", data_file, *files])
            command = [*tool, "report", data_file, "--format=total"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            run.figure(f"lines reached of {name}", f"{done.stdout.strip()} %")


def _started(
    run: Run, name: str, tries: int, seconds: int, tool: list[str] | None = None
) -> tuple[int, list[tuple[str, bytes]]]:
    """Return how many inputs a process tried, and the problems that it found."""
    folder = run.folder / run.name / name
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    (folder / "found").write_text("")
    (folder / "state").write_bytes(bytes(16 + _LONGEST))
    command = [*(tool or [sys.executable]), "-m", "tests.campaigns.fuzz", "child", name, folder]
    numbers = (f"{number}" for number in (tries, run.random(name).getrandbits(31), seconds))
    environ = {**os.environ, "MALLOC_ARENA_MAX": "2", "LOCALRT_OFFLINE": "1"}
    with (folder / "log").open("wb") as log:
        done = subprocess.run([*command, *numbers], stdout=log, stderr=log, env=environ)
    problems = [json.loads(line) for line in (folder / "found").read_text("utf-8").splitlines()]
    state = (folder / "state").read_bytes()
    count, length = struct.unpack("<QQ", state[:16])
    if done.returncode:
        why = f"ended with status {done.returncode} (see {folder.name}/log)"
        problems.append((why, state[16 : 16 + length].hex()))
    return max(count, 1), [(problem, bytes.fromhex(data)) for problem, data in problems]


if __name__ == "__main__":
    campaign("fuzz", fuzz, count=1_000_000, child=child)
