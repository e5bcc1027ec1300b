"""An HTTP server in the protocols of OpenAI, Anthropic and Ollama, on the public API alone.

Starlette and uvicorn, which the extra ``server`` brings, do the HTTP; ``localrt serve`` starts it.
Read ``app.py`` (the application), ``dialect.py`` (what dialects have in common), a dialect's folder
and ``generating.py`` (answers).

A request passes ``guard.py``, which finds the path that is meant and checks the key, and
``bodies.py``, which checks the body against the dialect's schema. A dialect is a folder: its
``schemas``, ``calls`` that turn a body into a ``Generation``, a ``reply`` that puts chunks
into its objects and events, and ``routes``. ``messages.py`` reads what messages and tools hold
for all of them, and refuses nothing. ``generating.answer`` joins call and reply on the model that
was asked for. A stream whose model or prompt is not ready after 15 s begins without them, so a
``Reply`` may use its tokenizer only once chunks come. A prompt to echo is a ``Chunk`` before those
of its answer.

A ``Service`` is a server at work: who may come in, and its counts. ``Models`` says which models
there are and lends one as a ``ServedModel``, which stays loaded until its response has been sent.
``OneModel`` is a model that was loaded before; ``ModelPool`` loads those of this machine as they
are asked for.

The pool's budget is the process's resident memory, so that nothing is counted twice. A streamed
model knows what its budget leaves (``Model.spare_ram``). When another model is asked for, that is
withdrawn from all others; what is still missing they leave with ``Model.leave_ram``, which streams
units as a smaller budget does. The model that is asked for then gets all that is free. A
``shrinkable`` model is one that fits whole and was placed with a ring for reads all the same. Idle
caches of a batch are saved where a waiting conversation's are, and a sequence that joins asks there
first.
"""
