"""The app in a tab: who may ask for it, and that it answers there."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from localrt import History
from localrt.cli import main
from localrt.common.extras import install
from tests.waits import wait_for

pytest.importorskip("textual_serve")

from aiohttp import ClientSession, WSMsgType, WSServerHandshakeError, web

from localrt.tui import browser
from localrt.tui.browser import TabServer

TAB = [sys.executable, "-m", "tests.tui.tab"]


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[TabServer, ClientSession]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = TabServer(TAB, listening.getsockname()[1])
        runner = web.AppRunner(await server.application())
        await runner.setup()
        await web.SockSite(runner, listening).start()
        async with ClientSession() as session:
            yield server, session
        await runner.cleanup()


async def test_token() -> None:
    async with serving() as (server, session):
        root = f"http://127.0.0.1:{server.port}"
        async with session.get(server.page) as response:
            assert response.status == 200
            text = await response.text()
            assert (
                "connect-src 'self' ws://127.0.0.1:" in response.headers["Content-Security-Policy"]
            )
        assert f'"{server.page.replace("http", "ws")}ws"' in text
        async with session.get(f"{server.page}static/js/textual.js") as response:
            assert response.status == 200
        wrong = server.page[:-3] + "xx/"
        paths = ("/", "/ws", "/static/js/textual.js", "/download/key", "//", "/download/../ws")
        for url in (*(root + path for path in paths), wrong, f"{wrong}ws"):
            async with session.get(url) as response:
                assert response.status == 403, url
        for url in (f"{root}/ws", f"{wrong}ws"):
            with pytest.raises(WSServerHandshakeError, match="403"):
                await session.ws_connect(url)
        async with session.get(server.page, headers={"Host": "elsewhere.example"}) as response:
            assert response.status == 403


def test_url_is_printed_and_opened(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(web, "run_app", lambda application, **options: application.close())
    assert browser.serve_browser(TAB, show=shown.append) == 0
    assert shown[0].startswith("http://127.0.0.1:")
    assert shown[0] in capsys.readouterr().out


def test_missing_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delitem(sys.modules, "localrt.tui.browser")
    monkeypatch.setitem(sys.modules, "textual_serve.server", None)
    assert main(["chat", "--browser"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert install("browser") in said


@pytest.mark.slow
async def test_chat_in_a_tab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))

    async def until(words: bytes) -> None:
        seen = b""
        while words not in seen:
            message = await tab.receive(timeout=60)
            assert message.type in (WSMsgType.BINARY, WSMsgType.TEXT)
            seen += message.data if isinstance(message.data, bytes) else b""

    async with serving() as (server, session):
        address = f"{server.page}ws?width=80&height=24"
        async with session.ws_connect(address) as tab:
            await until(b"/help")
            await tab.send_json(["stdin", "Hi\r"])
            await until(b"there.")
            async with session.ws_connect(address) as other:
                first, tab = tab, other
                await until(b"/help")
                while (await first.receive(timeout=60)).type is not WSMsgType.CLOSED:
                    pass
    with History(tmp_path / "localrt" / "history.db") as history:
        conversation = history.open(history.list()[0].id)
        assert [turn.content for turn in conversation.turns] == ["Hi", "Hello there."]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="looks for the process in /proc")
def test_app_ends_with_its_server(tmp_path: Path) -> None:
    script = (
        "import asyncio, os, signal; from tests.tui.test_browser import serving\n"
        "async def run():\n"
        "    async with serving() as (server, session):\n"
        "        async with session.ws_connect(server.page + 'ws') as tab:\n"
        "            seen = b''\n"
        "            while b'/help' not in seen: seen += (await tab.receive()).data\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(run())\n"
    )
    environment = {**os.environ, "XDG_DATA_HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path)}
    status = os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", script], environment)
    assert status == -signal.SIGKILL
    wait_for(lambda: not processes_with(f"XDG_DATA_HOME={tmp_path}"))


def processes_with(variable: str) -> list[str]:
    """Numbers of processes whose environment has it."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and variable.encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found
