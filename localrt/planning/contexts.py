"""How long a conversation may be: the largest context that fits, and the largest that is fast."""

from __future__ import annotations

from dataclasses import replace

from localrt.offload.account import shorter_contexts
from localrt.offload.planner.estimate import estimate
from localrt.offload.planner import Plan
from localrt.offload.planner.plan import PlannedContext
from localrt.offload.planner.verdict import READING_TOK_S

_AS_FAST = 0.9  # of the plan's speed, where that is below reading speed


def largest_contexts(plan: Plan) -> tuple[PlannedContext, ...]:
    """Halves of the model's context are tried, by estimates that are scaled to ``plan``.

    First the largest that fits; then, where answers come below reading speed with all of it held,
    the largest with which they do not. A plan below reading speed is compared with itself.
    """
    request = plan.request
    whole = request.shape.context_length
    now = estimate(request)
    scale = 1.0 if now is None else plan.tok_s / now.tok_s
    enough = min(READING_TOK_S, _AS_FAST * plan.tok_s)

    def found(tokens: int) -> PlannedContext | None:
        expected = estimate(replace(request, ctx=tokens, held=tokens))
        if expected is None:
            return None
        return PlannedContext(tokens, scale * expected.tok_s, whole=tokens == whole)

    largest: PlannedContext | None = None
    for tokens in (whole, *shorter_contexts(whole)):
        tried = found(tokens)
        if tried is None:
            continue
        largest = largest or tried
        if tried.tok_s >= enough:
            return (largest,) if tried is largest else (largest, tried)
    return () if largest is None else (largest,)
