"""The tuner in simulated worlds: gains where there are some, and next to no losses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.speculative.source import Ahead, Plan, TreeSize
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.tuner import TOLERANCE, Run, Tuner
from localrt.speculative.worth import Calibration, DraftCost, PassCost


@dataclass
class World:
    """Seconds of a pass by rows, of a draft by levels, and how true a source's first guess is."""

    pass_s: Callable[[int], float]
    chance: dict[str, float]
    level_s: dict[str, float] = field(default_factory=dict)
    claims: float = 0.8  # what sources say of themselves
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def took(self, seconds: float) -> float:
        return seconds * float(np.exp(self.rng.normal() * self.noise))


def chain(budget: int, depth: int, claims: float) -> TokenTree:
    size = min(budget, depth)
    scores = [math.log(claims) * (i + 1) for i in range(size)]
    return TokenTree.of(list(range(size)), list(range(-1, size - 1)), scores, "x")


def generation(world: World, run: Run, tokens: int) -> tuple[float, float]:
    """Seconds with and without speculation."""
    spent, emitted, plain_s = 0.0, 1, 0.0
    while emitted < tokens:
        tree, last = TokenTree.empty(), None
        while (plan := run.plan(1000)) is not None:
            last = plan
            levels = min(plan.depth, plan.budget)
            draft_s = world.took(world.level_s.get(plan.source, 0.0) * (levels + 1))
            spent += draft_s
            worth = run.drafted(plan, chain(plan.budget, levels, world.claims), draft_s)
            if worth is not None:
                tree = worth
                break
        plan = last
        path: list[int] = []
        if plan is not None:
            while len(path) < len(tree) and world.rng.random() < world.chance[plan.source]:
                path.append(len(path))
        seconds = world.took(world.pass_s(1 + len(tree)))
        spent += seconds
        run._tuner.passed(1 + len(tree), seconds)
        run.verified(plan, tree, path, seconds)
        emitted += 1 + len(path)
        plain_s += world.pass_s(1) * (1 + len(path))
    return spent, plain_s


def play(world: World, generations: Sequence[int], **options: bool) -> list[float]:
    """The speed over plain decoding of each generation."""
    tuner = Tuner({name: 0.0 if name == "ngram" else 0.5 for name in world.chance}, **options)
    speeds = []
    tuner.prompt(50, world.pass_s(50))
    for tokens in generations:
        spent, plain = generation(world, tuner.start(tokens, list(world.chance)), tokens)
        speeds.append(plain / spent)
    return speeds


STREAMED = lambda rows: 0.7 + 0.002 * rows  # noqa: E731
RESIDENT = lambda rows: 0.03 + 0.004 * (rows - 1)  # noqa: E731


@pytest.mark.slow
@settings(max_examples=15)
@given(
    st.floats(0.0, 0.97),
    st.floats(0.0, 0.97),
    st.floats(0.0005, 0.3),
    st.floats(0.001, 1.0),
    st.floats(0.1, 0.95),
    st.integers(0, 1000),
)
def test_it_never_loses_more_than_two_in_a_hundred(
    lookup: float, model: float, row: float, level: float, claims: float, seed: int
) -> None:
    """A row costs ``row`` of a plain step more, a level of the draft ``level`` of it."""
    world = World(
        lambda rows: 0.1 * (1 + row * (rows - 1)),
        {"ngram": lookup, "model": model},
        {"model": 0.1 * level},
        claims=claims,
        seed=seed,
    )
    tuner = Tuner({"ngram": 0.0, "model": level})
    if seed % 2:
        tuner.prompt(50, world.pass_s(50))
    for _ in range(5):
        spent, plain = generation(world, tuner.start(128, ["ngram", "model"]), 128)
        assert spent <= 1.02 * plain


def test_it_gains_where_weights_are_streamed() -> None:
    world = World(STREAMED, {"model": 0.85}, {"model": 0.02}, noise=0.05)
    speeds = play(world, [128] * 4, streamed=True)
    assert speeds[0] > 2.5  # from the first generation on
    assert min(speeds[1:]) > 3.0


def test_lookups_gain_where_text_repeats() -> None:
    speeds = play(World(RESIDENT, {"ngram": 0.9}, noise=0.05), [128] * 4)
    assert min(speeds) > 1.3


def test_a_draft_that_always_fails_is_turned_off() -> None:
    world = World(RESIDENT, {"ngram": 0.0}, claims=0.95)
    tuner = Tuner({"ngram": 0.0})
    for _ in range(3):
        run = tuner.start(200, ["ngram"])
        spent, plain = generation(world, run, 200)
        assert spent <= plain * (1 + TOLERANCE)
    assert "off" in run.reason
    assert "seldom come true" in run.reason or "not expected to pay" in run.reason


def test_resident_and_bound_by_arithmetic_is_off_and_says_so() -> None:
    world = World(lambda rows: 0.03 * rows, {"model": 0.9}, {"model": 0.02})
    tuner = Tuner({"model": 1.0})
    run = tuner.start(128, ["model"])
    spent, plain = generation(world, run, 128)
    assert spent <= plain * (1 + TOLERANCE)
    assert run.reason == "speculation: off, the model is resident and CPU-bound"


def test_it_follows_changes() -> None:
    world = World(STREAMED, {"model": 0.0}, {"model": 0.02})
    tuner = Tuner({"model": 0.1}, streamed=True)
    tuner.prompt(50, world.pass_s(50))

    def speed(tokens: int) -> float:
        spent, plain = generation(world, tuner.start(tokens, ["model"]), tokens)
        return plain / spent

    for _ in range(3):
        assert speed(150) > 0.98
    world.chance["model"] = 0.85
    assert max(speed(300) for _ in range(4)) > 1.5
    world.chance["model"] = 0.0
    assert min(speed(150) for _ in range(3)) > 0.98


def test_the_better_source_is_chosen() -> None:
    world = World(STREAMED, {"ngram": 0.2, "model": 0.9}, {"model": 0.01})
    assert play(world, [128] * 3, streamed=True)[-1] > 3.5
    world = World(STREAMED, {"ngram": 0.9, "model": 0.1}, {"model": 0.2})
    assert play(world, [128] * 3, streamed=True)[-1] > 3


def test_a_pass_cost_is_monotone_and_robust() -> None:
    cost = PassCost()
    for seconds in (1.0, 1.1, 9.0, 1.0):
        cost.add(1, seconds)
    assert cost.plain == pytest.approx(1.0)
    assert cost.seconds(9) > 1.0  # a guess, before anything is known
    cost.add_prompt(512, 51.2)
    assert cost.seconds(11) == pytest.approx(1.0 + 10 * 0.15)
    cost.add(5, 1.2)
    cost.add(9, 0.5)  # noise: a larger pass cannot be quicker
    values = [cost.seconds(rows) for rows in range(1, 600)]
    assert all(b >= a for a, b in pairwise(values))
    assert cost.seconds(3) == pytest.approx((1.0 + 1.2) / 2)
    with pytest.raises(ValueError):
        PassCost().seconds(2)


def test_a_draft_cost_scales_with_levels() -> None:
    cost = DraftCost()
    assert cost.seconds(8, 4) is None
    cost.add(16, 7, 0.8)
    assert cost.seconds(16, 3) == pytest.approx(0.4)
    assert cost.seconds(64, 3) == pytest.approx(0.8)


def test_calibration_learns_what_claims_are_worth() -> None:
    calibration = Calibration()
    tree = TokenTree.of([1, 2, 3], [ROOT, 0, ROOT], [math.log(0.9), math.log(0.81), -3.0], "x")
    before = calibration.probabilities(tree)
    assert before[1] == pytest.approx(0.81, abs=0.02)
    for _ in range(60):
        calibration.learn(tree, ())
    assert calibration.probabilities(tree)[0] < 0.1
    for _ in range(200):
        calibration.learn(tree, (0, 1))
    after = calibration.probabilities(tree)
    assert after[0] > 0.9
    assert after[0] + after[2] <= 1 + 1e-9


def test_a_size_is_obeyed() -> None:
    run = Tuner({}).start(100, ["model"], size=TreeSize(64, 16))
    assert run.plan(1000) == Plan("model", 64, 16)
    assert run.plan(10) == Plan("model", 10, 16)
    assert run.plan(0) is None
    run.failed("model", "it broke")
    assert run.plan(10) is None
    assert run.reason == "speculation: off, it broke"


def test_a_tree_of_that_size_is_what_all_sources_propose() -> None:
    run = Tuner({}).start(100, ["ngram", "model"], size=TreeSize(3, 4))
    ours = TokenTree.of([1, 2], [ROOT, 0], [-0.5, -1.0], "ngram")
    theirs = TokenTree.of([1, 3], [ROOT, ROOT], [-0.2, -2.0], "model")
    for _ in range(2):
        plan = run.plan(100)
        assert plan == Plan("model", 3, 4)
        assert run.drafted(plan, theirs, 0.0) is None
        plan = run.plan(100)
        assert plan == Plan("ngram", 3, 4)
        tree = run.drafted(plan, ours, 0.0)
        assert tree is not None
        assert tree.tokens.tolist() == [1, 2, 3]
        assert set(tree.proposed_by(0)) == {"ngram", "model"}
        assert run.plan(100) is None
        run.passed(4, 1.0)
        assert run.ahead(plan, tree) == Ahead("model", 10)
        run.verified(plan, tree, [0], 0.1)
    run.failed("model", "it broke")
    plan = run.plan(100)
    assert plan == Plan("ngram", 3, 4)
    assert run.drafted(plan, ours, 0.0) is not None
    assert run.reason == "speculation: model+ngram, 3 guesses a pass as asked"


def test_a_long_prompt_is_not_read_for_a_draft_that_may_not_pay() -> None:
    tuner = Tuner({"model": 0.1})
    tuner.prompt(200, 0.5)
    run = tuner.start(128, ["model"])
    for _ in range(3):
        assert run.plan(1000, {}, {"model": 200}) is None
        tuner.passed(1, 0.02)
        run.verified(None, TokenTree.empty(), [], 0.02)
    assert run.plan(1000, {}, {"model": 200}) is None
    assert run.plan(1000, {}, {"model": 3}) is not None, "few tokens are no matter"


def test_a_long_prompt_is_read_for_a_draft_that_has_proved_itself() -> None:
    world = World(STREAMED, {"model": 0.85}, {"model": 0.02})
    tuner = Tuner({"model": 0.1}, streamed=True)
    tuner.prompt(50, world.pass_s(50))
    generation(world, tuner.start(128, ["model"]), 128)
    run = tuner.start(128, ["model"])
    plan = run.plan(1000, {}, {"model": 200})
    assert plan is not None
    run.caught_up("model", 200, 4.0)
    assert run.plan(1000) is not None, "what was spent on it stands in nobody's way"
    assert tuner.sources["model"].row_s == pytest.approx(0.02)


def test_a_draft_reads_the_prompt_while_plain_passes_wait() -> None:
    tuner = Tuner({"model": 0.5}, streamed=True)
    run = tuner.start(128, ["model"])
    assert run.plan(1000, {}, {"model": 200}) is None
    assert run.ahead(None, TokenTree.empty()) is None, "whether passes wait is not known"
    run.passed(1, 0.08)
    assert run.plan(1000, {}, {"model": 200}) is None
    assert run.ahead(None, TokenTree.empty()) == Ahead("model", 0)
    assert run.plan(1000, {}, {"model": 1}) is None
    assert run.ahead(None, TokenTree.empty()) is None


def test_more_tokens_of_a_mixture_touch_more_experts() -> None:
    dense, mixture = PassCost(), PassCost(mixture=True)
    for cost in (dense, mixture):
        for _ in range(8):
            cost.add(1, 1.0)
        cost.add_prompt(512, 5.0)  # rows of a prompt cost a hundredth of a plain pass
    assert dense.seconds(8) < 1.2
    assert mixture.seconds(8) > 4  # seven times the experts, nearly
    assert 2 < mixture.seconds(8, hopeful=True) < mixture.seconds(8)
    for rows in (2, 4, 8):
        mixture.add(rows, 1.5)
    assert mixture.seconds(8) == pytest.approx(1.5)  # what was measured stands
