"""The models of a server, to choose one from. Closes with its name; knows no server, no app."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from textual.content import Content
from textual.widgets import Input

from localrt.common.errors import LocalrtError
from localrt.tui.screens.dialogs import SearchDialog
from localrt.tui.text import clean, one_line
from localrt.tui.themes import FAINT

_Row = tuple[str, str]


class ServerModelsScreen(SearchDialog[_Row]):
    """``list_models`` asks the server for names, and facts of each; ``current`` is in use."""

    def __init__(
        self, list_models: Callable[[], Sequence[_Row]], current: str | None, search: str = ""
    ) -> None:
        super().__init__(search, "Find a model of the server", keys="Enter use · Esc back")
        self._list_models, self._current = list_models, current
        self._there: Sequence[_Row] = ()
        self._none = "Asking the server ..."

    def on_mount(self) -> None:
        """Ask the server."""
        self._fill()
        self.run_worker(self._look())

    async def _look(self) -> None:
        try:
            self._there = await asyncio.to_thread(self._list_models)
        except LocalrtError as error:
            self._none = one_line(error)
        else:
            self._none = "No model of that name" if self._there else "The server lists no models"
        self._fill()

    def _fill(self) -> None:
        words = self.words.lower().split()
        rows = [row for row in self._there if all(word in row[0].lower() for word in words)]
        names = [name for name, _ in rows]
        place = names.index(self._current) if self._current in names else 0
        self.show(rows, self._none, highlighted=place)

    def draw(self, item: _Row) -> Content:
        """A name, and the facts below it."""
        mark = "● " if item[0] == self._current else "  "
        facts = f"\n  {clean(item[1])}" if item[1] else ""
        return Content.assemble((mark, "$text-accent"), (clean(item[0]), "bold"), (facts, FAINT))

    def take(self, item: _Row) -> None:
        """Use it."""
        self.dismiss(None if item[0] == self._current else item[0])

    def on_input_changed(self, event: Input.Changed) -> None:
        """Narrow the list."""
        if event.value != self.words:
            self.words = event.value
            self._fill()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter uses the row."""
        if self.chosen is not None:
            self.take(self.chosen)
