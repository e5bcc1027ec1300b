"""``localrt plan [MODEL]``: whether a model is fast enough here, what to type, and what would help.

Without further flags it plans for this machine; with them for one that need not exist, from a
``config.json`` alone if there are no weights. Nothing is loaded. Without a model it lists what runs
well.
"""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from localrt import system
from localrt.cli.help import Examples
from localrt.cli.options import HUB_FLAGS, Flag, add_flags, add_hub_arguments, flag_values
from localrt.cli.output import say_result
from localrt.common.errors import MemoryBudgetError, OptionError
from localrt.common.option_names import option
from localrt.common.settings import DEFAULT_CONTEXT, Settings
from localrt.library import plan
from localrt.planning.describe_pc import PRESETS
from localrt.planning.measure import Hardware
from localrt.planning.models import find_model, shape_of
from localrt.planning.plan import Plan
from localrt.planning.recommend import what_runs
from localrt.quant.ops.kv_formats import KV_FORMATS

if TYPE_CHECKING:
    from localrt.drafts.placement import PairPlan

EXAMPLES: Examples = (
    ("localrt plan", "what this PC runs well"),
    ("localrt plan qwen3:8b", "whether it is fast enough here, what to type, and what would help"),
    ("localrt plan model.gguf --ram 2GB", "this machine, with 2 GB of memory for the model"),
    (
        'localrt plan qwen3:30b --pc "RTX 4060, 32GB DDR5-5600, 8 cores, NVMe"',
        "a PC that you do not have",
    ),
    ("localrt plan org/name --ctx 32768 --kv-format int8", "a long context"),
)

_MODEL_HELP = (
    "a short name like qwen3:8b, org/name of the hub, a folder, a .gguf file, or a config.json (or "
    "its folder) without weights (default: what this PC runs well)"
)
_ACCEPTANCE_HELP = (
    "share of the draft's first choices that are accepted, from 0 to 1 (default: 0.7)"
)
_PLAN: tuple[Flag, ...] = (
    ("--ctx", int, "TOKENS", f"longest conversation (default: {DEFAULT_CONTEXT})"),
    ("--format", str, "F", "plan as if the weights had this format (default: their own)"),
    ("--kv-format", KV_FORMATS, None, "format of the KV cache (default: bf16)"),
    ("--batch", int, "N", "sequences at once (default: 1)"),
    ("--kv-on-ssd", bool, None, "keep keys and values that do not fit in RAM on the SSD"),
)
_SPECULATION: tuple[Flag, ...] = (
    ("--draft", str, "MODEL", "a smaller model that drafts the next tokens (default: none)"),
    ("--acceptance", float, "SHARE", _ACCEPTANCE_HELP),
)
_DEFAULTS: dict[str, object] = {"kv_format": "bf16", "batch": 1}
_OF_A_MODEL = (
    *("ctx", "format", "kv_format", "batch", "kv_on_ssd", "draft", "acceptance", "details"),
    *("remeasure", "revision"),
)
_MACHINE: tuple[Flag, ...] = (
    (
        "--pc",
        str,
        "PC",
        'another PC, like "RTX 4060, 32GB DDR5-5600, 8 cores, NVMe", or one of '
        f"{', '.join(PRESETS)}; what it does not say is typical (default: this one)",
    ),
    ("--ram", str, "SIZE", "RAM to use, like 32GB (default: this machine's)"),
    ("--gpu-memory", str, "SIZE", "GPU memory to use, like 8GB (default: the GPU's)"),
    (
        "--gpu",
        str,
        "GPU",
        'a GPU by name, like "RTX 4060", or virtual:8GB@12GB/s,... (default: this machine\'s)',
    ),
    ("--link", str, "RATE", "speed of copies to the GPU, like 12GB/s (default: measured)"),
    ("--ssd", str, "RATE", "speed of the disk, like 3.5GB/s (default: measured)"),
    ("--ram-speed", str, "SPEED", "of the RAM, like DDR5-5600 or 60GB/s (default: measured)"),
    ("--cores", int, "N", "cores of the processor (default: this machine's)"),
)
_HARDWARE: tuple[Flag, ...] = (*_MACHINE, ("--remeasure", bool, None, "measure this machine again"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("model", nargs="?", metavar="MODEL", help=_MODEL_HELP)
    parser.add_argument(
        "--details",
        action="store_true",
        help="show where the weights go, memory, where the time goes, and all notes",
    )
    add_flags(parser, _PLAN, **_DEFAULTS)
    add_flags(parser.add_argument_group("speculation"), _SPECULATION)
    add_flags(
        parser.add_argument_group(
            "hardware", "what you leave out is this machine's, or with --pc that PC's"
        ),
        _HARDWARE,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_hub_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Plan and print."""
    _check(args)
    if args.model is None:
        return _run_without_model(args)
    options = flag_values(args, (*_PLAN, *_HARDWARE, *HUB_FLAGS))
    found = plan(args.model, **options)
    pair = None if args.draft is None else _plan_draft(args, found)
    text = found.details if args.details else found.report
    if pair is not None:
        text += f"\n\n{pair.report()}"
    say_result(_report(found, pair), text, as_json=args.json)
    return 0


def _run_without_model(args: argparse.Namespace) -> int:
    found = what_runs(Hardware(**flag_values(args, _MACHINE)), Settings.from_environment())
    say_result(found.to_dict(), found.report(), as_json=args.json)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.model is None:
        for name in _OF_A_MODEL:
            if getattr(args, name) not in (None, False, _DEFAULTS.get(name)):
                flag = option(name)
                raise OptionError(f"{flag} is about one model: localrt plan MODEL {flag}")
    for name in ("ctx", "batch"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name} must be at least 1, is {value}")
    if args.acceptance is not None and not 0.0 <= args.acceptance <= 1.0:
        raise OptionError(f"--acceptance must be from 0 to 1, is {args.acceptance}")
    if args.draft is None and args.acceptance is not None:
        raise OptionError("--acceptance needs a draft: name one with --draft")
    if args.draft is not None and args.batch > 1:
        raise OptionError("--draft plans for one sequence: leave --batch out")


def _plan_draft(args: argparse.Namespace, target_plan: Plan) -> PairPlan:
    """Plan the placements of the draft in ``args`` beside the target of ``target_plan``.

    Raises:
        MemoryBudgetError: the target does not fit with or without the draft.
        LocalrtError: there is no such draft, or it cannot be planned.
    """
    from localrt.drafts.placement import plan_pair  # it imports what loads models

    settings, target = Settings.from_environment(), target_plan.request
    draft = shape_of(find_model(args.draft, settings, revision=args.revision, offline=args.offline))
    pair = plan_pair(target, draft, acceptance=args.acceptance)
    if pair is None:
        raise MemoryBudgetError(f"{target.shape.name} fits neither with nor without a draft")
    return pair


def _report(found: Plan, pair: PairPlan | None) -> dict[str, object]:
    return {
        "command": system.join(["localrt", *sys.argv[1:]]),
        "simulated": True,
        "predicted_tok_s": found.tok_s,
        "ceiling_tok_s": found.ceiling_tok_s,
        **found.to_dict(),
        **({} if pair is None else {"pair": pair.to_dict()}),
    }
