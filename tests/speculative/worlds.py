"""Simulated worlds for the tuner: passes and drafts that take given times and are right by chance.

``python -m tests.speculative.worlds`` says what share of the best fixed size's speed the tuner
reaches in each of ``WORLDS``; with ``NAME=VALUE ...``, when constants of ``tuner.py``,
``acceptance.py`` or ``cost_model.py`` have other values: ``tuner._STAKE=0.5``.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module

import numpy as np

from localrt.speculative.source import TreeSize
from localrt.speculative.tree import ROOT, TokenTree
from localrt.speculative.tuner import Plan, Run, Tuner

RIGHT = 1000  # what the target says, always; a source's own wrong tokens are others


def chain(tokens: Sequence[int], claims: float = 0.8, name: str = "x") -> TokenTree:
    scores = [math.log(claims) * (i + 1) for i in range(len(tokens))]
    return TokenTree.of(list(tokens), list(range(-1, len(tokens) - 1)), scores, name)


@dataclass
class World:
    """A source drafts a chain, each token right with its chance; two sources err on their own.

    A pass takes ``pass_s`` of its rows and waits but for ``row_s`` each; a draft's level costs
    ``level_s``. Sources claim ``claims`` of each token.
    """

    pass_s: Callable[[int], float]
    chance: dict[str, float]
    level_s: Mapping[str, float] = field(default_factory=dict)
    row_s: float = math.inf
    claims: float = 0.8
    noise: float = 0.0
    seed: int = 0
    useful: bool = True  # what is drafted while passes wait
    shared_s: float = 0.0  # that a draft takes from such a pass
    first: float = 1.0  # how many times longer the first two passes of a size take, and drafts
    seen: dict[object, int] = field(default_factory=dict)
    passes: int = 0
    ahead: int = 0  # passes during which a draft went on
    levels: int = 0  # that it has made in the last one, of what was accepted
    used: dict[str, int] = field(default_factory=dict)  # accepted tokens, by source
    reason: str = ""

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)

    def took(self, seconds: float) -> float:
        return seconds * float(np.exp(self.rng.normal() * self.noise))

    def is_fresh(self, size: object) -> bool:
        self.seen[size] = self.seen.get(size, 0) + 1
        return self.first > 1.0 and self.seen[size] <= 2

    def draft(self, plan: Plan) -> TokenTree:
        wrong = 1 + sorted(self.chance).index(plan.source)
        right = self.rng.random(min(plan.budget, plan.depth)) < self.chance[plan.source]
        return chain([RIGHT if r else wrong for r in right], self.claims, plan.source)

    def generation(self, run: Run, tokens: int) -> float:
        """The speed over plain decoding."""
        spent, emitted, plain_s = 0.0, 1, 0.0
        while emitted < tokens:
            tree, last = TokenTree.empty(), None
            while (plan := run.plan(1000, {"model": self.levels})) is not None:
                last, drafted = plan, self.draft(plan)
                ready = plan.ready if plan.source == "model" else 0
                todo = max(plan.depth - ready, 0) if ready else len(drafted) + 1
                draft_s = self.took(self.level_s.get(plan.source, 0.0) * todo)
                fresh = self.is_fresh(plan.source)
                draft_s *= self.first if fresh else 1.0
                spent += draft_s
                if (worth := run.drafted(plan, drafted, draft_s, fresh=fresh)) is not None:
                    tree = worth
                    break
            ahead, path = run.ahead(last, tree), list[int]()
            while (node := tree.follow(path[-1] if path else ROOT, RIGHT)) is not None:
                path.append(node)
                for name in tree.proposed_by(node):
                    self.used[name] = self.used.get(name, 0) + 1
            rows = 1 + len(tree)
            fresh = self.is_fresh(next(n for n in (1, 4, 8, 16, 32, 48, 1001) if n >= rows))
            seconds = self.took(self.pass_s(rows)) * (self.first if fresh else 1.0)
            waited = max(0.0, seconds - self.row_s * rows)
            self.passes, self.levels = self.passes + 1, 0
            if ahead is not None:
                self.ahead += 1
                leaf = not len(tree.children(path[-1] if path else ROOT))
                if self.useful and leaf:  # it came to the likeliest end
                    self.levels = int(waited / self.level_s[ahead[0]])
                seconds += self.shared_s
            spent += seconds
            run.verified(last, tree, path, seconds, waited, self.shared_s, fresh)
            emitted += 1 + len(path)
            plain_s += self.pass_s(1) * (1 + len(path))
        self.reason = run.reason
        return plain_s / spent

    def play(self, lengths: Sequence[int] = (128,) * 4) -> list[float]:
        """The speed of each generation."""
        shares = {n: self.level_s.get(n, 0.0) / self.pass_s(1) for n in self.chance}
        tuner = Tuner(shares)
        tuner.prompt(50, self.pass_s(50))
        return [self.generation(tuner.start(n, list(self.chance)), n) for n in lengths]


def streamed(rows: int) -> float:
    return 0.7 + 0.002 * rows


def resident(rows: int) -> float:
    return 0.03 + 0.004 * (rows - 1)


def waiting(load_s: float = 0.1, row_s: float = 0.003) -> Callable[[int], float]:
    return lambda rows: max(load_s, row_s * rows)


# -- the best fixed size ---------------------------------------------------------------------------

WORLDS = {
    f"{source} {chance}, {pass_s.__name__}": (pass_s, source, chance)
    for pass_s in (resident, streamed)
    for source, chance in (("ngram", 0.9), ("head", 0.6), ("head", 0.8), ("model", 0.9))
}
"""A source whose tokens are each right with a chance; a level of a draft takes 5 % of a pass."""


def make_world(name: str, seed: int) -> World:
    """Return one of ``WORLDS``."""
    pass_s, source, chance = WORLDS[name]
    level_s = {} if source == "ngram" else {source: 0.05 * pass_s(1)}
    return World(pass_s, {source: chance}, level_s, noise=0.03, seed=seed)


def tuned(name: str, seeds: Iterable[int]) -> float:
    """Return the mean speed over plain decoding of four answers a seed, from the first on."""
    return float(np.mean([make_world(name, seed).play() for seed in seeds]))


def best_fixed(name: str, seeds: Iterable[int]) -> float:
    """Return that of the best depth of chains."""

    def fixed(seed: int, depth: int) -> list[float]:
        tuner, own = Tuner({}), make_world(name, seed)
        source, size = list(own.chance), TreeSize(depth, depth)
        return [own.generation(tuner.start(128, source, size=size), 128) for _ in range(4)]

    depths = (1, 2, 4, 8, 12, 16)
    return max(float(np.mean([fixed(seed, depth) for seed in seeds])) for depth in depths)


def main(settings: Sequence[str]) -> None:
    """Print the share of each world, and of all the least and the mean."""
    for setting in settings:
        name, value = setting.split("=")
        module, constant = name.split(".")
        found = import_module(f"localrt.speculative.{module}")
        getattr(found, constant)  # unknown names fail
        setattr(found, constant, ast.literal_eval(value))
    shares = {name: tuned(name, range(5)) / best_fixed(name, range(5)) for name in WORLDS}
    for name, share in shares.items():
        print(f"{share:.3f}  {name}")
    print(f"least {min(shares.values()):.3f}, mean {np.mean(list(shares.values())):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
