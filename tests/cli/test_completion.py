import argparse
import shutil
import subprocess

import pytest

from localrt.cli import COMMANDS, completion


def _script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert completion.run(argparse.Namespace(shell=shell)) == 0
    return capsys.readouterr().out


_NAMES = (  # of models, programs and formats
    ("run sm", "smollm2"),
    ("chat gemma3", "gemma3:4b"),
    ("show qwen", "qwen3:8b"),
    ("launch codex --model sm", "smollm2"),
    ("launch cl", "claude"),
    ("quantize --format int", "int4-g32"),
    ("quantize smollm2 --format q3", "q3_k"),
)


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They complete every command, and the shell itself accepts them."""
    script = _script(shell, capsys)
    assert all(command in script for command in COMMANDS)
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=script, text=True, check=True, capture_output=True)


def test_bash_completes_commands_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    script = _script("bash", capsys)

    def complete(*words: str) -> set[str]:
        function = script.rsplit("-F ", 1)[1].split()[0]
        line = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
        run = f'{script}\n{line}\n{function}\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", run], capture_output=True, text=True)
        return {word.strip() for word in done.stdout.splitlines()}

    assert complete("localrt", "do") == {"doctor"}
    assert "--quick" in complete("localrt", "doctor", "--")
    for words, wanted in _NAMES:
        found = complete("localrt", *words.split())
        assert wanted in found
        assert all(each.startswith(words.split()[-1]) for each in found)
