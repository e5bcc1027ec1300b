"""What a card does while a model decodes: on a virtual card, whose time is simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import localrt
from benchmarks.common.random_store import write_store
from benchmarks.gpu.configs import TINY
from localrt.bench.card_use import CardUse, card_line, card_use, what_helps
from localrt.cli import main
from localrt.offload.planner.plan import Change
from tests.conftest import write_byte_tokenizer

CONFIG = {**TINY, "vocab_size": 512, "head_dim": 64, "tie_word_embeddings": False}


def test_the_busiest_part_and_the_best_change_are_named() -> None:
    changes = [Change("4 GB more GPU memory", 21.0, 1.6), Change("a faster disk", 14.0, 1.1)]
    assert what_helps({"gpu": 0.3, "link": 0.93}, changes) == (
        "Busiest is the link to the card, 93%. Most would help: 4 GB more GPU memory, about 21.0"
        " tok/s (1.6 times)."
    )
    assert "wait for one another" in what_helps({"gpu": 0.3, "cpu": 0.4}, [])
    unknown = CardUse({}, "Nothing.").to_dict()
    assert card_line(unknown) == "busy while decoding: not known. Nothing."


def test_a_virtual_cards_link_is_busy_where_weights_cross_it(tmp_path: Path) -> None:
    write_store(tmp_path / "m", "Qwen3ForCausalLM", {**CONFIG, "num_hidden_layers": 12}, "int4-g32")
    card = "virtual:10MB@1GB/s,256GB/s,20TFLOPS"
    with localrt.load(tmp_path / "m", device=card, ctx=128, draft="off") as model:
        use = card_use(model, list(range(20)))
        assert model.status().link_bytes
    assert use.busy["link"] > use.busy["gpu"] > 0
    assert use.launches_per_token is None, "nothing is launched on a card that is not there"
    assert use.helps


@pytest.mark.slow
def test_the_command_shows_them_and_says_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    write_store(folder, "Qwen3ForCausalLM", CONFIG, "int4-g32")
    write_byte_tokenizer(folder)
    sizes = ["--prompt-tokens", "16", "--tokens", "4", "--runs", "1", "--ctx", "200"]
    card = ["--engines", "native", "--device", "virtual:20MB@1GB/s,256GB/s,20TFLOPS"]
    assert main(["bench", str(folder), *card, *sizes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (result,) = report["results"]
    assert report["long_prompt_tokens"] == 198
    assert result["simulated"] is True
    assert result["long_ttft_s"] > result["ttft_s"] > 0
    assert result["busy"]["gpu"] > 0
    assert result["launches_per_token"] is None
    assert result["helps"]
