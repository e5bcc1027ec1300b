"""Models larger than 8 GB through ``localrt.load(gpu_memory="8GB")``, the public API.

Random weights in the shapes of Qwen3-14B, Qwen3-32B and Qwen3-30B-A3B, written as a store. Each is
loaded in separate processes: before and after kernels are compiled, over a link of 12 GB/s, from a
disk. If the GPU has room for all weights, the model is loaded again without a budget but with the
same assignment of units to GPU and CPU: a dense model must then give bit-identical tokens and
logits.
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
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.random_store import stored_units, write_store
from benchmarks.gpu.configs import known_config, largest_error
from benchmarks.gpu.disk import MEMORY, find_disk, find_memory
from benchmarks.gpu.routed import DIVISIONS
from benchmarks.gpu.timing import Check, Values, free_memory
from localrt.common.files import read_cached
from localrt.common.formatting import parse_size
from localrt.offload.placement import Where

FORMAT = "int4-g32"
BUDGET: Mapping[str, Any] = {"gpu_memory": "8GB"}
WHOLE: Mapping[str, Any] = {"device": "cuda"}  # all weights on the GPU
SLOW_LINK = 12e9  # PCIe 4.0 with eight lanes, or 3.0 with sixteen
UNCOMPILED, COMPILED, RESIDENT = "kernels uncompiled", "compiled", "resident"
AT_SLOW_LINK, FROM_SSD = "at 12 GB/s", "from the SSD"
_TIMEOUT_S = 110
_ROOM = 1.3  # a folder or a GPU must have this times a store's bytes free
_UNMOVED = "no weight moved"
_FEW = 6  # fewer tokens are not timed, since graphs are still being recorded
_PLAIN = {"logits": None}
_MEASURED = ("machine.json", "disks.json", "cards.json")  # of localrt's cache: what plans rest on


@dataclass(frozen=True)
class Size:
    """A model and a test's parameters. ``bound`` is the largest error of logits if bits differ.

    With the budget ``little``, most of the other weights are read for each token. Forecasts are
    compared within ``budgets``, besides ``BUDGET``.
    """

    architecture: str
    config: Mapping[str, Any]
    bound: float
    little: Mapping[str, Any] = field(default_factory=lambda: {"gpu_memory": "4GB", "ram": "3GB"})
    budgets: tuple[str, ...] = ()
    prompts: tuple[int, ...] = (512, 2048)
    tokens: int = 32
    tokens_from_ssd: int = 8

    @property
    def nbytes(self) -> int:
        """Bytes of the store."""
        units = stored_units(self.architecture, self.config, FORMAT)
        return sum(unit.nbytes for unit in units)


_14B, _30B_A3B = known_config("qwen3:14b"), known_config("qwen3:30b")
_32B = {"intermediate_size": 25_600, "num_hidden_layers": 64, "num_attention_heads": 64}
LARGE = {
    # Nearly equal router scores may choose another expert.
    "30B-A3B": Size("Qwen3MoeForCausalLM", {**_30B_A3B, "norm_topk_prob": True}, bound=0.3),
    "14B": Size("Qwen3ForCausalLM", _14B, bound=0.1, budgets=("4GB", "6GB")),
    "32B": Size(
        "Qwen3ForCausalLM",
        {**_14B, **_32B},
        bound=0.1,
        little={"gpu_memory": "8GB", "ram": "6GB"},
        budgets=("12GB", "16GB"),
        tokens_from_ssd=6,
    ),
}


def check_model(device: str, name: str, kind: str) -> Iterator[Check]:
    """One kind of results of a model, such as ``dense``. Its files are deleted afterwards."""
    size = LARGE[name]
    nbytes = size.nbytes
    try:
        if not device.startswith("cuda"):
            raise OSError("it needs a GPU")
        folder = find_memory(nbytes) or find_disk(round(_ROOM * nbytes))
    except OSError as error:
        yield f"loaded {name}, {kind}", partial(dict, {"not run": str(error)})
        return
    with ExitStack() as held:
        # The machine is measured once, and kernels are compiled once.
        files, cache = (
            Path(held.enter_context(tempfile.TemporaryDirectory(dir=where)))
            for where in (folder, None)
        )

        def write() -> Values:
            started = time.perf_counter()
            write_store(files / "model", size.architecture, size.config, FORMAT)
            return {"weight_bytes": nbytes, "written_s": time.perf_counter() - started}

        yield f"store {name}", write
        yield from getattr(Loaded(name, size, files, cache, nbytes, held), kind)()
        yield f"rates {name}", lambda: {file: read_cached(cache / file) for file in _MEASURED}


@dataclass
class Loaded:
    """One model of ``nbytes``, and its results so far, by way of loading."""

    name: str
    size: Size
    folder: Path
    cache: Path
    nbytes: int
    held: ExitStack
    found: dict[str, Values] = field(default_factory=dict)

    # -- kinds of results --------------------------------------------------------------------------

    def dense(self) -> Iterator[Check]:
        """Speeds from RAM and from a disk, over two links; then whether their tokens are those of
        weights that do not move.
        """
        ways = self.ways()
        resident = ways.pop(RESIDENT)
        ways[f"{FROM_SSD}, {AT_SLOW_LINK}"] = {**ways[FROM_SSD], "link_bytes_s": SLOW_LINK}
        for way, job in ways.items():
            yield from self.go(way, job)
        yield from self.compared((UNCOMPILED, COMPILED))
        del ways[UNCOMPILED]
        for way, job in ways.items():
            if self.found.get(way, {}).get("placement"):
                yield from self.checked(way, job)
        if self.name != "32B":  # it would exceed ten minutes
            yield from self.go(RESIDENT, resident)
            yield from self.compared((COMPILED, RESIDENT))

    def mixture(self) -> Iterator[Check]:
        """All ways. Which device computes an expert depends on timing, so logits are only nearly
        equal.
        """
        for way, job in self.ways().items():
            yield from self.go(way, job)
        yield from self.compared((UNCOMPILED, COMPILED), (COMPILED, RESIDENT), (FROM_SSD, COMPILED))

    def routed(self) -> Iterator[Check]:
        """A mixture's speed if its routers choose as trained ones, by ways to divide experts."""
        few = {**_PLAIN, "prompts": self.size.prompts[:1], "tokens": 4 * self.size.tokens}
        yield from self.go(UNCOMPILED, {**few, "load": BUDGET, "tokens": 2})
        for division in DIVISIONS:
            way = f"trained routing, {division}"
            yield from self.go(way, {**few, "load": BUDGET, "routed": division})

    def prompts(self) -> Iterator[Check]:
        """Time to first token for all prompt lengths, and the plan's prefill rate."""
        job = {"load": BUDGET, "prompts": self.size.prompts, "tokens": 2}
        yield from self.over_both_links({"prompts": job})

    def forecasts(self) -> Iterator[Check]:
        """Planned and measured tokens per second for other budgets and two links."""
        jobs = {f"within {each}": {"load": {"gpu_memory": each}} for each in self.size.budgets}
        yield from self.over_both_links(jobs)

    # -- ways of loading ---------------------------------------------------------------------------

    def ways(self) -> dict[str, Values]:
        """The job of each of the usual ways."""
        size = self.size
        short = {"load": BUDGET, "prompts": size.prompts[:1]}
        disk = {"load": size.little, "tokens": size.tokens_from_ssd, "on_disk": True}
        return {
            UNCOMPILED: {**short, **_PLAIN, "tokens": 8},
            COMPILED: short,
            AT_SLOW_LINK: {**short, "link_bytes_s": SLOW_LINK},
            FROM_SSD: {**short, **disk},
            RESIDENT: {**short, "load": WHOLE},
        }

    def over_both_links(self, jobs: Mapping[str, Mapping[str, Any]]) -> Iterator[Check]:
        """Run each job with half its tokens over both links, once kernels are compiled."""
        few = {**_PLAIN, "prompts": self.size.prompts[:1], "tokens": self.size.tokens // 2}
        yield from self.go(UNCOMPILED, {**few, "load": BUDGET, "tokens": 2})
        for way, job in jobs.items():
            yield from self.go(way, {**few, **job})
            yield from self.go(f"{way}, {AT_SLOW_LINK}", {**few, **job, "link_bytes_s": SLOW_LINK})

    def go(self, way: str, job: Mapping[str, Any]) -> Iterator[Check]:
        """Load the model one way, if there is room."""
        name = f"loaded {self.name}, {way}"
        try:
            if job["load"] == WHOLE and not self.has_room():
                raise OSError("the GPU has no room for all weights at once")
            model = self.on_disk if job.get("on_disk") else self.folder / "model"
        except OSError as error:
            yield name, partial(dict, {"not run": str(error)})
            return
        yield name, lambda: self.run(way, {**job}, model)

    def has_room(self) -> bool:
        """Whether all weights fit on the GPU."""
        return free_memory() > _ROOM * self.nbytes

    @cached_property
    def on_disk(self) -> Path:
        """The files on a disk; copied if they are in RAM."""
        model = self.folder / "model"
        if not self.folder.is_relative_to(MEMORY):
            return model
        disk = find_disk(round(_ROOM * self.nbytes))
        folder = self.held.enter_context(tempfile.TemporaryDirectory(dir=disk))
        copied = shutil.copytree(model, Path(folder, "model"))
        os.sync()  # otherwise writing would overlap with reading
        return copied

    def run(self, way: str, job: Values, model: Path) -> Values:
        """Run a job; the check fails if it exceeds the GPU budget."""
        job = {"logits": str(self.logits(way)), **job, "free_before": free_memory()}
        values = asked(model, self.cache, self.size, job)
        # Too long for the JSON, and needed only for comparisons.
        ids, placement = values.pop("token_ids", None), values.pop("placement", None)
        if "error" in values:  # it died; what it had measured is kept
            return {"ok": False, **values}
        self.found[way] = {"token_ids": ids, "placement": placement}
        self.found[way]["computed_by_cpu"] = values["computed_by_cpu"]
        self.found[way]["sides"] = _sides(placement or {"where": {}})
        budget = job["load"].get("gpu_memory")
        ok = budget is None or values["peak_vram_bytes"] <= parse_size(budget)
        if job["logits"] is not None:
            values["finite"] = bool(np.isfinite(np.load(job["logits"])).all())
            ok &= values["finite"]
        if "placement" in job:
            del values["predicted_tok_s"]  # it was for another placement
        if job.get("tokens", self.size.tokens) < _FEW:
            del values["decode_tok_s"]
        elif "predicted_tok_s" in values:
            values["forecast_error"] = values["predicted_tok_s"] / values["decode_tok_s"] - 1
        return {"ok": ok, **values}

    def logits(self, way: str) -> Path:
        """The file of a way's logits."""
        return self.folder / f"{way.replace('/', ' per ')}.npy"

    # -- whether ways agree ------------------------------------------------------------------------

    def checked(self, way: str, job: Mapping[str, Any]) -> Iterator[Check]:
        """Compare ``way`` with weights in memory, where the GPU computes the same units."""
        placement, sides = (self.found[way][name] for name in ("placement", "sides"))
        unmoved = (each for each in self.found if each.endswith(_UNMOVED))
        known = (each for each in unmoved if self.found[each]["sides"] == sides)
        other, there = next(known, f"{way}, {_UNMOVED}"), self.has_room()
        if other not in self.found:
            to = "vram" if there else "ram-to-gpu"
            moved = {"ssd": "ram", "ssd-to-gpu": to, "ram-to-gpu": to}
            where = {name: moved.get(place, place) for name, place in placement["where"].items()}
            load = WHOLE if there else {"gpu_memory": job["load"]["gpu_memory"]}
            changed = {"link_bytes_s": None, "on_disk": False, "load": load}
            placed = {**placement, "where": where}
            yield from self.go(other, {**job, **changed, "placement": placed})
        yield from self.compared((way, other))

    def compared(self, *pairs: tuple[str, str]) -> Iterator[Check]:
        """Compare the pairs of ways that both succeeded."""
        for way, other in pairs:
            if way in self.found and other in self.found:
                yield f"loaded {self.name}, {way} as {other}", partial(self.same, way, other)

    def same(self, way: str, other: str) -> Values:
        """Compare as many tokens as both have, and the logits of one prompt if both have them."""
        one, two = self.found[way], self.found[other]
        pairs = list(zip(one["token_ids"], two["token_ids"], strict=False))
        until = next((at for at, (a, b) in enumerate(pairs) if a != b), len(pairs))
        by_cpu = one["computed_by_cpu"] + two["computed_by_cpu"]
        values: Values = {"same_tokens": until, "of_tokens": len(pairs)}
        equal, close = until == len(pairs), True
        files = [self.logits(each) for each in (way, other)]
        if all(file.exists() for file in files):
            a, b = (np.load(file) for file in files)
            error = largest_error(a, b)
            equal, close = bool(equal and np.array_equal(a, b)), error < self.size.bound
            values |= {"relative_error": error, "bound": self.size.bound}
        values |= {"bitwise_equal": equal, "units_on_cpu": by_cpu}
        # CPU and GPU kernels round differently, so bits agree only if the same device computes each
        # unit. For experts that depends on timing.
        alike = one["sides"] == two["sides"] or not by_cpu
        exact = alike and "num_experts" not in self.size.config
        return {"ok": equal if exact else close, **values}


def _sides(placement: Mapping[str, Any]) -> Values:
    """Whether the GPU computes each unit: bits depend on that, not on where weights are."""
    sides = {name: Where(place).on_gpu for name, place in placement["where"].items()}
    return {**placement, "where": sides, "ram_ring": 0, "vram_ring": 0}


def asked(model: Path, cache: Path, size: Size, job: Values) -> Values:
    """The results of a job, run in a separate process; with an ``error`` if that fails or takes too
    long, after what it measured before.
    """
    ctx = max(size.prompts) + 4 * size.tokens
    common = {"model": str(model), "ctx": ctx, "prompts": size.prompts, "tokens": size.tokens}
    environment = {
        **os.environ,
        "LOCALRT_CACHE": str(cache),
        "LOCALRT_OFFLINE": "1",
        "XDG_DATA_HOME": str(cache),  # records which models were used
    }
    command = [sys.executable, "-m", "benchmarks.gpu.loaded_child"]
    given = json.dumps({**common, "seconds": _TIMEOUT_S, **job}).encode()
    options: dict[str, Any] = {"input": given, "env": environment, "timeout": _TIMEOUT_S}
    error = None
    try:
        done = subprocess.run(command, capture_output=True, check=False, **options)
        out, said = done.stdout, done.stderr.decode(errors="replace")
        if done.returncode:
            error = (said.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    except subprocess.TimeoutExpired as late:
        out, said = late.stdout or b"", (late.stderr or b"").decode(errors="replace")
        error = f"it took more than {_TIMEOUT_S} seconds"
    *lines, _ = out.split(b"\n")  # the last is not whole
    values: Values = json.loads((lines or [b"{}"])[-1])
    return values if error is None else {**values, "error": error, "traceback": said[-4000:]}
