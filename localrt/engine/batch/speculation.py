"""Verification of draft trees for sequences that share passes: a tree each, all in one pass.

No sequence's tokens change. ``speculative/batch_tuner.py`` decides how many draft tokens are
verified.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Generic, TypeAlias

from localrt.common.errors import MemoryBudgetError
from localrt.engine.batch.sequence import BatchSequence, Chunks, Owner
from localrt.engine.protocol import Engine, EngineSession
from localrt.engine.speculation import Proposer
from localrt.quant.ops.protocol import Check
from localrt.speculative.acceptance import TreePass
from localrt.speculative.batch_tuner import BatchTuner
from localrt.speculative.source import propose_together
from localrt.speculative.tree import TokenTree

# Chosen, not measured: draft tokens of all sequences to choose from, and the fewest for each
_NODES, _MIN_NODES = 128, 4

Running: TypeAlias = tuple[BatchSequence[Owner], EngineSession]
Prompt: TypeAlias = tuple[BatchSequence[Owner], EngineSession, Sequence[int]]


class BatchSpeculation(Generic[Owner]):
    """Speculates for the answers of one schedule. ``check`` raises to abandon a pass."""

    def __init__(self, engine: Engine, check: Check) -> None:
        self._engine = engine
        self._check = check
        self._tuner: BatchTuner | None = None
        self.rows = 0  # rows of the last pass

    def advance(
        self, running: Sequence[Running[Owner]], prompts: Sequence[Prompt[Owner]]
    ) -> list[tuple[BatchSequence[Owner], Chunks]] | None:
        """Run one pass for all ``running``, with one pending token each; None if none speculates.

        The pass also computes the given pending tokens of ``prompts``. If memory is too short for
        trees, it returns None and the sequences stop drafting.

        Raises:
            LocalrtError: the pass failed, or ``check`` raised it; no sequence has changed.
        """
        proposers = [seq.proposer(session) for seq, session in running]
        tuner = self._tuner_of(proposers)
        if tuner is None:
            return None
        started = time.perf_counter()
        prompt_rows = sum(len(tokens) for _, _, tokens in prompts)
        whole = [i for i, (seq, _, ids) in enumerate(prompts) if len(ids) == len(seq.pending)]
        trees = self._trees(tuner, running, proposers, prompt_rows)
        drafting = time.perf_counter() - started
        drafted = sum(map(len, trees))
        self.rows = len(running) + drafted + prompt_rows
        started, fresh = time.perf_counter(), running[0][1].fresh_passes
        try:
            logits_of = self._engine.extend_trees(
                [
                    (session, seq.pending[0], tree)
                    for (seq, session), tree in zip(running, trees, strict=True)
                ],
                [(session, tokens) for _, session, tokens in prompts],
                wanted=whole,
                check=self._check,
            )
        except MemoryBudgetError:
            for seq, _ in running if drafted else ():
                seq.stop_drafting()
            return None
        seconds = time.perf_counter() - started
        items, emitted = [], 0
        for (seq, session), tree, logits in zip(running, trees, logits_of, strict=False):
            verified = TreePass(tree, logits)
            items.append((seq, seq.take(verified)))
            session.keep(verified.rows)
            emitted += 1 + len(verified.path)
        for seq, _, tokens in prompts:
            seq.pending = seq.pending[len(tokens) :]
        for at, logits in zip(whole, logits_of[len(running) :], strict=True):
            items.append((prompts[at][0], prompts[at][0].take(TreePass.plain(logits))))
        if not prompts and running[0][1].fresh_passes == fresh:  # others would distort it
            tuner.passed(drafted, emitted, seconds, drafting)
        return items

    # -- parts -----------------------------------------------------------------------------------

    def _tuner_of(self, proposers: Sequence[Proposer | None]) -> BatchTuner | None:
        """Return the model's tuner, from the first sequence that drafts."""
        tuner = next((proposer.tuner for proposer in proposers if proposer is not None), None)
        if tuner is None:
            return None
        if self._tuner is None or self._tuner.tuner is not tuner:
            self._tuner = BatchTuner(tuner)
        return self._tuner

    def _trees(
        self,
        tuner: BatchTuner,
        running: Sequence[Running[Owner]],
        proposers: Sequence[Proposer | None],
        prompt_rows: int,
    ) -> list[TokenTree]:
        each = max(_MIN_NODES, _NODES // len(running))
        drafts = tuner.should_draft(len(running))
        depths: dict[Proposer, int] = {}  # depth limit of each proposer
        for (seq, _), proposer in zip(running, proposers, strict=True):
            if proposer is not None:
                proposer.chosen(seq.pending[0])
                if drafts:
                    depths[proposer] = seq.ahead - 1
                    proposer.look_up(each, depths[proposer], self._check)
        for name in {name for proposer in depths for name in proposer.computes}:
            self._compute(name, tuner, depths)
        trees = [
            TokenTree.empty() if proposer not in depths else proposer.tree(each)
            for proposer in proposers
        ]
        room = self._engine.pass_rows - prompt_rows
        rows = running[0][1].tree_rows  # from the memory budget, the same for all
        room = room if rows is None else min(room, rows)
        return tuner.choose(trees, max(0, room - len(running)), prompt_rows)

    def _compute(self, name: str, tuner: BatchTuner, depths: Mapping[Proposer, int]) -> None:
        """Let the source ``name`` compute the trees of all sequences together, if that pays off."""
        size = tuner.size(name)
        if size is None:
            return
        started = time.perf_counter()
        budget, depth = size
        proposals = {
            proposer: steps
            for proposer, most in depths.items()
            if (steps := proposer.proposal(name, budget, min(depth, most))) is not None
        }
        results = propose_together(list(proposals.values()), check=self._check)
        for proposer, result in zip(proposals, results, strict=True):
            proposer.proposed(name, result)
        trees = [result for result in results if isinstance(result, TokenTree)]
        tuner.drafted(name, trees, size, time.perf_counter() - started)
