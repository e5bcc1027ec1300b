"""Layers of experts in RAM, with random weights, to time their steps one after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from experts_gguf import MixtureShape
from random_packed import random_packed

from localrt.quant.formats.tiled import TiledTensor
from localrt.quant.ops.experts import ExpertSpec, ExpertWeights, RouterSpec, RouterWeights
from localrt.quant.ops.native.ops import NativeOps

__all__ = ["Layers"]


class Layers:
    """``count`` layers of a shape: router and experts, each expert in memory of its own."""

    def __init__(self, ops: NativeOps, shape: MixtureShape, count: int) -> None:
        self.ops, self.shape = ops, shape
        self._slots = np.empty((0, 0), np.float32)
        self.spec = RouterSpec(count=shape.count, used=shape.used, eps=1e-6)
        hidden, inner = shape.hidden, shape.inner
        self._tiles = {
            name: ops.tile(replace(random_packed(shape.experts, rows, columns, seed=1), name=name))
            for name, rows, columns in (
                ("gate", inner, hidden),
                ("up", inner, hidden),
                ("down", hidden, inner),
            )
        }
        self.routers = [self._router(layer) for layer in range(count)]
        self.tables = [ops.expert_table(shape.count) for _ in range(count)]
        for table in self.tables:
            for expert in range(shape.count):
                table.put(expert, self._expert())

    def choose(self, rows: int, times: int) -> list[list[tuple[Any, Any]]]:
        """Inputs of ``times`` passes of ``rows``, and the choices of each layer."""
        rng = np.random.default_rng(rows)
        passes = []
        for _ in range(times):
            x = rng.standard_normal((rows, self.shape.hidden)).astype(np.float32)
            routed = [self.ops.norm_route(x, router, self.spec) for router in self.routers]
            passes.append([(x, part) for part in routed])
        return passes

    def run_experts(self, passes: list[list[tuple[Any, Any]]]) -> None:
        """The experts of every layer of every pass."""
        ops, spec = self.ops, ExpertSpec(activation=self.shape.activation)
        normed, routing = passes[0][0][1]
        shape = (routing.weights.size, normed.shape[1])
        if self._slots.shape != shape:
            self._slots = np.empty(shape, np.float32)
        slots = self._slots
        for layers in passes:
            for (_, (normed, routing)), table in zip(layers, self.tables, strict=True):
                ops.run_experts(normed, routing, table, spec, slots)

    def run_steps(self, passes: list[list[tuple[Any, Any]]]) -> None:
        """The same from norm to sum."""
        ops, spec = self.ops, ExpertSpec(activation=self.shape.activation)
        for layers in passes:
            for (x, _), table, router in zip(layers, self.tables, self.routers, strict=True):
                normed, routing = ops.norm_route(x, router, self.spec)
                slots = ops.expert_slots(normed, routing)
                ops.run_experts(normed, routing, table, spec, slots)
                y = ops.combine_experts(slots, routing, None)
                ops.add(normed, y)

    def _router(self, seed: int) -> RouterWeights:
        shape = self.shape
        gate = random_packed("f32", shape.count, shape.hidden)
        rng = np.random.default_rng(seed)
        values = rng.standard_normal((shape.count, shape.hidden)) / shape.hidden**0.5
        gate.data.view(np.float32)[:] = values
        return RouterWeights(
            norm=self.ops.vector(np.ones(shape.hidden, np.float32)),
            gate=self.ops.weight((shape.count, shape.hidden), [gate]),
        )

    def _expert(self) -> ExpertWeights:
        tiles = {name: _copied(tensor) for name, tensor in self._tiles.items()}
        hidden, inner = self.shape.hidden, self.shape.inner
        biased, vector = self.shape.biased, self.ops.vector
        return ExpertWeights(
            gate_up=self.ops.weight((2 * inner, hidden), [tiles["gate"], tiles["up"]]),
            down=self.ops.weight((hidden, inner), [tiles["down"]]),
            gate_up_bias=vector(np.zeros(2 * inner, np.float32)) if biased else None,
            down_bias=vector(np.zeros(hidden, np.float32)) if biased else None,
        )


def _copied(tensor: TiledTensor) -> TiledTensor:
    return replace(tensor, data=tensor.data.copy())
