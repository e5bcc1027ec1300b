"""Peers measured with their own ``llama-bench``: llama.cpp and ik_llama.cpp.

Finds a peer's fastest setting: weights repacked or not, flash attention or not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from localrt.bench.llama_bench import PeerFailedError, run_llama_bench

PEERS = {"ik_llama.cpp": ("-rtr", "-w 0"), "llama.cpp": ("--repack", "--no-warmup")}
"""A peer's option that repacks weights, and its option that skips the warm-up."""


def run_peer(peer: str, program: Path, setting: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per second of the best of ``repeats``; see ``child`` for ``job``.

    Raises:
        PeerFailedError: it failed.
    """
    prompt = job["tokens"] if job["kind"] == "prompt" else 0
    words = f"{setting} -p {prompt} -n {job['tokens'] - prompt}"
    if prompt > 4096:  # llama.cpp's warm-up would process the whole prompt
        words += f" {PEERS[peer][1]}"
    try:
        words += f" -r {job['repeats']} -t {job['threads']}"
        found = run_llama_bench(program, job["model"], words)
    except PeerFailedError as error:
        raise PeerFailedError(f"{peer} {setting}: {error}") from None
    return {"value": max(found["samples_ts"]), "setting": setting, "build": found["build_commit"]}


def fastest(peer: str, program: Path, job: Mapping[str, Any]) -> Callable[[], Any] | None:
    """A function that runs the fastest setting; None if all fail. Failures are printed."""
    found: dict[float, Callable[[], Any]] = {}
    for repack, flash in ("11", "10", "01", "00"):
        setting = f"{PEERS[peer][0]} {repack} -fa {flash}"
        call = partial(run_peer, peer, program, setting, job)
        try:
            found.setdefault(call()["value"], call)
        except PeerFailedError as error:
            print(error, flush=True)
    return found[max(found)] if found else None
