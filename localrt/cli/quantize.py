"""``localrt quantize MODEL --format F``: a smaller copy of a model, as a store.

Running the same command again continues an interrupted run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from localrt import system
from localrt.cli.help import Examples, ProgressLine
from localrt.cli.loading import resolve_model
from localrt.cli.options import BARE_MODEL_HELP, Flag, add_flags, add_hub_arguments
from localrt.cli.output import note, say, say_json
from localrt.common.errors import OptionError, TokenizerError
from localrt.common.formatting import format_bytes, format_seconds
from localrt.common.settings import Settings
from localrt.drafts.heads.files import prediction_notes
from localrt.hub import ResolvedModel, resolve_adapter
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.checkpoints.adapters import MergedCheckpoint, read_adapter
from localrt.models.tokenizers import load_tokenizer
from localrt.quant.methods import default_method, quantized_format
from localrt.quantize.calibration import BUILTIN, builtin_text, read_text
from localrt.quantize.quantize import (
    CALIBRATION_TOKENS,
    QuantizeReport,
    Recipe,
    method_of,
    quantize_model,
)

EXAMPLES: Examples = (
    ("localrt quantize org/name --format int4-g32", "4 bits and a scale for 32 weights"),
    ("localrt quantize org/name --adapter ./lora --format int4-g64", "with an adapter merged"),
)

_EPILOG = """\
formats  int4 or int8 in groups of g32, g64 or g128, like int4-g32 (g32m: with minima);
         int5-g32, int6-g32, nf4, mxfp4, nvfp4; GGUF's q2_k, q3_k and iq4_nl; bf16 and f16
methods  rtn rounds to nearest; gptq and mr-gptq reduce the error with the help of a calibration
         text (they need torch and scipy)

Norms and biases stay exact. Embedding and head keep their published format up to 8.5 bits per
weight and become int8-g32 above that, unless you give --head-format.
"""


_CALIBRATION_HELP = (
    "a UTF-8 text, or a folder of texts, that resembles what the model will read "
    "(default: Python's language reference)"
)
_FLAGS: tuple[Flag, ...] = (
    ("--method", str, "M", "rtn, gptq or mr-gptq (default: the best for the format)"),
    ("--calibration", Path, "PATH", _CALIBRATION_HELP),
    ("--calibration-tokens", int, "N", f"tokens of it to use (default: {CALIBRATION_TOKENS})"),
    (
        "--adapter",
        str,
        "PATH",
        "merge this LoRA adapter: a folder, .gguf file or hub id (default: none)",
    ),
    ("--head-format", str, "F", "format of embedding and head (default: as published; see below)"),
    ("--out", Path, "DIR", "folder for the result (default: in localrt's data folder)"),
    ("--seed", int, "N", "chooses the parts of the text (default: 0)"),
    ("--threads", int, "N", "CPU threads for calibration (default: one for each core)"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help=BARE_MODEL_HELP)
    format_help = "format of the layers, like int4-g32; see below"
    parser.add_argument("--format", required=True, metavar="F", help=format_help)
    add_flags(parser, _FLAGS, seed=0, calibration_tokens=CALIBRATION_TOKENS)
    add_hub_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Quantize, and print where the result is."""
    _check(args)
    settings = Settings.from_environment()
    notes: list[str] = []
    started = time.monotonic()
    text = None if args.calibration is None else read_text(args.calibration)
    with ProgressLine() as line:
        model = resolve_model(args, settings, line)
        name = model.name
        adapter = _find_adapter(args, settings, line)
        merged = "" if adapter is None else f"+{adapter.name.removesuffix('.gguf')}"
        out = args.out or settings.data_dir / "stores" / _store_name(model, merged, args)
        with closing(open_checkpoint(model.path)) as checkpoint:
            if adapter is not None:
                change = read_adapter(adapter, checkpoint, merging=True)
                checkpoint = MergedCheckpoint(checkpoint, change)
                name += f"{merged} ({change.key})"
            report = quantize_model(
                checkpoint,
                out,
                Recipe(
                    args.format,
                    method=args.method,
                    calibration=_calibration(args, checkpoint, text, notes),
                    calibration_tokens=args.calibration_tokens,
                    seed=args.seed,
                    head_format=args.head_format,
                ),
                name=name,
                revision=model.revision,
                threads=args.threads,
                projectors=() if model.extras is None else model.extras.projectors,
                progress=line,
            )
    notes += [*_fallback_notes(report), *prediction_notes(report.path)]
    notes += [report.blind] if report.blind else []
    seconds = time.monotonic() - started
    if args.json:
        record = {"model": model.name, **report.to_dict(), "seconds": seconds, "notes": notes}
        say_json(record)
        return 0
    for each in notes:
        note(each)
    say(
        f"{model.name} in {report.format} ({report.method}): {report.path}",
        f"{format_bytes(report.nbytes)}, {report.layer_bits_per_weight:.2f} bits per weight in the "
        f"layers, {report.bits_per_weight:.2f} in all, after {format_seconds(seconds)}",
    )
    if report.vision_bytes:
        say(f"vision tower: {format_bytes(report.vision_bytes)}, as published")
    again = ["localrt", "eval", str(out), "--text", "BOOK.txt", "--against", model.name]
    say(f"how close it is: {system.join(again)}")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse invalid options before anything is downloaded."""
    method_of(Recipe(args.format, method=args.method, calibration=(), head_format=args.head_format))
    if args.method == "rtn" and args.calibration is not None:
        raise OptionError(
            "method rtn uses no text: leave out --calibration, or choose gptq or mr-gptq"
        )


def _find_adapter(args: argparse.Namespace, settings: Settings, line: ProgressLine) -> Path | None:
    if args.adapter is None:
        return None
    found = resolve_adapter(args.adapter, settings=settings, offline=args.offline, progress=line)
    return found.resolve()


def _store_name(model: ResolvedModel, merged: str, args: argparse.Namespace) -> str:
    """``org/name:Q8_0`` in int4-g32 is ``name-Q8_0-int4-g32``; ``merged`` names its adapter."""
    if model.source == "local":
        path = model.path.resolve()
        base = path.stem if path.is_file() else path.name
    else:
        base = model.name.rpartition("/")[2]
    return f"{base.replace(':', '-').replace('@', '-')}{merged}-{args.format}"


def _calibration(
    args: argparse.Namespace, checkpoint: Checkpoint, text: str | None, notes: list[str]
) -> list[int] | None:
    """Return the token ids to calibrate with; None if only rounding is possible or wanted.

    ``text`` is the user's calibration text, if any.
    """
    method = args.method or default_method(quantized_format(args.format), calibrated=True)
    if method == "rtn":
        if args.calibration is not None:
            notes.append(f"{args.format} is rounded to nearest: {args.calibration} is not used")
        return None
    try:
        if text is None and (text := builtin_text()) is None:
            raise TokenizerError("this Python came without its language reference")
        tokens = load_tokenizer(checkpoint).encode(text, add_special=False)
    except TokenizerError as error:
        if args.method is not None or args.calibration is not None:
            raise OptionError(f"method {method} needs calibration text: {error}") from error
        notes.append(f"method rtn is used, because there is no calibration text: {error}")
        return None
    if args.calibration is None:
        notes.append(f"calibrated on {BUILTIN}: --calibration takes a text of your own")
    return tokens


def _fallback_notes(report: QuantizeReport) -> Iterator[str]:
    """Yield one line for each format that tensors fell back to."""
    for format_ in sorted(set(report.fallbacks.values())):
        first, *more = [name for name, got in report.fallbacks.items() if got == format_]
        others = f" and {len(more)} more" if more else ""
        yield (
            f"{first}{others} became {format_}: "
            f"their rows do not divide into groups of {report.format}"
        )
