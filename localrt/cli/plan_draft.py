"""``localrt plan TARGET --draft MODEL``: where the two would lie, and what drafting would bring.

Nothing is loaded. What share of guesses comes true is what earlier runs measured, what the command
line says, or an assumption, and the output names which.
"""

from __future__ import annotations

import argparse

from localrt.drafts.acceptance import known_acceptance
from localrt.errors import MemoryBudgetError, OptionError
from localrt.offload.planner.guessing import PRIOR_ACCEPTANCE
from localrt.offload.planner.pair import AcceptanceSource, PairPlan, PairRequest, plan_pair
from localrt.offload.planner.plan import Plan
from localrt.planning.inputs import find_model, shape_of
from localrt.settings import Settings

__all__ = ["add_draft_arguments", "check_draft_arguments", "plan_draft"]

_CONTEXT, _NODES = 2048, 128


def add_draft_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    group = parser.add_argument_group("speculation")
    group.add_argument("--draft", metavar="MODEL", help="a smaller model that guesses ahead")
    group.add_argument(
        "--acceptance",
        type=float,
        metavar="SHARE",
        help="of the draft's first choices that come true (default: as measured, or 0.7)",
    )


def check_draft_arguments(args: argparse.Namespace) -> None:
    """Raises OptionError: a flag out of its bounds, or one without the other."""
    if args.acceptance is not None and not 0.0 <= args.acceptance <= 1.0:
        raise OptionError(f"--acceptance must be from 0 to 1, is {args.acceptance}")
    if args.draft is None and args.acceptance is not None:
        raise OptionError("--acceptance is that of a draft: name one with --draft")
    if args.draft is not None and args.batch > 1:
        raise OptionError("--draft plans for one sequence: leave --batch out")


def plan_draft(args: argparse.Namespace, plan: Plan) -> PairPlan:
    """The ways to place the draft of ``args`` beside the target that ``plan`` is for.

    Raises:
        MemoryBudgetError: the target fits neither with nor without it.
        LocalrtError: there is no such draft, or it cannot be planned.
    """
    settings, target = Settings.from_environment(), plan.request
    draft = shape_of(find_model(args.draft, settings, revision=args.revision, offline=args.offline))
    known = known_acceptance(settings, target.shape.name, draft.name)
    acceptance, source = PRIOR_ACCEPTANCE, AcceptanceSource.ASSUMED
    if args.acceptance is not None:
        acceptance, source = args.acceptance, AcceptanceSource.GIVEN
    elif known is not None:
        acceptance, source = known, AcceptanceSource.MEASURED
    request = PairRequest(
        target=target,
        draft=draft,
        draft_ctx=min(min(target.ctx, _CONTEXT) + _NODES, draft.context_length),
        acceptance=acceptance,
        source=source,
    )
    pair = plan_pair(request)
    if pair is None:
        raise MemoryBudgetError(f"{target.shape.name} fits neither with nor without a draft")
    return pair
