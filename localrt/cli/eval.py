"""``localrt eval MODEL --text FILE``: perplexity of a text, and the distance to another model."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path

from localrt.cli.help import Examples, StatusLine
from localrt.cli.loading import load
from localrt.cli.options import (
    Flag,
    add_flags,
    add_load_arguments,
    add_model_argument,
    load_options,
)
from localrt.cli.output import say_result
from localrt.common.files import read_text
from localrt.common.formatting import format_rate, join_lines
from localrt.evaluate import Evaluation, evaluate
from localrt.quant.ops.kv_formats import KV_FORMATS

EXAMPLES: Examples = (
    ("localrt eval model.gguf --text book.txt", "perplexity"),
    ("localrt eval small.gguf --text book.txt --against full.gguf", "how far they differ"),
)


_ENGINE_HELP = "compare with this engine (default: native; without --against, of MODEL itself)"
_FLAGS: tuple[Flag, ...] = (
    ("--stride", int, "N", "tokens from one window to the next (default: --ctx)"),
    ("--limit-tokens", int, "N", "use the first N tokens of the text (default: all)"),
    (
        "--against",
        str,
        "MODEL",
        "compare with this model: KL divergence, top-1 agreement (default: no comparison)",
    ),
    ("--against-engine", ("auto", "native", "llamacpp"), None, _ENGINE_HELP),
    (
        "--against-format",
        ("bf16", "f32"),
        None,
        "compare with weights unpacked to this (default: not unpacked)",
    ),
    (
        "--against-kv-format",
        KV_FORMATS,
        None,
        "compare with keys and values in this format (default: --kv-format)",
    ),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_model_argument(parser)
    parser.add_argument(
        "--text", type=Path, required=True, metavar="FILE", help="a UTF-8 text file"
    )
    add_flags(parser, _FLAGS)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_load_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Evaluate and print."""
    text = read_text(args.text)
    with ExitStack() as models:
        model = models.enter_context(load(args.model, load_options(args)))
        against = None
        if args.against or args.against_engine or args.against_format or args.against_kv_format:
            options = load_options(args)
            if args.against_engine or args.against_format:
                # One of the two alone replaces both: llamacpp knows no formats to compute in, and
                # neither it nor floating point knows those of caches.
                options["engine"] = args.against_engine or "native"
                options["format"] = args.against_format
                options["kv_format"] = None
            if args.against_kv_format:
                options["kv_format"] = args.against_kv_format
            against = models.enter_context(load(args.against or args.model, options))
        line = models.enter_context(StatusLine())
        found = evaluate(
            model,
            text,
            ctx=args.ctx,
            stride=args.stride,
            limit_tokens=args.limit_tokens,
            against=against,
            progress=lambda step: line.show(f"window {step.done} of {step.total}"),
        )
    say_result(found.to_dict(), _describe(found), as_json=args.json)
    return 0


def _describe(found: Evaluation) -> str:
    stride = "" if found.stride == found.ctx else f", one every {found.stride}"
    lines = [
        f"{found.model} ({found.engine}, {found.format}): {found.windows} windows of {found.ctx} "
        f"tokens{stride}, {found.scored_tokens} tokens scored",
        f"perplexity     {found.perplexity:.4f} ± {found.perplexity_error:.4f}",
        f"bits per byte  {found.bits_per_byte:.4f}",
        f"speed          {format_rate(found.tok_s)} tok/s",
    ]
    if found.against is not None:
        other = found.against
        lines += [
            f"against {other.model} ({other.engine}, {other.format}): perplexity "
            f"{other.perplexity:.4f}",
            f"change         {100 * other.perplexity_change:+.3f} % ± "
            f"{100 * other.perplexity_change_error:.3f} %",
            f"KL divergence  {other.kl_divergence:.5f} ± {other.kl_divergence_error:.5f}",
            f"same top token {100 * other.top1_agreement:.2f} %",
        ]
    return join_lines(lines)
