"""What a person sees of the app, as plain values."""

from __future__ import annotations

from textual.pilot import Pilot
from textual.strip import Strip
from textual.widgets import Static

from localrt.tui import ChatApp
from localrt.tui.chat.bars import Footer, HintLine, Phase
from localrt.tui.chat.blocks import GUTTER, AnswerBlock, Notice, TurnBlock, UserTurn
from localrt.tui.chat.composer import CommandMenu, Composer
from localrt.tui.chat.tool_calls import CallBlock
from localrt.tui.chat.view import ConversationView


def composer(app: ChatApp) -> Composer:
    return app.query_one(Composer)


def conversation(app: ChatApp) -> ConversationView:
    return app.query_one(ConversationView)


def blocks(app: ChatApp) -> list[TurnBlock]:
    return conversation(app).blocks


def answers(app: ChatApp) -> list[str]:
    return [block.source for block in blocks(app) if isinstance(block, AnswerBlock)]


def users(app: ChatApp) -> list[str]:
    return [block.message for block in blocks(app) if isinstance(block, UserTurn)]


def calls(app: ChatApp) -> list[tuple[str, str, str]]:
    """Calls of tools: what is called, what it gave, how it stands."""
    found = [block for block in blocks(app) if isinstance(block, CallBlock)]
    return [(block.call, block.result, block.mark) for block in found]


def waiting(app: ChatApp) -> list[str]:
    return [b.message for b in blocks(app) if isinstance(b, UserTurn) and b.waiting]


def notices(app: ChatApp, kind: str | None = None) -> list[str]:
    found = [block for block in blocks(app) if isinstance(block, Notice)]
    return [notice.text for notice in found if kind is None or notice.kind == kind]


def marks(app: ChatApp) -> list[str]:
    """The small lines below turns."""
    return [block.note for block in blocks(app) if block.note]


def kinds(app: ChatApp) -> list[str]:
    return [type(block).__name__ for block in blocks(app)]


def shown(app: ChatApp) -> str:
    """The conversation as it is drawn, without the gutter."""
    view = conversation(app)
    lines = [view.render_line(y).text[GUTTER:].rstrip() for y in range(view.size.height)]
    return "\n".join(lines).strip("\n")


def lines(app: ChatApp) -> list[Strip]:
    """All that is on screen, as it goes to the terminal."""
    return app.screen._compositor.render_strips()


def menu(app: ChatApp) -> list[str]:
    """The rows of the command menu; none while it is closed."""
    widget = app.query_one(CommandMenu)
    return [item.label for item in widget.items] if widget.is_open else []


def footer(app: ChatApp) -> str:
    return str(app.query_one(Footer).render())


def phase(app: ChatApp) -> Phase:
    return app.query_one(Footer).status.phase


def idle(app: ChatApp) -> bool:
    """Whether the model is there and nothing is left to answer."""
    return phase(app) is Phase.READY and not waiting(app)


def hint(app: ChatApp) -> str:
    return str(app.query_one("#hint", Static).render())


def refused(app: ChatApp) -> list[str]:
    """Why what is in the composer was refused, in the line above it; empty if nothing was."""
    widget = app.query_one("#hint", HintLine)
    reason = widget.refusal
    assert not reason or " ".join(hint(app).split()) == reason
    return [reason] if reason else []


async def say(pilot: Pilot[None], text: str) -> None:
    """Type a message, newlines as Ctrl+J, and send it."""
    composer(pilot.app).insert(text)  # type: ignore[arg-type]
    await pilot.press("enter")
    await pilot.pause()
