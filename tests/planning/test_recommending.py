"""Of a repository's GGUF files, the largest that this machine answers with at reading speed."""

from __future__ import annotations

from pathlib import Path

import pytest

from localrt.hub.choosing import Offer
from localrt.hub.known_models import find_known
from localrt.offload.planner.verdict import READING_TOK_S
from localrt.planning import recommending
from localrt.planning.recommending import recommend
from localrt.settings import Settings

BITS = {"Q2_K": 3.0, "Q3_K_M": 3.9, "Q4_K_M": 4.85, "Q6_K": 6.6, "Q8_0": 8.5, "BF16": 16.0}
CARD = "virtual:8GB@12GB/s,256GB/s,20TFLOPS"


@pytest.fixture(autouse=True)
def all_that_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much of this machine's memory is free."""
    monkeypatch.setattr(recommending, "ram_budget", lambda ram: ram)


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.from_environment({"HF_HOME": str(tmp_path), "LOCALRT_CACHE": str(tmp_path)})


def offer(name: str, *, config: bool = True) -> Offer:
    known = find_known(name)
    assert known is not None
    sizes = {label: round(known.parameters * 1e9 * bits / 8) for label, bits in BITS.items()}
    return Offer(known.repo, sizes, known.config() if config else None)


def test_a_small_model_has_eight_bits(settings: Settings) -> None:
    found = recommend(offer("llama3.2:1b"), settings, ram="8GB", device="cpu")
    assert found.name == "Q8_0"
    assert found.tok_s is not None
    assert found.tok_s > READING_TOK_S
    assert "about" in found.reason


def test_a_larger_one_fewer_and_the_reason_names_what_would_be_slower(settings: Settings) -> None:
    found = recommend(offer("qwen3:30b"), settings, ram="24GB", device="cpu")
    assert found.name in ("Q4_K_M", "Q6_K")
    assert "reading speed (7 tok/s)" in found.reason
    assert "would be slower" in found.reason


def test_a_card_makes_room_for_more(settings: Settings) -> None:
    model = offer("qwen3.5:9b")
    alone = recommend(model, settings, ram="16GB", device="cpu")
    with_card = recommend(model, settings, ram="16GB", device=CARD)
    assert BITS[with_card.name] > BITS[alone.name]


def test_where_none_is_fast_enough_four_bits_are_taken_and_it_is_said(settings: Settings) -> None:
    found = recommend(offer("llama3.3:70b"), settings, ram="16GB", device="cpu")
    assert found.name == "Q4_K_M"
    assert "none of its files reaches reading speed" in found.reason


def test_without_a_config_what_fits_the_memory_counts(settings: Settings) -> None:
    found = recommend(offer("llama3.1:8b", config=False), settings, ram="6GB", device="cpu")
    assert found.name == "Q4_K_M"
    assert found.reason == "the largest of up to 8 bits that fits the memory here"


def test_files_for_other_purposes_are_left_out(settings: Settings) -> None:
    sizes = {"mtp-model": 10**9, "Q4_0_4_4": 3 * 10**9, "Q4_0": 2 * 10**9}
    assert recommend(Offer("org/m", sizes), settings, ram="16GB").name == "Q4_0"
