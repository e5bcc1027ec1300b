"""The manual page has every command and option, and is what man expects."""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess

import pytest

from localrt.cli import COMMANDS, build_parser, man
from localrt.common.version import __version__


@pytest.fixture
def page(capsys: pytest.CaptureFixture[str]) -> str:
    assert man.run(argparse.Namespace()) == 0
    return capsys.readouterr().out


def test_it_has_every_option(page: str) -> None:
    text = re.sub(r"\\(?:&|f[BIR])", "", page).replace("\\-", "-").replace("\\(dq", '"')
    assert text.startswith(f'.TH LOCALRT 1 "" "localrt {__version__}"')
    sections = re.split(r'^\.SS "localrt (\w+)', text, flags=re.MULTILINE)[1:]
    found = dict(zip(sections[::2], sections[1::2], strict=True))
    assert list(found) == list(COMMANDS)
    (commands,) = (
        each
        for each in build_parser(complete=True)._actions
        if isinstance(each, argparse._SubParsersAction)
    )
    for name, command in commands.choices.items():
        for action in command._actions:
            assert (
                action.dest == "help"
                or action.help == argparse.SUPPRESS
                or all(each in found[name] for each in action.option_strings)
            )
        assert all(line in found[name] for line, _ in command.examples)


def test_man_accepts_it(page: str) -> None:
    if shutil.which("groff") is None:
        pytest.skip("groff is not installed")
    command = ["groff", "-man", "-ww", "-Tutf8"]
    done = subprocess.run(command, input=page, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "localrt" in done.stdout
