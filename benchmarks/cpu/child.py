"""One process of ``python -m benchmarks.cpu``: localrt's engine on one file, one measurement.

It runs with its job as JSON. Sessions are extended without a sampler, as ``llama-bench`` does.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare.child import force_isa
from localrt.loading.load import load_model
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import read_config
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.protocol import implementation

READ_BYTES = 256 << 20
_OF_EXPERT = re.compile(r"model\.layers\.(\d+)\..*\bexperts\.\d")


def main(job: dict[str, Any]) -> dict[str, float]:
    """The measurements; ``value`` is the one to compare."""
    force_isa(job["isa"])
    job["behind"] = job.get("behind", 0)
    room = job["behind"] + job["tokens"] + 256
    options = LoadOptions(
        engine="native", ctx=room, threads=job["threads"], kv_format=job.get("kv")
    )
    with closing(load_model(Path(job["model"]), options).engine) as engine:
        (ops,) = engine.weights.implementations
        kernels = implementation(ops, NativeOps)
        assert kernels.isa == job["isa"]
        session = engine.session(room)
        session.extend(_ids(64))  # warms up
        session.trim(0)
        if job["behind"]:
            session.extend(_ids(job["behind"]))
        return KINDS[job["kind"]](session, kernels, job)


def _ids(count: int) -> list[int]:
    return [100 + (number * 7919 + 13) % 40_000 for number in range(count)]


def _time(call: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def _rate(session: Any, job: dict[str, Any], rows: int) -> float:
    """Tokens per second, best of ``repeats``, behind the context with ``rows`` per pass."""
    ids = _ids(job["tokens"])

    def run() -> None:
        session.trim(job["behind"])
        for first in range(0, len(ids), rows):
            session.extend(ids[first : first + rows])

    return len(ids) / min(_time(run) for _ in range(job["repeats"]))


def _prompt(session: Any, ops: NativeOps, job: dict[str, Any]) -> dict[str, float]:
    return {"value": _rate(session, job, job["tokens"])}


def _decode(session: Any, ops: NativeOps, job: dict[str, Any]) -> dict[str, float]:
    """Decode speed, its share of the plain read rate measured before and after, and how often
    threads meet for a token.
    """
    data = np.ones(READ_BYTES, np.uint8)

    def read_s() -> float:
        return min(_time(ops.read_all, data) for _ in range(5))

    before, met = read_s(), ops.meetings()
    rate = _rate(session, job, 1)
    meetings = (ops.meetings() - met) / (job["tokens"] * job["repeats"])
    read = (before + read_s()) / 2
    of_floor = rate * _token_nbytes(job["model"], ops) * read / READ_BYTES
    return {"value": rate, "of_floor": of_floor, "meetings": meetings}


def _token_nbytes(path: str, ops: NativeOps) -> int:
    """Weight bytes read per token; an untied embedding's are not counted, nor what is cached."""
    with closing(open_checkpoint(Path(path))) as checkpoint:
        tensors, config = dict(checkpoint.tensors), read_config(checkpoint)
    if "lm_head.weight" in tensors:
        del tensors["model.embed_tokens.weight"]
    total = 0.0
    for info in tensors.values():
        if len(info.shape) != 2:
            continue
        share = 1.0
        if found := _OF_EXPERT.match(info.name):
            mixture = config.mixture(int(found[1]))
            share = mixture.router.used / mixture.router.count if mixture else 1.0
        total += share * ops.weight_nbytes((info.shape[0], info.shape[1]), info.format)
    return round(total)


KINDS = {"prompt": _prompt, "decode": _decode}

if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
