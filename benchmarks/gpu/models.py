"""Whole models on our kernels, for ``scripts/gpu_check``: logits, decode, trees, memory.

Random packed weights at a real model's shape. A captured graph must give the same bits as a plain
pass, and a row the same bits alone, in a batch, or in a tree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.common.random_store import RandomPackedCheckpoint
from benchmarks.gpu.attention import tree_of
from benchmarks.gpu.configs import (
    ARCHITECTURES,
    largest_error,
    logits,
    random_ids,
    random_model,
    resident_config,
    tiny_config,
)
from benchmarks.gpu.timing import Check, Values, free_memory, median_seconds, watch
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.cuda.driver import device_of
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.ops.protocol import Batch, Span, opaque
from localrt.quant.reference.ops import TorchOps

BOUND = 0.05  # largest difference over the largest magnitude: bf16 rounds to 8 bits in each layer
TREE = 16


def check_models(device: str) -> Iterator[Check]:
    """Compare random models of all architectures with float32 torch on the CPU; then measure
    resident ones, when cuBLAS has taken its memory.
    """
    cuda = device.startswith("cuda")
    length = 100 if cuda else 6
    for name, extra in ARCHITECTURES.items() if cuda else [("LlamaForCausalLM", {})]:
        config = {**extra, **tiny_config(device)}
        plain = random_model(name, config, TorchOps(compute_format="f32", device="cpu"))
        wanted = logits(plain, random_ids(config, length), 4)
        yield f"logits {name}", partial(_compared, name, config, wanted, device)
    for name in ("int4-g32", "nvfp4", "q4_k") if cuda else ("int4-g32",):
        checkpoint = RandomPackedCheckpoint("Qwen2ForCausalLM", resident_config(device), name)
        yield f"resident {name}", partial(resident, checkpoint, CudaOps(device=device))


def _compared(name: str, config: dict[str, Any], wanted: np.ndarray, device: str) -> Values:
    """Compare the logits of a prompt and four single tokens."""
    model = random_model(name, config, CudaOps(device=device))
    got = logits(model, random_ids(config, len(wanted)), 4)
    error, same = largest_error(got, wanted), float((got.argmax(1) == wanted.argmax(1)).mean())
    return {"ok": error < BOUND, "relative_error": error, "bound": BOUND, "top1_agreement": same}


def resident(checkpoint: RandomPackedCheckpoint, ops: CudaOps) -> Values:
    """Time prefill, and decode with and without captured graphs (same bits); check trees and peak
    memory.
    """
    cuda = "cuda" in ops.device
    if cuda:
        peak = watch(device_of(ops.device), free_memory(ops.device))
    model = load_decoder(checkpoint, opaque(ops), read_config(checkpoint))
    matrices = [info for info in checkpoint.tensors.values() if len(info.shape) == 2]
    weights = sum(ops.weight_nbytes((i.shape[0], i.shape[1]), i.format) for i in matrices)
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

    values: Values = {"weight_bytes": weights}
    if cuda:
        prefill()  # compiles
    values["prefill_tok_s"] = length / median_seconds(prefill, ops.device)
    logits_by_way = [decode(step) for step in ways.values()]
    ok = all(np.array_equal(found, logits_by_way[0]) for found in logits_by_way)
    for kind, step in ways.items():
        seconds = median_seconds(partial(decode, step), ops.device)
        values[f"decode_tok_s_{kind}"] = decoded / seconds
    values["graph_is_bitwise_equal"] = ok
    if cuda:
        estimate = weights + ops.kv_nbytes(model.config.memory, 2 * length) + (256 << 20)
        values |= {"peak_vram_bytes": peak(), "estimate_bytes": estimate}
        ok &= values["peak_vram_bytes"] <= estimate
    cache.trim(0)
    model.forward(Batch.extend([(cache, prompt)]), rows=[])
    branches = tree(model, ways["graph"], cache, prompt, TREE if cuda else 2)
    return {**values, **branches, "ok": ok and branches["ok"]}


def tree(model: Decoder, forward: Any, cache: Any, prompt: list[int], nodes: int) -> Values:
    """Compare a chain and a binary tree, each one pass, with their branches row by row."""
    held = cache.length
    tokens = np.array(prompt[:nodes])
    chain = np.tril(np.ones((nodes, nodes), bool))

    def run(mask: np.ndarray, step: Any) -> np.ndarray:
        cache.trim(held)
        positions = held + mask.sum(1) - 1
        return np.asarray(step(Batch(tokens, positions, (Span(cache, nodes, mask),))))

    def sequential(path: list[int]) -> np.ndarray:
        cache.trim(held)
        parts = [model.forward(Batch.extend([(cache, [int(tokens[node])])])) for node in path]
        return np.concatenate(parts)

    whole = run(chain, model.forward)
    bitwise = bool(np.array_equal(whole, sequential(list(range(nodes)))))
    mask = tree_of(nodes).numpy()
    branching = run(mask, model.forward)
    path = [int(n) for n in np.flatnonzero(mask[nodes - 1])]
    branch = sequential(path)
    error = largest_error(branching[path], branch)
    for _ in range(3):
        replayed = run(mask, forward)
    values: Values = {
        "chain_is_bitwise_sequential": bitwise,
        "branch_relative_error": error,
        "replay_is_bitwise_equal": bool(np.array_equal(replayed, branching)),
    }
    cuda = "cuda" in model.ops.device  # elsewhere BLAS decides the order of sums
    right = error < BOUND and values["replay_is_bitwise_equal"]
    return {"ok": right and (bitwise or not cuda), **values}
