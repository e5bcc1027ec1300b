"""MCP servers of config.toml: what is read, what is left out, and what is said of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from localrt.mcp.config import read_servers

GOOD = """
theme = "localrt-dark"

[mcp.servers.files]
command = "npx"
args = ["-y", "files"]
env = { TOKEN = "${MY_TOKEN}!" }
allow = ["read_file", "list_*"]
deny = ["write_*"]

[mcp.servers.web]
url = "https://example.org/mcp"
headers = { Authorization = "Bearer ${MY_TOKEN}" }
timeout = 20
"""


def test_read_servers(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(GOOD)
    servers, notes = read_servers(tmp_path, {"MY_TOKEN": "s3cret"})
    assert notes == ()
    files, web = servers
    assert (files.name, files.command, files.args) == ("files", "npx", ("-y", "files"))
    assert files.env == {"TOKEN": "s3cret!"}
    assert (web.url, web.timeout) == ("https://example.org/mcp", 20)
    assert web.headers == {"Authorization": "Bearer s3cret"}
    assert "s3cret" not in repr(servers)
    assert [files.allows(name) for name in ("read_file", "list_all", "write_file")] == [
        *(True, True, False)
    ]
    assert [files.offers(name) for name in ("read_file", "write_file")] == [True, False]


def test_no_servers(tmp_path: Path) -> None:
    assert read_servers(tmp_path) == ((), ())
    (tmp_path / "config.toml").write_text('theme = "x"')
    assert read_servers(tmp_path) == ((), ())


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("", "give either command"),
        ('command = "x"\nurl = "http://x"', "give either command"),
        ('url = "ftp://x"', "url must begin with http:// or https://, is 'ftp://x'"),
        ('url = "http://x"\nargs = ["y"]', "args and env go with command"),
        ('command = "x"\nheaders = { A = "b" }', "headers go with url"),
        ('url = "http://["', "url cannot be read: Invalid IPv6 URL"),
        ('command = "x"\ntimeout = 0', "timeout must be more than 0 seconds, is 0"),
        ('command = "x"\ntimeout = "1"', "timeout must be a number of seconds, is '1'"),
        ('command = "x"\nargs = "y"', "args must be a list of texts, is 'y'"),
        ('command = "x"\nenv = { A = "${NOT_THERE}" }', "has no variable NOT_THERE"),
        ('comand = "x"', "'comand' is not a setting (did you mean command?)"),
    ],
)
def test_bad_server(tmp_path: Path, entry: str, said: str) -> None:
    good = '[mcp.servers.good]\ncommand = "x"\n'
    (tmp_path / "config.toml").write_text(f"{good}[mcp.servers.bad]\n{entry}\n")
    servers, (note,) = read_servers(tmp_path, {})
    assert [server.name for server in servers] == ["good"]
    assert note.startswith("config.toml, [mcp.servers.bad]: ")
    assert said in note
    assert note.endswith(": left out")


def test_not_toml(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[mcp.servers.files\n")
    servers, (note,) = read_servers(tmp_path)
    assert servers == ()
    assert "config.toml is not TOML: " in note
    assert note.endswith(": no MCP servers are started")


def test_unknown_table(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[mcp.files]\ncommand = "x"\n')
    assert read_servers(tmp_path)[1] == (
        "config.toml: [mcp] holds [mcp.servers.NAME] tables and nothing else: left out",
    )


def test_lazy_import() -> None:
    code = (
        "import sys, localrt.tui, localrt.tui.plain\n"
        "from localrt.mcp.servers import ToolServers\n"
        "ToolServers(()).start()\n"
        "assert not {'mcp', 'mcp_types', 'pydantic'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
