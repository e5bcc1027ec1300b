"""Experts on the SSD: a mixture under a memory limit, against llama.cpp's mapped file.

    .venv/bin/python benchmarks/experts_ssd.py FOLDER [--experts BYTES] [--shares 0.5,0.25]

The trained fixture is widened until its experts take ``--experts`` bytes, which changes neither its
function nor its routing, and written as one GGUF file that both engines run. Each runs in a memory
control group (root, or a delegated one) that has room for a share of the experts, for all other
weights, and for 150 MB of process. Text that the model has not learnt is decoded token by token as
it stands: greedy text of a small model repeats itself, and its routing with it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)


from benchmarks.experts_child import held_out, serve, widened  # noqa: E402
from localrt.answering.core import Core, open_core  # noqa: E402
from localrt.bench.engines import Launch, llamacpp_core  # noqa: E402
from localrt.bench.memory_limit import MemoryLimit  # noqa: E402
from localrt.bench.page_cache import drop_from_cache  # noqa: E402
from localrt.bench.process import ChildProcess  # noqa: E402
from localrt.bench.process_io import disk_bytes_read  # noqa: E402
from localrt.formatting import format_bytes, format_rate  # noqa: E402
from localrt.loading.parts import LoadOptions  # noqa: E402
from localrt.machine import hardware  # noqa: E402

RESULTS = ROOT / "benchmarks/results/experts_ssd.json"
PROCESS = 150_000_000  # what each engine's process may take beside weights
PROMPT, ROUNDS = 64, 5
DECODED = {"native": 64, "llamacpp": 16}  # tokens: a mapped file takes seconds for each
START = (
    "import sys; sys.path.insert(0, sys.argv[1]); from benchmarks.experts_ssd import child; child()"
)


def child() -> None:
    """Serve one parent: load an engine, then decode what comes."""
    serve(lambda request: _load(request["engine"], request["path"], request["repack"]), _decode)


def _load(engine: str, path: str, repack: bool) -> Core:
    if engine == "native":
        options = LoadOptions(engine="native", threads=2, ctx=512)
        return open_core(path, options, draft="off")
    settings = {"repack": repack}
    return llamacpp_core(
        Launch(engine="llamacpp", path=path, ctx=512, threads=2, settings=settings)
    )


def _decode(core: Core, tokens: Sequence[int]) -> dict[str, Any]:
    """A prompt, then the tokens after it one by one; what these took."""
    session: Any = core.new_session()
    try:
        session.extend(tokens[:PROMPT])
        before, read, seconds = session.counts(), disk_bytes_read() or 0, list[float]()
        forecast = session.forecast()
        for token in tokens[PROMPT:]:
            began = time.perf_counter()
            session.extend([token])
            seconds.append(time.perf_counter() - began)
        after = session.counts()
        answer = {
            "tok_s": len(seconds) / sum(seconds),
            "read_bytes_per_token": ((disk_bytes_read() or 0) - read) / len(seconds),
            "predicted_tok_s": None if forecast is None else forecast.tok_s,
            "hit_rate": None,
        }
        if after is not None and after.expert_uses:
            uses = after.expert_uses - before.expert_uses
            answer["hit_rate"] = (after.expert_hits - before.expert_hits) / uses
        return answer
    finally:
        session.close()


def measure(
    engine: str, path: Path, limit: int, texts: Sequence[list[int]], *, repack: bool = False
) -> dict[str, Any]:
    """Medians over the texts, the first of which warms up."""
    drop_from_cache([path])
    group = MemoryLimit.create(limit)
    with ChildProcess([sys.executable, "-c", START, str(ROOT)], group) as running:
        running.ask("load", engine=engine, path=str(path), repack=repack)
        size = PROMPT + DECODED[engine]
        rounds = [running.ask("decode", tokens=tokens[:size]) for tokens in texts][1:]
        peak = group.peak()
    found: dict[str, Any] = {"engine": engine, "repacked": repack, "peak_cgroup_bytes": peak}
    for name in rounds[0]:
        values = [each[name] for each in rounds if each[name] is not None]
        found[name] = statistics.median(values) if values else None
    return {**found, "rounds": rounds}


def _said(row: dict[str, Any]) -> str:
    hits = "" if row["hit_rate"] is None else f", {row['hit_rate']:.0%} of experts in memory"
    read = format_bytes(row["read_bytes_per_token"])
    setting = " repacked" if row["repacked"] else ""
    return f"{row['engine']}{setting} {format_rate(row['tok_s'])} tok/s, {read} a token{hits}"


def main() -> int:
    """Write the widened file, measure, and keep the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--experts", type=int, default=1_500_000_000)
    parser.add_argument("--shares", default="0.5,0.25")
    parser.add_argument("--engines", default="native,llamacpp")
    parser.add_argument(
        "--repacked", action="store_true", help="llama.cpp with repacked weights too"
    )
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    path = widened(args.folder, args.experts)
    size = PROMPT + max(DECODED.values())
    texts = held_out(args.folder, ROUNDS + 1, size, 4 * size)
    rest = path.stat().st_size - args.experts
    results = []
    for share in map(float, args.shares.split(",")):
        limit = int(share * args.experts) + rest + PROCESS
        for engine in args.engines.split(","):
            both = engine == "llamacpp" and args.repacked
            for repack in (False, True) if both else (False,):
                row = {"share": share, "limit_bytes": limit}
                row |= measure(engine, path, limit, texts, repack=repack)
                results.append(row)
                print(f"{share:.0%} of the experts: {_said(row)}", flush=True)
    training = json.loads((args.folder / "training.json").read_text())
    del training["curve"]
    record = {
        "machine": hardware.probe().to_dict(),
        "command": "benchmarks/experts_ssd.py FIXTURE",
        "versions": {p: version(p) for p in ("localrt", "llama-cpp-python", "numpy")},
        "fixture": training,
        "experts_bytes": args.experts,
        "results": results,
    }
    args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
