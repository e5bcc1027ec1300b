"""Adapters on the driver: what a GPU adds, and that others' bits stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.graph import GraphedForward
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.adapters import Adapter, LowRank
from localrt.quant.ops.protocol import Batch
from localrt.quant.reference.ops import TorchOps
from tests.driver.inside.check_architectures import Packed
from tests.driver.inside.conftest import Kernels, once
from tests.models.test_adapters import KINDS, Tiny, cache, run
from tests.models.tiny import relative_error, tokens

pytestmark = once


def on_gpu(tiny: Tiny, *adapters: Adapter[LowRank]) -> Decoder:
    source: Any = Packed(tiny.checkpoint, "int8-g32")
    decoder = load_decoder(source, CudaOps(device="cuda"), read_config(tiny.checkpoint))
    table = decoder.ops.adapters
    assert table is not None
    for adapter in adapters:
        table.add(table.packed(adapter))
    return decoder


@pytest.mark.parametrize("kind", ["dora", "ranks", "tokens"])
def test_a_gpu_adds_what_torch_does(kind: str, gpu: Kernels, tmp_path: Path) -> None:
    tiny = Tiny("qwen2", tmp_path)
    adapter, _ = tiny.adapter("a", **KINDS[kind])
    ids = tokens(4)
    exact = tiny.decoder(TorchOps(compute_format="f32"), adapter)
    decoder = on_gpu(tiny, adapter)
    plain = relative_error(run(decoder, cache(decoder), ids), run(exact, cache(exact), ids))
    wanted = run(exact, cache(exact, adapter), ids)
    assert relative_error(run(decoder, cache(decoder, adapter), ids), wanted) < max(3 * plain, 2e-2)


def test_long_passes_and_recordings(gpu: Kernels, tmp_path: Path) -> None:
    tiny = Tiny("qwen2", tmp_path)
    adapter, _ = tiny.adapter("a", 1)
    decoder = on_gpu(tiny, adapter)
    ids = tokens(66)
    whole, long = decoder.cache(80), decoder.cache(80)
    whole.mix = long.mix = ((adapter.key, 1.0),)
    wanted = run(decoder, whole, ids[:60])
    rest = run(decoder, whole, ids[60:])
    got = run(decoder, long, ids)  # a prompt's rows
    assert relative_error(got[60:], rest) < 4e-2
    assert relative_error(got[:60], wanted) < 4e-2

    forward = GraphedForward(decoder.ops, decoder.forward)  # type: ignore[arg-type]
    made, adapted = cache(decoder), cache(decoder, adapter)
    before = [forward(Batch.extend([(made, [5])]))]
    forward(Batch.extend([(adapted, [5])]))
    for _ in range(3):  # the second time it is recorded
        made.trim(0)
        before.append(forward(Batch.extend([(made, [5])])))
        adapted.trim(0)
        again = forward(Batch.extend([(adapted, [5])]))
        assert relative_error(again, before[0]) > 1e-3
    for each in before[1:]:
        np.testing.assert_array_equal(each, before[0])
    decoder.ops.adapters.remove(adapter.key)  # type: ignore[union-attr]
    np.testing.assert_array_equal(run(decoder, cache(decoder), [5]), before[0])
