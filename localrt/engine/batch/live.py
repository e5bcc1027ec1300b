"""Continuous batching: requests join and leave a running batch; one thread computes, any may
submit.

Every pass serves all running answers; new requests join the next pass. A ``LiveAnswer`` buffers
chunks for its reader; if the reader falls far behind, the answer is paused without delaying others.
``schedule.py`` decides what a pass computes.
"""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from localrt.common.errors import CancelledError, LocalrtError
from localrt.engine.batch.chunked_prefill import PassTurns, is_background
from localrt.engine.batch.schedule import KEEP_STREAMED, MOST_SEQUENCES, Save, Schedule, Terms
from localrt.engine.batch.sequence import BatchSequence, Chunks
from localrt.engine.batch.waiting import FairQueue
from localrt.engine.protocol import Engine
from localrt.engine.request import Request
from localrt.engine.sampling import check_integer, check_number
from localrt.engine.saved_caches import IDLE
from localrt.engine.types import Chunk
from localrt.models.tokenizers.base import Tokenizer
from localrt.models.weight_store import PipelineCounts


class LiveAnswer(Iterator[Chunk]):
    """The chunks of one request, as ``Model.stream`` would yield them; one thread reads them.

    Iterate over it, or ``take`` all unread chunks. Reading raises the request's error.
    """

    def __init__(
        self,
        request: Request,
        limit: int,
        *,
        wake: Callable[[], None],
        notify: Callable[[], None] | None = None,
    ) -> None:
        self.started = False  # used by the computing thread only
        self._request = request
        self._limit = limit
        self._wake = wake
        self._notify = notify
        self._changed = threading.Condition()
        self._unread: deque[Chunk] = deque()
        self._over = False
        self._full = False

    @property
    def left_out(self) -> tuple[str, ...]:
        """The keywords of the answer's schema that are not enforced: see ``Request``."""
        return self._request.left_out

    # -- reading ---------------------------------------------------------------------------------

    def __next__(self) -> Chunk:
        with self._changed:
            while not self._unread and not self._over:
                self._changed.wait()
            if not self._unread:
                raise StopIteration
            chunk = self._unread.popleft()
        self._resume()
        if chunk.error is not None:
            raise chunk.error
        return chunk

    def take(self) -> list[Chunk]:
        """Return all unread chunks at once.

        Raises:
            LocalrtError: the request's error, once all chunks before it have been taken.
        """
        with self._changed:
            chunks = list(self._unread)
            if len(chunks) > 1 and chunks[-1].error is not None:
                chunks.pop()
            for _ in chunks:
                self._unread.popleft()
        self._resume()
        if chunks and chunks[-1].error is not None:
            raise chunks[-1].error
        return chunks

    @property
    def over(self) -> bool:
        """Whether everything has been read."""
        with self._changed:
            return self._over and not self._unread

    def cancel(self) -> None:
        """Stop; the last chunk has finish reason ``"cancelled"``."""
        self._request.cancel.set()
        self._wake()

    def _resume(self) -> None:
        with self._changed:
            resumes = self._full and 2 * len(self._unread) <= self._limit
            self._full = self._full and not resumes
        if resumes:
            self._wake()

    # -- for the computing thread ----------------------------------------------------------------

    @property
    def full(self) -> bool:
        """Whether the reader is too far behind to compute more for it."""
        return self._full

    def put(self, chunks: Chunks) -> bool:
        """Add a pass's chunks; return False if the reader cannot be notified any more."""
        with self._changed:
            if self._over:
                return True
            self._unread.extend(chunks)
            self._over = bool(chunks) and chunks[-1].finish_reason is not None
            self._full = not self._over and len(self._unread) >= self._limit
            self._changed.notify_all()
        if self._notify is None:
            return True
        try:
            self._notify()
        except RuntimeError:  # its event loop is closed
            return False
        return True


# An answer joins if this many more of its tokens fit. If it later outgrows memory, it goes back to
# the queue and is computed again.
_AHEAD = 512
# Prompt rows in the first passes with answers, if weights are in memory: more rows would delay each
# answer's next token and gain little.
_PROMPT_ROWS = 128
_KEEP = 32  # the most idle caches, for continued conversations
_ROOM_AGE_S = 0.5  # seconds until free memory is read again, since other programs use it too
_POLL_S = 0.25  # seconds between checks of paused answers while nothing runs
_IDLE_TIMEOUT_S = 600.0  # seconds until unused caches are freed


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveLimits:
    """The limits of a running batch.

    ``ctx`` is the longest sequence in tokens. At most ``most`` answers share a pass, fewer if
    memory is short. An answer pauses when its reader is ``buffer`` chunks behind, and is cancelled
    after pausing for ``patience_s``.
    """

    ctx: int
    most: int = MOST_SEQUENCES
    buffer: int = 256
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        for name in ("most", "buffer"):
            check_integer(name, getattr(self, name), 1, 1 << 31)
        check_number("patience_s", self.patience_s, 1e-3, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveStats:
    """The current state of a batch, and its counts so far.

    ``running`` answers share passes, ``waiting`` answers have not started, ``paused`` answers wait
    for their readers. ``kv_bytes`` is the size of all caches, ``parked_bytes`` of those in RAM.
    """

    running: int
    waiting: int
    paused: int
    kv_bytes: int
    passes: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    pipeline: PipelineCounts | None
    parked_bytes: int = 0


class Live:
    """A batch that runs until it is closed. Thread-safe; close it before its engine.

    ``room`` returns how many more bytes the caches may take. ``save`` saves a cache before it is
    freed. Batches that share ``turns`` of a device compute one at a time.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        limits: LiveLimits,
        *,
        room: Callable[[], int],
        save: Save = lambda session, *tiers: None,
        turns: PassTurns | None = None,
    ) -> None:
        self._engine = engine
        alone = engine.info.streamed  # passes then mostly wait for weights
        self._turns = PassTurns() if turns is None or alone else turns
        engine.turn = self._turns.turn
        self._free_memory = room
        self._save = save
        self._parked: threading.Event | None = None  # set once caches are saved and freed
        self._limits = limits
        self._waiting: FairQueue[BatchSequence[LiveAnswer]] = FairQueue()
        self._schedule = self._new_schedule(engine, tokenizer)
        self._paused: dict[BatchSequence[LiveAnswer], float] = {}  # deadlines of paused answers
        self._room = (0.0, 0)  # time of the last reading; bytes that caches may take
        self._prompt_tokens = self._cached_tokens = self._completion_tokens = 0
        self._changed = threading.Condition()
        self._woken = self._closing = self._drops = False
        # All submitted sequences: running, waiting and paused.
        self._submitted: weakref.WeakSet[BatchSequence[LiveAnswer]] = weakref.WeakSet()
        self._thread = threading.Thread(target=self._run, name="localrt-live", daemon=True)
        self._thread.start()
        IDLE.add(self)

    def submit(
        self,
        request: Request,
        *,
        client: Hashable = None,
        request_class: str = "interactive",
        notify: Callable[[], None] | None = None,
    ) -> LiveAnswer:
        """Queue ``request`` after those of the same ``client`` and class; return its answer.

        The computing thread calls ``notify`` for new chunks; it must not block.

        Raises:
            OptionError: the prompt is empty, or has an id outside the vocabulary, or there is no
                such class.
            ContextOverflowError: the prompt leaves no room for one token.
            LocalrtError: the batch is closed.
        """
        limits, background = self._limits, is_background(request_class)
        request.check(
            ctx=limits.ctx, vocab_size=self._engine.info.vocab_size, vision=self._engine.vision
        )
        answer = LiveAnswer(request, limits.buffer, wake=self._wake, notify=notify)
        with self._changed:
            if self._closing:
                raise LocalrtError("the batch is closed: nothing can be asked of it any more")
            key = client, request_class
            seq = BatchSequence(answer, request, limits.ctx, key, background)
            self._submitted.add(seq)
            self._waiting.push(key, seq)
            self._woken = True
            self._changed.notify()
        return answer

    def stats(self) -> LiveStats:
        """A snapshot of the batch's state."""
        return LiveStats(
            running=len(self._schedule.sequences),
            waiting=len(self._waiting),
            paused=len(self._paused),
            kv_bytes=self._schedule.cache_bytes,
            passes=self._schedule.passes,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            completion_tokens=self._completion_tokens,
            pipeline=self._engine.counts(),
        )

    def cancel_all(self) -> None:
        """End every answer, keeping its text so far."""
        with self._changed:
            sequences = list(self._submitted)
        for seq in sequences:
            seq.request.cancel.set()
        self._wake()

    def park(self) -> None:
        """Save and free the caches that are not in use; return when that is done."""
        with self._changed:
            if self._closing:
                return
            self._parked = done = self._parked or threading.Event()
            self._woken = True
            self._changed.notify()
        done.wait()

    def drop(self, marks: frozenset[str]) -> None:
        """Free the caches that are not in use, whatever they hold, after the running pass."""
        self._drops = True
        self._wake()

    @property
    def closed(self) -> bool:
        """Whether the batch accepts no more requests."""
        return self._closing

    def close(self) -> None:
        """End every answer as cancelled, and free the caches."""
        with self._changed:
            self._closing = self._woken = True
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._ready():
                self._end_and_pause()
                if self._schedule.sequences or self._waiting.first() is not None:
                    self._step()
        finally:
            with self._changed:
                self._closing = True
            self._engine.turn = None
            self._turns.leave(self)
            for seq in self._open_sequences():
                self._end(seq)
            self._schedule.close()
            self._park(lambda session, *tiers: None)

    def _ready(self) -> bool:
        """Wait until there is work; return False when closing."""
        timed_out = False
        with self._changed:
            if not self._schedule.sequences and not self._woken and self._waiting.first() is None:
                self._schedule.rest()
                self._turns.leave(self)
                woken = self._changed.wait(_POLL_S if self._paused else _IDLE_TIMEOUT_S)
                timed_out = not woken and not self._paused
            self._woken = False
            closing = self._closing
        if timed_out:  # others may submit while caches are saved
            self._schedule.park(self._save)
            self._save(None, "disk")
        return not closing

    def _park(self, save: Save) -> None:
        """Save and free idle caches if ``park`` waits for it."""
        with self._changed:
            done, self._parked = self._parked, None
        if done is not None:
            try:
                self._schedule.park(save)
            finally:
                done.set()

    def _end_and_pause(self) -> None:
        """End cancelled answers; pause, resume or end answers whose readers are behind."""
        if self._drops:
            self._drops = False
            self._schedule.forget()
        self._park(self._save)
        for seq in [*self._schedule.sequences, *self._waiting.items()]:
            if seq.request.cancel.is_set():
                self._end(seq)
            elif seq.owner.full:
                self._pause(seq)
        now = time.monotonic()
        for seq, until in list(self._paused.items()):
            if seq.request.cancel.is_set() or now >= until:
                self._end(seq)
            elif not seq.owner.full:
                del self._paused[seq]
                self._waiting.put_back(seq.client, seq)

    def _step(self) -> None:
        try:
            with self._turns.turn(self) as others:
                items = self._schedule.step(others)
        except CancelledError:
            return  # all sequences of the pass are cancelled, or the batch is closing
        except LocalrtError as error:
            self._fail(error)
            return
        except BaseException as error:  # noqa: BLE001  even a panic: the thread serves others
            self._fail(LocalrtError(f"the pass failed: {type(error).__name__}: {error}"))
            self._schedule.forget()  # the contents of the caches are unknown
            return
        for seq, chunks in items:
            self._give(seq, chunks)

    def _give(self, seq: BatchSequence[LiveAnswer], chunks: Chunks) -> None:
        for chunk in chunks:
            self._count(seq.owner, chunk)
        if not seq.owner.put(chunks):
            seq.request.cancel.set()  # the reader is gone

    def _count(self, answer: LiveAnswer, chunk: Chunk) -> None:
        if not answer.started and chunk.token_ids:
            answer.started = True
            self._prompt_tokens += chunk.metrics.prompt_tokens
            self._cached_tokens += chunk.metrics.cached_tokens
        self._completion_tokens += len(chunk.token_ids)

    def _fail(self, error: LocalrtError) -> None:
        """Report a failed pass to all sequences in it; others continue."""
        sequences = self._schedule.sequences
        for seq in sequences:
            # One exception per sequence: a shared one would accumulate tracebacks.
            self._give(seq, seq.fail(error if len(sequences) == 1 else type(error)(error.marked)))
            self._schedule.remove(seq)

    def _pause(self, seq: BatchSequence[LiveAnswer]) -> None:
        self._schedule.remove(seq)
        self._waiting.remove(seq)
        self._paused[seq] = time.monotonic() + self._limits.patience_s

    def _end(self, seq: BatchSequence[LiveAnswer]) -> None:
        self._paused.pop(seq, None)
        self._waiting.remove(seq)
        self._give(seq, self._schedule.end(seq))

    def _open_sequences(self) -> list[BatchSequence[LiveAnswer]]:
        return [*self._schedule.sequences, *list(self._paused), *self._waiting.items()]

    def _wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify()

    # -- passes and memory -----------------------------------------------------------------------

    def _new_schedule(self, engine: Engine, tokenizer: Tokenizer | None) -> Schedule[LiveAnswer]:
        limits = self._limits
        terms = Terms(
            most=limits.most,
            capacity=limits.ctx,
            ahead=_AHEAD,
            keep=KEEP_STREAMED if engine.info.streamed else _KEEP,
            prompt_rows=engine.pass_rows if engine.info.streamed else _PROMPT_ROWS,
        )
        return Schedule(
            engine,
            tokenizer,
            self._waiting,
            terms,
            room=self._kv_room,
            check=self._check,
            save=self._save,
        )

    def _kv_room(self) -> int:
        """Return the bytes that all caches together may take, including what they take now."""
        read_at, room = self._room
        if time.monotonic() - read_at > _ROOM_AGE_S:
            room = self._free_memory() + self._schedule.cache_bytes
            self._room = (time.monotonic(), room)
        return room

    def _check(self) -> None:
        """Abandon the pass if no one waits for it any more."""
        sequences = self._schedule.sequences
        if self._closing or (sequences and all(seq.request.cancel.is_set() for seq in sequences)):
            raise CancelledError("the generation was cancelled")
