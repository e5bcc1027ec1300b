"""The pipeline against a FlexGen-style loop: the same placement, kernels and rings, with a barrier.

    .venv/bin/python benchmarks/schedules.py [MODEL] [--passes N] [--only disk|virtual]

The loop loads one unit while the one before it is computed, and waits for both. Where streamed and
resident units mix it leaves the disk or the link idle during resident units, and computing idle
during streamed ones. The bound says by how much at most: the loop's time, the sum over units of the
longer of the next one's load and this one's computation, over the pipeline's, the longer of all
loads and all computations. Loads and computations are those measured in the loop, where nothing
disturbs them.

Two machines: this one, from the SSD to the CPU, in wall time; and a virtual card, over its link,
in its simulated time. A pass is a prefill of as many rows as make computing and loading about
equal.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from flexgen_loop import HEAD, Gate, GatedCard, GatedClock, GatedFiles  # noqa: E402

from localrt.formatting import table  # noqa: E402
from localrt.machine import hardware  # noqa: E402
from localrt.machine.measuring import machine_profile  # noqa: E402
from localrt.models.checkpoints import open_checkpoint  # noqa: E402
from localrt.models.checkpoints.store_checkpoint import StoreCheckpoint  # noqa: E402
from localrt.models.registry import read_config  # noqa: E402
from localrt.offload.cards.clock import Clock, VirtualClock, WallClock  # noqa: E402
from localrt.offload.cards.virtual import VirtualAccelerator  # noqa: E402
from localrt.offload.pipeline.building import open_pipeline  # noqa: E402
from localrt.offload.pipeline.decoder import PlacedDecoder  # noqa: E402
from localrt.offload.placement import Placement, Where  # noqa: E402
from localrt.offload.planner.cards import parse_card  # noqa: E402
from localrt.offload.reading.files import StoreFiles  # noqa: E402
from localrt.offload.store.cached import cached_store  # noqa: E402
from localrt.offload.trace import Trace  # noqa: E402
from localrt.quant.ops.native.ops import NativeOps  # noqa: E402
from localrt.quant.ops.protocol import Batch  # noqa: E402
from localrt.settings import Settings  # noqa: E402

CARD = "virtual:8GB@12GB/s,256GB/s,20TFLOPS"
ROWS = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WARM_UP = 2
# Loads a little longer than computing: what is being computed is not what is waited for.
LOAD_OVER_COMPUTE = 1.2
# The pipeline reads ahead as far as its ring is large.
RING_UNITS = 6

# Which of a model's layers' units are streamed, by index; the head stays.
PLACEMENTS = {
    "alternating layers": lambda n: n % 4 < 2,
    "every third": lambda n: n % 3 == 0,
    "clusters of four": lambda n: n % 8 < 4,
}


class Case:
    """One placement of a store on one of the two machines."""

    def __init__(
        self, store: StoreCheckpoint, name: str, *, virtual: bool, threads: int | None
    ) -> None:
        self.store, self.name, self.virtual = store, name, virtual
        self.config = read_config(store)
        self.ops = NativeOps(threads=threads)
        units = [u for u in store.manifest.units if u.name.startswith("layers.")]
        order = {"attention": 0, "mlp": 1}
        units.sort(key=lambda u: (int(u.name.split(".")[1]), order[u.name.split(".")[2]]))
        self.units = [unit for n, unit in enumerate(units) if PLACEMENTS[name](n)]
        self.streamed = {unit.name: unit.nbytes for unit in self.units}
        self.resident_head = [u.name for u in store.manifest.units if u.name.startswith("head")]
        self.order = [*(unit.name for unit in units), HEAD]
        self.ring = RING_UNITS * max(self.streamed.values())
        self.card = parse_card(CARD)

    def placement(self, *, barrier: bool) -> Placement:
        """Streamed and resident, on the card or on the CPU.

        The loop, which reads one unit ahead, gets room in which none overlaps another.
        """
        ring = sum(self.streamed.values()) if barrier else self.ring
        away, home = (Where.LINK, Where.VRAM) if self.virtual else (Where.SSD, Where.RAM)
        where = {u.name: Where.RAM for u in self.store.manifest.units}
        names = [*self.order[:-1], *self.resident_head]
        where |= {name: away if name in self.streamed else home for name in names}
        return Placement(
            where=where,
            kv=("ram",) * self.config.layers,
            ram_ring=0 if self.virtual else ring,
            vram_ring=ring if self.virtual else 0,
        )

    @contextmanager
    def open(self, mode: Any, *, barrier: bool) -> Iterator[tuple[PlacedDecoder, Gate]]:
        """The decoder, held back by a barrier or not."""
        trace = Trace()
        link = self.card.link_bytes_s
        gate = Gate(self.order, self.streamed, closed=barrier, link=link if self.virtual else None)
        clock: Clock = VirtualClock(trace) if self.virtual else WallClock(trace)
        card = None
        files = StoreFiles(
            self.store.path, {u.file for u in self.store.manifest.units}, direct=mode.direct
        )
        if self.virtual:
            assert isinstance(clock, VirtualClock), "see above"
            profile = self.card.profile
            accelerator = VirtualAccelerator(
                clock,
                self.ops,
                name=self.card.name,
                capacity=self.card.vram_bytes,
                link_bytes_s=link,
                memory_bytes_s=profile.bytes_s,
                flops=profile.flops,
                call_s=profile.call_s,
            )
            card = GatedCard(accelerator, gate, self.streamed)
        decoder = open_pipeline(
            self.store,
            self.ops,
            self.config,
            self.placement(barrier=barrier),
            mode=mode,
            budget=1 << 60,
            card=card,  # type: ignore[arg-type]
            clock=GatedClock(clock, gate),
            files=files if self.virtual else GatedFiles(files, gate, self.units),
            trace=trace,
            verify=False,
        )
        try:
            yield decoder, gate
        finally:
            gate.open()
            decoder.close()


def run_pass(decoder: PlacedDecoder, rows: int) -> tuple[float, np.ndarray]:
    """Seconds on the decoder's clock of a prefill of ``rows`` tokens, and its last logits."""
    cache = decoder.cache(rows)
    tokens = [(17 * n) % decoder.config.vocab_size for n in range(rows)]
    batch = Batch.extend([(cache, tokens)])
    started, before = time.perf_counter(), decoder.counts().clock_s
    logits = decoder.forward(batch, rows=[rows - 1])
    wall = time.perf_counter() - started
    return (decoder.counts().clock_s - before if decoder.simulated else wall), logits


def choose_rows(case: Case, mode: Any) -> int:
    """Rows of a pass for which loading takes ``LOAD_OVER_COMPUTE`` times computing, about."""
    best, distance = ROWS[0], float("inf")
    with case.open(mode, barrier=True) as (decoder, gate):
        run_pass(decoder, ROWS[0])
        for rows in ROWS:
            gate.forget_times()
            for _ in range(1 if case.virtual else 2):
                run_pass(decoder, rows)
            loads, computes = (sum(part) for part in zip(*gate.times(), strict=True))
            apart = abs(np.log(loads / computes / LOAD_OVER_COMPUTE))
            if apart > distance:
                break
            best, distance = rows, apart
    return best


def measure(case: Case, mode: Any, passes: int) -> dict[str, Any]:
    """Both schedules, one after the other twice over, and the bound."""
    rows = choose_rows(case, mode)
    seconds: dict[bool, list[float]] = {True: [], False: []}
    alone: list[list[tuple[float, float]]] = []
    logits: list[np.ndarray] = []
    for barrier in (True, False, True, False):
        with case.open(mode, barrier=barrier) as (decoder, gate):
            for _ in range(WARM_UP):
                run_pass(decoder, rows)
            gate.forget_times()
            for _ in range(-(-passes // 2)):
                took, out = run_pass(decoder, rows)
                seconds[barrier].append(took)
            logits.append(out)
            if barrier:
                alone.append(gate.times())
    assert all(np.array_equal(logits[0], other) for other in logits[1:]), "schedules change nothing"
    units = [
        tuple(map(statistics.mean, zip(*both, strict=True))) for both in zip(*alone, strict=True)
    ]
    loads, computes = [u[0] for u in units], [u[1] for u in units]
    steps = sum(max(load, c) for load, c in zip([*loads[1:], loads[0]], computes, strict=True))
    bound = steps / max(sum(loads), sum(computes))
    loop, pipeline = (statistics.median(seconds[barrier]) for barrier in (True, False))
    return {
        "machine": "virtual card" if case.virtual else "ssd to cpu",
        "simulated": case.virtual,
        "placement": case.name,
        "streamed_units": len(case.streamed),
        "units": len(case.order),
        "streamed_bytes": sum(case.streamed.values()),
        "ring_bytes": case.ring,
        "rows": rows,
        "passes": len(seconds[True]),
        "loop_s": loop,
        "pipeline_s": pipeline,
        "loads_s": sum(loads),
        "computes_s": sum(computes),
        "ratio": loop / pipeline,
        "bound": bound,
        "share_of_bound": loop / pipeline / bound,
        "pipeline_efficiency": max(sum(loads), sum(computes)) / pipeline,
    }


def describe(results: list[Mapping[str, Any]]) -> str:
    """The table for people."""
    headers = ["machine", "placement", "streamed", "rows", "loads", "computes", "loop", "pipeline",
               "ratio", "bound", "share"]  # fmt: skip
    cells = [
        [
            f"{r['machine']}{' (simulated)' if r['simulated'] else ''}",
            r["placement"],
            f"{r['streamed_units']} of {r['units']}",
            str(r["rows"]),
            *(f"{r[k] * 1e3:.1f} ms" for k in ("loads_s", "computes_s", "loop_s", "pipeline_s")),
            f"{r['ratio']:.2f}x",
            f"{r['bound']:.2f}x",
            f"{100 * r['share_of_bound']:.0f} %",
        ]
        for r in results
    ]
    return table(cells, headers, "lllrrrrrrrr")


def main() -> int:
    parser = argparse.ArgumentParser(description="the pipeline against a loop with barriers")
    default = Path.home() / ".cache/localrt-test-models/qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
    parser.add_argument("model", nargs="?", type=Path, default=default)
    parser.add_argument("--passes", type=int, default=10, help="of each schedule (default: 10)")
    parser.add_argument("--only", choices=("disk", "virtual"))
    parser.add_argument("--threads", type=int, default=None, help="of the CPU (default: all)")
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks/results/schedules.json")
    args = parser.parse_args()
    machine, settings = hardware.probe(), Settings.from_environment()
    store = cached_store(open_checkpoint(args.model), settings.data_dir / "stores")
    disk, _ = machine_profile(store.path, settings)
    results: list[Mapping[str, Any]] = []
    for virtual in (False, True):
        if args.only == ("disk" if virtual else "virtual"):
            continue
        for name in PLACEMENTS:
            case = Case(store, name, virtual=virtual, threads=args.threads)
            results.append(measure(case, disk.mode, args.passes))
            print(describe(results[-1:]).splitlines()[-1], flush=True)
    print(describe(results))
    record = {
        "machine": machine.to_dict(),
        "command": f"benchmarks/schedules.py {args.model.name} --passes {args.passes}",
        "model": args.model.name,
        "card": CARD,
        "disk": {
            "direct": disk.mode.direct,
            "threads": disk.mode.threads,
            "block": disk.mode.block,
        },
        "results": results,
    }
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(record, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
