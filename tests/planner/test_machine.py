"""This PC: its processor, GPUs and rates, as found, measured, given or typical."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localrt.common.errors import OptionError
from localrt.common.settings import Settings
from localrt.offload import hardware
from localrt.offload.reading.disk_speed import DiskProfile
from localrt.offload.reading.files import ReadMode
from localrt.planning import measure
from localrt.planning.machine import (
    GPUS,
    KernelRate,
    find_gpu,
    parse_gpu,
    typical_machine,
)
from localrt.planning.measure import machine_profile
from localrt.quant.cpu.abi import find_library


def test_kernel_rate() -> None:
    rate = KernelRate((1, 4, 64), (1e-11, 2e-11, 8e-11))
    assert rate.at(1) == 1e-11
    assert rate.at(4) == 2e-11
    assert 1e-11 < rate.at(2) < 2e-11
    assert rate.at(128) == pytest.approx(16e-11)
    with pytest.raises(ValueError, match="ascend"):
        KernelRate((4, 1), (1.0, 1.0))


def test_unmeasured_format() -> None:
    profile = typical_machine()
    four, eight = profile.kernel("nf4").at(1), profile.kernel("int8-g32").at(1)
    assert profile.kernel("q4_k").at(1) == profile.kernels["q4_k"].at(1)
    assert four == pytest.approx(profile.kernels["int4-g32"].at(1) * 4.25 / 4.5, rel=0.01)
    assert eight > 1.7 * four
    assert profile.kernel("nf4").at(512) == pytest.approx(profile.kernel("q4_k").at(512))


def test_find_gpu() -> None:
    assert find_gpu("NVIDIA GeForce RTX 4060") == GPUS["RTX 4060 8GB"]
    assert find_gpu("NVIDIA GeForce RTX 4060 Laptop GPU") == GPUS["RTX 4060 Laptop 8GB"]
    assert find_gpu("3060") == GPUS["RTX 3060 12GB"]
    assert find_gpu("rtx4070ti super") == GPUS["RTX 4070 Ti Super 16GB"]
    assert find_gpu("4070M") == find_gpu("RTX 4070 Mobile") == GPUS["RTX 4070 Laptop 8GB"]
    # A driver says the memory beside the name.
    assert find_gpu("NVIDIA GeForce RTX 5060 Ti", 8 << 30) == GPUS["RTX 5060 Ti 8GB"]
    assert find_gpu("NVIDIA GeForce RTX 5060 Ti") == GPUS["RTX 5060 Ti 16GB"]
    for other in ("NVIDIA GeForce RTX 4090 Ti", "RTX 4050 SUPER", "RTX 9999", "H200", ""):
        assert find_gpu(other) is None
    assert find_gpu("RTX 4060 16GB") is None
    for name, gpu in GPUS.items():
        for called in (name, f"NVIDIA GeForce {name} GPU", name.replace(" Laptop", " Mobile")):
            assert find_gpu(called) == gpu
        assert 2 << 30 <= gpu.vram_bytes <= 32 << 30
        assert 60e9 < gpu.bytes_s < 2e12


def test_virtual_gpu() -> None:
    gpu = parse_gpu("virtual:8GB@12GB/s,256GB/s,20TFLOPS")
    assert (gpu.vram_bytes, gpu.link_bytes_s) == (8_000_000_000, 12e9)
    assert (gpu.profile.bytes_s, gpu.profile.flops) == (256e9, 20e12)
    for bad in ("virtual:8GB", "virtual:8GB@12GB,1GB/s,1TFLOPS", "virtual:1GB@1GB/s,1GB/s,fast"):
        with pytest.raises(OptionError):
            parse_gpu(bad)
    with pytest.raises(OptionError, match="from GTX 1630 to RTX 5090"):
        parse_gpu("Voodoo 2")
    with pytest.raises(OptionError, match=r"did you mean .*RTX 4060"):
        parse_gpu("RTX 4065")


INTEL = """processor\t: 0
model name\t: Imaginary Xeon @ 3.00GHz
flags\t\t: fpu sse2 avx2 fma avx512f avx512_vnni amx_int8

processor\t: 1
model name\t: Imaginary Xeon @ 3.00GHz
flags\t\t: fpu
"""
ARM = "processor\t: 0\nFeatures\t: fp asimd asimddp i8mm\nModel\t\t: Imaginary Pi\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("cpuinfo", "name", "features"),
    [
        (INTEL, "Imaginary Xeon @ 3.00GHz", "avx2 fma avx512f avx512_vnni amx_int8"),
        (ARM, "Imaginary Pi", "neon dotprod i8mm"),
    ],
)
def test_features(tmp_path: Path, cpuinfo: str, name: str, features: str) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(cpuinfo)
    cpu = hardware.probe(tmp_path).cpu
    assert cpu.name == name
    assert cpu.features == tuple(features.split())


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
"""
APU = {"vendor": "0x1002", "device": "0x15bf", "mem_info_vram_total": str(512 << 20)}
RADEON = {
    **{"vendor": "0x1002", "device": "0x7480"},
    **{"mem_info_vram_total": str(8 << 30), "mem_info_vram_used": str(1 << 30)},
}
RX = "AMD Radeon RX 7600/7600 XT/7600M XT"


@pytest.mark.parametrize(
    ("cards", "expected"),
    [
        ({"card1": RADEON}, [hardware.GpuFacts(RX, 8 << 30, 7 << 30)]),
        ({"card0": APU, "card1": RADEON}, [RX, "AMD Phoenix1"]),
        ({"card0": {"vendor": "0x8086", "device": "0x56a0"}}, ["Intel GPU 8086:56a0"]),
        ({"card0": {"vendor": "0x10de", "device": "0x2882"}}, []),  # NVIDIA's own driver's
    ],
)
def test_gpus_of_other_makers(
    tmp_path: Path, cards: dict[str, dict[str, str]], expected: list[object]
) -> None:
    for card, files in cards.items():
        folder = tmp_path / "sys/class/drm" / card / "device"
        folder.mkdir(parents=True)
        for name, text in files.items():
            (folder / name).write_text(f"{text}\n")
    (tmp_path / "usr/share/hwdata").mkdir(parents=True)
    (tmp_path / "usr/share/hwdata/pci.ids").write_text(PCI_IDS)
    own = set(hardware.other_gpus(tmp_path / "nothing"))  # as Windows and macOS list them
    found = [gpu for gpu in hardware.probe(tmp_path).other_gpus if gpu not in own]
    assert expected in (found, [gpu.name for gpu in found])


PROFILE = DiskProfile(ReadMode(direct=True, threads=3, block=1 << 20), 2e9, 1e-10)


class Measured:
    """What was measured, in order; each call is quick and its result made up."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.files: list[str] = []
        self.busy, self.disk, self.cpu = False, PROFILE, "cpu"
        monkeypatch.setattr(measure, "DEFAULT_FORMATS", ("q8_0",))
        monkeypatch.setattr(measure, "is_busy", lambda: self.busy)
        monkeypatch.setattr(measure, "measure_disk", self._disk)
        monkeypatch.setattr(measure, "measure_kernel", self._kernel)
        for name, value in (("memory", 3e10), ("call", 1e-5), ("attention", [1e-10, 1e-11])):
            monkeypatch.setattr(measure, f"_measure_{name}", lambda *_, value=value: value)
        monkeypatch.setattr(measure, "_SAMPLE_BYTES", 4 << 20)
        monkeypatch.setattr(hardware, "identity", lambda: [self.cpu])
        monkeypatch.setattr(subprocess, "run", _refuse)

    def _disk(self, paths: list[Path], **_: Any) -> DiskProfile:
        self.calls.append("disk")
        self.files = [path.name for path in paths]
        return self.disk

    def _kernel(self, ops: object, name: str, size: int) -> list[float]:
        self.calls.append(name)
        return [1e-12 * number for number in range(1, 8)]

    def since(self) -> list[str]:
        """What was measured since the last call."""
        calls, self.calls = self.calls, []
        return calls


def _refuse(*_: Any, **__: Any) -> None:
    raise OSError("not here")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Measured:
    if find_library() is None:
        pytest.skip("the CPU kernels are not built")
    return Measured(monkeypatch)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environment({"LOCALRT_CACHE": str(tmp_path / "cache")})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store"
    folder.mkdir()
    for name, size in (("b.safetensors", 2 << 20), ("a.safetensors", 1 << 20), ("m.json", 10)):
        (folder / name).write_bytes(b"x" * size)
    return folder


def test_measured_once(settings: Settings, measured: Measured, store: Path) -> None:
    disk, machine = machine_profile(store, settings)
    assert measured.since() == ["q8_0", "disk"]
    assert measured.files == ["a.safetensors", "b.safetensors"]  # those that are large
    assert disk == PROFILE
    assert (machine.ssd_bytes_s, machine.ssd_cpu_s) == (2e9, 1e-10)
    assert machine.kernels["q8_0"].at(1) == 1e-12
    assert machine.sources["kernels"] == "measured"
    assert machine_profile(store, settings) == (disk, machine)
    assert measured.since() == []
    machine_profile(store, settings, formats=["q8_0", "int4-g32", "no such format"])
    assert measured.since() == ["int4-g32"]  # only what is missing
    machine_profile(store, settings, remeasure=True)
    assert measured.since() == ["q8_0", "disk"]
    measured.cpu = "another"
    machine_profile(store, settings)
    assert measured.since() == ["q8_0"]
    assert {path.name for path in settings.cache_dir.iterdir()} == {"machine.json", "disks.json"}


def test_a_process_measures(
    settings: Settings, measured: Measured, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["-c", command[-1]])
        measure.main()
        assert measured.since() == ["q8_0", "disk"]
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert machine_profile(store, settings)[0] == PROFILE
    assert measured.since() == []  # not here


@pytest.mark.parametrize("file", ["machine.json", "disks.json"])
@pytest.mark.parametrize("text", ["{", "null", '{"%s": 3}', '{"kernels": 3}'])
def test_damaged_cache(
    settings: Settings, measured: Measured, store: Path, file: str, text: str
) -> None:
    machine_profile(store, settings)
    measured.since()
    (settings.cache_dir / file).write_text(text.replace("%s", str(store.stat().st_dev)))
    assert measure.known_machine(settings.cache_dir, store) is None
    assert machine_profile(store, settings)[0] == PROFILE
    assert measured.since() == (["q8_0"] if file == "machine.json" else ["disk"])


def test_sample_of_a_disk(settings: Settings, measured: Measured, store: Path) -> None:
    def speed(now: float, *, sample: bool) -> float:
        measured.disk = DiskProfile(ReadMode(), now, 0.0)
        return machine_profile(store, settings, sample=sample)[1].ssd_bytes_s

    assert speed(1e9, sample=True) == speed(2e9, sample=True) == 1e9
    assert measured.files[0].startswith(".localrt-speed-")
    assert not list(store.glob(".localrt*"))
    # A model's own files tell better.
    assert speed(3e9, sample=False) == speed(4e9, sample=True) == 3e9


def test_busy_machine(settings: Settings, measured: Measured, store: Path) -> None:
    def source(*, busy: bool) -> str:
        measured.busy = busy
        return machine_profile(store, settings)[1].sources["kernels"]

    assert source(busy=True) == source(busy=True) == "measured while busy"
    assert source(busy=False) == source(busy=True) == "measured"


def test_real_rates(
    settings: Settings, tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "DEFAULT_FORMATS", ("q8_0",))
    monkeypatch.setattr(measure, "_BUDGET_S", 0.02)  # hundreds of calls
    _, machine = measure.measure(store, tmp_path, [], False, 8 << 20, False)
    assert machine.kernels["q8_0"].at(1) > 0
    assert machine.attention.at(1) > 0
    assert machine.ram_bytes_s > 1e8
    assert machine.call_s > 0


@pytest.mark.parametrize(("percent", "busy"), [(3.0, False), (45.0, True)])
def test_is_busy(monkeypatch: pytest.MonkeyPatch, percent: float, busy: bool) -> None:
    monkeypatch.setattr("psutil.cpu_percent", lambda interval: percent)
    assert measure.is_busy() == busy
