"""The rows of the speculation benchmark under a memory limit: a control group for each process.

Ours and our plain streaming take turns; llama.cpp's processes run one after the other, since the
page cache of a file is charged to whoever reads it first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.speculation.prompts import humaneval
from benchmarks.speculation.rows import peer_context, peer_name, warm_up_both
from benchmarks.speculation.run import (
    GREEDY,
    MB,
    Answer,
    Check,
    Running,
    Setup,
    Turns,
    compared,
    take_turns,
)
from localrt.bench.process import ChildError
from localrt.errors import LocalrtError

__all__ = ["bubbles", "in_all", "own_limit"]

OWN_LIMIT = 850 * MB
IN_ALL = 1000 * MB
# What a draft's cache is measured with: a prompt, an answer and the largest tree.
_DRAFT_TOKENS, _DRAFT_ANSWER = 1024, 16
# Drafted tokens a pass under a limit, where a pass costs hundreds of times a row.
_PEER_SETTINGS = ((4, 0.0), (8, 0.0), (16, 0.75))
_PEER_PROMPTS, _PEER_TOKENS, _PEER_PLAIN_TOKENS = 2, 48, 24


def own_limit(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """The target within 850 MB; the draft's memory comes on top, and is stated."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    check = Check()
    need = draft_bytes(setup, ids)
    with (
        setup.native(limit=OWN_LIMIT) as plain,
        setup.native(draft=setup.draft, limit=OWN_LIMIT + need) as tuned,
    ):
        turns = _streamed(ids, tokens, rounds, plain, tuned, check)
        peaks = {"peak_plain_bytes": plain.peak(), "peak_bytes": tuned.peak()}
    result = {"what": "against plain streaming", "unit": "x plain"}
    result |= {**compared(turns, "tuned"), **_reads(turns), **peaks}
    limits = {"limit_bytes": OWN_LIMIT, "draft_bytes": need, "draft_tokens": _DRAFT_TOKENS}
    return {"results": [result], **limits, "checked": check.record()}


def in_all(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """Target and draft within 1000 MB together, against all who have as much."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    check = Check()
    with (
        setup.native(limit=IN_ALL) as plain,
        setup.native(draft=setup.draft, limit=IN_ALL) as tuned,
    ):
        turns = _streamed(ids, tokens, rounds, plain, tuned, check)
        peaks = {"peak_plain_bytes": plain.peak(), "peak_bytes": tuned.peak()}
    ours = compared(turns, "tuned")
    few = ids[: setup.prompts or _PEER_PROMPTS]
    peers = {
        "llama.cpp plain": _peers(setup, few, min(tokens, _PEER_PLAIN_TOKENS), ()),
        "llama.cpp with the draft": _peers(setup, few, min(tokens, _PEER_TOKENS), _PEER_SETTINGS),
    }
    results: list[Answer] = [
        {"what": "our plain streaming", "unit": "x", **ours, **_reads(turns), **peaks}
    ]
    for what, found in peers.items():
        best = max(found, key=lambda setting: setting["tok_s"])
        results.append(
            {
                "what": what,
                "unit": "x",
                "value": ours["tok_s"] / best["tok_s"],
                "tok_s": ours["tok_s"],
                "plain_tok_s": best["tok_s"],
            }
        )
    return {
        "results": results,
        "limit_bytes": IN_ALL,
        "llamacpp": peers,
        "checked": check.record(),
    }


def bubbles(setup: Setup, prompts: int, tokens: int, rounds: int) -> Answer:
    """The draft at work while weights are being loaded, against after the pass."""
    ids = setup.encode(humaneval(setup.humaneval, prompts))
    check = Check()
    need = draft_bytes(setup, ids)
    both = {"draft": setup.draft, "limit": OWN_LIMIT + need}
    # A process each: what one learns of its passes is not true of the other's.
    with setup.native(**both) as meanwhile, setup.native(**both) as after:
        after.ask("bubbles", on=False)
        for child in (meanwhile, after):
            warm_up_both(child, ids[0])
        contestants = {
            "plain": lambda prompt: after.generate(prompt, tokens, draft="off", **GREEDY),
            "after": lambda prompt: after.generate(prompt, tokens, **GREEDY),
            "meanwhile": lambda prompt: meanwhile.generate(prompt, tokens, **GREEDY),
        }
        turns = take_turns(ids, contestants, rounds, check=check)
    result = {"what": "against drafting after the pass", "unit": "x"}
    result |= {**compared(turns, "meanwhile", "after"), "plain_streaming": turns.rate("plain")}
    limits = {"limit_bytes": OWN_LIMIT, "draft_bytes": need}
    return {"results": [result], **limits, "checked": check.record()}


def draft_bytes(setup: Setup, ids: list[list[int]]) -> int:
    """The draft's own resident need: what one more of it adds to a process that has one already.

    Measured with ``_DRAFT_TOKENS`` tokens of keys and values, in whole megabytes.
    """
    prompt = [token for prompt in ids for token in prompt]
    prompt = (prompt * (_DRAFT_TOKENS // len(prompt) + 1))[: _DRAFT_TOKENS - _DRAFT_ANSWER]
    with setup.native(setup.draft) as child:
        child.generate(prompt, _DRAFT_ANSWER, **GREEDY)
        taken = int(child.ask("another", prompt=prompt, tokens=_DRAFT_ANSWER))
    return -(-taken // MB) * MB


def _streamed(
    ids: list[list[int]], tokens: int, rounds: int, plain: Running, tuned: Running, check: Check
) -> Turns:
    plain.warm_up(ids[0], **GREEDY)
    warm_up_both(tuned, ids[0])
    contestants = {
        "plain": lambda prompt: plain.generate(prompt, tokens, **GREEDY),
        "tuned": lambda prompt: tuned.generate(prompt, tokens, **GREEDY),
    }
    return take_turns(ids, contestants, rounds, check=check)


def _reads(turns: Turns) -> Answer:
    """Bytes read from disk per token of an answer, in all."""
    values: Answer = {}
    for name in ("plain", "tuned"):
        answers = [answer for rounds in turns.answers[name] for answer in rounds]
        read = sum(answer["read_bytes"] or 0 for answer in answers)
        said = sum(len(answer["ids"]) for answer in answers)
        values[f"{name}_read_bytes_per_token"] = round(read / said) if said else None
    return values


def _peers(
    setup: Setup, ids: list[list[int]], tokens: int, settings: Sequence[tuple[int, float]]
) -> list[Answer]:
    """llama.cpp under the limit, plain or with each of the settings of its draft.

    Repacked weights are quicker, and too much for some limits: both ways are tried.
    """
    found, problem = [], ""
    for repack in (True, False):
        try:
            found += _peer(setup, ids, tokens, settings, repack)
        except ChildError as error:
            problem = str(error)
    if not found:
        raise LocalrtError(f"llama.cpp: {problem}")
    return found


def _peer(
    setup: Setup,
    ids: list[list[int]],
    tokens: int,
    settings: Sequence[tuple[int, float]],
    repack: bool,
) -> list[Answer]:
    most = max((ahead for ahead, _ in settings), default=0)
    ctx = peer_context(ids, tokens)
    found = []
    with setup.peer(ctx=ctx, draft=bool(settings), ahead=most, repack=repack, limit=IN_ALL) as peer:
        peer.generate(ids[0], 4)
        for ahead, p_min in settings or ((0, 0.0),):

            def one(prompt: Any, ahead: int = ahead, p_min: float = p_min) -> Answer:
                return peer.generate(prompt, tokens, ahead=ahead, p_min=p_min)

            turns = take_turns(ids, {"it": one}, 1)
            name = peer_name(ahead, p_min) if ahead else "plain"
            found.append(
                {
                    "setting": name + (", repacked" if repack else ", mapped"),
                    "tok_s": turns.rate("it"),
                    "tokens_per_pass": turns.per_pass("it"),
                    "prompts": len(ids),
                    "tokens": tokens,
                    "peak_bytes": peer.peak(),
                }
            )
    return found
