"""Every check that needs a CUDA GPU, from a bare checkout: torch and numpy are all it needs.

    scripts/gpu_check [--out FILE] [--device cpu]

It makes its own weights, prints one line per check and writes one JSON. Exit status 1 when a check
fails, or when there is no GPU. ``--device cpu`` tries the script itself.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from random_checkpoint import RandomCheckpoint  # noqa: E402

from localrt.models.decoder import Decoder  # noqa: E402
from localrt.models.registry import load_decoder, read_config  # noqa: E402
from localrt.quant.ops.protocol import Batch  # noqa: E402
from localrt.quant.ops.torch_ops import TorchOps  # noqa: E402

TINY: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {"head_dim": 64},
    "Gemma2ForCausalLM": {
        "head_dim": 64,
        "sliding_window": 32,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "Gemma3ForCausalLM": {"head_dim": 64, "sliding_window": 32},
    "Phi3ForCausalLM": {"sliding_window": 64},
    "SmolLM3ForCausalLM": {},
}
# Qwen2.5-Coder-1.5B's shape: the model most of the project's numbers are about.
QWEN_1_5B: dict[str, Any] = {
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
# Largest difference over largest magnitude. float32 differs by the order of sums alone (TF32 is
# off); bf16 keeps 8 bits, through 4 layers.
BOUND_F32, BOUND_BF16 = 1e-4, 0.05
RUNS = 5


@dataclass
class Result:
    """One check: ``ok`` against its bound, and whatever numbers it found."""

    name: str
    ok: bool
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


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
    size = (1 << 30) if device.startswith("cuda") else (16 << 20)
    a = torch.empty(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    seconds = [timed(lambda: b.copy_(a)) for _ in range(RUNS + 1)][1:]
    return [
        Result("copy bandwidth", True, values={"gb_s": 2 * size / statistics.median(seconds) / 1e9})
    ]


def timed(work: Callable[[], Any]) -> float:
    """Seconds of ``work``, device work included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


CHECKS = (check_copy, check_logits, check_decode)


def main() -> int:
    parser = argparse.ArgumentParser(description="checks that need a CUDA GPU")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu_check.json")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA GPU here", file=sys.stderr)
        return 1
    torch.backends.cuda.matmul.allow_tf32 = False
    results: list[Result] = []
    for check in CHECKS:
        start = time.perf_counter()
        found = check(args.device)
        for result in found:
            result.seconds = (time.perf_counter() - start) / len(found)
            numbers = "  ".join(f"{k} {v:.4g}" for k, v in result.values.items())
            print(f"{'ok  ' if result.ok else 'FAIL'} {result.name}: {numbers}", flush=True)
        results += found
    cuda = args.device.startswith("cuda")
    machine = {
        "device": torch.cuda.get_device_name() if cuda else platform.processor() or "cpu",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    record = {
        "machine": machine,
        "command": "scripts/gpu_check",
        "results": [asdict(result) for result in results],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(record, indent=2) + "\n")
    failed = [result.name for result in results if not result.ok]
    print(f"{len(results) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
