"""Whole models on our kernels, for ``scripts/gpu_check``: logits, decode, trees, memory.

Random packed weights at a real model's shape. A captured graph must give the same bits as a plain
pass, and a row the same bits alone, with others, or in a tree.
"""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from benchmarks.common.random_store import RandomPackedCheckpoint
from benchmarks.gpu.configs import (
    ARCHITECTURES,
    QWEN_1_5B,
    SMALLEST,
    TINY,
    largest_error,
    logits,
    random_ids,
    random_model,
)
from benchmarks.gpu.memory import free_memory, watch
from benchmarks.gpu.timing import RUNS, Result, guarded, timed
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.protocol import Batch, Span
from localrt.quant.reference.ops import TorchOps

# Largest difference divided by largest magnitude. float32 differs only by the order of sums (TF32
# is off); bf16 keeps 8 bits, through a few layers.
BOUNDS = {"f32": 1e-4, "bf16": 0.05, "packed": 0.05}
TREE = 16


def check_logits(device: str) -> list[Result]:
    """Random models of all known architectures, through torch and our kernels."""
    if not device.startswith("cuda"):
        return logits_of("LlamaForCausalLM", _config(device), 6, device)
    configs = {name: {**TINY, **extra} for name, extra in ARCHITECTURES.items()}
    found = (logits_of(name, config, 100, device) for name, config in configs.items())
    return [result for results in found for result in results]


def logits_of(name: str, config: dict[str, Any], length: int, device: str) -> list[Result]:
    """Compare the logits of a prompt and four single tokens with the CPU's float32."""
    ids = random_ids(config, length)
    wanted = logits(
        random_model(name, config, TorchOps(compute_format="f32", device="cpu")), ids, 4
    )
    results = []
    for kind in BOUNDS:
        ops: Any = (
            CudaOps(device=device)
            if kind == "packed"
            else TorchOps(compute_format=kind, device=device)
        )
        got = logits(random_model(name, config, ops), ids, 4)
        error = largest_error(got, wanted)
        same = float((got.argmax(1) == wanted.argmax(1)).mean())
        values = {"relative_error": error, "bound": BOUNDS[kind], "top1_agreement": same}
        results.append(Result(f"logits {name} {kind}", error < BOUNDS[kind], values=values))
    return results


def check_packed(device: str) -> list[Result]:
    """Measure resident packed models: speed with and without CUDA graphs, trees, peak memory."""
    results = []
    for name in ("int4-g32", "nvfp4", "q4_k") if device.startswith("cuda") else ("int4-g32",):
        checkpoint = RandomPackedCheckpoint("Qwen2ForCausalLM", _config(device), name)
        results += guarded(
            f"resident {name}", lambda n=name, c=checkpoint: resident(n, c, CudaOps(device=device))
        )
    return results


def _config(device: str) -> dict[str, Any]:
    return QWEN_1_5B if device.startswith("cuda") else {**TINY, **SMALLEST, "num_hidden_layers": 1}


def resident(name: str, checkpoint: RandomPackedCheckpoint, ops: CudaOps) -> list[Result]:
    """Time prefill, and decode with and without captured graphs (same bits) and a tree."""
    cuda = "cuda" in ops.device
    if cuda:
        peak = watch(device_of(ops.device), free_memory(ops.device))
    model = load_decoder(checkpoint, ops, read_config(checkpoint))
    matrices = [info for info in checkpoint.tensors.values() if len(info.shape) == 2]
    weights = sum(ops.weight_nbytes(info.shape, info.format) for info in matrices)
    length, decoded = (512, 64) if cuda else (2, 1)
    prompt = random_ids(checkpoint.config, length, seed=1)
    cache = model.cache(2 * length + 256)
    ways: dict[str, Any] = {"plain": model.forward, "graph": ops.graphed(model.forward)}

    def prefill() -> None:
        cache.trim(0)
        model.forward(Batch.extend([(cache, prompt)]), rows=[length - 1])

    def decode(step: Any) -> np.ndarray:
        cache.trim(length)
        tokens = prompt[:decoded]
        found = [step(Batch.extend([(cache, [token])]), rows=[0]) for token in tokens]
        return np.concatenate(found)

    values: dict[str, Any] = {"weight_bytes": weights}
    runs = RUNS if cuda else 1
    if cuda:
        prefill()  # compiles
    prefill_s = [timed(prefill) for _ in range(runs)]
    values["prefill_tok_s"] = length / statistics.median(prefill_s)
    logits_by_way = [decode(step) for step in ways.values()]
    ok = all(np.array_equal(found, logits_by_way[0]) for found in logits_by_way)
    for kind, step in ways.items():
        seconds = statistics.median(timed(lambda s=step: decode(s)) for _ in range(runs))
        values[f"decode_tok_s_{kind}"] = decoded / seconds
        values[f"weight_gb_s_{kind}"] = decoded / seconds * weights / 1e9
    values["graph_is_bitwise_equal"] = ok
    if cuda:
        estimate = weights + ops.kv_nbytes(model.config.memory, 2 * length) + (256 << 20)
        values |= {"peak_vram_bytes": peak(), "estimate_bytes": estimate}
        ok &= values["peak_vram_bytes"] <= estimate
    cache.trim(0)
    model.forward(Batch.extend([(cache, prompt)]), rows=[])
    branches = tree(model, ways["graph"], cache, prompt, TREE if cuda else 2)
    return [Result(f"resident {name}", ok, values=values), branches]


def tree(model: Decoder, forward: Any, cache: Any, prompt: list[int], nodes: int) -> Result:
    """Compare a chain and a binary tree, each one pass, with their branches row by row."""
    held = cache.length
    tokens = np.array(prompt[:nodes])
    chain = np.tril(np.ones((nodes, nodes), bool))

    def run(mask: np.ndarray, step: Any) -> np.ndarray:
        cache.trim(held)
        positions = held + mask.sum(1) - 1
        return step(Batch(tokens, positions, (Span(cache, nodes, mask),)))

    def sequential(path: list[int]) -> np.ndarray:
        cache.trim(held)
        parts = [model.forward(Batch.extend([(cache, [int(tokens[node])])])) for node in path]
        return np.concatenate(parts)

    whole = run(chain, model.forward)
    bitwise = bool(np.array_equal(whole, sequential(list(range(nodes)))))
    mask = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        mask[node] |= mask[(node - 1) // 2]
    branching = run(mask, model.forward)
    path = [int(n) for n in np.flatnonzero(mask[nodes - 1])]
    branch = sequential(path)
    error = largest_error(branching[path], branch)
    for _ in range(2):
        replayed = run(mask, forward)
    seconds = timed(lambda: run(mask, forward))
    values = {
        "chain_is_bitwise_sequential": bitwise,
        "branch_relative_error": error,
        "replay_is_bitwise_equal": bool(np.array_equal(replayed, branching)),
        "us_replay": seconds * 1e6,
    }
    cuda = "cuda" in model.ops.device  # in Triton's interpreter BLAS decides the order of sums
    ok = (bitwise or not cuda) and error < BOUNDS["packed"] and values["replay_is_bitwise_equal"]
    return Result(f"tree of {nodes}", bool(ok), values=values)
