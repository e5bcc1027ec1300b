"""``localrt doctor``: what it finds and advises; its file for an issue says what helps, and nothing
private.
"""

from __future__ import annotations

import argparse
import getpass
import json
import platform
import tempfile
import tomllib
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.cli import doctor, main
from localrt.common.extras import install, install_for_gpu
from localrt.common.settings import Settings
from localrt.hub.cache import note_use
from localrt.offload import hardware
from localrt.tui.terminal import write_report

ROOT = Path(__file__).parents[2]


def _doctor(capsys: pytest.CaptureFixture[str], *, quick: bool = True, as_json: bool = True) -> Any:
    assert doctor.run(argparse.Namespace(quick=quick, json=as_json, report=None)) == 0
    output = capsys.readouterr()
    assert output.err == ""
    return json.loads(output.out) if as_json else output.out


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCALRT_CACHE", "HF_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setattr(hardware, "gpus", lambda: ())
    monkeypatch.setattr(hardware, "other_gpus", lambda _root: ())


@pytest.mark.parametrize("built", ["libggml-cpu.so", "libggml-vulkan.so"])
def test_a_gpu_of_another_maker(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: str
) -> None:
    """It is shown, with what is missing: llama.cpp, or a build of it that uses GPUs."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / built).touch()
    spec = ModuleSpec("llama_cpp", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(doctor, "find_spec", lambda _name: spec)
    gpu = hardware.GpuFacts("AMD Radeon RX 7600", 8 << 30, 7 << 30)
    monkeypatch.setattr(hardware, "other_gpus", lambda _root: (gpu,))
    text = _doctor(capsys, as_json=False)
    assert "GPU       AMD Radeon RX 7600, 8.6 GB, 7.5 GB free (llama.cpp only)\n" in text
    ready = "vulkan" in built
    assert ("on AMD Radeon RX 7600: llama.cpp, by --engine llamacpp" in text) == ready
    assert (install_for_gpu() in text) != ready


def test_the_full_report_has_the_rates_that_plans_have(
    capsys: pytest.CaptureFixture[str], quiet_machine: None
) -> None:
    report = _doctor(capsys, quick=False)
    rates = localrt.plan("qwen3:8b", advise=False, ram="8GB").request.machine
    assert report["machine"]["memory_read_bytes_s"] == rates.ram_bytes_s
    assert report["machine"]["disk"]["read_bytes_s"] == rates.ssd_bytes_s


def test_every_extra_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(tomllib.loads(text)["project"]["optional-dependencies"])
    for_users = extras - {"all", "docs", "test"}
    assert for_users <= {package["extra"] for package in _doctor(capsys)["packages"]}
    report = _doctor(capsys, as_json=False)
    assert all(f"\n  {extra} " in report for extra in for_users)


KERNELS, TORCH = "the CPU kernels were not built", "without them the native engine needs torch"
GPU, NVRTC = f"there is a GPU: to use it, {install('gpu')}", "CUDA's compiler is missing"
LLAMA = f"for more architectures, and bench's baseline: {install('llamacpp')}"


@pytest.mark.parametrize(
    ("here", "advice"),
    [
        ("packages kernels compiler", []),
        ("packages kernels gpu", [NVRTC]),
        ("kernels gpu", [GPU, LLAMA]),  # torch is not what is missing
        ("", [KERNELS, TORCH, LLAMA]),
    ],
)
def test_advice(
    here: str,
    advice: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is missing, and how to get it."""
    gpus = (hardware.GpuFacts("Imaginary 8000"),) if "gpu" in here else ()
    monkeypatch.setattr(hardware, "_gpus_at_a_glance", lambda root: gpus)
    version = "2.13.0" if "packages" in here else None
    monkeypatch.setattr(doctor, "_version", lambda package: version)
    monkeypatch.setattr(doctor, "best_isa", lambda: "avx2" if "kernels" in here else None)
    monkeypatch.setattr(doctor, "has_compiler", lambda: "compiler" in here)
    lines = _doctor(capsys)["advice"]
    known = (KERNELS, TORCH, GPU, NVRTC, LLAMA)
    assert [each for line in lines for each in known if line.startswith(each)] == advice
    assert all(line in _doctor(capsys, as_json=False).partition("To do")[2] for line in lines)


SECRET = "hunter2"


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with what is private in every place that localrt knows of."""
    folder = tmp_path / SECRET
    for name in ("LOCALRT_CACHE", "HF_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, str(folder / name))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(folder))
    for name in ("HF_TOKEN", "LOCALRT_API_KEY", "OPENAI_API_KEY", "HF_ENDPOINT"):
        monkeypatch.setenv(name, f"https://{SECRET}")
    monkeypatch.setattr(getpass, "getuser", lambda: f"{SECRET}-user")
    monkeypatch.setattr(platform, "node", lambda: f"{SECRET}-host.example")
    monkeypatch.setattr(platform, "release", lambda: f"6.1-{SECRET}-host")
    settings = Settings.from_environment()
    settings.config_dir.mkdir(parents=True)
    (settings.config_dir / "config.toml").write_text(
        f'system = "{SECRET}"\n[models]\n{SECRET} = "smollm2"\n'
        f'[mcp.servers.{SECRET}]\nurl = "https://{SECRET}"\nheaders = {{ key = "{SECRET}" }}\n'
    )
    for name in ("history.db", "draft.txt", "last-run.json"):
        settings.data_dir.mkdir(parents=True, exist_ok=True)
        (settings.data_dir / name).write_text(SECRET)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "/nowhere")  # or the model is not listed
    model = folder / "mine.gguf"
    model.write_bytes(b"GGUF")
    note_use(str(model), settings)
    plugin = folder / "plugin.py"
    plugin.write_text(f"def crash():\n    raise ValueError('{SECRET}')\n")
    code: dict[str, object] = {"Path": Path}
    exec(compile(plugin.read_text("utf-8"), plugin, "exec"), code)
    try:
        code["crash"]()  # type: ignore[operator]
    except ValueError as error:
        write_report(error, settings.data_dir)
    return folder


def test_nothing_private_is_in_it(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.txt"
    assert main(["doctor", "--quick", "--report", str(path)]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{path} has ")
    assert told.count("\n") == 1
    text = path.read_text(encoding="utf-8")
    assert SECRET not in text
    assert str(Path.home()) not in text
    for harmless in ("kernels", "mine.gguf", "HF_TOKEN", "LOCALRT_CACHE", "ValueError", "in crash"):
        assert harmless in text


def test_it_replaces_only_a_report(
    private: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.txt"
    path.write_bytes(b"\xff")
    assert main(["doctor", "--quick", "--report", str(path)]) == 2
    assert path.read_bytes() == b"\xff"
    assert "is there already: give --report another name" in capsys.readouterr().err
    path.unlink()
    for _ in range(2):
        assert main(["doctor", "--quick", "--report", str(path)]) == 0
