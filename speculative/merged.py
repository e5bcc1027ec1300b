"""Several sources as one: their trees grown to the budget each, merged, and cut to it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from localrt.speculative.source import (
    AheadSource,
    Check,
    DraftFailedError,
    DraftSource,
    Outcome,
)
from localrt.speculative.tree import TokenTree, merge

__all__ = ["MergedSource"]


class MergedSource:
    """See ``DraftSource``. A source that fails is left out from then on; ``failures`` says why."""

    def __init__(self, sources: Sequence[DraftSource]) -> None:
        self._sources = list(sources)
        self._ahead = [source for source in sources if isinstance(source, AheadSource)]
        self.failures: list[str] = []

    @property
    def name(self) -> str:
        """The names of all, such as ``"model+ngram"``."""
        return "+".join(sorted(source.name for source in self._sources))

    def begin(self, history: Sequence[int]) -> None:
        """See ``DraftSource``."""
        for source in self._sources:
            source.begin(history)

    def propose(
        self, history: Sequence[int], budget: int, depth: int, *, check: Check | None = None
    ) -> TokenTree:
        """See ``DraftSource``."""
        trees = []
        for source in list(self._sources):
            try:
                trees.append(source.propose(history, budget, depth, check=check))
            except DraftFailedError as error:
                self.failures.append(str(error))
                self._sources.remove(source)
        if not self._sources:
            raise DraftFailedError("; ".join(self.failures) or "there is no source to draft with")
        return merge(trees, budget)

    @property
    def prepares(self) -> bool:
        """See ``AheadSource``."""
        return any(True for _ in self._preparing())

    def ahead(self, history: Sequence[int], nodes: int, *, check: Check, outcome: Outcome) -> None:
        """See ``AheadSource``; one that fails will say so again when it is asked to propose."""
        for source in self._preparing():
            source.ahead(history, nodes, check=check, outcome=outcome)

    def missing(self, history: Sequence[int]) -> int:
        """See ``AheadSource``."""
        return max((source.missing(history) for source in self._preparing()), default=0)

    def catch_up(self, history: Sequence[int], *, check: Check | None = None) -> None:
        """See ``AheadSource``."""
        for source in self._preparing():
            source.catch_up(history, check=check)

    def ready(self, history: Sequence[int]) -> int:
        """See ``AheadSource``."""
        return max((source.ready(history) for source in self._preparing()), default=0)

    def _preparing(self) -> Iterator[AheadSource]:
        for source in self._ahead:
            if source in self._sources and source.prepares:
                yield source

    def close(self) -> None:
        """Close all."""
        for source in self._sources:
            source.close()
