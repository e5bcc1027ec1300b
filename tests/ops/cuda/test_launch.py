"""Programs by which kernels are launched; ``tests/driver`` launches them."""

from __future__ import annotations

from localrt.quant.cuda.programs import Program


def test_a_program_is_made_once() -> None:
    """Each launch asks for one; values may be equal where their macros are not."""
    made = Program.of("rms_norm", OUT="float", RECORDS=0)
    assert Program.of("rms_norm", OUT="float", RECORDS=0) is made
    assert Program.of("rms_norm", OUT="float", RECORDS=False) != made
