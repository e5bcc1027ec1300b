"""The products' machine code for GPUs that need not be here: memory, registers, instructions."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from localrt.common.errors import LocalrtError
from localrt.quant.cuda.attention import (
    append_program,
    attention_program,
    join_program,
    latent_programs,
    rope_program,
)
from localrt.quant.cuda.formats import HEAVY, TYPES, format_macros, product_instructions
from localrt.quant.cuda.launch import LaunchShape
from localrt.quant.cuda.products import linear_program, many_program
from localrt.quant.cuda.programs import Program, compile_program, machine_code
from localrt.quant.cuda.recurrent import recurrent_programs
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32
from localrt.quant.ops.kv_formats import KV_FORMATS
from localrt.quant.ops.recurrent import RecurrentSpec

pytest.importorskip("cuda.bindings", reason="NVIDIA's compiler")
from tests.ops.cuda.machine_code import (
    TARGETS,
    Build,
    build,
    experts_program,
    per_byte,
    per_product,
    per_product_of_64_rows,
    product_program,
)

# Instructions of a warp per packed byte at one row: where memory brings 4.3 bytes per clock and
# processor, a tenth is a ninth of what a GPU issues. Of fewer bits, a byte has more codes.
BOUNDS = {
    **{"q8_0": 0.05, "int4-g32": 0.06, "q4_0": 0.06, "q4_k": 0.06},
    **{"q2_k": 0.21, "q3_k": 0.21, "tq2_0": 0.12, "iq3_xxs": 0.41, "iq3_s": 0.31},
    **{"iq2_xxs": 0.58, "iq2_xs": 0.58, "iq2_s": 0.56, "iq1_s": 0.86, "iq1_m": 0.83},
}
# And for many rows, of a product of 16 weight rows, 32 columns and 8 rows: a GeForce's tensor cores
# take 16 clocks for it, in which its warps issue 16 instructions.
MANY_BOUNDS = {
    **dict.fromkeys(("q4_0", "q4_k", "q5_k", "q8_0", "int4-g32m"), 19.0),
    **{"mxfp4": 15.0, "nvfp4": 25.0, "q6_k": 29.0, "q2_k": 41.0},
}
# The same for all of a product of 64 rows, unpacking and copies included: by blocks of 128 rows,
# half of whose warps have nothing to multiply, and by those of 64. 14336 x 4096 has 917,504 of
# them, and an H100's 132 processors issue four a clock of 0.57 ns: int4-g32's 28.8 million in 31
# us, 25.8 million in 28.
OF_64_ROWS = {
    **{"int4-g32": (31.4, 28.1), "q8_0": (31.0, 27.8), "mxfp4": (31.3, 27.0), "nf4": (32.2, 27.9)},
    **{"q4_k": (34.8, 31.2), "iq4_xs": (35.8, 31.3), "nvfp4": (43.4, 36.4), "q6_k": (49.8, 43.5)},
}
ELSEWHERE = ("q4_0", "q4_k", "q6_k", "iq2_s", "mxfp4", "nvfp4")


def cases(every: Iterable[Any], quick: Iterable[Any]) -> list[Any]:
    """Compiling takes seconds: most are for CI."""
    return [pytest.param(each, marks=() if each in quick else pytest.mark.slow) for each in every]


OTHERS = cases([target for target in TARGETS if target != 89], (75,))

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


def most_registers(format_: str, rows: int) -> int:
    """Two blocks of a processor at once, but for six bits and for many rows."""
    light = rows <= 8 and format_ not in (*HEAVY, "int6-g32")
    return 128 if light else 255


def check(program: Program, target: int, *, registers: int = 255, spilled: int = 0) -> Build:
    """Compile it, within these bounds and the shared memory that a block has everywhere."""
    made = build(program, target)
    assert 0 < made.registers <= registers, made
    assert made.spilled_bytes <= spilled, made
    assert made.shared_bytes <= 48 << 10, made
    return made


def check_product(
    name: str, rows: int, target: int, *, gate: bool = False, adapted: bool = False
) -> float:
    """``check``; returns instructions per byte."""
    program, pairs = product_program(name, rows, gate=gate, adapted=adapted)
    made = check(program, target, registers=most_registers(name, rows))
    return per_byte(made, name, pairs)


def check_experts(name: str, slots: int, target: int, *, gate: bool = False) -> Build:
    program = experts_program(name, slots, gate=gate)
    return check(program, target, registers=most_registers(name, slots))


@pytest.mark.parametrize("name", cases(sorted(TYPES), ELSEWHERE))
def test_every_format_on_ada(name: str) -> None:
    assert check_product(name, 1, 89) <= BOUNDS.get(name, 0.10)


@pytest.mark.parametrize("name", cases([*ELSEWHERE, "nf4"], ("q4_k", "nvfp4")))
def test_eight_rows_on_ada(name: str) -> None:
    assert check_product(name, 8, 89) <= (0.72 if name == "iq2_s" else 0.20)


@pytest.mark.parametrize("name", cases(["int4-g32", "q4_k", "q6_k"], ("q4_k",)))
@pytest.mark.parametrize("rows", [1, 8])
def test_adapters_in_products(name: str, rows: int) -> None:
    """The registers of products without, and a main loop that is as long."""
    plain = check_product(name, rows, 89)
    for gate in (False, True):
        assert check_product(name, rows, 89, gate=gate, adapted=True) <= 1.05 * plain


@pytest.mark.parametrize("target", OTHERS)
def test_adapters_elsewhere(target: int) -> None:
    check_product("q4_k", 1, target, adapted=True)


@pytest.mark.slow
def test_64_rows_and_a_gate_on_ada() -> None:
    for name in ("q2_k", "q4_k", "iq2_xs", "iq3_xxs"):
        check_product(name, 64, 89)
    check_product("q4_k", 1, 89, gate=True)


@pytest.mark.parametrize("name", cases(sorted(TYPES), ELSEWHERE))
def test_many_rows_on_ada(name: str) -> None:
    """Two blocks of a processor at once: 128 registers, and half of its 100 KB."""
    made = check(many_program(name, None, FLOAT32), 89, registers=128)
    inner, unpacking = per_product(made, name)
    assert inner <= MANY_BOUNDS.get(name, 29.0)
    assert inner + unpacking == pytest.approx(product_instructions(name), rel=0.1)


@pytest.mark.parametrize("name", cases(OF_64_ROWS, ("int4-g32", "nvfp4")))
def test_64_rows_on_ada(name: str) -> None:
    """Blocks of 64 rows issue a tenth less, and their busiest warp a fifth to two fifths less."""
    wide, narrow = (many_program(name, None, FLOAT32, narrow=each) for each in (False, True))
    before, busiest = per_product_of_64_rows(build(wide, 89), name, narrow=False)
    after, busy = per_product_of_64_rows(check(narrow, 89, registers=128), name, narrow=True)
    assert (before, after) == pytest.approx(OF_64_ROWS[name], rel=0.03)
    assert after <= 0.91 * before
    assert busy <= 0.8 * busiest


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TYPES))
def test_blocks_of_64_rows_fit(name: str) -> None:
    check(many_program(name, None, FLOAT32, narrow=True), 89, registers=128)


@pytest.mark.parametrize("target", OTHERS)
def test_other_generations(target: int) -> None:
    """Of many rows, what does not fit registers there waits outside of the innermost loop."""
    for name in ELSEWHERE:
        program, _ = product_program(name, 1)
        check(program, target, registers=most_registers(name, 1))
    for name in ("q4_k", "q6_k", "nvfp4"):
        for narrow in (False, True):
            check(many_program(name, None, FLOAT32, narrow=narrow), target, spilled=64)


@pytest.mark.parametrize("name", ["q4_k", "q6_k", "mxfp4", "nvfp4"])
def test_experts_on_ada(name: str) -> None:
    assert per_byte(check_experts(name, 1, 89, gate=True), name) <= 0.12
    check_experts(name, 24, 89)


def test_experts_elsewhere() -> None:
    check_experts("int6-g32", 8, 120, gate=True)
    check_experts("nvfp4", 24, 75)
    check_experts("iq2_xxs", 24, 75)


@pytest.mark.parametrize("target", [75, 120])
def test_the_small_steps(target: int) -> None:
    """Names of the compiler's own are found by the compiler alone."""
    for name, macros in SMALL.items():
        check(Program.of(name, **macros), target)


@pytest.mark.parametrize("target", [89, *(t for t in TARGETS if t != 89)])
def test_many_rows_of_bf16(target: int) -> None:
    """Two blocks of a processor at once."""
    check(Program.of("dense_many", OUT="float"), target, registers=128)


def test_heads_of_vision_encoders() -> None:
    for axes in (1, 2):
        program = rope_program(72, "bf16", FLOAT32, axes, norm_values=axes == 2)
        check(program, 89, registers=64)


# Elsewhere the largest, whose registers are nearest to what a processor has.
@pytest.mark.parametrize(
    ("target", "sizes"),
    [
        (89, (128,)),
        pytest.param(89, (64, 80, 96, 192, 256), marks=pytest.mark.slow),
        *(
            pytest.param(target, (256,), marks=pytest.mark.slow)
            for target in TARGETS
            if target != 89
        ),
    ],
)
def test_attention(target: int, sizes: tuple[int, ...]) -> None:
    programs = [join_program(128)]
    for size in sizes:
        programs += [attention_program(size, size, split=split) for split in (True, False)]
        programs += [attention_program(size, size, "int8", split=True), rope_program(size)]
        programs += [attention_program(size, size, "int4", split=True), rope_program(size, "int4")]
        for kv_format in KV_FORMATS:  # a block takes one row: few runs are long
            program = attention_program(size, size, kv_format, split=True, tree=True)
            check(program, target, spilled=128)
    for program in programs:
        check(program, target)


@pytest.mark.parametrize("target", [75, 89, 120])
def test_wide_heads(target: int) -> None:
    """Two blocks divide values of 512, four those in int4: on Ada all sums stay in registers."""
    for kv_format in KV_FORMATS:
        program = attention_program(512, 512, kv_format, split=True)
        check(program, target, spilled=0 if target == 89 else 320)
        tree = attention_program(512, 512, kv_format, split=True, tree=True)
        check(tree, target, spilled=128 if target == 89 else 512)
        check(rope_program(512, kv_format, norm_values=True), target, registers=128)
    check(join_program(512), target, registers=64)


@pytest.mark.parametrize("target", [75, 89, 120])
def test_recurrent_layers(target: int) -> None:
    """The largest keys there are, and those of published models."""
    for key, each in ((128, True), (256, False)):
        spec = RecurrentSpec(
            kind="delta", heads=2, key_heads=1, key_size=key, value_size=64, taps=4, eps=1e-6,
            channel_decay=each,
        )  # fmt: skip
        for program in recurrent_programs(spec, records=(1, 1)):
            check(program, target)
    conv = RecurrentSpec(
        kind="conv", heads=1, key_heads=1, key_size=1, value_size=1, taps=8, eps=1e-6, width=64
    )
    check(*recurrent_programs(conv, records=(1, 0)), target)


@pytest.mark.parametrize("target", [75, 89, 120])
def test_latent_attention(target: int) -> None:
    tree, _ = latent_programs(64, 512, tree=True)
    for program in (*latent_programs(64, 512), tree, append_program(BFLOAT16, FLOAT32)):
        check(program, target)


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
