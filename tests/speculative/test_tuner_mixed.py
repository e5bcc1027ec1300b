"""The tuner with two sources in one tree, and with drafting in the gaps of passes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from localrt.speculative.source import Ahead, Plan, TreeSize
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.tuner import MixedTree, Run, Tuner
from localrt.speculative.worth import AHEAD_S, Calibration, GapWorth
from tests.speculative.test_tree import path_to, trees, words

RIGHT = 1000  # what the target says, always; a source's own wrong guesses are other tokens


def chain(tokens: Sequence[int], claims: float, name: str) -> TokenTree:
    scores = [math.log(claims) * (i + 1) for i in range(len(tokens))]
    return TokenTree.of(list(tokens), list(range(-1, len(tokens) - 1)), scores, name)


@dataclass
class World:
    """A source guesses a chain, each token right with its chance; two sources err on their own.

    A pass waits ``load_s`` and computes ``compute_s`` a row; levels of a draft cost ``level_s``.
    """

    chance: Mapping[str, float]
    level_s: Mapping[str, float]
    load_s: float = 0.1
    row_s: float = 0.002
    seed: int = 0
    in_gaps: bool = True
    useful: bool = True  # what the gaps prepare
    passes: int = 0
    rng: np.random.Generator = field(init=False)
    levels: int = 0  # that the gaps of the pass before have made, of what came true
    used: dict[str, int] = field(default_factory=dict)  # guesses that came true, by source
    orders: int = 0
    shared_s: float = 0.0

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def pass_s(self, rows: int) -> float:
        return max(self.load_s, self.row_s * rows)

    def guesses(self, name: str, budget: int, depth: int) -> TokenTree:
        count = min(budget, depth)
        offset = 1 + sorted(self.chance).index(name)
        tokens = [RIGHT if self.rng.random() < self.chance[name] else offset for _ in range(count)]
        return chain(tokens, 0.8, name)

    def generation(self, run: Run, tokens: int) -> tuple[float, float]:
        """Seconds with and without speculation."""
        spent, emitted, plain_s = 0.0, 1, 0.0
        while emitted < tokens:
            tree, last = TokenTree.empty(), None
            while (plan := run.plan(1000, {"model": self.levels})) is not None:
                last = plan
                ready = plan.ready if plan.source == "model" else 0
                todo = plan.depth + 1 if not ready else max(plan.depth - ready, 0)
                draft_s = self.level_s.get(plan.source, 0.0) * todo
                spent += draft_s
                guesses = self.guesses(plan.source, plan.budget, plan.depth)
                worth = run.drafted(plan, guesses, draft_s)
                if worth is not None:
                    tree = worth
                    break
            order = run.ahead(last, tree)
            path: list[int] = []
            node = ROOT
            while True:
                right = [n for n in tree.children(node).tolist() if tree.tokens[n] == RIGHT]
                if not right:
                    break
                node = right[0]
                path.append(node)
                for name in tree.proposed_by(node):
                    self.used[name] = self.used.get(name, 0) + 1
            seconds = self.pass_s(1 + len(tree))
            waited = seconds - self.row_s * (1 + len(tree))
            self.levels = 0
            self.passes += 1
            if order is not None:
                self.orders += 1
                if self.useful and not len(tree.children(node)):  # it came to the likeliest end
                    self.levels = int(waited / self.level_s[order.source])
                seconds += self.shared_s
            run.passed(1 + len(tree), waited, self.shared_s)
            spent += seconds
            run._tuner.passed(1 + len(tree), seconds)
            run.verified(last, tree, path, seconds)
            emitted += 1 + len(path)
            plain_s += self.pass_s(1) * (1 + len(path))
        return spent, plain_s

    def play(self, generations: int = 4, tokens: int = 128, **options: bool) -> list[float]:
        """The speed over plain decoding of each generation."""
        shares = {n: self.level_s.get(n, 0.0) / self.pass_s(1) for n in self.chance}
        tuner = Tuner(shares, **options)
        tuner.prompt(50, self.pass_s(50))
        speeds = []
        for _ in range(generations):
            run = tuner.start(tokens, list(self.chance), in_gaps=self.in_gaps)
            spent, plain = self.generation(run, tokens)
            speeds.append(plain / spent)
        self.reason = run.reason
        return speeds


@settings(max_examples=6)
@given(
    st.floats(0.0, 0.97),
    st.floats(0.0, 0.97),
    st.floats(0.0001, 0.05),
    st.floats(0.0002, 0.1),
    st.floats(0.0, 0.01),
    st.integers(0, 1000),
)
def test_it_never_loses_more_than_two_in_a_hundred(
    lookup: float, model: float, row: float, level: float, shared: float, seed: int
) -> None:
    world = World({"ngram": lookup, "model": model}, {"model": level}, row_s=row, seed=seed)
    world.shared_s = shared
    assert min(world.play(5, streamed=bool(seed % 2))) >= 1 / 1.02


def test_two_sources_in_one_tree_are_better_than_the_better_one() -> None:
    levels = {"model": 0.002}
    alone = World({"model": 0.75}, levels).play(2, tokens=700)
    both = World({"ngram": 0.5, "model": 0.75}, levels)
    assert both.play(2, tokens=700)[1] > 1.02 * alone[1]
    assert both.used["ngram"] > 20
    assert both.used["model"] > both.used["ngram"]


def test_a_source_that_is_always_wrong_costs_no_rows() -> None:
    mixed, good, bad = MixedTree(), Calibration(), Calibration()
    for _ in range(60):
        mixed.add("model", chain([RIGHT, RIGHT], 0.8, "model"), good)
        mixed.add("ngram", chain([5, 6], 0.8, "ngram"), bad)
        tree = mixed.tree(100)
        assert set(tree.sources) == {"model", "ngram"}
        nodes = [n for n in range(len(tree)) if tree.tokens[n] == RIGHT]
        mixed.learn(tree, tuple(nodes))
        mixed.clear()
    mixed.add("model", chain([RIGHT, RIGHT], 0.8, "model"), good)
    mixed.add("ngram", chain([5, 6], 0.8, "ngram"), bad)
    best = mixed.tree(2)
    assert best.tokens.tolist() == [RIGHT, RIGHT]
    chances = {path: math.exp(score) for path, score in words(mixed.tree(9)).items()}
    assert chances[RIGHT,] > 0.85
    assert chances[5,] < 0.1
    mixed.add("ngram", chain([5, 6], 0.8, "ngram"), good)
    (first, second) = (mixed.tree(9).scores[n] for n in mixed.tree(9).children(ROOT))
    assert math.exp(first) + math.exp(second) <= 1 + 1e-9


def test_each_source_learns_from_its_own_guesses() -> None:
    mixed, one, two = MixedTree(), Calibration(), Calibration()
    mixed.add("a", chain([1, 2, 3], 0.9, "a"), one)
    mixed.add("b", chain([1, 9], 0.9, "b"), two)
    tree = mixed.tree(100)
    first = tree.children(ROOT).tolist()
    assert len(first) == 1
    assert tree.proposed_by(first[0]) == ("a", "b")
    (second,) = [n for n in tree.children(first[0]).tolist() if tree.tokens[n] == 2]
    for _ in range(30):
        mixed.learn(tree, (first[0], second))
    assert one.believed(0.9) > two.believed(0.9)
    mixed.clear()
    assert len(mixed.tree(10)) == 0


@settings(max_examples=10)
@given(trees("a"), trees("b"), st.integers(0, 30), st.integers(0, 20))
def test_a_mixed_tree_is_a_tree_of_what_was_proposed(
    a: TokenTree, b: TokenTree, most: int, taken: int
) -> None:
    mixed, calibrations = MixedTree(), [Calibration(), Calibration()]
    mixed.add("a", a, calibrations[0])
    mixed.add("b", b, calibrations[1])
    tree = mixed.tree(most)
    assert len(tree) <= most
    assert set(words(tree)) <= set(words(a)) | set(words(b))
    for node in range(len(tree)):
        path = tuple(tree.tokens[list(path_to(tree, node))].tolist())
        assert set(tree.proposed_by(node)) == {
            name for name, own in (("a", a), ("b", b)) if path in words(own)
        }
    verified = tree.trim(taken)
    mixed.learn(verified, path_to(verified, len(verified) - 1) if len(verified) else ())


# -- gaps ------------------------------------------------------------------------------------------


def test_what_the_gaps_prepare_is_worth_speed() -> None:
    speeds = {}
    for in_gaps in (True, False):
        world = World({"model": 0.95}, {"model": 0.008}, row_s=0.003, in_gaps=in_gaps)
        speeds[in_gaps] = world.play(6, streamed=True)[-1]
        assert (world.orders > 0) == in_gaps
        assert ("drafted while weights load" in world.reason) == in_gaps
    assert speeds[True] > 1.1 * speeds[False]


def test_there_are_no_threads_where_nothing_waits() -> None:
    world = World({"model": 0.9}, {"model": 0.002}, load_s=0.0, row_s=0.02)
    world.play()
    assert world.orders == 0


def test_gaps_that_cost_more_than_they_bring_are_left_alone() -> None:
    world = World({"model": 0.9}, {"model": 0.008}, row_s=0.003, useful=False)
    world.shared_s = 0.01
    world.play(6, tokens=300, streamed=True)
    assert 0 < world.orders < 0.3 * world.passes


def test_the_worth_of_gaps() -> None:
    worth = GapWorth()
    assert not worth.pays(9), "nothing is known of gaps"
    worth.passed(1, 2 * AHEAD_S)
    worth.passed(17, AHEAD_S / 2)
    assert worth.pays(1)
    assert not worth.pays(20)
    for _ in range(8):
        worth.drafted(0.0, 0.01)
    assert not worth.pays(1)
    for _ in range(600):
        worth.passed(1, 2 * AHEAD_S)
    assert worth.pays(1)  # it is tried again
    for _ in range(30):
        worth.drafted(0.05, 0.001)
    assert worth.pays(1)


def test_an_explicit_size_drafts_ahead_where_passes_wait() -> None:
    tree = TokenTree.of([1], [ROOT], [-1.0], "model")
    run = Tuner({}).start(100, ["model"], size=TreeSize(16, 8))
    plan = run.plan(1000, {"model": 3})
    assert plan == Plan("model", 16, 8, 3)
    assert run.ahead(plan, tree) is None  # nothing is known of gaps
    run.passed(2, 2 * AHEAD_S)
    assert run.ahead(plan, tree) == Ahead("model", 40)
    run.passed(2, 0.0)
    run.passed(2, 0.0)
    assert run.ahead(plan, tree) is None
    late = Tuner({}).start(100, ["model"], size=TreeSize(16, 8), in_gaps=False)
    late.passed(2, 1.0)
    assert late.ahead(plan, tree) is None


def test_lookups_and_plain_steps_prepare_nothing() -> None:
    tuner = Tuner({"ngram": 0.0, "model": 0.1}, streamed=True)
    run = tuner.start(100, ["ngram", "model"])
    run.passed(1, 0.1)
    tree = TokenTree.of([1], [ROOT], [-1.0], "x")
    assert run.ahead(None, TokenTree.empty()) is None
    assert run.ahead(Plan("ngram", 8, 4), tree) is None
    assert run.ahead(Plan("model", 8, 4), tree) == Ahead("model", 20)
    assert run.ahead(Plan("model", 8, 4), TokenTree.empty()) is None
    with pytest.raises(KeyError):
        run.ahead(Plan("nobody", 8, 4), tree)
