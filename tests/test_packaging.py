"""What an install holds and needs, and the processes that run a part of localrt."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from localrt import system
from localrt.cli import build_parser
from localrt.common.extras import EXTRAS, install
from localrt.common.processes import helper_command, localrt_command

ROOT = Path(__file__).parent.parent
ROOMS = ("localrt", "models", "offload", "quant", "speculative", "tui")


def packages_on_disk() -> set[str]:
    """Every folder that holds Python files, under the name it is imported by."""
    names = set()
    for room in ROOMS:
        for init in (ROOT / room).rglob("*.py"):
            parts = init.parent.relative_to(ROOT).parts
            names.add(".".join(parts if parts[0] == "localrt" else ("localrt", *parts)))
    return names


def test_every_package_on_disk_is_listed() -> None:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    packages = {*packages_on_disk(), "localrt.docs"}  # Markdown alone
    assert set(config["tool"]["setuptools"]["packages"]) == packages


def test_messages_name_the_packages_of_extras() -> None:
    """No package index has localrt: `pip install 'localrt[gpu]'` fails everywhere."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]
    for extra, packages in EXTRAS.items():
        names = [re.split(r"[<>=; ]", requirement)[0] for requirement in optional[extra]]
        assert packages.split() == names
        assert install(extra) == f"{system.quote(sys.executable)} -m pip install {packages}"
    assert set(EXTRAS) == set(optional) - {"all", "docs", "test"}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").iterdir()]
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    wrong = re.compile(r"localrt\[[a-z]+\]['\"]|pip install localrt\b")
    assert [str(path) for path in (*sources, *pages) if wrong.search(path.read_text("utf-8"))] == []


def imported(room: str) -> Iterator[str]:
    """The top-level modules that a room's files import, anywhere in them."""
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from (alias.name.partition(".")[0] for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                yield node.module.partition(".")[0]


@pytest.mark.slow
def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    optional = project["optional-dependencies"]

    def distributions(requirements: Iterable[str]) -> set[str]:
        return {canonicalize_name(Requirement(each).name) for each in requirements}

    needed = distributions(project["dependencies"])
    extras = distributions(each for extra in EXTRAS for each in optional[extra])
    # A module that is not installed here is named as its distribution is.
    installed = {
        "llama_cpp": ["llama-cpp-python"],
        "cuda": ["cuda-bindings"],
    } | packages_distributions()
    modules = {name for room in ROOMS for name in imported(room)}
    modules -= {*sys.stdlib_module_names, "localrt"}
    imports = {
        module: {canonicalize_name(name) for name in installed.get(module, [module])}
        for module in modules
    }
    undeclared = [module for module, names in imports.items() if not names & (needed | extras)]
    assert undeclared == []
    assert needed - set[str]().union(*imports.values()) == set(), "never imported"


def test_constraints_are_within_the_ranges() -> None:
    """``scripts/constraints`` renews them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = {
        canonicalize_name(name): version
        for name, _, version in (line.partition("==") for line in lines if line[0] != "#")
    }
    needed = [project["dependencies"], *project["optional-dependencies"].values()]
    ranges = [Requirement(each) for some in needed for each in some if "localrt[" not in each]
    assert [
        str(each)
        for each in ranges
        if not each.specifier.contains(pins.get(canonicalize_name(each.name), ""))
    ] == []


EMPTY_SOURCES = """#!/bin/sh
for word do
    shift
    case $word in *.cpp) word={} ;; esac
    set -- "$@" "$word"
done
exec c++ "$@"
"""


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_the_wheel_holds_localrt_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "empty.cpp").touch()  # stands in for each source: that they compile is shown by
    compiler = tmp_path / "compiler"  # the build that the other tests run
    compiler.write_text(EMPTY_SOURCES.format(tmp_path / "empty.cpp"))
    compiler.chmod(0o755)
    config = tmp_path / "setup.cfg"  # built apart: leftovers of the checkout would be in the wheel
    config.write_text(f"[build]\nbuild_base = {tmp_path / 'build'}\n")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, ROOT],
        env={
            **os.environ,
            "CC": str(compiler),
            "CXX": str(compiler),
            "DIST_EXTRA_CONFIG": str(config),
        },
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("localrt-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"localrt"}
    interface = ("abi.h", "library.cpp")
    expected = {"localrt/py.typed", *(f"localrt/quant/cpu/csrc/{name}" for name in interface)}
    expected |= {f"localrt/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*"):
            folders = path.relative_to(ROOT).parts
            if path.suffix in (".py", ".json", ".csv", ".toml", ".tcss", ".cu", ".cuh") or (
                path.is_file() and ("data" in folders or "web" in folders)
            ):
                inside = path.relative_to(ROOT)
                expected.add(str(inside if room == "localrt" else Path("localrt") / inside))
    inside_wheel = {name for name in names if name.startswith("localrt/")}
    kernels = {name for name in inside_wheel if name.startswith("localrt/quant/cpu/_native.")}
    assert inside_wheel - kernels == expected
    assert len(kernels) == 1
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_files_for_systems_start_commands_that_exist() -> None:
    """A container, a unit for systemd and a desktop entry."""
    text = {path.name: path.read_text("utf-8") for path in (ROOT / "packaging").iterdir()}
    copied = re.findall(r"^COPY (\w+) \1$", text["Containerfile"], re.MULTILINE)
    assert set(copied) == set(ROOMS)
    (words,) = re.findall(r"^CMD (.*)$", text["Containerfile"], re.MULTILINE)
    commands = [json.loads(words)]
    for name, key in (("localrt.service", "ExecStart"), ("localrt.desktop", "Exec")):
        (line,) = re.findall(rf"^{key}=(?:%h/.local/bin/)?localrt (.*)$", text[name], re.MULTILINE)
        commands.append(shlex.split(line))
    for command in commands:
        build_parser().parse_args(command)


def test_a_bare_checkout_imports_without_being_installed(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "sys.meta_path = [f for f in sys.meta_path if 'editable' not in repr(f)]\n"
        "import localrt.models.registry, localrt.quant.formats, localrt\n"
        f"assert localrt.__file__.startswith({str(ROOT)!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = sys.modules["scipy"] = None  # any import of them fails
import localrt
from localrt.quant.cpu.abi import find_library

if find_library() is None:
    sys.exit(0)
with localrt.load(sys.argv[1]) as model:
    chat = model.chat()
    assert len(chat.send("hi", max_tokens=4, ignore_eos=True).token_ids) == 4
try:
    localrt.load(sys.argv[1], format="f32")
except localrt.MissingExtraError as error:
    assert "torch" in str(error)
else:
    raise AssertionError("float32 was computed without torch")
"""


@pytest.mark.slow
def test_a_model_runs_without_torch(tiny_folder: Path) -> None:
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, tiny_folder], check=True)


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
    paths = (path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    named = re.compile(r"\bsys\.executable\b|[\"']frozen[\"']")
    found = {path for path in paths if named.search(path.read_text(encoding="utf-8"))}
    assert {path.relative_to(ROOT).as_posix() for path in found} == NAMING


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


def test_a_packaged_program_is_the_command(packaged: str) -> None:
    there, here = (
        subprocess.run(
            [*command, "run", "--nonsense"], capture_output=True, text=True, check=False, cwd=ROOT
        )
        for command in ([packaged], localrt_command())
    )
    assert (there.returncode, there.stdout) == (here.returncode, here.stdout)
    assert "Traceback" not in there.stderr
