"""Small stores, placements of them, and the resident decoder that every placement must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from localrt.common.errors import CancelledError
from localrt.common.files import PAGE
from localrt.models.checkpoints import StoreCheckpoint, open_checkpoint
from localrt.models.config import DecoderConfig
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.offload.pipeline.opening import open_pipeline
from localrt.offload.pipeline.setup import Setup
from localrt.offload.placement import Placement, Where
from localrt.offload.reading.files import ReadMode
from localrt.offload.store import pack_store
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.formats.tiled import tile_tensor
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.kv_formats import CacheFormat
from localrt.quant.ops.protocol import Batch, Span
from tests.conftest import needs_kernels as needs_kernels
from tests.models import tiny
from tests.store.synthetic import SyntheticCheckpoint

MODE = ReadMode(direct=False, threads=2, block=4 * PAGE)
PLENTY = 1 << 40


def pack_tiny(name: str, folder: Path) -> Path:
    """A store of one of the tiny random models."""
    with closing(open_checkpoint(tiny.tiny_model(name).folder)) as source:
        return pack_store(source, folder / "store", tiler=tile_tensor)


def wide_mixture(folder: Path, used: int) -> Model:
    """A mixture of 32 experts, ``used`` of which see a token, in a store."""
    from transformers import Qwen3MoeConfig

    def wide() -> Qwen3MoeConfig:
        sizes = {"num_experts": 32, "num_experts_per_tok": used, "moe_intermediate_size": 32}
        return Qwen3MoeConfig(**tiny.SIZES, **sizes, head_dim=32, norm_topk_prob=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(tiny.MIXTURES, "wide", wide)
        return Model(pack_tiny("wide", folder))


def pack_synthetic(folder: Path, **options: Any) -> Path:
    """A store of a random Llama of any size, in q8_0."""
    return pack_store(
        SyntheticCheckpoint(folder / "model", **options), folder / "store", tiler=tile_tensor
    )


def place(
    store: StoreCheckpoint,
    streamed: Iterable[str],
    *,
    slack: int = 4 * PAGE,
    largest: int | None = None,
) -> Placement:
    """``streamed`` units through a ring of the largest and ``slack`` bytes, others in RAM."""
    names = set(streamed)
    layers = sum(unit.name.endswith(".attention") for unit in store.manifest.units)
    if largest is None:
        largest = max((u.nbytes for u in store.manifest.units if u.name in names), default=0)
    return Placement(
        where={u.name: Where.SSD if u.name in names else Where.RAM for u in store.manifest.units},
        kv=("ram",) * layers,
        ram_ring=largest + slack if largest else 0,
    )


def place_on_gpu(
    store: StoreCheckpoint, where: Mapping[str, Where], *, slack: tuple[int, int] = (0, 0)
) -> Placement:
    """``where`` for the units that it names, others in RAM; rings of the largest that pass.

    ``slack`` are pages on top, of the RAM's and of the GPU's ring.
    """
    units = store.manifest.units
    layers = sum(unit.name.endswith(".attention") for unit in units)
    largest = max(u.nbytes for u in units if u.name in passing(store))
    return Placement(
        where={unit.name: where.get(unit.name, Where.RAM) for unit in units},
        kv=("ram",) * layers,
        ram_ring=largest + slack[0] * PAGE,
        vram_ring=largest + slack[1] * PAGE,
    )


def open_decoder(
    store: Any, ops: Any, config: DecoderConfig, placement: Placement, **options: Any
) -> Decoder:
    """A decoder that follows a placement; ``options`` of ``Setup``."""
    setup = Setup(store=store, config=config, placement=placement, ops=ops, **options)
    return Decoder(open_pipeline(setup))


def passing(store: StoreCheckpoint) -> list[str]:
    """The units that may pass through a ring."""
    return [u.name for u in store.manifest.units if u.name.partition(".")[0] in ("layers", "head")]


def tokens(count: int, seed: int = 0, vocab: int = 200) -> list[int]:
    """Random token ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, vocab, count)]


class Model:
    """A store opened for comparing: one ``Ops`` computes both decoders."""

    def __init__(self, folder: Path, *, threads: int = 1, kv_format: CacheFormat = "bf16") -> None:
        store = open_checkpoint(folder)
        assert isinstance(store, StoreCheckpoint)
        self.store = store
        self.config: DecoderConfig = read_config(store)
        self.ops = NativeOps(threads=threads, kv_format=kv_format)
        self.resident: Decoder = load_decoder(store, self.ops, self.config)

    @cached_property
    def expected(self) -> list[np.ndarray]:
        """What the resident decoder gives."""
        return conversation(self.resident)

    @contextmanager
    def placed(self, streamed: Iterable[str], **options: Any) -> Iterator[Decoder]:
        """The decoder that streams these units."""
        budget = options.pop("budget", PLENTY)
        ring = {key: options.pop(key) for key in ("slack", "largest") if key in options}
        settings: dict[str, Any] = {"mode": MODE, "stall_s": 30.0, **options}
        placement = place(self.store, streamed, **ring)
        decoder = open_decoder(
            self.store, self.ops, self.config, placement, budget=budget, **settings
        )
        try:
            yield decoder
        finally:
            decoder.close()

    def close(self) -> None:
        """Close the files."""
        self.store.close()


def extend(
    decoder: Decoder, cache: KVCache, tokens: list[int], rows: list[int] | None = None
) -> np.ndarray:
    """One pass of one sequence."""
    return decoder.forward(Batch.extend([(cache, tokens)]), rows=rows)


def cancel_after(calls: int) -> Callable[[], None]:
    """A pass's ``check`` that lets ``calls`` calls go by, and cancels at the next."""
    left = iter(range(calls))

    def check() -> None:
        if next(left, None) is None:
            raise CancelledError("stop")

    return check


def conversation(decoder: Decoder) -> list[np.ndarray]:
    """Prefill with and without logits, decoding, a tree, batches, after a trim."""
    text = tokens(100, seed=5)
    one, two = decoder.cache(150), decoder.cache(50)
    seen = [
        extend(decoder, one, text[:25], rows=[]),
        extend(decoder, one, text[25:36], rows=[3, 10]),
        *(extend(decoder, one, [token]) for token in text[36:38]),
    ]
    # A root with two branches of two: who sees whom, and at which position.
    mask = np.eye(5, dtype=bool)
    mask[1:, 0] = mask[2, 1] = mask[4, 3] = True
    places = one.length + np.array([0, 1, 2, 1, 2])
    seen.append(decoder.forward(Batch(np.array(text[80:85]), places, (Span(one, 5, mask),))))
    one.trim(30)
    batch = Batch.extend([(one, text[90:93]), (two, text[83:90])])
    seen.append(decoder.forward(batch, rows=[2, 9]))
    seen.append(decoder.forward(Batch.extend([(two, [7]), (one, [9])])))
    return seen


def assert_same(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    """Bit for bit."""
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.shape == other.shape
        assert np.array_equal(mine, other)
