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
from pathlib import Path
from typing import Any, TextIO

from localrt.bench.engines import BenchEngine, Launch, load_engine
from localrt.bench.process_io import disk_bytes_read
from localrt.errors import LocalrtError

__all__ = ["main", "serve"]


def main() -> None:
    """Serve one parent on stdin and stdout."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # so that a library's print cannot spoil the protocol
    serve(sys.stdin, answers, load_engine)


def serve(requests: TextIO, answers: TextIO, load: Callable[[Launch], BenchEngine]) -> None:
    """Answer requests until there are none: first ``load``, then the others.

    ``encode`` answers token ids, ``generate`` the names of `Metrics` and ``decode_read_bytes``,
    ``trace`` the events of the engine's pipeline since it was first asked, or None without one.
    ``record_routing`` begins to remember which experts tokens are sent to, ``save_routing`` writes
    them to a file and answers how many tokens there were.
    """
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
            elif request["do"] == "trace":
                answer = _trace(engine)
            elif request["do"] == "record_routing":
                answer = engine.record_routing()  # type: ignore[attr-defined]
            elif request["do"] == "save_routing":
                answer = engine.save_routing(Path(request["file"]))  # type: ignore[attr-defined]
            else:
                answer = _generate(engine, request["prompt"], request["tokens"])
        except (LocalrtError, MemoryError) as error:
            _send(answers, {"error": type(error).__name__, "message": str(error)})
        else:
            _send(answers, {"answer": answer})


def _generate(engine: BenchEngine, prompt: list[int], tokens: int) -> dict[str, Any]:
    """One generation, with what the process read from disk: in all, and while it decoded."""
    counts: list[int] = []

    def count() -> None:
        if (read := disk_bytes_read()) is not None:
            counts.append(read)

    count()
    metrics = engine.generate(prompt, tokens, count).to_dict()
    count()
    if len(counts) < 3:  # not known on this system
        return {**metrics, "decode_read_bytes": None}
    started, first, ended = counts
    if metrics["ssd_read_bytes"] is None:
        metrics["ssd_read_bytes"] = ended - started
    return {**metrics, "decode_read_bytes": ended - first}


def _trace(engine: BenchEngine) -> list[dict[str, Any]] | None:
    """Events on one clock, in seconds; None of an engine that keeps no trace."""
    events = getattr(engine, "trace_events", None)
    if events is None:
        return None
    return [
        {"resource": resource, "name": name, "start_s": start, "end_s": end}
        for resource, name, start, end in events()
    ]


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
