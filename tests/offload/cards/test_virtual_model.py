"""``device="virtual:CARD"`` from loading to metrics: the CPU's answers in the card's time."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.cli import main
from localrt.errors import MemoryBudgetError, OptionError
from tests.offload.cards.carded import pipeline_threads
from tests.offload.placed import needs_kernels
from tests.real_models import real_model

pytestmark = [needs_kernels, pytest.mark.usefixtures("by_rules", "given_rates")]

CARD = "virtual:8MB@12GB/s,256GB/s,20TFLOPS"
SLOW = "virtual:8MB@1MB/s,2MB/s,1GFLOPS"
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty folders."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "LOCALRT_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))


def answer(model: localrt.Model) -> Any:
    return model.generate(token_ids=[5, 6, 7], **GREEDY)


def test_it_answers_as_the_cpu_does_in_simulated_time(tiny_folder: Path) -> None:
    with localrt.load(tiny_folder, device="cpu") as model:
        expected = answer(model)
    assert not expected.metrics.simulated
    seconds = []
    for device in (CARD, SLOW):
        with localrt.load(tiny_folder, device=device) as model:
            assert model.info.device == device
            got = answer(model)
        assert got.token_ids == expected.token_ids
        metrics = got.metrics
        assert metrics.simulated
        assert 0 < metrics.pipeline_efficiency <= 1
        assert 0 < metrics.predicted_tok_s <= metrics.ceiling_tok_s
        assert metrics.link_bytes is not None
        seconds.append(metrics.tpot_s)
    assert seconds[0] > 0
    assert not pipeline_threads()


def test_the_cards_memory_can_be_held_back(tiny_folder: Path) -> None:
    with localrt.load(tiny_folder, device=CARD, gpu_memory="6MB") as model:
        assert answer(model).metrics.simulated


def test_a_card_that_cannot_be_read_is_refused(tiny_folder: Path) -> None:
    for device in ("virtual:", "virtual:8GB", "virtual:8GB@fast,1GB/s,1TFLOPS", "virtual:Voodoo 2"):
        with pytest.raises(OptionError, match=r"card|bandwidth"):
            localrt.load(tiny_folder, device=device)
    with pytest.raises(MemoryBudgetError):
        localrt.load(tiny_folder, device=CARD, ram="1MB")


def test_the_commands_say_that_it_is_simulated(
    tiny_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    said = ["run", str(tiny_folder), "Hello", "--device", CARD, "--max-tokens", "4", "--json"]
    said += ["--temperature", "0"]  # at random it may end at once
    assert main(said) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics["simulated"] is True
    assert metrics["decode_tok_s"] > 0


@pytest.mark.real
@pytest.mark.parametrize("card", ["30MB", pytest.param("1GB", marks=pytest.mark.slow)])
def test_a_real_model_on_a_small_card(card: str) -> None:
    path = real_model("smollm2")
    device = f"virtual:{card}@12GB/s,256GB/s,20TFLOPS"
    prompt = "def fibonacci(n):"
    with localrt.load(path, device="cpu", ctx=256) as model:
        expected = model.generate(prompt, **GREEDY)
    with localrt.load(path, device=device, ctx=256) as model:
        got = model.generate(prompt, **GREEDY)
    assert got.token_ids == expected.token_ids
    assert got.metrics.simulated
    assert got.metrics.ceiling_tok_s >= got.metrics.predicted_tok_s > 0
