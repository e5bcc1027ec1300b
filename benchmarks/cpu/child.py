"""One process of ``python -m benchmarks.cpu``: localrt's engine on one file, one measurement.

It runs with its job as JSON. Sessions are extended without a sampler, as ``llama-bench`` does.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.compare.child import force_isa
from localrt.loading.options import LoadOptions
from localrt.loading.parts import load_parts
from localrt.models.checkpoints import open_checkpoint
from localrt.quant.cpu.ops import NativeOps
from localrt.speculative.tree import TokenTree

HELD = 64  # tokens before a pass of few rows
ROUNDS = 40
READ_BYTES = 256 << 20
_KEPT = ("lrt_create", "lrt_destroy", "lrt_isa", "lrt_abi_version")


def main(job: dict[str, Any]) -> dict[str, Any]:
    """What was measured, in plain values; ``value`` is what turns compare."""
    force_isa(job["isa"])
    options = LoadOptions(engine="native", ctx=job["tokens"] + 256, threads=job["threads"])
    path = Path(job["model"])
    with closing(load_parts(path, options).engine) as engine:
        (ops,) = engine.weights.implementations
        assert isinstance(ops, NativeOps), "the file runs on the CPU"
        session = engine.session(job["tokens"] + 256)
        session.extend(_ids(HELD))
        found = _KINDS[job["kind"]](session, ops, job)
        if "floor_bytes_s" in found:
            floor = found["floor_bytes_s"]
            found["of_floor"] = found["value"] * _token_nbytes(path, ops) / floor
        return {**found, "isa": ops.isa}


def _ids(count: int) -> list[int]:
    return [100 + (number * 7919 + 13) % 40_000 for number in range(count)]


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _prompt(session: Any, ops: NativeOps, job: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second of the best of ``repeats`` prompts."""

    def read() -> None:
        session.trim(0)
        session.extend(_ids(job["tokens"]))

    return {"value": job["tokens"] / min(_time(read) for _ in range(job["repeats"]))}


def _decode(session: Any, ops: NativeOps, job: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second, from an empty context; plain reading is measured before and after."""
    data = np.ones(READ_BYTES, np.uint8)

    def read() -> float:
        return min(_time(lambda: ops.read_all(data)) for _ in range(5))

    def decode() -> None:
        session.trim(0)
        for token in _ids(job["tokens"]):
            session.extend([token])

    before, seconds, after = read(), _time(decode), read()
    floor = READ_BYTES / statistics.mean((before, after))
    return {"value": job["tokens"] / seconds, "floor_bytes_s": floor}


def _tree(session: Any, ops: NativeOps, job: dict[str, Any]) -> dict[str, Any]:
    """How many passes of one row a pass takes that verifies draft tokens: ``tokens`` rows."""
    drafts = job["tokens"] - 1
    scores = [-1.0 - node for node in range(drafts)]
    tree = TokenTree.of(_ids(drafts), list(range(-1, drafts - 1)), scores, "fixed")

    def verify() -> None:
        session.extend_tree(7, tree)
        session.keep([0])

    taken: dict[str, list[float]] = {"one": [], "tree": []}
    for _ in range(ROUNDS):
        session.trim(HELD)
        taken["one"].append(_time(lambda: session.extend([7])))
        taken["tree"].append(_time(verify))
    return {"value": statistics.median(taken["tree"]) / statistics.median(taken["one"])}


def _outside(session: Any, ops: NativeOps, job: dict[str, Any]) -> dict[str, Any]:
    """The share of a token that Python and the calls take: what is left if no kernel computes."""

    def step() -> float:
        session.trim(HELD)
        return statistics.median(_time(lambda: session.extend([7])) for _ in range(ROUNDS))

    step()
    whole = step()
    ops._api = _Idle(ops._api)  # type: ignore[assignment]
    step()
    rest = step()
    return {"value": rest / whole, "token_s": whole, "outside_s": rest}


class _Idle:
    """The library, but each step is a C function that returns at once. Its result is no use."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name not in _KEPT:
            signature = function.restype, function.argtypes
            function = self._library._FuncPtr(("lrt_abi_version", self._library))
            function.restype, function.argtypes = signature
        setattr(self, name, function)
        return function


def _token_nbytes(path: Path, ops: NativeOps) -> int:
    """Bytes of weights that a token reads; of an embedding with a head besides, hardly any."""
    with closing(open_checkpoint(path)) as checkpoint:
        tensors = dict(checkpoint.tensors)
    if "lm_head.weight" in tensors:
        del tensors["model.embed_tokens.weight"]
    matrices = [info for info in tensors.values() if len(info.shape) == 2]
    return sum(ops.weight_nbytes((i.shape[0], i.shape[1]), i.format) for i in matrices)


_KINDS = {"prompt": _prompt, "decode": _decode, "tree": _tree, "outside": _outside}

if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
