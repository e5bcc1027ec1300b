"""llama.cpp's own ``llama-bench`` as a peer: runs it, reads its JSON, and finds its best setting.

No card has run this yet.

llama.cpp can keep layers in RAM (``-ngl``) and, of mixtures, layers' experts (``-ncmoe``). Both are
one scale here: with each level a GPU holds more. The first level tried is what the file's sizes
suggest; others around it follow until the largest that fits is known, or `_MOST_TRIALS` have run.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

from localrt import system
from localrt.bench.gpu import Peaks, used_nbytes
from localrt.bench.workload import BenchOptions
from localrt.common.cores import default_threads
from localrt.common.errors import LocalrtError, reason_of
from localrt.common.formatting import format_bytes, format_rate, one_line
from localrt.engine.llamacpp.gpus import layer_nbytes
from localrt.engine.types import Metrics

_MOST_TRIALS = 8
_TRIAL_TOKENS = 16
_CONTEXT_NBYTES = 512 << 20  # of CUDA, and llama.cpp's own buffers
NO_ROOM = re.compile(r"memory|alloc|failed to (load|create|run)|CUDA error", re.IGNORECASE)
"""The last line of a program whose memory ran out; this one does not say why it fails to load."""


class PeerFailedError(LocalrtError):
    """A run without results; the message is the program's last line."""


def run_llama_bench(program: Path, model: Path | str, words: str, gpu: str = "0") -> dict[str, Any]:
    """Run one test with options ``words``; return it as in the JSON, with the peak memory of the
    process as ``peak_ram_bytes`` and ``peak_vram_bytes``.

    Of CUDA's GPUs it sees the one with number ``gpu``, unless the environment names others.

    Raises:
        PeerFailedError: it cannot be started, fails, or prints no result.
    """
    command = [str(program), "-m", str(model), *words.split(), "-o", "json"]
    streams: Any = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    streams |= {"stdin": subprocess.DEVNULL, "encoding": "utf-8", "errors": "replace"}
    streams["env"] = {"CUDA_VISIBLE_DEVICES": gpu, **os.environ}
    try:  # Ctrl+C reaches only this process, which then ends the other
        process = subprocess.Popen(command, **streams, **system.OWN_GROUP)
    except OSError as error:
        raise PeerFailedError(f"{program.name} cannot be started: {reason_of(error)}") from error
    with process, Peaks(process.pid) as peaks:
        try:
            printed, log = process.communicate()
        finally:
            process.kill()
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        (test,) = json.loads(printed)
        if min(test["samples_ts"]) > 0:
            return {**test, "peak_ram_bytes": peaks.ram, "peak_vram_bytes": peaks.vram}
    why = f"it printed no results as JSON (exit code {process.returncode})"
    lines = log.strip().splitlines() if process.returncode else []
    raise PeerFailedError(one_line(lines[-1] if lines else why))


@dataclass(slots=True)
class LlamaBench:
    """A peer by its name in the report. ``gpu``: on the first GPU, within ``options.gpu_memory``.

    It processes random tokens, without tokenizing or sampling; decoding is timed behind a prompt.
    """

    name: str
    program: Path
    options: BenchOptions
    gpu: bool
    notify: Callable[[str], None]
    _rates: dict[str, float] = field(default_factory=dict)  # of the settings that fit
    _why: str = ""  # the last one did not

    def measure(self) -> tuple[str, list[dict[str, Any]], dict[str, Any]]:
        """Measure the workload in the best setting; return that, a sample of each run, and facts.

        Raises:
            PeerFailedError: there is none, or it fails.
        """
        if self.options.path.suffix != ".gguf":
            raise PeerFailedError("llama-bench reads GGUF files only")
        setting = self._search() if self.gpu else "-ngl 0 -dev none"
        rates = {each: self._try(each) or 0.0 for each in (f"{setting} -fa 1", f"{setting} -fa 0")}
        setting = max(rates, key=lambda each: rates[each])
        if not rates[setting]:
            raise PeerFailedError(self._why)
        self.notify(f"{self.name} ({setting}): measuring")
        work = self.options.workload
        sizes = f"-p {work.prompt_tokens} -n 0", self._behind_prompt(work.tokens)
        runs = [self._run(f"{setting} {size} -r {work.runs}") for size in sizes]
        device = self.gpu and runs[0].get("gpu_info")
        samples = [
            Metrics(
                prompt_tokens=work.prompt_tokens,
                completion_tokens=work.tokens,
                ttft_s=work.prompt_tokens / prefill,
                tpot_s=1 / decode,
                prefill_tok_s=prefill,
                decode_tok_s=decode,
                peak_ram_bytes=max(run["peak_ram_bytes"] or 0 for run in runs) or None,
                peak_vram_bytes=max(run["peak_vram_bytes"] or 0 for run in runs) or None,
                exactness="approximate",
            ).to_dict()
            for prefill, decode in zip(*(run["samples_ts"] for run in runs), strict=False)
        ]
        facts = {each: runs[0].get(each) for each in ("build_commit", "model_type", "backends")}
        return setting, samples, {"device": device or "cpu", "peer": "llama-bench", **facts}

    def _search(self) -> str:
        """Return the options of the fastest level that fits."""
        work, budget = self.options.workload, self.options.gpu_memory
        layers, experts, beside = layer_nbytes(self.options.path, work.prompt_tokens + work.tokens)
        costs = [a - b for a, b in zip(layers, experts, strict=True)][::-1]  # the head's first
        costs += experts[-2::-1] if any(experts) else []

        def words(level: int) -> str:
            away = len(costs) - max(level, len(layers))  # layers whose experts stay in RAM
            return f"-ngl {min(level, len(layers))}" + (f" -ncmoe {away}" if away else "")

        most, step = len(costs), max(1, len(costs) // 16)
        level = most
        if budget is not None:
            room = budget - beside - _CONTEXT_NBYTES
            level = sum(total <= room for total in accumulate(costs))
            # What cannot be measured must not exceed the budget by trying.
            most = level if used_nbytes() is None else most
        fits, fails, rates = -1, most + 1, dict[int, float]()
        for _ in range(_MOST_TRIALS):
            rate = self._try(f"{words(level)} -fa 1")
            if rate is None:
                fails = level
            else:
                fits, rates[level] = level, rate
            if fails - fits == 1 or not self.gpu:
                break
            if fits < 0 or fails > most:  # one side has no bound yet: go on by larger steps
                level = max(0, fails - step) if fits < 0 else min(most, fits + step)
                step *= 2
            else:
                level = (fits + fails) // 2
        if not rates:
            raise PeerFailedError(self._why)
        return words(max(rates, key=lambda each: rates[each]))

    def _try(self, setting: str) -> float | None:
        """Return tokens per second; None if it does not fit."""
        budget = self.options.gpu_memory
        try:
            if setting not in self._rates:
                run = self._run(f"{setting} {self._behind_prompt(_TRIAL_TOKENS)} -r 1")
                if budget is not None and (taken := run["peak_vram_bytes"] or 0) > budget:
                    raise PeerFailedError(f"takes {format_bytes(taken)} of the GPU's memory")
                self.gpu = self.gpu and bool(run.get("gpu_info"))  # as this build says
                self._rates[setting] = median(run["samples_ts"])
                rate = format_rate(self._rates[setting])
                self.notify(f"{self.name} ({setting}): decode {rate} tok/s")
        except PeerFailedError as error:
            if not NO_ROOM.search(str(error)):
                raise
            self._why = str(error)
            self.notify(f"{self.name} ({setting}): {error}")
        return self._rates.get(setting)

    def _behind_prompt(self, tokens: int) -> str:
        return f"-p 0 -n {tokens} -d {self.options.workload.prompt_tokens}"

    def _run(self, words: str) -> dict[str, Any]:
        words += f" -t {self.options.threads or default_threads()}"
        gpu = (self.options.device or "").partition(":")[2] or "0"
        return run_llama_bench(self.program, self.options.path, words, gpu)
