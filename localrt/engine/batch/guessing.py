"""Answers that share passes and guess ahead: a tree behind each, all verified in one pass.

How many guesses are computed is ``speculative.shared_passes``'s to say. What a sequence says does
not depend on it, for its tokens are chosen as always. It knows nothing of memory but that a pass
may lack it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Generic, Protocol, TypeAlias, cast, runtime_checkable

from localrt.engine.batch.job import Items, Job, Owner
from localrt.engine.batch.lookups import Companion
from localrt.engine.protocol import Check, EngineSession, Logits
from localrt.engine.tree_pass import TreePass, TreeSession
from localrt.errors import MemoryBudgetError
from localrt.speculative.shared_passes import Company
from localrt.speculative.tree import TokenTree

__all__ = ["Prompt", "Running", "SharedGuesses", "TreeBatchEngine"]

Running: TypeAlias = tuple[Job[Owner], EngineSession]
Prompt: TypeAlias = tuple[Job[Owner], EngineSession, Sequence[int]]

_NODES = 128  # guesses looked at before a pass, of all sequences
_FEWEST = 4  # of each
# The share of a pass that looking for guesses may take where none are worth it, and the most passes
# to leave it out.
_LOOKING, _LONGEST_REST = 0.01, 64


@runtime_checkable
class TreeBatchEngine(Protocol):
    """A ``BatchEngine`` whose passes may hold the trees of several sessions."""

    @property
    def pass_rows(self) -> int:
        """The most rows of one pass."""

    def extend_trees(
        self,
        parts: Sequence[tuple[EngineSession, int, TokenTree]],
        beside: Sequence[tuple[EngineSession, Sequence[int]]] = (),
        *,
        wanted: Sequence[int] = (),
        check: Check | None = None,
    ) -> list[Logits]:
        """One pass: for every part what ``TreeSession.extend_tree`` gives.

        ``beside`` are tokens to append to other sessions, as in ``BatchEngine.extend_batch``; the
        logits (vocab,) after those numbered in ``wanted`` come behind the trees'. When it raises,
        no session has changed: what ``check`` raises, or ``MemoryBudgetError``.
        """


class SharedGuesses(Generic[Owner]):
    """Of the answers of one schedule. ``check`` raises to abandon a pass."""

    def __init__(self, engine: TreeBatchEngine, check: Check) -> None:
        self._engine = engine
        self._check = check
        self._company: Company | None = None
        self._looked = False
        self._rest = 0  # passes before guesses are looked for again

    def advance(
        self, running: Sequence[Running[Owner]], prompts: Sequence[Prompt[Owner]]
    ) -> list[tuple[Job[Owner], Items]] | None:
        """One pass over all, ``running`` with one pending token each; None where nobody guesses.

        ``prompts`` are those of whose pending tokens the pass computes some, the first ones. None
        also where guesses lack the memory, which are not tried again.

        Raises:
            LocalrtError: the pass failed, or what ``check`` raises; all are as they were.
        """
        mates = [job.beside(session) for job, session in running]
        company = self._judge(mates)
        if company is None:
            return None
        began = time.perf_counter()
        beside = sum(len(tokens) for _, _, tokens in prompts)
        whole = [i for i, (job, _, ids) in enumerate(prompts) if len(ids) == len(job.pending)]
        trees = self._trees(company, running, mates, beside)
        thinking = time.perf_counter() - began
        guesses = sum(map(len, trees))
        started = _now(running)
        try:
            found = self._engine.extend_trees(
                [
                    (session, job.pending[0], tree)
                    for (job, session), tree in zip(running, trees, strict=True)
                ],
                [(session, tokens) for _, session, tokens in prompts],
                wanted=whole,
                check=self._check,
            )
        except MemoryBudgetError:
            for job, _ in running if guesses else ():
                job.guess_no_more()
            return None
        seconds = _now(running) - started
        items, emitted = [], 0
        for (job, session), mate, tree, logits in zip(running, mates, trees, found, strict=False):
            # Not asked whether it is one: that takes tens of microseconds.
            computed = TreePass(cast(TreeSession, session), tree, logits)
            said = _accepted(job, computed)
            computed.close()
            if mate is not None:
                mate.verified(computed)
            emitted += 1 + len(computed.path)
            items.append((job, said))
        for job, _, tokens in prompts:
            job.pending = job.pending[len(tokens) :]
        for at, logits in zip(whole, found[len(running) :], strict=True):
            items.append((prompts[at][0], prompts[at][0].accept(logits)))
        if not prompts:  # what those cost is another matter
            company.passed(guesses, emitted, seconds, thinking)
            self._rest_after(guesses, thinking, company.plain)
        return items

    # -- parts -----------------------------------------------------------------------------------

    def _judge(self, mates: Sequence[Companion | None]) -> Company | None:
        """What decides for them: by what is known of the model, whoever asks."""
        tuner = next((mate.tuner for mate in mates if mate is not None), None)
        if tuner is None:
            return None
        if self._company is None or self._company.tuner is not tuner:
            self._company = Company(tuner)
        return self._company

    def _trees(
        self,
        company: Company,
        running: Sequence[Running[Owner]],
        mates: Sequence[Companion | None],
        beside: int,
    ) -> list[TokenTree]:
        each = max(_FEWEST, _NODES // len(running))
        looking = company.looks(len(running)) and self._rest <= 0
        self._looked = looking
        self._rest -= 1
        trees = []
        for (job, _), mate in zip(running, mates, strict=True):
            tree = TokenTree.empty()
            if mate is not None:
                mate.chosen(job.pending[0])
                if looking:
                    tree = mate.guess(each, job.left - 1, self._check)
            trees.append(tree)
        room = self._engine.pass_rows - len(running) - beside
        return company.choose(trees, room, beside)

    def _rest_after(self, guesses: int, thinking: float, plain: float | None) -> None:
        if self._looked and not guesses and plain:
            self._rest = min(int(thinking / (_LOOKING * plain)), _LONGEST_REST)


def _accepted(job: Job[Owner], computed: TreePass) -> Items:
    """What the job says along its tree."""
    said = list(job.accept(computed.first))
    while not job.done and (logits := computed.after(job.pending[0])) is not None:
        said += job.accept(logits)
    return said


def _now(running: Sequence[Running[Owner]]) -> float:
    counts = running[0][1].counts()
    return time.perf_counter() if counts is None else counts.clock_s
