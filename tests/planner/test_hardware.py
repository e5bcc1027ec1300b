import os
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
    assert hardware.probe(tmp_path).gpus == (hardware.GpuFacts("NVIDIA Imaginary 8000"),)


@pytest.mark.skipif(os.name == "nt", reason="a script as the driver's program")
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


PCI_IDS = """# a list
1002  Advanced Micro Devices, Inc. [AMD/ATI]
\t15bf  Phoenix1
# a comment within it
\t7480  Navi 33 [Radeon RX 7600/7600 XT/7600M XT]
\t\t1043 05e4  Dual
8086  Intel Corporation
\t56a0  DG2 [Arc A770]
"""
APU = {"vendor": "0x1002", "device": "0x15bf", "mem_info_vram_total": str(512 << 20)}
RADEON = {
    **{"vendor": "0x1002", "device": "0x7480"},
    **{"mem_info_vram_total": str(8 << 30), "mem_info_vram_used": str(1 << 30)},
}
RX = "AMD Radeon RX 7600/7600 XT/7600M XT"


@pytest.mark.parametrize(
    ("cards", "listed", "expected"),
    [
        ({}, True, []),
        ({"card1": RADEON}, True, [hardware.GpuFacts(RX, 8 << 30, 7 << 30)]),
        ({"card1": RADEON}, False, [hardware.GpuFacts("AMD GPU 1002:7480", 8 << 30, 7 << 30)]),
        ({"card0": APU, "card1": RADEON}, True, [RX, "AMD Phoenix1"]),
        ({"card0": {"vendor": "0x8086", "device": "0x56a0"}}, True, ["Intel Arc A770"]),
        ({"card0": {"vendor": "0x8086", "device": "0x1111"}}, True, ["Intel GPU 8086:1111"]),
        ({"card0": {"vendor": "0x10de", "device": "0x2882"}}, True, []),  # NVIDIA's own driver's
        ({"card0": {}, "card0-DP-1": RADEON}, True, []),
    ],
)
def test_gpus_of_other_makers(
    tmp_path: Path, cards: dict[str, dict[str, str]], listed: bool, expected: list[object]
) -> None:
    for card, files in cards.items():
        folder = tmp_path / "sys/class/drm" / card / "device"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
    if listed:
        (tmp_path / "usr/share/hwdata").mkdir(parents=True)
        (tmp_path / "usr/share/hwdata/pci.ids").write_text(PCI_IDS)
    own = set(hardware.other_gpus(tmp_path / "nothing"))  # as Windows and macOS list them
    found = [gpu for gpu in hardware.probe(tmp_path).other_gpus if gpu not in own]
    assert expected in (found, [gpu.name for gpu in found])


def test_measure_memory_read() -> None:
    assert hardware.measure_memory_read(1, 16 << 20) > 100e6


def test_imports() -> None:
    code = (
        "import sys; from localrt.offload.hardware import probe; probe();"
        "assert not {'torch', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
