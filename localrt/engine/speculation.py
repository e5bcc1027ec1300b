"""Speculation in the loop: several tokens from one target pass, along a tree of draft tokens.

The loop chooses a token, as always, and asks for the logits after it. If the last pass verified
that token, they are there already. If not, the accepted path is kept, a tree is drafted behind the
new token, and one pass computes all of it (``Stepper``). So penalties, stops, limits and
log-probabilities work as without speculation, and one random number is drawn for each token. A
sequence that shares its passes has a ``Guesser``. While a pass waits for its weights, ``GapWork``
lets a draft go on. It knows no text, and no source beyond its protocol.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from weakref import WeakKeyDictionary

from localrt.common.errors import CancelledError, LocalrtError, MemoryBudgetError
from localrt.engine.protocol import EngineSession, Logits
from localrt.speculative.ngram import Archive
from localrt.speculative.source import (
    DEPTH,
    Ahead,
    Check,
    DraftSource,
    Outcome,
    Plan,
    TreeSize,
)
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.tuner import MixedTree, Run, Tuner

# Called in the thread with the check and the outcome of ``DraftSource.ahead``.
Work = Callable[[Check, Outcome], None]


class GapWork:
    """The check of one pass, and ``work`` beside it; None where there is nothing to do.

    A context: leaving it ends the thread. ``check`` is the caller's own, called in both threads.
    ``clock`` gives seconds.
    """

    def __init__(
        self,
        check: Check,
        work: Work | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._check = check
        self._work = work
        self._clock = clock
        self._gap = threading.Event()  # the pass waits, or has ended
        self._over = False
        self._true: Sequence[int] | None = None
        self._closed: float | None = None  # when the gap ended during which a layer began
        self._thread: threading.Thread | None = None
        self.waited_s = 0.0  # the pass did, for weights
        self.shared_s = 0.0  # work went on although the pass did as well, at most
        self.error: BaseException | None = None  # of the work, but for cancelling

    # -- the pass --------------------------------------------------------------------------------

    def __call__(self) -> None:
        """The caller's check."""
        self._check()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The pass waits, and nothing of it computes."""
        began = self._clock()
        self._gap.set()
        try:
            yield
        finally:
            self._gap.clear()
            self._closed = now = self._clock()
            self.waited_s += now - began

    def ended(self, true: Sequence[int]) -> None:
        """The pass has ended: these tokens come next, as far as can be told."""
        self._true = true
        self._over = True
        self._gap.set()

    def __enter__(self) -> GapWork:
        if self._work is not None:
            self._thread = threading.Thread(
                target=self._run, args=(self._work,), name="localrt-draft", daemon=True
            )
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over = True
        self._gap.set()
        if self._thread is not None:
            self._thread.join()

    # -- the thread ------------------------------------------------------------------------------

    def _run(self, work: Work) -> None:
        try:
            self._between()
            work(self._between, lambda: self._true)
        except CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - the pass's thread is told
            self.error = error

    def _between(self) -> None:
        """Stand still until there is a gap; give up when the pass is over and came to nothing."""
        if not self._gap.is_set():
            closed, self._closed = self._closed, None
            if closed is not None:
                self.shared_s += self._clock() - closed
            self._gap.wait()
        self._check()
        if self._over and self._true is None:
            raise CancelledError("the pass was given up")


# The share of plain decoding that looking for guesses may take where there are none, and the most
# steps to leave it out.
_LOOKING, _LONGEST_REST = 0.005, 24
MakeSource = Callable[[EngineSession], DraftSource]


class TreePass:
    """A pass of ``session`` over ``tree``, whose tokens are confirmed one after another.

    The accept rule: a token is chosen from the target's logits exactly as plain decoding would
    (same penalties, same filters, one random number). If a child of the present node guessed that
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


class Speculation:
    """How the generations of a model speculate. Thread-safe.

    ``makers`` make the sources of a sequence, by name, which stay with its session. Trees of a
    ``fixed`` size are made by all of them; without, the ``tuner`` decides. ``archive`` remembers
    answers. ``note`` says why something asked for is not done. ``in_gaps`` may be set to False for
    the generations to come: sources then work between passes only, to measure what the gaps are
    worth.
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
        self._tuner = tuner
        self._fixed = fixed
        self._archive = archive
        self._note = note
        self.in_gaps = True
        self._sources: WeakKeyDictionary[EngineSession, dict[str, DraftSource]] = (
            WeakKeyDictionary()
        )

    def start(self, session: EngineSession, prompt: Sequence[int], limit: int) -> Stepper | None:
        """The steps of one generation of at most ``limit`` tokens; None where it cannot be."""
        if not session.takes_trees:
            return None
        sources = self._begin(session, prompt, list(self._makers))
        run = self._tuner.start(limit, list(sources), size=self._fixed, in_gaps=self.in_gaps)
        return Stepper(
            session,
            prompt,
            sources,
            run,
            tuner=self._tuner,
            archive=self._archive,
            note=self._note,
        )

    def start_shared(self, session: EngineSession, prompt: Sequence[int]) -> Guesser | None:
        """What guesses for a generation while others share its passes; None: nothing does."""
        if self._fixed is not None or not session.takes_trees:
            return None
        cheap = [name for name in self._makers if self._tuner.sources[name].cheap]
        if not cheap:
            return None
        sources = self._begin(session, prompt, cheap)
        return Guesser(session, prompt, sources, self._tuner, archive=self._archive)

    def _begin(
        self, session: EngineSession, prompt: Sequence[int], names: Sequence[str]
    ) -> Mapping[str, DraftSource]:
        """The session's sources of these names, at the start of a generation."""
        held = self._sources.setdefault(session, {})
        for name in names:
            if name not in held:
                held[name] = self._makers[name](session)
            held[name].begin(prompt)
        return {name: held[name] for name in names}


class Guessing(ABC):
    """One generation that guesses ahead on ``session``: what is common to both ways.

    ``passes`` counts target passes, ``emitted`` the tokens that they brought.
    """

    def __init__(
        self, session: EngineSession, prompt: Sequence[int], archive: Archive | None
    ) -> None:
        self.session = session
        self.passes = 0
        self.emitted = 0
        self._history = list(prompt)
        self._prompt_size = len(prompt)
        self._archive = archive
        self._guessed_right: Counter[str] = Counter()

    @property
    @abstractmethod
    def reason(self) -> str:
        """How it went, in one sentence."""

    def acceptance(self) -> dict[str, float]:
        """The share of the passes' tokens that each source guessed right."""
        emitted = max(1, self.emitted)
        return {name: right / emitted for name, right in sorted(self._guessed_right.items())}

    def finish(self) -> None:
        """The generation has ended, or goes on in the other way."""
        if self._archive is not None:
            self._archive.add(self._history[self._prompt_size :])


class Stepper(Guessing):
    """A generation whose passes are its own."""

    def __init__(
        self,
        session: EngineSession,
        prompt: Sequence[int],
        sources: Mapping[str, DraftSource],
        run: Run,
        *,
        tuner: Tuner,
        archive: Archive | None = None,
        note: str = "",
    ) -> None:
        super().__init__(session, prompt, archive)
        self._sources = sources
        self._run = run
        self._tuner = tuner
        self._note = note
        self._plan: Plan | None = None
        self._computed: TreePass | None = None  # and not yet kept
        self._seconds = 0.0
        self._prefill = self.session.now()
        self._preparing = {name: source for name, source in sources.items() if source.prepares}
        self._cramped = False  # guesses need more memory than there is
        self._rest = 0  # steps before guesses are looked for again
        self._longest_rest = 1  # twice as long each time that none were found

    def prefilled(self, rows: int) -> None:
        """A prompt of ``rows`` has just been computed."""
        self._tuner.prompt(rows, self.session.now() - self._prefill)

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
        """How it went, in one sentence."""
        return f"{self._run.reason}; {self._note}" if self._note else self._run.reason

    # -- parts -----------------------------------------------------------------------------------

    def _verified(self, token: int) -> Logits | None:
        computed = self._computed
        logits = None if computed is None else computed.after(token)
        if computed is not None and logits is not None:
            self._guessed_right.update(computed.tree.proposed_by(computed.path[-1]))
        return logits

    def _close(self) -> None:
        """Keep the accepted path, and say what came true."""
        computed, self._computed = self._computed, None
        if computed is None:
            return
        computed.close()
        self._tuner.passed(1 + len(computed.tree), self._seconds)
        self._run.verified(self._plan, computed.tree, computed.path, self._seconds)

    def _pass(self, token: int, left: int, check: Check) -> Logits:
        session = self.session
        self._plan = None
        guess = left > 1 and not self._cramped
        tree = self._draft(left - 1, check) if guess else TokenTree.empty()
        order = self._run.ahead(self._plan, tree)
        work = None if order is None or left <= 1 else self._work(order)
        started = self.session.now()
        with GapWork(check, work) as gap_work:
            if len(tree):
                try:
                    logits = session.extend_tree(token, tree, check=gap_work)
                    self._computed = TreePass(session, tree, logits)
                except MemoryBudgetError:
                    # Its rows and logits need more than the budget leaves: one row may still fit.
                    self._cramped, self._plan, tree = True, None, TokenTree.empty()
                    self._note = "no more guesses: they need memory that the budget does not have"
            if not len(tree):
                logits = session.extend([token], check=gap_work)[None]
            seconds = self.session.now() - started
            self._seconds = seconds
            if work is not None:
                gap_work.ended(_likely(tree, logits))
        self.passes += 1
        self._run.passed(1 + len(tree), gap_work.waited_s, gap_work.shared_s)
        if order is not None and gap_work.error is not None:
            self._broken(order.source, gap_work.error)
        if not len(tree):
            self._tuner.passed(1, seconds)
            self._run.verified(self._plan, tree, (), seconds)
        first: Logits = logits[0]
        return first

    def _work(self, order: Ahead) -> Work | None:
        """What to do beside the pass that begins."""
        source = self._preparing.get(order.source)
        if source is None:
            return None
        counts = self.session.counts()
        if counts and counts.link_bytes:  # passes wait for the GPU
            return None
        history = list(self._history)

        def work(check: Check, outcome: Outcome) -> None:
            source.ahead(history, order.nodes, check=check, outcome=outcome)

        return work

    def _broken(self, source: str, error: BaseException) -> None:
        """A source failed beside a pass, which is as good as without."""
        if not isinstance(error, LocalrtError):
            raise error
        self._run.failed(source, str(error))

    def _room(self) -> int:
        """The most nodes that a tree may have: those whose tokens may still be emitted."""
        room, rows = self.session.capacity - len(self.session.tokens) - 1, self.session.tree_rows
        return room if rows is None else max(0, min(room, rows - 1))

    def _draft(self, ahead: int, check: Check) -> TokenTree:
        """Guesses behind the history, as planned."""
        if self._rest > 0:
            self._rest -= 1
            return TokenTree.empty()
        began, charged, preparing = self.session.now(), 0.0, self._preparing
        room = self._room()
        ready = {name: source.ready(self._history) for name, source in preparing.items()}
        missing = {name: source.missing(self._history) for name, source in preparing.items()}
        while (plan := self._run.plan(room, ready, missing)) is not None:
            self._plan = plan
            started = self.session.now()
            try:
                if tokens := missing.get(plan.source):
                    preparing[plan.source].catch_up(self._history, check=check)
                    missing[plan.source] = 0
                    now = self.session.now()
                    self._run.caught_up(plan.source, tokens, now - started)
                    charged += now - started
                    started = now
                tree = self._sources[plan.source].propose(
                    self._history, plan.budget, min(plan.depth, ahead), check=check
                )
            except CancelledError:
                raise
            except LocalrtError as error:  # the answer is the same without it
                self._run.failed(plan.source, str(error))
                continue
            now = self.session.now()
            charged += now - started
            worth = self._run.drafted(plan, tree, now - started)
            if worth is not None:
                break
        else:
            worth = TokenTree.empty()
        seconds = self.session.now() - began
        self._run.thought(max(0.0, seconds - charged))
        self._rest_after(worth, seconds)
        return worth

    def _rest_after(self, tree: TokenTree, seconds: float) -> None:
        """Where nothing is found, look again when that costs little beside the steps between."""
        if len(tree):
            self._longest_rest = 1
            return
        self._tuner.looked(seconds)
        plain, looking = self._tuner.plain, self._tuner.looking_s
        if plain:
            self._rest = min(int(looking / (_LOOKING * plain)), self._longest_rest)
            self._longest_rest = min(2 * self._longest_rest, _LONGEST_REST)


class Guesser(Guessing):
    """What guesses for a generation on ``session`` while others share its passes.

    Only cheap sources: a draft model's own passes would be made for each sequence in turn. It
    proposes and learns; which guesses are computed is decided for all sequences together.
    """

    def __init__(
        self,
        session: EngineSession,
        prompt: Sequence[int],
        sources: Mapping[str, DraftSource],
        tuner: Tuner,
        *,
        archive: Archive | None = None,
    ) -> None:
        super().__init__(session, prompt, archive)
        self.tuner = tuner
        self._computed = len(prompt)
        self._sources = dict(sources)
        self._mixed = MixedTree()

    def chosen(self, token: int) -> None:
        """``token`` is what the next pass computes first."""
        del self._history[self._computed :]  # of a pass that was abandoned
        self._history.append(token)
        self._mixed.clear()

    def guess(self, most: int, depth: int, check: Check) -> TokenTree:
        """At most ``most`` guesses of what follows; scores are logarithms of believed chances."""
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
            self._guessed_right.update(tree.proposed_by(node))
        if len(tree):
            with self.tuner.lock:
                self._mixed.learn(tree, tuple(path))

    @property
    def reason(self) -> str:
        """How it went, in one sentence."""
        each = self.emitted / self.passes if self.passes else 1.0
        names = " and ".join(self._sources) or "nothing to guess from"
        return f"speculation: {names}, {each:.1f} tokens a pass that other answers share"


def _likely(tree: TokenTree, logits: Logits) -> list[int]:
    """The likeliest tokens after a pass with ``logits`` (1 + nodes, vocab): of greedy decoding."""
    tokens: list[int] = []
    node: int | None = ROOT
    while node is not None:
        tokens.append(int(logits[1 + node].argmax()))
        node = tree.follow(node, tokens[-1])
    return tokens
