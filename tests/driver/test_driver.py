"""localrt on CUDA's driver: ``inside``, in a process that has the stand-in for it."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import hypothesis
import pytest

from localrt.models.checkpoints import open_checkpoint
from localrt.quant.cuda import programs
from localrt.quant.cuda.driver import count_gpus
from localrt.quantize.quantize import Recipe, quantize_model
from tests.conftest import needs_kernels, write_tiny_model

pytest.importorskip("cuda.bindings", reason="needs cuda-bindings, of the test extra")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="loads a libcuda.so.1"),
    pytest.mark.skipif(not programs.has_compiler(), reason="needs CUDA's compiler"),
    *([] if count_gpus() else [pytest.mark.gpu]),  # a card runs those of ``inside`` itself
]

ROOT = Path(__file__).parents[2]
LIMITS = {"each": 300, "all": 1800}
"""Seconds. A test that is stuck in the driver ends the process."""


@pytest.mark.timeout(LIMITS["all"] + 60)
def test_inside(request: pytest.FixtureRequest) -> None:
    """They run what this run does."""
    options = ["-q", "-n0", "-p", "no:cacheprovider", "-m", request.config.option.markexpr]
    options += ["--hypothesis-profile", hypothesis.settings.get_current_profile_name()]
    options += ["--timeout", str(LIMITS["each"]), "--timeout-method", "thread"]
    command = [sys.executable, "-m", "pytest", *options, "tests/driver/inside"]
    environment = {**os.environ, "LOCALRT_STANDIN": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=LIMITS["all"]
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@needs_kernels
def test_without_torch(tmp_path: Path) -> None:
    """A packed model on a GPU needs none, in prompts of more than 64 tokens too."""
    with closing(open_checkpoint(write_tiny_model(tmp_path))) as source:
        recipe = Recipe("int4-g32", method="rtn")
        store = quantize_model(source, tmp_path / "store", recipe, threads=1).path
    code = (
        "import sys; sys.modules['torch'] = None\n"  # an import of it fails
        f"from tests.driver.without_torch import main; main({str(store)!r})"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    device, *tokens = done.stdout.split()
    assert device == "cuda:0"
    assert len(tokens) == 6
