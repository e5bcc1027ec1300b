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
INSIDE = sorted(Path(__file__).parent.glob("inside/test_*.py"))
MODELS = ("test_architectures.py", "test_drafts.py", "test_loading.py", "test_models.py")
"""Files of ``inside`` that need transformers: the others take as long together."""


@pytest.mark.timeout(LIMITS["all"] + 60)
@pytest.mark.parametrize("models", [True, False], ids=["models", "others"])
def test_inside(request: pytest.FixtureRequest, models: bool) -> None:
    """They run what this run does, in two processes."""
    options = ["-q", "-n0", "-p", "no:cacheprovider", "-m", request.config.option.markexpr]
    options += ["--hypothesis-profile", hypothesis.settings.get_current_profile_name()]
    options += ["-W", "ignore:CUDA initialization:UserWarning"]  # of a torch that has CUDA's
    options += ["--timeout", str(LIMITS["each"]), "--timeout-method", "thread"]
    files = [str(path) for path in INSIDE if (path.name in MODELS) is models]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environment = {**os.environ, "LOCALRT_STANDIN": "1"}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, env=environment, timeout=LIMITS["all"]
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # an import of it fails
import localrt
from localrt.common.errors import LocalrtError
from localrt.quant.cuda import driver, measuring
from tests.driver.standin import image, loaded

def unmeasured(*_, **__):
    raise LocalrtError("it is not measured")

loaded().set()
driver.machine_code = lambda program, capability, folder: image(program)
measuring.gpu_rates = unmeasured
with localrt.load(sys.argv[1], device="cuda", draft="off", ctx=256) as model:
    answer = model.generate("ab " * 30, max_tokens=6, ignore_eos=True, temperature=0.0)
    print(model.info.device, *answer.token_ids)
"""


@pytest.mark.slow
@needs_kernels
def test_without_torch(tmp_path: Path) -> None:
    """A packed model on a GPU needs none, in prompts of more than 64 tokens too."""
    with closing(open_checkpoint(write_tiny_model(tmp_path))) as source:
        recipe = Recipe("int4-g32", method="rtn")
        store = quantize_model(source, tmp_path / "store", recipe, threads=1).path
    command = [sys.executable, "-c", WITHOUT_TORCH, str(store)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    device, *tokens = done.stdout.split()
    assert device == "cuda:0"
    assert len(tokens) == 6
