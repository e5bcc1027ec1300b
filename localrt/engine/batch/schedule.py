"""The schedule of sequences that share passes: which run, what the next pass computes, whose cache
fits.

A pass has one row of every sequence in decode and is filled up with prompt rows (FlexGen's block
schedule, Sheng et al. 2023, with prompts joining as others finish, as in Orca, Yu et al. 2022, and
Sarathi, Agrawal et al. 2023). Clients are served round robin (``FairQueue``): one with nothing
running preempts a sequence of the busiest client, which resumes later. A prefix shared by a
client's prompts is computed once (``SharedPrompts``). If an engine's passes hold only one sequence,
sequences run one after another. This module does not know threads, or where the weights are.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias

from localrt.common.errors import LocalrtError, MemoryBudgetError
from localrt.engine.batch.chunked_prefill import PassTimes, UnreadPrompt, rows_of_pass
from localrt.engine.batch.sequence import BatchSequence, Chunks, Owner
from localrt.engine.batch.speculation import BatchSpeculation, Prompt
from localrt.engine.batch.waiting import FairQueue, SharedPrompts
from localrt.engine.pool import IdleSessions
from localrt.engine.protocol import Engine, EngineSession
from localrt.engine.saved_caches import Tier
from localrt.models.tokenizers.base import Tokenizer
from localrt.quant.ops.kv import grown_capacity
from localrt.quant.ops.protocol import Check
from localrt.speculative.acceptance import TreePass

_WORTH_SAVING_S = 1.0  # caches that take less time to compute are not saved

Save: TypeAlias = Callable[[EngineSession | None, *tuple[Tier, ...]], object]
"""Saves a cache in the first of the tiers that has room; None stands for the caches in RAM."""

KEEP_STREAMED = 2
"""The most idle caches where weights are streamed, which need the room more."""

# More rows per decode pass gain little: matrix products are then compute-bound.
MOST_SEQUENCES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """How a schedule shares passes and memory.

    At most ``most`` sequences share a pass. A cache has room for ``capacity`` tokens (None: as many
    as its sequence needs). An answer joins if ``ahead`` more of its tokens fit (None: all of them).
    ``keep`` caches of finished sequences stay, for requests that continue their text. Prompts are
    chunked by the time of passes, with ``prompt_rows`` prompt rows until a pass has been measured;
    with ``prompt_rows`` None they are processed in order.
    """

    most: int = MOST_SEQUENCES
    capacity: int | None = None
    ahead: int | None = None
    keep: int = 0
    prompt_rows: int | None = None


class Schedule(Generic[Owner]):
    """The running sequences, and what the next pass computes. Not thread-safe.

    ``waiting`` has sequences that have not started or must restart. ``room`` returns the bytes that
    all caches may take, ``check`` raises to abandon a pass, ``save`` saves an evicted cache.
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
        save: Save = lambda session, *tiers: None,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._waiting = waiting
        self._terms = terms
        self._room = room
        self._check = check
        self._save = save
        most = min(terms.most, engine.pass_rows) if engine.shares_passes else 1
        self._most = self._limit = most
        self._live: list[tuple[BatchSequence[Owner], EngineSession]] = []  # in the order of joining
        self._idle = IdleSessions()  # sessions of finished sequences
        self._shared: SharedPrompts[Owner] = SharedPrompts()
        self._kv: dict[int, int] = {}  # bytes of a cache by number of tokens
        self._speculation: BatchSpeculation[Owner] = BatchSpeculation(engine, check)
        self._times = PassTimes()
        self._others = 0  # models that compute on the same device in this step
        self.passes = 0

    @property
    def sequences(self) -> list[BatchSequence[Owner]]:
        """The running sequences."""
        return [seq for seq, _ in self._live]

    @property
    def cache_bytes(self) -> int:
        """The bytes that all caches take now."""
        return sum(session.nbytes for _, session in self._live) + self._idle.nbytes

    def step(self, others: int = 0) -> list[tuple[BatchSequence[Owner], Chunks]]:
        """Start the sequences that fit, compute one pass, and remove the finished sequences.

        ``others`` is the number of models that compute on the same device.

        Raises:
            MemoryBudgetError: a lone sequence does not fit; one of several would wait instead.
            LocalrtError: the pass failed, or ``check`` raised it; no sequence has changed.
        """
        self._others = others
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
        """Remove ``seq``; its cache stays for requests that continue its text."""
        seq.settle()
        self._shared.leave(seq)
        for other, session in self._live:
            if other is seq and session.tokens:
                self._idle.add(session)
            elif other is seq:
                session.close()
        self._live = [(other, session) for other, session in self._live if other is not seq]

    def end(self, seq: BatchSequence[Owner]) -> Chunks:
        """Remove ``seq``, started or not, and return its last chunk."""
        self.remove(seq)
        return [seq.end("cancelled")]

    def rest(self) -> None:
        """Free all idle caches but ``keep``, or two if weights have left a GPU for them."""
        keep = self._terms.keep
        if len(self._idle) > KEEP_STREAMED and (use := self._engine.gpu_use) and use.missing:
            keep = min(keep, KEEP_STREAMED)
        while len(self._idle) > keep:
            self._free(self._idle.evict())

    def forget(self) -> None:
        """Free all idle caches; nothing is saved."""
        for session in self._idle:
            session.close()
        self._idle = IdleSessions()

    def park(self, save: Save) -> int:
        """Call ``save`` for every idle cache and free them; return their bytes."""
        nbytes = self._idle.nbytes
        for session in self._idle:
            save(session)
        self.forget()
        return nbytes

    def close(self) -> None:
        """Free all caches."""
        for seq in self.sequences:
            seq.settle()
        self.forget()
        for _, session in self._live:
            session.close()
        self._live = []

    def cost(self, seq: BatchSequence[Owner], session: EngineSession | None = None) -> int:
        """Return the bytes to reserve for a sequence: its cache and its row of logits."""
        ahead = self._terms.ahead
        tokens = seq.capacity if ahead is None else min(seq.capacity, seq.length + ahead)
        return self._bytes(tokens, session)

    # -- one step --------------------------------------------------------------------------------

    def _join(self) -> list[tuple[BatchSequence[Owner], Chunks]]:
        """Start waiting sequences while they fit; return the errors of those that cannot start."""
        failed = []
        while (seq := self._next()) is not None:
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
            elif not self._preempt_for(seq):
                break
        self.rest()
        return failed

    def _next(self) -> BatchSequence[Owner] | None:
        """Return the waiting sequence to start next: background work last, then by client load."""
        load = self._load()
        return self._waiting.first(lambda seq: (seq.background, load[seq.client]))

    def _load(self) -> Counter[Hashable]:
        """Count the running sequences of each client."""
        return Counter(seq.client for seq, _ in self._live)

    def _preempt_for(self, seq: BatchSequence[Owner]) -> bool:
        """Preempt background work, or a sequence of the busiest client if the client of ``seq`` has
        none running; return whether one was preempted.
        """
        if not self._live:
            return False
        load, other = self._load(), self._preemptible()
        if other.background == seq.background:
            if load[seq.client] or load[other.client] < 2:
                return False
        elif seq.background:
            return False
        self.remove(other)
        self._waiting.put_back(other.client, other)
        return True

    def _preemptible(self) -> BatchSequence[Owner]:
        """Return the sequence to preempt first: background work, of the busiest client, the latest
        to join.
        """
        load = self._load()
        return max(reversed(self.sequences), key=lambda seq: (seq.background, load[seq.client]))

    def _session(self, seq: BatchSequence[Owner]) -> EngineSession | None:
        """Return an idle session that shares a prefix, or a new one; None if memory is short."""
        session = self._reusable_session(seq)
        room = self._room() - sum(self.cost(*running) for running in self._live)
        needed = self.cost(seq, session)
        if self._live and needed > room:
            return None
        if session is not None:
            self._idle.take(session)
        while self._idle and needed + self._idle.nbytes > room:
            self._free(self._idle.evict())
        if session is not None:
            return session
        return self._engine.session(self._terms.capacity or seq.capacity)

    def _reusable_session(self, seq: BatchSequence[Owner]) -> EngineSession | None:
        """Return the idle session with the longest useful prefix of ``seq``, if any."""
        best, most = None, 0
        for session, shared in self._idle.shared(seq.tokens, seq.request.mix).items():
            # If idle caches are kept, one is reused only if most of its tokens are shared.
            useful = not self._terms.keep or 2 * shared > len(session.tokens)
            if shared > most and useful and session.capacity >= seq.capacity:
                best, most = session, shared
        return best

    def _make_room(self) -> None:
        """Preempt sequences, of the busiest client first, until all grown caches fit."""
        room = self._room()
        while len(self._live) > 1:
            needed = sum(self._bytes(seq.length, session) for seq, session in self._live)
            while self._idle and needed + self._idle.nbytes > room:
                self._free(self._idle.evict())
            if needed <= room:
                break
            self._postpone()

    def _step_alone(self) -> list[tuple[BatchSequence[Owner], Chunks]]:
        """Run a lone sequence with speculation; return nothing if it has none."""
        if len(self._live) != 1:
            return []
        ((seq, session),) = self._live
        if seq.stepper(session) is None:
            return []
        began = time.monotonic()
        try:
            computed = seq.compute(session, self._check)
        except MemoryBudgetError:  # a pass without a tree needs less memory
            seq.stop_drafting()
            return []
        self._record_pass(1, began)  # one row, or one and a few draft tokens
        return [(seq, seq.take(computed))]

    def _advance(self) -> list[tuple[BatchSequence[Owner], Chunks]]:
        """Compute one pass; return the chunks of the sequences that have no more pending tokens."""
        entries = self._prompts_of_pass()
        if not entries:
            return []
        if len(self._live) > 1 and (items := self._with_drafts(entries)) is not None:
            return items
        whole = [i for i, (seq, _, tokens) in enumerate(entries) if len(tokens) == len(seq.pending)]
        began = time.monotonic()
        try:
            logits = self._engine.extend_batch(
                [(session, tokens) for _, session, tokens in entries],
                wanted=whole,
                check=self._check,
            )
        except MemoryBudgetError:
            if len(self._live) == 1 and not self._idle:
                raise
            logits = None
        if logits is None:  # not in the except block: the error would keep caches alive
            if self._idle:
                self._free(self._idle.evict())
            else:
                self._postpone()
            return []
        self._record_pass(sum(len(tokens) for *_, tokens in entries), began)
        for seq, _, tokens in entries:
            seq.pending = seq.pending[len(tokens) :]
        return [
            (entries[i][0], entries[i][0].take(TreePass.plain(row)))
            for i, row in zip(whole, logits, strict=True)
        ]

    def _with_drafts(
        self, entries: Sequence[Prompt[Owner]]
    ) -> list[tuple[BatchSequence[Owner], Chunks]] | None:
        """Compute a pass with draft trees of the answers; return None if none speculates."""
        running = [(seq, session) for seq, session, _ in entries if len(seq.pending) == 1]
        if not running:
            return None
        began = time.monotonic()
        items = self._speculation.advance(
            running, [entry for entry in entries if len(entry[0].pending) > 1]
        )
        if items is not None:
            self._record_pass(self._speculation.rows, began)
        return items

    def _record_pass(self, rows: int, began: float) -> None:
        self.passes += 1
        self._times.add(rows, time.monotonic() - began)

    def _prompts_of_pass(self) -> list[Prompt[Owner]]:
        """Return the tokens that the next pass appends to each session, answers first."""
        answers = [(seq, session) for seq, session in self._live if len(seq.pending) == 1]
        prompts = [
            (seq, session)
            for seq, session in self._live
            if len(seq.pending) > 1 and seq not in self._shared
        ]
        if self._terms.prompt_rows is None:
            room = self._engine.pass_rows - len(answers)
            rows = _shares_in_order([len(seq.pending) for seq, _ in prompts], room)
        else:
            rows = self._by_time(answers, [seq for seq, _ in prompts])
        entries = [(seq, session, seq.pending) for seq, session in answers]
        return entries + [
            (seq, session, seq.pending[: self._engine.uncut(seq.pending, 0, min(share, seq.uncut))])
            for (seq, session), share in zip(prompts, rows, strict=True)
            if share
        ]

    def _by_time(
        self,
        answers: list[tuple[BatchSequence[Owner], EngineSession]],
        prompts: Sequence[BatchSequence[Owner]],
    ) -> list[int]:
        """Return the rows of each prompt; remove the answers that must wait from ``answers``."""
        assert self._terms.prompt_rows is not None, "prompts are chunked by time"
        chosen, rows = rows_of_pass(
            [seq.background for seq, _ in answers],
            [UnreadPrompt(seq.client, len(seq.pending), seq.background) for seq in prompts],
            self._times,
            most=self._engine.pass_rows,
            guess=self._terms.prompt_rows,
            pass_number=self.passes,
            others=self._others,
        )
        answers[:] = [answers[number] for number in chosen]
        return rows

    def _postpone(self) -> None:
        """Free the cache of a sequence when memory is short; it is computed again later."""
        seq = self._preemptible()
        (session,) = (session for other, session in self._live if other is seq)
        self._live.remove((seq, session))
        self._shared.leave(seq)
        seq.settle()
        self._free(session)
        self._waiting.put_back(seq.client, seq)
        self._most = len(self._live)

    def _free(self, session: EngineSession) -> None:
        """Close ``session``; save its cache, on the disk if computing it again would take long."""
        slow = (self._times.seconds(len(session.tokens)) or 0.0) >= _WORTH_SAVING_S
        self._save(session, "ram", *(("disk",) if slow else ()))
        session.close()

    # -- bytes -----------------------------------------------------------------------------------

    def _bytes(self, tokens: int, session: EngineSession | None) -> int:
        size = grown_capacity(tokens)
        if size not in self._kv:
            self._kv[size] = self._engine.kv_nbytes(size)
        nbytes = 0 if session is None else session.nbytes
        return max(self._kv[size], nbytes) + 4 * self._engine.info.vocab_size


def _shares_in_order(lengths: Sequence[int], room: int) -> list[int]:
    """Divide ``room`` rows among prompts of ``lengths`` unread tokens, in order."""
    shares = []
    for length in lengths:
        shares.append(min(length, room))
        room -= shares[-1]
    return shares
