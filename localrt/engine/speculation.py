"""Speculation in the loop: several tokens from one target pass, along a tree of draft tokens.

The loop chooses a token, as always, and asks for the logits after it. If the last pass verified
that token, they are there already. If not, the accepted path is kept, a tree is drafted behind the
new token, and one pass computes all of it (``Stepper``). So penalties, stops, limits and
log-probabilities work as without speculation, and one random number is drawn for each token. A
sequence that shares its passes has a ``Proposer``. While a pass waits for its weights, ``GapWork``
lets a draft go on. It knows no text, and no source beyond its protocol.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

from localrt.common.errors import CancelledError, LocalrtError, MemoryBudgetError
from localrt.engine.protocol import EngineSession, Logits
from localrt.speculative.ngram import Archive
from localrt.speculative.source import DEPTH, Check, DraftSource, Outcome
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.tuner import MixedTree, Plan, Run, TreeSize, Tuner

MakeSource = Callable[[EngineSession], DraftSource]
# Called in the thread with the check and the outcome of ``DraftSource.ahead``.
Work = Callable[[Check, Outcome], None]


class GapWork:
    """The check of one pass, and ``work`` beside it, if any.

    A pass says through its check when it waits. In between, the thread that works stands still at
    the next place where it looks: between two layers of the draft. So the two hardly ever compute
    at the same time. A context: leaving it ends the thread. ``check`` is the caller's own, called
    in both threads.
    """

    def __init__(self, check: Check, work: Work | None = None) -> None:
        self._check = check
        self._work = work
        self._gap = threading.Event()  # the pass waits, or has ended
        self._over = False
        self._next: Sequence[int] | None = None  # the tokens that follow, as far as can be told
        self._closed: float | None = None  # when the gap ended during which a layer began
        self._thread: threading.Thread | None = None
        self.waited_s = 0.0  # the pass did, for weights
        self.shared_s = 0.0  # at most so long the work computed beside the pass
        self.error: BaseException | None = None  # of the work, but for cancelling

    # -- the pass --------------------------------------------------------------------------------

    def __call__(self) -> None:
        """The caller's check."""
        self._check()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The pass waits, and nothing of it computes."""
        began = time.perf_counter()
        self._gap.set()
        try:
            yield
        finally:
            self._gap.clear()
            self._closed = now = time.perf_counter()
            self.waited_s += now - began

    def ended(self, following: Sequence[int]) -> None:
        """The pass has ended: these tokens come next, as far as can be told."""
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
        """Stand still until there is a gap; give up if the pass ended without a result."""
        if not self._gap.is_set():
            closed, self._closed = self._closed, None
            if closed is not None:
                self.shared_s += time.perf_counter() - closed
            self._gap.wait()
        self._check()
        if self._over and self._next is None:
            raise CancelledError("the pass was given up")


class TreePass:
    """A pass of ``session`` over ``tree``, whose tokens are confirmed one after another.

    The accept rule: a token is chosen from the target's logits exactly as plain decoding would
    (same penalties, same filters, one random number). If a child of the present node has that
    token, the next is chosen from its logits; if not, the pass is over. The choice is the answer's
    either way. Nothing is rejected and drawn again, so every token has the target's own
    distribution given what came before: exact for any tree, any draft and any sampler (SpecExec,
    Svirschevski et al. 2024, section 4). ``path`` are the nodes confirmed so far.
    """

    def __init__(self, session: EngineSession, tree: TokenTree, logits: Logits) -> None:
        self._session = session
        self._logits = logits
        self.tree = tree
        self.path: list[int] = []

    @property
    def first(self) -> Logits:
        """Logits (vocab,) after the token that the tree hangs on."""
        row: Logits = self._logits[0]
        return row

    def after(self, token: int) -> Logits | None:
        """Logits (vocab,) after ``token``, which was chosen; None where the tree has no such."""
        node = self.tree.follow(self.path[-1] if self.path else ROOT, token)
        if node is None:
            return None
        self.path.append(node)
        row: Logits = self._logits[1 + node]
        return row

    def close(self) -> None:
        """The session keeps what was confirmed, and can go on."""
        self._session.keep([0, *(1 + node for node in self.path)])

    def likeliest(self) -> list[int]:
        """The tokens that greedy decoding would choose along the tree."""
        tokens: list[int] = []
        node: int | None = ROOT
        while node is not None:
            tokens.append(int(self._logits[1 + node].argmax()))
            node = self.tree.follow(node, tokens[-1])
        return tokens


class Speculation:
    """How the generations of a model speculate. Thread-safe.

    ``makers`` make the sources of a sequence, by name, which stay with its session. Trees of a
    ``fixed`` size are made by all of them; without, the ``tuner`` decides. ``archive`` remembers
    answers. ``note`` says why something asked for is not done.
    """

    def __init__(
        self,
        makers: Mapping[str, MakeSource],
        tuner: Tuner,
        *,
        fixed: TreeSize | None = None,
        archive: Archive | None = None,
        note: str = "",
    ) -> None:
        self._makers = makers
        self._fixed = fixed
        self.tuner = tuner
        self.archive = archive
        self.note = note
        self._sources: WeakKeyDictionary[EngineSession, dict[str, DraftSource]] = (
            WeakKeyDictionary()
        )

    def start(self, session: EngineSession, prompt: Sequence[int], limit: int) -> Stepper | None:
        """The steps of one generation of at most ``limit`` tokens; None where it cannot be."""
        if not session.takes_trees:
            return None
        sources = self._begin(session, prompt, list(self._makers))
        run = self.tuner.start(limit, list(sources), size=self._fixed)
        return Stepper(self, session, prompt, sources, run)

    def start_shared(self, session: EngineSession, prompt: Sequence[int]) -> Proposer | None:
        """What drafts for a generation while others share its passes; None: nothing does."""
        if self._fixed is not None or not session.takes_trees:
            return None
        cheap = [name for name in self._makers if self.tuner.sources[name].cheap]
        if not cheap:
            return None
        return Proposer(self, session, prompt, self._begin(session, prompt, cheap))

    def _begin(
        self, session: EngineSession, prompt: Sequence[int], names: Sequence[str]
    ) -> dict[str, DraftSource]:
        """The session's sources of these names, at the start of a generation."""
        held = self._sources.setdefault(session, {})
        for name in names:
            if name not in held:
                held[name] = self._makers[name](session)
            held[name].begin(prompt)
        return {name: held[name] for name in names}


class Drafting(ABC):
    """One generation that speculates on ``session``: what is common to both ways.

    ``passes`` counts target passes, ``emitted`` the tokens that they brought.
    """

    def __init__(
        self,
        speculation: Speculation,
        session: EngineSession,
        prompt: Sequence[int],
        sources: dict[str, DraftSource],
    ) -> None:
        self.session = session
        self.tuner = speculation.tuner
        self.passes = 0
        self.emitted = 0
        self._archive = speculation.archive
        self._sources = sources
        self._history = list(prompt)
        self._prompt_size = len(prompt)
        self._accepted: Counter[str] = Counter()  # draft tokens, by source

    @property
    @abstractmethod
    def reason(self) -> str:
        """How it went, in one sentence."""

    def acceptance(self) -> dict[str, float]:
        """The share of the passes' tokens that each source had drafted."""
        emitted = max(1, self.emitted)
        return {name: count / emitted for name, count in sorted(self._accepted.items())}

    def finish(self) -> None:
        """The generation has ended, or goes on in the other way."""
        if self._archive is not None:
            self._archive.add(self._history[self._prompt_size :])


class Stepper(Drafting):
    """A generation whose passes are its own."""

    def __init__(
        self,
        speculation: Speculation,
        session: EngineSession,
        prompt: Sequence[int],
        sources: dict[str, DraftSource],
        run: Run,
    ) -> None:
        super().__init__(speculation, session, prompt, sources)
        self._run = run
        self._note = speculation.note
        self._plan: Plan | None = None
        self._computed: TreePass | None = None  # and not yet kept
        self._took = (0.0, 0.0, 0.0)  # seconds of that pass, waiting in it, shared with a draft
        self._prefill = time.perf_counter()
        self._preparing = {name: source for name, source in sources.items() if source.prepares}
        self._cramped = False  # trees need more memory than there is

    def prefilled(self, rows: int) -> None:
        """A prompt of ``rows`` has just been computed."""
        self.tuner.prompt(rows, time.perf_counter() - self._prefill)

    def advance(self, token: int, left: int, check: Check) -> Logits:
        """Logits (vocab,) after ``token``, which was chosen; ``left`` more may be."""
        self._history.append(token)
        logits = self._verified(token)
        if logits is None:
            self._close()
            logits = self._pass(token, left, check)
        self.emitted += 1
        return logits

    def finish(self) -> None:
        """The generation has ended: the session keeps what was accepted."""
        self._close()
        super().finish()

    @property
    def reason(self) -> str:
        return f"{self._run.reason}; {self._note}" if self._note else self._run.reason

    # -- parts -----------------------------------------------------------------------------------

    def _verified(self, token: int) -> Logits | None:
        computed = self._computed
        logits = None if computed is None else computed.after(token)
        if computed is not None and logits is not None:
            self._accepted.update(computed.tree.proposed_by(computed.path[-1]))
        return logits

    def _close(self) -> None:
        """Keep the accepted path, and report it."""
        computed, self._computed = self._computed, None
        if computed is None:
            return
        if len(computed.tree):
            computed.close()
        self._run.verified(self._plan, computed.tree, computed.path, *self._took)

    def _pass(self, token: int, left: int, check: Check) -> Logits:
        session, self._plan = self.session, None
        drafts = left > 1 and not self._cramped
        tree = self._draft(left - 1, check) if drafts else TokenTree.empty()
        ahead = self._run.ahead(self._plan, tree) if left > 1 else None
        work = None if ahead is None else self._work(*ahead)
        started = time.perf_counter()
        with GapWork(check, work) as gap_work:
            if len(tree):
                try:
                    logits = session.extend_tree(token, tree, check=gap_work)
                except MemoryBudgetError:
                    # Its rows and logits need more than the budget leaves: one row may still fit.
                    self._cramped, self._plan, tree = True, None, TokenTree.empty()
                    self._note = "no more drafts: they need memory that the budget does not have"
            if not len(tree):
                logits = session.extend([token], check=gap_work)[None]
            seconds = time.perf_counter() - started
            self._computed = computed = TreePass(session, tree, logits)
            if work is not None:
                gap_work.ended(computed.likeliest())
        self._took = seconds, gap_work.waited_s, gap_work.shared_s
        self.passes += 1
        if ahead is not None and gap_work.error is not None:
            if not isinstance(gap_work.error, LocalrtError):
                raise gap_work.error
            self._run.failed(ahead[0], str(gap_work.error))  # the pass is as good without it
        return computed.first

    def _work(self, name: str, nodes: int) -> Work | None:
        """What the source of that name does beside the pass that begins."""
        source = self._preparing.get(name)
        counts = self.session.counts()
        if source is None or (counts and counts.link_bytes):  # passes wait for the GPU
            return None
        history = list(self._history)
        return lambda check, outcome: source.ahead(history, nodes, check=check, outcome=outcome)

    def _room(self) -> int:
        """The most nodes that a tree may have: those whose tokens may still be emitted."""
        room, rows = self.session.capacity - len(self.session.tokens) - 1, self.session.tree_rows
        return room if rows is None else max(0, min(room, rows - 1))

    def _draft(self, depth: int, check: Check) -> TokenTree:
        """Draft tokens behind the history, as planned, at most ``depth`` ahead."""
        if self._run.rests():
            return TokenTree.empty()
        began, charged, preparing = time.perf_counter(), 0.0, self._preparing
        room = self._room()
        ready = {name: source.ready(self._history) for name, source in preparing.items()}
        missing = {name: source.missing(self._history) for name, source in preparing.items()}
        worth = TokenTree.empty()
        while (plan := self._run.plan(room, ready, missing)) is not None:
            self._plan = plan
            started = time.perf_counter()
            try:
                if tokens := missing.get(plan.source):
                    preparing[plan.source].catch_up(self._history, check=check)
                    missing[plan.source] = 0
                    now = time.perf_counter()
                    self._run.caught_up(plan.source, tokens, now - started)
                    charged += now - started
                    started = now
                tree = self._sources[plan.source].propose(
                    self._history, plan.budget, min(plan.depth, depth), check=check
                )
            except CancelledError:
                raise
            except LocalrtError as error:  # the answer is the same without it
                self._run.failed(plan.source, str(error))
                continue
            seconds = time.perf_counter() - started
            charged += seconds
            if (found := self._run.drafted(plan, tree, seconds)) is not None:
                worth = found
                break
        self._run.looked(worth, time.perf_counter() - began, charged)
        return worth


class Proposer(Drafting):
    """A generation whose passes others share.

    Only cheap sources: a draft model's own passes would be made for each sequence in turn. It
    proposes and learns; which draft tokens are computed is decided for all sequences together.
    """

    def __init__(
        self,
        speculation: Speculation,
        session: EngineSession,
        prompt: Sequence[int],
        sources: dict[str, DraftSource],
    ) -> None:
        super().__init__(speculation, session, prompt, sources)
        self._computed = len(prompt)
        self._mixed = MixedTree()

    def chosen(self, token: int) -> None:
        """``token`` is what the next pass computes first."""
        del self._history[self._computed :]  # of a pass that was abandoned
        self._history.append(token)
        self._mixed.clear()

    def propose(self, most: int, depth: int, check: Check) -> TokenTree:
        """At most ``most`` draft tokens; scores are logarithms of believed chances."""
        most = min(most, self.session.capacity - len(self.session.tokens) - 1)
        depth = min(depth, DEPTH)
        if most < 1 or depth < 1:
            return TokenTree.empty()
        for name, source in list(self._sources.items()):
            try:
                tree = source.propose(self._history, most, depth, check=check)
            except CancelledError:
                raise
            except LocalrtError:  # the answer is the same without it
                del self._sources[name]
                continue
            if len(tree):
                self._mixed.add(name, tree, self.tuner.sources[name].calibration)
        with self.tuner.lock:
            return self._mixed.tree(most)

    def verified(self, computed: TreePass) -> None:
        """A pass has ended."""
        tree, path = computed.tree, computed.path
        self.passes += 1
        self.emitted += 1 + len(path)
        self._history += tree.tokens[path].tolist()
        self._computed = len(self._history)
        for node in path:
            self._accepted.update(tree.proposed_by(node))
        if len(tree):
            with self.tuner.lock:
                self._mixed.learn(tree, path)

    @property
    def reason(self) -> str:
        each = self.emitted / self.passes if self.passes else 1.0
        names = " and ".join(self._sources) or "no source"
        return f"speculation: {names}, {each:.1f} tokens a pass that other answers share"
