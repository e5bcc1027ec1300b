"""The campaign on failing disks in short, and that its library makes calls fail as it says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.command import ROOT

SHORT = """
from pathlib import Path
from tests.campaigns import disk
from tests.campaigns.campaign import Run
disk.preload()
disk.FAULTS = {{"vanished": disk.FAULTS["vanished"]}}
run = Run("disk", Path({folder!r}), seed=1, seconds=60.0, count=1)
disk.disk(run)
assert not run.failures, run.failures
assert run.record["cases"], "something was tried"
"""


@pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None, reason="needs Linux and a compiler"
)
def test_short(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORT.format(folder=str(tmp_path))],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
