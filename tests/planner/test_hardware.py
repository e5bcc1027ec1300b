import subprocess
import sys
from pathlib import Path

import pytest

from localrt.offload import hardware

INTEL = """processor\t: 0
model name\t: Imaginary Xeon @ 3.00GHz
flags\t\t: fpu sse2 avx2 fma avx512f avx512_vnni amx_int8

processor\t: 1
model name\t: Imaginary Xeon @ 3.00GHz
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\nModel\t\t: Imaginary Pi\n"


def _with_cpuinfo(root: Path, text: str) -> Path:
    (root / "proc").mkdir()
    (root / "proc/cpuinfo").write_text(text)
    return root


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("cpuinfo", "name", "features"),
    [
        (INTEL, "Imaginary Xeon @ 3.00GHz", "avx2 fma avx512f avx512_vnni amx_int8"),
        (ARM, "Imaginary Pi", "neon dotprod i8mm"),
    ],
)
def test_features(tmp_path: Path, cpuinfo: str, name: str, features: str) -> None:
    cpu = hardware.probe(_with_cpuinfo(tmp_path, cpuinfo)).cpu
    assert cpu.name == name
    assert cpu.features == tuple(features.split())


def test_unknown_machine(tmp_path: Path) -> None:
    machine = hardware.probe(tmp_path)
    assert machine.cpu.name
    assert machine.cpu.features == () or sys.platform != "linux"
    assert 1 <= machine.cpu.usable_cores <= machine.cpu.logical_cores
    assert 0 < machine.memory.available <= machine.memory.total
    assert machine.disk is None
    assert machine.gpus == ()


def test_gpus_at_a_glance(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA Imaginary 8000\nIRQ: 42\n")
    assert hardware.probe(tmp_path).gpus == (hardware.Gpu("NVIDIA Imaginary 8000"),)


def test_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpus() == ()  # without a driver
    output = "NVIDIA X, 8192, 8000, 580.1, 12.0\nNVIDIA GB10, [N/A], [N/A], 580.1, 12.1\nodd line\n"
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!{sys.executable}\nprint({output!r})\n")
    command.chmod(0o755)
    first, second = hardware.gpus()
    assert (first.memory_bytes, first.free_bytes) == (8192 << 20, 8000 << 20)
    assert first.compute_capability == "12.0"
    assert second.memory_bytes is None


def test_measure_memory_read() -> None:
    assert hardware.measure_memory_read(1, 16 << 20) > 100e6


def test_imports() -> None:
    code = (
        "import sys; from localrt.offload.hardware import probe; probe();"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
