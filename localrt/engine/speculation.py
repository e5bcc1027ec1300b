"""Verification of draft trees in the loop: several tokens from one pass of the target.

A tree is drafted after the chosen token, and one pass computes all of it. Then the next token is
chosen; as long as it is in the tree, the logits after it are there already. So penalties, stops,
limits and log-probabilities work as without speculation, and one random number is drawn for each
token. A sequence alone has a ``Stepper``, one that shares its passes a ``Proposer``. While a pass
waits for its weights, ``GapWork`` lets drafting go on. This module knows no text, and no source
beyond its protocol.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from localrt.common.errors import CancelledError, LocalrtError, MemoryBudgetError
from localrt.engine.protocol import EngineSession
from localrt.speculative.acceptance import TreePass
from localrt.speculative.ngram import Archive
from localrt.speculative.source import DEPTH, Check, DraftSource, Outcome, Proposal, TreeSize
from localrt.speculative.tree import TokenTree
from localrt.speculative.tuner import FEW, Plan, Tuner

MakeSource = Callable[[EngineSession], DraftSource]
# Runs in the drafting thread, with the check and the outcome of ``DraftSource.ahead``.
Work = Callable[[Check, Outcome], None]


class GapWork:
    """The check of one pass, and ``work`` that a thread does while the pass waits, if any.

    The pass reports through its check when it waits. When the wait is over, the thread stops at its
    next check, between two layers of the draft, so the two hardly ever compute at the same time.
    Leaving the context ends the thread. ``check`` is the caller's own, called in both threads.
    """

    def __init__(self, check: Check, work: Work | None = None) -> None:
        self._check = check
        self._work = work
        self._gap = threading.Event()  # the pass waits, or has ended
        self._over = False
        self._next: Sequence[int] | None = None  # the tokens that probably follow
        self._closed: float | None = None  # when a gap ended; None once the thread has seen it
        self._thread: threading.Thread | None = None
        self.waited_s = 0.0  # seconds that the pass waited for weights
        self.shared_s = 0.0  # at most this long, both computed at once
        self.error: BaseException | None = None  # of ``work``, except cancelling

    # -- the pass --------------------------------------------------------------------------------

    def __call__(self) -> None:
        """Run the caller's check."""
        self._check()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The pass waits and computes nothing inside this context."""
        began = time.perf_counter()
        self._gap.set()
        try:
            yield
        finally:
            self._gap.clear()
            self._closed = now = time.perf_counter()
            self.waited_s += now - began

    def ended(self, following: Sequence[int]) -> None:
        """The pass has ended; ``following`` are the tokens that probably come next."""
        self._next = following
        self._over = True
        self._gap.set()

    def __enter__(self) -> GapWork:
        if self._work is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._work,), name="localrt-draft", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._over = True
        self._gap.set()
        if self._thread is not None:
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self, work: Work) -> None:
        try:
            self._between()
            work(self._between, lambda: self._next)
        except CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - the pass's thread is told
            self.error = error

    def _between(self) -> None:
        """Wait for the next gap; raise ``CancelledError`` if the pass ended without a result."""
        if not self._gap.is_set():
            closed, self._closed = self._closed, None
            if closed is not None:
                self.shared_s += time.perf_counter() - closed
            self._gap.wait()
        self._check()
        if self._over and self._next is None:
            raise CancelledError("the pass was given up")


class Speculation:
    """How a model's generations speculate. Thread-safe.

    ``makers`` create a sequence's draft sources, by name; they stay with its session. With a
    ``fixed`` size all sources draft for every tree; otherwise the ``tuner`` decides. ``archive``
    remembers answers. ``note`` says why a requested way of drafting is not used. ``shared`` are the
    sources that draft for sequences which share passes.
    """

    def __init__(
        self,
        makers: Mapping[str, MakeSource],
        tuner: Tuner,
        *,
        fixed: TreeSize | None = None,
        archive: Archive | None = None,
        note: str = "",
        shared: Collection[str] = (),
    ) -> None:
        self._makers = makers
        self._shared = shared
        self.fixed = fixed
        self.tuner = tuner
        self.archive = archive
        self.note = note
        self._sources: WeakKeyDictionary[EngineSession, dict[str, DraftSource]] = (
            WeakKeyDictionary()
        )

    def prepare(self, session: EngineSession) -> None:
        """Create the session's sources before its prompt is computed: some record its features."""
        if session.takes_trees:
            self.sources_of(session, self._makers)

    def start(self, session: EngineSession, prompt: Sequence[int], limit: int) -> Stepper | None:
        """Start a generation of at most ``limit`` tokens; return None if it cannot speculate."""
        if not session.takes_trees:
            return None
        return Stepper(self, session, prompt, self._makers, limit)

    def start_shared(self, session: EngineSession, prompt: Sequence[int]) -> Proposer | None:
        """Return what drafts for a generation whose passes are shared; None if nothing does."""
        if self.fixed is not None or not session.takes_trees:
            return None
        known = self.tuner.sources
        names = [name for name in self._makers if name in self._shared or known[name].cheap]
        return Proposer(self, session, prompt, names) if names else None

    def sources_of(self, session: EngineSession, names: Iterable[str]) -> dict[str, DraftSource]:
        """Return the session's sources with these names."""
        sources = self._sources.setdefault(session, {})
        for name in names:
            if name not in sources:
                sources[name] = self._makers[name](session)
        return {name: sources[name] for name in names}


class Drafting(ABC):
    """One generation that speculates on ``session``: the common part of both ways.

    ``passes`` counts target passes, ``emitted`` the tokens they brought.
    """

    def __init__(
        self,
        speculation: Speculation,
        session: EngineSession,
        prompt: Sequence[int],
        names: Iterable[str],
    ) -> None:
        self.session = session
        self.tuner = speculation.tuner
        self.passes = 0
        self.emitted = 0
        self._archive = speculation.archive
        self._sources = speculation.sources_of(session, names)
        self._history = list(session.plain(prompt))
        self._prompt_size = self._known = len(prompt)
        self._accepted: Counter[str] = Counter()  # draft tokens, by source
        for source in self._sources.values():
            source.begin(self._history)

    @property
    def room(self) -> int:
        """The most nodes a tree may have by the context."""
        return self.session.capacity - len(self.session.tokens) - 1

    def chosen(self, token: int) -> None:
        """Record the first token that the next pass computes."""
        del self._history[self._known :]  # left by an abandoned pass
        self._history.append(token)

    def passed(self) -> None:
        """A pass has computed the chosen token and brings the next one."""
        self._known = len(self._history)
        self.passes += 1
        self.emitted += 1

    def accepted(self, computed: TreePass) -> None:
        """The last node of the pass's path is accepted and brings the next token."""
        node = computed.path[-1]
        self._history.append(int(computed.tree.tokens[node]))
        self._known = len(self._history)
        self._accepted.update(computed.tree.proposed_by(node))
        self.emitted += 1

    @abstractmethod
    def verified(self, computed: TreePass) -> None:
        """Learn from a finished pass."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why and how it speculated, in one sentence."""

    def acceptance(self) -> dict[str, float]:
        """Return the share of emitted tokens that each source had drafted."""
        emitted = max(1, self.emitted)
        return {name: count / emitted for name, count in sorted(self._accepted.items())}

    def finish(self) -> None:
        """The generation has ended, or continues with the other class."""
        if self._archive is not None:
            self._archive.add(self._history[self._prompt_size :])


class Stepper(Drafting):
    """A generation that has its passes to itself."""

    def __init__(
        self,
        speculation: Speculation,
        session: EngineSession,
        prompt: Sequence[int],
        names: Iterable[str],
        limit: int,
    ) -> None:
        super().__init__(speculation, session, prompt, names)
        self._run = self.tuner.start(limit, list(self._sources), size=speculation.fixed)
        self._note = speculation.note
        self._plan: Plan | None = None
        self._took = (0.0, 0.0, 0.0, False)  # see ``Run.verified``
        self._out_of_memory = False  # for trees

    def verified(self, computed: TreePass) -> None:
        """Keep the accepted path, and report it."""
        if len(computed.tree):
            self.session.keep(computed.rows)
        self._run.verified(self._plan, computed.tree, computed.path, *self._took)

    @property
    def reason(self) -> str:
        return f"{self._run.reason}; {self._note}" if self._note else self._run.reason

    def advance(self, token: int, left: int, check: Check) -> TreePass:
        """Compute the chosen ``token`` and a tree after it; at most ``left`` more follow."""
        self.chosen(token)
        session, self._plan = self.session, None
        drafts = left > 1 and not self._out_of_memory
        tree = self._draft(left - 1, check) if drafts else TokenTree.empty()
        ahead = self._run.ahead(self._plan, tree) if left > 1 else None
        work = None if ahead is None else self._work(*ahead)
        started, fresh = time.perf_counter(), session.fresh_passes
        with GapWork(check, work) as gap_work:
            if len(tree):
                try:
                    logits = session.extend_tree(token, tree, check=gap_work)
                except MemoryBudgetError:
                    # Its rows and logits do not fit the budget: one row may still fit.
                    self._out_of_memory, self._plan, tree = True, None, TokenTree.empty()
                    self._note = "no more drafts: they need memory that the budget does not have"
            if not len(tree):
                logits = session.extend([token], check=gap_work)[None]
            seconds = time.perf_counter() - started
            computed = TreePass(tree, logits)
            if work is not None:
                gap_work.ended(computed.likeliest())
        self._took = seconds, gap_work.waited_s, gap_work.shared_s, session.fresh_passes > fresh
        if ahead is not None and gap_work.error is not None:
            if not isinstance(gap_work.error, LocalrtError):
                raise gap_work.error
            self._run.failed(ahead[0], str(gap_work.error))  # the pass is valid without it
        return computed

    # -- parts -----------------------------------------------------------------------------------

    def _work(self, name: str, nodes: int) -> Work | None:
        """Return the work of the source with that name during the pass that begins."""
        source, counts = self._sources[name], self.session.counts()
        if not source.prepares or (counts and counts.link_bytes):  # passes wait for the GPU
            return None
        history = list(self._history)
        return lambda check, outcome: source.ahead(history, nodes, check=check, outcome=outcome)

    def _room(self) -> int:
        """Return the most nodes a tree may have: by the context, and by memory."""
        rows = self.session.tree_rows
        return self.room if rows is None else max(0, min(self.room, rows - 1))

    def _draft(self, depth: int, check: Check) -> TokenTree:
        """Draft tokens after the history, as planned, at most ``depth`` deep."""
        if not self._run.may_draft():
            return TokenTree.empty()
        began, charged, sources = time.perf_counter(), 0.0, self._sources
        room = self._room()
        ready = {name: source.ready(self._history) for name, source in sources.items()}
        missing = {name: source.missing(self._history) for name, source in sources.items()}
        verified = TokenTree.empty()
        while (plan := self._run.plan(room, ready, missing)) is not None:
            self._plan = plan
            started, fresh = time.perf_counter(), self.session.fresh_passes
            try:
                if (tokens := missing[plan.source]) > FEW:  # fewer are a part of the draft
                    sources[plan.source].catch_up(self._history, check=check)
                    missing[plan.source] = 0
                    now = time.perf_counter()
                    self._run.caught_up(plan.source, tokens, now - started)
                    charged += now - started
                    started = now
                size = TreeSize(plan.budget, min(plan.depth, depth), plan.least)
                tree = sources[plan.source].propose(self._history, size, check=check)
            except CancelledError:
                raise
            except LocalrtError as error:  # the answer is the same without this source
                self._run.failed(plan.source, str(error))
                continue
            seconds = time.perf_counter() - started
            charged += seconds
            is_fresh = self.session.fresh_passes > fresh
            if (found := self._run.drafted(plan, tree, seconds, fresh=is_fresh)) is not None:
                verified = found
                break
        self._run.overhead(time.perf_counter() - began - charged)
        return verified


class Proposer(Drafting):
    """A generation that shares its passes with others.

    It has lookups, and heads, whose steps for all sequences are computed together; a draft model
    would run its own passes for each sequence in turn. It proposes and learns; which draft tokens
    are verified is decided for all sequences together.
    """

    def __init__(
        self,
        speculation: Speculation,
        session: EngineSession,
        prompt: Sequence[int],
        names: Iterable[str],
    ) -> None:
        super().__init__(speculation, session, prompt, names)
        self._trees: dict[str, TokenTree] = {}  # proposed for the next pass, by source

    def chosen(self, token: int) -> None:
        super().chosen(token)
        self._trees.clear()

    def look_up(self, most: int, depth: int, check: Check) -> None:
        """Let the sources that cost next to nothing propose at most ``most`` draft tokens."""
        size = TreeSize(min(most, self.room), min(depth, DEPTH))
        for name, source in list(self._sources.items()):
            if not self.tuner.sources[name].cheap or size.budget < 1 or size.depth < 1:
                continue
            try:
                self.proposed(name, source.propose(self._history, size, check=check))
            except CancelledError:
                raise
            except LocalrtError as error:
                self.proposed(name, error)

    @property
    def computes(self) -> list[str]:
        """The sources whose trees take passes of their own."""
        return [name for name in self._sources if not self.tuner.sources[name].cheap]

    def proposal(self, name: str, budget: int, depth: int) -> Proposal | None:
        """Return the steps of a proposal of the source ``name``; None if it has failed."""
        source, budget = self._sources.get(name), min(budget, self.room)
        if source is None or budget < 1 or depth < 1:
            return None
        return source.proposal(self._history, TreeSize(budget, depth))

    def proposed(self, name: str, found: TokenTree | LocalrtError) -> None:
        """Add a source's proposal; a source that has failed is not used again."""
        if isinstance(found, LocalrtError):
            del self._sources[name]
        elif len(found):
            self._trees[name] = found

    def tree(self, most: int) -> TokenTree:
        """Return at most ``most`` draft tokens, scored by log of expected acceptance."""
        return self.tuner.joined(self._trees, most)

    def verified(self, computed: TreePass) -> None:
        if len(computed.tree):
            self.tuner.learn(self._trees, computed.tree, computed.path)

    @property
    def reason(self) -> str:
        each = self.emitted / self.passes if self.passes else 1.0
        names = " and ".join(self._sources) or "no source"
        return f"speculation: {names}, {each:.1f} tokens a pass that other answers share"
