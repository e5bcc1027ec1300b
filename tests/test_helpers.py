"""Processes that run a part of localrt: one function writes their command lines."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localrt.common.extras import EXTRAS, install
from localrt.common.processes import helper_command, localrt_command

ROOT = Path(__file__).parent.parent
ROOMS = ("localrt", "models", "offload", "quant", "speculative", "tui")
# Files that name the interpreter: helpers, which one each system has, what a confined process may
# read, and two that ask its pip.
NAMING = {
    "localrt/common/processes.py",
    "localrt/system/confined.py",
    "localrt/system/posix.py",
    "localrt/system/windows.py",
    "localrt/common/extras.py",
    "localrt/hub/package_index.py",
}
PACKAGED = """\
#!{python}
import runpy, sys
sys.frozen, sys.executable = True, __file__
sys.path[:0] = [{root!r}]
runpy.run_module("localrt", run_name="__main__", alter_sys=True)
"""


def test_nobody_else_starts_the_interpreter() -> None:
    """A packaged program has none."""
    found = set()
    for path in (each for room in ROOMS for each in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = getattr(node, "attr", None) or getattr(node, "value", None)
            if named in ("executable", "frozen"):
                found.add(path.relative_to(ROOT).as_posix())
    assert found == NAMING


HELPERS = [
    ("localrt.chat_format.jinja_sandbox", [], '{"source": "", "variables": null}\n'),
    ("localrt.bench.mix.guard", [sys.executable, "-c", ""], ""),
]


@pytest.fixture
def packaged(tmp_path: Path) -> str:
    """A program that says of itself what one made by PyInstaller says."""
    if os.name == "nt":
        pytest.skip("scripts are no programs there")
    program = tmp_path / "localrt"
    program.write_text(PACKAGED.format(python=sys.executable, root=str(ROOT)))
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("kind", ["python", "packaged"])
@pytest.mark.parametrize(("module", "arguments", "text"), HELPERS)
def test_a_helper_is_started(
    module: str,
    arguments: list[str],
    text: str,
    kind: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "packaged":
        monkeypatch.setattr(sys, "executable", request.getfixturevalue("packaged"))
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    command = helper_command(module, *arguments)
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(text)
        process.stdin.flush()
        assert process.stdout.readline()


def test_a_helper_with_folders_imports_from_nowhere_else(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        "import sys\nfrom importlib.util import find_spec\n"
        "def main(): print(sys.argv[1:], *map(find_spec, ('pytest', 'numpy')))\n"
    )
    command = helper_command("one", "a b", folders=[tmp_path])
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout == "['a b'] None None\n"


@pytest.mark.parametrize("folders", [None, []])
def test_a_helper_imports_nothing_from_the_current_folder(
    folders: list[Path] | None, tmp_path: Path
) -> None:
    """It may be that of a model, with files of strangers."""
    (tmp_path / "json.py").write_text("print('a stranger')")
    command = helper_command("localrt.bench.mix.guard", sys.executable, "-c", "", folders=folders)
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert "stranger" not in done.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["run", "--nonsense"], ["--internal"]])
def test_a_packaged_program_is_the_command(packaged: str, arguments: list[str]) -> None:
    there, here = (
        subprocess.run(
            [*command, *arguments], capture_output=True, text=True, check=False, cwd=ROOT
        )
        for command in ([packaged], localrt_command())
    )
    assert (there.returncode, there.stdout) == (here.returncode, here.stdout)
    assert "Traceback" not in there.stderr


def test_a_packaged_program_renders_templates_apart(packaged: str, tmp_path: Path) -> None:
    """As it does with a Python: with limits on time and memory."""
    code = """
import sys
from localrt.common.extras import EXTRAS, install
from localrt.common.processes import run_helper
from localrt.chat_format import sandbox
sys.executable, sys.frozen = sys.argv[1], True
template = sandbox.SandboxedTemplate("{{ 1 + 1 }}", "template")
print(template.render({}), sandbox._RENDERER._process is not None)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, packaged], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout == "2 True\n"


def test_a_packaged_program_names_no_command_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "-m pip" in install("torch")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert all("-m pip" not in install(extra) for extra in EXTRAS)
