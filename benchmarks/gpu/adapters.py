"""Adapters on a GPU, for ``scripts/gpu_check``: accuracy, independence of other rows, cost.

A whole model against torch in float32, in long and short passes, then its speed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, cast

import numpy as np

from benchmarks.common.random_store import RandomCheckpoint, RandomPackedCheckpoint
from benchmarks.gpu.configs import largest_error, random_ids, resident_config, tiny_config
from benchmarks.gpu.timing import Check, Values, median_seconds
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.formats.convert import bf16_bits, bf16_values
from localrt.quant.ops.adapters import Adapter, LowRank, Mix
from localrt.quant.ops.kv import KVCache
from localrt.quant.ops.protocol import Batch, Ops, opaque
from localrt.quant.reference.ops import TorchOps

RANK = 16
FORMAT = "int4-g32"
CHATS = 8
BOUND = 0.05  # error of a whole model in bf16


def check_adapters(device: str) -> Iterator[Check]:
    """Results, then speeds."""
    yield "adapters, model", partial(_model, device)
    yield "adapters, decode", partial(_decode, device)


def low_rank(rows: int, columns: int, seed: int, dora: bool) -> LowRank:
    """A random adapter whose output is about a tenth of the matrix's, in exact bf16 values."""
    rng = np.random.default_rng([seed, rows, columns])

    def values(shape: tuple[int, int], size: float) -> np.ndarray:
        made = rng.standard_normal(shape, np.float32) * np.float32(size)
        return bf16_values(bf16_bits(made))

    a, b = values((RANK, columns), columns**-0.5), values((rows, RANK), 0.1 * RANK**-0.5)
    factors = rng.uniform(0.8, 1.2, rows).astype(np.float32) if dora else None
    return LowRank(a, b, factors)


def add(ops: CudaOps | TorchOps, adapters: Sequence[Adapter[LowRank]]) -> None:
    """Register them."""
    table: Any = ops.adapters
    for adapter in adapters:
        table.add(table.packed(adapter))


def adapters_of(checkpoint: RandomCheckpoint, count: int) -> list[Adapter[LowRank]]:
    """Random adapters of all linear modules."""
    infos = [each for name, each in checkpoint.tensors.items() if name.endswith("_proj.weight")]

    def adapter(seed: int) -> Adapter[LowRank]:
        first, dora = seed * len(infos), seed % 2 == 1
        return Adapter(f"a{seed}", {
            each.name: low_rank(each.shape[0], each.shape[1], first + at, dora)
            for at, each in enumerate(infos)
        })  # fmt: skip

    return [adapter(seed) for seed in range(count)]


def sequences(model: Decoder, mixes: Sequence[Mix], room: int) -> list[KVCache]:
    """Empty caches, one per mix in ``mixes``."""
    caches = [model.cache(room) for _ in mixes]
    for cache, mix in zip(caches, mixes, strict=True):
        cache.mix = mix
    return caches


def _model(device: str) -> Values:
    """Compare shared passes (prompts, then one token each) with float32 torch, and check that
    sequences without adapters are unchanged.
    """
    cuda = device.startswith("cuda")
    config = tiny_config(device)
    checkpoint = RandomCheckpoint("Qwen2ForCausalLM", config)
    adapters = adapters_of(checkpoint, 2)
    prompt = random_ids(config, 12 if cuda else 2)  # together, more rows than our kernels take
    mixes: list[Mix] = [*(((each.key, 1.0),) for each in adapters), ()]
    chosen = mixes * (2 if cuda else 1)

    def run(ops: CudaOps | TorchOps, chosen: Sequence[Mix]) -> np.ndarray:
        model = load_decoder(checkpoint, cast(Ops, ops), read_config(checkpoint))
        add(ops, adapters)
        caches = sequences(model, chosen, len(prompt) + 1)
        passes = [prompt, prompt[:1]]
        found = [model.forward(Batch.extend([(c, ids) for c in caches])) for ids in passes]
        return np.concatenate([each.reshape(len(chosen), -1, each.shape[1]) for each in found], 1)

    found, plain = (run(CudaOps(device=device), mix) for mix in (chosen, [()] * len(chosen)))
    wanted = run(TorchOps(compute_format="f32", device="cpu"), chosen)
    none = [row for row, mix in enumerate(chosen) if not mix]
    values = {
        "relative_error": largest_error(found, wanted),
        "bound": BOUND,
        "others_keep_their_bits": bool(np.array_equal(plain[none], found[none])),
    }
    ok = values["relative_error"] < BOUND and values["others_keep_their_bits"]
    return {"ok": ok, **values}


def _decode(device: str) -> Values:
    """Tokens per second of one and of eight sequences, without adapters and with one each."""
    config = resident_config(device)
    checkpoint = RandomPackedCheckpoint("Qwen2ForCausalLM", config, FORMAT)
    ops = CudaOps(device=device)
    model = load_decoder(checkpoint, opaque(ops), read_config(checkpoint))
    adapters = adapters_of(checkpoint, CHATS if device.startswith("cuda") else 2)
    add(ops, adapters)
    values: Values = {"rank": RANK}
    forward = ops.graphed(model.forward)
    for chats in (1, len(adapters)):
        chosen: list[Mix] = [((each.key, 1.0),) for each in adapters[:chats]]
        plain, adapted = (
            _rate(model, forward, mix, config, device) for mix in ([()] * chats, chosen)
        )
        values |= {f"tok_s_{chats}_plain": plain, f"tok_s_{chats}_adapted": adapted}
        values[f"cost_{chats}"] = plain / adapted - 1
    return values


def _rate(model: Decoder, forward: Any, mixes: Sequence[Mix], config: Values, device: str) -> float:
    """Tokens/s of all sequences."""
    cuda = device.startswith("cuda")
    length, decoded = (64, 32) if cuda else (2, 1)
    prompt = random_ids(config, length)
    caches = sequences(model, mixes, length + decoded)
    for cache in caches:
        model.forward(Batch.extend([(cache, prompt)]), rows=[])

    def run() -> None:
        for cache in caches:
            cache.trim(length)
        for token in prompt[:decoded]:
            forward(Batch.extend([(c, [token]) for c in caches]), rows=range(len(caches)))

    if cuda:
        run()  # compiles and records
    return decoded * len(caches) / median_seconds(run, device)
