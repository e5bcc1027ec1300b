"""``--endpoint``: the commands and the app with a model of a server."""

from __future__ import annotations

import io
import json

import pytest

from localrt.cli import main
from localrt.client.model import connect
from localrt.tui.plain import PlainChat
from tests.client.conftest import KEY
from tests.fake_endpoint import DONE, HEAD, delta, saying
from tests.server.conftest import Running
from tests.tui import screen
from tests.tui.conftest import SIZE, until
from tests.tui.screen import idle


def test_one_answer_on_stdout(server: Running, capsys: pytest.CaptureFixture[str]) -> None:
    fast = ["--endpoint", server.url, "--max-tokens", "4", "--temperature", "0"]
    assert main(["run", "tiny", "hi", *fast, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["model"], record["finish_reason"]) == ("tiny", "length")
    assert record["metrics"]["completion_tokens"] == 4
    assert main(["run", "tiny", "-c", "go on", *fast, "--stats"]) == 0
    out, err = capsys.readouterr()
    assert out.strip()
    assert "answer 4 tokens" in err
    assert main(["chat", "-p", "hi", *fast]) == 0
    assert capsys.readouterr().out.strip() == record["text"].strip()


@pytest.mark.parametrize(
    ("args", "status", "said"),
    [
        (["--endpoint", "nonsense"], 2, "must be a URL"),
        (["--endpoint", "http://h", "--ram", "4GB"], 2, "--ram is for models on this machine"),
        (["--endpoint", "http://h", "--offline"], 2, "--offline"),
        (["--endpoint", "http://h", "--adapter", "x"], 2, "--adapter is for"),
        (["--endpoint", "http://h", "--draft", "ngram"], 2, "--draft"),
        (["--api-key", KEY], 2, "--api-key needs --endpoint"),
        (["--endpoint", "http://h", "--batch", "x"], 2, "--batch"),
        (["--endpoint", "http://127.0.0.1:1"], 1, "nothing listens"),
    ],
)
def test_bad_usage_is_one_line(
    args: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "m", "hi", *args]) == status
    error = capsys.readouterr().err
    assert error.startswith("localrt: ")
    assert error.count("\n") == 1
    assert said in error
    assert KEY not in error


def test_plain_chat(server: Running) -> None:
    out = io.StringIO()
    chat = PlainChat(
        io.StringIO("/set max_tokens 4\nhello\n/set draft ngram\n/quit\n"),
        out,
        model_name="tiny",
        system=None,
        options={"temperature": 0.0},
    )
    assert chat.run(lambda progress: connect(server.url, progress=progress)) == 0
    text = out.getvalue()
    assert f"tiny at 127.0.0.1:{server.port}, context 512" in text
    assert "(stopped at max_tokens" in text or "max_tokens" in text
    assert "Error: draft is for models on this machine" in text


async def test_the_app_chats_through_it(server: Running) -> None:
    from localrt.tui import ChatApp

    app = ChatApp(
        lambda progress: connect(server.url, progress=progress),
        model_name="127.0.0.1",
        system=None,
        options={"temperature": 0.0, "max_tokens": 6},
    )
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: idle(app))
        await screen.say(pilot, "Hi")
        await until(pilot, lambda: len(screen.answers(app)) == 1 and idle(app))
        await screen.say(pilot, "And?")
        await until(pilot, lambda: len(screen.answers(app)) == 2 and idle(app))
        assert all(screen.answers(app))
        assert "tiny · remote · ready" in screen.footer(app)
        assert "of 512" in screen.footer(app)
        await pilot.press("f3")
        await pilot.press("f4")  # no models to choose from
        await until(pilot, lambda: "localrt chat MODEL" in "\n".join(screen.notices(app)))


async def test_app_without_server() -> None:
    from localrt.tui import ChatApp

    replies = [HEAD + delta(content="Half a")]
    replies.append(HEAD + delta("stop", content="Whole.") + DONE)
    with saying(lambda asked, connection: replies.pop(0)) as running:
        app = ChatApp(
            lambda progress: connect(running.url, progress=progress),
            model_name="m",
            system=None,
            options={},
        )
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda: idle(app))
            await screen.say(pilot, "Hi")
            await until(pilot, lambda: "ended in the middle" in "\n".join(screen.notices(app)))
            assert screen.answers(app) == ["Half a"]
            await screen.say(pilot, "Again")
            await until(pilot, lambda: "Whole." in screen.answers(app))
