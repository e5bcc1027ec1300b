"""What tests of drafts share: a tiny target and a tiny draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import write_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("target", "draft"):
        (folder / name).mkdir()
        write_tiny_model(folder / name, context=256)
    return folder / "target", folder / "draft"
