"""What KV caches in fewer bits lose: perplexity and divergence beside bf16's, token by token.

    python -m benchmarks.kv --text prose.txt [--models smollm2,./model.gguf] [--tokens 65536]

Half of the windows are prose, half Python's standard library, in turn. Every token of a window but
the first is scored. All formats of a model read a window before the next one; each window is saved
as it is done, and those that are saved are not read again: stop it and start it at will.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import localrt
from benchmarks.common.command import find_model, listed, make_parser
from benchmarks.common.record import Record, load, save, setting
from benchmarks.kv.windows import compare_window, joined, summary
from benchmarks.quality.texts import prose, python_source
from localrt.api import Model
from localrt.errors import LocalrtError, OptionError
from localrt.evaluate import text_windows
from localrt.models.checkpoints import open_checkpoint
from localrt.offload.shapes import KV_FORMATS, parse_kv_format, shape_from_checkpoint

MODELS = ("smollm2", "qwen0.5b", "qwen1.5b")


def main(arguments: Sequence[str] | None = None) -> int:
    """Read what has not been read, window by window."""
    options = _parse(arguments)
    try:
        corpora = [prose(options.text), python_source()]
        settings = {"ctx": options.ctx, "texts": [corpus.to_dict() for corpus in corpora]}
        record = load(options.json, settings=settings, models=[])
        if record["settings"] != settings:
            raise OptionError(
                f"{options.json.name} is of other texts or windows: choose another --json"
            )
        words = f"--text {options.text.name} --tokens {options.tokens} --ctx {options.ctx}"
        record |= setting(f"python -m benchmarks.kv {words}", "numpy")
        for name in options.models:
            texts = [corpus.evaluation for corpus in corpora]
            _measure(find_model(name), texts, options, record)
    except LocalrtError as error:
        print(f"kv: {error}", file=sys.stderr)
        return 2 if isinstance(error, OptionError) else 1
    return 0


def _measure(
    source: Path, texts: Sequence[str], options: argparse.Namespace, record: Record
) -> None:
    """A model's windows that are missing, saved one by one."""
    row = next((one for one in record["models"] if one["model"] == source.stem), None)
    if row is None:
        row = {"model": source.stem, "bits": _bits(source), "windows": []}
        record["models"].append(row)
    with ExitStack() as stack:
        models = {
            name: stack.enter_context(
                localrt.load(source, ctx=options.ctx, engine="native", draft="off", kv_format=name)
            )
            for name in KV_FORMATS
        }
        windows = _windows(models[KV_FORMATS[0]], texts, options)
        for number in range(len(row["windows"]), len(windows)):
            text, window = windows[number]
            row["windows"].append({"text": text, "formats": compare_window(models, window)})
            row["formats"] = {
                name: summary(joined(each["formats"][name] for each in row["windows"]))
                for name in models
            }
            save(options.json, record)
            print(f"{source.stem} {number + 1}/{len(windows)}: {_describe(row)}", flush=True)


def _windows(
    model: Model, texts: Sequence[str], options: argparse.Namespace
) -> list[tuple[int, tuple[int, ...]]]:
    """Windows of the texts in turn, and the number of the text that each is of."""
    share = options.tokens // len(texts)
    cut = [text_windows(model, text, ctx=options.ctx, limit_tokens=share) for text in texts]
    turns = zip(*(each.windows for each in cut), strict=False)
    return [(text, window) for turn in turns for text, window in enumerate(turn)]


def _bits(source: Path) -> dict[str, float]:
    """Bits of a number of a cache, with its share of the scales, by format."""
    checkpoint = open_checkpoint(source)
    try:
        shape = shape_from_checkpoint(checkpoint)
    finally:
        checkpoint.close()
    numbers = sum(2 * layer.groups * layer.width for layer in shape.kv)
    return {
        name: 8 * sum(shape.kv_token_nbytes(parse_kv_format(name))) / numbers for name in KV_FORMATS
    }


def _describe(row: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} {100 * found['change']:+.3f} ± {100 * found['change_error']:.3f} % "
        f"KL {found['kl']:.5f}"
        for name, found in row["formats"].items()
        if name != KV_FORMATS[0]
    )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(__doc__, results="kv")
    parser.add_argument("--models", type=listed(), default=list(MODELS))
    parser.add_argument("--text", type=Path, required=True, help="passages between blank lines")
    parser.add_argument("--tokens", type=int, default=65536, help="of both texts together")
    parser.add_argument("--ctx", type=int, default=4096, help="tokens of a window")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
