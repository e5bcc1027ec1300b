"""Answer requests: turn prompts into tokens, lease sessions, keep caches, watch passes.

Start with ``core.py``: a ``Core`` is a loaded model that answers, and ``localrt.Model`` its public
face. It turns a caller's prompt, options, tools and constraint into a ``Request`` (``requests.py``,
with ``thinking.py`` for the template's thinking options) and runs it on a session: ``Model.stream``
on one of a pool, a chat on its own, ``batching.py`` and ``live.py`` on sessions that share passes.
A ``ChatSession`` needs a ``ChatHost`` (``localrt/chat.py``), which both ``Core`` and a server's
``RemoteModel`` implement; the app and the commands use either as a ``ChatModel``.

The KV cache of a waiting conversation may be saved to the disk or to RAM and freed; its next prompt
restores it. ``adapters.py`` finds adapters by name, ``embedding.py`` turns texts into vectors,
``status.py`` reports what the model is doing. The packages below (``localrt/engine``,
``localrt/chat_format``) compute and sample tokens and read templates. This package does not know
its callers.
"""
