"""The values of a benchmark: its workload, options and results.

A prompt's text is the same on every machine and for every engine, so results are comparable. This
module knows no engine; the tokenizer is that of the model under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localrt.common.errors import OptionError
from localrt.common.option_names import option

LONG_ANSWER = 2
"""Tokens generated after a long prompt; only the first is timed."""

# Prompts begin this many tokens apart in one text, so that no run can reuse another's cache.
_STRIDE = 17

SENTENCES = (
    "In the year {year} the harbour master wrote down every ship that came in before noon.",
    "Ship number {n} carried {a} crates of tea, {b} barrels of oil and a small brass telescope.",
    "Nobody asked who had paid for it, and the clerk simply noted: received, weighed, stored.",
    "By evening the wind had turned to the north, and {a} boats were still outside the wall.",
    "A light burned on the hill, as it did every night, and {b} people looked up at it.",
    "“If the tide holds,” said the pilot, “we shall all be ashore in {n} minutes.”",
    "The sum was simple enough: {a} + {b} = {sum}, and the price of a crate was {n} shillings.",
)


_LEAST = {"prompt_tokens": 1, "tokens": 2, "runs": 1, "batch": 1, "long_prompt_tokens": 0}


@dataclass(frozen=True, slots=True)
class Workload:
    """Generate ``tokens`` greedy tokens after ``prompt_tokens``, ``runs`` times.

    ``batch`` answers share passes: prefill lasts until all have their first token, and the decode
    rate is that of all together from then on. If ``long_prompt_tokens`` is not 0, the first token
    after such a prompt is timed once.
    """

    prompt_tokens: int = 512
    tokens: int = 128
    runs: int = 5
    long_prompt_tokens: int = 0
    batch: int = 1

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if getattr(self, name) < least:
                raise OptionError(
                    f"{option(name)} must be at least {least}, is {getattr(self, name)}"
                )

    @property
    def ctx(self) -> int:
        """The shortest context that holds prompt and answer."""
        return max(self.prompt_tokens + self.tokens, self.long_prompt_tokens + LONG_ANSWER)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """The options of a benchmark. Sizes are in bytes.

    ``ram``, ``gpu_memory``, ``device``, ``format``, ``kv_format`` and ``draft`` are for the native
    engine; ``ctx`` is every engine's context, by default just long enough. ``settings`` names the
    settings of each engine to measure, by default all. ``peers`` are llama-bench programs, by name.
    """

    path: Path
    engines: Sequence[str]
    workload: Workload = field(default_factory=Workload)
    threads: int | None = None
    format: str | None = None
    device: str | None = None
    gpu_memory: int | None = None
    ram: int | None = None
    kv_format: str | None = None
    draft: str | None = None
    ctx: int | None = None
    settings: Mapping[str, Sequence[str]] | None = None
    peers: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        work = self.workload
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"{option('threads')} must be at least 1, is {self.threads}")
        if self.ctx is not None and self.ctx < work.ctx:
            held = f"{work.prompt_tokens} prompt and {work.tokens} answer tokens"
            if work.ctx > work.prompt_tokens + work.tokens:
                held = f"a prompt of {work.long_prompt_tokens} tokens"
            raise OptionError(
                f"{option('ctx')} must be at least {work.ctx} to hold {held}, is {self.ctx}"
            )

    @property
    def uses_gpu(self) -> bool:
        """Whether the options name a GPU; its use is then measured too."""
        named = (self.device or "").startswith("cuda")
        return named or (self.gpu_memory is not None and self.device != "cpu")


@dataclass(frozen=True, slots=True)
class Result:
    """One engine and setting: medians under the names of `Metrics`, and every sample.

    ``peak_ram_bytes`` and ``peak_vram_bytes`` cover loading and one generation. ``metrics``
    also has ``read_bytes_per_token`` (from disk) and ``joules_per_token`` (of the machine), both
    while decoding, ``long_ttft_s`` of a long prompt, and ``busy``, the shares of resources, if a
    GPU is used.
    """

    engine: str
    setting: str
    metrics: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]
    load_s: float
    info: Mapping[str, Any]

    @property
    def workload_s(self) -> float:
        """Seconds of the whole workload, from the medians; the best setting has the fewest."""
        later = self.metrics["completion_tokens"] - 1
        return float(self.metrics["ttft_s"] + later * self.metrics["tpot_s"])


@dataclass(frozen=True, slots=True)
class Skipped:
    """An engine, or one setting of it, that did not run. ``missing``: it is not installed.

    ``kind`` is the error's class.
    """

    engine: str
    setting: str
    reason: str
    missing: bool = False
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of a benchmark, in the order of the options.

    ``interrupted``: some runs are missing. ``busy``: other programs used the CPU. Of a sweep,
    ``varied`` is the option whose values the results' settings are, or ``"model"``.
    """

    results: Sequence[Result]
    skipped: Sequence[Skipped]
    interleaved: bool
    interrupted: bool = False
    busy: bool = False
    varied: str = ""


def make_prompts(workload: Workload, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Make prompts of exactly ``workload.prompt_tokens`` ids: ``workload.batch`` for the warm-up,
    then as many for every run.
    """
    starts = range(0, (workload.runs + 1) * workload.batch * _STRIDE, _STRIDE)
    needed = workload.prompt_tokens + starts[-1]
    count = 16
    while len(ids := encode(_text(count))) < needed:
        count *= 2
    return [ids[start : start + workload.prompt_tokens] for start in starts]


def make_long_prompt(workload: Workload, encode: Callable[[str], list[int]]) -> list[int]:
    """Make a prompt of ``workload.long_prompt_tokens`` ids that shares no prefix with others."""
    one = Workload(workload.long_prompt_tokens, runs=(workload.runs + 1) * workload.batch)
    return make_prompts(one, encode)[-1]


def _text(sentences: int) -> str:
    """Return a text of ``sentences`` sentences; a longer text begins with the shorter one."""
    lines = []
    for index in range(sentences):
        a, b = 3 + index * 7 % 89, 5 + index * 11 % 97
        template = SENTENCES[index % len(SENTENCES)]
        lines.append(template.format(year=1700 + index, n=index + 1, a=a, b=b, sum=a + b))
    return " ".join(lines)
