"""The campaign ``storage`` in short: what was saved outlives a power cut of the strictest disk."""

from __future__ import annotations

import random
import shutil
import sys
from pathlib import Path

import pytest

from tests.campaigns.storage import record, start

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


def test_what_was_saved(tmp_path: Path) -> None:
    folder, again = tmp_path / "home", tmp_path / "disk"
    log = record("chatting", folder)
    again.mkdir()
    log.write(again, len(log.changes), Nothing())
    assert log.said
    assert start("chatting", again, [what for _, what in log.said]) == ""
