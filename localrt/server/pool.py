"""This machine's models behind one server: loaded on request, within one memory budget.

If there is no room for another model, others shrink, first those that nobody is expected to wait
for soon (``memory_plan.py``): their caches go to disk, their weights from a GPU to RAM, and from
RAM they are read again when needed. Only a model that cannot shrink is unloaded. So a client that
alternates between models that do not fit in memory together waits only for the missing bytes, not
for a whole model and its prompt. The event loop decides which model is used; a thread moves memory,
for one model at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from localrt.api import Model
from localrt.common.errors import CancelledError, LocalrtError, MemoryBudgetError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import on_command_line
from localrt.engine.batch.chunked_prefill import PassTurns
from localrt.models.weight_store import GpuUse
from localrt.offload.account import GROWTH_NBYTES, MARGIN_NBYTES
from localrt.offload.memory import current_rss, ram_budget
from localrt.server.errors import ApiError, without_folders
from localrt.server.memory_plan import Holding, Uses, giving_order, plan_room, stay_s
from localrt.server.models import Models, Offered, ServedModel, meant, not_here
from localrt.server.options import ServeOptions

_ANY = "*"  # the alias of the model that answers to unknown names
_BESIDE_WEIGHTS = 128 << 20  # bytes for a model's tokenizer, a conversation and a pass
_BESIDE_ON_GPU = 512 << 20  # the same on a GPU: a conversation, a ring and kernels' scratch
_LIST_AGE_S = 1.0
_KEEP_S = 300.0
_FOR_EVER_S = 100 * 365 * 86400.0  # dates much later may overflow
_RESERVE = 64 << 20  # bytes for growing answers of a loaded model


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A model on this machine: its name for clients, the argument that loads it, and the bytes of
    its files at ``path``. ``aliases`` are the user's names for it; ``*`` means any unknown name.
    """

    name: str
    model: str
    nbytes: int
    path: Path | None = None
    aliases: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class _Slot:
    """A requested model. ``awake``: it has its share of the memory.

    ``people`` are uses that someone waits for, ``work`` are others. ``keep_s`` is how long it stays
    loaded, if set by a client. ``left`` are the bytes of weights that it has freed. ``contested``:
    it was unloaded for others, so it will be loaded in a form that can shrink. ``gpu_total`` is how
    much of the GPU's memory it and others may take together.
    """

    file: LocalFile
    served: ServedModel | None = None
    people: Uses = field(default_factory=Uses)
    work: Uses = field(default_factory=Uses)
    used: float = 0.0
    keep_s: float | None = None
    awake: bool = False
    left: int = 0
    contested: bool = False
    gpu_total: int = 0
    coming: asyncio.Task[None] | None = None

    @property
    def users(self) -> int:
        """The number of requests that use it now."""
        return self.people.count + self.work.count

    @property
    def on_gpu(self) -> bool:
        """Whether it is loaded on a GPU."""
        return self.served is not None and self.served.model.info.device != "cpu"

    @property
    def gpu(self) -> GpuUse | None:
        """What it takes of a GPU's memory; None if it is on none, or if that is unknown."""
        return None if self.served is None else self.served.model.gpu_use


class ModelPool(Models):
    """This machine's models, which ``files`` lists. ``load(model, shrinkable, cancel, on_gpu)``
    loads one, unless ``cancel`` is set meanwhile, beside ``on_gpu`` bytes of others on the GPU, or
    on the CPU if that is None; ``fast_on_cpu(model, ram)`` says whether that is fast enough.

    ``ram`` is the budget in bytes for all models; None: the free memory. ``on_change`` is called
    with a sentence about each load and unload.
    """

    def __init__(
        self,
        load: Callable[[str, bool, threading.Event, int | None], Model],
        files: Callable[[], Sequence[LocalFile]],
        options: ServeOptions,
        *,
        ram: int | None = None,
        fast_on_cpu: Callable[[str, int], bool] = lambda model, ram: False,
        on_change: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._load, self._files, self._options = load, files, options
        self._list: tuple[float, Sequence[LocalFile]] = (float("-inf"), ())
        self._ram, self._fast_on_cpu = ram, fast_on_cpu
        self._say = on_change
        self._memory = threading.Lock()  # held by the thread that moves memory
        self._closing = threading.Event()
        self._slots: dict[str, _Slot] = {}
        self._turns: defaultdict[str, PassTurns] = defaultdict(PassTurns)  # by device
        self._moving = asyncio.Lock()  # held while memory moves between models
        self._freed = asyncio.Event()  # set when a use of a model has ended
        self._tending: asyncio.Task[None] | None = None

    # -- listing -----------------------------------------------------------------------------

    def offered(self) -> Sequence[Offered]:
        """See ``Models``: the last used model is first, the others are sorted by name."""
        return [self._describe(file) for file in self._ordered()]

    def find(self, name: str | None, *, exact: bool = False) -> Offered:
        return self._describe(self._file(name, exact=exact))

    def at_work(self) -> Sequence[ServedModel]:
        slots = list(self._slots.values())
        # Read once, since the thread that moves memory may remove it.
        return [served for slot in slots if (served := slot.served) is not None]

    def keep(self, name: str, seconds: float) -> None:
        self._slot(name).keep_s = seconds

    def _ordered(self) -> list[LocalFile]:
        """Return this machine's models, the most recently used first, then by name."""
        return sorted(self._listed(), key=lambda file: (-self._used(file), file.name))

    def _listed(self) -> Sequence[LocalFile]:
        """List this machine's models; requests in quick succession share a listing."""
        looked, files = self._list
        if time.monotonic() - looked >= _LIST_AGE_S:
            files = self._files()
            self._list = time.monotonic(), files
        return files

    def _describe(self, file: LocalFile) -> Offered:
        slot = self._slots.get(file.name)
        served = None if slot is None else slot.served  # the moving thread may remove it meanwhile
        if slot is None or served is None:
            return Offered(name=file.name, state="unloaded", nbytes=file.nbytes, path=file.path)
        model, stats = served.model, served.live.stats()
        return Offered(
            name=file.name,
            state="shrunk" if slot.left else "loaded",
            sees=served.sees,
            ctx=model.info.ctx,
            nbytes=file.nbytes,
            ram=model.weights_in_ram + stats.kv_bytes + stats.parked_bytes,
            unload_s=self._left_s(slot, model),
            path=file.path,
        )

    def _left_s(self, slot: _Slot, model: Model) -> float | None:
        keep = self._keep(slot)
        if not 0 <= keep < _FOR_EVER_S:
            return None
        idle = 0.0 if slot.users else time.monotonic() - slot.used
        return max(0.0, (2 * keep if model.info.streamed else keep) - idle)

    def _used(self, file: LocalFile) -> float:
        slot = self._slots.get(file.name)
        return 0.0 if slot is None else slot.used

    def _file(self, name: str | None, *, exact: bool = False) -> LocalFile:
        slot = self._slots.get(name or "")
        if slot is not None and slot.served is not None:
            return slot.file  # avoids reading the disk
        files = {file.name: file for file in self._ordered()}
        if not files:
            raise ApiError(
                404, "there is no model on this machine: download one with `localrt pull`"
            )
        if not name:
            return next(iter(files.values()))
        if (found := meant(name, files)) is not None:
            return files[found]
        names = {alias: file for file in files.values() for alias in file.aliases}
        if (alias := meant(name, names)) is not None and alias != _ANY:
            return names[alias]
        any_name = next(iter(files.values())) if len(files) == 1 else names.get(_ANY)
        if any_name is None or exact or self._options.strict_models:
            not_here(name, [self._describe(file) for file in files.values()])
        return any_name

    def _slot(self, name: str | None) -> _Slot:
        file = self._file(name)
        return self._slots.setdefault(file.name, _Slot(file))

    # -- using a model
    # ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(
        self, name: str | None, *, background: bool = False
    ) -> AsyncIterator[ServedModel]:
        """See ``Models``. If memory is short, waits for other models' answers to end."""
        slot = self._slot(name)
        uses = slot.work if background else slot.people
        uses.begin(time.monotonic())
        try:
            if slot.served is None or not slot.awake:
                if slot.coming is None or slot.coming.done():
                    slot.coming = asyncio.ensure_future(self._bring(slot))
                    slot.coming.add_done_callback(_look)
                # Not stopped if the client disconnects: others may be waiting for it, too.
                await asyncio.shield(slot.coming)
            assert slot.served is not None, "it has a user"
            yield slot.served
        finally:
            uses.count -= 1
            if slot.served is not None:
                slot.used = uses.last = time.monotonic()
            self._freed.set()

    async def _bring(self, slot: _Slot) -> None:
        """Load ``slot``, and give it its share of the memory.

        Raises:
            LocalrtError: it cannot be loaded, or other models leave too little memory.
        """
        while True:
            async with self._moving:
                self._freed.clear()
                try:
                    await asyncio.to_thread(self._make_ready, slot)
                except MemoryBudgetError:
                    in_use = any(other.users for other in self._others(slot))
                    if not in_use and not self._freed.is_set():  # and no use has ended meanwhile
                        raise
                else:
                    return
            await self._freed.wait()

    def _others(self, slot: _Slot) -> list[_Slot]:
        """Return the other loaded models."""
        return [s for s in list(self._slots.values()) if s is not slot and s.served is not None]

    # -- moving memory, in a thread ----------------------------------------------------------------

    def _make_ready(self, slot: _Slot) -> None:
        with self._memory:
            if self._closing.is_set():
                raise CancelledError("the server is stopping")
            self._give_share(slot, self._others(slot))

    def _give_share(self, slot: _Slot, others: Sequence[_Slot]) -> None:
        for other in others:
            _withdraw(other)
            if other.on_gpu and other.gpu is None and not other.users:
                self._put_away(other)  # its engine cannot share a GPU
        # Background work uses the memory that its model has, rather than slowing down others.
        modest = slot.served is not None and not slot.people.count
        gpu, whole = self._share_gpu(slot, others, modest)
        enough = self._make_room(lambda: _wanted(slot, gpu) - self._free(), others, modest)
        if slot.served is None:
            self._load_into(slot, others, gpu)
        else:
            slot.served.model.leave_ram(-max(0, self._free()))
            if gpu:
                with suppress(MemoryBudgetError):  # answers of others have grown: it streams
                    slot.served.model.set_budget(gpu_memory=gpu)
        slot.left, enough = 0, enough and whole
        # Models that are answering free no memory, so the next request tries again.
        slot.awake = enough and not any(other.users for other in others)

    def _share_gpu(
        self, slot: _Slot, others: Sequence[_Slot], modest: bool
    ) -> tuple[int | None, bool]:
        """Make room for a model on the GPU. Return the bytes that it may take, 0 if it goes to the
        CPU instead, None if others take none; and as ``_make_room``.
        """
        others, own = [other for other in others if other.gpu is not None], slot.gpu
        if own is None and (slot.served is not None or not others):
            return None, True
        total = max(each.gpu_total for each in (slot, *others))
        wanted = slot.file.nbytes + _BESIDE_ON_GPU
        if own is not None:
            wanted = own.used + own.missing + _RESERVE
        if own is None and total - _on_gpu(others) < wanted:
            often = any(other.users or self._holding(other).rank for other in others)
            if often and self._fast_on_cpu(slot.file.model, max(0, self._free())):
                return 0, True
        enough = self._make_room(lambda: wanted + _on_gpu(others) - total, others, modest, gpu=True)
        return max(1, total - _on_gpu(others)), enough

    def _load_into(self, slot: _Slot, others: Sequence[_Slot], gpu: int | None) -> None:
        began, name, contested = time.monotonic(), slot.file.model, slot.contested
        try:
            while True:
                try:
                    on_gpu = None if gpu == 0 else _on_gpu(others)
                    model = self._load(name, contested, self._closing, on_gpu)
                    break
                except MemoryBudgetError:
                    idle = {o: self._holding(o) for o in others if o.served and not o.users}
                    if not idle:
                        raise
                    self._evict(giving_order(idle)[0])
        except LocalrtError as error:
            if not self._closing.is_set():
                reason = without_folders(error.told(on_command_line))
                self._say(f"could not load {slot.file.name}: {reason}")
            raise
        turns = self._turns[model.info.device]
        slot.served = ServedModel(model, slot.file.name, self._options, turns)
        slot.used = time.monotonic()
        slot.gpu_total = 0 if slot.gpu is None else slot.gpu.limit + _on_gpu(others)
        self._say(f"loaded {slot.file.name} in {slot.used - began:.1f} s")

    def _free(self) -> int:
        """Return the bytes that this process may still take."""
        return ram_budget(self._ram) - current_rss() - GROWTH_NBYTES - MARGIN_NBYTES

    def _make_room(
        self,
        lacking: Callable[[], int],
        others: Sequence[_Slot],
        modest: bool,
        *,
        gpu: bool = False,
    ) -> bool:
        """Make other models free RAM, or memory of the ``gpu``, until no bytes are ``lacking``; if
        ``modest``, only those that nobody is expected to wait for soon. Return whether that was
        enough, or all that was possible.
        """
        idle = [other for other in others if other.served and not other.people.count]
        models = {other: self._holding(other, gpu=gpu) for other in idle}
        spared = [other for other, held in models.items() if modest and held.rank]
        for other in spared:
            del models[other]
        while (missing := lacking()) > 0:
            if not (gifts := plan_room(models, missing)):
                return not spared
            for other, gift in gifts.items():
                held = models.pop(other)
                if gift > held.most:
                    self._evict(other)
                    continue
                gave = self._shrink(other, gift, gpu=gpu)
                left = min(held.weights, held.most - gift) if gave else 0
                rest = held.rest if gave or other.users else held.rest + held.weights
                models[other] = replace(held, caches=0, weights=left, rest=rest)
        return True

    def _holding(self, slot: _Slot, *, gpu: bool = False) -> Holding:
        """Return what a model can free of RAM, or of the ``gpu``'s memory."""
        assert slot.served is not None, "it is loaded"
        now, model, use = time.monotonic(), slot.served.model, slot.gpu if gpu else None
        stats = slot.served.live.stats()
        caches = stats.parked_bytes if slot.on_gpu and not gpu else stats.kv_bytes
        wanted, weights = slot.people.back_s(now), model.weights_in_ram
        weights, rest = (weights, 0) if model.info.streamed else (0, weights)
        if use is not None:
            shrinks = slot.contested and use.leavable + use.missing
            weights, rest = use.leavable, 0 if shrinks else use.used - use.leavable
        return Holding(
            caches=0 if slot.users else caches,
            weights=weights,
            rest=0 if slot.users else rest,
            wanted_s=wanted,
            used_s=min(wanted, slot.work.back_s(now)),
            kept=None if slot.keep_s is None else not 0 <= slot.keep_s <= now - slot.used,
        )

    def _shrink(self, slot: _Slot, nbytes: int, *, gpu: bool = False) -> bool:
        """Make a model free ``nbytes`` of idle caches or weights; return whether it could."""
        assert slot.served is not None, "it is loaded"
        model = slot.served.model
        held = self._holding(slot, gpu=gpu)
        if gpu:  # where its caches and weights go
            model.leave_ram(-min(max(0, self._free()), nbytes, held.most))
        slot.served.live.park("ram" if gpu else "disk")
        if (nbytes := nbytes - held.caches) <= 0:
            return True
        if not gpu or (use := slot.gpu) is None:
            left = model.leave_ram(nbytes)
        else:
            with suppress(MemoryBudgetError):
                model.set_budget(gpu_memory=use.used - min(nbytes, use.leavable))
            left = use.leavable - (slot.gpu or use).leavable
        if left > 0:
            slot.left += left
            where = " of GPU memory" if gpu else ""
            self._say(f"{slot.file.name} leaves {format_bytes(left)}{where}, and keeps the rest")
        return left > 0

    def _evict(self, slot: _Slot) -> bool:
        """Unload a model for others; in future it is loaded in a form that can shrink."""
        slot.contested = True
        return self._put_away(slot)

    def _put_away(self, slot: _Slot) -> bool:
        """Unload a model; return whether it was loaded."""
        served, slot.served = slot.served, None
        if served is None:
            return False
        served.close()
        served.model.unload()
        slot.left, slot.awake, slot.keep_s = 0, False, None
        self._say(f"unloaded {slot.file.name}")
        return True

    # -- over time -----------------------------------------------------------------------------

    def _keep(self, slot: _Slot) -> float:
        """Return how long a model stays loaded, as set by a user or derived from its uses."""
        said = self._options.keep_alive_s if slot.keep_s is None else slot.keep_s
        return stay_s(slot.people.away, _KEEP_S) if said is None else said

    def tend(self) -> None:
        """See ``Models``: models unused for long shrink, and are unloaded later."""
        if self._tending is None or self._tending.done():
            self._tending = asyncio.ensure_future(self._tend())
            self._tending.add_done_callback(_look)

    async def _tend(self) -> None:
        for slot in list(self._slots.values()):
            if self._due(slot):
                async with self._moving:
                    slot.awake = slot.awake and not self._due(slot)
                    if self._due(slot):  # it has not been requested meanwhile
                        await asyncio.to_thread(self._let_go, slot)

    def _due(self, slot: _Slot) -> bool:
        """Whether a model should free more of its memory."""
        keep, idle = self._keep(slot), time.monotonic() - slot.used
        if slot.served is None or slot.users or keep < 0:
            return False
        return idle >= (2 * keep if slot.left else keep)

    def _let_go(self, slot: _Slot) -> None:
        with self._memory:
            if slot.left:
                self._put_away(slot)
                return
            _withdraw(slot)
            if not self._shrink(slot, 1 << 60, gpu=slot.gpu is not None):
                self._put_away(slot)

    def close(self) -> None:
        """See ``Models``. Loading is cancelled."""
        self._closing.set()
        with self._memory:
            for slot in list(self._slots.values()):
                self._put_away(slot)


def _wanted(slot: _Slot, gpu: int | None) -> int:
    """Return the RAM that a model would take beside what it has, with ``gpu`` bytes on a GPU."""
    if slot.served is None:
        return max(0, slot.file.nbytes - (gpu or 0)) + _BESIDE_WEIGHTS
    model = slot.served.model
    return max(0, model.info.weight_bytes - (gpu or 0) - model.weights_in_ram) + _RESERVE


def _on_gpu(slots: Sequence[_Slot]) -> int:
    """Return the bytes of a GPU's memory that models take."""
    return sum(slot.gpu.used for slot in slots if slot.gpu is not None)


def _withdraw(slot: _Slot) -> None:
    """Free the unused part of a model's budget for the others."""
    slot.awake = False
    if slot.served is not None:
        model, kept = slot.served.model, _RESERVE if slot.users else 0
        model.leave_ram(max(0, model.spare_ram - kept))
        if (use := slot.gpu) is not None:
            with suppress(MemoryBudgetError):
                model.set_budget(gpu_memory=use.used + kept)


def _look(task: asyncio.Task[None]) -> None:
    """Retrieve the exception, which would otherwise be logged if no one awaits the task."""
    if not task.cancelled():
        task.exception()
