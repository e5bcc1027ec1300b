"""The rows of the speculation benchmark: resident, and under a memory limit.

A row is a function from a ``Setup`` and its own sizes to results: what was measured.
"""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from benchmarks.speculation.prompts import humaneval, repeated_share, repeating
from benchmarks.speculation.run import (
    GREEDY,
    MB,
    Answer,
    Check,
    Prompt,
    Running,
    Setup,
    Turns,
    compared,
    take_turns,
)

__all__ = ["in_all", "ngram", "own_limit", "resident_draft", "tokens_per_pass"]

DEPTH = 16
BUDGETS = (16, 64, 128)  # guesses
SAMPLED: dict[str, Any] = {"temperature": 0.7, "seed": 1}
OWN_LIMIT = 850 * MB
IN_ALL = 1000 * MB
# What a draft's cache is measured with: a prompt, an answer and the largest tree.
_DRAFT_TOKENS, _DRAFT_ANSWER = 1024, 16


def tokens_per_pass(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """Best-first trees of fixed budgets, greedy and at temperature 0.7."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    check, results = Check(), []
    with setup.child(draft=setup.draft) as child:
        for sampling in (GREEDY, SAMPLED):
            contestants = {"plain": _generating(child, tokens, draft="off", **sampling)}
            for budget in BUDGETS:
                contestants[str(budget)] = _generating(
                    child, tokens, tree_budget=budget, tree_depth=DEPTH, **sampling
                )
            turns = take_turns(ids, contestants, rounds, check=check)
            kind = "greedy" if sampling is GREEDY else f"temperature {sampling['temperature']}"
            for budget in BUDGETS:
                each = [a["per_pass"] for (a,) in turns.answers[str(budget)] if a["per_pass"]]
                results.append(
                    {
                        "what": f"K = {budget}, {kind}",
                        "unit": "tokens per pass",
                        "value": turns.per_pass(str(budget)),
                        "mean_of_prompts": mean(each),
                        "of_each": each,
                        "depth": DEPTH,
                        **sampling,
                    }
                )
    return {"results": results, "checked": check.record()}


def resident_draft(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """A draft model beside a resident target: it may not cost anything."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    check = Check()
    with setup.child(draft=setup.draft) as child:
        turns = _plain_and_tuned(child, child, ids, tokens, rounds, check)
    both = compared(turns, "tuned")
    least = {"what": "the slowest prompt", "unit": "x plain", "value": both["least"]}
    all_of = {"what": "median of prompts", "unit": "x plain", **both}
    return {"results": [all_of, least], "checked": check.record()}


def ngram(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """Answers that repeat their prompts, guessed from these alone."""
    texts: list[Prompt] = [*repeating(setup.mtbench, prompts)]
    check = Check()
    with setup.child() as child:
        child.warm_up(texts[0], draft="ngram", **GREEDY)
        contestants = {
            "plain": _generating(child, tokens, draft="off", **GREEDY),
            "ngram": _generating(child, tokens, draft="ngram", **GREEDY),
        }
        turns = take_turns(texts, contestants, rounds, check=check)
    prompt_ids = setup.encode([str(text) for text in texts])
    answered = [answers[0]["ids"] for answers in turns.answers["plain"]]
    shares = [repeated_share(a, b) for a, b in zip(prompt_ids, answered, strict=True)]
    result = {"what": "edits and summaries", "unit": "x plain"}
    result |= {**compared(turns, "ngram"), "repeated_share": median(shares)}
    return {"results": [result], "checked": check.record()}


def own_limit(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """The target within 850 MB; the draft's memory comes on top, and is stated."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    need = _draft_bytes(setup, ids)
    found = _streamed(setup, ids, tokens, rounds, OWN_LIMIT, OWN_LIMIT + need)
    return {**found, "limit_bytes": OWN_LIMIT, "draft_bytes": need, "draft_tokens": _DRAFT_TOKENS}


def in_all(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """Target and draft within 1000 MB together, against the target that has as much."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    return {**_streamed(setup, ids, tokens, rounds, IN_ALL, IN_ALL), "limit_bytes": IN_ALL}


def _draft_bytes(setup: Setup, ids: list[list[int]]) -> int:
    """The draft's own resident need: what one more of it adds to a process that has one already.

    Measured with ``_DRAFT_TOKENS`` tokens of keys and values, in whole megabytes.
    """
    prompt = [token for prompt in ids for token in prompt]
    prompt = (prompt * (_DRAFT_TOKENS // len(prompt) + 1))[: _DRAFT_TOKENS - _DRAFT_ANSWER]
    with setup.child(setup.draft) as child:
        child.generate(prompt, _DRAFT_ANSWER, **GREEDY)
        taken = int(child.ask("another", prompt=prompt, tokens=_DRAFT_ANSWER))
    return -(-taken // MB) * MB


def _streamed(
    setup: Setup, ids: list[list[int]], tokens: int, rounds: int, limit: int, limit_with_draft: int
) -> Answer:
    """Plain and with the draft, each in a control group of its own."""
    check = Check()
    with (
        setup.child(limit=limit) as plain,
        setup.child(draft=setup.draft, limit=limit_with_draft) as tuned,
    ):
        turns = _plain_and_tuned(plain, tuned, ids, tokens, rounds, check)
        result = {"what": "against plain streaming", "unit": "x plain", **compared(turns, "tuned")}
        for name, child in (("plain", plain), ("tuned", tuned)):
            answers = [answer for rounds in turns.answers[name] for answer in rounds]
            read = sum(answer["read_bytes"] or 0 for answer in answers)
            count = sum(len(answer["ids"]) for answer in answers)
            result[f"{name}_read_bytes_per_token"] = round(read / count) if count else None
            result[f"{name}_peak_bytes"] = child.peak()
    return {"results": [result], "checked": check.record()}


def _plain_and_tuned(
    plain: Running, tuned: Running, ids: list[list[int]], tokens: int, rounds: int, check: Check
) -> Turns:
    """By turns, each warmed up; one process may be both."""
    plain.warm_up(ids[0], draft="off", **GREEDY)
    tuned.warm_up(ids[0], **GREEDY)
    contestants = {
        "plain": _generating(plain, tokens, draft="off", **GREEDY),
        "tuned": _generating(tuned, tokens, **GREEDY),
    }
    return take_turns(ids, contestants, rounds, check=check)


def _generating(child: Running, tokens: int, **options: Any) -> Any:
    return lambda prompt: child.generate(prompt, tokens, **options)
