"""The campaign ``fuzz`` in short: inputs that once failed, and a few changed ones."""

from __future__ import annotations

import base64
import json
import random
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="limits are those of Linux")

from tests.campaigns.fuzz import Attempts
from tests.mutations import mutated
from tests.readers import READERS

FOUND: dict[str, list[str]] = json.loads(Path(__file__).with_name("found.json").read_text("utf-8"))


def unpacked(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


SLOW = ("adapters", "configs", "projectors")  # torch makes their valid inputs


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in READERS]
)
def test_inputs(name: str, tmp_path: Path) -> None:
    """Those that once failed, and 20 others."""
    draw = random.Random(name)
    with ExitStack() as stack:
        attempts = Attempts(name, tmp_path, stack, patience=100)
        seeds = attempts.seeds
        inputs = [*seeds[:20], *map(unpacked, FOUND.get(name, ()))]
        inputs += [mutated(draw.choice(seeds), draw, seeds) for _ in range(20)]
        problems = {told: data for data in inputs if (told := attempts(data))}
    assert not problems
