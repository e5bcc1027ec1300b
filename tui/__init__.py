"""The terminal app. It sits on localrt's public API and knows nothing below it.

Start reading at ``tui/app.py``, then ``tui/chat/screen.py``.

Each screen is one class. ``tui/app.py`` loads models, opens windows and quits.
``tui/chat/screen.py`` is the chat, made of widgets: the conversation, the composer, the live panel,
the footer. ``tui/chat/message_queue.py`` follows a message from waiting to answered.
``tui/screens/`` has the windows over the chat: models, settings, conversations, small dialogs.

``tui/conversation/`` knows no widget: ``state.py`` holds what is open (the history, a conversation,
the model's session), and ``open_conversation.py`` keeps a conversation in memory while its file
cannot be written. A conversation without a file is the same class, in SQLite's memory. It holds the
branch that this window shows, so that the model gets nothing that was not shown; twice a second the
chat checks whether another window has written (``PRAGMA data_version``).

A ``Reply`` (``generation.py``) goes in rounds: the model answers, the tools that it calls are run,
and it answers again. The app and ``tui/plain.py``, the same chat without a screen, both drive it.
Its threads only fill plain objects. The screen reads them on a timer, at most 20 times a second and
with at most 1 % of the processor, so that decoding never waits for drawing.

``terminal.py`` restores the terminal however the app ends, and saves a report of a crash. What is
being written is kept with its conversation twice a second.

A conversation is one scrolling widget that lays out only what is visible, so its length costs
nothing. Bindings, palette, menu and help are made from the tables in ``tui/keys.py`` and
``tui/commands.py``, whose commands the plain chat shares; all styles are in ``tui/app.tcss``.
Widgets keep references to the children that they change: when a thread reports back, a closing
window may have no children left to query.
"""

from localrt.tui.app import ChatApp, run_chat

__all__ = ["ChatApp", "run_chat"]
