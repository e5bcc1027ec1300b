"""The command itself, on a real model and tiny sizes."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from localrt.cli import bench, main
from tests.real_models import real_model

ROOT = Path(__file__).parents[2]


def _bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "localrt", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)


@pytest.mark.real
def test_json_output() -> None:
    engines = ["native"] + (["llamacpp"] if find_spec("llama_cpp") else [])
    sizes = ["--prompt-tokens", "24", "--tokens", "4", "--runs", "1"]
    done = _bench(str(real_model("smollm2")), "--engines", ",".join(engines), *sizes, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["command"].startswith("localrt bench")
    assert {result["engine"] for result in report["results"]} == set(engines)
    for result in report["results"]:
        assert (result["prompt_tokens"], result["completion_tokens"]) == (24, 4)
        assert result["prefill_tok_s"] > 0
        assert result["decode_tok_s"] > 0
        assert 50e6 < result["peak_ram_bytes"] < 2e9
        assert all(sample["cached_tokens"] < 12 for sample in result["samples"])
    assert "run 1 of 1" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--engines", "airllm"], 2, "choose from native, llamacpp"),
        (["--engines", ","], 2, "no engine"),
        (["--runs", "0"], 2, "runs must be at least 1"),
        (["--ram", "much"], 2, "must be a size"),
        (["--gpu-memory", "0"], 2, "above zero"),
        (["--ctx", "100"], 2, "must be at least 640"),
        (["no/such/file.gguf"], 1, "no/such/file.gguf"),
        (["--engines", "native", "--prompt-tokens", "9000"], 2, "model's context of 8192"),
        (["--sweep", "batch=1", "--all"], 2, "--sweep and --all cannot be combined"),
        (["--sweep", "batch=1", "--engines", "llamacpp"], 2, "--engines and --sweep cannot be"),
        (["--all", "--trace", "a.json"], 2, "--trace and --all cannot be combined"),
        (["--all", "--peer", "a=x"], 2, "--peer and --all cannot be combined"),
        (["some.gguf", "--all"], 2, "--all measures every model: leave out MODEL"),
        (["--sweep", "batch=1", "--runs", "0"], 2, "--runs must be at least 1, is 0"),
    ],
)
def test_bad_usage(
    arguments: list[str], status: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        found = main(["bench", *arguments])
    except SystemExit as left:  # the parser refused it
        found = left.code
    assert found == status
    out, told = capsys.readouterr()
    assert words in told
    assert out == ""


@pytest.mark.real
@pytest.mark.parametrize("busy", [True, False])
def test_busy_machine_without_a_trace(
    busy: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Rates that were measured beside other programs are marked; a resident model has no tasks."""
    monkeypatch.setattr(bench, "is_busy", lambda: busy)
    words = [str(real_model("smollm2")), "--engines", "native", "--trace", str(tmp_path / "t.json")]
    sizes = ["--prompt-tokens", "8", "--tokens", "2", "--runs", "1"]
    assert main(["bench", *words, *sizes, *(["--json"] if busy else [])]) == 1
    out, told = capsys.readouterr()
    assert json.loads(out)["busy"] if busy else "Measured while busy" not in out
    assert "t.json was not written" in told
    assert not list(tmp_path.iterdir())
