"""Options in messages are spelled as the reader knows them."""

from __future__ import annotations

import pickle

from localrt import system
from localrt.common.errors import (
    LocalrtError,
    MemoryBudgetError,
    OptionError,
    StorageError,
)
from localrt.common.option_names import on_command_line, option, spelled
from localrt.tui.text import in_app


def test_a_message_names_options_as_its_reader_types_them() -> None:
    ways = f"use {option('ctx', 512)}, {option('ram', '1.5 GB')} or less {option('max_tokens')}"
    error = MemoryBudgetError(ways)
    assert str(error) == 'use ctx=512, ram="1.5 GB" or less max_tokens'
    assert (
        error.told(on_command_line)
        == f"use --ctx 512, --ram {system.quote('1.5 GB')} or less --max-tokens"
    )
    assert spelled(f"try {option('max_tokens', 9)}", in_app) == "try /set max_tokens 9"


def test_an_option_without_a_flag_is_spelled_as_in_python() -> None:
    assert spelled(option("tree_depth", 4), on_command_line) == "tree_depth=4"
    assert spelled(option("thinking", False), on_command_line) == "--thinking off"


def test_a_quoted_text_that_is_no_option_stays_as_it_is() -> None:
    for text in ("`a=1.2.3`", "`a=007`", '`a="\\"`'):
        assert str(OptionError(f"no model {text}")) == f"no model {text}"


def test_an_error_within_another_keeps_its_options_for_the_reader() -> None:
    inner = OptionError(f"{option('seed')} must be at least 0")
    outer = LocalrtError(f"line 2: {inner.marked}")
    assert outer.told(on_command_line) == "line 2: --seed must be at least 0"
    assert str(pickle.loads(pickle.dumps(outer))) == "line 2: seed must be at least 0"


def test_an_error_of_the_system_reads_as_ever() -> None:
    assert str(StorageError(2, "no such file")) == "[Errno 2] no such file"
