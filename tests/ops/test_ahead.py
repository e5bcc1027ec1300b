"""Rows that see some rows behind them, as a picture's do: the CPU's kernels and torch alike."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from localrt.models.decoder import Decoder
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.ops.protocol import Batch, Span
from tests.conftest import needs_kernels
from tests.models.tiny import load_ours, relative_error, tokens
from tests.ops.test_native_matmul import ISAS

pytestmark = needs_kernels

LENGTH = 300
# Where pictures begin and end: within a block of keys, over its end, at the end of all.
PICTURES = ((3, 12), (250, 270), (290, 300))


def ahead() -> npt.NDArray[np.int32]:
    rows = np.zeros(LENGTH, np.int32)
    for begin, end in PICTURES:
        rows[begin:end] = end - 1 - np.arange(begin, end)
    return rows


def computed(decoder: Decoder, cuts: list[int], *, windows_only: bool) -> npt.NDArray[np.float32]:
    ids, seen, cache = np.asarray(tokens(LENGTH), np.int64), ahead(), decoder.cache(LENGTH)
    parts = []
    for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        span = Span(cache, end - begin, None, seen[begin:end], windows_only)
        batch = Batch(ids[begin:end], np.arange(begin, end), (span,))
        parts.append(decoder.forward(batch))
    return np.concatenate(parts)


@pytest.mark.parametrize("windows_only", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_see_those_ahead(name: str, windows_only: bool, tiny: Any) -> None:
    folder, _ = tiny(name)
    reference = load_ours(folder, context=LENGTH)
    expected = computed(reference, [], windows_only=windows_only)
    found = computed(load_ours(folder, NativeOps(), context=LENGTH), [], windows_only=windows_only)
    assert relative_error(found, expected) < 0.03
    # The picture's rows differ from what they would be if they saw nothing behind them.
    causal = reference.forward(Batch.extend([(reference.cache(LENGTH), tokens(LENGTH))]))
    same = windows_only and name == "llama"  # which has no windows
    assert np.array_equal(causal, expected) == same


@pytest.mark.parametrize("isa", ISAS)
def test_bits_do_not_depend_on_cuts(isa: str, tiny: Any) -> None:
    decoder = load_ours(tiny("gemma3")[0], NativeOps(isa=isa), context=LENGTH)
    whole = computed(decoder, [], windows_only=False)
    for cuts in ([3, 12], [250, 270], [2, 100, 249, 271, 290]):
        assert np.array_equal(computed(decoder, cuts, windows_only=False), whole)
