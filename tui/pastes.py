"""Reads pastes from terminals: what is between their marks, whatever that is."""

from __future__ import annotations

import re
from collections.abc import Iterable

from textual._time import get_time
from textual._xterm_parser import BRACKETED_PASTE_END as END
from textual._xterm_parser import BRACKETED_PASTE_START as START
from textual._xterm_parser import XTermParser
from textual.drivers import web_driver
from textual.events import Paste
from textual.message import Message

_PAUSE = 3.0  # seconds; a paste that pauses so long is shown: its end may be lost
_BURST = 0.05  # seconds; no person types so soon after a paste
# A read that is a single key (not Esc, with which marks begin), or a new paste.
_KEY = re.compile(
    r"(?!\x1b\[201~)(\x1b?[^\x1b[]|\[|\x1bO.|\x1b\[[\d;:<]*[A-Za-z~]|\x1b\[200~.*)", re.DOTALL
)


class PasteParser(XTermParser):
    """Textual's parser reads what follows an escape character in a paste as keys. Here everything
    between the marks is the paste; after a pause, a single key ends it too. Copied text may hold
    an end mark, to have the rest obeyed as keys: what comes right behind a paste, up to another end
    mark, is pasted too.
    """

    _recent = ""  # the last characters outside a paste
    _paste: str | None = None
    _behind: str | None = None  # what came right behind a paste
    _fed = 0.0  # when something came last

    def feed(self, data: str) -> Iterable[Message]:
        if not data:
            yield from super().feed(data)
            return
        if self._paused and _KEY.fullmatch(data):
            yield self._ended(self._paste or "")
        if get_time() - self._fed >= _BURST:
            yield from self.typed()
        self._fed = get_time()
        yield from self._read(data)

    def typed(self) -> Iterable[Message]:
        """What came right behind a paste, if no end mark will follow: it was typed."""
        typed, self._behind = self._behind, None
        yield from self._read(typed or "")

    def _read(self, data: str) -> Iterable[Message]:
        while data:
            if self._behind is not None:
                *pasted, self._behind = (self._behind + data).split(END)
                if text := "".join(pasted).replace(START, ""):
                    yield Paste(text)
                return
            if self._paste is not None:
                searched = max(len(self._paste) - len(END), 0)
                self._paste += data
                end = self._paste.find(END, searched)
                if end < 0:
                    return
                text, data = self._paste[:end], self._paste[end + len(END) :]
                yield self._ended(text)
                self._behind = ""
                continue
            before, mark, data = (self._recent + data).partition(START)
            yield from super().feed((before + mark)[len(self._recent) :])
            self._recent = "" if mark else before[1 - len(START) :]
            self._paste = "" if mark else None

    @property
    def _paused(self) -> bool:
        return self._paste is not None and get_time() - self._fed >= _PAUSE

    def _ended(self, text: str) -> Paste:
        self._paste = None
        list(super().feed(END))  # for Textual, which has seen the paste's start, but not its text
        return Paste(text)

    def tick(self) -> Iterable[Message]:
        """Show the part of a paste that has arrived. On a slow line the pause may be within the
        mark that begins a paste: it is not taken for keys.
        """
        if get_time() - self._fed >= _BURST:
            yield from self.typed()
        if self._paused and self._paste:
            mark = max(size for size in range(len(END)) if self._paste.endswith(END[:size]))
            text = self._paste[: len(self._paste) - mark]
            self._paste = END[:mark]
            if text:
                yield Paste(text)
        if not any(self._recent.endswith(START[:size]) for size in range(3, len(START))):
            yield from super().tick()


setattr(web_driver, "XTermParser", PasteParser)  # noqa: B010 - what the driver makes
