"""What the planner knows of this card, and which variants of kernels it takes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.gpu.timing import Result, guarded, timed
from localrt.quant.formats import FORMATS
from localrt.quant.ops.cuda.kernels.variants import variants
from localrt.quant.ops.cuda.measuring import Size, measure_card
from localrt.quant.ops.cuda.ops import CudaOps
from localrt.quant.ops.cuda.rates import ROWS

_NAMES = ("int4-g32", "q4_k", "q6_k", "q8_0", "nf4", "mxfp4")


def check_rates(device: str) -> list[Result]:
    """Rates that forecasts are made of; products that are quicker than by rule, and how much."""
    return guarded("rates", lambda: [_rates(device)])


class _Small(Size):
    """To try the script."""

    shape = (64, 256)
    copied = read = 1 << 16
    copies = launches = 2


class _Once:
    """Times one run, off a GPU."""

    def ready(self) -> bool:
        return True

    def seconds(self, launch: Callable[[], object]) -> float:
        return timed(launch)


def _rates(device: str) -> Result:
    ops = CudaOps(device=device)
    if device.startswith("cuda"):
        rates = measure_card(ops, _NAMES)
    else:
        rates = measure_card(ops, _NAMES[:1], stopwatch=_Once(), size=_Small)
    values = {key: value for key, value in rates.to_dict().items() if key != "products"}
    for name, seconds in rates.products.items():
        for rows, each in zip(ROWS, seconds, strict=True):
            if rows <= 64:
                values[f"{name}_{rows}_gb_s"] = FORMATS[name].bits_per_weight / 8 / each / 1e9
            else:
                values[f"{name}_{rows}_tflops"] = 2 * rows / each / 1e12
    chosen = variants(torch.device(ops.device)).measured
    values["measured_products"] = len(chosen)
    values["quicker_than_by_rule"] = {
        f"{case.format} {case.rows}x{16 * case.tiles}x{case.columns}": choice.gain
        for case, choice in chosen.items()
        if choice.gain > 1
    }
    return Result("rates", True, values=values)
