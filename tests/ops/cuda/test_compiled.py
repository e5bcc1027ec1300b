"""The kernels' machine code for GPUs that need not be here: registers, spills, and instructions of
loops. The disassembler is the one that Triton brings.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import pytest

from localrt.common.errors import LocalrtError
from localrt.quant.cuda.attention import (
    append_program,
    attention_program,
    join_program,
    latent_programs,
    rope_program,
)
from localrt.quant.cuda.experts import grouped_program
from localrt.quant.cuda.formats import (
    format_macros,
    halves_steps,
    product_instructions,
    steps_at_once,
)
from localrt.quant.cuda.launch import LaunchShape, best_shape
from localrt.quant.cuda.products import linear_program, many_program
from localrt.quant.cuda.programs import Program, compile_program, machine_code
from localrt.quant.cuda.recurrent import recurrent_programs
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32
from localrt.quant.formats import FORMATS
from localrt.quant.formats.tiled import tile_span
from localrt.quant.ops.kv_formats import KV_FORMATS
from localrt.quant.ops.recurrent import RecurrentSpec

pytest.importorskip("cuda.bindings", reason="NVIDIA's compiler")

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


SLOW = pytest.mark.slow
# Instructions of a warp per packed byte at one row: where memory brings 4.3 bytes per clock and
# processor, a tenth is a ninth of what a GPU issues. And for many rows, of a product of 16 weight
# rows, 32 columns and 8 rows: a GeForce's tensor cores take 16 clocks for it, in which its warps
# issue 16 instructions.
MOST = {
    "q8_0": (0.05, 19.0),
    "int4-g32": (0.06, 29.0),
    "q4_k": (0.06, 19.0),
    "q6_k": (0.10, 29.0),
    "nvfp4": (0.10, 25.0),
}


@pytest.mark.parametrize("name", MOST)
def test_instructions_on_ada(name: str) -> None:
    """Within the registers of two blocks a processor, but for six bits at one row."""
    one, many = MOST[name]
    program, pairs = product_program(name)
    made = build(program, 89)
    assert made.registers <= (255 if name == "q6_k" else 128)
    assert made.spilled_bytes == 0
    assert per_byte(made, name, pairs) <= one
    made = build(many_program(name, None, FLOAT32), 89)
    assert made.registers <= 128
    assert made.spilled_bytes == 0
    inner, unpacking = per_product(made, name)
    assert inner <= many
    assert inner + unpacking == pytest.approx(product_instructions(name), rel=0.1)


# -- the oldest and the newest generation ----------------------------------------------------------

SMALL: dict[str, dict[str, object]] = {
    "activate": {"ACTIVATION": 5, "GATED": 1, "OUT": "Bf16"},
    "best_logits": {},
    "choose": {},
    "combine": {},
    "dense": {"OUT": "Bf16", "WIDE": 1},
    "entries": {},
    "from_host": {},
    "gate": {"GATE": 3, "IN": "float"},
    "layer_norm": {"OUT": "Bf16"},
    "low_rank_down": {"RECORDS": 1, "FINE": 1},
    "low_rank_up": {"OUT": "Bf16", "RECORDS": 0},
    "move_bytes": {},
    "move_rows": {"IN": "Bf16", "OUT": "float"},
    "move_tokens": {},
    "norm_gate": {"IN": "Bf16", "RECORDS": 1},
    "plan": {},
    "put": {},
    "quantize": {"IN": "Bf16"},
    "rms_norm": {"OUT": "float", "RECORDS": 1},
    "rotary": {},
    "rotate": {},
    "router": {"GATE_IN": "Bf16"},
    "to_host": {},
    "token_rows": {},
    "unpack": {**format_macros("iq1_m"), "OUT": "float", "INDEXED": 1},
    "unpack_e4m3": {},
}


def products() -> Iterable[Program]:
    for name in ("q6_k", "nvfp4"):
        yield product_program(name)[0]
        yield linear_program(name, 8, LaunchShape(1, 1), "silu", FLOAT32, adapted=True)
        yield many_program(name, None, FLOAT32, narrow=True)
        yield grouped_program(name, 24, "silu", BFLOAT16)


def steps() -> Iterable[Program]:
    """Names of the compiler's own are found by the compiler alone."""
    yield from (Program.of(name, **macros) for name, macros in SMALL.items())
    yield Program.of("dense_many", OUT="float")
    yield rope_program(72, "bf16", FLOAT32, 2, norm_values=True)  # of vision encoders


def attention() -> Iterable[Program]:
    """The largest heads, whose registers are nearest to what a processor has, and latents."""
    for kv_format in KV_FORMATS:
        yield attention_program(512, 512, kv_format, split=True, tree=kv_format != "int8")
        yield rope_program(512, kv_format, norm_values=True)
    yield from (attention_program(256, 256, split=False), join_program(512))
    yield from (*latent_programs(64, 512), latent_programs(64, 512, tree=True)[0])
    yield append_program(BFLOAT16, FLOAT32)


def recurrent() -> Iterable[Program]:
    """The largest keys there are, and those of published models."""
    for key, each in ((128, True), (256, False)):
        spec = RecurrentSpec(
            kind="delta", heads=2, key_heads=1, key_size=key, value_size=64, taps=4, eps=1e-6,
            channel_decay=each,
        )  # fmt: skip
        yield from recurrent_programs(spec, records=(1, 1))
    conv = RecurrentSpec(
        kind="conv", heads=1, key_heads=1, key_size=1, value_size=1, taps=8, eps=1e-6, width=64
    )
    yield from recurrent_programs(conv, records=(1, 0))


@pytest.mark.parametrize(
    ("target", "programs"),
    [
        *((75, programs) for programs in (products, steps, recurrent)),
        *(pytest.param(*case, marks=SLOW) for case in [(75, attention), (120, attention)]),
        pytest.param(120, products, marks=SLOW),
    ],
)
def test_other_generations(target: int, programs: Callable[[], Iterable[Program]]) -> None:
    """Within the shared memory that a block has everywhere: more is an error of the compiler's."""
    for program in programs():
        assert compile_program(program, target).code


# -- compiling -------------------------------------------------------------------------------------


def test_machine_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, synced = Program.of("quantize", IN="float"), list[int]()
    monkeypatch.setattr(os, "fsync", synced.append)  # nothing checks it when it is read
    first = machine_code(program, 89, tmp_path)
    assert synced
    monkeypatch.setattr("localrt.quant.cuda.programs.compile_program", None)
    assert machine_code(program, 89, tmp_path) == first
    assert len(list(tmp_path.iterdir())) == 1


def test_newer_gpu_gets_ptx() -> None:
    code = compile_program(Program.of("quantize", IN="float"), 999).code
    assert b".version" in code
    assert code.endswith(b"\0"), "the driver reads text up to its end"


def test_what_does_not_compile_is_one_line() -> None:
    program = linear_program("q4_0", 1, LaunchShape(1, 1), None, FLOAT32)
    with pytest.raises(LocalrtError, match=r"compute capability 7\.0"):
        compile_program(program, 70)


def test_a_program_is_made_once() -> None:
    """Each launch asks for one; values may be equal where their macros are not."""
    made = Program.of("rms_norm", OUT="float", RECORDS=0)
    assert Program.of("rms_norm", OUT="float", RECORDS=0) is made
    assert Program.of("rms_norm", OUT="float", RECORDS=False) != made
