"""Every GPU kernel compiles to machine code, for a GPU that need not be there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90])
def test_kernels_compile(capability: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-W", "ignore", "-m", "tests.ops.triton_compile", str(capability)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = json.loads(done.stdout.splitlines()[-1])["kernels"]
    assert len({kernel["kernel"] for kernel in kernels}) == 3
    for kernel in kernels:
        # What small GPUs have, and the one matrix instruction that batch invariance rests on.
        assert kernel["shared"] <= 99 << 10, kernel
        assert kernel["mma"] in ([], ["mma.sync"]), kernel
