"""``localrt.load`` of a model larger than its budget, each time in a process of its own."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import localrt
from tests.conftest import needs_kernels, write_tiny_model

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]

ROOT = Path(__file__).parent.parent.parent
CHILD = """
    import json, sys
    import localrt, localrt.planning.measure
    from localrt.offload.memory import peak_rss

    job = json.loads(sys.argv[1])
    # Measuring takes seconds.
    from localrt.offload.reading.disk_speed import DiskProfile
    from localrt.offload.reading.files import ReadMode
    from localrt.planning.machine import typical_machine
    known = DiskProfile(ReadMode(direct=True, threads=2, block=1 << 20), 1e9, 0.0)
    localrt.planning.measure.machine_profile = lambda *_, **__: (known, typical_machine())

    steps, answers = [], []
    try:
        with localrt.load(job["model"], progress=steps.append, threads=2, **job["load"]) as model:
            answer = model.generate(
                token_ids=range(5, 25), temperature=0.0, max_tokens=8, ignore_eos=True
            )
            m = answer.metrics
            plan = model._core.engine.plan
            result = {
                "planned": plan and plan.tok_s,
                "tokens": answer.token_ids,
                "read": m.ssd_read_bytes,
                "efficiency": m.pipeline_efficiency,
                "predicted": m.predicted_tok_s,
                "ceiling": m.ceiling_tok_s,
            }
            result |= {"ctx": model.info.ctx, "notes": model.info.notes}
    except localrt.LocalrtError as error:
        result = {"error": type(error).__name__, "text": str(error)}
    result["peak"] = peak_rss()
    result["steps"] = sorted({step.stage for step in steps})
    print(json.dumps(result))
"""


@dataclass(frozen=True)
class Place:
    """A model, and folders for what is kept of it."""

    model: Path
    home: Path
    known: dict[int, int] = field(default_factory=dict)

    def run(self, **load: Any) -> dict[str, Any]:
        """Load and answer greedily in a child."""
        job = {"model": str(self.model), "load": load}
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
            "HOME": str(self.home),
            "XDG_DATA_HOME": str(self.home / "data"),
            "XDG_CONFIG_HOME": str(self.home / "config"),
            "LOCALRT_CACHE": str(self.home / "cache"),
        }
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(CHILD), json.dumps(job)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
            timeout=240,
            check=True,
        )
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    def least(self, *, ctx: int) -> int:
        """The smallest budget that the refusal of a tiny one names, in megabytes."""
        if ctx in self.known:
            return self.known[ctx]
        refused = self.run(ram="60MB", ctx=ctx)
        assert refused["error"] == "MemoryBudgetError"
        assert "\n" not in refused["text"]
        found = re.search(r'give it at least (\d+) MB of RAM \(ram="\1MB"\)', refused["text"])
        assert found is not None, refused["text"]
        self.known[ctx] = int(found[1])
        return self.known[ctx]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    model = write_tiny_model(tmp_path_factory.mktemp("model"), context=8192, wide=512)  # 16 MB
    return Place(model, tmp_path_factory.mktemp("home"))


def test_small_budget(place: Place) -> None:
    """The least is what the refusal of a smaller one names."""
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    with localrt.load(place.model, threads=2, ctx=512) as model:  # everything in memory
        expected = model.generate(token_ids=range(5, 25), **options)
    assert expected.metrics.ssd_read_bytes is None
    ram = place.least(ctx=512) + 2  # a process is not the same to the kilobyte each time
    small = place.run(ram=f"{ram}MB", ctx=512)
    assert small["tokens"] == list(expected.token_ids)
    assert small["read"] > 0
    assert 0 < small["efficiency"] <= 1
    assert 0 < small["predicted"] <= small["ceiling"]
    # How long loading took says nothing of the disk.
    assert small["predicted"] == pytest.approx(small["planned"], rel=0.1)
    assert small["peak"] <= ram * 1_000_000
    assert {"load", "pack"} <= set(small["steps"])
    (store,) = (place.home / "data" / "localrt" / "stores").glob("*/manifest.json")
    assert store.parent.name.startswith(place.model.name)


@pytest.mark.slow
def test_context_follows_budget(place: Place) -> None:
    """A smaller one for a smaller budget; the packed form is kept."""
    place.run(ram=f"{place.least(ctx=512) + 4}MB", ctx=512)
    small = place.run(ram=f"{place.least(ctx=512) + 4}MB")
    assert 512 <= small["ctx"] < 8192
    assert any("to fit in memory" in note for note in small["notes"])
    assert "pack" not in small["steps"]
    assert "load" in small["steps"]


@pytest.mark.slow
def test_damaged_copy_is_mended(place: Place) -> None:
    """Whether loading finds it or a pass does, within the budget; the next run finds none."""
    ram = f"{place.least(ctx=512) + 4}MB"
    sound = place.run(ram=ram, ctx=512)
    stores = place.home / "data" / "localrt" / "stores"
    files = {path: path.read_bytes() for path in stores.glob("*/layer-*.safetensors")}
    for path, data in files.items():  # some of it stays in memory, some does not
        broken = bytearray(data)
        broken[len(data) // 2 : len(data) // 2 + 64] = bytes(64)
        path.write_bytes(broken)
    small = place.run(ram=ram, ctx=512)
    assert "error" not in small, small["text"]
    assert "pack" not in small["steps"]
    assert small["tokens"] == sound["tokens"]
    assert all(path.read_bytes() == data for path, data in files.items())
