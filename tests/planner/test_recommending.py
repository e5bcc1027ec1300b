"""Of a repository's GGUF files, the one that a PC runs best."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localrt.common.settings import Settings
from localrt.hub.names import find_known, repo_thinks
from localrt.hub.resolving import FileChoice
from localrt.planning import measure
from localrt.planning.forecast import READING_TOK_S, THINKING_TOK_S, judge, speed
from localrt.planning.measure import Hardware, planned_hardware
from localrt.planning.recommend import recommend, recommend_on

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


@pytest.fixture(autouse=True)
def all_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of this machine's memory is free."""
    monkeypatch.setattr(measure, "ram_budget", lambda ram: ram)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
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
        ("llama3.2:3b", "RTX 4060, 32GB", "Q8_0"),
        ("llama3.1:8b", "RTX 4060, 32GB", "Q6_K"),
        ("qwen3:8b", "RTX 4060, 32GB", "Q6_K"),
        ("qwen3.5:9b", "RTX 3060, 32GB", "Q8_0"),
        ("lfm2:8b", "RTX 4060, 32GB", "Q6_K"),
        ("llama3.2:3b", "GTX 1650, 16GB", "Q5_K_M"),
        ("llama3.2:1b", "RTX 4050, 16GB", "Q8_0"),
        ("qwen2.5:14b", "RTX 3060 12GB, 32GB", "Q5_K_M"),
        ("qwen2.5:14b", "RTX 4080, 32GB", "Q6_K"),
        ("qwen2.5-coder:32b", "RTX 4090, 64GB", "Q4_K_M"),
        ("mistral-small3.2:24b", "RTX 4090, 64GB", "Q6_K"),
        # Partly in RAM: what bits lose against what they cost in speed.
        ("qwen3:30b", "RTX 4060, 32GB DDR4", "Q5_K_M"),
        ("qwen3:30b", "RTX 4060, 32GB", "Q5_K_M"),
        ("qwen3-coder:30b", "RTX 3060 12GB, 64GB", "Q6_K"),
        ("qwen2.5:14b", "RTX 4060, 32GB", "Q4_K_M"),
        ("qwen2.5:14b", "RTX 2080, 32GB", "Q4_K_M"),
        # By the CPU.
        ("llama3.2:1b", "16GB DDR4", "Q6_K"),
        ("llama3.2:3b", "16GB DDR4", "Q5_K_M"),
        ("llama3.1:8b", "32GB DDR5, no GPU", "Q5_K_M"),
        ("llama3.1:8b", "16GB DDR4, 4 cores", "Q4_K_M"),
        ("qwen3:30b", "32GB DDR5", "Q4_K_M"),
        ("llama3.1:8b", "office-laptop", "Q4_K_M"),
        ("llama3.3:70b", "16GB", "Q4_K_M"),
    ],
)
def test_best_file(model: str, pc: str, best: str) -> None:
    machine, budgets, _ = planned_hardware(Hardware(pc=pc), Settings.from_environment({}))
    found = recommend_on(offer(model), machine, budgets)
    assert found.name == best, found.reason
    assert found.expected is not None
    assert speed(found.expected.tok_s) in found.reason


@pytest.mark.parametrize("pc", ["RTX 4060, 32GB DDR4", "RTX 4060, 32GB", "32GB DDR5", "16GB DDR4"])
@pytest.mark.parametrize("model", ["qwen3:30b", "qwen2.5:14b", "llama3.1:8b", "qwen3:8b"])
def test_neighbours_of_the_best(model: str, pc: str) -> None:
    machine, budgets, _ = planned_hardware(Hardware(pc=pc), Settings.from_environment({}))
    files = offer(model)
    found = recommend_on(files, machine, budgets)
    alone = {
        name: recommend_on(FileChoice(files.repo, {name: size}, files.config), machine, budgets)
        for name, size in files.sizes.items()
        if 4 <= BITS[name] <= 8.5
    }
    assert found.expected is not None
    tok_s = found.expected.tok_s
    for name, other in alone.items():
        if other.expected is not None and BITS[name] < BITS[found.name] and tok_s < 20:
            assert other.expected.tok_s < 2 * tok_s
        if other.expected is not None and BITS[name] > BITS[found.name]:
            assert other.expected.tok_s < 0.95 * tok_s


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


@pytest.mark.parametrize(
    ("repo", "thinks"),
    [
        ("unsloth/Qwen3-8B-GGUF", True),
        ("unsloth/Qwen3-Coder-30B-A3B-Instruct-GGUF", False),
        ("bartowski/DeepSeek-R1-Distill-Qwen-14B-GGUF", True),
        ("someone/QwQ-32B-GGUF", True),
        ("someone/Qwen3-4B-Thinking-2507-GGUF", True),
        ("bartowski/Qwen2.5-7B-Instruct-GGUF", False),
    ],
)
def test_repo_thinks(repo: str, thinks: bool) -> None:
    assert repo_thinks(repo) is thinks


def test_gpu(settings: Settings) -> None:
    model = offer("qwen3.5:9b")
    alone = recommend(model, settings, ram="16GB", device="cpu")
    with_gpu = recommend_on(model, *planned_hardware(Hardware(gpu=GPU, ram="16GB"), settings)[:2])
    assert BITS[with_gpu.name] > BITS[alone.name]


def test_all_too_slow(settings: Settings) -> None:
    found = recommend(offer("llama3.3:70b"), settings, ram="16GB", device="cpu")
    assert found.name == "Q4_K_M"
    assert "none of its files reaches reading speed" in found.reason


def test_without_a_config(settings: Settings) -> None:
    found = recommend(offer("llama3.1:8b", config=False), settings, ram="6GB", device="cpu")
    assert found.name == "Q5_K_M"
    assert found.reason == "the largest of up to 8 bits that fits the memory here"


def test_other_files(settings: Settings) -> None:
    sizes = {"mtp-model": 10**9, "Q4_0_4_4": 3 * 10**9, "Q4_0": 2 * 10**9}
    assert recommend(FileChoice("org/m", sizes), settings, ram="16GB").name == "Q4_0"
