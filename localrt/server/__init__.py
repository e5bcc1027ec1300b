"""An HTTP server in the protocols of OpenAI, Anthropic and Ollama, on the public API alone.

Starlette and uvicorn, which the extra ``server`` brings, do the HTTP; ``localrt serve`` starts it.
Read ``app.py`` (the application), ``dialect.py`` (the base of dialects), a dialect's folder and
``generating.py`` (answers).

A request passes ``guard.py``, which normalizes the path and checks the key, and ``bodies.py``,
which checks the body against the dialect's ``RequestSchema``. A dialect is a folder, or a file if
it is short: ``calls`` turn a body into a ``GenerationRequest``, ``reply`` turns chunks into the
dialect's objects and events and has the endpoints. ``messages.py`` reads messages and tools for all
of them, and refuses nothing. ``generating.answer`` runs a call on the requested model and sends its
reply. If the model or prompt is not ready after 15 s, a stream begins without them, so a
``ResponseWriter`` may use its tokenizer only once chunks come. An echoed prompt is a ``Chunk``
before those of its answer.

The chat page (``page.py``, its parts in ``web``) uses ``conversations.py``, whose ``answers.py``
lets models write to the history without a request that waits.

A ``Service`` is a running server: its access rules and its counts. ``Models`` lists the models and
lends one as a ``ServedModel``, which stays loaded until its response has been sent. ``OneModel``
serves a model that is already loaded; ``ModelPool`` loads this machine's models on request.

The pool's budget is the process's resident memory, so that nothing is counted twice. A streamed
model knows what its budget leaves (``Model.spare_ram``). When another model is requested, all
others give that up first; if memory is still short, they free more with ``Model.leave_ram``, which
streams units as a smaller budget does. The requested model then gets all free memory. A
``shrinkable`` model fits whole, but is placed with a ring for reads anyway, so that it can be
streamed later. Idle caches of a batch are saved like those of parked conversations, and a joining
sequence looks for a saved one first.
"""
