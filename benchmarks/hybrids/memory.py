"""What a model remembers: edits behind a long context, chats that come back, a full context."""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.contest import token_ids
from localrt.bench.engines import Launch
from localrt.bench.process import ChildProcess, child_command
from localrt.errors import LocalrtError

__all__ = ["edit_last_turn", "fill_context", "guess", "resume_chat"]

_TURN = 200  # tokens of the last turn, which is edited
_GUESSED = 96  # tokens of an answer with guesses and without
Given = Mapping[str, Mapping[str, Any]]


@contextmanager
def _child(path: Path, options: Given, cache: Path | None = None) -> Iterator[ChildProcess]:
    before = dict(os.environ)
    if cache is not None:  # parked conversations lie there
        os.environ["LOCALRT_CACHE"] = str(cache)
    try:
        child = ChildProcess(child_command(module="benchmarks.hybrids.child"))
    finally:
        os.environ.clear()
        os.environ.update(before)
    with child:
        child.ask("load", path=str(path), options=options)
        yield child


def edit_last_turn(path: Path, tokens: int, runs: int) -> dict[str, Any]:
    """Seconds to the first token where only the last turn of ``tokens`` differs from the last
    prompt; localrt beside llama.cpp, which reads all again.
    """
    shared = token_ids(tokens - _TURN, 0)
    launch = Launch(
        engine="llamacpp",
        path=str(path),
        ctx=tokens + 8,
        threads=2,
        settings={"repack": False, "flash_attention": True},
    )
    samples: dict[str, list[float]] = {"localrt": [], "llama.cpp": []}
    with ExitStack() as stack:
        ours = stack.enter_context(
            _child(path, {"m": {"ctx": tokens + 8, "draft": "off", "threads": 2}})
        )
        theirs = stack.enter_context(ChildProcess(child_command()))
        theirs.ask("load", launch=asdict(launch))
        for run in range(runs + 1):
            prompt = shared + token_ids(_TURN, run + 1)
            mine = ours.ask("answer", name="m", prompt=prompt, tokens=2)
            other = theirs.ask("generate", prompt=prompt, tokens=2)
            if run:
                samples["localrt"].append(mine["ttft_s"])
                samples["llama.cpp"].append(other["ttft_s"])
                cached = mine["cached_tokens"]
    ours_s, theirs_s = (statistics.median(samples[name]) for name in ("localrt", "llama.cpp"))
    return {
        "tokens": tokens,
        "edited": _TURN,
        "cached": cached,
        "samples": samples,
        "times": theirs_s / ours_s,
    }


def resume_chat(path: Path, tokens: int, runs: int) -> dict[str, Any]:
    """Seconds to the first token of a chat's next turn after a restart, and as read for the first
    time.
    """
    options = {"m": {"ctx": tokens + 512, "draft": "off", "threads": 2}}
    samples: dict[str, list[float]] = {"resumed": [], "read": []}
    for _ in range(runs):
        with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
            for kind in ("read", "resumed"):
                with _child(path, options, Path(folder)) as child:
                    child.ask("answer", name="m", prompt=token_ids(16, 9), tokens=2)
                    metrics = child.ask("resume", name="m", tokens=tokens)
                    if (metrics["cached_tokens"] > 0) != (kind == "resumed"):
                        raise LocalrtError(f"{kind}: {metrics['cached_tokens']} tokens were known")
                    samples[kind].append(metrics["ttft_s"])
    read_s, resumed_s = (statistics.median(samples[kind]) for kind in ("read", "resumed"))
    return {"tokens": tokens, "samples": samples, "times": read_s / resumed_s}


def guess(path: Path, runs: int) -> dict[str, Any]:
    """Tokens a second with guesses as ``localrt.load`` makes them and without, by turns."""
    options = {
        "plain": {"ctx": 1024, "draft": "off", "threads": 2},
        "guessing": {"ctx": 1024, "threads": 2},
    }
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in options}
    with _child(path, options) as child:
        for run in range(runs + 1):
            for name in sorted(options, reverse=bool(run % 2)):
                found = {}
                for temperature in (0.0, 1.0):
                    prompt = token_ids(64, run)
                    metrics = child.ask(
                        "answer", name=name, prompt=prompt, tokens=_GUESSED, temperature=temperature
                    )
                    found[f"temperature {temperature:g}"] = metrics["decode_tok_s"]
                if run:
                    samples[name].append(found)
    ratios = {
        key: statistics.median(
            mine[key] / other[key]
            for mine, other in zip(samples["guessing"], samples["plain"], strict=True)
        )
        for key in samples["plain"][0]
    }
    return {"samples": samples, "times": ratios}


def fill_context(path: Path, ram: str, tokens: int) -> dict[str, Any]:
    """A context read to its last token within ``ram``, and whether a transformer would fit."""
    given = {"ram": ram, "ctx": tokens, "draft": "off", "threads": 2}
    with _child(path, {"m": given}) as child:
        found: dict[str, Any] = child.ask("fill", name="m", tokens=tokens)
    return {"ram": ram, "tokens": tokens, **found}
