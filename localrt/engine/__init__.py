"""Turn requests of tokens into answers in chunks: the loop, sampling, sessions and engines.

``Engine`` and ``EngineSession`` (``protocol.py``, where to start reading) are base classes. What
every engine must do is abstract; what one may lack (shared passes, trees, saving a cache, hidden
states, changing budgets) has a default, so no caller checks an engine's class. A session is one
sequence: its tokens, ``extend`` (logits after the last), ``trim``. Without ``ctx`` it may grow to
the model's own context or to what fits; memory is checked before any weight is read.

A lone answer (``generate`` in ``batch/sequence.py``) trims a session to the longest prefix that it
shares with the prompt, computes the rest in chunks, and samples. ``AnswerState`` turns tokens into
text, stops and metrics; batches use it too. ``pool.py`` leases the session with the longest prefix.
A prompt that shares less than half of what a session holds gets another, to which that beginning is
copied: a branch of a conversation, or one with the same tools, computes only what is new. A
``Constraint`` (llguidance) masks the logits before sampling. Sampling is pure functions.

Budgets may change while the model runs. With less RAM, more units are streamed from the next pass
on; with more, units stay as they pass. KV caches of waiting conversations go to the disk
(``saved_caches.py``, docs/conversations.md). It knows no files, chat templates or text but an
answer's.
"""
