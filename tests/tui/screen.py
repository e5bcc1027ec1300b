"""What a person sees of the app, as plain values."""

from __future__ import annotations

from textual.pilot import Pilot
from textual.widgets import Static

from localrt.tui import ChatApp
from localrt.tui.answer import Answer
from localrt.tui.composer import Composer
from localrt.tui.conversation import Conversation, Notice, UserTurn
from localrt.tui.footer import Footer, Phase


def composer(app: ChatApp) -> Composer:
    return app.query_one(Composer)


def conversation(app: ChatApp) -> Conversation:
    return app.query_one(Conversation)


def answers(app: ChatApp) -> list[str]:
    return [answer.source for answer in app.query(Answer)]


def users(app: ChatApp) -> list[str]:
    return [turn.message for turn in app.query(UserTurn)]


def waiting(app: ChatApp) -> list[str]:
    return [turn.message for turn in app.query(UserTurn) if turn.has_class("waiting")]


def notices(app: ChatApp, kind: str | None = None) -> list[str]:
    found = app.query(Notice)
    return [str(n.render()) for n in found if kind is None or n.has_class(kind)]


def footer(app: ChatApp) -> str:
    return str(app.query_one(Footer).render())


def phase(app: ChatApp) -> Phase:
    return app.query_one(Footer).status.phase


def hint(app: ChatApp) -> str:
    return str(app.query_one("#hint", Static).render())


async def say(pilot: Pilot[None], text: str) -> None:
    """Type a message, newlines as Ctrl+J, and send it."""
    composer(pilot.app).insert(text)  # type: ignore[arg-type]
    await pilot.press("enter")
    await pilot.pause()
