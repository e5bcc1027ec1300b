"""What the rows of the speculation benchmark share: children, turns, comparisons.

Every model runs in a child of its own; contestants take turns prompt by prompt, in changing order,
after a warm-up each, and every generation is compared with plain decoding, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common.memory_limit import LimitedChild, MemoryLimit, drop_from_cache
from localrt.bench.process import ChildProcess, child_command
from localrt.models.checkpoints import open_checkpoint
from localrt.models.tokenizers import load_tokenizer

__all__ = ["GREEDY", "MB", "Answer", "Check", "Running", "Setup", "Turns", "compared", "take_turns"]

MB = 1_000_000
GREEDY: Mapping[str, Any] = {"temperature": 0.0}
_WARM_TOKENS = 64

Answer = dict[str, Any]  # of a child's generation
Prompt = str | list[int]  # a text goes through the chat template


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The models and prompts of a run."""

    target: Path
    draft: Path
    humaneval: Path
    mtbench: Path
    threads: int
    ctx: int = 2048

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of raw texts: every engine is given the same."""
        with closing(open_checkpoint(self.target)) as checkpoint:
            tokenizer = load_tokenizer(checkpoint)
        return [tokenizer.encode(text, add_special=True) for text in texts]

    @contextmanager
    def child(
        self, target: Path | None = None, *, draft: Path | None = None, limit: int | None = None
    ) -> Iterator[Running]:
        """A process with a model, and with a draft; ``limit`` bounds its memory in bytes."""
        group = None
        if limit is not None:
            group = MemoryLimit.create(limit)
            drop_from_cache([self.target, self.draft])
        command = child_command(module="benchmarks.speculation.child")
        with LimitedChild(command, group) if group else ChildProcess(command) as child:
            named = {"target": str(target or self.target), "draft": draft and str(draft)}
            child.ask("load", **named, threads=self.threads, ctx=self.ctx)
            yield Running(child, group)


class Running:
    """A child whose model is loaded."""

    def __init__(self, child: ChildProcess, group: MemoryLimit | None) -> None:
        self._child = child
        self._group = group

    def ask(self, do: str, **values: Any) -> Any:
        """A request of ``child``."""
        return self._child.ask(do, **values)

    def generate(self, prompt: Prompt, tokens: int, **options: Any) -> Answer:
        """One generation."""
        answer: Answer = self._child.ask("generate", prompt=prompt, tokens=tokens, **options)
        return answer

    def warm_up(self, prompt: Prompt, **options: Any) -> None:
        """A generation that does not count."""
        self.generate(prompt, _WARM_TOKENS, **options)

    def peak(self) -> int | None:
        """Most bytes that its memory group has held."""
        return None if self._group is None else self._group.peak()


@dataclass(slots=True)
class Check:
    """Counts generations whose tokens are those of plain decoding."""

    generations: int = 0
    same: int = 0

    def __call__(self, ours: Answer, plain: Answer) -> None:
        self.generations += 1
        self.same += ours["ids"] == plain["ids"]

    def record(self) -> Answer:
        """For the results."""
        return {"generations": self.generations, "same_tokens": self.same}


@dataclass(slots=True)
class Turns:
    """Answers by contestant, then by prompt, one for each round."""

    answers: dict[str, list[list[Answer]]] = field(default_factory=dict)

    def rates(self, name: str) -> list[float | None]:
        """Tokens per second for each prompt, the median of its rounds; None: too short to tell."""
        medians: list[float | None] = []
        for rounds in self.answers[name]:
            known = [a["tok_s"] for a in rounds if a["tok_s"]]
            medians.append(median(known) if known else None)
        return medians

    def rate(self, name: str) -> float:
        """The median over prompts."""
        return median([rate for rate in self.rates(name) if rate])

    def per_pass(self, name: str) -> float | None:
        """Tokens of all passes by passes."""
        later, passes = 0.0, 0.0
        for answer in (a for rounds in self.answers[name] for a in rounds):
            if answer["per_pass"]:
                later += len(answer["ids"]) - 1
                passes += (len(answer["ids"]) - 1) / answer["per_pass"]
        return later / passes if passes else None


Contestant = Callable[[Prompt], Answer]


def take_turns(
    prompts: Sequence[Prompt],
    contestants: Mapping[str, Contestant],
    rounds: int,
    *,
    check: Check,
) -> Turns:
    """Each contestant's answers to each prompt, in changing order.

    ``check`` compares the tokens of all with those of "plain".
    """
    turns = Turns({name: [[] for _ in prompts] for name in contestants})
    for turn in range(rounds):
        for index, prompt in enumerate(prompts):
            names = list(contestants)
            names = names if (turn + index) % 2 == 0 else names[::-1]
            answers = {name: contestants[name](prompt) for name in names}
            for name, answer in answers.items():
                turns.answers[name][index].append(answer)
                if name != "plain":
                    check(answer, answers["plain"])
    return turns


def compared(turns: Turns, ours: str) -> Answer:
    """``ours`` as a multiple of plain decoding: the median of the prompts' ratios, the least."""
    pairs = zip(turns.rates(ours), turns.rates("plain"), strict=True)
    ratios = [a / b for a, b in pairs if a and b]
    last = [rounds[-1] for rounds in turns.answers[ours]]
    return {
        "value": median(ratios),
        "least": min(ratios),
        "of_each": ratios,
        "tok_s": turns.rate(ours),
        "plain_tok_s": turns.rate("plain"),
        "tokens_per_pass": turns.per_pass(ours),
        "why": [answer.get("why") for answer in last],
    }
