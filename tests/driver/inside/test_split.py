"""MLPs whose rows GPU and CPU share: recorded as step by step, and close to either processor's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, closing

import numpy as np
import pytest

from localrt.common.files import PAGE
from localrt.models.decoder import Decoder
from localrt.offload.placement import Placement, Where, host_piece, link_piece
from localrt.quant.ops.protocol import Batch, Span
from tests.driver.inside.conftest import AT_ONCE, Kernels, made, on_gpu
from tests.offload.placed import Model, assert_same, extend, needs_kernels, pack_synthetic, tokens

pytestmark = [needs_kernels, pytest.mark.gpu]

LAYERS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    folder = pack_synthetic(
        tmp_path_factory.mktemp("llama"),
        vocab=300,
        hidden=128,
        inner=256,
        layers=LAYERS,
        formats={"": "int4-g32"},
    )
    with closing(Model(folder)) as model:
        yield model


Shares = tuple[float, float]
HALVES: Shares = (0.5, 0.0)
THIRDS: Shares = (0.4, 0.3)
MOST: Shares = (0.01, 0.98)


def placement(model: Model, split: Mapping[int, Shares]) -> Placement:
    """Everything on the GPU but pieces of these layers' MLPs."""
    units = {unit.name: unit for unit in model.store.manifest.units}
    names = {f"layers.{layer}.mlp": shares for layer, shares in split.items()}
    where = dict.fromkeys(units, Where.VRAM)
    where |= dict.fromkeys(("embedding", "norm"), Where.RAM)
    for name, (_, link) in names.items():
        where[host_piece(name)] = Where.RAM
        if link:
            where[link_piece(name)] = Where.LINK
    copies = any(link for _, link in split.values())
    ring = max(unit.nbytes for unit in units.values()) + PAGE if copies else 0
    return Placement(
        where=where,
        kv=("vram",) * LAYERS,
        vram_ring=ring,
        split=names,
    )


def uncopied(split: Mapping[int, Shares]) -> dict[int, Shares]:
    """The CPU has the same rows, and the GPU keeps all others."""
    kept = {THIRDS: (0.63, 0.0), MOST: (0.95, 0.0)}
    return {layer: kept.get(shares, shares) for layer, shares in split.items()}


def opened(
    model: Model, plan: Placement, *, device: str = "cuda", recorded: bool = True
) -> AbstractContextManager[Decoder]:
    return on_gpu(model, {}, placement=plan, make=made(device, recorded=recorded))


def talk(decoder: Decoder) -> list[np.ndarray]:
    """A prompt, tokens, trees, and two sequences at once."""
    one, two = decoder.cache(120), decoder.cache(40)
    seen = [extend(decoder, one, tokens(7), [6])]
    seen += [extend(decoder, one, [token]) for token in tokens(4, seed=1)]
    mask = np.tril(np.ones((3, 3), bool))
    mask[2, 1] = False
    for _ in range(3):
        held = one.length
        batch = Batch(np.array([7, 8, 9]), held + mask.sum(1) - 1, (Span(one, 3, mask),))
        seen.append(decoder.forward(batch, rows=[0, 2]))
        one.trim(held)
    seen.append(decoder.forward(Batch.extend([(one, [3]), (two, tokens(4, seed=2))])))
    return seen


def assert_close(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """As near as two processors are whose activations have other bits."""
    for mine, other in zip(ours, theirs, strict=True):
        assert np.abs(mine - other).max() < 0.1 * np.abs(other).max()


@pytest.mark.parametrize(
    "split",
    [
        pytest.param({0: (0.01, 0.0), 2: (0.98, 0.0)}, marks=pytest.mark.slow),
        {0: THIRDS, 1: MOST, 2: HALVES},
    ],
    ids=["least and most", "all kinds"],
)
def test_recorded_as_step_by_step(model: Model, split: dict[int, Shares], gpu: Kernels) -> None:
    plan = placement(model, split)
    with opened(model, plan, device=AT_ONCE) as plain:
        wanted = talk(plain)
    assert "replay" not in gpu.launches
    with opened(model, plan) as decoder:
        assert_same(talk(decoder), wanted)
    assert "replay" in gpu.launches
    with opened(model, placement(model, uncopied(split))) as decoder:
        assert_same(talk(decoder), wanted)
    with opened(model, placement(model, {}), device=AT_ONCE) as whole:
        assert_close(wanted, talk(whole))
