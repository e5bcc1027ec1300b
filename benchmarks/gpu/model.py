"""A model of random weights, larger than 8 GB or nearly so, through ``localrt.load``.

It is written as a store to the temporary folder, and loaded within 8 GB of the GPU's memory, over a
link of 12 GB/s, with less RAM than its weights, and whole.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import localrt
from benchmarks.common.random_store import stored_units, write_store
from benchmarks.common.record import Record
from localrt.common.formatting import format_bytes, parse_size
from localrt.engine.types import Chunk
from localrt.hub.names import find_known
from localrt.offload.memory import current_rss
from localrt.quant.cuda.driver import device_of

FORMAT = "int4-g32"
SLOW_LINK = 12e9  # PCIe 4.0 with eight lanes, or 3.0 with sixteen
_PROMPTS, _TOKENS, _ROOM = (512, 2048), 32, 1.1
_FILLER = 64 << 20


MODELS = {
    "14B": ("Qwen3ForCausalLM", "qwen3:14b"),
    "30B-A3B": ("Qwen3MoeForCausalLM", "qwen3:30b"),
}
"""Architectures, and the models that localrt knows of whose shapes they have."""
WAYS: dict[str, Mapping[str, Any]] = {
    "within 8 GB": {"gpu_memory": "8GB"},
    "at 12 GB/s": {"gpu_memory": "8GB"},
    "from the SSD": {"gpu_memory": "4GB", "ram": "3GB"},
    "resident": {"device": "cuda"},
}
"""The options of ``localrt.load`` for each way."""


def model(
    name: str, *, prompts: tuple[int, int] = _PROMPTS, tokens: int = _TOKENS
) -> Iterator[tuple[str, Record]]:
    """The model's speeds, way by way: first tokens of ``prompts`` of so many tokens, then
    ``tokens``.
    """
    architecture, config = MODELS[name][0], config_of(name)
    nbytes = sum(unit.nbytes for unit in stored_units(architecture, config, FORMAT))
    if shutil.disk_usage(tempfile.gettempdir()).free < _ROOM * nbytes:
        needed = f"{format_bytes(round(_ROOM * nbytes))} of a disk are needed: TMPDIR=FOLDER"
        yield name, {"not run": needed}
        return
    with tempfile.TemporaryDirectory() as folder:
        # The machine is measured once, and kernels are compiled once.
        os.environ |= {"LOCALRT_CACHE": folder, "XDG_DATA_HOME": folder, "LOCALRT_OFFLINE": "1"}
        write_store(Path(folder, "model"), architecture, config, FORMAT)
        os.sync()  # otherwise writing would overlap with reading
        for way, options in WAYS.items():
            link = throttled(SLOW_LINK) if "GB/s" in way else nullcontext()
            try:
                with link:
                    yield f"{name}, {way}", loaded(Path(folder, "model"), options, prompts, tokens)
            except localrt.LocalrtError as error:
                yield f"{name}, {way}", {"not run": str(error)}


def config_of(name: str) -> dict[str, Any]:
    """The model's ``config.json``."""
    known = find_known(MODELS[name][1])
    assert known is not None, name
    return {**known.config(), "norm_topk_prob": True}


def loaded(path: Path, options: Mapping[str, Any], prompts: tuple[int, int], tokens: int) -> Record:
    """Load the model, and answer. An answer that is repeated must be the same, unless a mixture's
    experts are divided by what is ready first.
    """
    gpu = device_of("cuda")
    gpu.trim()
    free, started = gpu.memory()[0], time.perf_counter()
    options = {**options}
    if "ram" in options:  # besides what torch and CUDA take of this process
        options["ram"] = parse_size(options["ram"]) + current_rss()
    with localrt.load(path, draft="off", ctx=max(prompts) + 256, **options) as model:
        found: Record = {"load_s": time.perf_counter() - started}
        plan = model._core.engine.plan
        if plan is not None:
            found |= {"forecast_tok_s": plan.tok_s, "forecast_prefill_tok_s": plan.prefill_tok_s}

        def answer(length: int, tokens: int) -> Chunk:
            ids = np.random.default_rng(length).integers(0, model.info.vocab_size, length).tolist()
            return model.generate(token_ids=ids, max_tokens=tokens, ignore_eos=True, temperature=0)

        first = answer(prompts[0], tokens)  # kernels are compiled, and experts come to the GPU
        found["first_token_at_first_s"] = first.metrics.ttft_s
        before = model.status()
        again = answer(prompts[0] - 1, tokens).metrics
        flow = model.status().since(before)
        found |= {f"{name}_busy": share for name, share in flow.busy.items()}
        found |= {"decode_tok_s": again.decode_tok_s, "expert_hit_rate": again.expert_hit_rate}
        found |= {"link_bytes": again.link_bytes, "ssd_bytes": again.ssd_read_bytes}
        for length in prompts:
            found[f"first_token_{length}_s"] = answer(length + 1, 1).metrics.ttft_s
        mixture = again.expert_hit_rate is not None
        same = mixture or answer(prompts[0], tokens).token_ids == first.token_ids
        found["gpu_bytes"] = free - gpu.memory()[0]
        over = found["gpu_bytes"] > parse_size(options.get("gpu_memory", "1TB"))
        if over or not same:
            found["failed"] = "more memory than the budget" if over else "another answer"
    return found


@contextmanager
def throttled(link_bytes_s: float) -> Iterator[None]:
    """Simulate a slower link: send extra bytes after every copy to the GPU.

    Measured and saved rates of the GPU do not change.
    """
    from localrt.quant.cuda import cuda_memory, measuring

    plain, gpu_rates = cuda_memory.CudaCopies, measuring.gpu_rates

    class Throttled(cuda_memory.CudaCopies):
        """Sends extra bytes, which are discarded, after each copy."""

        def __init__(self, device: str = "cuda", *, most_pinned: int | None = None) -> None:
            super().__init__(device, most_pinned=most_pinned)
            rate, _ = plain(device).measure()
            self._times = max(0.0, rate / link_bytes_s - 1)
            self._filler = self._device.pinned((_FILLER,), np.uint8)
            self._sink = self.alloc(_FILLER)

        def queue(self, source: Any, out: Any, after: Any) -> None:
            super().queue(source, out, after)
            rest = int(source.nbytes * self._times)
            with self._lock:
                while rest > 0:
                    part = min(rest, _FILLER)
                    self._device.copy_in(self._sink.address, self._filler[:part], self._stream)
                    rest -= part

    def rates(*args: Any, **options: Any) -> Any:
        found = gpu_rates(*args, **options)
        return replace(found, to_gpu_bytes_s=min(link_bytes_s, found.to_gpu_bytes_s))

    with (
        patch.object(cuda_memory, "CudaCopies", Throttled),
        patch.object(measuring, "gpu_rates", rates),
    ):
        yield
