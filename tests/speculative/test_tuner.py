"""The tuner in simulated worlds, alone and for shared passes: gains, and next to no losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.speculative.batch_tuner import BatchTuner
from localrt.speculative.cost_model import PassCost
from localrt.speculative.source import TreeSize
from localrt.speculative.tree import TokenTree
from localrt.speculative.tuner import TOLERANCE, Plan, Tuner
from tests.speculative.test_tree import words
from tests.speculative.worlds import (
    RIGHT,
    WORLDS,
    World,
    best_fixed,
    chain,
    resident,
    streamed,
    tuned,
    waiting,
)

# -- gains and losses ------------------------------------------------------------------------------


@pytest.mark.parametrize(("chance", "share"), [(0.9, 0.6), (0.02, 0.95)])
def test_passes_that_a_gpu_records_are_not_learned(chance: float, share: float) -> None:
    """They neither hide what drafts gain nor feign a gain: the first answer bears them."""
    level = {"model": 0.0002}
    usual, recorded = (
        World(lambda rows: 0.002 + 1e-5 * rows, dict.fromkeys(level, chance), level, first=first)
        for first in (1.0, 12.0)
    )
    least = min(usual.play((128,) * 6)[2:])
    assert min(recorded.play((128,) * 6)[2:]) > share * least


def test_rows_are_limited() -> None:
    """To those whose bits are promised, but for a tree of an explicit size."""
    tree = chain(range(20), 0.99)
    tuner = Tuner({"ngram": 0.0}, most_rows=8)
    for rows in (1, 1, 1, 16):
        tuner.cost.add(rows, 1.0)
    for size, most in ((None, 7), (TreeSize(20, 20), 20)):
        plan = tuner.start(1000, ["ngram"], size=size).plan(100)
        assert plan is not None
        assert plan.budget == most
    batch = BatchTuner(tuner)
    batch.should_draft(3)
    assert sum(map(len, batch.choose([tree] * 3, 100))) == 8 - 3
    assert not any(map(len, batch.choose([tree] * 3, 100, prompt_rows=8)))


@pytest.mark.slow
@settings(max_examples=15)
@given(
    *(st.floats(0.0, 0.97), st.floats(0.0, 0.97), st.floats(0.0005, 0.3), st.floats(0.001, 1.0)),
    *(st.floats(0.1, 0.95), st.integers(0, 1000)),
)
def test_loss_resident(
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
    assert min(world.play([128] * 5)) >= 1 / 1.02


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n != "head 0.8, resident")) for n in WORLDS],
)
def test_nearly_the_best_fixed_size(name: str) -> None:
    """Counting all that was tried first: five answers of four texts each."""
    seeds = range(5)
    assert tuned(name, seeds) > 0.85 * best_fixed(name, seeds)


@pytest.mark.parametrize(
    ("world", "why"),
    [
        (World(resident, {"ngram": 0.0}, claims=0.95), "the target would accept"),
        (
            World(lambda rows: 0.03 * rows, {"model": 0.9}, {"model": 0.02}),
            "speculation: off, drafts of model would cost more time than they save",
        ),
        (
            World(lambda rows: 0.03 * rows, {"ngram": 0.0, "model": 0.3}, {"model": 0.02}),
            "the target would accept 80% of first choices",
        ),
    ],
    ids=["always wrong", "bound by arithmetic", "the better of two"],
)
def test_off(world: World, why: str) -> None:
    assert min(world.play([200] * 3)) >= 1 / (1 + TOLERANCE)
    assert "off" in world.reason
    assert why in world.reason


def test_changes() -> None:
    world = World(streamed, {"model": 0.0}, {"model": 0.02})
    tuner = Tuner({"model": 0.1})
    tuner.prompt(50, world.pass_s(50))

    def speeds(count: int, tokens: int) -> list[float]:
        return [world.generation(tuner.start(tokens, ["model"]), tokens) for _ in range(count)]

    assert min(speeds(3, 150)) > 0.98
    world.chance["model"] = 0.85
    assert max(speeds(4, 300)) > 1.5
    world.chance["model"] = 0.0
    assert min(speeds(3, 150)) > 0.98


def test_tried_again_within_an_answer() -> None:
    world = World(resident, {"model": 0.0}, {"model": 0.002})
    run = Tuner({"model": 0.002 / resident(1)}).start(1000, ["model"])
    assert world.generation(run, 400) > 0.98
    world.chance["model"] = 0.9
    assert world.generation(run, 600) > 1.3


# -- costs -----------------------------------------------------------------------------------------


def test_pass_cost() -> None:
    cost = PassCost()
    for seconds in (1.0, 1.1, 9.0, 1.0):
        cost.add(1, seconds)
    assert cost.plain == pytest.approx(1.0)
    assert cost.seconds(9) > 1.0  # an estimate, before anything is known
    cost.add_prompt(512, 51.2)
    assert cost.seconds(11) == pytest.approx(1.0 + 10 * 0.1)
    cost.add(5, 1.2)
    cost.add(9, 0.5)  # noise: a larger pass cannot be quicker
    values = [cost.seconds(rows) for rows in range(1, 600)]
    assert all(b >= a for a, b in pairwise(values))
    assert cost.seconds(3) == pytest.approx((1.0 + 1.2) / 2)
    with pytest.raises(ValueError):
        PassCost().seconds(2)


def test_pass_cost_of_mixtures() -> None:
    dense, mixture = PassCost(), PassCost(mixture=True)
    for cost in (dense, mixture):
        for _ in range(8):
            cost.add(1, 1.0)
        cost.add_prompt(512, 5.0)  # rows of a prompt cost a hundredth of a plain pass
    assert dense.seconds(8) < 1.2
    assert mixture.seconds(8) > 4  # seven times the experts, nearly
    for rows in (2, 4, 8):
        mixture.add(rows, 1.5)
    assert mixture.seconds(8) == pytest.approx(1.5)  # what was measured stands


# -- a fixed size ----------------------------------------------------------------------------------


def test_fixed_size() -> None:
    run = Tuner({}).start(100, ["model"], size=TreeSize(64, 16))
    assert run.plan(1000) == Plan("model", 64, 16)
    assert run.plan(10) == Plan("model", 10, 16)
    assert run.plan(0) is None
    run.failed("model", "it broke")
    assert run.plan(10) is None
    assert run.reason == "speculation: off, it broke"


# -- a prompt that a draft has not read ------------------------------------------------------------


def test_long_prompt_not_read() -> None:
    tuner = Tuner({"model": 0.1})
    tuner.prompt(200, 0.5)
    run = tuner.start(128, ["model"])
    for _ in range(3):
        assert run.plan(1000, {}, {"model": 200}) is None
        run.verified(None, TokenTree.empty(), [], 0.02)
    assert run.plan(1000, {}, {"model": 200}) is None
    assert run.plan(1000, {}, {"model": 3}) is not None, "few tokens are no matter"


def test_long_prompt_read_in_gaps() -> None:
    tuner = Tuner({"model": 0.5})
    run = tuner.start(128, ["model"])
    assert run.plan(1000, {}, {"model": 200}) is None
    assert run.ahead(None, TokenTree.empty()) is None, "whether passes wait is not known"
    tuner.waits.append(0.08)
    assert run.plan(1000, {}, {"model": 200}) is None
    assert run.ahead(None, TokenTree.empty()) == ("model", 0)
    assert run.plan(1000, {}, {"model": 1}) is None
    assert run.ahead(None, TokenTree.empty()) is None


# -- one tree of several sources -------------------------------------------------------------------


def test_joined_tree_of_a_wrong_source() -> None:
    tuner = Tuner({"model": 0.1, "ngram": 0.0})
    trees = {"model": chain([RIGHT] * 2, name="model"), "ngram": chain([5, 6], name="ngram")}
    for _ in range(60):
        tree = tuner.joined(trees, 100)
        assert set(tree.sources) == {"model", "ngram"}
        tuner.learn(trees, tree, [n for n in range(len(tree)) if tree.tokens[n] == RIGHT])
    assert len(tuner.joined({}, 10)) == 0
    chances = {path: math.exp(score) for path, score in words(tuner.joined(trees, 100)).items()}
    assert tuner.joined(trees, 2).tokens.tolist() == [RIGHT, RIGHT]
    assert chances[RIGHT,] > 0.85
    assert chances[5,] < 0.1


# -- drafting while passes wait --------------------------------------------------------------------


def test_gaps_are_worth_speed() -> None:
    useful, useless = (
        World(waiting(), {"model": 0.95}, {"model": 0.008}, 0.003, useful=useful)
        for useful in (True, False)
    )
    speed = useful.play([128] * 6)[-1]
    assert speed > 1.1 * useless.play([128] * 6)[-1]
    assert "drafted while weights load" in useful.reason


def test_passes_that_do_not_wait() -> None:
    world = World(lambda rows: 0.02 * rows, {"model": 0.9}, {"model": 0.002}, 0.02)
    world.play([300] * 6)
    assert not world.ahead


# -- sequences that share passes -------------------------------------------------------------------


@cache
def claimed(chance: float, size: int) -> TokenTree:
    scores = [math.log(chance) * (i + 1) for i in range(size)]
    return TokenTree.of(list(range(size)), list(range(-1, size - 1)), scores, "ngram")


def flat(rows: int) -> float:
    """The disk takes the time."""
    return 0.06 + 1e-5 * rows


def bound(rows: int) -> float:
    """Every row takes as long as the first."""
    return 0.01 * rows


@pytest.mark.parametrize("chance", [0.05, 0.95])
@pytest.mark.parametrize("cost", [flat, bound])
def test_gain(chance: float, cost: Callable[[int], float]) -> None:
    """Sources claim 0.8, whatever is true."""
    rng = np.random.default_rng(3)
    tuner = Tuner({"ngram": 0.0})
    found, acceptance = BatchTuner(tuner), tuner.sources["ngram"].acceptance
    spent = plain = 0.0
    for _ in range(600):
        sure = claimed(0.8, 8)
        drafts = [acceptance.rescored(sure)] * 6
        ready = found.should_draft(6)
        chosen = found.choose(drafts if ready else [TokenTree.empty()] * 6, 200)
        emitted = 0
        for tree in chosen:
            path = 0
            while path < len(tree) and rng.random() < chance:
                path += 1
            emitted += 1 + path
            if len(tree):
                for level in range(min(path + 1, len(tree))):
                    acceptance.tested(0.8, accepted=level < path)
        rows = 6 + sum(map(len, chosen))
        seconds = cost(rows)
        found.passed(rows - 6, emitted, seconds, 0.0)
        spent += seconds
        plain += cost(6) * emitted / 6
    assert spent < plain * (1 + 2 * TOLERANCE)
    if chance > 0.9 and cost is flat:
        assert plain > 4 * spent
