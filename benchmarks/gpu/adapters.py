"""Adapters on a GPU, for ``scripts/gpu_check``: right, harmless to other rows, and what they cost.

Products beside float64 first, then a whole model beside torch in float32, then the speed of both.
Passes with adapters are not recorded as graphs, so decoding without adapters is timed both ways.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.common.random_weights import (
    RandomCheckpoint,
    RandomPackedCheckpoint,
    random_packed,
)
from benchmarks.gpu.configs import QWEN_1_5B, SMALLEST, TINY, largest_error, random_ids
from benchmarks.gpu.timing import (
    RUNS,
    Result,
    guarded,
    timed,
)
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.linear import linear
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.cuda.products import MOST_ROWS, quantize
from localrt.quant.formats import PackedTensor, unpack
from localrt.quant.ops.adapters import Adapter, LowRank, Mix
from localrt.quant.ops.protocol import Batch, KVCache
from localrt.quant.reference.ops import TorchOps

RANK = 16
FORMAT = "int4-g32"
CHATS = 8
# Sums in float32; long passes go through torch in bf16, as does a whole model.
BOUND, BOUND_BF16, BOUND_MODEL = 1e-4, 0.02, 0.05


def check_adapters(device: str) -> list[Result]:
    """Results, then speeds."""
    cuda = device.startswith("cuda")
    results: list[Result] = []
    with torch.inference_mode():
        for rows in (1, 8, MOST_ROWS, MOST_ROWS + 32) if cuda else (1, 4, MOST_ROWS + 2):
            name = f"adapters, product of {rows} rows"
            results += guarded(name, lambda n=name, r=rows: [_product(n, r, device)])
        for kind, check in (("model", _model), ("decode", _decode)):
            name = f"adapters, {kind}"
            results += guarded(name, lambda n=name, c=check: [c(n, device)])
    return results


def low_rank(
    rows: int, columns: int, seed: int, *, rank: int = RANK, dora: bool = False
) -> LowRank:
    """A random change of about a tenth of a matrix's own products, in numbers that bf16 holds."""
    rng = np.random.default_rng([seed, rows, columns])

    def values(shape: tuple[int, int], size: float) -> np.ndarray:
        made = torch.from_numpy(rng.standard_normal(shape, np.float32) * np.float32(size))
        found: np.ndarray = made.bfloat16().float().numpy()
        return found

    a, b = values((rank, columns), columns**-0.5), values((rows, rank), 0.1 * rank**-0.5)
    factors = rng.uniform(0.8, 1.2, rows).astype(np.float32) if dora else None
    return LowRank(a, b, factors)


def add(ops: CudaOps | TorchOps, adapters: Sequence[Adapter[LowRank]]) -> None:
    """To choose from."""
    table = ops.adapters
    for adapter in adapters:
        table.add(table.packed(adapter))


def mixes(adapters: Sequence[Adapter[LowRank]], count: int) -> list[Mix]:
    """Of so many sequences by turns: the last of a turn has none."""
    chosen: list[Mix] = [*(((each.key, 1.0),) for each in adapters), ()]
    return [chosen[n % len(chosen)] for n in range(count)]


# -- products --------------------------------------------------------------------------------------


def _product(name: str, rows: int, device: str) -> Result:
    """One of rank 16, one of another rank with DoRA's factors, both at once, and none."""
    height, columns = (352, 2048) if device.startswith("cuda") else (40, 128)
    ops = CudaOps(device=device)
    packed = random_packed(FORMAT, height, columns)
    weight = ops.weight((height, columns), [packed])
    lows = [low_rank(height, columns, 1), low_rank(height, columns, 2, rank=5, dora=True)]
    made = [Adapter(f"{n}", {packed.name: low}) for n, low in enumerate(lows)]
    add(ops, made)
    both: Mix = tuple((each.key, 0.5) for each in made)
    chosen: list[Mix] = [(("0", 1.0),), (("1", 1.0),), (), both]
    chosen = [chosen[n % len(chosen)] for n in range(rows)]
    short = rows <= MOST_ROWS
    x = torch.randn(rows, columns, device=device).bfloat16()
    bias = torch.randn(height, device=device)

    def run(rows: torch.Tensor, chosen: Sequence[Mix]) -> torch.Tensor:
        begin(ops, chosen)
        return linear(quantize(rows) if short else rows, weight, bias, dtype=torch.float32)

    found = run(x, chosen)
    none = [row for row, mix in enumerate(chosen) if not mix]
    values = {
        "relative_error": largest_error(
            found.cpu().numpy(), _wanted(x, packed, bias, lows, chosen, records=short)
        ),
        "bound": BOUND if short else BOUND_BF16,
        "others_keep_their_bits": torch.equal(run(x, [()] * rows)[none], found[none]),
    }
    ok = values["relative_error"] < values["bound"] and values["others_keep_their_bits"]
    if short:  # only these promise it
        alone = [run(x[row : row + 1], [mix])[0] for row, mix in enumerate(chosen)]
        values["same_bits_alone"] = torch.equal(torch.stack(alone), found)
        ok = ok and values["same_bits_alone"]
    return Result(name, bool(ok), values=values)


def begin(ops: CudaOps, chosen: Sequence[Mix]) -> None:
    """A pass of a row for each of ``chosen``."""
    caches = [ops.kv_cache([], 1) for _ in chosen]
    for cache, mix in zip(caches, chosen, strict=True):
        cache.mix = mix
    ops.begin_adapters(Batch.extend([(cache, [0]) for cache in caches]))


def _wanted(
    x: torch.Tensor,
    packed: PackedTensor,
    bias: torch.Tensor,
    lows: Sequence[LowRank],
    chosen: Sequence[Mix],
    *,
    records: bool,
) -> np.ndarray:
    """In float64, of the rows as the kernels read them."""
    seen = quantize(x).values()[0] if records else x
    rows = seen.double().cpu().numpy()
    plain = rows @ unpack(packed).T.astype(np.float64)
    found = plain + bias.double().cpu().numpy()
    for row, mix in enumerate(chosen):
        for key, weight in mix:
            low = lows[int(key)]
            found[row] += weight * (low.b.astype(np.float64) @ (low.a @ rows[row]))
            if low.factors is not None:
                found[row] += weight * (low.factors - 1) * plain[row]
    return found


# -- whole models ----------------------------------------------------------------------------------


def adapters_of(checkpoint: RandomCheckpoint, count: int) -> list[Adapter[LowRank]]:
    """Of all linear modules, each with numbers of its own."""
    shapes = {
        name: info.shape
        for name, info in checkpoint.tensors.items()
        if name.endswith("_proj.weight")
    }
    return [
        Adapter(
            f"a{seed}",
            {
                name: low_rank(*shape, seed * len(shapes) + at)
                for at, (name, shape) in enumerate(shapes.items())
            },
        )
        for seed in range(count)
    ]


def sequences(model: Decoder, chosen: Sequence[Mix], room: int) -> list[KVCache]:
    """Empty caches."""
    caches = [model.cache(room) for _ in chosen]
    for cache, mix in zip(caches, chosen, strict=True):
        cache.mix = mix
    return caches


def _model(name: str, device: str) -> Result:
    """Prompts, then a token each, in shared passes: as torch does in float32, others as without."""
    cuda = device.startswith("cuda")
    config = TINY if cuda else {**TINY, **SMALLEST, "num_hidden_layers": 1}
    checkpoint = RandomCheckpoint("Qwen2ForCausalLM", config)
    adapters = adapters_of(checkpoint, 2)
    prompt = random_ids(config, 9 if cuda else 2)
    chosen = mixes(adapters, 6 if cuda else 3)

    def run(ops: CudaOps | TorchOps, chosen: Sequence[Mix]) -> np.ndarray:
        model = load_decoder(checkpoint, ops, read_config(checkpoint))
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
        "bound": BOUND_MODEL,
        "changed_by": largest_error(plain, wanted),
        "others_keep_their_bits": bool(np.array_equal(plain[none], found[none])),
    }
    ok = values["relative_error"] < BOUND_MODEL and values["others_keep_their_bits"]
    return Result(name, bool(ok), values=values)


def _decode(name: str, device: str) -> Result:
    """Tokens per second of one sequence and of eight: without adapters, and with one each."""
    cuda = device.startswith("cuda")
    config = QWEN_1_5B if cuda else {**TINY, **SMALLEST, "num_hidden_layers": 1}
    checkpoint = RandomPackedCheckpoint("Qwen2ForCausalLM", config, FORMAT)
    ops = CudaOps(device=device)
    model = load_decoder(checkpoint, ops, read_config(checkpoint))
    adapters = adapters_of(checkpoint, CHATS if cuda else 2)
    seconds = timed(lambda: add(ops, adapters)) / len(adapters)
    nbytes = sum(low.a.nbytes + low.b.nbytes for low in adapters[0].matrices.values()) // 2
    values: dict[str, Any] = {"rank": RANK, "adapter_bytes": nbytes, "add_ms": 1e3 * seconds}
    for chats in (1, len(adapters)):
        chosen: list[Mix] = [((each.key, 1.0),) for each in adapters[:chats]]
        ways = {"plain": (model.forward, [()] * chats), "adapted": (model.forward, chosen)}
        if chats == 1:
            ways["recorded"] = (ops.graphed(model.forward), [()])
        for kind, (forward, mix) in ways.items():
            values[f"tok_s_{chats}_{kind}"] = _rate(model, forward, mix, config, cuda=cuda)
        values[f"cost_{chats}"] = (
            values[f"tok_s_{chats}_plain"] / values[f"tok_s_{chats}_adapted"] - 1
        )
    return Result(name, True, values=values)


def _rate(
    model: Decoder, forward: Any, chosen: Sequence[Mix], config: dict[str, Any], *, cuda: bool
) -> float:
    """Of all sequences together."""
    length, decoded = (64, 32) if cuda else (2, 1)
    prompt = random_ids(config, length)
    caches = sequences(model, chosen, length + decoded)
    for cache in caches:
        model.forward(Batch.extend([(cache, prompt)]), rows=[])

    def run() -> None:
        for cache in caches:
            cache.trim(length)
        for token in prompt[:decoded]:
            forward(Batch.extend([(c, [token]) for c in caches]), rows=range(len(caches)))

    if cuda:
        run()  # compiles, and records
    samples = [timed(run) for _ in range(RUNS if cuda else 1)]
    return decoded * len(caches) / statistics.median(samples)
