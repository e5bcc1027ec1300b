"""Experts of a layer in two launches, compared with float64. Every expert has its own allocation,
as in a pool of slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.common.random_store import random_packed
from benchmarks.gpu.configs import largest_error
from benchmarks.gpu.exchange import there
from benchmarks.gpu.timing import Check, Values
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.experts import CudaExpertTable
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.tensor import Tensor, upload
from localrt.quant.formats import unpack
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops import experts
from localrt.quant.ops.experts import ExpertSpec, Routing

BOUND = 0.02  # two products, each with 8-bit rows
DISTINCT = 3  # experts with different weights; the others are copies


@dataclass(frozen=True)
class Shape:
    """A layer: experts of ``hidden`` by ``inner``, ``used`` per row."""

    count: int
    used: int
    hidden: int
    inner: int
    format: str
    spec: ExpertSpec = ExpertSpec()  # noqa: RUF009  frozen
    biased: bool = False


GPT_OSS = ExpertSpec(activation="swiglu_oai", limit=7.0)
LARGE = {
    "qwen3-30b-a3b int4-g32": Shape(128, 8, 2048, 768, "int4-g32"),
    "qwen3-30b-a3b q4_k": Shape(128, 8, 2048, 768, "q4_k"),
    "qwen3-30b-a3b nvfp4": Shape(128, 8, 2048, 768, "nvfp4"),
    "qwen3-30b-a3b int8-g32": Shape(128, 8, 2048, 768, "int8-g32"),
    "gpt-oss-20b mxfp4": Shape(32, 4, 2880, 2880, "mxfp4", GPT_OSS, biased=True),
}
SMALL = {"small mxfp4": Shape(4, 2, 64, 32, "mxfp4", GPT_OSS, biased=True)}
ROWS = (1, 4, 16, 64, 512)


def check_grouped(device: str) -> Iterator[Check]:
    """Each shape."""
    cuda = device.startswith("cuda")
    for name, shape in (LARGE if cuda else SMALL).items():
        yield f"experts together {name}", partial(checked, shape, ROWS if cuda else (1, 66), device)
        device_of(device).trim()


def checked(shape: Shape, many: Sequence[int], device: str) -> Values:
    """Compare random experts with float64 for each number of rows, and a row's bits alone and in
    batches.
    """
    layer, ok, values = Layer(shape, device), True, Values(bound=BOUND)
    for rows in many:
        x, routing = layer.inputs(rows), layer.routing(rows)
        got = layer.together(x, routing)
        values[f"relative_error_{rows}"] = error = layer.error(x, routing, got)
        ok &= error < BOUND and bool(np.isfinite(got).all())
    if layer.gpu.is_gpu:
        values["rows_bitwise_equal"] = same = layer.rows_are_equal()
        ok &= same
    return {"ok": ok, **values}


class Layer:
    """Random experts on the device."""

    def __init__(self, shape: Shape, device: str) -> None:
        self.shape, self.gpu = shape, device_of(device)
        self.ops = CudaOps(device=device)
        self.values: list[list[np.ndarray]] = []
        self.table = CudaExpertTable(shape.count)
        distinct = [self._tiles(seed) for seed in range(min(DISTINCT, shape.count))]
        rng = np.random.default_rng(9)
        sizes = (2 * shape.inner, shape.hidden)
        biases = [rng.standard_normal(n).astype(np.float32) for n in sizes]
        self.biases = biases if shape.biased else [np.zeros(n, np.float32) for n in sizes]
        for number in range(shape.count):
            gate, up, down = distinct[number % len(distinct)]
            both = (2 * shape.inner, shape.hidden)
            self.table.put(number, experts.ExpertWeights(
                gate_up=self.ops.weight(both, map(self._elsewhere, (gate, up))),
                down=self.ops.weight((shape.hidden, shape.inner), [self._elsewhere(down)]),
                gate_up_bias=self.ops.vector(biases[0]) if shape.biased else None,
                down_bias=self.ops.vector(biases[1]) if shape.biased else None,
            ))  # fmt: skip

    def _tiles(self, seed: int) -> list[Any]:
        shape = self.shape
        sizes = [(shape.inner, shape.hidden)] * 2 + [(shape.hidden, shape.inner)]
        packed = [random_packed(shape.format, *s, seed=3 * seed + i) for i, s in enumerate(sizes)]
        self.values.append([unpack(tensor).astype(np.float64) for tensor in packed])
        return [tile_tensor(tensor) for tensor in packed]

    def _elsewhere(self, tiles: Any) -> Any:
        return replace(tiles, data=upload(np.asarray(tiles.data), self.gpu))

    def inputs(self, rows: int) -> Tensor:
        return there(torch.randn(rows, self.shape.hidden).bfloat16(), self.gpu)

    def routing(self, rows: int) -> Routing:
        """Random experts for each row; all different if rows are few."""
        rng = np.random.default_rng(0)
        count, used = self.shape.count, self.shape.used
        chosen = rng.permuted(np.tile(np.arange(count, dtype=np.int32), (rows, 1)), axis=1)
        if rows * used <= count:
            chosen[:, :used] = rng.permutation(count)[: rows * used].reshape(rows, used)
        scores = np.full((rows, used), 1 / used, np.float32)
        return Routing(chosen[:, :used], scores, scores)

    def together(self, x: Tensor, routing: Routing) -> np.ndarray:
        """All slots of the routing."""
        slots = self.ops.expert_slots(x, routing)
        slots.put(np.full(slots.shape, np.nan, np.float32))
        self.ops.run_experts(x, routing, self.table, self.shape.spec, slots)
        return slots.to_host()

    def error(self, x: Tensor, routing: Routing, slots: np.ndarray) -> float:
        """Largest error over a few evenly spaced rows."""
        inputs, used = x.to_host().astype(np.float64), routing.used
        rows = np.unique(np.linspace(0, len(x) - 1, 4).astype(int))
        got = slots.reshape(len(x), used, -1)[rows].astype(np.float64)
        chosen = routing.chosen.reshape(len(x), used)
        wanted = np.array([[self.expected(inputs[r], int(e)) for e in chosen[r]] for r in rows])
        return largest_error(got, wanted)

    def expected(self, x: np.ndarray, expert: int) -> np.ndarray:
        gate, up, down = self.values[expert % len(self.values)]
        first, second = np.split(self.biases[0].astype(np.float64), 2)
        g, u = gate @ x + first, up @ x + second
        spec = self.shape.spec
        if spec.activation == "swiglu_oai":
            g, u = np.minimum(g, spec.limit), np.clip(u, -spec.limit, spec.limit)
            inner = g / (1 + np.exp(-1.702 * g)) * (u + 1)
        else:
            inner = g / (1 + np.exp(-g)) * u
        return np.asarray(down @ inner + self.biases[1])

    def rows_are_equal(self) -> bool:
        """Whether a row's bits are the same in any batch."""
        x, routing, used = self.inputs(64), self.routing(64), self.shape.used
        whole = self.together(x, routing)
        same = True
        for rows in (1, 2, 7, 33):
            first = 64 - rows
            part = Routing(routing.experts[first:], routing.scores[first:], routing.weights[first:])
            same &= np.array_equal(self.together(x[first:], part), whole[first * used :])
        return bool(same)
