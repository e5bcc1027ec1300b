"""A loaded model that answers: the common part of ``Model``, chats, batches and the server.

It turns prompts into requests, runs them on sessions, and manages caches, budgets, drafts and
status. ``Model`` is its public face; nothing else opens one.
"""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from localrt.common.errors import LocalrtError, MemoryBudgetError, OptionError, disk_errors
from localrt.common.files import keep_private, private_folder
from localrt.common.forks import check_process, count_forks
from localrt.common.formatting import parse_size
from localrt.common.progress import ProgressCallback, note_to
from localrt.common.settings import KV_DISK, Settings
from localrt.drafts.loading import load_with_draft
from localrt.drafts.selection import Drafts
from localrt.engine.batch.sequence import generate
from localrt.engine.cache_retention import PERSON, KvKeeper
from localrt.engine.options import read_options
from localrt.engine.pool import SessionPool, caches_on_gpu, kv_room, ram_room
from localrt.engine.protocol import Engine, EngineSession
from localrt.engine.request import Request, Restore
from localrt.engine.saved_caches import IDLE, NOBODY, Owner, PromptCache, Tier, marks_of, model_key
from localrt.engine.types import Chunk, Message
from localrt.hub.cache import note_use
from localrt.hub.other_programs import Extras
from localrt.loading.context import LoadContext
from localrt.loading.load import LoadedModel
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import open_checkpoint
from localrt.planning import chooser
from localrt.service.adapters import Adapters
from localrt.service.requests import RequestBuilder
from localrt.service.status import ModelInfo, Watch
from localrt.system import return_free_memory

if TYPE_CHECKING:
    from localrt.planning.recommend import Outlook

_SHORT = 16  # characters of a blob's name
_AHEAD = 512  # tokens of an answer for which there is room when it begins
_PATIENCE_S = 2.0  # for an answer that is no longer read


@disk_errors("the model")
def open_core(options: LoadOptions, context: LoadContext | None = None) -> Core:
    """Find and load a model, its adapters and its draft sources; see ``localrt.load``."""
    context = context or LoadContext()
    settings = context.settings
    found = context.resolve(
        options.model,
        revision=options.revision,
        choose=chooser(
            settings,
            ram=options.ram,
            gpu_memory=options.gpu_memory,
            device=options.device,
            say=note_to(context.progress),
        ),
    )
    extras = found.extras or Extras()
    if options.ctx is None and extras.ctx is not None:
        options = replace(options, ctx=extras.ctx)
    parts, drafts = load_with_draft(found.path, options, context, extras)
    note_use(found.listed_name, settings)
    core = Core(
        found.name,
        parts,
        {**_known_options(extras), "draft": options.draft},
        drafts=drafts,
        prompts=prompt_cache(parts, settings),
    )
    try:
        own = {path.name[:_SHORT]: str(path) for path in extras.adapters}
        for name, adapter in {**own, **options.adapters}.items():
            core.add_adapter(name, adapter, context)
        if own:
            core.defaults.setdefault("adapter", next(iter(own)))
    except BaseException:
        core.close()
        raise
    return core


def _known_options(extras: Extras) -> dict[str, object]:
    """Those of its options that can be used; a store may say anything."""
    found = {}
    for name, value in extras.options.items():
        with suppress(OptionError):
            read_options({name: value})
            found[name] = value
    return found


class Core:
    """A loaded model with its sessions. Thread-safe. ``defaults`` are its default options.

    ``watch`` reports what the model does.
    """

    def __init__(
        self,
        name: str,
        parts: LoadedModel,
        defaults: Mapping[str, object] | None = None,
        *,
        drafts: Drafts | None = None,
        prompts: PromptCache | None = None,
    ) -> None:
        self.name = name
        self.parts = parts
        self._made = count_forks()
        self._engine, self.ctx = parts.engine, parts.ctx
        self.drafts = drafts
        self.defaults: dict[str, Any] = {**parts.defaults, **(defaults or {})}
        self.info = ModelInfo(
            **asdict(parts.engine.info),
            name=name,
            path=parts.path,
            ctx=parts.ctx,
            has_chat_template=not parts.template.is_plain,
            notes=parts.notes,
            pooling=parts.pooling,
            sees=parts.engine.vision is not None,
            writes=not parts.mute,
            quantization=parts.quantization or parts.engine.info.format,
        )
        self.saver = CacheSaver(parts.engine, prompts)
        self.adapters = Adapters(parts.engine, lambda: open_checkpoint(parts.path))
        self._requests = RequestBuilder(parts, self.defaults, drafts, self.adapters)
        keep = parts.engine.idle_sessions(parts.ctx)
        self._pool = SessionPool(parts.engine, parts.ctx, keep=keep)
        IDLE.add(self._pool)
        self.watch = Watch(parts.engine, ctx=parts.ctx, name=parts.path.name)
        self._chats: WeakSet[KvChatCache] = WeakSet()

    @property
    def is_here(self) -> bool:
        """Whether this process has loaded the model, and is not a fork of it."""
        return self._made == count_forks()

    @property
    def engine(self) -> Engine:
        """What computes. Not in a forked child: there it is an error."""
        check_process(self._made)
        return self._engine

    @property
    def requests(self) -> RequestBuilder:
        """Turns prompts into tokens and requests. Not in a forked child: there it is an error."""
        check_process(self._made)
        return self._requests

    def stream(self, request: Request) -> Iterator[Chunk]:
        """Yield the chunks of ``request``, on a session of the pool."""
        with self._pool.lease(request.prompt, request.mix) as session:
            yield from self.stream_on(self.watch.holds(session), request)

    def stream_on(self, session: EngineSession, request: Request) -> Iterator[Chunk]:
        """Yield the chunks of ``request``, on a session that the caller owns."""
        return self.watch.over(generate(session, self.parts.tokenizer, request))

    def new_session(self) -> EngineSession:
        """Return a new session for the whole context, outside the pool."""
        return self.watch.holds(self.engine.session(self.ctx))

    def add_adapter(self, name: str, adapter: str, context: LoadContext | None = None) -> None:
        context = context or LoadContext()
        self.adapters.add(name, context.resolve_adapter(adapter))

    # -- chats: see ``localrt.chat.ChatHost`` ------------------------------------------------------

    def check(self, options: Mapping[str, object]) -> None:
        """Raise an error unless a chat can have these options.

        Raises:
            OptionError: an unknown name, an impossible value, or thinking for a model without it.
        """
        self.requests.check(options)

    @property
    def takes_tools(self) -> bool:
        """Always: without support in the template, tools are listed in the system prompt."""
        return True

    def count(self, text: str) -> int:
        """Return the number of tokens of a text."""
        return len(self.requests.tokenizer.encode(text, add_special=False))

    def open_chat(self) -> KvChatCache:
        """Return the cache that a new conversation keeps between answers."""
        chat = KvChatCache(self)
        self._chats.add(chat)
        return chat

    # -- what it is doing, and its life ----------------------------------------------------------

    def advise(self) -> Outlook:
        # Imports the planner, a megabyte that a model in memory does not need.
        from localrt.planning.recommend import Outlook, planned_outlook, resident_outlook

        engine, found = self.engine, Outlook()
        with suppress(LocalrtError, OSError):  # files deleted, or a model the planner does not know
            if engine.plan is not None:
                found = planned_outlook(engine.plan)
            else:
                found = resident_outlook(
                    self.parts.path,
                    ctx=self.parts.ctx,
                    format=engine.info.format,
                    device=engine.info.device,
                    ram=engine.ram,
                    gpu_memory=engine.gpu_memory,
                )
        self.watch.token_bytes = found.token_bytes
        self.watch.ceiling_tok_s = found.ceiling_tok_s
        return found

    def free_idle(self) -> None:
        """Free the caches of idle sessions."""
        self._pool.drop()

    def leave_ram(self, nbytes: int) -> int:
        memory = self.engine.weights.memory
        if not memory.streams:
            return 0
        most = memory.spare + memory.reclaimable
        left = min(nbytes, most)
        while True:
            try:
                self.engine.take_ram(left)
                break
            except MemoryBudgetError:  # units that are streamed need some of it themselves
                left = left * 3 // 4
        if left > 0:
            return_free_memory()
        return left

    def unload(self) -> None:
        """Close, and free what conversations and the tokenizer take."""
        for chat in list(self._chats):
            chat.cancel()
            chat.close(_PATIENCE_S)  # an answer that is no longer read keeps its cache
        self.close()
        gone = "the model is closed: load it again"
        self.parts = replace(self.parts, tokenizer=None, tokenizer_problem=gone)
        self.drafts, self._requests = None, RequestBuilder(self.parts, self.defaults)
        gc.collect()
        return_free_memory()

    def close(self) -> None:
        """Free weights and caches."""
        self.saver.close()
        self._pool.close()
        if self.drafts is not None:
            self.drafts.close()
        self.adapters.close()
        self.engine.close()


# -- KV caches of conversations that wait: in memory, then on the disk -----------------------------


def prompt_cache(parts: LoadedModel, settings: Settings) -> PromptCache | None:
    """Return where KV caches of this model's waiting conversations are saved, or None."""
    off, engine = settings.kv_disk.lower() in ("0", "off"), parts.engine
    if not parts.fingerprint or (off and not caches_on_gpu(engine)):
        return None
    key = model_key(parts.fingerprint, engine.info.engine, engine.info.format)
    folder = settings.cache_dir / "kv"
    if not off:
        with suppress(OSError):
            private_folder(folder)  # where deletions are noted
        keep_private(folder)
    limit = 0 if off else parse_size(settings.kv_disk, KV_DISK)
    room = partial(ram_room, engine)
    return PromptCache(folder / key, limit=limit, room=room, take=engine.take_ram)


class CacheSaver:
    """Saves KV caches of ``engine``; nothing is saved without ``prompts``. Thread-safe."""

    def __init__(self, engine: Engine, prompts: PromptCache | None) -> None:
        self._info = engine.info
        self._prompts = prompts
        on_gpu = engine.info.device.startswith("cuda")
        self.keeper = KvKeeper(
            room=partial(kv_room, engine),
            price=self._price,
            tiers=("ram", "disk") if on_gpu else ("disk",),
        )

    def save(self, session: EngineSession | None, *tiers: Tier, owner: Owner = NOBODY) -> int:
        """Save the session's KV cache in the first of ``tiers`` that has room, or move the owner's
        (nobody's: all) in RAM if it is None; return the bytes, 0 if nothing could be saved.

        Raises:
            StorageError: the disk is full or fails.
        """
        prompts = self._prompts
        if prompts is None:
            return 0
        if session is None:
            return prompts.settle(owner) if tiers[0] == "disk" else 0
        save = {"ram": prompts.hold, "disk": prompts.save}
        return next((nbytes for to in tiers if (nbytes := save[to](session, owner))), 0)

    @property
    def ram_nbytes(self) -> int:
        """The bytes of the KV caches kept in RAM."""
        return 0 if self._prompts is None else self._prompts.ram_nbytes

    @property
    def restorer(self) -> Restore:
        """What restores caches to the sessions of a request that begins now."""
        return partial(self._restore, "" if self._prompts is None else self._prompts.log)

    def _restore(self, known: str, session: EngineSession, prompt: Sequence[int]) -> None:
        """Restore the saved cache of ``prompt``, if it is longer than the session's own."""
        session.known = known
        if self._prompts is None:
            return
        began = time.perf_counter()
        try:
            got = self._prompts.restore(session, prompt)
        except MemoryBudgetError:
            return  # computed again, as far as there is room
        if got:
            self.keeper.restored(session.nbytes, time.perf_counter() - began)

    def close(self) -> None:
        """Forget the waiting conversations; saved caches stay on the disk."""
        self.keeper.close()
        self._prompts = None

    def _price(self, nbytes: int) -> float:
        """Return what holding ``nbytes`` costs: a share of every pass if weights are streamed."""
        info = self._info
        return nbytes / (nbytes + info.weight_bytes) if info.streamed else 0.0


class KvChatCache:
    """A conversation's session, kept between answers and saved while it waits, if worth it."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._session: EngineSession | None = None
        self._owner = NOBODY
        self._lock = threading.Lock()  # held during an answer and while the cache is moved
        self._cancel = threading.Event()
        IDLE.add(self)

    @property
    def tokens(self) -> int:
        """The number of tokens in the KV cache."""
        return len(self._session.tokens) if self._session is not None else 0

    @property
    def kv_nbytes(self) -> int:
        """The bytes that the KV cache takes in memory."""
        return self._session.nbytes if self._session is not None else 0

    def answer(
        self,
        messages: Sequence[Message],
        options: Mapping[str, Any],
        *,
        tools: Sequence[Mapping[str, object]] | None,
        cancel: threading.Event,
        on_progress: ProgressCallback | None,
    ) -> Generator[Chunk, None, None]:
        """Answer the last turn of ``messages``."""
        core, saver = self._core, self._core.saver
        tool = PERSON  # what the conversation will wait for
        self._lock.acquire()
        self._cancel = cancel
        saver.keeper.returns(self)
        try:
            if self._session is None:
                self._session = core.new_session()
            given: dict[str, Any] = {"tools": tools, "private": not self._owner.exists(), **options}
            request = core.requests.make(messages, cancel=cancel, on_progress=on_progress, **given)
            request = replace(request, restore=saver.restorer)
            needed = core.engine.kv_nbytes(min(core.ctx, len(request.prompt) + _AHEAD))
            saver.keeper.make_room(max(1, needed - self.kv_nbytes))
            # Earlier marks too: an answer that fails early leaves what the session held.
            self._owner = replace(self._owner, marks=self._owner.marks | marks_of(messages))
            for chunk in core.stream_on(self._session, request):
                if chunk.tool_calls:
                    tool = chunk.tool_calls[0].name
                yield chunk
        finally:
            self._lock.release()
            saver.keeper.waits(self, tool)

    def save_while(self, exists: Callable[[], bool]) -> None:
        """Save nothing on the disk unless ``exists()``."""
        self._owner = replace(self._owner, exists=exists)

    def park(self, to: Tier) -> int:
        with self._lock:
            return self._park(to)

    def try_park(self, to: Tier) -> bool:
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._park(to) > 0
        except LocalrtError:
            return False
        finally:
            self._lock.release()

    def close(self, timeout: float = -1) -> None:
        """Free the KV cache once the running answer has ended, if it ends within ``timeout``
        seconds; below zero: wait without a limit.
        """
        if self._lock.acquire(timeout=timeout):
            try:
                self._free()
            finally:
                self._lock.release()

    def drop(self, marks: frozenset[str]) -> None:
        """Free the KV cache of messages with one of ``marks``, unless it is in use."""
        if self._owner.said(marks):
            self.close(0)

    def cancel(self) -> None:
        """End the running answer."""
        self._cancel.set()

    def _park(self, to: Tier) -> int:
        saved = self._core.saver.save(self._session, to, "disk", owner=self._owner)
        if saved:
            self._free()
        return saved

    def _free(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.close()
