"""Drafts beside a target on a card: placed by plan, within budgets, never seen in the tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.drafts.acceptance import known_acceptance, remember_acceptance
from localrt.errors import MemoryBudgetError, OptionError
from localrt.offload.memory.process import current_rss
from localrt.quant.ops.native.abi import find_library
from localrt.settings import Settings
from tests.conftest import write_tiny_model
from tests.drafts.conftest import Choose
from tests.inside import engine_of
from tests.real_models import real_model

pytestmark = [
    pytest.mark.skipif(find_library() is None, reason="the CPU kernels are not built"),
    pytest.mark.usefixtures("by_rules", "given_rates"),
]

CARD = "virtual:{}@12GB/s,256GB/s,20TFLOPS"
LARGE, SMALL, TOO_SMALL = (CARD.format(size) for size in ("200MB", "1600kB", "1300kB"))
OPTIONS: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered of one test is not known to the next."""
    monkeypatch.setenv("LOCALRT_CACHE", str(tmp_path / "cache"))


@contextmanager
def loaded(folders: tuple[Path, Path], device: str, **options: Any) -> Iterator[localrt.Model]:
    target, draft = folders
    with localrt.load(target, device=device, draft=str(draft), ctx=128, **options) as model:
        yield model


def note(model: localrt.Model) -> str:
    return model.info.notes[-1]


@pytest.mark.parametrize("way", ["draft on card", "both on card", "draft on CPU", "no draft"])
def test_every_way_gives_the_tokens_of_plain_decoding(
    folders: tuple[Path, Path], choose_way: Choose, way: str
) -> None:
    with localrt.load(folders[0], device="cpu", draft="off", ctx=128) as model:
        plain = [model.generate("ab ab ab", seed=n, **_sampling(n)) for n in range(2)]
    choose_way(way)
    with loaded(folders, LARGE, ram="8GB") as model:
        assert "forecast" in note(model)
        for n, expected in enumerate(plain):
            for options in ({"draft": "off"}, {"tree_budget": 8}, {}):
                ours = model.generate("ab ab ab", seed=n, **options, **_sampling(n))
                assert ours.token_ids == expected.token_ids
                assert ours.logprobs == expected.logprobs
                assert ours.metrics.simulated
                assert ours.metrics.decode_tok_s
        last = model.generate("ab ab ab", tree_budget=8, **OPTIONS)
        assert str(last.metrics.speculation).startswith("speculation: model") is (way != "no draft")


def _sampling(n: int) -> dict[str, Any]:
    return {**OPTIONS, "temperature": 1.1 * n, "logprobs": 1}


def test_the_way_decides_what_computes(folders: tuple[Path, Path], choose_way: Choose) -> None:
    """Which resources are busy: the card's with its draft, the CPU's with the target."""
    for way, used in (
        ("draft on card", {"cpu", "gpu"}),
        ("both on card", {"gpu", "link", "cpu"}),
        ("draft on CPU", {"gpu", "link", "cpu"}),
    ):
        choose_way(way)
        with loaded(folders, LARGE) as model:
            engine: Any = engine_of(model)
            before = engine.counts().busy_s.get("gpu", 0.0)
            model.generate("ab ab ab", tree_budget=8, **OPTIONS)
            counts = engine.counts()
            assert set(counts.busy_s) - {"ssd"} == used
            assert counts.busy_s["gpu"] > before
            tasks = {stage.where.on_gpu for stage in engine.residency.stages}
            assert tasks == {way != "draft on card"}


def test_a_draft_on_the_card_is_charged_to_the_clock(
    folders: tuple[Path, Path], choose_way: Choose
) -> None:
    """A card a thousand times slower makes drafting slower, though it computes the same."""
    choose_way("draft on card")
    spent = []
    for device in (LARGE, "virtual:200MB@12GB/s,256MB/s,20GFLOPS"):
        with loaded(folders, device) as model:
            engine: Any = engine_of(model)
            model.generate("ab ab ab", tree_budget=8, **OPTIONS)
            spent.append(engine.counts().busy_s["gpu"])
    assert spent[1] > 100 * spent[0]


def test_the_card_holds_both_or_the_draft_goes_elsewhere(folders: tuple[Path, Path]) -> None:
    with loaded(folders, LARGE) as model:
        engine: Any = engine_of(model)
        card = engine.residency.pipeline.card
        assert card is None or card.card.capacity < 200_000_000  # the draft's part is not its
    with loaded(folders, SMALL) as model:
        assert note(model).startswith("the draft on the card, the target verified by the CPU: ")
    with loaded(folders, TOO_SMALL) as model:
        assert re.search(r"it needs 1\.\d MB and the card has 1\.3 MB", note(model))
        assert not note(model).startswith("the draft on the card")


def test_gpu_memory_bounds_both(folders: tuple[Path, Path]) -> None:
    with loaded(folders, LARGE, gpu_memory="1300kB") as model:
        assert "the card has 1.3 MB" in note(model)


def test_a_draft_that_is_forecast_to_cost_is_left_out(folders: tuple[Path, Path]) -> None:
    """Once its guesses are known not to come true."""
    settings = Settings.from_environment()
    for _ in range(8):
        remember_acceptance(settings, "target", "draft", 0.0)
    with loaded(folders, LARGE) as model:
        assert re.match(
            r"draft \S+ is not used: \S+ tok/s are forecast without it, \S+ with", note(model)
        )
        ours = model.generate("ab", tree_budget=4, **OPTIONS)
        assert "is not used" in str(ours.metrics.speculation)


def test_what_a_draft_is_worth_is_remembered(folders: tuple[Path, Path]) -> None:
    with loaded((folders[0], folders[0]), LARGE) as model:
        for n in range(4):
            model.generate(f"{n} ab", tree_budget=8, **{**OPTIONS, "max_tokens": 40})
    known = known_acceptance(Settings.from_environment(), "target", "target")
    assert known is not None
    assert known > 0.9  # it is the target itself


def test_an_unknown_vocabulary_is_an_error_and_frees_all(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(OptionError, match="another vocabulary: one of the two models has no"):
        localrt.load(folders[0], device=LARGE, draft=str(tmp_path), ctx=128)


def test_bad_input(folders: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no card 'virtual:fast'"):
        localrt.load(folders[0], device="virtual:fast", draft=str(folders[1]))
    with pytest.raises(localrt.LocalrtError, match="nowhere"):
        localrt.load(folders[0], device=LARGE, draft="/nowhere/at/all")
    with pytest.raises(MemoryBudgetError):
        localrt.load(folders[0], device=LARGE, draft=str(folders[1]), ram="1MB")


def test_no_memory_to_stand_for_the_cards(
    folders: tuple[Path, Path], choose_way: Choose, monkeypatch: pytest.MonkeyPatch
) -> None:
    from localrt.drafts import placement as draft_placement

    choose_way("draft on card")
    monkeypatch.setattr(draft_placement, "_new_nbytes", lambda plan: 1 << 50)
    with loaded(folders, LARGE) as model:
        assert "no memory to stand for the virtual card's" in note(model)
        assert model.generate("ab", tree_budget=4, **OPTIONS).token_ids


def test_a_draft_named_later_lies_on_the_cpu_and_takes_its_time(
    folders: tuple[Path, Path],
) -> None:
    with localrt.load(folders[0], device=LARGE, draft="off", ctx=128) as model:
        engine: Any = engine_of(model)
        plain = model.generate("ab ab ab", **OPTIONS)
        before = engine.counts().busy_s.get("cpu", 0.0)
        ours = model.generate("ab ab ab", draft=str(folders[1]), tree_budget=4, **OPTIONS)
        assert ours.token_ids == plain.token_ids
        assert engine.counts().busy_s["cpu"] > before


# -- what is measured ------------------------------------------------------------------------------


def test_a_cache_that_is_damaged_or_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings.from_environment()
    remember_acceptance(settings, "a", "b", 0.8)
    remember_acceptance(settings, "a", "b", 0.4)
    assert known_acceptance(settings, "a", "b") == pytest.approx(0.6)
    assert known_acceptance(settings, "b", "a") is None
    path = settings.cache_dir / "acceptance.json"
    for text in ("[1]", "{", '{"a | b": "high"}', '{"a | b": 7}'):
        path.write_text(text)
        assert known_acceptance(settings, "a", "b") is None
    monkeypatch.setattr(Path, "replace", _refuse)
    remember_acceptance(settings, "a", "b", 0.8)
    assert [each.name for each in settings.cache_dir.iterdir()] == ["acceptance.json"]


def _refuse(*_: Any) -> None:
    raise OSError("read-only")


@pytest.mark.slow
@pytest.mark.real
def test_qwen_verified_by_the_cpu_is_faster_than_plain() -> None:
    """A card of half the target's size, and RAM for a fifth of it: see docs/planner.md."""
    target, draft = real_model("qwen1.5b"), real_model("qwen0.5b")
    prompt = 'def fibonacci(n: int) -> int:\n    """The n-th Fibonacci number."""\n'
    options: dict[str, Any] = {"raw": True, "max_tokens": 24, "temperature": 0.0}
    card = CARD.format("560MB")
    ram = current_rss() + 240_000_000
    with localrt.load(target, device=card, ram=ram, ctx=384, draft=str(draft)) as model:
        assert note(model).startswith("the draft on the card, ")
        faster: list[float] = []
        while len(faster) < 3 and max(faster, default=0) <= 1.5:  # the CPU's part takes real time
            plain = model.generate(prompt, draft="off", **options)
            ours = model.generate(prompt, tree_budget=16, **options)
            assert ours.token_ids == plain.token_ids
            assert (ours.metrics.accepted_per_pass or 0) > 3
            faster.append((ours.metrics.decode_tok_s or 0) / (plain.metrics.decode_tok_s or 1))
    assert max(faster) > 1.5
