"""``localrt quantize MODEL --format F``: a smaller copy of a model, as a store.

The same command continues what was interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from localrt.cli.loading import resolve_model
from localrt.cli.options import BARE_MODEL_HELP, Flag, add_flags, add_hub_arguments
from localrt.cli.progress import ProgressLine
from localrt.errors import OptionError, TokenizerError
from localrt.formatting import format_bytes, format_seconds
from localrt.hub import ResolvedModel
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.tokenizers import load_tokenizer
from localrt.quant.methods import default_method, quantized_format
from localrt.quantizing.quantize import (
    CALIBRATION_TOKENS,
    QuantizeReport,
    Recipe,
    quantize_model,
)
from localrt.quantizing.text import BUILTIN, builtin_text, read_text
from localrt.settings import Settings

__all__ = ["add_arguments", "run"]

_EPILOG = """\
formats  int4 or int8 in groups of g32, g64 or g128, like int4-g32 (g32m: with minima);
         int5-g32, int6-g32, nf4, mxfp4, nvfp4; bf16 and f16
methods  rtn rounds to nearest; gptq and mr-gptq reduce the error with the help of a calibration
         text (they need torch: pip install 'localrt[quantize]')

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
    ("--calibration-tokens", int, "N", "tokens of it to use (default: 16384)"),
    ("--head-format", str, "F", "format of embedding and head"),
    ("--out", Path, "DIR", "folder for the result (default: in localrt's data folder)"),
    ("--seed", int, "N", "chooses the parts of the text (default: 0)"),
    ("--threads", int, "N", "CPU threads for calibration"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help=BARE_MODEL_HELP)
    parser.add_argument("--format", required=True, metavar="F", help="format of the layers")
    add_flags(parser, _FLAGS, seed=0)
    add_hub_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Quantize, and say where the result lies."""
    quantized_format(args.format)  # before anything is downloaded
    if args.method == "rtn" and args.calibration is not None:
        raise OptionError(
            "method rtn uses no text: leave out --calibration, or choose gptq or mr-gptq"
        )
    settings = Settings.from_environment()
    notes: list[str] = []
    started = time.monotonic()
    with ProgressLine() as line:
        model = resolve_model(args, settings, line)
        out = args.out or settings.data_dir / "stores" / _store_name(model, args.format)
        with closing(open_checkpoint(model.path)) as checkpoint:
            report = quantize_model(
                checkpoint,
                out,
                Recipe(
                    args.format,
                    method=args.method,
                    calibration=_calibration(args, checkpoint, notes),
                    calibration_tokens=args.calibration_tokens or CALIBRATION_TOKENS,
                    seed=args.seed,
                    head_format=args.head_format,
                ),
                name=model.name,
                revision=model.revision,
                threads=args.threads,
                progress=line,
            )
    notes += _fallback_notes(report)
    seconds = time.monotonic() - started
    if args.json:
        record = {"model": model.name, **report.to_dict(), "seconds": seconds, "notes": notes}
        print(json.dumps(record, indent=2))
        return 0
    for note in notes:
        print(f"localrt: {note}", file=sys.stderr)
    print(
        f"{model.name} in {report.format} ({report.method}): {report.path}\n"
        f"{format_bytes(report.nbytes)}, {report.layer_bits_per_weight:.2f} bits per weight in the "
        f"layers, {report.bits_per_weight:.2f} in all, after {format_seconds(seconds)}"
    )
    return 0


def _store_name(model: ResolvedModel, format_: str) -> str:
    """``org/name:Q8_0`` in int4-g32 is ``name-Q8_0-int4-g32``."""
    if model.source == "local":
        path = model.path.resolve()
        base = path.stem if path.is_file() else path.name
    else:
        base = model.name.rpartition("/")[2]
    return f"{base.replace(':', '-').replace('@', '-')}-{format_}"


def _calibration(
    args: argparse.Namespace, checkpoint: Checkpoint, notes: list[str]
) -> list[int] | None:
    """Token ids of the text to calibrate with; None where only rounding is possible or wanted."""
    method = args.method or default_method(quantized_format(args.format), calibrated=True)
    if method == "rtn":
        if args.calibration is not None:
            notes.append(f"{args.format} is rounded to nearest: {args.calibration} is not used")
        return None
    text = read_text(args.calibration) if args.calibration is not None else None
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
    """One line for each format that tensors fell back to."""
    for format_ in sorted(set(report.fallbacks.values())):
        first, *more = [name for name, got in report.fallbacks.items() if got == format_]
        others = f" and {len(more)} more" if more else ""
        yield (
            f"{first}{others} became {format_}: "
            f"their rows do not divide into groups of {report.format}"
        )
