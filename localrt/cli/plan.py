"""``localrt plan [MODEL]``: whether a model is fast enough here, what to type, and what would help.

Without further flags it plans for this machine; with them for one that need not exist, from a
``config.json`` alone if there are no weights. Nothing is loaded. Without a model it lists what runs
well.
"""

from __future__ import annotations

import argparse
import sys

from localrt import system
from localrt.cli.help import Examples
from localrt.cli.options import HUB_FLAGS, Flag, add_flags, add_hub_arguments, flag_values
from localrt.cli.output import say_result
from localrt.common.errors import OptionError
from localrt.common.option_names import option
from localrt.common.settings import DEFAULT_CONTEXT, Settings
from localrt.library import plan
from localrt.planning.describe_pc import PRESETS
from localrt.planning.measure import Hardware
from localrt.planning.plan import Plan
from localrt.planning.recommend import what_runs
from localrt.quant.ops.kv_formats import KV_FORMATS

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
_PLAN: tuple[Flag, ...] = (
    ("--ctx", int, "TOKENS", f"longest conversation (default: {DEFAULT_CONTEXT})"),
    ("--format", str, "F", "plan as if the weights had this format (default: their own)"),
    ("--kv-format", KV_FORMATS, None, "format of the KV cache (default: bf16)"),
    ("--batch", int, "N", "sequences at once (default: 1)"),
    ("--kv-on-ssd", bool, None, "keep keys and values that do not fit in RAM on the SSD"),
)
_DEFAULTS: dict[str, object] = {"kv_format": "bf16", "batch": 1}
_OF_A_MODEL = (
    *("ctx", "format", "kv_format", "batch", "kv_on_ssd"),
    *("details", "remeasure", "revision"),
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
    text = found.details if args.details else found.report
    say_result(_report(found), text, as_json=args.json)
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


def _report(found: Plan) -> dict[str, object]:
    return {
        "command": system.join(["localrt", *sys.argv[1:]]),
        "simulated": True,
        "predicted_tok_s": found.tok_s,
        "ceiling_tok_s": found.ceiling_tok_s,
        **found.to_dict(),
    }
