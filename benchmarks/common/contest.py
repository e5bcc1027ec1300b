"""One model in memory: localrt, llama.cpp and ik_llama.cpp by turns."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common.timing import median_ratio
from localrt.bench.engines import LLAMACPP_SETTINGS, Launch
from localrt.bench.process import ChildProcess, child_command

__all__ = ["Sample", "hold_contest", "token_ids"]

Sample = dict[str, float]
"""Tokens a second: of a prompt (``prompt``), and of the answer to it (``decode``)."""

_MEASURES = ("prompt", "decode")
_IK_SETTINGS: Mapping[str, Sequence[str]] = {"plain": ("-rtr", "0"), "repacked": ("-rtr", "1")}


def token_ids(count: int, start: int) -> list[int]:
    """A text that no other ``start`` shares a beginning with."""
    return [100 + (number * 7919 + start * 104_729) % 40_000 for number in range(count)]


def hold_contest(path: Path, prompt: int, tokens: int, runs: int, ik: Path | None) -> Any:
    """Samples of every contestant in each turn but the first, which warms up.

    A peer's settings are first tried one by one; those that were fastest at prompts or
    at decoding take part. ``times_...`` is localrt over the best of a peer, turn by turn.
    """
    peers: dict[str, dict[str, Callable[[ExitStack], _Turn]]] = {
        "llama.cpp": {
            setting: _child("llamacpp", path, prompt, tokens, values)
            for setting, values in LLAMACPP_SETTINGS.items()
        }
    }
    if ik is not None:
        peers["ik_llama.cpp"] = {
            setting: _program([str(ik), "-m", str(path), *values], prompt, tokens)
            for setting, values in _IK_SETTINGS.items()
        }
    chosen = {"localrt": _child("native", path, prompt, tokens, {})}
    tried: dict[str, dict[str, Sample]] = {}
    for peer, settings in peers.items():
        tried[peer] = {setting: _try(start) for setting, start in settings.items()}
        for measure in _MEASURES:
            best = max(tried[peer], key=lambda setting: tried[peer][setting][measure])
            chosen[f"{peer}, {best}"] = settings[best]
    samples: dict[str, list[Sample]] = {name: [] for name in chosen}
    with ExitStack() as stack:
        turns = {name: start(stack) for name, start in chosen.items()}
        for run in range(runs + 1):
            for name in sorted(turns, reverse=bool(run % 2)):
                sample = turns[name](run)
                if run:
                    samples[name].append(sample)
    found: dict[str, Any] = {"tried": tried, "samples": samples}
    found["medians"] = {
        name: {key: statistics.median(one[key] for one in each) for key in _MEASURES}
        for name, each in samples.items()
    }
    for peer in peers:
        names = [name for name in samples if name.startswith(f"{peer},")]
        found[f"times_{peer}"] = {
            key: min(
                median_ratio(_of(samples["localrt"], key), _of(samples[n], key)) for n in names
            )
            for key in _MEASURES
        }
    return found


_Turn = Callable[[int], Sample]


def _of(samples: Sequence[Sample], key: str) -> list[float]:
    return [sample[key] for sample in samples]


def _try(start: Callable[[ExitStack], _Turn]) -> Sample:
    with ExitStack() as stack:
        return start(stack)(0)


def _child(
    engine: str, path: Path, prompt: int, tokens: int, settings: Mapping[str, Any]
) -> Callable[[ExitStack], _Turn]:
    def start(stack: ExitStack) -> _Turn:
        launch = Launch(
            engine=engine, path=str(path), ctx=prompt + tokens, threads=2, settings=settings
        )
        child = stack.enter_context(ChildProcess(child_command()))
        child.ask("load", launch=asdict(launch))

        def turn(run: int) -> Sample:
            metrics = child.ask("generate", prompt=token_ids(prompt, run), tokens=tokens)
            return {"prompt": metrics["prefill_tok_s"], "decode": metrics["decode_tok_s"]}

        return turn

    return start


def _program(command: Sequence[str], prompt: int, tokens: int) -> Callable[[ExitStack], _Turn]:
    """ik_llama.cpp's own benchmark, which loads the model anew in every turn and warms up."""

    def start(stack: ExitStack) -> _Turn:
        asked = ["-t", "2", "-fa", "1", "-r", "1", "-o", "json", "-p", prompt, "-n", tokens]

        def turn(run: int) -> Sample:
            done = subprocess.run(
                [*command, *map(str, asked)], capture_output=True, text=True, check=True
            )
            made = json.loads(done.stdout[done.stdout.index("[") :])
            return {"prompt" if one["n_prompt"] else "decode": one["avg_ts"] for one in made}

        return turn

    return start
