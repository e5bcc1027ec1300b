"""Runs a mix on servers in turn: starts them, plays the applications, and records every request.

Each session runs in its own thread. After the mix's end nothing new is sent, and running answers
may finish.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from localrt.bench.mix.mix import App, AppRequest, Goals, Mix, arrivals, marked, session
from localrt.bench.mix.neighbours import RunningNeighbour
from localrt.bench.mix.servers import Client, Running, Server, TimedReply
from localrt.bench.sampling import Sampler, Samples
from localrt.common.errors import LocalrtError
from localrt.common.formatting import format_seconds

_DRAIN_S = 60.0  # seconds for running answers to finish at the end
_AFTER_ERROR_S = 1.0
_INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request and its result; ``at_s`` is when it was sent.

    ``met``: whether it met its goals; None without goals, or if it was given up as planned before
    it missed one.
    """

    app: str
    at_s: float
    reply: TimedReply
    met: bool | None

    @classmethod
    def of(cls, app: App, at_s: float, reply: TimedReply) -> Outcome:
        """Create an event, judging the reply by the application's goals."""
        met: bool | None = False
        if app.goals == Goals():
            met = None
        elif reply.cancelled:
            met = False if app.goals.missed_by(reply.end_s, ttft_s=reply.ttft_s) else None
        elif reply.error is None:
            met = app.goals.met(
                ttft_s=reply.ttft_s, tpot_s=reply.tpot_s, total_s=reply.end_s, tokens=reply.tokens
            )
        return cls(app.name, at_s, reply, met)


@dataclass(slots=True)
class MixRun:
    """One server's run of a mix. ``client_cpu_s`` is this process's CPU time, sampling included."""

    commands: list[str]
    events: list[Outcome] = field(default_factory=list)
    samples: Samples = field(default_factory=Samples)
    neighbours: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    client_cpu_s: float = 0.0


@dataclass(slots=True)
class MixOutcome:
    """All runs by server, in order, and why other servers did not run."""

    runs: dict[str, list[MixRun]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


def run_mix(
    mix: Mix, servers: Sequence[Server], runs: int, notify: Callable[[str], None]
) -> MixOutcome:
    """Run the mix ``runs`` times on each server; only one server is up at a time.

    Texts begin with a mark that is new for each server and run, since servers cache earlier
    prompts, localrt even on disk. A server that fails to start is skipped. Ctrl+C ends the run and
    returns what was measured.
    """
    outcome = MixOutcome()
    try:
        for number in range(1, runs + 1):
            for server in servers:
                if server.name in outcome.skipped:
                    continue
                mark = f"{secrets.token_hex(4)}: "
                turn = f", run {number} of {runs}" if runs > 1 else ""
                notify(f"starting {server.name}{turn}")
                try:
                    with server.serve(mix) as running:
                        _warm_up(mix, running, mark)
                        notify(f"{mix.name} on {server.name}: {format_seconds(mix.seconds)}")
                        run = MixRun(running.commands)
                        outcome.runs.setdefault(server.name, []).append(run)
                        play(mix, running, run, mark)
                except LocalrtError as error:
                    outcome.skipped[server.name] = str(error)
                    notify(f"{server.name}: {error}")
    except KeyboardInterrupt:
        outcome.interrupted = True
    return outcome


def _warm_up(mix: Mix, running: Running, mark: str) -> None:
    """Send a first request of every application, so that models are loaded.

    Raises:
        LocalrtError: it failed.
    """
    client = Client()
    for app in mix.apps:
        request = marked(next(session(app, -1, mix.seed)), mark)
        body = {**request.body, **({"max_tokens": 2} if app.answer_tokens else {})}
        reply = client.send(running.places[app.name], AppRequest(request.path, body), app.class_)
        if reply.error is not None:
            raise LocalrtError(f"{app.name}: {reply.error}")


def play(mix: Mix, running: Running, run: MixRun, mark: str, *, drain_s: float = _DRAIN_S) -> None:
    """Play the mix once on a running server; ``run`` has the results even after Ctrl+C."""
    with ExitStack() as stack:
        neighbours = [stack.enter_context(RunningNeighbour(each)) for each in mix.neighbours]
        played = _Play(mix, running, run, mark)
        due = [(each.neighbour.start_s, each.start) for each in neighbours]
        due += played.sessions()
        owners = {each.neighbour.name: each.pid for each in neighbours}
        before = time.process_time()
        with Sampler({**running.owners, **owners}, played.clock) as sampler:
            run.samples = sampler.found
            try:
                for at_s, begin in sorted(due, key=lambda one: one[0]):
                    played.sleep_until(at_s)
                    begin()
                played.sleep_until(mix.seconds)
                played.finish(drain_s)
            finally:
                played.interrupt()
                run.seconds, run.client_cpu_s = played.clock(), time.process_time() - before
                run.neighbours = [each.stop() for each in neighbours]


class _Play:
    """The sessions of one run."""

    def __init__(self, mix: Mix, running: Running, run: MixRun, mark: str) -> None:
        self._mix, self._running, self._run, self._mark = mix, running, run, mark
        self._client = Client()
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._started = time.perf_counter()

    def clock(self) -> float:
        """Return the seconds since the start."""
        return time.perf_counter() - self._started

    def sleep_until(self, at_s: float) -> None:
        """Sleep in steps, so that Ctrl+C works on every system."""
        while (left := at_s - self.clock()) > 0:
            time.sleep(min(left, 0.2))

    def sessions(self) -> list[tuple[float, Callable[[], None]]]:
        """Return all sessions' start times, and functions that run them."""
        found: list[tuple[float, Callable[[], None]]] = []
        for app in self._mix.apps:
            times = arrivals(app, self._mix.seconds, self._mix.seed)
            found += [
                (at, partial(self._begin, app, index, None)) for index, at in enumerate(times)
            ]
            for user in range(app.closed or 0):
                found.append((app.start_s, partial(self._begin, app, user, app.closed)))
        return found

    def _begin(self, app: App, index: int, step: int | None) -> None:
        thread = threading.Thread(target=self._user, args=(app, index, step), daemon=True)
        self._threads.append(thread)
        thread.start()

    def _user(self, app: App, index: int, step: int | None) -> None:
        """Run a session; with ``step``, every ``step``-th one, one after another, until the end."""
        while not self._over.is_set():
            if not self._session(app, index):
                self._over.wait(_AFTER_ERROR_S)
            if step is None:
                return
            index += step

    def _session(self, app: App, index: int) -> bool:
        """Run a session until the first failure; return whether all answers succeeded."""
        steps = session(app, index, self._mix.seed)
        request = next(steps)
        while True:  # the first request is sent even if the mix has just ended
            at_s = self.clock()
            place, sent = self._running.places[app.name], marked(request, self._mark)
            reply = self._client.send(place, sent, app.class_)
            if reply.error == _INTERRUPTED:
                return False
            self._run.events.append(Outcome.of(app, at_s, reply))
            if reply.error is not None:
                return False
            try:
                following = steps.send(reply.text)
            except StopIteration:
                return True
            if request.give_up_s is not None:  # resume at a fixed time, even if already answered
                self._over.wait(max(0.0, at_s + request.give_up_s - self.clock()))
            request = following
            if self._over.wait(request.pause_s):
                return True

    def finish(self, drain_s: float) -> None:
        """Send nothing new, and give running answers ``drain_s`` seconds to finish."""
        self._over.set()
        until = self.clock() + drain_s
        while any(thread.is_alive() for thread in self._threads) and self.clock() < until:
            time.sleep(0.1)
        self._end(f"not finished {drain_s:g} s after the end")

    def interrupt(self) -> None:
        """End all requests; running ones are not recorded."""
        self._over.set()
        self._end(_INTERRUPTED)

    def _end(self, why: str) -> None:
        self._client.cancel(why)
        for thread in self._threads:
            thread.join(5)
