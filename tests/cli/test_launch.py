"""Commands that find or start a server: ``launch``, with small programs on PATH that write down
what they were given; ``ps``; ``run``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import quote

import psutil
import pytest

import localrt as library
from localrt.client.programs import PROGRAMS
from localrt.client.servers import LocalServer, announced, local_servers
from localrt.common.settings import Settings
from tests.cli.test_cli import FAST, LOCALRT, assert_one_line, home, localrt
from tests.conftest import needs_scripts, write_tiny_model
from tests.server.conftest import WITH_TOOLS, Running, serving
from tests.waits import wait_for

__all__ = ["home"]

pytestmark = [needs_scripts, pytest.mark.timeout(600)]

# Asks the server that it was told of for its models, and does what DO says.
PROGRAM = """#!{python} -IS
import json, os, re, signal, sys, time, urllib.request
from pathlib import Path
given = [Path(text) for text in (*sys.argv[1:], os.environ.get("LLM_USER_PATH", "")) if text]
files = [each for path in given if path.exists() for each in (path, *path.glob("*"))]
texts = {{str(path): path.read_text() for path in files if path.is_file()}}
told = json.dumps([sys.argv, dict(os.environ), texts])
origin = re.search(r"http://127.0.0.1:[0-9]+", told)
request = urllib.request.Request(origin[0] + "/v1/models")
request.add_header("Authorization", "Bearer " + os.environ.get("EXPECTED_KEY", "any"))
models = json.load(urllib.request.urlopen(request))["data"]
servers = Path(os.environ["XDG_DATA_HOME"], "localrt/servers").glob("*.json")
record = dict(arguments=sys.argv[1:], variables=dict(os.environ), texts=texts, origin=origin[0])
record |= dict(model=models[0]["id"], servers=[int(path.stem.split("+")[0]) for path in servers])
Path(os.environ["RECORD"]).write_text(json.dumps(record))
interrupts = []
if os.environ.get("DO") == "wait":
    signal.signal(signal.SIGINT, lambda *_: interrupts.append(1))
    Path(os.environ["RECORD"]).with_suffix(".waits").touch()
    while len(interrupts) < 2:
        time.sleep(0.01)
        Path(os.environ["RECORD"]).with_suffix(f".{{len(interrupts)}}").touch()
if os.environ.get("DO") == "die":
    os.kill(os.getpid(), signal.SIGTERM)
sys.exit(int(os.environ.get("STATUS", 0)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that knows tools, with a context that every program fits into."""
    made = tmp_path_factory.mktemp("launched") / "caller"
    made.mkdir()
    return write_tiny_model(made, template=WITH_TOOLS, context=32768)


@pytest.fixture
def programs(home: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """An environment in which all programs are on PATH, and nothing else."""
    (tmp_path / "bin").mkdir()
    for program in PROGRAMS:
        file = tmp_path / "bin" / program.command
        file.write_text(PROGRAM.format(python=sys.executable))
        file.chmod(0o755)
    record = str(tmp_path / "record.json")
    return {**home, "PATH": str(tmp_path / "bin"), "RECORD": record}


def recorded(env: dict[str, str]) -> Any:
    return json.loads(Path(env["RECORD"]).read_text("utf-8"))


def use(folder: Path, env: dict[str, str]) -> None:
    """Let the folder be a model of this machine."""
    file = Path(env["XDG_DATA_HOME"], "localrt", "used", quote(str(folder), safe=""))
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


@contextmanager
def a_server(folder: Path, env: dict[str, str], key: str | None = None) -> Iterator[Running]:
    """A server of this user, which has loaded the model as ``tiny``."""
    with (
        mock.patch.dict(os.environ, env, clear=True),
        library.load(folder, draft="off") as model,
        serving(model, name="tiny", api_key=key) as running,
        announced(
            LocalServer(f"{running.url}/v1", os.getpid(), key, {"tiny": str(folder)}),
            Settings.from_environment(),
        ),
    ):
        yield running


def files_of(folder: Path) -> set[str]:
    """The files of programs: localrt has its own in ``data``."""
    return {str(path) for path in folder.rglob("*") if "data" not in path.parts}


@pytest.mark.slow
def test_each_program_reaches_a_running_server(
    folder: Path, programs: dict[str, str], tmp_path: Path
) -> None:
    key = "s3cret"
    env = {**programs, "EXPECTED_KEY": key, "ANTHROPIC_API_KEY": "mine"}
    before = files_of(tmp_path)
    with a_server(folder, env, key) as running:
        for program in PROGRAMS:
            if program.port:  # it would look elsewhere
                continue
            result = localrt("launch", program.name, "--", "-x", "a b", env=env)
            assert result.returncode == 0, (program.name, result.stderr)
            assert f"loaded by the server at {running.url}/v1" in result.stderr.decode()
            found = recorded(env)
            assert (found["origin"], found["model"]) == (running.url, "tiny"), program.name
            assert found["arguments"][-2:] == ["-x", "a b"], program.name
            settings = [*found["texts"].values(), found["variables"].get("OPENCODE_CONFIG_CONTENT")]
            everything = json.dumps([found["arguments"], found["variables"], settings])
            assert ("$model" in str(program)) == ("tiny" in everything), program.name
            assert not any(text and "$" in text for text in settings), program.name
            if program.name != "llm":  # which sends none to servers of one's own
                assert key in json.dumps([found["texts"], own_variables(found, env)]), program.name
            assert key not in json.dumps(found["arguments"]), program.name
            Path(env["RECORD"]).unlink()
    assert files_of(tmp_path) == before


def own_variables(found: Any, env: dict[str, str]) -> dict[str, str]:
    """The variables that the program did not have from the user."""
    return {name: text for name, text in found["variables"].items() if env.get(name) != text}


@pytest.mark.slow
def test_a_server_is_started_and_ended(folder: Path, programs: dict[str, str]) -> None:
    use(folder, programs)
    result = localrt("launch", "claude", env={**programs, "STATUS": "3"})
    assert result.returncode == 3, result.stderr
    assert "calls tools" in result.stderr.decode()
    found = recorded(programs)
    (server,) = found["servers"]
    assert found["model"] == "caller"
    assert not psutil.pid_exists(server)
    with mock.patch.dict(os.environ, programs, clear=True):
        assert local_servers(Settings.from_environment()) == []
    with a_server(folder, programs):
        assert localrt("launch", "codex", env={**programs, "DO": "die"}).returncode == 143


@contextmanager
def launched(env: dict[str, str], *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """``localrt launch`` in a process group of its own, once its program waits for Ctrl+C."""
    process = subprocess.Popen(
        [*LOCALRT, "launch", *args], env={**env, "DO": "wait"}, start_new_session=True
    )
    try:
        wait_for(lambda: process.poll() is not None or seen(env, "waits"), 300)
        assert process.poll() is None
        yield process
    finally:
        for each in psutil.Process(process.pid).children() if process.poll() is None else ():
            each.kill()
        process.kill()
        process.wait(120)


def seen(env: dict[str, str], what: str) -> bool:
    return Path(env["RECORD"]).with_suffix(f".{what}").exists()


@pytest.mark.slow
def test_ctrl_c_is_the_programs(folder: Path, programs: dict[str, str]) -> None:
    use(folder, programs)
    with launched({**programs, "STATUS": "9"}, "claude") as process:
        (server,) = recorded(programs)["servers"]
        os.killpg(process.pid, signal.SIGINT)
        wait_for(lambda: seen(programs, "1"))
        assert psutil.pid_exists(server)
        assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(120) == 9
    assert not psutil.pid_exists(server)


@pytest.mark.parametrize("name", ["SIGTERM", pytest.param("SIGHUP", marks=pytest.mark.slow)])
def test_a_termination_is_passed_on(
    folder: Path, programs: dict[str, str], name: str, request: pytest.FixtureRequest
) -> None:
    """Closing the terminal too; the settings, which may hold a key, do not stay behind."""
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_DFL)  # under nohup, programs start with it ignored
    request.addfinalizer(lambda: signal.signal(number, before))
    with a_server(folder, programs), launched(programs, "continue") as process:
        (settings,) = recorded(programs)["texts"]
        process.send_signal(number)
        assert process.wait(120) == 143
    assert not Path(settings).parent.exists()


@pytest.mark.parametrize(
    ("name", "model"), [("claude", "caller"), ("aider", "plain"), ("llm", "plain")]
)
def test_the_best_model_here_is_chosen(
    folder: Path,
    programs: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    model: str,
) -> None:
    """The plain one is larger and knows no tools, the short one has too little room."""
    monkeypatch.setattr("localrt.hub.listing.demo_in_package", lambda: None)
    for other, template, context, spare in (
        ("plain", "{{ messages[0].content }}", 32768, 64),
        ("short", WITH_TOOLS, 512, 128),
    ):
        (tmp_path / other).mkdir()
        made = write_tiny_model(tmp_path / other, template=template, context=context, spare=spare)
        use(made, programs)
    use(folder, programs)
    printed = localrt("launch", name, "--print", env=programs).stdout.decode()
    assert f"/{model}: " in printed.splitlines()[0]
    assert f"/{model} --port 8080 &" in printed.splitlines()[1]
    assert "http://127.0.0.1:8080" in printed
    rest = "".join(printed.splitlines()[2:])
    if name == "llm":  # its settings lie in a folder that nobody else can have made
        assert f"mkdir -p -m 700 {programs['XDG_DATA_HOME']}/localrt/launch/{name}\n" in printed
    assert not any(str(path) in rest for path in (folder, tmp_path / "plain"))  # a shorter name


def test_a_server_with_too_little_room_is_not_used(
    folder: Path, programs: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "short").mkdir()
    short = write_tiny_model(tmp_path / "short", template=WITH_TOOLS, context=512)
    with a_server(short, programs):
        nothing = localrt("launch", "claude", env=programs)
        assert_one_line(nothing, 1, "22,845 tokens", "--model")
        result = localrt("launch", "claude", "--model", "tiny", env=programs)
        assert result.returncode == 0
        assert b"tiny has a context of 512 tokens, Claude Code needs 22,845" in result.stderr


@pytest.mark.slow
def test_the_context_that_is_written_is_the_loaded_one(
    folder: Path, programs: dict[str, str]
) -> None:
    use(folder, programs)
    told = localrt("launch", "opencode", "--model", folder, "--print", env=programs).stdout
    assert b'"context": 32768' in told
    told = localrt("launch", "opencode", "--model", "org/unknown", "--print", env=programs)
    assert b"give --ctx TOKENS" in told.stderr
    serve = [*LOCALRT, "serve", "--port", "0", "--ctx", "2048", "--quiet"]
    piped = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
    with subprocess.Popen(serve, env=programs, **piped) as server:  # of all models here
        assert server.stdout is not None
        server.stdout.readline()
        result = localrt("launch", "opencode", "--model", folder, env=programs)
        server.terminate()
    assert result.returncode == 0, result.stderr
    assert '"context": 2048' in recorded(programs)["variables"]["OPENCODE_CONFIG_CONTENT"]


def test_programs_that_are_not_installed(home: dict[str, str], tmp_path: Path) -> None:
    env = {**home, "PATH": str(tmp_path)}
    assert_one_line(localrt("launch", "claude", env=env), 1, "npm install -g @anthropic-ai/claude")
    assert_one_line(localrt("launch", "emacs", env=env), 2, "'emacs'", "claude, codex")
    assert_one_line(localrt("launch", "claude", "--json", env=env), 2, "leave out")
    assert_one_line(localrt("launch", "--print", env=env), 2, "need a PROGRAM")
    listed = localrt("launch", env=env).stdout.decode()
    assert len(listed.splitlines()) == len(PROGRAMS) + 1
    assert "not installed: npm install -g @openai/codex" in listed
    found = json.loads(localrt("launch", "--json", env=env).stdout)["programs"]
    assert [(each["name"], each["path"]) for each in found] == [(p.name, None) for p in PROGRAMS]


def test_a_running_server_is_used_and_shown(tiny_folder: Path, home: dict[str, str]) -> None:
    assert b"No server is running" in localrt("ps", env=home).stdout
    with a_server(tiny_folder, home, "s3cret") as running:
        shown = localrt("ps", "--json", env=home)
        (one,) = json.loads(shown.stdout)["models"]
        assert (one["name"], one["state"], one["unload_s"]) == ("tiny", "loaded", None)
        assert b"tiny" in localrt("ps", env=home).stdout
        plain = localrt("run", tiny_folder, "hi", "--max-tokens", "3", env=home)
        assert plain.returncode == 0
        assert b"using tiny of the server at http://127.0.0.1" in plain.stderr
        assert len([line for line in running.log if line.path.endswith("completions")]) == 1
        for flags in (("--no-server", "--max-tokens", "3"), ("--ctx", "64", *FAST)):
            assert localrt("run", tiny_folder, "hi", *flags, env=home).stderr == b""
        assert len([line for line in running.log if line.path.endswith("completions")]) == 1
