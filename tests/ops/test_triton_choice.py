"""Which implementation a GPU gets, on a machine that says it has one."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import pytest
import torch

from localrt.errors import OptionError
from localrt.quant.ops import choose

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (8, 9))


def test_triton_runs_packed_weights() -> None:
    ops = choose.make_ops([], device="cuda:1")
    assert (ops.name, ops.device, ops.compute_format) == ("triton", "cuda:1", "packed")


def test_a_chosen_format_is_torchs() -> None:
    ops = choose.make_ops([], device="cuda", compute_format="bf16")
    assert (ops.name, ops.compute_format) == ("torch", "bf16")


def test_gpus_without_bf16_do_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    assert choose.make_ops([], device="cuda").name != "triton"


@pytest.mark.parametrize("bitsandbytes", [True, False])
def test_without_triton(monkeypatch: pytest.MonkeyPatch, bitsandbytes: bool) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(choose, "find_spec", lambda name: bitsandbytes or None)
    ops = choose.make_ops([], device="cuda")
    assert ops.name == ("bitsandbytes" if bitsandbytes else "torch")


def test_there_is_no_third_gpu() -> None:
    with pytest.raises(OptionError, match="there is no GPU 'cuda:2'"):
        choose.make_ops([], device="cuda:2")
