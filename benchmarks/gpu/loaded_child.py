"""A process that loads a model through the public API, answers, and reports time and memory.

Run by ``loaded.py``, with a job as JSON. A separate process has the GPU's memory to itself and no
kernels compiled or loaded by another.
"""

from __future__ import annotations

import faulthandler
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import numpy as np

import localrt
from benchmarks.gpu.configs import random_ids
from benchmarks.gpu.routed import routed_as
from benchmarks.gpu.timing import watch
from localrt.api import Model
from localrt.common.formatting import parse_size
from localrt.engine.types import Chunk
from localrt.offload.memory import current_rss
from localrt.offload.placement import Placement, Where
from localrt.planning.forecast import Forecast, PlanRequest, placed_shape
from localrt.quant.cuda.driver import device_of

_THROTTLE_SAMPLE = 64 << 20
_LOGIT_ROWS = 72
_BESIDE = ("cpu", "ssd")  # whose busy shares are known without timing every pass


def main() -> None:
    """Run a job: options of ``localrt.load``, prompt lengths, and how many tokens to decode."""
    job = json.load(sys.stdin)
    faulthandler.enable()
    faulthandler.dump_traceback_later(0.9 * job["seconds"])  # if it hangs: where
    for found in results(job):
        print(json.dumps(found), flush=True)


def results(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The results of a job, several times: those so far, and more of them each time."""
    changes: Any = {"link_bytes_s": throttled, "placement": placed_as, "routed": routed_as}
    with ExitStack() as changed:
        for name, change in changes.items():
            if job.get(name):
                changed.enter_context(change(job[name]))
        yield from answered(job)


def answered(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Results of a model loaded for the job."""
    started = time.perf_counter()
    peak = watch(device_of("cuda"), job["free_before"]) if "free_before" in job else None
    load = {**job["load"]}
    if "ram" in load:  # besides what torch and CUDA take of this process
        load["ram"] = parse_size(load["ram"]) + current_rss()
    with localrt.load(job["model"], draft="off", ctx=job["ctx"], **load) as model:
        found: dict[str, Any] = {"load_s": time.perf_counter() - started}
        found["notes"] = [note for note in model.info.notes if "tokenizer" not in note]
        found |= placed(model)
        yield found
        if job["logits"] is not None:  # first, since other caches will take GPU memory
            save_logits(model, job["logits"])
        found |= answers(model, job)
        yield found
        if peak is not None:
            found["peak_vram_bytes"] = peak()
        yield found


def placed(model: Model) -> dict[str, Any]:
    """Bytes of weights by location and by computing device, and the forecast."""
    plan = model._core.engine.plan
    if plan is None:
        return {"weight_bytes": model.info.weight_bytes, "computed_by_cpu": 0, "placement": None}
    where = plan.placement.where
    nbytes: Counter[str] = Counter()
    computed = 0
    for unit in placed_shape(plan).units:
        place = where[unit.name]
        nbytes[place.value] += unit.nbytes
        # Embedding and last norm are placed like the layers and not counted.
        computed += unit.kind not in ("embedding", "norm") and not place.on_gpu
    return {
        "weight_bytes": plan.weight_bytes,
        "placed_bytes": dict(nbytes),
        "computed_by_cpu": computed,
        "placement": {
            **{field.name: getattr(plan.placement, field.name) for field in fields(Placement)},
            "where": dict(where),
            "crossing": sorted(plan.placement.crossing),
        },
        "predicted_tok_s": plan.tok_s,
        "predicted_prefill_tok_s": plan.prefill_tok_s,
    }


def answers(model: Model, job: Mapping[str, Any]) -> dict[str, Any]:
    """Answer every prompt, the first twice: kernels and experts may be missing at first."""
    vocab, tokens = model.info.vocab_size, job["tokens"]

    def answer(length: int, seed: int, count: int) -> Chunk:
        ids = random_ids({"vocab_size": vocab}, length, seed=seed)
        return model.generate(token_ids=ids, max_tokens=count, ignore_eos=True, temperature=0)

    first, *others = job["prompts"]
    once = answer(first, 1, 2).metrics
    found: dict[str, Any] = {}
    found[f"first_token_{first}_at_first_s"] = once.ttft_s
    before = model.status()
    last = answer(first, 2, tokens)
    flow = model.status().since(before)
    for length in others:
        found[f"first_token_{length}_s"] = answer(length, 3, 2).metrics.ttft_s
    metrics = last.metrics
    found |= {
        f"first_token_{first}_s": metrics.ttft_s,
        "decode_tok_s": metrics.decode_tok_s,
        "link_bytes_per_token": metrics.link_bytes and metrics.link_bytes // (tokens + 1),
        "ssd_bytes_per_token": metrics.ssd_read_bytes and metrics.ssd_read_bytes // (tokens + 1),
        "expert_hit_rate": metrics.expert_hit_rate,
        **{f"{device}_busy": share for device, share in flow.busy.items() if device in _BESIDE},
        "token_ids": list(last.token_ids),
    }
    return found


def save_logits(model: Model, path: str) -> None:
    """Save the logits of a prompt's last rows, from a pass of 64 rows and from a small one."""
    ids = random_ids({"vocab_size": model.info.vocab_size}, _LOGIT_ROWS, seed=5)
    np.save(path, np.concatenate(list(model.logits(ids, first=_LOGIT_ROWS - 12))))


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
            self._filler = self._device.pinned((_THROTTLE_SAMPLE,), np.uint8)
            self._sink = self.alloc(_THROTTLE_SAMPLE)

        def queue(self, source: Any, out: Any, after: Any) -> None:
            super().queue(source, out, after)
            rest = int(source.nbytes * self._times)
            with self._lock:
                while rest > 0:
                    part = min(rest, _THROTTLE_SAMPLE)
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


@contextmanager
def placed_as(fields: Mapping[str, Any]) -> Iterator[None]:
    """Force this placement of weights."""
    from localrt.loading import native, placing

    first_plan = placing.first_plan
    where = {name: Where(place) for name, place in fields["where"].items()}
    known = {"where": where, "kv": tuple(fields["kv"]), "crossing": frozenset(fields["crossing"])}
    known |= {"split": {name: tuple(shares) for name, shares in fields["split"].items()}}
    placement = Placement(**{**fields, **known})

    def plan(request: PlanRequest, rows: int) -> Forecast:
        return replace(first_plan(request, rows), placement=placement)

    with (
        patch.object(placing, "first_plan", plan),
        patch.object(native, "_must_stream", lambda *_: True),
    ):
        yield


if __name__ == "__main__":
    main()
