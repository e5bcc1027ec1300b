"""localrt on the driver of this folder: ``inside``, in a process that has no other libcuda.so.1."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localrt.quant.cuda import programs

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings, of the test extra")
torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="loads a libcuda.so.1"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs torch's build for CPUs"),
    pytest.mark.skipif(not programs.has_compiler(), reason="needs CUDA's compiler"),
]

INSIDE = Path(__file__).with_name("inside")


def test_inside() -> None:
    """One process for all of them: it takes seconds to begin."""
    checks = sorted(map(str, INSIDE.glob("check_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *checks]
    done = subprocess.run(command, cwd=INSIDE.parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
