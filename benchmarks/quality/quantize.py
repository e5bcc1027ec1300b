"""How long rounding a model takes: with the kernels' search for scales, and with numpy's.

    python -m benchmarks.quality.quantize MODEL [--formats int4-g32,nf4] [--runs 5] [--json FILE]

Both write the whole store, by turns; the first turn warms up. With llama-cpp-python installed,
llama.cpp's own conversion to Q4_0 takes its turns too: it searches for nothing.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from benchmarks.common.command import cited_command, find_model, listed, make_parser
from benchmarks.common.record import save, setting
from benchmarks.common.timing import by_turns, medians
from localrt.quant.methods import best_scales
from localrt.quantizing.quantize import Recipe, quantize_model


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, save."""
    parser = make_parser(__doc__)
    parser.add_argument("model", help="a .gguf file or a folder")
    formats = ["int4-g32", "nf4", "mxfp4", "nvfp4"]
    parser.add_argument("--formats", type=listed(), default=formats)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args(arguments)
    model = find_model(args.model)
    work: dict[str, Callable[[Path], object]] = {}
    for name in args.formats:
        write = partial(quantize_model, model, recipe=Recipe(name))
        work[f"{name}, kernels"] = write
        work[f"{name}, numpy"] = partial(write, search=best_scales)
    if find_spec("llama_cpp") is not None and model.suffix == ".gguf":
        work["q4_0, llama.cpp"] = lambda out: _llamacpp(model, out)

    def in_folder(write: Callable[[Path], object]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "out")

    calls = {what: lambda w=write: in_folder(w) for what, write in work.items()}
    samples = by_turns(calls, args.runs)
    rows = [
        {"what": what, "seconds": seconds, "samples": samples[what]}
        for what, seconds in medians(samples).items()
    ]
    for row in rows:
        print(f"{row['what']:24} {row['seconds']:8.1f} s")
    where = setting(cited_command("quality.quantize", arguments), "llama-cpp-python")
    save(args.json, {**where, "model": model.stem, "rows": rows})
    return 0


def _llamacpp(model: Path, out: Path) -> None:
    """llama.cpp's conversion, on all cores."""
    import ctypes

    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    params.allow_requantize = True
    failed = llama_cpp.llama_model_quantize(
        str(model).encode(), str(out).encode(), ctypes.byref(params)
    )
    if failed:
        raise SystemExit(f"llama.cpp could not convert {model}")


if __name__ == "__main__":
    sys.exit(main())
