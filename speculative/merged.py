"""Several sources as one: their trees grown to the budget each, merged, and cut to it."""

from __future__ import annotations

from collections.abc import Sequence

from localrt.speculative.source import Check, DraftFailedError, DraftSource
from localrt.speculative.tree import TokenTree, merge

__all__ = ["MergedSource"]


class MergedSource:
    """See ``DraftSource``. A source that fails is left out from then on; ``failures`` says why."""

    def __init__(self, sources: Sequence[DraftSource]) -> None:
        self._sources = list(sources)
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

    def close(self) -> None:
        """Close all."""
        for source in self._sources:
            source.close()
