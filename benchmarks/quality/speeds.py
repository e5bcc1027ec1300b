"""Decode speeds of the quality table's rows, measured by turns in one run.

Speed depends on a format and on whether activations are rotated, not on the values that a method
found. So GPTQ has the speed of RTN, and what is measured is quantized on little text.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import localrt
from benchmarks.quality.bench import jobs
from localrt.errors import LocalrtError
from localrt.quantizing.quantize import Recipe, quantize_model

__all__ = ["measure_speeds"]

_CTX = 1024
_PROMPT_TOKENS = 64
_WARM_UP_TOKENS = 16
_TOKENS = 64
_LEAST_CALIBRATION = 512


def measure_speeds(
    source: Path,
    formats: Sequence[str],
    methods: Sequence[str],
    text: str,
    work: Path,
    *,
    runs: int,
) -> list[dict[str, Any]]:
    """Median decode tokens per second of ``source``, of llama.cpp on it, and of every format.

    Nothing is guessed ahead. Each turn loads a model, warms it up and decodes 64 tokens after a
    prompt of 64; there are ``runs`` turns, after one to warm up. ``text`` (512 tokens or more) is
    for prompts and calibration. Quantized models stay in ``work``, where a later call finds them.
    Methods but ``"rtn"`` and ``"mr-gptq"`` have the speed of one of these.
    """
    with localrt.load(source, ctx=_CTX, engine="native", draft="off") as model:
        tokens = model.tokenize(text, add_special=False)
    candidates = {"published": source, "llamacpp": source}
    timed = [method for method in ("rtn", "mr-gptq") if method in methods]
    for job in jobs(formats, timed, []):
        if job.format is not None:
            path = work / f"{source.stem}-{job.format}-{job.method}"
            if not path.exists():
                calibration = None if job.method == "rtn" else tokens
                recipe = Recipe(
                    job.format,
                    method=job.method,
                    calibration=calibration,
                    calibration_tokens=_LEAST_CALIBRATION,
                )
                quantize_model(source, path, recipe)
            candidates[job.name] = path
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for run in range(runs + 1):
        for name, path in candidates.items():
            engine = "llamacpp" if name == "llamacpp" else "native"
            try:
                speed = _decode(path, engine, tokens[:_PROMPT_TOKENS])
            except LocalrtError as error:  # no llama.cpp here, or a format without a kernel
                if not run:
                    print(f"quality: {name} is not timed: {error}", file=sys.stderr)
                continue
            if run:
                samples[name].append(speed)
    return [
        {
            "model": source.stem,
            "name": name,
            "decode_tok_s": statistics.median(speeds),
            "samples": speeds,
        }
        for name, speeds in samples.items()
        if speeds
    ]


def _decode(path: Path, engine: str, prompt: list[int]) -> float:
    options = {"token_ids": prompt, "temperature": 0, "ignore_eos": True}
    with localrt.load(path, ctx=_CTX, engine=engine, draft="off") as model:
        model.generate(max_tokens=_WARM_UP_TOKENS, **options)
        speed = model.generate(max_tokens=_TOKENS, **options).metrics.decode_tok_s
    assert speed is not None
    return speed
