"""Sequences that share passes: who runs, what the next pass computes, whose cache fits.

A pass takes one row of every sequence that is answering and fills up with rows of prompts
(FlexGen's block schedule, Sheng et al. 2023, with prompts joining as others finish, as in Orca, Yu
et al. 2022, and Sarathi, Agrawal et al. 2023). Clients take turns (``FairQueue``): one with nothing
running joins at once, in place of a sequence of the busiest client, which goes on later. Prompts of
a client that begin alike are computed once (``SharedPrompts``). An engine whose passes hold one
sequence runs one after another. It does not know threads, or where the weights are.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from localrt.common.errors import LocalrtError, MemoryBudgetError
from localrt.engine.batch.sequence import BatchSequence, Chunks, Owner
from localrt.engine.batch.speculation import BatchSpeculation, Prompt
from localrt.engine.pool import IdleSessions
from localrt.engine.protocol import Check, Engine, EngineSession
from localrt.models.prefix import common_prefix
from localrt.models.tokenizers.base import Tokenizer
from localrt.quant.ops.kv import grown_capacity

T = TypeVar("T")


class FairQueue(Generic[T]):
    """Thread-safe; between ``first`` and ``take`` by one thread, others may only push."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: dict[Hashable, deque[T]] = {}  # in the order of their turns

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._clients.values()))

    def push(self, client: Hashable, item: T) -> None:
        """``item`` comes after all of ``client``."""
        with self._lock:
            self._clients.setdefault(client, deque()).append(item)

    def put_back(self, client: Hashable, item: T) -> None:
        """``item`` comes before all of ``client``, whose turn it is."""
        with self._lock:
            items = self._clients.pop(client, deque())
            items.appendleft(item)
            self._clients = {client: items, **self._clients}

    def first(self, load: Mapping[Hashable, int] | None = None) -> T | None:
        """Whose turn it is, among the clients of the least ``load``; None where nobody waits."""
        with self._lock:
            clients = self._clients
            if not clients:
                return None
            return clients[min(clients, key=lambda client: (load or {}).get(client, 0))][0]

    def take(self, item: T) -> None:
        """Take out ``item``, which is the ``first``; the next turn is another client's."""
        with self._lock:
            for client, items in list(self._clients.items()):
                if items[0] is item:
                    del self._clients[client]
                    items.popleft()
                    if items:
                        self._clients[client] = items
                    return

    def items(self) -> list[T]:
        """All that wait, in no promised order."""
        with self._lock:
            return [item for items in self._clients.values() for item in items]

    def remove(self, item: T) -> None:
        """Take out ``item`` (by identity), if it waits."""
        with self._lock:
            for client, items in list(self._clients.items()):
                self._clients[client] = deque(other for other in items if other is not item)
                if not self._clients[client]:
                    del self._clients[client]


Live: TypeAlias = Sequence[tuple[BatchSequence[Owner], EngineSession]]
_LEAST = 64  # tokens: fewer are read about as fast


class SharedPrompts(Generic[Owner]):
    """The sequences that wait for a beginning; contains those."""

    def __init__(self) -> None:
        # What each waits for: a session, and how much that will hold.
        self._waits: dict[BatchSequence[Owner], tuple[EngineSession, int]] = {}

    def __contains__(self, seq: BatchSequence[Owner]) -> bool:
        return seq in self._waits

    def join(
        self,
        seq: BatchSequence[Owner],
        session: EngineSession,
        live: Live[Owner],
        idle: Iterable[EngineSession],
    ) -> None:
        """``seq`` has started on ``session``, beside ``live`` ones."""
        if session.blocks is None:  # nothing can be copied to it
            return
        tokens = seq.tokens
        alike = [(other, held) for other, held in live if held.mix == session.mix]
        held_by = [*(held for _, held in alike), *(one for one in idle if one.mix == session.mix)]
        least = len(tokens) - len(seq.pending) + _LEAST
        copied = max(held_by, key=lambda held: common_prefix(held.tokens, tokens), default=None)
        most = 0 if copied is None else common_prefix(copied.tokens, tokens)
        for other, held in alike:
            if other.client == seq.client and len(other.pending) > 1:
                shared = min(common_prefix(other.tokens, tokens), len(tokens) - 1)
                if shared >= max(least, most + 1):
                    self._waits[seq], most = (held, shared), shared
        if seq not in self and copied is not None and most >= least:
            _copy(seq, session, copied, live)

    def advance(self, live: Live[Owner]) -> None:
        """Copy what has been computed of what others wait for."""
        for seq, (source, length) in list(self._waits.items()):
            reads = any(held is source and len(other.pending) > 1 for other, held in live)
            if reads and len(source.tokens) < length:
                continue
            del self._waits[seq]
            for other, session in live:
                if other is seq:
                    _copy(seq, session, source, live)

    def leave(self, seq: BatchSequence[Owner]) -> None:
        """``seq`` waits no more."""
        self._waits.pop(seq, None)


def _copy(
    seq: BatchSequence[Owner], session: EngineSession, source: EngineSession, live: Live[Owner]
) -> None:
    for other, held in live:
        if held is source:
            other.settle()  # draft tokens leave the cache
    seq.copy(session, source)


# More rows of a decode pass gain little: from here on products are bound by arithmetic.
MOST_SEQUENCES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a schedule shares passes and memory.

    ``most`` sequences share a pass. A cache is made for ``capacity`` tokens (None: for what its
    sequence needs), and an answer joins where there is room for ``ahead`` tokens of it (None: for
    all that it may say). ``keep`` caches of sequences that have left stay for those that go on
    with their text. Beside answers a pass takes ``prompt_rows`` rows of prompts (None: as many as
    go in), which clients, and the prompts of each, share in equal parts where ``evenly``, else they
    come in their order.
    """

    most: int = MOST_SEQUENCES
    capacity: int | None = None
    ahead: int | None = None
    keep: int = 0
    prompt_rows: int | None = None
    evenly: bool = False


class Schedule(Generic[Owner]):
    """Which sequences are on their way, and what the next pass computes. Not thread-safe.

    Those ``waiting`` have not started, or have to start again.
    ``room`` says how many bytes the caches may take in all, ``check`` raises to abandon a pass.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        waiting: FairQueue[BatchSequence[Owner]],
        terms: Terms,
        *,
        room: Callable[[], int],
        check: Check,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._waiting = waiting
        self._terms = terms
        self._room = room
        self._check = check
        most = min(terms.most, engine.pass_rows) if engine.shares_passes else 1
        self._most = self._limit = most
        self._live: list[tuple[BatchSequence[Owner], EngineSession]] = []  # in the order of joining
        self._idle = IdleSessions()  # of those that have left
        self._shared: SharedPrompts[Owner] = SharedPrompts()
        self._kv: dict[int, int] = {}  # bytes of a cache by its tokens
        self._speculation: BatchSpeculation[Owner] = BatchSpeculation(engine, check)
        self.passes = 0

    @property
    def sequences(self) -> list[BatchSequence[Owner]]:
        """The sequences on their way."""
        return [seq for seq, _ in self._live]

    @property
    def held_bytes(self) -> int:
        """Bytes that caches take now."""
        return sum(session.nbytes for _, session in self._live) + self._idle.nbytes

    def step(self) -> list[tuple[BatchSequence[Owner], Chunks]]:
        """Let those in who have room, compute one pass, and let those out who have finished.

        Raises:
            MemoryBudgetError: a sequence that is alone has no room; others wait for it.
            LocalrtError: the pass failed, or what ``check`` raises; all are as they were.
        """
        items = self._join()
        if self._terms.ahead is not None:
            self._make_room()
        self._shared.advance(self._live)
        items += self._step_alone() or self._advance()
        if any(seq.done for seq, _ in self._live):
            for seq in self.sequences:
                if seq.done:
                    self.remove(seq)
            self._most = self._limit
        return items

    def remove(self, seq: BatchSequence[Owner]) -> None:
        """``seq`` leaves; its cache stays for whoever goes on with its text."""
        seq.settle()
        self._shared.leave(seq)
        for other, session in self._live:
            if other is seq and session.tokens:
                self._idle.add(session)
            elif other is seq:
                session.close()
        self._live = [(other, session) for other, session in self._live if other is not seq]

    def end(self, seq: BatchSequence[Owner]) -> Chunks:
        """``seq`` leaves, started or not; its last chunk."""
        self.remove(seq)
        return [seq.end("cancelled")]

    def rest(self, keep: int | None = None) -> None:
        """Free the caches beyond those that are kept, ``keep`` or the usual number."""
        while len(self._idle) > (self._terms.keep if keep is None else keep):
            self._idle.evict().close()

    def park(self, save: Callable[[EngineSession], object]) -> int:
        """``save`` the caches that nobody uses, and free them; their bytes."""
        nbytes = self._idle.nbytes
        for session in self._idle:
            save(session)
        self.rest(keep=0)
        return nbytes

    def close(self) -> None:
        """Free all caches."""
        for seq in self.sequences:
            seq.settle()
        for session in [*self._idle, *(session for _, session in self._live)]:
            session.close()
        self._idle, self._live = IdleSessions(), []

    def cost(self, seq: BatchSequence[Owner], session: EngineSession | None = None) -> int:
        """Bytes to count for a sequence: of its cache, and of its row of logits."""
        ahead = self._terms.ahead
        tokens = seq.capacity if ahead is None else min(seq.capacity, seq.length + ahead)
        return self._bytes(tokens, session)

    # -- one step --------------------------------------------------------------------------------

    def _join(self) -> list[tuple[BatchSequence[Owner], Chunks]]:
        """Start waiting sequences while there is room; the errors of those that cannot start."""
        failed: list[tuple[BatchSequence[Owner], Chunks]] = []
        while (seq := self._waiting.first(self._load())) is not None:
            try:
                session = self._session(seq) if len(self._live) < self._most else None
            except LocalrtError as error:
                self._waiting.take(seq)
                failed.append((seq, seq.fail(error)))
                continue
            if session is not None:
                self._waiting.take(seq)
                seq.start(session, self._tokenizer)
                self._shared.join(seq, session, self._live, self._idle)
                self._live.append((seq, session))
            elif not self._give_way(seq):
                break
        self.rest()
        return failed

    def _load(self) -> Counter[Hashable]:
        """How many sequences of each client are on their way."""
        return Counter(seq.client for seq, _ in self._live)

    def _give_way(self, seq: BatchSequence[Owner]) -> bool:
        """If the client of ``seq`` has none on its way, one of who has several waits for it."""
        load = self._load()
        if load[seq.client] or max(load.values(), default=0) < 2:
            return False
        other = self._last_of_busiest()
        self.remove(other)
        self._waiting.put_back(other.client, other)
        return True

    def _last_of_busiest(self) -> BatchSequence[Owner]:
        """Of the client that has the most on their way, the last to join."""
        load = self._load()
        return max(reversed(self.sequences), key=lambda seq: load[seq.client])

    def _session(self, seq: BatchSequence[Owner]) -> EngineSession | None:
        """One left over that begins like the sequence, or a new one; None when out of room."""
        session = self._left_over(seq)
        room = self._room() - sum(self.cost(*running) for running in self._live)
        needed = self.cost(seq, session)
        if self._live and needed > room:
            return None
        if session is not None:
            self._idle.take(session)
        while self._idle and needed + self._idle.nbytes > room:
            self._idle.evict().close()
        if session is not None:
            return session
        return self._engine.session(self._terms.capacity or seq.capacity)

    def _left_over(self, seq: BatchSequence[Owner]) -> EngineSession | None:
        """The idle session that holds the most of what ``seq`` begins with, if it is worth it."""
        best, most = None, 0
        for session in self._idle:
            if session.mix != seq.request.mix:
                continue
            shared = common_prefix(session.tokens, seq.tokens)
            # One that is kept is worth taking over only by who continues most of what it holds.
            worth = not self._terms.keep or 2 * shared > len(session.tokens)
            if shared > most and worth and session.capacity >= seq.capacity:
                best, most = session, shared
        return best

    def _make_room(self) -> None:
        """Where answers have outgrown what was counted for them, those that joined last wait."""
        room = self._room()
        while len(self._live) > 1:
            needed = sum(self._bytes(seq.length, session) for seq, session in self._live)
            while self._idle and needed + self._idle.nbytes > room:
                self._idle.evict().close()
            if needed <= room:
                break
            self._postpone()

    def _step_alone(self) -> list[tuple[BatchSequence[Owner], Chunks]]:
        """What a sequence that is alone gets by speculation; nothing where it has none."""
        if len(self._live) != 1:
            return []
        ((seq, session),) = self._live
        steps = seq.stepper(session)
        if steps is None:
            return []
        passes = steps.passes
        try:
            return [(seq, seq.step(steps, self._check))]
        except MemoryBudgetError:  # a pass without a tree needs less
            seq.stop_drafting()
            return []
        finally:
            self.passes += steps.passes - passes

    def _advance(self) -> list[tuple[BatchSequence[Owner], Chunks]]:
        """Compute one pass; what follows for the sequences that have no more pending tokens."""
        parts = self._parts()
        if not parts:
            return []
        if len(self._live) > 1 and (said := self._with_drafts(parts)) is not None:
            return said
        whole = [i for i, (seq, _, tokens) in enumerate(parts) if len(tokens) == len(seq.pending)]
        try:
            logits = self._engine.extend_batch(
                [(session, tokens) for _, session, tokens in parts],
                wanted=whole,
                check=self._check,
            )
        except MemoryBudgetError:
            if len(self._live) == 1 and not self._idle:
                raise
            logits = None
        if logits is None:  # not above: the error keeps caches from being freed
            if self._idle:
                self._idle.evict().close()
            else:
                self._postpone()
            return []
        self.passes += 1
        for seq, _, tokens in parts:
            seq.pending = seq.pending[len(tokens) :]
        return [
            (parts[i][0], parts[i][0].accept(row)) for i, row in zip(whole, logits, strict=True)
        ]

    def _with_drafts(
        self, parts: Sequence[Prompt[Owner]]
    ) -> list[tuple[BatchSequence[Owner], Chunks]] | None:
        """A pass of these, and of trees behind the answers; None where none speculates."""
        running = [(seq, session) for seq, session, _ in parts if len(seq.pending) == 1]
        if not running:
            return None
        said = self._speculation.advance(
            running, [part for part in parts if len(part[0].pending) > 1]
        )
        self.passes += said is not None
        return said

    def _parts(self) -> list[Prompt[Owner]]:
        """What the next pass appends to which session; answers come before prompts."""
        ready = [(seq, session) for seq, session in self._live if len(seq.pending) == 1]
        prompts = [
            (seq, session)
            for seq, session in self._live
            if len(seq.pending) > 1 and seq not in self._shared
        ]
        room = self._engine.pass_rows - len(ready)
        if ready and self._terms.prompt_rows is not None:
            room = min(room, max(self._terms.prompt_rows, len(prompts)))
        shares = _even_shares if self._terms.evenly else _shares_in_order
        rows = shares([(seq.client, len(seq.pending)) for seq, _ in prompts], room)
        parts = [(seq, session, seq.pending) for seq, session in ready]
        return parts + [
            (seq, session, seq.pending[:share])
            for (seq, session), share in zip(prompts, rows, strict=True)
            if share
        ]

    def _postpone(self) -> None:
        """Memory is short: the last to join gives its cache back, and is computed again later."""
        seq = self._last_of_busiest()
        (session,) = (session for other, session in self._live if other is seq)
        self._live.remove((seq, session))
        self._shared.leave(seq)
        seq.settle()
        session.close()
        self._waiting.put_back(seq.client, seq)
        self._most = len(self._live)

    # -- bytes -----------------------------------------------------------------------------------

    def _bytes(self, tokens: int, session: EngineSession | None) -> int:
        size = grown_capacity(tokens)
        if size not in self._kv:
            self._kv[size] = self._engine.kv_nbytes(size)
        held = 0 if session is None else session.nbytes
        return max(self._kv[size], held) + 4 * self._engine.info.vocab_size


def _shares_in_order(prompts: Sequence[tuple[Hashable, int]], room: int) -> list[int]:
    """Rows of a pass for prompts (a client and the tokens to read), the first ones first."""
    shares = []
    for _, length in prompts:
        shares.append(min(length, room))
        room -= shares[-1]
    return shares


def _even_shares(prompts: Sequence[tuple[Hashable, int]], room: int) -> list[int]:
    """The same in equal parts, for clients and then for the prompts of each; what one leaves,
    others get.
    """
    totals: Counter[Hashable] = Counter()
    for client, length in prompts:
        totals[client] += length
    shares = [0] * len(prompts)
    for place, client in enumerate(sorted(totals, key=totals.__getitem__)):
        own = [number for number, prompt in enumerate(prompts) if prompt[0] == client]
        left = room // (len(totals) - place)
        for after, number in enumerate(sorted(own, key=lambda number: prompts[number][1])):
            shares[number] = min(prompts[number][1], left // (len(own) - after))
            left -= shares[number]
        room -= sum(shares[number] for number in own)
    return shares
