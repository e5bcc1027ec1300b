"""Nothing grows with misbehaving clients, requests that share nothing, and keys in the app."""

from __future__ import annotations

import os
import random
import re
import subprocess
import tempfile
import termios
import threading
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import psutil

from localrt.bench.mix.mix import AppRequest
from localrt.bench.mix.servers import Client, Target, TimedReply
from localrt.client.servers import read_address
from localrt.common.settings import CRASH_REPORT
from tests.campaigns.campaign import Run, campaign
from tests.models.vision.tiny import qwen_folder
from tests.server.conftest import command, write_long
from tests.server.misbehaving import WAYS, page, visit
from tests.tui.test_terminal import DATA, Shell
from tests.waits import wait_for

_HOUR, _CLIENTS = 3600.0, 50
SLACK = {"memory": 16 << 20, "threads": 2, "descriptors": 8, "cache": 16 << 20}


def sample(pid: int, folder: Path) -> dict[str, int]:
    """What a process takes now, and the cache in ``folder``."""
    status = dict(re.findall(r"(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text("utf-8")))
    size = subprocess.run(["du", "-sb", folder / "cache"], capture_output=True, text=True).stdout
    memory, files = int(status["RssAnon"]) + int(status["VmSwap"]), psutil.Process(pid).num_fds()
    taken = {"memory": memory << 10, "threads": int(status["Threads"]), "descriptors": files}
    return {**taken, "cache": int((size or "0").split()[0])}


def judge(run: Run, case: str, samples: list[dict[str, int]]) -> None:
    """Note whose last quarter's median exceeds the second tenth's by 5 %, and by its slack."""
    tenth, quarter = len(samples) // 10, len(samples) // 4 + 1
    for name, slack in SLACK.items():
        before = median(one[name] for one in samples[tenth : 2 * tenth + 1])
        after = median(one[name] for one in samples[-quarter:])
        run.figure(f"{case}: {name}, second tenth and last quarter", f"{before:,.0f}, {after:,.0f}")
        if after > max(1.05 * before, before + slack):
            run.found(case, f"{name} has grown from {before:,.0f} to {after:,.0f}")


def polite(place: Target, until: float, pause: float) -> list[TimedReply]:
    """Ask for short answers until then, at least for one."""
    replies: list[TimedReply] = []
    while not replies or time.monotonic() < until:
        said = [{"role": "user", "content": f"{len(replies)}: what is this?"}]
        body = {"messages": said, "max_tokens": 8, "ignore_eos": True, "stream": True}
        replies.append(Client().send(place, AppRequest("/chat/completions", body), "interactive"))
        time.sleep(pause)
    return replies


def clients(run: Run, pid: int, port: int, folder: Path) -> None:
    """Clients misbehave beside a polite one, which was alone for a tenth of the time. That one is a
    process of its own, so that it does not wait for the others' threads.
    """
    seconds, over, lock = min(run.seconds, _HOUR), threading.Event(), threading.Lock()
    place = Target(read_address(f"http://127.0.0.1:{port}"), "model")

    def note(who: str, bad: str) -> None:
        with lock:
            run.tried(f"client: {who}")
            if bad and not over.is_set():
                run.found(f"client: {who}", bad)

    def misbehave(number: int) -> None:
        rng, most = random.Random(f"{run.seed} client {number}"), min(40.0, seconds / 4)
        while not over.wait(rng.expovariate(1 / min(5.0, seconds / 20))):
            way = rng.choice(WAYS)
            try:
                bad = page(rng, port) if way == "page" else visit(way, rng, port, over.wait, most)
            except (OSError, LookupError, TypeError) as error:
                bad = repr(error)
            note(way, bad)

    page(random.Random(), port)  # opens the conversations
    samples = [sample(pid, folder)]
    own = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
    with own as process, ThreadPoolExecutor(_CLIENTS) as pool:
        process.submit(polite, place, 0.0, 0.0).result()  # it has started
        began = time.monotonic()
        asks = partial(process.submit, polite, place, pause=min(1.0, seconds / 100))
        alone = asks(until=began + seconds / 10).result()
        try:
            beside = asks(until=began + seconds)
            others = [pool.submit(misbehave, number) for number in range(_CLIENTS)]
            while not beside.done():
                samples.append(sample(pid, folder))
                time.sleep(min(4.0, seconds / 100))
        finally:
            over.set()
    assert not any(each.exception() for each in others)
    for reply in (*alone, *beside.result()):
        run.tried("client: polite")
        if reply.error:
            run.found("client: polite", reply.error)
    judge(run, "clients", samples)
    for name in ("ttft_s", "end_s"):
        both = [[getattr(one, name) or 0.0 for one in each] for each in (alone, beside.result())]
        lone, among = (sorted(times)[99 * len(times) // 100] for times in both)
        run.figure(f"polite client: p99 of {name}", f"{lone:.3f} alone, {among:.3f} among others")
        if among > 2 * lone:
            run.found("polite client's p99", f"{name} is {among:.3f}, and {lone:.3f} alone")
    # Nothing is left of them: kept connections are closed, and streams that nobody reads.
    wait_for(lambda: sample(pid, folder)["descriptors"] <= samples[0]["descriptors"] + 2, 90)


def one_shots(run: Run, pid: int, port: int, folder: Path) -> None:
    """Requests that share nothing with any other, a few at once."""
    samples, each = [], run.count // 50 + 1
    with ThreadPoolExecutor(4) as pool:
        while (first := run.done("one-shot")) < run.count:
            rngs = [random.Random(f"{run.seed} one-shot {first + n}") for n in range(each)]
            for bad in filter(None, pool.map(lambda rng: visit("reads", rng, port), rngs)):
                run.found("one-shot", bad)
            run.tried("one-shot", each)
            samples.append(sample(pid, folder))
    judge(run, "one-shot", samples)


_APP = """import os, sys
import localrt
from localrt.cli import main
localrt.list_models = list  # a window of the app loads none of this machine's
os.environ.update(LOCALRT_CACHE={0!r}, HOME={0!r}, LOCALRT_OFFLINE="1")
sys.exit(main(["chat", {1!r}, "--max-tokens", "40", "--ctx", "2048"]))
"""
_KEYS = [*"\r\r\r\x1b\x1b\x1b\x0e\x0f\x06\x12\t\x7f", "the sea ", "wind ", "\x1be", "\x1b[A"]
_KEYS += ["\x1b[B", "\x1b[5~", "\x1bOP", "\x1bOR", "\x1bOS", "\x1b[15~"]


def app(run: Run, model: Path, folder: Path) -> None:
    """Keys in the app, seeded: text, messages, Esc, dialogs, searches, other conversations."""
    write_long(folder / DATA / "history.db", [f"turn{number}of2000" for number in range(1, 2001)])
    with ExitStack() as stack:
        shell = Shell(folder, stack, app=_APP.format(str(folder / "cache"), str(model)))
        try:
            type_keys(run, shell)
        except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):  # no key ends it
            report = folder / DATA / CRASH_REPORT
            told = report.read_text("utf-8") if report.exists() else "no report"
            run.found("app", f"it ended with {shell.status}: {told}")


def rest(shell: Shell, process: psutil.Process) -> None:
    """Wait until the app has taken all keys: those that wait take memory, and so do the windows
    that they close.
    """
    for _ in range(200):  # a minute: then it is sampled as it is
        shell.written, before = b"", sum(process.cpu_times()[:2])
        time.sleep(0.3)
        if not shell.read() and sum(process.cpu_times()[:2]) - before < 0.03:
            break


def type_keys(run: Run, shell: Shell) -> None:
    """Type in the app, and note what is wrong as long as it runs."""
    rng, samples, seconds = random.Random(run.seed), list[dict[str, int]](), min(run.seconds, _HOUR)

    def shown(keys: str, text: str) -> float:
        shell.written, began = b"", time.perf_counter()
        shell.type(keys)
        wait_for(lambda: shell.shows(text), 120)
        return time.perf_counter() - began

    shown("", "ready")
    shown("\x0f", "2000 turns")
    took = shown("\r", "turn2000of2000")
    run.figure("app: seconds to open a conversation of 2,000 turns", round(took, 2))
    if took > 0.5:
        run.found("app: opening", f"a conversation of 2,000 turns opens in {took:.2f} s")
    process, until = psutil.Process(shell.app), time.monotonic() + seconds
    while time.monotonic() < until:
        shell.type(rng.choice(_KEYS))
        time.sleep(0.05)
        shell.read()  # as a terminal does: an app that cannot write takes no keys
        if not run.done("app: keys") % 50:
            rest(shell, process)
            samples.append(sample(shell.app, shell.folder))
            termios.tcsetwinsize(shell.slave, (rng.randint(4, 60), rng.randint(20, 200)))
        run.tried("app: keys")
    judge(run, "app", samples)
    shell.type("\x1b" * 8)
    time.sleep(min(10.0, seconds / 4))
    process.cpu_percent()
    time.sleep(min(60.0, seconds))
    run.figure("app: percent of a core when idle", idle := process.cpu_percent())
    if idle >= 1:
        run.found("app: idle", f"{idle} % of a core with no keys")


def body(run: Run) -> None:
    """Soak the server and the app: see ``docs/reliability.md``."""
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name), qwen_folder(Path(name) / "model")
        kept = {"LOCALRT_CACHE": str(folder / "cache"), "XDG_DATA_HOME": str(folder / "served")}
        words = ("--quiet", "--max-tokens", "24", "--parent", str(os.getpid()))
        with command(model, *words, LOCALRT_KV_DISK="32MB", **kept) as (server, port):
            clients(run, server.pid, port, folder)
            one_shots(run, server.pid, port, folder)
            server.terminate()
            _, told = server.communicate(timeout=120)
            if server.returncode or told:
                run.found("server", f"it ended with {server.returncode}: {told[-2000:]}")
        app(run, model, folder)


if __name__ == "__main__":
    campaign("soak", body, count=5000)
