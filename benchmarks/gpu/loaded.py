"""Models larger than 8 GB through ``localrt.load(gpu_memory="8GB")``, as any program has them.

Random weights in the shapes of Qwen3-14B and Qwen3-30B-A3B, written as a store. Each is loaded in
processes of its own: with no kernel compiled yet, with all of them, over a link of 12 GB/s, and
without a budget, where the GPU has room for all weights. The same weights must give the same
logits wherever they are; bit for bit, if the GPU computes all of them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.random_store import write_store
from benchmarks.gpu.memory import free_memory
from benchmarks.gpu.timing import Result, guarded

FORMAT = "int4-g32"
SLOW_LINK = 12e9  # PCIe 4.0 with eight lanes, or 3.0 with sixteen
CAP = 8_000_000_000
UNCOMPILED, COMPILED, RESIDENT = "kernels uncompiled", "compiled", "resident"
FROM_SSD = "from the SSD"
_TIMEOUT_S = 170
_LITTLE = {"gpu_memory": "4GB", "ram": "3GB"}  # most units are read and copied for each token
_ROOM = 1.3  # of a store's bytes: what a folder and a GPU must have free for it


@dataclass(frozen=True)
class Size:
    """A model, the GPU's share, and what is asked of it. ``bound`` is of logits, unlike bits."""

    architecture: str
    config: Mapping[str, Any]
    bound: float
    load: Mapping[str, Any] = field(default_factory=lambda: {"gpu_memory": "8GB"})
    resident: Mapping[str, Any] = field(default_factory=lambda: {"device": "cuda"})
    prompts: tuple[int, ...] = (512, 2048)
    tokens: int = 32


_QWEN3: dict[str, Any] = {
    "vocab_size": 151_936,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
LARGE = {
    "30B-A3B": Size(
        "Qwen3MoeForCausalLM",
        {
            **_QWEN3,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        bound=0.3,  # an expert that is chosen almost as well may be taken for another
    ),
    "14B": Size(
        "Qwen3ForCausalLM",
        {
            **_QWEN3,
            "hidden_size": 5120,
            "intermediate_size": 17_408,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
        bound=0.1,
    ),
}


def check_loaded(device: str) -> Iterator[Result]:
    """Each model in turn: its files are gone before those of the next are written."""
    if not device.startswith("cuda"):
        yield Result("loaded", True, values={"not run": "it needs a GPU"})
        return
    with tempfile.TemporaryDirectory() as cache:  # what the machine does is measured once
        for name, size in LARGE.items():
            with tempfile.TemporaryDirectory(dir=scratch()) as folder:
                yield from Loaded(name, size, Path(folder), Path(cache)).results()


@dataclass
class Loaded:
    """One model, and what was found of it so far, by way of loading it."""

    name: str
    size: Size
    folder: Path
    cache: Path
    found: dict[str, dict[str, Any]] = field(default_factory=dict)

    def results(self) -> Iterator[Result]:
        """Its files, every way, and whether the ways agree."""
        started = time.perf_counter()
        size = self.size
        store = write_store(self.folder / "model", size.architecture, size.config, FORMAT)
        written = {"weight_bytes": store.nbytes, "written_s": time.perf_counter() - started}
        yield Result(f"store {self.name}", True, values=written)
        short = {"load": size.load, "prompts": size.prompts[:1]}
        ways: dict[str, dict[str, Any]] = {
            UNCOMPILED: {**short, "tokens": 8, "logits": None},
            COMPILED: {"load": size.load},
            "at 12 GB/s": {**short, "link_bytes_s": SLOW_LINK},
            FROM_SSD: {**short, "load": _LITTLE, "tokens": 12},
            RESIDENT: {"load": size.resident},
        }
        shutil.rmtree(self.cache / "kernels", ignore_errors=True)
        if free_memory() < _ROOM * store.nbytes:
            del ways[RESIDENT]
            why = {"not run": "the GPU has no room for all weights at once"}
            yield Result(f"loaded {self.name}, {RESIDENT}", True, values=why)
        if not has_disk(round(_ROOM * store.nbytes)):
            del ways[FROM_SSD]
            why = {"not run": f"{tempfile.gettempdir()} is no disk, or has no room"}
            yield Result(f"loaded {self.name}, {FROM_SSD}", True, values=why)
        for way, job in ways.items():
            yield from guarded(f"loaded {self.name}, {way}", lambda w=way, j=job: [self.run(w, j)])
        for way, other in ((UNCOMPILED, COMPILED), (COMPILED, RESIDENT), (FROM_SSD, COMPILED)):
            if way in self.found and other in self.found:
                yield self.same(way, other)

    def run(self, way: str, job: dict[str, Any]) -> Result:
        """One way."""
        job = {"logits": str(self.logits(way)), **job, "free_before": free_memory()}
        with ExitStack() as held:
            model = self.folder / "model"
            if way == FROM_SSD:
                folder = held.enter_context(tempfile.TemporaryDirectory())
                model = Path(shutil.copytree(model, Path(folder, "model")))
            values = asked(model, self.cache, self.size, job)
        # Thousands of lines that say nothing alone.
        self.found[way] = {name: values.pop(name) for name in ("token_ids", "placement")}
        self.found[way]["computed_by_cpu"] = values["computed_by_cpu"]
        ok = way == RESIDENT or values["peak_vram_bytes"] <= CAP
        if job["logits"] is not None:
            values["finite"] = bool(np.isfinite(np.load(job["logits"])).all())
            ok &= values["finite"]
        return Result(f"loaded {self.name}, {way}", ok, values=values)

    def logits(self, way: str) -> Path:
        """The file of a way's logits."""
        return self.folder / f"{way.split()[0]}.npy"

    def same(self, way: str, other: str) -> Result:
        """Tokens as far as both ways went, and logits of one prompt, if both have them."""
        one, two = self.found[way], self.found[other]
        pairs = list(zip(one["token_ids"], two["token_ids"], strict=False))
        until = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        by_cpu = one["computed_by_cpu"] + two["computed_by_cpu"]
        values: dict[str, Any] = {"same_tokens": until, "of_tokens": len(pairs)}
        equal, close = until == len(pairs), True
        files = [self.logits(each) for each in (way, other)]
        if all(file.exists() for file in files):
            a, b = (np.load(file) for file in files)
            error = float(np.abs(a - b).max() / np.abs(b).max())
            equal, close = bool(equal and np.array_equal(a, b)), error < self.size.bound
            values |= {"relative_error": error, "bound": self.size.bound}
        values |= {"bitwise_equal": equal, "units_on_cpu": by_cpu}
        # The CPU's kernels and a GPU's round differently: the same ones must compute. Which of
        # them computes an expert depends on what is ready.
        alike = one["placement"] == two["placement"] or not by_cpu
        exact = alike and "num_experts" not in self.size.config
        return Result(
            f"loaded {self.name}, {way} as {other}", equal if exact else close, values=values
        )


def asked(model: Path, cache: Path, size: Size, job: dict[str, Any]) -> dict[str, Any]:
    """What a process of its own finds."""
    longest = max(size.prompts)
    whole = {
        "model": str(model),
        "ctx": longest + 4 * size.tokens,
        "prompts": size.prompts,
        "tokens": size.tokens,
        **job,
    }
    command = [sys.executable, "-m", "benchmarks.gpu.loaded_child", json.dumps(whole)]
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "LOCALRT_CACHE": str(cache),
            "LOCALRT_OFFLINE": "1",
            "XDG_DATA_HOME": str(cache),  # where it is noted that these models were used
        },
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["it died"]
        raise RuntimeError(words[-1])
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def has_disk(nbytes: int) -> bool:
    """Whether the usual folder is on a disk that has room for so many bytes."""
    folder = Path(tempfile.gettempdir()).resolve()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    _, kind = max((where, kind) for where, kind in mounts if folder.is_relative_to(where))
    return kind not in ("tmpfs", "ramfs") and shutil.disk_usage(folder).free > nbytes


def scratch() -> str | None:
    """Memory, if it has room for a store beside the model itself; else the usual folder."""
    memory = Path("/dev/shm")
    if memory.is_dir():
        pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        if shutil.disk_usage(memory).free > 20e9 and pages > 64e9:
            return str(memory)
    return None
