"""One process of ``python -m benchmarks.compare``: it loads a model and answers once.

It runs as a script, with its job as JSON, on the checkout in PYTHONPATH, so it uses only the public
API that all checkouts have. The first answer in the process warms up and does not count.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import localrt


def main(job: dict[str, Any]) -> dict[str, Any]:
    """The measurements, as plain values."""
    if job["isa"]:
        force_isa(job["isa"])
    started = time.perf_counter()
    with localrt.load(job["model"], device="cpu", draft="off", **job["load"]) as model:
        load_s = time.perf_counter() - started
        model.generate("Hello.", max_tokens=8, ignore_eos=True, temperature=0.0)
        found = _resume(model, job) if job["resume"] else _answer(model, job)
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return {
            **found,
            "load_s": load_s,
            "peak_ram_mb": int(peak.split()[1]) * 1024 / 1e6,
            "checkout": str(Path(localrt.__file__).resolve().parents[1]),
        }


def force_isa(isa: str) -> None:
    """Make all kernels of this process use one instruction set, in any checkout."""
    from localrt.quant.cpu.ops import NativeOps

    init = NativeOps.__init__

    def forced(self: NativeOps, **options: Any) -> None:
        init(self, **{**options, "isa": isa})

    NativeOps.__init__ = forced  # type: ignore[method-assign]


def _answer(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    ids = [100 + (number * 7919 + 13) % 40_000 for number in range(job["prompt"])]
    chunk = model.generate(
        token_ids=ids, max_tokens=job["tokens"], ignore_eos=True, temperature=0.0
    )
    return {
        "prefill_tok_s": chunk.metrics.prefill_tok_s,
        "decode_tok_s": chunk.metrics.decode_tok_s,
        "tokens": list(chunk.token_ids),
    }


def _resume(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Time to the first token of a chat's next turn; only the first process computes the chat."""
    sentence = "The store keeps what was packed and brings it back in order. "
    sentences = 8 * job["prompt"] // len(model.tokenize(sentence * 8))
    chat = model.chat()
    chat.messages = [
        {"role": "user", "content": sentence * sentences},
        {"role": "assistant", "content": "Yes."},
    ]
    chunk = chat.send("And then?", max_tokens=1, temperature=0.0)
    if not chunk.metrics.cached_tokens:
        chat.park()
    return {"first_token_s": chunk.metrics.ttft_s, "tokens": list(chunk.token_ids)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
