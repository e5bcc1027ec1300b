"""The process that holds one engine. Run by `localrt.bench.process`, never by hand.

Requests come in and answers go out as one JSON object per line, on the stdin and stdout that the
process was started with; whatever a library prints goes to stderr. When stdin closes, because the
parent is done or gone, the process ends at once, in the middle of a run if need be.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, TextIO

from localrt.bench.engines import BenchEngine, Launch, load_engine
from localrt.errors import LocalrtError

__all__ = ["main", "serve"]


def main() -> None:
    """Serve one parent on stdin and stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # so that a library's print cannot spoil the protocol
    serve(sys.stdin, answers, load_engine)


def serve(requests: TextIO, answers: TextIO, load: Callable[[Launch], BenchEngine]) -> None:
    """Answer requests until there are none: first ``load``, then ``encode`` and ``generate``."""
    engine: BenchEngine | None = None
    for request in _until_closed(requests):
        try:
            if request["do"] == "load":
                engine = load(Launch(**request["launch"]))
                answer: Any = dict(engine.info)
            elif engine is None:
                raise LocalrtError("no engine is loaded")
            elif request["do"] == "encode":
                answer = engine.encode(request["text"])
            else:
                answer = engine.generate(request["prompt"], request["tokens"]).to_dict()
        except (LocalrtError, MemoryError) as error:
            _send(answers, {"error": type(error).__name__, "message": str(error)})
        else:
            _send(answers, {"answer": answer})


def _until_closed(requests: TextIO) -> Iterator[dict[str, Any]]:
    """Requests in order. A thread reads them, to notice that the parent is gone while we work."""
    lines: queue.Queue[str] = queue.Queue()

    def read() -> None:
        for line in requests:
            lines.put(line)
        os._exit(0)  # nothing here needs to be put in order, and an engine may be busy for minutes

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield json.loads(lines.get())


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message, default=str) + "\n")
    answers.flush()
