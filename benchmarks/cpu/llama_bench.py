"""Peers measured with their own ``llama-bench``: llama.cpp and ik_llama.cpp.

Finds a peer's fastest setting: weights repacked or not, flash attention or not. Independent of
localrt's code.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

PEERS = {"ik_llama.cpp": ("-rtr", "-w 0"), "llama.cpp": ("--repack", "--no-warmup")}
"""A peer's option that repacks weights, and its option that skips the warm-up."""


class PeerFailedError(Exception):
    """A run without a result; the message is the program's last line."""


def run_peer(peer: str, program: Path, setting: str, job: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per second of the best of ``repeats``; see ``child`` for ``job``.

    Raises:
        PeerFailedError: it failed.
    """
    prompt = job["tokens"] if job["kind"] == "prompt" else 0
    words = f"{setting} -p {prompt} -n {job['tokens'] - prompt}".split()
    if prompt > 4096:  # llama.cpp's warm-up would process the whole prompt
        words += PEERS[peer][1].split()
    words += f"-r {job['repeats']} -t {job['threads']} -o json".split()
    done = subprocess.run([program, "-m", job["model"], *words], capture_output=True, text=True)
    try:
        (found,) = json.loads(done.stdout)
        return {
            "value": max(found["samples_ts"]),
            "setting": setting,
            "build": found["build_commit"],
        }
    except (ValueError, LookupError, TypeError):
        lines = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
        raise PeerFailedError(f"{peer} {setting}: {lines[-1]}") from None


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
