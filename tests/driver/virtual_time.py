"""Virtual time for pipelines on the tests' driver: what passes would take on a described machine.

The threads of a pipeline run one at a time, always the one whose own clock is earliest, so that
their calls come in the machine's order. Work of the driver gets its begin and end as it is
submitted: after what its stream and its events have before it, once its engine is free and the
thread has called. It shows schedules; what a driver's locks and a kernel's cold caches cost it does
not know.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from localrt.offload.device import cuda, gpu
from localrt.offload.pipeline.lane import Lane
from localrt.offload.pipeline.split import HostPiece
from localrt.offload.reading import files, queued, reader
from localrt.quant.cuda import linear
from localrt.quant.cuda.driver import Cuda, Event

_SLEEPS = 1  # CU_EVENT_BLOCKING_SYNC


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Rates in bytes, and costs in seconds. A byte of the model stands for ``scale`` bytes."""

    link: float
    gpu: float
    cpu: float
    disk: float = 3e9
    scale: float = 1000.0
    call: float = 4e-6
    """A call of the driver."""
    launch: float = 6e-6
    """Starting a kernel or a graph; ``kernel`` is what each takes the GPU beside its bytes."""
    kernel: float = 1.5e-6
    spin: float = 2e-6
    """From the end of what a spinning thread waits for, until it goes on."""
    wake: float = 0.25e-3
    """The same of a thread that sleeps until a copy has ended, up to its next call."""
    notice: float = 0.1e-3
    """The same of a thread that another one wakes."""
    preempted: float = 0.8e-3
    """Most that a sleeping thread waits for a core that computes, or spins ``spins`` after it."""
    spins: float = 0.9e-3
    crossing: float = 0.6e-3
    """What the host does around a unit that the CPU computes."""
    turn: float = 10e-6
    """The same for its part of an MLP that it shares, of which there are two; measured: 5."""


@dataclass(frozen=True, slots=True)
class Span:
    """What a resource did, in virtual seconds."""

    resource: str
    name: str
    start: float
    end: float


@dataclass(eq=False)
class _Actor:
    """A thread in virtual time."""

    name: str
    now: float
    turn: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    blocked: bool = False
    until: float | None = None  # when it stops waiting by itself
    asleep: bool = False  # until now, so that it needs a core
    ended: bool = False


class VirtualTime:
    """The clocks of the thread that makes it, and of those that a pipeline starts meanwhile."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.spans: list[Span] = []
        self.waits: Counter[str] = Counter()  # for the driver, by thread
        self.host = 0.0  # seconds of the thread of the pass, without its products
        self.local = threading.local()
        self.local.actor = _Actor("pass", 0.0)
        self.actors: list[_Actor] = [self.local.actor]
        self._streams: defaultdict[int, float] = defaultdict(float)
        self._events: defaultdict[int, float] = defaultdict(float)
        self._sleeping: set[int] = set()  # events
        self._engines: defaultdict[str, float] = defaultdict(float)
        self._graphs: dict[int, tuple[int, float]] = {}  # kernels of each, and bytes they read
        self._recorded = (0, 0.0)
        self.bytes = 0.0  # of weights that the next launch reads
        self._computing: list[tuple[float, float]] = []

    # -- clocks ----------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The calling thread's clock; that of the pass for others."""
        return float(getattr(self.local, "actor", self.actors[0]).now)

    def spend(self, seconds: float) -> None:
        """The calling thread computes, or is at work in Python."""
        self.local.actor.now += seconds
        if self.local.actor.name == "pass":
            self.host += seconds

    def compute(self, name: str, seconds: float) -> None:
        """All cores compute."""
        start = self.now
        self.local.actor.now += seconds
        self._computing.append((start, self.now + self.machine.spins))
        self.spans.append(Span("cpu", name, start, self.now))
        self._give_way()

    def use(self, engine: str, name: str, after: float, seconds: float) -> float:
        """Work for an engine, which does one thing at a time; returns its end."""
        start = max(after, self._engines[engine])
        self._engines[engine] = end = start + seconds
        self.spans.append(Span(engine, name, start, end))
        return end

    def wait_until(self, when: float, *, sleeps: bool) -> None:
        """The calling thread goes on once this has happened."""
        actor = self.local.actor
        self.waits[actor.name] += when > actor.now
        late = self.machine.wake if sleeps else self.machine.spin
        actor.asleep = sleeps and when > actor.now
        actor.now = max(actor.now, when) + late
        self._give_way()

    def busy(self, resource: str, since: float, until: float) -> float:
        """The share of this time in which a resource was at work."""
        spans = (s for s in self.spans if s.resource == resource)
        inside = (min(s.end, until) - max(s.start, since) for s in spans)
        return sum(max(0.0, seconds) for seconds in inside) / (until - since)

    def between(self, first: Any, later: Any) -> float:
        """Seconds between two events."""
        return self._events[int(later)] - self._events[int(first)]

    def has_happened(self, event: Any) -> bool:
        """Whether an event has, by now."""
        return self._events[int(event)] <= self.now

    # -- threads ---------------------------------------------------------------------------------

    def _give_way(self) -> None:
        """Let those go first whose clocks are earlier."""
        actor = self.local.actor
        if (first := self.earliest()) is not actor:
            first.turn.release()
            actor.turn.acquire()

    def earliest(self) -> _Actor:
        while True:
            waiting = [a for a in self.actors if not a.blocked or a.until is not None]
            assert waiting, "every thread waits for another"
            first = min(waiting, key=lambda a: a.now if not a.blocked else a.until)
            if first.blocked:
                first.blocked, first.now = False, first.until or first.now
            if not first.asleep:
                return first
            first.asleep = False
            for start, end in self._computing[-4:]:
                if start <= first.now < end:
                    first.now += min(self.machine.preempted, end - first.now)

    def block(self, seconds: float | None) -> None:
        """Until another thread says so, or so long."""
        actor = self.local.actor
        actor.blocked, actor.until = True, None if seconds is None else actor.now + seconds
        self._give_way()
        actor.until = None

    def unblock(self, actor: _Actor) -> None:
        actor.blocked, actor.asleep = False, True
        actor.now = max(actor.now, self.now) + self.machine.notice

    def threading(self) -> SimpleNamespace:
        """In place of the module: threads and conditions in virtual time."""
        time = self

        class Condition:
            """No lock is needed: one thread runs at a time, until it waits."""

            def __init__(self) -> None:
                self._waiting: list[_Actor] = []

            def __enter__(self) -> None: ...

            def __exit__(self, *exc: object) -> None: ...

            def wait(self, timeout: float | None = None) -> None:
                actor = time.local.actor
                self._waiting.append(actor)
                time.block(timeout)
                if actor in self._waiting:
                    self._waiting.remove(actor)

            def notify_all(self) -> None:
                waiting, self._waiting = self._waiting, []
                for actor in waiting:
                    if actor.blocked:
                        time.unblock(actor)

        class Thread:
            def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
                self._actor, self._target = _Actor(name, time.now), target
                self._thread = threading.Thread(target=self._run, name=name, daemon=daemon)
                self._end = Condition()

            def start(self) -> None:
                time.actors.append(self._actor)
                self._thread.start()

            def _run(self) -> None:
                time.local.actor = self._actor
                self._actor.turn.acquire()
                try:
                    self._target()
                finally:
                    self._actor.ended = True
                    self._end.notify_all()
                    time.actors.remove(self._actor)
                    time.earliest().turn.release()

            def join(self, timeout: float | None = None) -> None:
                while not self._actor.ended:
                    self._end.wait()
                self._thread.join()

        return SimpleNamespace(Condition=Condition, Lock=Condition, Thread=Thread)

    # -- the driver --------------------------------------------------------------------------------

    def called(self, gpu: Cuda, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Note a call that the driver has taken."""
        actor = getattr(self.local, "actor", None)
        if actor is None:
            return
        self.spend(self.machine.call)
        if gpu.recording and name != "cuGraphInstantiate":
            kernels, nbytes = self._recorded
            kernels += name == "cuLaunchKernel"
            self._recorded, self.bytes = (kernels, nbytes + self.bytes), 0.0
            return
        if (note := _NOTED.get(name)) is not None:
            note(self, args, result)

    def _submit(self, engine: str, name: str, stream: Any, seconds: float) -> None:
        after = max(self.now, self._streams[int(stream)])
        self._streams[int(stream)] = self.use(engine, name, after, seconds)

    def _copy(self, engine: str, nbytes: int, stream: Any) -> None:
        if nbytes >= _WEIGHTS:
            self._submit(engine, "copy", stream, nbytes * self.machine.scale / self.machine.link)
            return
        # Activations, on a stream of their own: they wait for the copy that runs, not for the
        # other stream's next ones.
        begin = max(self.now, self._streams[int(stream)])
        running = (s.end for s in reversed(self.spans) if s.resource == engine and s.start <= begin)
        begin = max(begin, next(running, begin))
        self._streams[int(stream)] = begin + nbytes / self.machine.link

    def copy_in(self, args: tuple[Any, ...], result: Any) -> None:
        self._copy("link", args[2], args[3])

    def copy_out(self, args: tuple[Any, ...], result: Any) -> None:
        self._copy("back", args[2], args[3])

    def _start(self, stream: Any, kernels: int) -> None:
        self.spend(self.machine.launch)
        seconds = kernels * self.machine.kernel + self.bytes / self.machine.gpu
        self.bytes = 0.0
        self._submit("gpu", "kernels", stream, seconds)

    def launch(self, args: tuple[Any, ...], result: Any) -> None:
        self._start(args[8], 1)

    def make_graph(self, args: tuple[Any, ...], result: Any) -> None:
        self._graphs[int(result)], self._recorded = self._recorded, (0, 0.0)

    def launch_graph(self, args: tuple[Any, ...], result: Any) -> None:
        kernels, self.bytes = self._graphs.get(int(args[0]), (0, 0.0))
        self._start(args[1], kernels)

    def make_event(self, args: tuple[Any, ...], result: Any) -> None:
        self._events[int(result)] = 0.0
        (self._sleeping.add if args[0] & _SLEEPS else self._sleeping.discard)(int(result))

    def record_event(self, args: tuple[Any, ...], result: Any) -> None:
        self._events[int(args[0])] = self._streams[int(args[1])]

    def wait_for_event(self, args: tuple[Any, ...], result: Any) -> None:
        stream = int(args[0])
        self._streams[stream] = max(self._streams[stream], self._events[int(args[1])])

    def await_event(self, args: tuple[Any, ...], result: Any) -> None:
        event = int(args[0])
        self.wait_until(self._events[event], sleeps=event in self._sleeping)

    def await_stream(self, args: tuple[Any, ...], result: Any) -> None:
        self.wait_until(self._streams[int(args[0])], sleeps=False)


_NOTED: dict[str, Callable[[VirtualTime, tuple[Any, ...], Any], None]] = {
    "cuMemcpyHtoDAsync": VirtualTime.copy_in,
    "cuMemcpyDtoHAsync": VirtualTime.copy_out,
    "cuLaunchKernel": VirtualTime.launch,
    "cuGraphInstantiate": VirtualTime.make_graph,
    "cuGraphLaunch": VirtualTime.launch_graph,
    "cuEventCreate": VirtualTime.make_event,
    "cuEventRecord": VirtualTime.record_event,
    "cuStreamWaitEvent": VirtualTime.wait_for_event,
    "cuEventSynchronize": VirtualTime.await_event,
    "cuStreamSynchronize": VirtualTime.await_stream,
}
_WEIGHTS = 4096  # bytes: no activation of the model in the tests is larger


@contextmanager
def virtual_time(machine: Machine, weights: Callable[[str], int]) -> Iterator[VirtualTime]:
    """Virtual time for the pipelines that are opened within; ``weights`` says how many bytes the
    CPU's unit of a name has.
    """
    time = VirtualTime(machine)
    call = Cuda.call
    compute, fetch = Lane.compute, files.DiskSource.fetch
    product, turns = linear.product, (HostPiece.gate, HostPiece.down)

    def timed_call(driver: Cuda, name: str, *args: Any, **options: Any) -> Any:
        result = call(driver, name, *args, **options)
        time.called(driver, name, args, result)
        if name == "cuEventElapsedTime":
            return time.between(*args) * 1e3
        return result

    def timed_query(event: Event) -> bool:
        happened = time.has_happened(event.handle)
        if happened:
            call(event._gpu, "cuEventSynchronize", event.handle)
        return happened

    def timed_compute(lane: Lane, part: Any, name: str, state: Any, **options: Any) -> None:
        nbytes = 0 if lane.gpu is not None else weights(name)
        if not nbytes:
            compute(lane, part, name, state, **options)
            return

        def timed_part(state: Any) -> None:
            part(state)
            time.compute(name, nbytes * machine.scale / machine.cpu)

        time.spend(machine.crossing)
        compute(lane, timed_part, name, state, **options)

    def timed_product(x: Any, weight: Any, out: Any, **options: Any) -> None:
        time.bytes += weight.data.nbytes * machine.scale
        product(x, weight, out, **options)

    def timed_turn(number: int) -> Callable[[HostPiece, Any], Any]:
        def turn(piece: HostPiece, x: Any) -> Any:
            weight = piece.mlp.weights.down if number else piece.mlp.weights.gate_up
            time.spend(machine.turn)
            with piece._clock.task("cpu", piece.name):
                y = turns[number](piece, x)
                time.compute(piece.name, weight.nbytes * machine.scale / machine.cpu)
            return y

        return turn

    def timed_fetch(source: Any, unit: Any, start: int, out: Any, after: Any) -> None:
        fetch(source, unit, start, out, after)  # once ``after`` has happened
        end = time.use("disk", unit.name, time.now, out.nbytes * machine.scale / machine.disk)
        time.wait_until(end, sleeps=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cuda, "call", timed_call)
        patch.setattr(Event, "query", timed_query)
        patch.setattr(Lane, "compute", timed_compute)
        patch.setattr(linear, "product", timed_product)
        for number, name in enumerate(("gate", "down")):
            patch.setattr(HostPiece, name, timed_turn(number))
        patch.setattr(files.DiskSource, "fetch", timed_fetch)
        for module in (reader, queued):
            patch.setattr(module, "threading", time.threading())
        clock = SimpleNamespace(perf_counter=lambda: time.now)
        for module in (cuda, gpu):
            patch.setattr(module, "time", clock)
        yield time
