"""A short form of the campaign, and the rule by which its disk forgets."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from tests.campaigns.campaign import Run
from tests.campaigns.powerloss import Log, body, record, start
from tests.store.test_writer import contents

_RECORDS = sys.platform == "linux" and shutil.which("g++") is not None
pytestmark = pytest.mark.skipif(not _RECORDS, reason="the recorder is made by g++ on Linux")


class Nothing(random.Random):
    """A power cut after which only what was synced is there."""

    def choice(self, seq: object) -> object:  # type: ignore[override]
        return 0

    def randrange(self, *_bounds: int) -> int:
        return 0

    def random(self) -> float:
        return 1.0


def calls(root: Path, *rows: tuple[str, int, str, str]) -> Log:
    """The log of these calls; paths are below ``root``."""
    data = ""
    for kind, number, name, text in rows:
        path, text = f"{root}/{name}", f"{root}/{text}" if kind == "r" else text
        data += f"{kind} {number} {len(path)} {len(text)}\n{path}{text}"
    file = root.with_name("calls")
    file.write_text(data)
    return Log(file, root)


NEW = [("m", 0, "a", ""), ("o", 0, "a/x", ""), ("w", 0, "a/x", "text")]
OLD = [*NEW, ("s", 0, "a/x", ""), ("s", 0, "a", "")]


@pytest.mark.parametrize(
    ("rows", "kept"),
    [
        (NEW, {}),
        ([*NEW, ("s", 0, "a/x", "")], {}),
        ([*NEW, ("s", 0, "a", "")], {"a/x": ""}),
        (OLD, {"a/x": "text"}),
        ([*OLD, ("w", 2, "a/x", "more")], {"a/x": "text"}),
        ([*OLD, ("w", 2, "a/x", "more"), ("s", 0, "a/x", "")], {"a/x": "temore"}),
        ([*OLD, ("t", 2, "a/x", ""), ("s", 0, "a/x", "")], {"a/x": "te"}),
        ([*OLD, ("u", 0, "a/x", "")], {"a/x": "text"}),
        ([*OLD, ("r", 0, "a/y", "a/x")], {"a/x": "text"}),
        ([*OLD, ("r", 0, "a/y", "a/x"), ("s", 0, "a", "")], {"a/y": "text"}),
        ([*OLD, ("r", 0, "b", "a")], {"b/x": "text"}),  # in the user's folder, names last
    ],
)
def test_what_a_power_cut_keeps(
    tmp_path: Path, rows: list[tuple[str, int, str, str]], kept: dict[str, str]
) -> None:
    log, folder = calls(tmp_path / "home", *rows), tmp_path / "folder"
    folder.mkdir()
    log.write(folder, len(log.changes), Nothing())
    assert contents(folder) == {name: text.encode() for name, text in kept.items()}


@pytest.mark.parametrize("name", ["quantizing", "pulling models", "chatting", "changing settings"])
def test_what_was_saved_outlives_the_strictest_disk(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "home"
    log = record(name, folder)
    again = tmp_path / "disk"
    again.mkdir()
    log.write(again, len(log.changes), Nothing())
    assert log.said
    assert start(name, again, [what for _, what in log.said]) == ""


def test_campaign(tmp_path: Path) -> None:
    run = Run("powerloss", tmp_path, seed=1, seconds=float("inf"), count=4)
    body(run, ["saving kv caches"])
    assert run.failures == []
    assert {name: row["count"] for name, row in run.record["cases"].items()} == {
        "saving kv caches: power cut": 4,
        "saving kv caches: kill": 4,
        "saving kv caches: real kill": 1,
    }
