"""Two models by turns that do not fit into memory together: the time to the first token.

    python -m benchmarks.app.turns [--limit 1.5GB] [--tokens 32,1024] [--rounds 6] [--json FILE]

Each turn asks the other model to go on with its own conversation, which has so many tokens. Three
ways, each in a process of its own whose memory, page cache included, is limited: the pool of
``localrt serve``, whose models shrink; localrt's models unloaded and loaded again; llama.cpp's, the
same, where llama-cpp-python is installed. Unloading is not counted, loading and reading the prompt
are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import localrt
from benchmarks.common.command import cited_command, find_model, listed, make_parser
from benchmarks.common.memory_limit import MemoryLimit
from benchmarks.common.record import Record, save, setting
from localrt.formatting import parse_size
from localrt.serve.options import ServeOptions
from localrt.serve.pool import LocalFile, ModelPool

CTX = 4096
TEXT = "the store keeps what was packed and brings it back in order, "
WARM_UP = 2  # rounds: the first packs and measures


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure each way, print, save."""
    args = _parse(arguments)
    if args.way is not None:
        for line in asyncio.run(_way(args)):
            print(json.dumps(line), flush=True)
        return 0
    ways = [way for way in _WAYS if way != "llama.cpp" or find_spec("llama_cpp") is not None]
    results = []
    for tokens in map(int, args.tokens):
        row: Record = {"tokens": tokens}
        for way in ways:
            row[way] = _measured(args, way, tokens)
            print(tokens, way, row[way], flush=True)
        results.append(row)
    names = [Path(find_model(name)).name for name in args.models]
    record = {"models": names, "limit": args.limit, "rounds": args.rounds, "results": results}
    command = cited_command("app.turns", arguments)
    save(args.json, {**record, **setting(command, "llama-cpp-python")})
    return 0


def _measured(args: argparse.Namespace, way: str, tokens: int) -> dict[str, float]:
    """Median seconds to the first token, by model."""
    limit = MemoryLimit.create(parse_size(args.limit))
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        env = {**os.environ, "LOCALRT_CACHE": folder, "LOCALRT_KV_DISK": "2GB"}
        env["XDG_DATA_HOME"] = folder  # no way finds what another one packed
        words = ["--way", way, "--tokens", str(tokens), "--rounds", str(args.rounds)]
        command = [sys.executable, "-m", "benchmarks.app.turns", *words]
        command += ["--models", ",".join(args.models)]
        try:
            with subprocess.Popen(
                command, env=env, stdout=subprocess.PIPE, text=True, stdin=subprocess.PIPE
            ) as child:
                limit.add(child.pid)
                out, _ = child.communicate("go\n")
        finally:
            limit.remove()
    if child.returncode:
        raise SystemExit(f"{way}: the process failed with {child.returncode}")
    turns = [json.loads(line) for line in out.splitlines()]
    return {
        name: statistics.median(t["seconds"] for t in turns if t["model"] == name)
        for name in args.models
    }


async def _way(args: argparse.Namespace) -> list[Record]:
    """All turns of one way, in this process."""
    sys.stdin.readline()  # the limit is set
    files = {name: find_model(name) for name in args.models}
    (tokens,) = map(int, args.tokens)
    found = []
    async for turn, name, seconds in _WAYS[args.way](files, tokens, args.rounds + WARM_UP):
        if turn >= WARM_UP:
            found.append({"model": name, "seconds": seconds})
    return found


def _prompt(tokens: int, turn: int) -> str:
    """What a conversation has come to after so many turns."""
    return TEXT * (tokens // 13) + "and so on, " * turn


Turns = AsyncIterator[tuple[int, str, float]]


async def _shrinking(files: dict[str, Path], tokens: int, rounds: int) -> Turns:
    pool = ModelPool(
        lambda path, shrinkable, cancel: localrt.load(
            path, shrinkable=shrinkable, cancel=cancel, ctx=CTX
        ),
        lambda: [LocalFile(name, str(path), path.stat().st_size) for name, path in files.items()],
        ServeOptions(keep_alive_s=-1),
    )
    for turn in range(rounds):
        for name in files:
            began = time.perf_counter()
            async with pool.using(name) as served:
                await served.live.agenerate(_prompt(tokens, turn), raw=True, max_tokens=1)
                seconds = time.perf_counter() - began
            yield turn, name, seconds
    pool.close()


async def _reloading(files: dict[str, Path], tokens: int, rounds: int) -> Turns:
    os.environ["LOCALRT_KV_DISK"] = "off"
    for turn in range(rounds):
        for name, path in files.items():
            began = time.perf_counter()
            model = localrt.load(path, ctx=CTX)
            model.generate(_prompt(tokens, turn), raw=True, max_tokens=1)
            yield turn, name, time.perf_counter() - began
            model.unload()


async def _llamacpp(files: dict[str, Path], tokens: int, rounds: int) -> Turns:
    from llama_cpp import Llama

    for turn in range(rounds):
        for name, path in files.items():
            began = time.perf_counter()
            threads = os.cpu_count()
            llama = Llama(str(path), n_ctx=CTX, n_threads=threads, verbose=False)
            llama.create_completion(_prompt(tokens, turn), max_tokens=1)
            yield turn, name, time.perf_counter() - began
            llama.close()


_WAYS: dict[str, Callable[[dict[str, Path], int, int], Turns]] = {
    "shrinking": _shrinking,
    "reloading": _reloading,
    "llama.cpp": _llamacpp,
}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, results="turns")
    parser.add_argument("--models", type=listed(), default=["qwen1.5b", "qwen0.5b"])
    parser.add_argument("--limit", default="1.5GB", help="of each process (default: 1.5GB)")
    parser.add_argument("--tokens", type=listed(), default=["32", "1024"], help="of conversations")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--way", choices=[*_WAYS], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
