"""``localrt.plan`` and previews, from a model's config and headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.common.settings import Settings
from localrt.offload import hardware
from localrt.planning.measure import Hardware, with_gpu
from localrt.planning.recommend import preview, preview_size
from localrt.quant.cuda.gpu_cache import GpuCache
from tests.cli.test_plan import config_folder
from tests.planner.models import CONFIGS, RATE, machine

pytestmark = pytest.mark.usefixtures("quiet_machine")


def test_resident_and_streamed(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "qwen2.5-coder-1.5b")
    fits = localrt.plan(folder, ram="64GB", format="int4-g64", advise=False)
    assert fits.fits
    assert str(fits).startswith("fits in memory, about ")
    assert (fits.read_bytes, fits.copied_bytes, fits.vram_bytes) == (0, 0, 0)
    assert fits.weight_bytes < fits.ram_bytes < 64e9
    less = localrt.plan(folder, ram="700MB", format="int4-g64", ssd="3GB/s")
    assert not less.fits
    assert str(less).startswith("streams ")
    assert 0 < less.read_bytes <= less.weight_bytes
    assert less.bottleneck in ("ssd", "cpu")
    assert less.tok_s < fits.tok_s
    assert less.hypothetical == ("--ssd",)
    assert less.changes
    assert less.changes[0].gain > 1
    assert "tok/s predicted" in less.details
    assert less.report.splitlines()[0] == str(less.verdict)
    assert "tok/s predicted" not in less.report
    assert less.to_dict()["prediction"]["tok_s"] == less.tok_s
    gpu = localrt.plan(folder, gpu="virtual:1GB@12GB/s,256GB/s,20TFLOPS", advise=False)
    assert 0 < gpu.vram_bytes <= 1e9
    assert "memory at 256 GB/s (given)" in gpu.details


def test_measured_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = hardware.GpuFacts("NVIDIA GeForce RTX 4060", 8 << 30, 7 << 30)
    monkeypatch.setattr(hardware, "gpus", lambda: (gpu,))
    cache = tmp_path / "LOCALRT_CACHE"
    by_rule, _ = with_gpu(machine(), Hardware(), cache)
    assert by_rule.sources["gpu"] == "typical"
    GpuCache(cache, gpu.name, ["key"]).write("rates", RATE.to_dict())
    # Another GPU than this machine's is not what was measured.
    other, _ = with_gpu(machine(), Hardware(gpu="RTX 4060 8GB"), cache)
    for each in (by_rule, other):
        assert each.gpu is not None
        assert not each.gpu.kernels
    folder = config_folder(tmp_path, "qwen2.5-coder-1.5b")
    found = localrt.plan(folder, format="int4-g32", advise=False)
    assert "memory at 250 GB/s (measured), link to it 12 GB/s (measured)" in found.details
    assert found.measured_tok_s is None
    # Then it ran here, and an answer had its speed.
    kept = Settings.from_environment().data_dir / "speeds.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps({folder.name: 31.41}), encoding="utf-8")
    again = localrt.plan(folder, format="int4-g32", advise=False)
    assert "\n  31 tok/s measured, when it last ran on this machine\n" in again.details
    assert again.to_dict()["measured_tok_s"] == 31.41
    # That is not of a PC that is described.
    assert localrt.plan(folder, pc="gaming-pc", advise=False).measured_tok_s is None


def test_pc(tmp_path: Path) -> None:
    folder = config_folder(tmp_path, "qwen2.5-coder-1.5b")
    pc = localrt.plan(folder, pc="gaming-pc, 16GB", advise=False)
    machine = pc.request.machine
    assert pc.hypothetical == ("--pc",)
    assert machine.gpu is not None
    assert machine.gpu.name == "RTX 4060 8GB"
    assert pc.request.budgets.ram == 12_000_000_000  # the desktop's part is left
    assert 0 < pc.request.budgets.vram < 8 << 30
    assert set(machine.sources.values()) <= {"given", "typical"}
    options: dict[str, Any] = {"ram": "2GB", "ssd": "1GB/s", "ram_speed": "20GB/s", "cores": 4}
    other = localrt.plan(folder, pc="16GB", advise=False, **options)
    assert other.request.machine.gpu is None
    assert other.request.budgets.ram == 2_000_000_000
    sources = other.request.machine.sources
    for name, value, is_now in (
        ("ssd_bytes_s", 1e9, other.request.machine.ssd_bytes_s),
        ("ram_bytes_s", 20e9, other.request.machine.ram_bytes_s),
        ("cores", 4, other.request.machine.threads),
    ):
        assert (sources[name], value) == ("given", is_now)
    # This machine with other memory: decoding waits for it, prompts for the cores.
    here, slow, few = (
        localrt.plan(folder, ram="64GB", advise=False, **given)
        for given in ({}, {"ram_speed": "10GB/s"}, {"cores": 1})
    )
    assert slow.tok_s < 0.7 * here.tok_s
    assert few.prefill_tok_s < 0.7 * here.prefill_tok_s
    assert "--cores" in few.hypothetical


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"pc": "a fast one"}, localrt.OptionError, "no part of a PC"),
        ({"ram_speed": "fast"}, localrt.OptionError, "DDR5-5600 or 60GB/s"),
        ({"format": "int9"}, localrt.OptionError, "format must be one of"),
        ({"ram": "10MB"}, localrt.MemoryBudgetError, "does not fit"),
    ],
)
def test_errors(
    tmp_path: Path, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    folder = config_folder(tmp_path, "qwen2.5-coder-1.5b")
    with pytest.raises(kind, match=message):
        localrt.plan(folder, **options)
    with pytest.raises(localrt.LocalrtError):
        localrt.plan(tmp_path / "nothing")


@pytest.mark.usefixtures("quiet_machine")
@pytest.mark.parametrize(
    ("model", "quantization", "gigabytes", "note"),
    [
        ("unsloth/Qwen3-30B-A3B-GGUF:Q4_K_M", "Q4_K_M", 18.7, "Q4_K_M was not looked up"),
        pytest.param(
            *("qwen3:30b", "Q5_K_M", 21.7, "planned for its file Q5_K_M"), marks=pytest.mark.slow
        ),
    ],
)
def test_known_repository_offline(
    model: str, quantization: str, gigabytes: float, note: str
) -> None:
    found = localrt.plan(model, pc="RTX 4060, 32GB", offline=True, advise=False)
    assert found.quantization == quantization
    assert found.weight_bytes == pytest.approx(gigabytes * 1e9, rel=0.01)
    assert found.thinks
    assert note in found.details
    assert found.command == f"localrt chat {model}"


def test_unknown_repository_offline() -> None:
    with pytest.raises(
        localrt.ModelNotFoundError,
        match=r"org/none:Q4_K_M is not .* offline mode",
    ):
        localrt.plan("org/none:Q4_K_M", offline=True)


def test_config_alone(tmp_path: Path) -> None:
    cache = tmp_path / "hub"
    snapshot = cache / "models--org--big" / "snapshots" / ("c" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIGS["phi-4-mini"]))
    settings = Settings.from_environment({"HF_HUB_CACHE": str(cache)})
    small = preview("org/big", ram="2GB", device="cpu", settings=settings)
    assert not small.fits
    assert small.read_bytes > 800_000_000
    assert "streams" in str(small)
    assert "per token" in str(small)
    nothing = preview("org/big", ram="60MB", device="cpu", settings=settings)
    assert nothing.problem
    assert str(nothing).startswith("does not fit")


def test_preview_size() -> None:
    assert preview_size(1000).fits
    assert not preview_size(10**9, ram="900MB").fits
    text = str(preview_size(10**9, ram="900MB"))
    assert text.startswith("streams 310 MB per token")
