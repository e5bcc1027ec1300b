"""The campaigns ``fuzz`` and ``storage`` in short; ``kernels`` has a file of its own."""

from __future__ import annotations

import base64
import json
import random
import shutil
import sys
import tracemalloc
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import settings

pytest.importorskip("resource", reason="limits are those of Linux")

from tests.campaigns.fuzz import Attempts
from tests.mutations import mutated
from tests.readers import READERS

FOUND: dict[str, list[str]] = json.loads(Path(__file__).with_name("found.json").read_text("utf-8"))


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


SLOW = ("requests", "documents", "machines", "settings", "caches")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in READERS]
)
def test_inputs(name: str, tmp_path: Path) -> None:
    """Those that once failed, and others."""
    draw = random.Random(name)
    with ExitStack() as stack:
        attempts = Attempts(name, tmp_path, stack, patience=100)
        seeds, problems = attempts.seeds, {}
        count = settings().max_examples * 3
        inputs = [*seeds[:20], *map(unpacked, FOUND.get(name, ()))]
        inputs += [mutated(draw.choice(seeds), draw, seeds) for _ in range(count)]
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        for data in inputs:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            problem = attempts(data)
            more = tracemalloc.get_traced_memory()[1] - before
            if problem or more > READERS[name].memory:
                problems[problem or f"{more} bytes"] = data
    assert not problems


class Nothing(random.Random):
    """A power cut after which only what was synced is there."""

    def choice(self, seq: object) -> object:  # type: ignore[override]
        return 0

    def randrange(self, *_bounds: int) -> int:
        return 0

    def random(self) -> float:
        return 1.0


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="the recorder is made by g++ on Linux",
)
def test_what_was_saved(tmp_path: Path) -> None:
    """It outlives a power cut of the strictest disk."""
    from tests.campaigns.storage import record, start

    folder, again = tmp_path / "home", tmp_path / "disk"
    log = record("chatting", folder)
    again.mkdir()
    log.write(again, len(log.changes), Nothing())
    assert log.said
    assert start("chatting", again, [what for _, what in log.said]) == ""
