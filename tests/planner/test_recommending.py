"""``localrt.plan``, previews, and which models run well on a PC, from which file: one figure for
each wherever it is said.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.common.settings import Settings
from localrt.hub.names import KNOWN_MODELS, find_known
from localrt.hub.resolving import FileChoice
from localrt.offload import hardware
from localrt.offload.account import Budgets
from localrt.planning import measure
from localrt.planning.forecast import (
    READING_TOK_S,
    THINKING_TOK_S,
    PlanRequest,
    Prediction,
    judge,
    speed,
)
from localrt.planning.machine import GPUS, typical_machine
from localrt.planning.measure import Hardware, planned_hardware, with_gpu
from localrt.planning.models import shape_from_config
from localrt.planning.recommend import WhatRuns, preview, recommend, recommend_on, what_runs
from localrt.planning.search import estimate, make_forecast, whole_nbytes
from localrt.quant.cuda.gpu_cache import GpuCache
from tests.cli.test_plan import config_folder
from tests.planner.models import CONFIGS, RATE, machine, published

pytestmark = pytest.mark.usefixtures("quiet_machine")

BITS = {
    "Q2_K": 3.0,
    "Q3_K_M": 3.9,
    "Q4_K_M": 4.85,
    "Q5_K_M": 5.7,
    "Q6_K": 6.6,
    "Q8_0": 8.5,
    "BF16": 16.0,
}
GPU = "virtual:8GB@12GB/s,256GB/s,20TFLOPS"


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given_rates: None) -> Settings:
    """However much of this machine's memory is free, all that is given counts."""
    monkeypatch.setattr(measure, "ram_budget", lambda ram: ram)
    return Settings.from_environment({"HF_HOME": str(tmp_path), "LOCALRT_CACHE": str(tmp_path)})


def offer(name: str, *, config: bool = True) -> FileChoice:
    known = find_known(name)
    assert known is not None
    sizes = {label: round(known.parameters * 1e9 * bits / 8) for label, bits in BITS.items()}
    return FileChoice(known.repo, sizes, known.config() if config else None)


@pytest.mark.skipif(os.name == "nt", reason="there a desktop takes more of a GPU's memory")
@pytest.mark.parametrize(
    ("model", "pc", "best"),
    [
        # Whole in GPU memory: the largest that is.
        ("llama3.1:8b", "RTX 4060, 32GB", "Q6_K"),
        ("qwen2.5:14b", "RTX 3060 12GB, 32GB", "Q5_K_M"),
        # Partly in RAM: what bits lose against what they cost in speed.
        ("qwen3:30b", "RTX 4060, 32GB DDR4", "Q5_K_M"),
        ("qwen3-coder:30b", "RTX 3060 12GB, 64GB", "Q6_K"),
        # By the CPU.
        ("llama3.2:1b", "16GB DDR4", "Q6_K"),
        ("qwen3:30b", "32GB DDR5", "Q5_K_M"),
        ("llama3.3:70b", "16GB", "Q4_K_M"),
    ],
)
def test_best_file(model: str, pc: str, best: str) -> None:
    machine, budgets, _ = planned_hardware(Hardware(pc=pc), Settings.from_environment({}))
    found = recommend_on(offer(model), machine, budgets)
    assert found.name == best, found.reason
    assert found.expected is not None
    assert speed(found.expected.tok_s) in found.reason


def test_thinking_models() -> None:
    machine, budgets, _ = planned_hardware(Hardware(pc="32GB DDR5"), Settings.from_environment({}))
    plain, thinks = (
        recommend_on(offer(name), machine, budgets).expected
        for name in ("llama3.1:8b", "deepseek-r1:8b")
    )
    assert plain is not None
    assert thinks is not None
    assert READING_TOK_S < thinks.tok_s < THINKING_TOK_S
    assert (plain.level, thinks.level) == ("good", "usable")
    assert "thinks before it answers" in str(judge(thinks))


def test_gpu(settings: Settings) -> None:
    model = offer("qwen3.5:9b")
    alone = recommend(model, settings, ram="16GB", device="cpu")
    with_gpu = recommend_on(model, *planned_hardware(Hardware(gpu=GPU, ram="16GB"), settings)[:2])
    assert BITS[with_gpu.name] > BITS[alone.name]


def test_without_a_config(settings: Settings) -> None:
    found = recommend(offer("llama3.1:8b", config=False), settings, ram="6GB", device="cpu")
    assert found.name == "Q5_K_M"
    assert found.reason == "the largest of up to 8 bits that fits the memory here"


def test_other_files(settings: Settings) -> None:
    sizes = {"mtp-model": 10**9, "Q4_0_4_4": 3 * 10**9, "Q4_0": 2 * 10**9}
    assert recommend(FileChoice("org/m", sizes), settings, ram="16GB").name == "Q4_0"


@cache
def runs(pc: str) -> WhatRuns:
    """All known models on a described PC: no network is asked."""

    def refused(*args: object) -> None:
        raise AssertionError("the network is not asked")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "create_connection", refused)
        return what_runs(Hardware(pc=pc), Settings.from_environment({}))


def test_order() -> None:
    found = runs("RTX 4060, 32GB")
    assert sorted(each.model.name for each in found.models) == sorted(
        model.name for model in KNOWN_MODELS
    )
    best = found.best
    assert len({each.model.family for each in best}) == len(best)
    assert best[0].level == "good"
    assert best[0].expected is not None
    assert not best[0].expected.read  # what is in memory comes before what is streamed
    large = next(each for each in found.models if each.model.name == "llama3.3:70b")
    assert large.level == "slow"
    assert large not in best
    (others,) = (line for line in found.report().splitlines() if line.startswith("Too slow"))
    assert "llama3.3:70b" in others.partition("large: ")[2].split(", ")
    assert set(found.machine.sources.values()) <= {"given", "typical"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("qwen3.6:35b", "qwen3.5:35b"),  # of the same size the newer
        ("qwen3:30b", "gemma4:26b"),  # the larger
        ("gemma4:26b", "trinity-mini:26b"),  # the well-known
        ("phi4:14b", "lfm2:8b"),
    ],
)
def test_order_of_two(first: str, second: str) -> None:
    names = [each.model.name for each in runs("RTX 4060, 32GB").models]
    assert names.index(first) < names.index(second)


def test_contexts() -> None:
    found = localrt.plan("qwen3:8b", pc="office-laptop", format="int4-g32")
    largest, fast = found.contexts
    assert (largest.tokens, largest.whole) == (40_960, True)
    assert largest.tok_s < fast.tok_s
    assert fast.tokens < largest.tokens
    assert largest.command == "localrt chat qwen3:8b --ctx 40960"
    assert "all that the model has" in found.report
    tight = localrt.plan("qwen3:8b", pc="6GB", format="int4-g32", advise=True)
    assert not tight.contexts[0].whole
    assert "the most that fits" in tight.report
    assert not localrt.plan("qwen3:8b", pc="office-laptop", advise=False).contexts


@pytest.mark.parametrize(
    ("pc", "name"),
    [
        ("RTX 4060, 32GB", "gemma4:e4b"),
        ("RTX 4060, 32GB", "qwen3:30b"),  # a mixture in both memories
        pytest.param("GTX 1650, 16GB", "mistral-small3.2:24b", marks=pytest.mark.slow),  # copied
        pytest.param("8GB, SATA SSD", "qwen2.5:14b", marks=pytest.mark.slow),
    ],
)
def test_table_page_note_and_details(pc: str, name: str) -> None:
    found = runs(pc)
    row = next(each for each in found.models if each.model.name == name)
    plan = localrt.plan(name, pc=pc)
    assert row.expected is not None
    assert replace(plan.prediction, full_context_tok_s=None) == row.expected
    assert plan.tok_s == pytest.approx(row.expected.tok_s)
    assert (plan.read_bytes, plan.copied_bytes) == (row.expected.read, row.expected.copied)
    assert plan.quantization == row.quantization
    assert plan.verdict.level == row.level
    figure, first = speed(plan.tok_s), plan.report.splitlines()[0]
    assert figure in first
    assert f"{figure} predicted" in plan.details
    reads = "partly on the SSD" in row.expected.place
    assert reads == ("read from the SSD for every token" in first)
    assert reads == ("on the SSD, read for each token" in plan.details)
    placed = ((unit, plan.placement.where[unit.name]) for unit in plan.request.shape.units)
    assert reads == any(where.read for unit, where in placed if unit.macs)
    for chosen in (note for note in plan.notes if "planned for its file" in note):
        assert figure in chosen
        assert reads == ("the SSD for every token" in chosen)
    (page,) = set(re.findall(r"A?a? ?page of text \(500 tokens\) is read in ([^.,]*)", plan.report))
    assert f"a page of text (500 tokens) is read in {page}" in plan.details
    assert (row.expected.place == "GPU memory") == ("all of it in GPU memory" in first)
    if row in found.best:
        cells = next(line for line in found.report().splitlines() if line.startswith(f"{name} "))
        assert figure.removesuffix(" tok/s") in cells.split()
        assert row.expected.place in cells


def test_preview_and_page(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = localrt.plan(tiny_folder, advise=False)
    monkeypatch.setattr(measure, "known_machine", lambda *_: plan.request.machine)
    found = localrt.preview(tiny_folder)
    assert found.tok_s == pytest.approx(plan.tok_s, rel=0.001)
    assert found.verdict == str(plan.verdict) == plan.report.splitlines()[0]
    assert (found.fits, found.read_bytes, found.copied_bytes, found.weight_bytes) == (
        plan.fits,
        plan.read_bytes,
        plan.copied_bytes,
        plan.weight_bytes,
    )
    assert (found.place == "GPU") == plan.placement.uses_gpu


GB = 10**9


def predicted(*, read: int = 0, copied: int = 0, **changed: Any) -> Prediction:
    """A dense model of 5 GB in RAM, with this changed."""
    values = {"tok_s": 23.4, "page_s": 2.5, "weights": 5 * GB, "needed": 5 * GB, **changed}
    return Prediction(
        **{"on_gpu": 0, "by_cpu": 0, **values},
        ceiling_tok_s=100.0,
        bottleneck="cpu",
        efficiency=1.0,
        prefill_tok_s=200.0,
        held=0,
        full_context_tok_s=None,
        nbytes={"ssd": read, "link": copied, "ram": 0.0, "vram": 0.0},
        busy={},
        waits={},
        pass_s=0.04,
    )


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "Good for chat: 23 tok/s, all of it in memory"),
        ({"on_gpu": 2 * GB}, "Good for chat: 23 tok/s, 2 of 5 GB in GPU memory, the rest in RAM"),
        (
            {"tok_s": 3.21},
            "Usable for chat: 3.2 tok/s, because the CPU has to go through 5 GB for every token",
        ),
        (
            {"tok_s": 0.9, "weights": 40 * GB, "needed": 40 * GB, "read": 31 * GB},
            "Too slow for chat: 0.90 tok/s, because 31 of 40 GB are read from the SSD for every "
            "token",
        ),
        (
            {"page_s": 100.0},
            "Too slow for chat: 23 tok/s, all of it in memory; a page of text takes 1 min 40 s to "
            "read",
        ),
    ],
)
def test_judge(changed: dict[str, Any], text: str) -> None:
    verdict = judge(predicted(**changed))
    assert str(verdict) == text
    assert verdict.level == {"Good": "good", "Usab": "usable", "Too ": "slow"}[text[:4]]


@pytest.mark.parametrize(
    ("name", "ram", "gpu", "nearly"),
    [
        ("qwen2.5-coder-1.5b", 700_000_000, False, 0.1),
        ("llama-3-70b", 32 * GB, True, 0.2),
        ("gpt-oss-20b", 8 * GB, False, 0.25),
        ("gpt-oss-20b", 32 * GB, True, 0.2),
    ],
)
def test_estimate_is_near_the_plan(name: str, ram: int, gpu: bool, nearly: float) -> None:
    here = typical_machine()
    if gpu:
        found = GPUS["RTX 4060 8GB"]
        here = replace(here, gpu=found.profile, link_bytes_s=found.link_bytes_s)
    budgets = Budgets(ram=ram, vram=8 * GB if gpu else 0)
    request = PlanRequest(shape=published(name), machine=here, budgets=budgets, ctx=2048)
    expected, plan = estimate(request), make_forecast(request)
    assert expected is not None
    assert expected.tok_s == pytest.approx(plan.tok_s, rel=nearly)
    assert expected.needed == pytest.approx(request.shape.pass_nbytes, rel=0.001)
    assert (expected.read > 0) == (plan.read_bytes > 0)
    assert expected.place == plan.prediction.place
    # An outline lists one of a mixture's experts.
    short = shape_from_config(CONFIGS[name], name=name, experts=1)
    assert len(short.units) <= len(request.shape.units)
    assert whole_nbytes(short) == request.shape.nbytes
    assert estimate(replace(request, shape=short)) == expected


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
    assert pc.request.budgets.ram == 13_600_000_000  # the desktop's part is left
    assert 0 < pc.request.budgets.vram < 8 << 30
    assert set(machine.sources.values()) <= {"given", "typical"}
    options: dict[str, Any] = {"ram": "2GB", "ssd": "1GB/s", "ram_speed": "20GB/s", "cores": 4}
    other = localrt.plan(folder, pc="16GB", advise=False, **options)
    assert other.request.machine.gpu is None
    assert other.request.budgets.ram == 2_000_000_000
    found = other.request.machine
    assert (found.ssd_bytes_s, found.ram_bytes_s, found.threads) == (1e9, 20e9, 4)
    # This machine with other memory: decoding waits for it, prompts for the cores.
    here, slow, few = (
        localrt.plan(folder, ram="64GB", advise=False, **given)
        for given in ({}, {"ram_speed": "10GB/s"}, {"cores": 1})
    )
    assert slow.tok_s < 0.7 * here.tok_s
    assert few.prefill_tok_s < 0.7 * here.prefill_tok_s
    assert "--cores" in few.hypothetical


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
