"""Simulated prompts: the pipeline's own tasks, charged and not computed."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.offload import prompts
from benchmarks.offload.tables import prompts_table


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of the models, on a third of the card: of less, a layer's weights fill the ring."""
    models = {}
    for name, (architecture, config) in prompts.MODELS.items():
        layers, vocab = config["num_hidden_layers"] // 3, 8192
        models[name] = architecture, {**config, "num_hidden_layers": layers, "vocab_size": vocab}
    monkeypatch.setattr(prompts, "MODELS", models)
    monkeypatch.setattr(prompts, "VRAM", (prompts.VRAM - (500 << 20)) // 3 + (500 << 20))
    monkeypatch.setattr(prompts, "RAM", prompts.RAM // 2)
    monkeypatch.setattr(prompts, "ARITHMETIC", {"bf16": prompts.ARITHMETIC["bf16"]})


def bf16(name: str) -> dict[str, Any]:
    (found,) = prompts.measure(name, 2048)["results"]
    assert isinstance(found, dict)
    return found


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["Qwen2.5-14B", "Qwen2.5-32B"])
def test_the_link_hides_behind_the_cards_arithmetic(name: str) -> None:
    found = bf16(name)
    assert found["share_in_ram"] > 0.2
    # Of so few layers the first one's copies show, and short passes unpack more.
    assert found["busy"]["gpu"] > 0.9
    assert 0.7 < found["share_of_arithmetic"] < 1
    assert found["tok_s"] > 3 * found["tok_s_without_crossing"]
    assert found["tok_s"] == pytest.approx(found["forecast_tok_s"], rel=0.15)
    moved = found["share_in_ram"] * found["weight_bytes"]
    passes = 2048 / found["pass_rows"]
    assert found["link_bytes"] == pytest.approx(moved * passes, rel=0.4)


@pytest.mark.usefixtures("small")
def test_a_mixtures_experts_keep_the_link_busy() -> None:
    found = bf16("Qwen3-30B-A3B")
    # Nothing is ahead of the first layer, which counts more among few.
    assert found["busy"]["link"] > 0.8
    assert 0.6 < found["tok_s"] / found["forecast_tok_s"] < 1.1
    moved = found["share_in_ram"] * found["weight_bytes"] * 2048 / found["pass_rows"]
    assert found["link_bytes"] < 1.5 * moved, "few experts cross twice in a pass"


def test_the_cards_arithmetic_is_the_makers() -> None:
    assert prompts.ARITHMETIC["bf16"] == pytest.approx(30.2e12, rel=0.01)
    assert prompts.ARITHMETIC["int8"] == pytest.approx(121e12, rel=0.01)
    # The same by the maker's own figures for another card of the generation.
    assert prompts.ARITHMETIC["bf16"] == pytest.approx(165.2e12 / 128 * 24 / 2.52 * 2.46, rel=0.01)


def test_the_table_says_that_it_is_simulated() -> None:
    result = {
        "arithmetic": "bf16",
        "peak_ops_s": 30.2e12,
        "reached": 0.85,
        "card_bytes_s": 272e9,
        "link_bytes_s": 12e9,
        "ctx": 8192,
        "format": "int4-g32",
        "prompt_tokens": 2048,
        "pass_rows": 1024,
        "share_in_ram": 0.25,
        "weight_bytes": 8_000_000_000,
        "tok_s": 811.0,
        "forecast_tok_s": 850.0,
        "share_of_arithmetic": 0.87,
        "busy": {"gpu": 0.99, "link": 0.16},
    }
    record = {
        "command": "python -m benchmarks.offload.prompts",
        "versions": {"localrt": "1"},
        "rows": [{"name": "14B", "results": [result]}],
    }
    text = prompts_table(record)
    assert "Simulated" in text
    assert (
        "| 14B | bf16, 30.2 T/s | 25 % of 8 GB | 1024 | 811 | 850 | 87 % | 99 %, 16 % | - |" in text
    )
