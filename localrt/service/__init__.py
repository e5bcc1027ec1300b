"""What answers requests: prompts become tokens, sessions are leased, caches kept, passes watched.

``core.py`` is where to start: a ``Core`` is a loaded model that answers, and ``localrt.Model`` its
public face. It turns a caller's prompt, options, tools and constraint into a ``Request``
(``requests.py``, with ``thinking.py`` for what the template is told of thinking) and runs it on a
session: ``Model.stream`` on one of a pool, a chat on its own, ``batching.py`` and ``live.py`` on
those that share passes. A ``ChatSession`` needs a ``ChatHost`` (``localrt/chat.py``), which both
``Core`` and a server's ``RemoteModel`` implement; ``ChatModel`` is what the app and the commands
use of either.

A conversation that waits may have its KV cache saved and freed, to the disk or to RAM, and gets it
back with its next prompt. ``adapters.py`` has the adapters by their names, ``embedding.py`` vectors
of texts, ``status.py`` what the model is doing. How tokens are computed and sampled, and what a
template shows, is the business of the rooms below (``localrt/engine``, ``localrt/chat_format``);
the callers are unknown here.
"""
