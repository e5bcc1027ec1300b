"""What steps stand on: the structs of the kernels, shared memory, mathematics, the processor."""

from __future__ import annotations

import ctypes
import hashlib
import math
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt import system
from localrt.common.option_names import on_command_line, spelled
from localrt.quant import choose
from localrt.quant.cpu import abi
from localrt.quant.cuda import driver as devices
from localrt.quant.ops.arrays import Regions
from localrt.quant.ops.attention import AttentionSpec
from localrt.quant.ops.mathematics import exp, log, power, turns

HEADER = Path(abi.__file__).parent / "csrc" / "abi.h"


def places(struct: type[ctypes.Structure]) -> list[int]:
    return [getattr(struct, field[0]).offset for field in struct._fields_]


def test_layout_is_the_compilers(tmp_path: Path) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    structs = abi.CPP.structs
    lines = [f'#include "{HEADER}"', "#include <cstddef>", "#include <cstdio>", "int main() {"]
    for name, struct in structs.items():
        offsets = "".join(f", (int)offsetof({name}, {field[0]})" for field in struct._fields_)
        text = "%d " * (1 + len(struct._fields_)) + "\\n"
        lines.append(f'printf("{text}", (int)sizeof({name}){offsets});')
    source, program = tmp_path / "layout.cpp", tmp_path / "layout"
    source.write_text("\n".join([*lines, "}"]))
    subprocess.run([compiler, "-std=c++17", source, "-o", program], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert len(structs) > 20
    for (name, struct), line in zip(structs.items(), printed.splitlines(), strict=True):
        assert [ctypes.sizeof(struct), *places(struct)] == list(map(int, line.split())), name


WANTED = st.tuples(st.integers(0, 200_000), st.integers(0, 100), st.booleans())


@given(st.lists(WANTED, max_size=40))
def test_overlaps(wanted: list[tuple[int, int, bool]]) -> None:
    """Arrays keep what is written to them, whether they were cut at once, later or never."""
    regions = Regions()
    arrays: list[npt.NDArray[np.uint8]] = []
    for number, (nbytes, percent, later) in enumerate(wanted, start=1):
        taken = regions.take(nbytes)
        assert taken.size == nbytes
        taken[:] = number
        if later and arrays:
            arrays[0] = regions.cut(arrays[0], arrays[0].size // 2)
        arrays.append(regions.cut(taken, nbytes * percent // 100))
    for number, array in enumerate(arrays, start=1):
        assert (array == number).all()


GRID = np.linspace(-700, 700, 4001)
ANGLES = np.arange(0, 1 << 20, 37, dtype=np.float32) * np.float32(0.7)


def ulps(found: np.ndarray, wanted: list[float]) -> float:
    """The largest error in units of the last place."""
    return float((np.abs(found - wanted) / np.spacing(np.abs(wanted))).max())


def test_accuracy() -> None:
    assert ulps(exp(GRID), [math.exp(x) for x in GRID]) < 4
    assert ulps(exp(GRID / 700), [math.exp(x) for x in GRID / 700]) < 4
    positive = exp(GRID)
    assert ulps(log(positive), [math.log(x) for x in positive]) < 4
    assert np.abs(power(5e5, -GRID / 700) / np.power(5e5, -GRID / 700) - 1).max() < 1e-14
    cos, sin = turns(ANGLES)
    angles = ANGLES.astype(np.float64)
    assert np.abs(cos - np.cos(angles)).max() < 2**-24
    assert np.abs(sin - np.sin(angles)).max() < 2**-24


def test_bits() -> None:
    """The same on every machine."""
    values = [exp(GRID), log(exp(GRID)), power(1e6, GRID / 700), *turns(ANGLES)]
    digest = hashlib.sha256(b"".join(each.tobytes() for each in values)).hexdigest()
    assert digest[:16] == "d8703ab224a4b80c"


PLAIN = AttentionSpec(heads=1, kv_heads=1, head_dim=64, scale=1.0, eps=1e-6, rope=None)
STREAMS = AttentionSpec(
    heads=1, kv_heads=1, head_dim=64, scale=1.0, eps=1e-6, rope=None, needs="StreamOps"
)


def test_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
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
    torch = pytest.importorskip("torch")
    from localrt.quant.reference.ops import free_gpu_memory

    known = {"mem_get_info": (100, 1000), "memory_reserved": 600, "memory_allocated": 250}
    for name, value in known.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert free_gpu_memory(torch.device("cuda", 0)) == 450
    assert free_gpu_memory(torch.device("cpu")) is None
