"""Model pool with LRU eviction: this machine's models, loaded on request, in one memory budget.

If there is no room for another model, those that were used longest ago shrink: their caches go to
disk, their weights from a GPU to RAM, and from RAM they are read again when needed. Only a model
that cannot shrink is unloaded, and one that is answering gives nothing. So a client that alternates
between models that do not fit in memory together waits only for the missing bytes, not for a whole
model and its prompt. The event loop decides which model is used; a thread moves memory, for one
model at a time.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from localrt.api import Model
from localrt.common.errors import CancelledError, LocalrtError, MemoryBudgetError
from localrt.common.formatting import format_bytes
from localrt.common.option_names import on_command_line
from localrt.engine.batch.chunked_prefill import PassTurns
from localrt.models.weight_store import GpuUse
from localrt.offload.account import GROWTH_NBYTES, MARGIN_NBYTES
from localrt.offload.memory import current_rss, ram_budget
from localrt.server.about import known_facts
from localrt.server.errors import ApiError, without_folders
from localrt.server.models import ModelEntry, Models, ServedModel, meant, not_here
from localrt.server.options import ServeOptions

_ANY = "*"  # the alias of the model that answers to unknown names
_BESIDE_WEIGHTS = 128 << 20  # bytes for a model's tokenizer, a conversation and a pass
_BESIDE_ON_GPU = 512 << 20  # the same on a GPU: a conversation, a ring and kernels' scratch
_LIST_AGE_S = 1.0
_FOR_EVER_S = 100 * 365 * 86400.0  # dates much later may overflow
_RESERVE = 64 << 20  # bytes for growing answers of a loaded model


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A model on this machine: its name for clients, the argument that loads it, and the bytes of
    its files at ``path``. ``aliases`` are the user's names for it; ``*`` means any unknown name.
    ``used`` is when it was last loaded, in seconds since the epoch.
    """

    name: str
    model: str
    nbytes: int
    path: Path | None = None
    aliases: tuple[str, ...] = ()
    used: float = 0.0


@dataclass(slots=True, eq=False)
class _PooledModel:
    """A requested model. ``awake``: it has its share of the memory.

    ``users`` is the number of requests that use it now, ``used`` the time when the last one
    ended. ``keep_s`` is how long it stays loaded, if set by a client. ``left`` are the bytes of
    weights that it has freed. ``contested``: it was unloaded for others, so it will be loaded
    in a form that can shrink. ``gpu_total`` is how much of the GPU's memory it and others may
    take together. ``ctx`` is a longer context that a client has chosen.
    """

    file: LocalFile
    served: ServedModel | None = None
    users: int = 0
    used: float = 0.0
    keep_s: float | None = None
    awake: bool = False
    left: int = 0
    contested: bool = False
    gpu_total: int = 0
    ctx: int = 0
    coming: asyncio.Task[None] | None = None

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
    loads one, unless ``cancel`` is set meanwhile, beside ``on_gpu`` bytes of others on the GPU;
    with ``ctx`` it has such a context.

    ``ram`` is the budget in bytes for all models; None: the free memory. ``on_change`` is called
    with a sentence about each load and unload.
    """

    def __init__(
        self,
        load: Callable[..., Model],
        files: Callable[[], Sequence[LocalFile]],
        options: ServeOptions,
        *,
        ram: int | None = None,
        on_change: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._load, self._files, self._options = load, files, options
        self._list: tuple[float, Sequence[LocalFile]] = (float("-inf"), ())
        self._ram = ram
        self._say = on_change
        self._memory = threading.Lock()  # held by the thread that moves memory
        self._closing = threading.Event()
        self._slots: dict[str, _PooledModel] = {}
        self._turns: defaultdict[str, PassTurns] = defaultdict(PassTurns)  # by device
        self._moving = asyncio.Lock()  # held while memory moves between models
        self._freed = asyncio.Event()  # set when a use of a model has ended
        self._tending: asyncio.Task[None] | None = None

    # -- listing -----------------------------------------------------------------------------

    def offered(self) -> Sequence[ModelEntry]:
        """See ``Models``: the last used model is first, the others are sorted by name."""
        return [self._describe(file) for file in self._ordered()]

    def find(self, name: str | None, *, exact: bool = False) -> ModelEntry:
        return self._describe(self._file(name, exact=exact))

    def at_work(self) -> Sequence[ServedModel]:
        slots = list(self._slots.values())
        # Read once, since the thread that moves memory may remove it.
        return [served for slot in slots if (served := slot.served) is not None]

    def keep(self, name: str, seconds: float) -> None:
        self._slot(name).keep_s = seconds

    def lengthen(self, name: str, ctx: int) -> None:
        slot = self._slot(name)
        slot.ctx, slot.awake = ctx, False

    def _ordered(self) -> list[LocalFile]:
        """Return this machine's models, the most recently used first, then by name."""
        return sorted(self._listed(), key=lambda file: (-self._used(file), -file.used, file.name))

    def _listed(self) -> Sequence[LocalFile]:
        """List this machine's models; requests in quick succession share a listing."""
        looked, files = self._list
        if time.monotonic() - looked >= _LIST_AGE_S:
            files = self._files()
            self._list = time.monotonic(), files
        return files

    def _describe(self, file: LocalFile) -> ModelEntry:
        slot = self._slots.get(file.name)
        served = None if slot is None else slot.served  # the moving thread may remove it meanwhile
        if slot is None or served is None:
            return ModelEntry(name=file.name, state="unloaded", nbytes=file.nbytes, path=file.path)
        model, stats = served.model, served.live.stats()
        return ModelEntry(
            name=file.name,
            state="shrunk" if slot.left else "loaded",
            sees=served.sees,
            ctx=model.info.ctx,
            nbytes=file.nbytes,
            ram=model.weights_in_ram + stats.kv_bytes + stats.parked_bytes,
            unload_s=self._left_s(slot, model),
            path=file.path,
        )

    def _left_s(self, slot: _PooledModel, model: Model) -> float | None:
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
            first, *others = files.values()
            chats = (file for file in others if known_facts(self._describe(file)).template)
            unfit = not self._used(first) and not known_facts(self._describe(first)).template
            return next(chats, first) if unfit else first  # no base model, unless it is in use
        if (found := meant(name, files)) is not None:
            return files[found]
        names = {alias: file for file in files.values() for alias in file.aliases}
        if (alias := meant(name, names)) is not None and alias != _ANY:
            return names[alias]
        any_name = next(iter(files.values())) if len(files) == 1 else names.get(_ANY)
        if any_name is None or exact or self._options.strict_models:
            not_here(name, [self._describe(file) for file in files.values()])
        return any_name

    def _slot(self, name: str | None) -> _PooledModel:
        file = self._file(name)
        return self._slots.setdefault(file.name, _PooledModel(file))

    # -- using a model
    # ---------------------------------------------------------------------------------

    @asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[ServedModel]:
        """See ``Models``. If memory is short, waits for other models' answers to end."""
        slot = self._slot(name)
        slot.users += 1
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
            slot.users -= 1
            if slot.served is not None:
                slot.used = time.monotonic()
            self._freed.set()

    async def _bring(self, slot: _PooledModel) -> None:
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

    def _others(self, slot: _PooledModel) -> list[_PooledModel]:
        """Return the other loaded models."""
        return [s for s in list(self._slots.values()) if s is not slot and s.served is not None]

    # -- moving memory, in a thread ----------------------------------------------------------------

    def _make_ready(self, slot: _PooledModel) -> None:
        with self._memory:
            if self._closing.is_set():
                raise CancelledError("the server is stopping")
            self._give_share(slot, self._others(slot))

    def _give_share(self, slot: _PooledModel, others: Sequence[_PooledModel]) -> None:
        if slot.served is not None and slot.served.model.info.ctx < slot.ctx and slot.users < 2:
            self._put_away(slot)
        for other in others:
            _withdraw(other)
            if other.on_gpu and other.gpu is None and not other.users:
                self._put_away(other)  # its engine cannot share a GPU
        idle = [other for other in others if other.served and not other.users]
        idle.sort(key=lambda other: other.used)
        gpu = self._make_gpu_room(slot, others, idle)
        self._make_room(lambda: _wanted(slot, gpu) - self._free(), idle)
        if slot.served is None:
            self._load_into(slot, others)
        else:
            slot.served.model.leave_ram(-max(0, self._free()))
            if gpu is not None:
                with suppress(MemoryBudgetError):  # answers of others have grown: it streams
                    slot.served.model.set_budget(gpu_memory=gpu)
        slot.left = 0
        # Models that are answering free no memory, so the next request tries again.
        slot.awake = not any(other.users for other in others)

    def _make_gpu_room(
        self, slot: _PooledModel, others: Sequence[_PooledModel], idle: Sequence[_PooledModel]
    ) -> int | None:
        """Make room for a model on the GPU; return the bytes that it may take, None if no other
        model takes any or it is on the CPU.
        """
        others, own = [other for other in others if other.gpu is not None], slot.gpu
        if own is None and (slot.served is not None or not others):
            return None
        total = max(each.gpu_total for each in (slot, *others))
        wanted = slot.file.nbytes + _BESIDE_ON_GPU
        if own is not None:
            wanted = own.used + own.missing + _RESERVE
        there = [other for other in idle if other.gpu is not None]
        self._make_room(lambda: wanted + _on_gpu(others) - total, there, gpu=True)
        return max(1, total - _on_gpu(others))

    def _load_into(self, slot: _PooledModel, others: Sequence[_PooledModel]) -> None:
        began, name, contested = time.monotonic(), slot.file.model, slot.contested
        longer = {"ctx": slot.ctx} if slot.ctx else {}
        try:
            while True:
                try:
                    model = self._load(name, contested, self._closing, _on_gpu(others), **longer)
                    break
                except MemoryBudgetError:
                    idle = [other for other in others if other.served and not other.users]
                    if not idle:
                        raise
                    self._evict(min(idle, key=lambda other: other.used))
        except LocalrtError as error:
            slot.ctx = 0  # which may be why
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
        self, lacking: Callable[[], int], idle: Sequence[_PooledModel], *, gpu: bool = False
    ) -> None:
        """Make ``idle`` models, the first first, free RAM, or memory of the ``gpu``, until no bytes
        are ``lacking``.
        """
        for other in idle:
            if other.served is not None and (missing := lacking()) > 0:
                self._shrink(other, missing, gpu=gpu)
        for other in idle:
            if not _can_shrink(other, gpu=gpu) and lacking() > 0:
                self._evict(other)

    def _shrink(self, slot: _PooledModel, nbytes: int, *, gpu: bool = False) -> bool:
        """Make a model free ``nbytes`` of idle caches or weights; return whether it could."""
        assert slot.served is not None, "it is loaded"
        model, stats = slot.served.model, slot.served.live.stats()
        caches = stats.parked_bytes if slot.on_gpu and not gpu else stats.kv_bytes
        if gpu and (use := slot.gpu) is not None:  # where its caches and weights go
            model.leave_ram(-min(max(0, self._free()), nbytes, caches + use.leavable))
        slot.served.live.park("ram" if gpu else "disk")
        if (nbytes := nbytes - caches) <= 0:
            return True
        if not gpu or (use := slot.gpu) is None:  # without the caches
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

    def _evict(self, slot: _PooledModel) -> bool:
        """Unload a model for others; in future it is loaded in a form that can shrink."""
        slot.contested = True
        return self._put_away(slot)

    def _put_away(self, slot: _PooledModel) -> bool:
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

    def _keep(self, slot: _PooledModel) -> float:
        """Return how long an unused model stays loaded."""
        return self._options.keep_alive_s if slot.keep_s is None else slot.keep_s

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

    def _due(self, slot: _PooledModel) -> bool:
        """Whether a model should free more of its memory."""
        keep, idle = self._keep(slot), time.monotonic() - slot.used
        if slot.served is None or slot.users or keep < 0:
            return False
        return idle >= (2 * keep if slot.left else keep)

    def _let_go(self, slot: _PooledModel) -> None:
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


def _wanted(slot: _PooledModel, gpu: int | None) -> int:
    """Return the RAM that a model would take beside what it has, with ``gpu`` bytes on a GPU."""
    if slot.served is None:
        return max(0, slot.file.nbytes - (gpu or 0)) + _BESIDE_WEIGHTS
    model = slot.served.model
    return max(0, model.info.weight_bytes - (gpu or 0) - model.weights_in_ram) + _RESERVE


def _can_shrink(slot: _PooledModel, *, gpu: bool) -> bool:
    """Whether a model need not be unloaded for its weights to leave RAM, or the ``gpu``."""
    if gpu and (use := slot.gpu) is not None:
        return slot.contested and use.leavable + use.missing > 0
    return slot.served is not None and slot.served.model.info.streamed


def _on_gpu(slots: Sequence[_PooledModel]) -> int:
    """Return the bytes of a GPU's memory that models take."""
    return sum(slot.gpu.used for slot in slots if slot.gpu is not None)


def _withdraw(slot: _PooledModel) -> None:
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
