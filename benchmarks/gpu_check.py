"""Every check that needs a CUDA GPU, from a bare checkout: torch and numpy are all it needs.

    scripts/gpu_check [--out FILE] [--device cpu] [--only NAME,...] [--sweep]

It makes its own weights, prints one line per check and writes one JSON. Exit status 1 when a check
fails, or when there is no GPU. Speeds never fail: their targets stand beside them. ``--device cpu``
tries the script itself, the Triton kernels in Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from gpu_configs import ARCHITECTURES, QWEN_1_5B, TINY  # noqa: E402
from gpu_timing import RUNS, Result, copy_bandwidth, guarded, timed  # noqa: E402
from random_checkpoint import RandomCheckpoint  # noqa: E402

from localrt.models.decoder import Decoder  # noqa: E402
from localrt.models.registry import load_decoder, read_config  # noqa: E402
from localrt.quant.ops.protocol import Batch  # noqa: E402
from localrt.quant.ops.torch.ops import TorchOps  # noqa: E402

# Largest difference over largest magnitude. float32 differs by the order of sums alone (TF32 is
# off); bf16 keeps 8 bits, through 4 layers.
BOUND_F32, BOUND_BF16 = 1e-4, 0.05


def decoder(architecture: str, config: dict[str, Any], format: str, device: str) -> Decoder:
    checkpoint = RandomCheckpoint(architecture, config)
    ops = TorchOps(compute_format=format, device=device)
    return load_decoder(checkpoint, ops, read_config(checkpoint))


def logits(model: Decoder, ids: list[int]) -> np.ndarray:
    """Prefill of all but the last eight tokens, then one token at a time."""
    cache = model.cache(256)
    parts = [model.forward(Batch.extend([(cache, ids[:-8])]))]
    parts += [model.forward(Batch.extend([(cache, [token])])) for token in ids[-8:]]
    return np.concatenate(parts)


def check_logits(device: str) -> list[Result]:
    """CUDA against the CPU's float32, for every architecture."""
    ids = [int(t) for t in np.random.default_rng(0).integers(0, TINY["vocab_size"], 100)]
    results = []
    for architecture, extra in ARCHITECTURES.items():
        config = {**TINY, **extra}
        expected = logits(decoder(architecture, config, "f32", "cpu"), ids)
        for format, bound in (("f32", BOUND_F32), ("bf16", BOUND_BF16)):
            got = logits(decoder(architecture, config, format, device), ids)
            error = float(np.abs(got - expected).max() / np.abs(expected).max())
            same = float((got.argmax(1) == expected.argmax(1)).mean())
            values = {"relative_error": error, "bound": bound, "top1_agreement": same}
            results.append(Result(f"logits {architecture} {format}", error < bound, values=values))
    return results


def check_decode(device: str) -> list[Result]:
    """Resident decode and prefill of a 1.5B in bf16; peak memory against the estimate."""
    cuda = device.startswith("cuda")
    config = QWEN_1_5B if cuda else {**TINY, "num_hidden_layers": 2}
    model = decoder("Qwen2ForCausalLM", config, "bf16", device)
    ops, spec = model.ops, model.config.attention
    checkpoint = RandomCheckpoint("Qwen2ForCausalLM", config)
    matrices = [info for info in checkpoint.tensors.values() if len(info.shape) == 2]
    weights = sum(ops.weight_nbytes(info.shape, info.format) for info in matrices)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    cache = model.cache(1024)
    prompt = [int(t) for t in np.random.default_rng(1).integers(0, config["vocab_size"], 512)]

    def prefill() -> None:
        cache.trim(0)
        model.forward(Batch.extend([(cache, prompt)]), rows=[511])

    def decode() -> None:
        for token in prompt[:32]:
            model.forward(Batch.extend([(cache, [token])]), rows=[0])

    prefill_s, decode_s = [], []
    for _ in range(RUNS + 1):
        prefill_s.append(timed(prefill))
        decode_s.append(timed(decode))
    values: dict[str, Any] = {
        "prefill_tok_s": 512 / statistics.median(prefill_s[1:]),
        "decode_tok_s": 32 / statistics.median(decode_s[1:]),
        "weight_bytes": weights,
    }
    ok = True
    if cuda:
        estimate = weights + ops.kv_nbytes(spec, 1024) + (256 << 20)
        values |= {"peak_vram_bytes": torch.cuda.max_memory_allocated(), "estimate_bytes": estimate}
        ok = values["peak_vram_bytes"] <= estimate
    return [Result("resident 1.5B bf16", ok, values=values)]


def check_copy(device: str) -> list[Result]:
    """The ceiling: device copy bandwidth, bytes read and written counted."""
    return [Result("copy bandwidth", True, values={"gb_s": copy_bandwidth(device) / 1e9})]


def from_module(module: str, check: str) -> Callable[[str], list[Result]]:
    """A check of a module that needs Triton, which is imported when it runs."""

    def run(device: str) -> list[Result]:
        if find_spec("triton") is None:
            return [Result(check, True, values={"skipped": "Triton is not installed"})]
        found: list[Result] = getattr(import_module(module), check)(device)
        return found

    return run


CHECKS: dict[str, Callable[[str], list[Result]]] = {
    "copy": check_copy,
    "logits": check_logits,
    "decode": check_decode,
    "products": from_module("gpu_kernels", "check_products"),
    "one-row": from_module("gpu_kernels", "check_one_row"),
    "batches": from_module("gpu_kernels", "check_batches"),
    "unpacking": from_module("gpu_kernels", "check_unpacking"),
    "attention": from_module("gpu_kernels", "check_attention"),
    "triton-logits": from_module("gpu_models", "check_logits"),
    "packed": from_module("gpu_models", "check_packed"),
    "offload": from_module("gpu_offload", "check_offload"),
    "experts": from_module("gpu_experts", "check_experts"),
}
EXTRA = {"sweep": from_module("gpu_kernels", "sweep")}
"""Run when asked for."""


def main() -> int:
    parser = argparse.ArgumentParser(description="checks that need a CUDA GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_check.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--only", default="", help=f"of {','.join(CHECKS)}")
    parser.add_argument("--sweep", action="store_true", help="try ways to cut the products' work")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA GPU here", file=sys.stderr)
        return 1
    if not args.device.startswith("cuda"):
        os.environ["TRITON_INTERPRET"] = "1"
    checks = {**CHECKS, **EXTRA}
    names = args.only.split(",") if args.only else list(CHECKS)
    names += ["sweep"] if args.sweep else []
    if unknown := [name for name in names if name not in checks]:
        parser.error(f"no check is called {unknown[0]}: choose from {', '.join(checks)}")
    torch.backends.cuda.matmul.allow_tf32 = False
    results: list[Result] = []
    started = time.perf_counter()
    for name in names:
        start = time.perf_counter()
        found = guarded(name, lambda name=name: checks[name](args.device))
        for result in found:
            result.seconds = (time.perf_counter() - start) / len(found)
            print(result.line(), flush=True)
        results += found
    cuda = args.device.startswith("cuda")
    machine = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": version_of("triton"),
        "bitsandbytes": version_of("bitsandbytes"),
    }
    record = {
        "machine": machine,
        "command": "scripts/gpu_check",
        "seconds": time.perf_counter() - started,
        "results": [asdict(result) for result in results],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + "\n")
    failed = [result.name for result in results if not result.ok]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def version_of(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
