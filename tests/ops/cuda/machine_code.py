"""What the compiler makes of the products' kernels, for GPUs that need not be here.

Registers, spills, and instructions of loops. The disassembler is the one that Triton
brings.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.resources import files

from localrt.quant.cuda.formats import halves_steps, steps_at_once
from localrt.quant.cuda.launch import best_shape
from localrt.quant.cuda.products import linear_program
from localrt.quant.cuda.programs import Program, compile_program
from localrt.quant.cuda.tensor import FLOAT32
from localrt.quant.formats import FORMATS
from localrt.quant.formats.tiled import tile_span

_MANY_TILES = 1 << 20  # a long matrix: the variant that decoding lives on
Line = tuple[str, str]
"""A label or nothing, and an instruction."""


@dataclass(frozen=True, slots=True)
class Build:
    """What a program is compiled to."""

    registers: int
    spilled_bytes: int
    code: bytes


def build(program: Program, target: int) -> Build:
    """Compile it."""
    compiled = compile_program(program, target)
    return Build(
        _number(r"Used (\d+) registers", compiled.log),
        _number(r"(\d+) bytes spill stores", compiled.log),
        compiled.code,
    )


def product_program(format_: str) -> tuple[Program, int]:
    """The variant that a long matrix in ``format_`` takes for one row, and the pairs of tiles of a
    warp.
    """
    division = best_shape(format_, 1, _MANY_TILES, 24)
    return linear_program(format_, 1, division, None, FLOAT32), division.pairs


def per_byte(made: Build, format_: str, pairs: int = 1) -> float:
    """Instructions of a warp in the main loop of a product for each byte of packed weights that it
    reads, scales included.
    """
    loop = max(_loops(_instructions(made.code)), key=_products)
    span = tile_span(FORMATS[format_])
    steps = steps_at_once(format_)
    read = 2 * pairs * 16 * FORMATS[format_].row_bytes(span) * steps * 32 // span
    return round(len(loop) / read, 4)


def per_product(made: Build, format_: str) -> tuple[float, float]:
    """Of a product of many rows, instructions of a warp in the innermost loop for 16 weight rows,
    32 columns and 8 rows of records; and those besides, on the longest ways through the outer loop
    of warps that unpack and of as many that do not, but for the ends of chains, of which there are
    few.
    """
    loops = [body for body in _loops(_instructions(made.code)) if _products(body)]
    inner, outer = min(loops, key=len), max(loops, key=len)
    products = 6 if halves_steps(format_) else 8
    ways = _longest(outer) + _longest(outer, unpacks=False)
    unpacking = ways / (4 * products) - len(inner) / (2 * products)
    return round(len(inner) / products, 1), round(unpacking, 1)


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found[1]) if found else 0


def _instructions(code: bytes) -> list[Line]:
    """The label before each instruction, or nothing, and the instruction."""
    disassembler = files("triton").joinpath("backends/nvidia/bin/nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        command = [str(disassembler), "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found, label = [], ""
    for line in text.splitlines():
        if named := re.match(r"(\.L_\S+):", line):
            label = named[1]
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*)", line):
            found.append((label, instruction[1]))
            label = ""
    return found


def _products(body: list[Line]) -> int:
    return sum("IMMA" in text for _, text in body)


def _loops(code: list[Line]) -> list[list[Line]]:
    places = _places(code)
    loops = []
    for at, (_, instruction) in enumerate(code):
        target = _jump(instruction)
        if places.get(target, at + 1) <= at:
            body = code[places[target] : at + 1]
            loops.append([line for line in body if not line[1].startswith("NOP")])
    assert loops, "a product has a loop"
    return loops


def _longest(loop: list[Line], *, unpacks: bool = True) -> int:
    """Instructions on the longest way through a loop, an inner loop once. Blocks that add up sums,
    which are a quarter of additions, are left out; without ``unpacks`` also those that store to
    shared memory.
    """
    places, ways = _places(loop), {0: 0}
    for at, (_, text) in enumerate(loop):
        if at not in ways:
            continue
        nexts, target = [at + 1], places.get(_jump(text), 0)
        if target > at:
            skipped = loop[at + 1 : target]
            left_out = 4 * sum("FADD" in line for _, line in skipped) >= len(skipped) + 1
            if not unpacks:
                left_out |= any(line.split()[0].startswith("STS") for _, line in skipped)
            nexts = [target] if left_out or not text.startswith("@") else [at + 1, target]
        for each in nexts:
            ways[each] = max(ways.get(each, 0), ways[at] + 1)
    return ways[len(loop)]


def _places(code: list[Line]) -> dict[str, int]:
    return {label: at for at, (label, _) in enumerate(code) if label}


def _jump(instruction: str) -> str:
    """The label that it jumps to, or nothing."""
    jump = re.search(r"BRA.*`\((\.L_\S+?)\)", instruction)
    return jump[1] if jump else ""
