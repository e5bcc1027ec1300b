"""The terminal app. It sits on localrt's public API and knows nothing below it.

Start reading at ``tui/app.py``, then ``tui/chat/screen.py``.

Each screen is one class. ``tui/app.py`` loads models, opens windows and leaves.
``tui/chat/screen.py`` is the chat; conversation view, composer, live panel and footer are widgets
beside it, and ``tui/chat/answering.py`` follows messages from waiting to answered. ``tui/screens/``
has the windows over the chat: models, settings, conversations, help, small dialogs.
``tui/conversation/`` knows no widget: ``state.py`` holds what is open (the history, a conversation,
the model's session), and ``open_conversation.py`` keeps a conversation in memory while its file
cannot be written. A conversation without a file is the same class, in SQLite's memory. It holds the
branch that this window shows, so that nothing is sent to a model that was not shown; twice a second
the chat asks it whether another window has written (``PRAGMA data_version``).

An answer that ends with calls of tools is followed by their results and by another answer, until
one has no calls. ``tui/conversation/generation.py`` has a call while it is asked about and run, and
its turn in the history; ``tui/chat/tool_calls.py`` takes an answer's calls one after another in the
app, ``tui/plain_answers.py`` in the plain chat. What runs is in the thread of ``localrt/mcp``; a
model that can be given no tools sees the conversation without calls.

Threads only fill plain objects (``tui/conversation/generation.py``). The screen looks at them on a
timer, at most 20 times a second and for at most a hundredth of the processor, so that decoding
never waits for drawing. A conversation is one scrolling widget that lays out only what is visible,
so its length costs nothing. Bindings, palette, menu and help are made from the tables in
``tui/keys.py`` and ``tui/commands.py``. ``tui/plain.py`` is the same chat without a screen. Besides
the public names of ``localrt`` the app uses four helpers: the check of options, sizes as text,
atomic files, and copies of conversations. Widgets keep what they change as attributes, not to be
looked up when a thread answers: a window that closes has no children.
"""

from localrt.tui.app import ChatApp, run_chat

__all__ = ["ChatApp", "run_chat"]
