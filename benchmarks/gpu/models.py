"""Whole models on the Triton kernels, for ``scripts/gpu_check``: logits, decode, trees, memory.

Random packed weights at a real model's shape. A recorded pass must be the pass itself, bit for bit,
and a row the same row whether it is computed alone, with others, or in a tree.
"""

from __future__ import annotations

import gc
import statistics
from typing import Any

import numpy as np
import torch

from benchmarks.common.random_weights import RandomPackedCheckpoint
from benchmarks.gpu.configs import (
    ARCHITECTURES,
    QWEN_1_5B,
    TINY,
    largest_error,
    logits,
    random_ids,
    random_model,
)
from benchmarks.gpu.timing import RUNS, Result, guarded, timed
from localrt.models.decoder import Decoder
from localrt.models.registry import load_decoder, read_config
from localrt.quant.ops.protocol import Batch, Span
from localrt.quant.ops.torch.ops import TorchOps
from localrt.quant.ops.triton.ops import TritonOps

# bf16 weights and activations through a few layers.
BOUND = 0.05
TREE = 16
# For the interpreter.
SMALLEST = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64}


def check_logits(device: str) -> list[Result]:
    """Prefill, then token by token, of every architecture: against the CPU's float32."""
    cuda = device.startswith("cuda")
    results = []
    for architecture, extra in ARCHITECTURES.items() if cuda else [("LlamaForCausalLM", {})]:
        config = {**TINY, **extra, **({} if cuda else SMALLEST)}
        ids = random_ids(config, 100 if cuda else 6)
        wanted, got = (
            logits(random_model(architecture, config, ops), ids, 4)
            for ops in (
                TorchOps(compute_format="f32", device="cpu"),
                TritonOps(device=device),
            )
        )
        error = largest_error(got, wanted)
        values = {"relative_error": error, "bound": BOUND}
        results.append(Result(f"logits {architecture} triton", error < BOUND, values=values))
    return results


def check_packed(device: str) -> list[Result]:
    """Resident packed models: speed with and without CUDA graphs, trees, peak memory."""
    cuda = device.startswith("cuda")
    config = QWEN_1_5B if cuda else {**TINY, **SMALLEST}
    results = []
    for name in ("int4-g32", "nvfp4", "q4_k") if cuda else ("int4-g32",):
        results += guarded(f"resident {name}", lambda n=name: packed(device, config, n))
    return results


def packed(device: str, config: dict[str, Any], name: str) -> list[Result]:
    cuda = device.startswith("cuda")
    if cuda:
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    checkpoint = RandomPackedCheckpoint("Qwen2ForCausalLM", config, name)
    ops = TritonOps(device=device)
    model = load_decoder(checkpoint, ops, read_config(checkpoint))
    matrices = [info for info in checkpoint.tensors.values() if len(info.shape) == 2]
    weights = sum(ops.weight_nbytes(info.shape, info.format) for info in matrices)
    length, decoded = (512, 64) if cuda else (3, 3)
    prompt = random_ids(config, length, seed=1)
    cache = model.cache(2 * length + 256)
    forward = ops.graphed(model.forward)

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
    prefill()  # compiles
    prefill_s = [timed(prefill) for _ in range(runs)]
    values["prefill_tok_s"] = length / statistics.median(prefill_s)
    plain, graphed = decode(model.forward), decode(forward)
    same = bool(np.array_equal(plain, graphed))
    for kind, step in (("plain", model.forward), ("graph", forward)):
        seconds = statistics.median(timed(lambda s=step: decode(s)) for _ in range(runs))
        values[f"decode_tok_s_{kind}"] = decoded / seconds
    values["weight_gb_s_graph"] = values["decode_tok_s_graph"] * weights / 1e9
    values["graph_is_bitwise_equal"] = same
    ok = same
    if cuda:
        estimate = weights + ops.kv_nbytes(model.config.attention, 2 * length) + (256 << 20)
        peak = torch.cuda.max_memory_allocated() - before
        values |= {"peak_vram_bytes": peak, "estimate_bytes": estimate}
        ok &= peak <= estimate
    cache.trim(0)
    model.forward(Batch.extend([(cache, prompt)]), rows=[])
    return [
        Result(f"resident {name}", ok, values=values),
        tree(model, forward, cache, prompt, TREE if cuda else 2),
    ]


def tree(model: Decoder, forward: Any, cache: Any, prompt: list[int], nodes: int) -> Result:
    """A chain as a mask, and a binary tree, each one pass; against their branches row by row."""
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
    cuda = "cuda" in model.ops.device  # BLAS decides the order of sums in the interpreter
    ok = (bitwise or not cuda) and error < BOUND and values["replay_is_bitwise_equal"]
    return Result(f"tree of {nodes}", bool(ok), values=values)
