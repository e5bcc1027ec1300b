"""What a process that cannot import torch does: a model answers on a GPU."""

from __future__ import annotations

from pathlib import Path

import localrt
from localrt.loading import gpu as opening
from localrt.quant.cuda import cuda_memory
from localrt.quant.cuda import driver as calling
from localrt.quant.cuda.programs import Program
from tests.driver.standin import image, loaded


def machine_code(program: Program, capability: int, folder: Path) -> bytes:
    """What the driver of the tests takes."""
    return image(program)


def main(path: str) -> None:
    """Print the device and an answer's tokens."""
    loaded().set()
    calling.machine_code = machine_code
    opening._rates = lambda *_, **__: None  # type: ignore[assignment]
    cuda_memory._SAMPLE = 1 << 20
    with localrt.load(path, device="cuda", draft="off", ctx=256) as model:
        answer = model.generate("ab " * 30, max_tokens=6, ignore_eos=True, temperature=0.0)
        print(model.info.device, *answer.token_ids)
