"""Another process takes memory in waves and gives it back, within the limit of eight chats."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.common.command import find_model
from benchmarks.common.memory_limit import MemoryLimit
from localrt.common.errors import LocalrtError
from tests.campaigns.campaign import Run, campaign
from tests.offload.gpu.test_pools import MIB, OTHERS, Shared
from tests.offload.placed import Model, pack_synthetic
from tests.server.conftest import Running, command
from tests.waits import wait_for

_LIMIT, _LESS, _BUDGET, _MOST, _CHATS, _TURNS = 560 << 20, 20 << 20, 320 << 20, 200, 8, 3
_MOST_VRAM, _LONGEST = 800 * MIB, 500
_OTHER = """import mmap, os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
held = []
for line in sys.stdin:
    while len(held) < int(line):
        held.append(mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        held[-1].write(bytes(1 << 20))
        time.sleep(0.1)
    del held[int(line):]
"""


def chat(port: int, number: int) -> list[Any]:
    """The answers of a conversation, with their tokens' probabilities."""
    messages, found = list[Any](), list[Any]()
    for turn in range(_TURNS):
        messages.append({"role": "user", "content": f"{number}: tell me more, {turn}."})
        fields = {"messages": messages, "seed": number, "temperature": 0.8, "max_tokens": 24}
        fields |= {"logprobs": True, "top_logprobs": 2}
        request = Running(None, None, port, None).request
        found.append(request("POST", "/v1/chat/completions", fields)[1]["choices"])
        messages.append(found[-1][0]["message"])
    return found


def killed(group: Path) -> int:
    """How many processes of the group the kernel has ended."""
    files = [group / "memory.events", group / "memory.oom_control"]  # version 2, version 1
    told = " ".join(file.read_text("utf-8") for file in files if file.exists())
    return sum(map(int, re.findall(r"oom_kill (\d+)", told)))


def body(run: Run) -> None:
    """Waves of memory of random heights, and limits that change: see ``docs/reliability.md``."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        limit = MemoryLimit.create(_LIMIT)
        # What the servers have started may end a moment after them.
        stack.callback(wait_for, lambda: limit.remove() or not limit.processes.exists())
        group, pool = limit.processes.parent, stack.enter_context(ThreadPoolExecutor(_CHATS))
        join = f"import os; open({str(limit.processes)!r}, 'w').write(str(os.getpid()))"
        given = {"before": join, "LOCALRT_CACHE": folder, "XDG_DATA_HOME": folder}
        words = ["--quiet", "--ctx", "512", "--parent", str(os.getpid())]
        small = stack.enter_context(command(find_model("smollm2"), *words, **given))
        words += ["--ram", str(_BUDGET)]
        large = stack.enter_context(command(find_model("qwen0.5b"), *words, **given))
        taker = [sys.executable, "-c", _OTHER, limit.processes]
        other = stack.enter_context(subprocess.Popen(taker, stdin=subprocess.PIPE, text=True))
        stack.callback(other.kill)

        def begin() -> list[Future[list[Any]]]:
            return [pool.submit(chat, (small, large)[n % 2][1], n) for n in range(_CHATS)]

        quiet, process = [each.result() for each in begin()], psutil.Process(large[0].pid)
        while run.goes_on("wave") and not killed(group):
            rng, chats = run.random("wave"), begin()
            while not all(each.done() for each in chats):
                with suppress(OSError):
                    print(rng.randrange(_MOST), file=other.stdin, flush=True)
                for name in ("memory.high", "memory.limit_in_bytes"):  # version 2, version 1
                    with suppress(OSError):  # it is the other version, or more is in use now
                        (group / name).write_text(str(_LIMIT - rng.choice((0, _LESS))))
                time.sleep(rng.uniform(0.2, 2))
                run.tried("budget")
                if (taken := process.memory_info().rss) > _BUDGET:
                    run.found("budget", f"{taken:,} bytes of {_BUDGET:,}")
            for number, each in enumerate(chats):
                error = each.exception()
                if error is not None or each.result() != quiet[number]:
                    run.found("wave", f"chat {number}: {error or 'another answer'}")
            if number := killed(group):
                run.found("wave", f"the kernel ended {number} processes")
            run.tried("wave")


def gpu_waves(run: Run) -> None:
    """Other programs take a modelled GPU's memory between passes, and give it back."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        store = pack_synthetic(folder, vocab=1500, layers=3, hidden=128)
        shared = Shared(stack.enter_context(closing(Model(store))), stack)
        shared.sequence(_LONGEST, 5)  # what passes need is reserved, as at loading
        while run.goes_on("GPU wave"):
            rng = run.random("GPU wave")
            room = shared.memory.others + shared.memory.memory()[0]  # they get what is free
            shared.memory.others = min(room, OTHERS + rng.randrange(_MOST_VRAM))
            try:
                shared.sequence(length := rng.randrange(20, _LONGEST), rng.randint(1, length // 10))
            except (AssertionError, LocalrtError) as error:
                run.found("GPU wave", f"{type(error).__name__}: {error}")
            run.tried("GPU wave")


def memory(run: Run) -> None:
    """Waves of other programs' memory: see ``docs/reliability.md``."""
    gpu_waves(run)
    body(run)


if __name__ == "__main__":
    campaign("memory", memory, count=50)
