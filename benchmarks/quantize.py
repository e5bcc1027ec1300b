"""How long rounding a model takes: with the kernels' search for scales, and with numpy's.

    .venv/bin/python benchmarks/quantize.py MODEL [--formats int4-g32,nf4] [--runs 5] [--out FILE]

Both write the whole store, by turns; the first turn warms up. With llama-cpp-python installed,
llama.cpp's own conversion to Q4_0 takes its turns too: it searches for nothing.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path[0] = str(ROOT)

import localrt  # noqa: E402
from localrt.machine import hardware  # noqa: E402
from localrt.quant.methods import best_scales  # noqa: E402
from localrt.quantizing.quantize import quantize_model  # noqa: E402


def main() -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a .gguf file or a folder")
    parser.add_argument("--formats", default="int4-g32,nf4,mxfp4,nvfp4")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    work: dict[str, Callable[[Path], object]] = {}
    for name in args.formats.split(","):
        work[f"{name}, kernels"] = lambda out, name=name: quantize_model(args.model, out, name)
        work[f"{name}, numpy"] = lambda out, name=name: quantize_model(
            args.model, out, name, search=best_scales
        )
    if importlib.util.find_spec("llama_cpp") is not None and args.model.suffix == ".gguf":
        work["q4_0, llama.cpp"] = lambda out: _llamacpp(args.model, out)
    times: dict[str, list[float]] = {what: [] for what in work}
    for turn in range(args.runs + 1):
        for what, write in work.items():
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                write(Path(folder) / "out")
                if turn:
                    times[what].append(time.perf_counter() - began)
    result: dict[str, Any] = {
        "model": args.model.stem,
        "rows": [
            {"what": what, "seconds": statistics.median(took), "samples": took}
            for what, took in times.items()
        ],
        "command": "benchmarks/quantize.py " + " ".join(Path(a).name for a in sys.argv[1:]),
        "machine": hardware.probe().to_dict(),
        "version": localrt.__version__,
    }
    for row in result["rows"]:
        print(f"{row['what']:24} {row['seconds']:8.1f} s")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
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
    raise SystemExit(main())
