"""The campaign ``fuzz``, shortly: inputs that once failed, a few changed ones, and what it sees."""

from __future__ import annotations

import base64
import json
import random
import tempfile
import zlib
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("resource", reason="limits are those of Linux")

from localrt.common.errors import OptionError
from tests.campaigns.campaign import Run
from tests.campaigns.fuzz import Attempts, _started
from tests.mutations import mutated
from tests.readers import READERS, Prepared, Reader

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


def _use(kind: str, data: bytes) -> None:
    if b"!" in data:
        raise IndexError
    if b"?" in data:
        raise OptionError("two\nlines")
    if b"~" in data:
        tempfile.mkstemp()
    while b"@" in data:
        pass
    if b"." in data:
        raise OptionError("a line")


def _prepare(folder: Path, stack: ExitStack) -> Prepared:
    return [("kind", "valid.")], _use


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"an error!", "IndexError at tests/campaigns/test_fuzz.py: raise IndexError"),
        (b"lines?", "kind: this is not one short line: 'two\\nlines'"),
        (b"a file~", "left a file"),
        (b"late@", "Late"),
    ],
)
def test_problems(
    data: bytes, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(READERS, "own", Reader(_prepare, "", 1.0, 0.02))
    with ExitStack() as stack:
        attempts = Attempts("own", tmp_path, stack)
        assert not any(map(attempts, attempts.seeds))
        told = attempts(b"kind\n" + data)
        assert told.startswith(problem)
        assert len(attempts.smallest(b"kind\n" + data, told)) <= 3
        assert not attempts(attempts.seeds[0])


def test_a_process(tmp_path: Path) -> None:
    run = Run("fuzz", tmp_path, seed=1, seconds=1e9, count=60)
    assert _started(run, "machines", 60, 60) == (60, [])
