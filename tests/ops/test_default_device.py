"""Which processor a model gets that asks for none, on a machine that says it has a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from localrt import system
from localrt.common.option_names import on_command_line, spelled
from localrt.quant import choose
from localrt.quant.cuda import driver as devices
from localrt.quant.ops.attention import AttentionSpec

torch = pytest.importorskip("torch")
PLAIN = AttentionSpec(heads=1, kv_heads=1, head_dim=64, scale=1.0, eps=1e-6, rope=None)
STREAMS = AttentionSpec(
    heads=1, kv_heads=1, head_dim=64, scale=1.0, eps=1e-6, rope=None, needs="StreamOps"
)


def test_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("localrt.quant.cpu.ops")
    monkeypatch.setattr(choose, "_default_device", lambda: "cuda")
    monkeypatch.setattr(devices, "device_of", lambda name: SimpleNamespace(capability=(8, 9)))
    ops = choose.make_ops([PLAIN, STREAMS])
    assert (ops.name, ops.device) == ("native", "cpu")
    why = spelled(choose.why_not_our_kernels(ops, [PLAIN, STREAMS], "auto"), on_command_line)
    assert why.startswith("the GPU is not used: this model needs localrt's own kernels")
    assert "--device cuda computes with torch" in why
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(devices, "count_gpus", lambda: 1)
    assert choose.make_ops([STREAMS], device="cuda", compute_format="bf16").name == "torch"


def test_a_driver_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "has_nvidia_driver", lambda: False)
    assert choose._default_device() == "cpu"
    monkeypatch.setattr(system, "has_nvidia_driver", lambda: True)
    monkeypatch.setattr(devices, "count_gpus", lambda: 1)
    assert choose._default_device() == "cuda"
    monkeypatch.setattr(devices, "count_gpus", lambda: 0)
    assert choose._default_device() == "cpu"


def test_free_memory_has_what_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else another sequence would count as another program's need."""
    from localrt.quant.reference.ops import free_gpu_memory

    known = {"mem_get_info": (100, 1000), "memory_reserved": 600, "memory_allocated": 250}
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_gpu_memory(torch.device("cuda", 0)) == 450
    assert free_gpu_memory(torch.device("cpu")) is None
