"""The rows of the speculation benchmark in which everything is resident.

A row is a function from a ``Setup`` and its own sizes to results: what was measured.
"""

from __future__ import annotations

from statistics import mean, median
from typing import Any

from benchmarks.speculation.prompts import humaneval, repeated_share, repeating
from benchmarks.speculation.run import (
    GREEDY,
    Answer,
    Check,
    Prompt,
    Running,
    Setup,
    Turns,
    compared,
    take_turns,
)

__all__ = [
    "card_draft",
    "curve",
    "llamacpp_resident",
    "ngram",
    "resident_draft",
    "resident_head",
    "tokens_per_pass",
]

DEPTH = 16
BUDGETS = (16, 64, 128)  # guesses
CURVE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SAMPLED: dict[str, Any] = {"temperature": 0.7, "seed": 1}
# Drafted tokens a pass, and the probability below which llama.cpp ends a draft (its own: 0.75).
PEER_SETTINGS = ((2, 0.0), (4, 0.0), (8, 0.0), (16, 0.75))


def tokens_per_pass(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """Best-first trees of fixed budgets, greedy and at temperature 0.7."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    check, results = Check(), []
    with setup.native(draft=setup.draft) as child:
        for sampling in (GREEDY, SAMPLED):
            contestants = {"plain": _generating(child, tokens, draft="off", **sampling)}
            for budget in BUDGETS:
                contestants[str(budget)] = _generating(
                    child, tokens, tree_budget=budget, tree_depth=DEPTH, **sampling
                )
            turns = take_turns(ids, contestants, 1, check=check)
            for budget in BUDGETS:
                each = [a["per_pass"] for (a,) in turns.answers[str(budget)] if a["per_pass"]]
                results.append(
                    {
                        "what": f"K = {budget}, {_named(sampling)}",
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
    with setup.native(draft=setup.draft) as child:
        turns = _plain_and_tuned(child, ids, tokens, rounds, check)
    both = compared(turns, "tuned")
    least = {"what": "the slowest prompt", "unit": "x plain", "value": both["least"]}
    all_of = {"what": "median of prompts", "unit": "x plain", **both}
    return {"results": [all_of, least], "checked": check.record()}


def resident_head(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """The small model with the head that was trained for it."""
    ids = setup.encode(humaneval(setup.humaneval, prompts), setup.small)
    check = Check()
    if setup.head is None:
        return {"results": [], "skipped": "there is no trained head: name one with --head FOLDER"}
    with setup.native(setup.small, draft=setup.head) as child:
        turns = _plain_and_tuned(child, ids, tokens, rounds, check)
    result = {"what": "trained head", "unit": "x plain", **compared(turns, "tuned")}
    return {"results": [result], "checked": check.record()}


def ngram(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """Answers that repeat their prompts, guessed from these alone."""
    texts: list[Prompt] = [*repeating(setup.mtbench, prompts)]
    check = Check()
    with setup.native() as child:
        child.warm_up(texts[0], draft="ngram", **GREEDY)
        turns = take_turns(
            texts,
            {
                "plain": _generating(child, tokens, draft="off", **GREEDY),
                "ngram": _generating(child, tokens, draft="ngram", **GREEDY),
            },
            rounds,
            check=check,
        )
    prompt_ids = setup.encode([str(text) for text in texts])
    said = [answers[0]["ids"] for answers in turns.answers["plain"]]
    shares = [repeated_share(a, b) for a, b in zip(prompt_ids, said, strict=True)]
    result = {"what": "edits and summaries", "unit": "x plain"}
    result |= {**compared(turns, "ngram"), "repeated_share": median(shares)}
    return {"results": [result], "checked": check.record()}


CARD_RAM = ("350MB", "1320MB")
"""RAM beside the virtual card: what 5 GB are to a target of 16, and Dovetail's own setting, where
the target fits RAM."""


def card_draft(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """Dovetail: the draft on a virtual card, the target computed by the CPU, in virtual time."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    check = Check()
    results = []
    for ram in CARD_RAM:
        with (
            setup.native(ram=ram) as cpu,
            setup.native(device=setup.card, ram=ram) as card,
            setup.native(device=setup.card, ram=ram, draft=setup.draft) as both,
        ):
            for child in (cpu, card, both):
                child.warm_up(ids[0], **GREEDY)
            turns = take_turns(
                ids,
                {
                    "plain": _generating(cpu, tokens, draft="off", **GREEDY),
                    "plain on the card": _generating(card, tokens, draft="off", **GREEDY),
                    "draft on the card": _generating(both, tokens, **GREEDY),
                },
                rounds,
                check=check,
            )
            notes = both.info["notes"]
        better = max(("plain", "plain on the card"), key=turns.rate)
        results.append(
            {
                "what": f"{ram} of RAM, against {better}",
                "unit": "x the better plain",
                **compared(turns, "draft on the card", better),
                "cpu_tok_s": turns.rate("plain"),
                "card_tok_s": turns.rate("plain on the card"),
                "card": setup.card,
                "ram": ram,
                "simulated": True,
                "notes": notes,
            }
        )
    return {"results": results, "checked": check.record()}


def llamacpp_resident(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """Both engines with both models in memory, in turns; llama.cpp's best setting counts."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    check = Check()
    ctx = peer_context(ids, tokens)
    most = max(ahead for ahead, _ in PEER_SETTINGS)
    with (
        setup.native(draft=setup.draft) as ours,
        setup.peer(ctx=ctx, draft=True, ahead=most) as peer,
    ):
        warm_up_both(ours, ids[0])
        peer.warm_up(ids[0], ahead=4)
        contestants = {
            "plain": _generating(ours, tokens, draft="off", **GREEDY),
            "tuned": _generating(ours, tokens, **GREEDY),
            "llama.cpp": _generating(peer, tokens),
        }
        for ahead, p_min in PEER_SETTINGS:
            contestants[peer_name(ahead, p_min)] = _generating(
                peer, tokens, ahead=ahead, p_min=p_min
            )
        turns = take_turns(ids, contestants, rounds)
    for ours_, plain in zip(turns.answers["tuned"], turns.answers["plain"], strict=True):
        check(ours_[0], plain[0])
    settings = {peer_name(*setting): peer_summary(turns, setting) for setting in PEER_SETTINGS}
    best = max(settings, key=lambda name: settings[name]["tok_s"])
    against = {
        f"llama.cpp with the draft ({best})": best,
        "llama.cpp plain": "llama.cpp",
    }
    results = [
        {"what": what, "unit": "x", **compared(turns, "tuned", theirs)}
        for what, theirs in against.items()
    ]
    return {"results": results, "llamacpp": settings, "checked": check.record()}


def curve(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """Tokens per pass, seconds of a pass and tokens per second over K."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    check, points = Check(), []
    with setup.native(draft=setup.draft) as child:
        warm_up_both(child, ids[0])
        contestants = {"plain": _generating(child, tokens, draft="off", **GREEDY)}
        for budget in CURVE:
            contestants[str(budget)] = _generating(
                child, tokens, tree_budget=budget, tree_depth=DEPTH, **GREEDY
            )
        turns = take_turns(ids, contestants, 1, check=check)
        for budget in CURVE:
            points.append(
                {
                    "tree_budget": budget,
                    "tokens_per_pass": turns.per_pass(str(budget)),
                    "verify_s": child.ask("verify", prompt=ids[0], budget=budget),
                    "tok_s": turns.rate(str(budget)),
                }
            )
    results = [{"what": "plain", "unit": "tok/s", "value": turns.rate("plain")}]
    return {"results": results, "points": points, "depth": DEPTH, "checked": check.record()}


# -- shared with the rows under a memory limit -----------------------------------------------------


def peer_context(prompts: list[list[int]], tokens: int) -> int:
    """The context that llama.cpp needs, whose cache it takes whole: no more than that."""
    return -(-(max(map(len, prompts)) + tokens + 2 * DEPTH) // 256) * 256


def peer_name(ahead: int, p_min: float) -> str:
    """A setting in words."""
    return f"{ahead} tokens" + (f", p_min {p_min}" if p_min else "")


def peer_summary(turns: Turns, setting: tuple[int, float]) -> Answer:
    """What llama.cpp does with a setting."""
    name = peer_name(*setting)
    pairs = zip(turns.answers[name], turns.answers["llama.cpp"], strict=True)
    return {
        "tok_s": turns.rate(name),
        "tokens_per_pass": turns.per_pass(name),
        "same_as_its_plain": sum(a[0]["ids"] == b[0]["ids"] for a, b in pairs),
    }


def warm_up_both(child: Running, prompt: Prompt) -> None:
    """Plain and tuned."""
    for options in ({"draft": "off"}, {}):
        child.warm_up(prompt, **options, **GREEDY)


def _plain_and_tuned(
    child: Running, ids: list[list[int]], tokens: int, rounds: int, check: Check
) -> Turns:
    warm_up_both(child, ids[0])
    contestants = {
        "plain": _generating(child, tokens, draft="off", **GREEDY),
        "tuned": _generating(child, tokens, **GREEDY),
    }
    return take_turns(ids, contestants, rounds, check=check)


def _generating(child: Running, tokens: int, **options: Any) -> Any:
    return lambda prompt: child.generate(prompt, tokens, **options)


def _named(sampling: Any) -> str:
    return "greedy" if sampling["temperature"] == 0 else f"temperature {sampling['temperature']}"
