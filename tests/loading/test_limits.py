"""Limits of cores and CPU time that change while a model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.common.cores import find_cores, giving_way
from localrt.quant.cpu import ops as native_ops
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cpu.scales import NativeSearch
from localrt.quant.formats import CODECS
from localrt.quant.ops.protocol import MlpSpec
from tests.conftest import needs_kernels
from tests.inside import engine_of
from tests.loading.test_gentle import idle_threads, linux
from tests.ops.test_native_experts import WAYS, fill, inputs, routing, run
from tests.ops.test_native_mlp import HIDDEN, build
from tests.test_system import ALONE_8, V2, machine
from tests.waits import wait_for

pytestmark = needs_kernels

QUOTA = f"{V2}/box/cpu.max"


class Limits:
    """Of a process on eight cores, in a control group made of files."""

    def __init__(self, root: Path) -> None:
        self.root, self.allowed = root, set(range(8))
        machine(root, {**ALONE_8, "proc/self/cgroup": "0::/box"})
        self.quota("max")

    def quota(self, quota: object) -> None:
        machine(self.root, {QUOTA: f"{quota} 100000"})

    def threads(self) -> int:
        return find_cores(self.root, self.allowed).threads


@pytest.fixture
def limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Limits:
    found = Limits(tmp_path)
    monkeypatch.setattr(native_ops, "_RECHECK", 0.0)
    monkeypatch.setattr(native_ops, "default_threads", found.threads)
    return found


@pytest.mark.parametrize("options", [{}, {"shrinkable": True}], ids=["resident", "streamed"])
def test_an_engine_follows_them(tiny_folder: Path, limits: Limits, options: dict[str, Any]) -> None:
    def answer(model: localrt.Model) -> list[int]:
        return list(model.generate("one two", max_tokens=6, temperature=0).token_ids)

    with localrt.load(tiny_folder, threads=3, **options) as model:
        (fixed,), expected = engine_of(model).weights.implementations, answer(model)
        limits.quota(100_000)
        assert answer(model) == expected
        assert fixed.threads == 3
    limits.quota("max")
    with localrt.load(tiny_folder, **options) as model:
        (ops,) = engine_of(model).weights.implementations
        assert ops.threads == 8
        for quota, threads in [(100_000, 1), (350_000, 4), (50_000, 1), ("max", 8), (200_000, 2)]:
            limits.quota(quota)
            assert answer(model) == expected
            assert ops.threads == threads
        limits.allowed = {1}  # cores taken away
        assert answer(model) == expected
        assert ops.threads == 1


@linux
def test_new_threads_give_way_like_the_old(limits: Limits) -> None:
    before = idle_threads()
    with giving_way("gentle") as thread:
        ops = thread.submit(NativeOps).result()
        limits.quota(300_000)
        ops.follow_limits()  # here, they would not
        assert ops.threads == 8
        thread.submit(ops.follow_limits).result()
        assert ops.threads == 3
        wait_for(lambda: len(idle_threads() - before) == 3)


def mlp(ops: NativeOps) -> None:
    x = np.ones((2, HIDDEN), np.float32)
    spec = MlpSpec(activation="silu", eps=1e-6)
    ops.norm_gated_mlp(x, build(ops, "q4_k", "q4_k", "q6_k", 0), spec)


def experts(ops: NativeOps) -> None:
    run(ops, fill(ops, [WAYS["side by side"]] * 4), inputs(2), routing(2, count=4))


def search(ops: NativeOps) -> None:
    codec = CODECS["int4-g32"]
    NativeSearch(ops)(codec, np.ones((10, codec.format.block), np.float32))


@pytest.mark.parametrize("step", [mlp, experts, search])
def test_steps_outside_of_a_pass_on_the_cpu(
    step: Callable[[NativeOps], None], limits: Limits
) -> None:
    """Layers of a pass that begins on a GPU; quantizing."""
    ops = NativeOps()
    limits.quota(200_000)
    step(ops)
    assert ops.threads == 2
