"""Two conversations with two models that do not fit together, by turns: how long a switch takes.

    python -m benchmarks.switching SMALL.gguf LARGE.gguf --ram 1400MB --llama-server PROGRAM

Each turn asks the model that was not asked last. localrt serves both within the budget.
llama-server holds one model: it is ended, and started with the other, as proxies for it do. The
first turn of each conversation warms up.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

from benchmarks.common.command import cited_command, make_parser
from benchmarks.common.record import save, setting
from benchmarks.sharing import fresh_prose
from localrt.bench.mix.apps import Request
from localrt.bench.mix.client import Client, Place
from localrt.bench.mix.servers import LlamaServer, Localrt, Server

_CTX, _TOKENS = 4096, 24
Reach = Callable[[str], AbstractContextManager[Place]]
"""The place of a model, started if it must be."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save."""
    parser = make_parser(__doc__, results="switching")
    parser.add_argument("models", nargs=2, type=Path)
    parser.add_argument("--ram", default="1400MB")
    parser.add_argument("--llama-server", type=Path)
    parser.add_argument("--turns", type=int, default=6, help="of each model, one to warm up")
    parser.add_argument("--words", type=int, default=500, help="that a conversation begins with")
    options = parser.parse_args(arguments)
    if missing := [path for path in options.models if not path.is_file()]:
        parser.error(f"there is no file {missing[0]}")
    paths = {path.stem: path.absolute() for path in options.models}
    found: dict[str, dict[str, list[float]]] = {}
    localrt = Localrt(paths, {"ram": options.ram, "ctx": _CTX})
    with localrt.serve(_mix(*paths)) as running:
        places = running.places
        found["localrt"] = _switches(paths, lambda name: nullcontext(places[name]), options)
    if options.llama_server is not None:
        peer: Server = LlamaServer("llama-server", options.llama_server, paths, ["-t", "2"])

        @contextmanager
        def started(name: str) -> Iterator[Place]:
            with peer.serve(_mix(name)) as running:
                yield running.places[name]

        found["llama-server"] = _switches(paths, started, options)
    medians = {
        server: {name: median(times) for name, times in each.items()}
        for server, each in found.items()
    }
    for server, each in medians.items():
        print(server, ", ".join(f"{name} {seconds:.2f} s" for name, seconds in each.items()))
    record = {**setting(cited_command("switching", arguments)), "medians": medians, "runs": found}
    save(options.json, record)
    return 0


def _mix(*names: str) -> Any:
    apps = [SimpleNamespace(name=each, model=each, adapter=None, kind="chat") for each in names]
    return SimpleNamespace(name="switching", apps=apps, server={"ctx": _CTX})


def _switches(names: Sequence[str] | Any, reach: Reach, options: Any) -> dict[str, list[float]]:
    """Seconds from asking a model after the other to its first token, with its start if any."""
    rng, client = random.Random(time.time_ns()), Client()
    said = {name: [{"role": "user", "content": fresh_prose(rng, options.words)}] for name in names}
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(options.turns):
        for name in names:
            began = time.perf_counter()
            with reach(name) as place:
                begins = time.perf_counter() - began
                body = {"messages": said[name], "max_tokens": _TOKENS, "temperature": 0}
                request = Request("/chat/completions", {**body, "stream": True})
                reply = client.send(place, request, "interactive")
            if reply.error or reply.ttft_s is None:
                raise SystemExit(f"{name}: {reply.error or 'no answer'}")
            found[name].append(begins + reply.ttft_s)
            print(name, f"{found[name][-1]:.2f} s", flush=True)
            said[name] += [
                {"role": "assistant", "content": reply.text},
                {"role": "user", "content": f"Go on, with {fresh_prose(rng, 12)}."},
            ]
    return {name: times[1:] for name, times in found.items()}


if __name__ == "__main__":
    sys.exit(main())
