"""What benchmarks of the host's time for a layer share: a small model on a GPU that computes
nothing, and what a layer adds to a pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.random_store import RandomStore
from benchmarks.common.record import Record
from localrt.models.decoder import Decoder
from localrt.offload.device.gpu import Gpu
from localrt.offload.pipeline.opening import open_pipeline
from localrt.offload.pipeline.setup import Setup
from localrt.offload.placement import Placement
from localrt.offload.reading.files import ReadMode
from localrt.quant.cpu.ops import NativeOps

PLENTY = 1 << 40


def small_store(architecture: str, layers: int, folder: Path, **config: object) -> Any:
    """So many layers of random weights, with 64 columns."""
    sizes: Record = {
        **{"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "head_dim": 32},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": layers},
        **{"max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
        **{"tie_word_embeddings": False},
    }
    return RandomStore(architecture, {**sizes, **config}, "int4-g32", folder)


@contextmanager
def placed(store: Any, placement: Placement, gpu: Gpu, **options: Any) -> Iterator[Decoder]:
    """The store's decoder, which follows ``placement``; ``options`` are those of ``Setup``."""
    decoder = Decoder(
        open_pipeline(
            Setup(
                store=store,
                config=store.decoder,
                placement=placement,
                ops=NativeOps(threads=1),
                gpu=gpu,
                mode=ReadMode(direct=False, threads=1, block=1 << 20),
                files=store,
                verify=False,
                budget=PLENTY,
                **options,
            )
        )
    )
    try:
        yield decoder
    finally:
        decoder.close()


def added_calls(found: Sequence[Record], depths: Sequence[int]) -> dict[str, float]:
    """The calls that a layer adds to a pass, of those of a shallow and a deep model."""
    shallow, deep = (record["calls"] for record in found)
    calls = {
        name: round((count - shallow.get(name, 0.0)) / (depths[1] - depths[0]), 2)
        for name, count in deep.items()
    }
    return {name: count for name, count in calls.items() if count}


def added_us(found: Sequence[Record], depths: Sequence[int], what: str) -> float:
    """The microseconds that a layer adds to ``what``, in seconds."""
    shallow, deep = (float(record[what]) for record in found)
    return round(1e6 * (deep - shallow) / (depths[1] - depths[0]), 1)


def middle(runs: list[Record]) -> Record:
    """The run of median time; sorts them."""
    runs.sort(key=lambda run: float(run["host_us"]))
    return runs[len(runs) // 2]
