"""The trained fixture: wider experts change nothing."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.moe.fixture_model import FIXTURE, widened
from localrt.models.checkpoints import open_checkpoint
from localrt.models.registry import load_decoder, read_config
from localrt.quant.ops.native.ops import NativeOps
from localrt.quant.ops.protocol import Batch
from tests.offload.placed import needs_kernels


def logits(path: Path) -> np.ndarray:
    """Of twelve tokens."""
    with closing(open_checkpoint(path)) as checkpoint:
        decoder = load_decoder(checkpoint, NativeOps(), read_config(checkpoint))
    return decoder.forward(Batch.extend([(decoder.cache(16), list(range(3, 15)))]))


@needs_kernels
def test_wider_experts_compute_the_same(tmp_path: Path) -> None:
    experts = 24_000_000
    wide = widened(experts, tmp_path)
    assert wide.stat().st_size > experts
    with closing(open_checkpoint(wide)) as checkpoint, closing(open_checkpoint(FIXTURE)) as narrow:
        inner = [c.config["moe_intermediate_size"] for c in (checkpoint, narrow)]
    assert inner == [224, 192]  # one block of columns more is enough
    np.testing.assert_array_equal(logits(wide), logits(FIXTURE))
    assert widened(experts, tmp_path) == wide
