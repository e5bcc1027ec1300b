"""The kernels' machine code for GPUs that need not be here: registers and spills."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
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
from localrt.quant.cuda.formats import format_macros
from localrt.quant.cuda.launch import LaunchShape, best_shape
from localrt.quant.cuda.products import linear_program, many_program
from localrt.quant.cuda.programs import Program, compile_program, machine_code
from localrt.quant.cuda.recurrent import recurrent_programs
from localrt.quant.cuda.tensor import BFLOAT16, FLOAT32
from localrt.quant.ops.kv_formats import KV_FORMATS
from localrt.quant.ops.recurrent import RecurrentSpec

pytest.importorskip("cuda.bindings", reason="NVIDIA's compiler")


def one_row(format_: str) -> Program:
    """The variant that a long matrix in ``format_`` takes for one row."""
    return linear_program(format_, 1, best_shape(format_, 1, 1 << 20, 24), None, FLOAT32)


def taken(program: Program) -> tuple[int, int]:
    """Registers of a thread, and bytes that are spilled, on Ada."""
    log = compile_program(program, 89).log
    found = [re.search(rf"(\d+) {kind}", log) for kind in ("registers", "bytes spill stores")]
    registers, spilled = (int(match[1]) if match else 0 for match in found)
    return registers, spilled


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["int4-g32", "q6_k", *(pytest.param(n, marks=SLOW) for n in ("q8_0", "q4_k", "nvfp4"))]
)
def test_registers(name: str) -> None:
    """Two blocks fit a processor, but for six bits at one row; nothing is spilled."""
    for program, most in (
        (one_row(name), 255 if name == "q6_k" else 128),
        (many_program(name, None, FLOAT32), 128),
    ):
        registers, spilled = taken(program)
        assert 0 < registers <= most
        assert spilled == 0


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
        yield one_row(name)
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


@SLOW
@pytest.mark.parametrize(
    ("target", "programs"),
    [
        *((75, programs) for programs in (products, attention, steps, recurrent)),
        *((120, programs) for programs in (attention, products)),
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
