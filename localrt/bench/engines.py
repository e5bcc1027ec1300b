"""The engines that a benchmark child can load.

They run through `localrt.Model`, as for a user of the library. Heavy imports happen inside
`LoadedEngine`, in the child process only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from localrt.engine.types import Metrics
from localrt.offload.memory import peak_rss

if TYPE_CHECKING:
    from localrt.service.core import Core

ENGINES = ("native", "llamacpp")

_TRACED_TASKS = 200_000

LLAMACPP_SETTINGS: Mapping[str, Mapping[str, bool]] = {
    "repacked": {"repack": True, "flash_attention": False},
    "repacked, flash attention": {"repack": True, "flash_attention": True},
    "plain": {"repack": False, "flash_attention": False},
    "plain, flash attention": {"repack": False, "flash_attention": True},
}
"""llama.cpp's settings by name; which one is fastest depends on machine and model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The engine to load. ``settings`` are engine-specific, by name.

    The native engine's settings are options of ``localrt.load``; without ``draft``, there is no
    drafting.
    """

    engine: str
    path: str
    ctx: int
    threads: int | None = None
    settings: Mapping[str, Any] | None = None


class LoadedEngine:
    """A loaded model that can be timed. ``info`` are the facts of `ModelInfo`, as plain values.

    Raises:
        LocalrtError: the engine is not installed, or cannot run this model.
    """

    def __init__(self, launch: Launch) -> None:
        from localrt.api import Model

        self._core = core = (
            _load_native(launch) if launch.engine == "native" else llamacpp_core(launch)
        )
        self._model = model = Model(core)
        # File names only: results may be shared.
        path = model.info.path
        self.info: Mapping[str, Any] = {**asdict(model.info), "name": path.name, "path": path.name}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, without special tokens."""
        return self._model.tokenize(text, add_special=False)

    def generate(self, prompt: list[int], tokens: int, on_first: Callable[[], None]) -> Metrics:
        """Generate exactly ``tokens`` greedy tokens after ``prompt``; return their metrics.

        ``on_first`` is called once, after the first token, when decoding begins.
        """
        stream = self._model.stream(
            token_ids=prompt, max_tokens=tokens, ignore_eos=True, temperature=0
        )
        last = next(stream)
        on_first()
        for last in stream:  # noqa: B007 - used after the loop
            pass
        last.metrics.peak_vram_bytes = self._peak_vram()
        return last.metrics

    def generate_batch(self, prompts: list[list[int]], tokens: int) -> dict[str, object]:
        """Answer prompts together, with exactly ``tokens`` greedy tokens each.

        Times are medians over the answers. Prefill lasts until every answer has its first token;
        the decode rate is that of all answers together from then on.
        """
        stream = self._model.stream_batch(
            token_ids=prompts,
            batch_size=len(prompts),
            max_tokens=tokens,
            ignore_eos=True,
            temperature=0,
        )
        first, last = [0.0] * len(prompts), [0.0] * len(prompts)
        arrivals: list[tuple[float, int]] = []
        started = time.perf_counter()
        for index, chunk in stream:
            last[index] = now = time.perf_counter() - started
            first[index] = first[index] or now
            arrivals.append((now, len(chunk.token_ids)))
        read, ended = max(first), max(last)
        decoded = sum(count for at, count in arrivals if at > read)
        pauses = [(b - a) / (tokens - 1) for a, b in zip(first, last, strict=True)]
        return {
            "prompt_tokens": len(prompts[0]),
            "completion_tokens": tokens,
            "ttft_s": median(first),
            "tpot_s": median(pauses),
            "prefill_tok_s": sum(map(len, prompts)) / read,
            "decode_tok_s": decoded / (ended - read) if decoded else None,
            "peak_ram_bytes": peak_rss(),
            "peak_vram_bytes": self._peak_vram(),
        }

    def free(self) -> None:
        """Free memory left by earlier prompts, so that it does not count for later ones."""
        self._core.free_idle()

    def _peak_vram(self) -> int | None:
        """Return the most bytes that localrt has allocated on its GPU, without CUDA's own."""
        info = self._model.info
        if info.engine != "native" or not info.device.startswith("cuda"):
            return None
        from localrt.quant.cuda.driver import device_of

        return int(device_of(info.device).peak_nbytes)

    def gpu_use(self, prompt: list[int]) -> dict[str, object]:
        """Return the fields of a ``GpuUse``, measured after ``prompt``."""
        from localrt.bench.gpu import gpu_use

        return asdict(gpu_use(self._model, prompt))

    def trace_events(self) -> Iterator[dict[str, object]]:
        """Yield the latest tasks; the first call starts recording. Empty without a pipeline."""
        for task in self._core.engine.weights.tasks(_TRACED_TASKS):
            times = {"start_s": task.start, "end_s": task.end}
            yield {"resource": task.resource, "name": task.name, **times}


def _load_native(launch: Launch) -> Core:
    from localrt.loading.options import LoadOptions
    from localrt.service.core import open_core

    own = {"draft": "off", **(launch.settings or {})}
    named: dict[str, Any] = {"model": launch.path, "ctx": launch.ctx, "threads": launch.threads}
    return open_core(LoadOptions(engine="native", **named, **own))


def llamacpp_core(launch: Launch) -> Core:
    """Load a model as ``localrt.load`` does, but with llama.cpp's settings."""
    from localrt.chat_format.templates.chat_template import PlainTemplate
    from localrt.engine.llamacpp.engine import LlamaCppEngine
    from localrt.engine.llamacpp.model import LlamaCppModel, LlamaCppSettings
    from localrt.loading.load import LoadedModel
    from localrt.service.core import Core

    path, own = Path(launch.path), dict(launch.settings or {})
    model = LlamaCppModel.load(
        path,
        ctx=launch.ctx,
        threads=launch.threads,
        device="cpu" if own.pop("device", "cpu") == "cpu" else "auto",  # its build may have none
        gpu_memory=own.pop("gpu_memory", None),
        settings=LlamaCppSettings(**own),
    )
    engine = LlamaCppEngine(model)
    parts = LoadedModel(
        path=path,
        engine=engine,
        tokenizer=engine.tokenizer(),
        template=PlainTemplate(),
        defaults={},
        eos_ids=frozenset(),
        ctx=launch.ctx,
        notes=(),
    )
    return Core(path.name, parts)
