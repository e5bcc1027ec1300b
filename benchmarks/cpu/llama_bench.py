"""Peers that are measured with their own ``llama-bench``: llama.cpp and ik_llama.cpp.

A peer is a program and the settings among which its fastest is looked for: weights repacked or
not, flash attention or not. Knows nothing of ours.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PEERS = {
    "ik_llama.cpp": ("-rtr", ("-w", "0")),
    "llama.cpp": ("--repack", ("--no-warmup",)),
}
"""The option that repacks weights, and the words that leave out the warm-up."""

LONG = 4096
"""A prompt of so many tokens needs no warm-up: llama.cpp's would read all of it."""


class PeerFailedError(Exception):
    """A run gave no figure; the message has the program's last line."""


@dataclass(frozen=True, slots=True)
class Peer:
    """One of ``PEERS``, and its ``llama-bench``."""

    name: str
    program: Path

    def settings(self) -> list[list[str]]:
        """As words of the command line."""
        repacking, _ = PEERS[self.name]
        return [[repacking, repack, "-fa", flash] for repack in "10" for flash in "10"]

    def run(self, model: Path, setting: Sequence[str], test: Mapping[str, int]) -> dict[str, Any]:
        """Tokens per second: ``test`` has ``prompt`` and ``answer`` (one is 0), ``repeats``, of
        which the best counts, and ``threads``.

        Raises:
            PeerFailedError: it failed.
        """
        words = ["-m", str(model), *setting]
        words += PEERS[self.name][1] if test["prompt"] >= LONG else ()
        words += "-p {prompt} -n {answer} -r {repeats} -t {threads}".format(**test).split()
        done = subprocess.run([self.program, *words, "-o", "json"], capture_output=True, text=True)
        try:
            (found,) = json.loads(done.stdout)
            best, build = max(found["samples_ts"]), found["build_commit"]
        except (ValueError, LookupError, TypeError):
            lines = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()
            raise PeerFailedError(f"{self.name} {' '.join(setting)}: {lines[-1]}") from None
        return {"value": best, "build": build, "setting": " ".join(setting)}
