import json
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
def test_features_are_those_the_kernels_choose_by(
    tmp_path: Path, cpuinfo: str, name: str, features: str
) -> None:
    cpu = hardware.probe(_with_cpuinfo(tmp_path, cpuinfo)).cpu
    assert cpu.name == name
    assert cpu.features == tuple(features.split())


def test_a_machine_that_tells_nothing_is_still_described(tmp_path: Path) -> None:
    machine = hardware.probe(tmp_path)
    assert machine.cpu.name
    assert machine.cpu.features == () or sys.platform == "darwin"
    assert 1 <= machine.cpu.usable_cores <= machine.cpu.logical_cores
    assert 0 < machine.memory.available <= machine.memory.total
    assert machine.disk is None
    assert machine.gpus == ()


def test_a_machine_is_plain_json() -> None:
    machine = hardware.probe()
    assert json.loads(json.dumps(machine.to_dict()))["cpu"]["name"] == machine.cpu.name


def test_the_nvidia_driver_is_named_without_being_called(tmp_path: Path) -> None:
    folder = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t\t NVIDIA Imaginary 8000\nIRQ: 42\n")
    assert hardware.probe(tmp_path).gpus == (hardware.Gpu("NVIDIA Imaginary 8000"),)


def test_nvidia_smi_output_is_read_and_odd_lines_are_left_out() -> None:
    output = "NVIDIA X, 8192, 8000, 580.1, 12.0\nNVIDIA GB10, [N/A], [N/A], 580.1, 12.1\nodd line\n"
    first, second = hardware._parse_nvidia_smi(output)
    assert (first.memory_bytes, first.free_bytes) == (8192 << 20, 8000 << 20)
    assert first.compute_capability == "12.0"
    assert second.memory_bytes is None


def test_without_a_driver_there_are_no_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hardware.gpus() == ()


def test_memory_bandwidth_is_above_that_of_a_disk() -> None:
    assert hardware.measure_memory_read(1, 16 << 20) > 100e6


def test_probing_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from localrt.offload.hardware import probe; probe();"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
