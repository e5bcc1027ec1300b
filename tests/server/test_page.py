"""The chat page in a browser without a window: conversations, files, options, calls of tools."""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt import History, Turn
from localrt.common.progress import Progress
from localrt.engine.option_help import OPTION_HELP
from localrt.history.presets import Preset, PresetsFile
from localrt.mcp.servers import ToolServers
from localrt.server.about import ModelFacts
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool
from tests.conftest import write_tiny_model
from tests.server.conftest import WIDE, Running, Script, needs_kernels, serving, write_long
from tests.server.test_conversations import picture
from tests.waits import wait_for

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")

pytestmark = [needs_kernels, pytest.mark.timeout(300)]

PHONE, PLAIN = {"width": 390, "height": 800}, {"width": 1100, "height": 800}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        try:
            found = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        except playwright.Error:
            pytest.skip("needs Chromium")
        yield found
        found.close()


@pytest.fixture
def visit(browser: Any, talking: Running) -> Iterator[Callable[..., Any]]:
    """Opens a page; in the end none has asked anybody else, or met an error."""
    asked: list[str] = []
    said: list[str] = []
    contexts = []

    def visit(path: str = "/", *, running: Running = talking, **options: Any) -> Any:
        contexts.append(browser.new_context(**{"viewport": PLAIN, **options}))
        page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("console", lambda line: line.type == "error" and said.append(line.text))
        page.on("dialog", lambda dialog: said.append(dialog.message) or dialog.dismiss())
        page.goto(running.url + path)
        return page

    yield visit
    for context in contexts:
        for page in context.pages:
            page.unroute_all(behavior="ignoreErrors")  # requests that are held back now
        context.close()
    paths = r"$|v1/(models(/\w+)?$|documents$|conversations|tools\?|presets$|options$|recommended$)"
    paths += r"|api/(pull|generate)$"
    allowed = rf"(http://127\.0\.0\.1:\d+/((llm|a/b)(/|$))?({paths}))|data:|blob:"
    assert [url for url in asked if not re.match(allowed, url)] == []
    # No documents, keys, answers that have ended; servers that ended before their page.
    expected = ("400", "401", "403", "404", "ERR_CONNECTION_REFUSED")
    assert [line for line in said if not any(status in line for status in expected)] == []


def send(page: Any, text: str) -> None:
    """Send a message; the page then follows the answer to it."""
    expect(page.locator("dialog[open]")).to_have_count(0)  # nothing else takes keys until then
    page.get_by_label("Message", exact=True).last.fill(text)
    page.keyboard.press("Enter")
    expect(page.locator("#send")).to_be_enabled()


def answer(page: Any) -> Any:
    return page.locator("article.assistant").last


def ended(page: Any) -> Any:
    """The last answer, once no message is being sent and the page follows none."""
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#stop")).to_be_hidden()
    return answer(page)


def expect(found: Any) -> Any:
    playwright.expect.set_options(timeout=60_000)
    return playwright.expect(found)


def conversation(file: Path, *turns: str, **facts: Any) -> str:
    """A saved conversation, questions and answers by turns; returns its path."""
    with History(file) as history:
        kept = history.new(model="tiny", **facts)
        for number, text in enumerate(turns):
            kept.add("assistant" if number % 2 else "user", text)
        return f"/#{kept.id}"


def turns(file: Path) -> list[Turn]:
    """The turns of the newest conversation."""
    with History(file) as history:
        return list(history.open(history.list()[0].id).turns)


def turns_in(file: Path) -> list[str]:
    return [turn.content for turn in turns(file)]


def test_message(visit: Any, script: Script, file: Path) -> None:
    code = "def f(x):\n    return x < 1\n"
    said = f"# Head\n\nSo:\n\n```python\n{code}```\n\n- one\n- two\n"
    script.say(said)
    page = visit()
    expect(page.get_by_text("What shall we talk about?")).to_be_visible()
    send(page, "Show <b>code</b>")
    expect(page.locator("article.user .body")).to_have_text("Show <b>code</b>")
    found = ended(page)
    expect(found.locator("h1")).to_have_text("Head")
    expect(found.locator("li")).to_have_text(["one", "two"])
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    found.get_by_role("button", name="Copy python").click()
    expect(found.get_by_text("Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == code
    expect(found.locator(".bar")).to_contain_text("tokens/s")
    expect(page.locator("#used")).to_contain_text("of 4,096 tokens used")
    expect(page.get_by_role("link", name="Show <b>code</b>")).to_be_visible()
    expect(page.get_by_role("status")).to_contain_text("Answer: # Head")
    assert turns_in(file) == ["Show <b>code</b>", said]
    page.reload()
    expect(answer(page).locator("h1")).to_have_text("Head")


def test_stop(visit: Any, script: Script, file: Path) -> None:
    script.say("On and on. ", ends=False)
    script.hold(25)
    page = visit()
    send(page, "Go")
    expect(answer(page)).to_contain_text("On and on. On and on.")
    expect(page.get_by_role("button", name="Send")).to_be_hidden()
    with page.expect_response("**/cancel"):
        page.keyboard.press("Escape")
    script.release()
    expect(ended(page).locator(".bar")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert turns_in(file)[1].startswith("On and on. On and on.")


@pytest.mark.slow
def test_reload_in_the_middle(visit: Any, script: Script) -> None:
    script.say("Before. After.")
    script.hold(8)
    page = visit()
    send(page, "Go")
    expect(answer(page).locator(".body")).to_have_text("Before.")
    page.reload()
    expect(answer(page).locator(".body")).to_have_text("Before.")
    script.release()
    expect(ended(page).locator(".body")).to_have_text("Before. After.")


@pytest.mark.slow
def test_long_conversation_shows_its_last_part(visit: Any, file: Path) -> None:
    id = write_long(file, [f"turn {number}" for number in range(2000)])
    page = visit(f"/#{id}")
    expect(answer(page).locator(".body")).to_have_text("turn 1999")
    assert page.locator("article").count() == 30
    expect(answer(page)).to_be_in_viewport()
    page.locator("#scroller").evaluate("(box) => box.scrollTo(0, 0)")
    expect(page.locator("article")).to_have_count(60)
    expect(page.locator("article").nth(30)).to_contain_text("turn 1970")


def test_long_answer_is_shown_from_its_end(visit: Any, file: Path) -> None:
    """Its parts come as one scrolls to them, and what is on the screen stays there."""
    text = "\n\n".join(f"Part {n} {'word ' * (n % 40)}" for n in range(2000))
    page = visit(conversation(file, "Write a lot", text))
    found = answer(page)
    expect(found.get_by_text("Part 1999")).to_be_in_viewport()
    count = found.locator("p").count()
    assert count < 1000
    line = found.get_by_text(f"Part {2009 - count} ")
    top = "line => line.getBoundingClientRect().top"
    before = line.evaluate(f"line => {{ $('scroller').scrollTop = 200; return ({top})(line); }}")
    more = "count => document.querySelectorAll('article p').length > count"
    page.wait_for_function(more, arg=count)
    assert abs(line.evaluate(top) - before) < 2
    for _ in range(20):
        page.locator("#scroller").evaluate("box => { box.scrollTop = 0; }")
    expect(found.locator("p").first).to_have_text("Part 0 ")
    assert [line.split()[1] for line in found.locator("p").all_inner_texts()] == [
        str(number) for number in range(2000)
    ]


def test_markup_does_not_run(visit: Any, script: Script, file: Path) -> None:
    hostile = (
        "<script>alert(1)</script>\n\n<img src=x onerror=alert(1)>\n\n<svg onload=alert(1)>\n\n"
        "[a](javascript:alert(1)) ![b](http://elsewhere.example/x.png)\n\n"
        '```"><img src=x onerror=alert(1)>\nx\n```\n\n<iframe srcdoc="<script>alert(1)</script>">'
    )
    path = conversation(file, hostile, f"<think>{hostile}</think>{hostile}", system=hostile)
    with History(file) as history:
        history.open(path.rpartition("#")[2]).set(title=hostile)
    script.say(hostile)
    page = visit(path)
    for _ in range(2):
        found = ended(page)
        expect(found.locator("a")).to_have_attribute("href", "http://elsewhere.example/x.png")
        assert page.locator("#log :is(script, img, iframe, svg[onload])").count() == 0
        assert page.locator("#log a[href^=javascript]").count() == 0
        expect(found).to_contain_text("<img src=x onerror=alert(1)>")
        send(page, hostile)
        page.locator("article.assistant").nth(1).wait_for()


@pytest.mark.slow
def test_edit_again_and_branches(visit: Any, script: Script, file: Path) -> None:
    page = visit(conversation(file, "One", "First."))
    script.say("Second.")
    answer(page).hover()
    answer(page).get_by_role("button", name="Answer again").click()
    expect(ended(page).locator(".body")).to_have_text("Second.")
    expect(answer(page)).to_contain_text("2/2")
    answer(page).get_by_role("button", name="Show the branch before").click()
    expect(answer(page).locator(".body")).to_have_text("First.")
    page.locator("article.user").hover()
    page.get_by_role("button", name="Edit the message").click()
    expect(page.get_by_label("Message", exact=True).last).to_have_value("One")
    script.say("Third.")
    send(page, "Two")
    expect(ended(page).locator(".body")).to_have_text("Third.")
    expect(page.locator("article.user")).to_contain_text("2/2")
    assert turns_in(file) == ["Two", "Third."]
    page.locator("article.user").get_by_role("button", name="Show the next branch").click()
    expect(answer(page).locator(".body")).to_have_text("First.")
    assert turns_in(file) == ["One", "First."]


def test_pictures_and_files(
    visit: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.png").write_bytes(picture())
    (tmp_path / "b.py").write_text("x = '👍'\ny = 2\n", "utf-8")
    (tmp_path / "c.bin").write_bytes(b"\0\xff\xfe")
    page = visit()
    expect(page.get_by_label("Model", exact=True)).to_contain_text("tiny")
    page.evaluate("chat.models[0].capabilities.push('vision')")
    page.locator("#files").set_input_files([tmp_path / "a.png", tmp_path / "b.py"])
    expect(page.locator("#chips li")).to_have_count(2)
    page.locator("#files").set_input_files([tmp_path / "c.bin"])
    expect(page.get_by_role("alert").first).to_contain_text("c.bin is not a text")
    # As a picture that is pasted, and one that is dropped.
    for event, field in (("paste", "clipboardData"), ("drop", "dataTransfer")):
        page.evaluate(
            """([event, field, data]) => {
                const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
                const given = new DataTransfer();
                given.items.add(new File([bytes], `${event}.png`, { type: "image/png" }));
                const made = new Event(event, { bubbles: true, cancelable: true });
                Object.defineProperty(made, field, { value: given });
                document.getElementById("message").dispatchEvent(made);
            }""",
            [event, field, base64.b64encode(picture()).decode()],
        )
    expect(page.locator("#chips li")).to_have_count(4)
    page.get_by_role("button", name="Remove drop.png").click()
    sees = ModelFacts("", "", 0, "", None, None, "", ("vision",))
    monkeypatch.setattr("localrt.server.conversations.known_facts", lambda model: sees)
    send(page, "Look 👍")
    expect(page.locator("article.user img")).to_have_count(2)
    expect(page.locator("article.user .file")).to_have_text("b.py, 2 lines")
    ended(page)
    monkeypatch.undo()
    answer(page).get_by_role("button", name="Answer again").click()  # refused, and it stays
    expect(page.get_by_role("alert").first).to_contain_text("tiny cannot see pictures")
    expect(page.locator("article.assistant")).to_have_count(1)
    page.reload()
    expect(page.locator("article.user img").first).to_have_js_property("naturalWidth", 3)
    with History(file) as history:
        turn = history.open(history.list()[0].id).turns[0]
    assert [each.name for each in turn.pictures] == ["a.png", "paste.png"]
    ((start, end, label),) = turn.info["folds"]
    assert (label, turn.content[start:end]) == (
        "b.py, 2 lines",
        "b.py:\n```py\nx = '👍'\ny = 2\n```\n",
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [PLAIN, PHONE], ids=["wide", "phone"])
def test_tables(visit: Any, script: Script, size: Any) -> None:
    row = "| Electroencephalography | a device for measuring | 1,234,567.89 | 12 |\n"
    script.say("| Word | Meaning | Price | Count |\n|:--|:-:|--:|---|\n" + row * 2)
    page = visit(viewport=size)
    send(page, "Make a table")
    cells = ended(page).locator("tbody tr").first.locator("td")
    expect(cells).to_have_count(4)
    assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    aligned = [cells.nth(n).evaluate("(one) => getComputedStyle(one).textAlign") for n in range(4)]
    assert aligned == ["left", "center", "right", "left"]
    lines = "(one) => { const text = document.createRange(); text.selectNodeContents(one); "
    lines += "return new Set([...text.getClientRects()].map((line) => line.top)).size; }"
    assert [cells.nth(n).evaluate(lines) for n in (0, 2, 3)] == [1, 1, 1]


@pytest.mark.slow
def test_options(visit: Any, script: Script, file: Path) -> None:
    page = visit()
    page.get_by_role("button", name="Options").click()
    expect(page.get_by_role("checkbox", name="tools")).to_be_hidden()  # there are none
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Most tokens of an answer").fill("4")
    page.locator("[name=thinking]").select_option("off")
    page.get_by_role("button", name="Save").click()
    send(page, "Hi")
    expect(ended(page).locator(".body")).to_have_text("Hell")
    expect(answer(page).locator(".bar")).to_contain_text("limit of tokens")
    page.get_by_role("button", name="Options").click()
    page.get_by_label("Title").fill("Short ones")
    page.get_by_label("Most tokens of an answer").fill("")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("heading", name="Short ones")).to_be_visible()
    with History(file) as history:
        kept = history.open(history.list()[0].id)
        assert (kept.title, kept.system) == ("Short ones", "Be brief.")
        assert kept.options == {"thinking": False}
    page.get_by_role("button", name="Options").click()
    page.get_by_role("button", name="Delete this chat").click()
    page.get_by_role("button", name="Delete it for good?").click()
    expect(page.get_by_text("No conversations yet.")).to_be_visible()
    with History(file) as history:
        assert history.list() == []


@pytest.mark.slow
def test_continue_edit_fork_remove(visit: Any, script: Script, file: Path) -> None:
    said = "On and on. " * 5 + "The end."
    script.say(said)
    script.hold(25)
    page = visit()
    send(page, "Go")
    expect(answer(page)).to_contain_text("On and on. On")
    with page.expect_response("**/cancel"):
        page.keyboard.press("Escape")
    script.release()
    expect(ended(page).locator(".bar")).to_contain_text("stopped")
    answer(page).get_by_role("button", name="Continue").click()
    expect(ended(page).locator(".body")).to_have_text(said)
    expect(answer(page).get_by_role("button", name="Continue")).to_be_hidden()
    answer(page).get_by_role("button", name="Edit the answer").click()
    send(page, "So it ends.")
    expect(answer(page).locator(".body")).to_have_text("So it ends.")
    expect(answer(page)).to_contain_text("2/2")
    expect(page.get_by_label("Message", exact=True).last).to_have_value("")
    answer(page).get_by_label("More").click()
    answer(page).get_by_role("button", name="Fork").click()
    expect(page.locator("nav a")).to_have_count(2)
    expect(answer(page)).not_to_contain_text("2/2")
    page.go_back()
    expect(answer(page)).to_contain_text("2/2")
    answer(page).get_by_label("More").click()
    answer(page).get_by_role("button", name="Delete from here").click()
    answer(page).get_by_role("button", name="Delete it for good?").click()
    expect(answer(page)).to_contain_text("The end.")
    expect(answer(page)).not_to_contain_text("2/2")


@pytest.mark.slow
def test_list(visit: Any, script: Script, file: Path) -> None:
    conversation(file, "One", "First.")
    page = visit(conversation(file, "Two", "Second."))
    rows, alert = page.locator("nav ul ul > li"), page.get_by_role("alert").first

    def choose(row: int, act: str) -> None:
        rows.nth(row).hover()
        rows.nth(row).locator("summary").click()
        rows.nth(row).get_by_role("button", name=act).click()

    choose(1, "Pin")
    expect(page.get_by_role("heading", name="Pinned")).to_be_visible()
    expect(rows.first).to_contain_text("One")
    choose(0, "Rename")
    page.get_by_role("textbox", name="Title").fill("Rivers")
    page.keyboard.press("Enter")
    expect(rows.first).to_contain_text("Rivers")
    with page.expect_download() as downloading:
        choose(0, "Export as JSON")
    saved = downloading.value
    assert saved.suggested_filename == "Rivers.json"
    choose(1, "Delete")
    rows.nth(1).get_by_role("button", name="Delete it for good?").click()
    expect(page.get_by_text("What shall we talk about?")).to_be_visible()
    page.locator("#import-file").set_input_files([saved.path()])
    expect(answer(page).locator(".body")).to_have_text("First.")
    expect(rows).to_have_count(2)
    page.locator("#import-file").set_input_files([__file__])
    expect(alert).to_contain_text("test_page.py")


@pytest.mark.slow
def test_temporary_leaves_nothing(visit: Any, file: Path) -> None:
    page = visit(conversation(file, "One", "First."))
    page.get_by_role("button", name="Temporary chat").click()
    expect(page.get_by_text("nothing of it is written to the disk")).to_be_visible()
    send(page, "A secret")
    expect(ended(page).locator(".body")).to_have_text("Hello there.")
    page.get_by_label("Message", exact=True).last.fill("Another secret")
    assert page.evaluate("[location.hash, document.title]") == ["", "Temporary chat · localrt"]
    page.get_by_role("link", name="One").click()
    expect(answer(page).locator(".body")).to_have_text("First.")
    expect(page.get_by_text("nothing of it is written to the disk")).to_be_hidden()
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")
    assert b"secret" not in b"".join(each.read_bytes() for each in file.parent.glob("history*"))


@pytest.mark.slow
def test_drafts(visit: Any, file: Path) -> None:
    path = conversation(file, "One", "First.")
    page = visit(path)
    box = page.get_by_label("Message", exact=True).last
    expect(answer(page).locator(".body")).to_have_text("First.")
    box.fill("What if")
    page.get_by_role("button", name="New chat").click()  # before it is kept by itself
    expect(box).to_have_value("")
    box.fill("Something new")
    wait_for(lambda: "Something new" in page.evaluate("JSON.stringify(localStorage)"))
    page.close()
    again = page.context.new_page()
    again.goto(page.url)
    box = again.get_by_label("Message", exact=True).last
    expect(box).to_have_value("Something new")
    again.get_by_role("link", name="One").click()
    expect(box).to_have_value("What if")
    again.locator("article.user").get_by_role("button", name="Edit the message").click()
    expect(box).to_have_value("One")
    again.get_by_role("button", name="Cancel").first.click()
    expect(box).to_have_value("What if")
    box.press("Enter")
    ended(again)
    with History(file) as history:
        wait_for(lambda: history.open(path[2:]).draft == "")
    assert turns_in(file)[2] == "What if"


@pytest.mark.slow
def test_message_waits_until_its_conversation_is_there(
    visit: Any, script: Script, file: Path
) -> None:
    path, page = conversation(file, "One", "First."), visit()

    def slowly(route: Any) -> None:
        page.wait_for_timeout(300)
        route.continue_()

    page.locator("#files").set_input_files([__file__])
    expect(page.locator("#chips li")).to_have_count(1)
    page.route("**/items?*", slowly)
    page.evaluate(f"location.hash = '{path[2:]}'")
    page.wait_for_function(f"chat.id === '{path[2:]}'")
    expect(page.locator("#chips li")).to_have_count(0)  # it was for the other one
    page.keyboard.type("Two")  # where the message is
    page.keyboard.press("Enter")
    expect(page.locator("article.user").last).to_contain_text("Two")
    ended(page)
    assert turns_in(file) == ["One", "First.", "Two", "Hello there."]


@pytest.mark.slow
def test_full_context(visit: Any, script: Script, file: Path) -> None:
    page = visit(conversation(file, "x" * 3000, "Seen."))
    send(page, "y" * 2000)
    found = ended(page)
    expect(found).to_contain_text("maximum context length")
    script.say("Many letters.")
    found.get_by_role("button", name="Summarize").click()
    expect(page.locator("article.user").last).to_contain_text("yyy")
    expected = ["Many lett", "y" * 9, "Many lett"]  # it is asked again a moment after the summary
    wait_for(lambda: [turn.content[:9] for turn in turns(file)][1:] == expected)
    expect(ended(page).locator(".body")).to_have_text("Many letters.")
    page.locator("article.user").first.get_by_role("button", name="Show the branch before").click()
    answer(page).get_by_role("button", name="Leave out the oldest").click()
    expect(ended(page).locator(".body")).to_have_text("Many letters.")


@pytest.mark.slow
def test_all_options_presets_and_theme(
    visit: Any, talker: localrt.Model, script: Script, tmp_path: Path
) -> None:
    (tmp_path / "config.toml").write_text('system = "Be kind."\n')
    PresetsFile(tmp_path).save(Preset("Short", "Be brief.", {"top_k": 3}))
    with serving(talker, name="tiny", history=":memory:", config_dir=tmp_path) as running:
        page = visit(running=running)
        form = page.locator("#options")
        page.get_by_role("button", name="System prompt: Be kind.").click()
        form.get_by_text("More options").click()
        assert {name for name in OPTION_HELP if form.locator(f"[name={name}]").count() == 0} == {
            "adapter"
        }
        form.locator("[name=min_p]").fill("-2")
        form.get_by_role("button", name="Save", exact=True).click()
        expect(form).to_be_visible()
        form.get_by_role("button", name="Cancel").click()
        send(page, "Hi")
        ended(page)
        page.get_by_role("button", name="Options", exact=True).click()
        form.locator("[name=preset]").select_option("Short")
        expect(form.locator("[name=top_k]")).to_have_value("3")
        form.locator("[name=stop]").fill('["!", "?"]')
        form.locator("[name=ignore_eos]").select_option("off")
        form.locator("[name=grammar]").fill("root ::= (")
        form.get_by_label("Save these as a preset").fill("Mine")
        form.get_by_label("Theme").select_option("dark")
        colour = "getComputedStyle(document.body).backgroundColor"
        assert page.evaluate(colour) == "rgb(22, 25, 24)"
        form.get_by_role("button", name="Save", exact=True).click()
        expect(form).to_be_hidden()
        _, listed, _ = running.request("GET", "/v1/conversations")
        _, kept, _ = running.request("GET", f"/v1/conversations/{listed['data'][0]['id']}")
        given = {"top_k": 3, "stop": ["!", "?"], "ignore_eos": False, "grammar": "root ::= ("}
        assert (kept["options"], kept["instructions"]) == (given, "Be brief.")
        assert PresetsFile(tmp_path).find("Mine") == Preset("Mine", "Be brief.", given)
        page.reload()
        expect(page.locator("#sign")).to_have_text("System prompt: Be brief.")
        assert page.evaluate(colour) == "rgb(22, 25, 24)"


@pytest.mark.slow
def test_thinking_and_calls_are_folded(visit: Any, script: Script, file: Path) -> None:
    with History(file) as history:
        kept = history.new(model="tiny")
        kept.add("user", "Read a")
        call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        kept.add("assistant", "", info={"tool_calls": [call]})
        info = {"tool_call_id": "c", "title": "files.read", "arguments": '{"path": "a"}'}
        kept.add("tool", "secret words", info=info)
        kept.add("assistant", "<think>Aha.</think>Done.")
        path = f"/#{kept.id}"
    page = visit(path)
    expect(page.get_by_text('files.read {"path": "a"}')).to_be_visible()
    expect(page.get_by_text("secret words")).to_be_hidden()
    expect(page.get_by_text("Aha.")).to_be_hidden()
    page.get_by_text("Thoughts").click()
    expect(page.get_by_text("Aha.")).to_be_visible()
    script.say("<think>Wait a moment.</think>Now.")
    script.hold(16)
    send(page, "And?")
    expect(answer(page).get_by_text("Thinking…")).to_be_visible()
    script.release()
    expect(ended(page).locator(".body")).to_have_text("Now.")


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/llm", "/a/b/"])
def test_behind_a_reverse_proxy_with_a_key(
    visit: Any, talker: localrt.Model, script: Script, tmp_path: Path, path: str
) -> None:
    script.say("A river.")
    note = tmp_path / "note.html"
    note.write_text("<p>Of the Elbe</p>")
    below = path.rstrip("/")
    with serving(talker, history=":memory:", api_key="secret", below=below) as running:
        page = visit(path, running=running)
        for key in ("wrong", "secret"):
            page.get_by_label("API key").fill(key)
            with page.expect_response("**/v1/models"):
                page.keyboard.press("Enter")
            expect(page.get_by_label("API key")).to_be_visible(visible=key == "wrong")
        expect(page.get_by_label("Model", exact=True)).to_contain_text("talker")
        expect(page.get_by_role("alert").first).to_be_hidden()
        page.locator("#files").set_input_files([note])
        expect(page.locator("#chips li")).to_contain_text("note.html")
        send(page, "What is the Elbe?")
        expect(ended(page)).to_contain_text("A river.")
        page.reload()
        expect(answer(page)).to_contain_text("A river.")
        assert page.evaluate("Object.keys(localStorage)")[0].startswith(f"localrt{below}.")


def axe_violations(page: Any) -> list[Any]:
    """What breaks labels, roles, contrast and focus, as axe-core checks them."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-core")
    ending = "(one) => Number.isFinite(one.effect.getComputedTiming().endTime)"
    moves = f"document.getAnimations().filter({ending}).map((one) => one.finished)"
    page.evaluate(f"Promise.all({moves}).then(() => 0)")
    found = axe.Axe().run(page).response["violations"]
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "scheme"), [(PHONE, "light"), (PLAIN, "dark")], ids=str)
def test_axe_finds_nothing(visit: Any, script: Script, file: Path, size: Any, scheme: str) -> None:
    text = "# A\n\n[b](https://c.example) `d`\n\n> f\n\n| g |\n| - |\n| h |\n\n- [x] o\n- [ ] p\n\n"
    text += '```py\n@q\ndef r(s=1):  # t\n    return "u"\n```\n\n```diff\n+v\n-w\n```\n\n'
    text += "\\(x^2\\) and\n\n\\[\\begin{aligned} a &= b \\\\ &= \\sqrt{c} \\end{aligned}\\]\n"
    with History(file) as history:
        kept = history.new(model="tiny")
        kept.add("user", [{"type": "image", "image": picture()}, {"type": "text", "text": "i"}])
        kept.add("assistant", f"<think>j</think>{text}", info={"tok_s": 20.0, "tokens": 3})
        kept.add("tool", "k", info={"title": "l", "arguments": "{}"})
        kept.add("assistant", "m", info={"error": "n"})
    page = visit(f"/#{kept.id}", viewport=size, color_scheme=scheme)
    expect(page.locator("article")).to_have_count(4)
    assert axe_violations(page) == []
    if size is PHONE:
        page.get_by_role("button", name="Show conversations").click()
        assert axe_violations(page) == []
        page.keyboard.press("Escape")
    else:
        page.locator("nav li").last.hover()
        page.locator("nav summary").last.click()
    page.locator("article summary[aria-label=More]").last.click()
    assert axe_violations(page) == []
    for name, shown in (("Options", "More options"), ("Models", "Close")):
        page.get_by_role("button", name=name, exact=True).click()
        expect(page.get_by_text(shown)).to_be_visible()
        if name == "Options":
            page.get_by_text(shown).click()
        assert axe_violations(page) == []
        page.keyboard.press("Escape")
    page.evaluate("openTemporary()")
    expect(page.get_by_text("nothing of it is written to the disk")).to_be_visible()
    assert axe_violations(page) == []


@pytest.mark.slow
def test_models_dialog(
    visit: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = write_tiny_model(tmp_path, template=None, wide=WIDE)
    files = [
        LocalFile("alpha", "alpha", 1 << 20, base, used=2.0),
        LocalFile("beta", "beta", 1 << 20, tiny_folder),
        LocalFile("delta", "delta", 1 << 20, tiny_folder, used=1.0),
    ]

    def resolve(name: str, *, progress: Any, **_: Any) -> None:
        progress(Progress("download", 5, 10, "bytes", "m.gguf"))
        if name != "gamma":
            raise localrt.ModelNotFoundError("no such model")
        files.append(LocalFile(name, name, 1 << 20, tiny_folder))

    monkeypatch.setattr("localrt.server.ollama_models.resolve", resolve)
    monkeypatch.setattr("localrt.server.pool._LIST_AGE_S", 0)
    load, options = lambda *_: localrt.load(tiny_folder, ctx=512), ServeOptions()
    pool = ModelPool(load, lambda: files, options)
    with serving(pool, allow_pull=True, history=":memory:") as running:
        page = visit(running=running)
        expect(page.locator("#model")).to_have_value("delta")  # the last used that is no base model
        expect(page.locator("optgroup option")).to_have_text(["alpha"])
        page.get_by_role("button", name="Models").click()
        dialog = page.locator("#models")
        dialog.get_by_role("button", name="Load beta", exact=True).click()
        expect(dialog.get_by_role("button", name="Unload beta")).to_be_focused()
        page.keyboard.press("Enter")
        expect(dialog.get_by_role("button", name="Load beta", exact=True)).to_be_visible()
        for name, said in (("none", "no such model"), ("gamma", "gamma is here.")):
            dialog.get_by_label("Download a model").fill(name)
            page.keyboard.press("Enter")
            expect(dialog).to_contain_text(said)
        expect(dialog.get_by_role("button", name="Load gamma", exact=True)).to_be_visible()
        assert axe_violations(page) == []


@pytest.mark.slow
def test_keyboard_alone(visit: Any, script: Script, file: Path) -> None:
    page = visit(conversation(file, "One", "First."))
    expect(page.get_by_label("Message", exact=True).last).to_be_focused()
    skip = page.get_by_role("link", name="Skip to the message")
    skip.focus()
    expect(skip).to_be_in_viewport()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Message", exact=True).last).to_be_focused()
    page.keyboard.type("Two")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("lines")
    page.keyboard.press("Enter")
    expect(page.locator("article.user").last).to_contain_text("Two\nlines")
    ended(page)
    page.get_by_role("button", name="Options").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Options")).to_be_focused()


# -- calls of tools: shown, allowed or not by the user, run by the server --------------------------

TOOLS_SERVER = Path(__file__).parent.parent / "mcp" / "server.py"
LEFT = ["read.file", "fail", "picture", "end"]  # the tiny model's context is short


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings")
    command, args = json.dumps(sys.executable), json.dumps([str(TOOLS_SERVER)])
    server = f"command = {command}\nargs = {args}\ndeny = {LEFT}"
    (folder / "config.toml").write_text(f"[mcp.servers.tests]\n{server}\n", "utf-8")
    return folder


@pytest.fixture(scope="module")
def tools_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("history") / "history.db"


@pytest.fixture(scope="module")
def with_tools(talker: localrt.Model, settings: Path, tools_file: Path) -> Iterator[Running]:
    """A server with the tools of an MCP server, which starts once."""
    with serving(talker, name="tiny", history=tools_file, config_dir=settings) as running:
        yield running


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of all calls that reach a tool's server."""
    found: list[dict[str, Any]] = []
    call = ToolServers.call

    def counted(self: ToolServers, tool: Any, arguments: Any, *, most: int) -> Future[Any]:
        found.append(dict(arguments))
        return call(self, tool, arguments, most=most)

    monkeypatch.setattr(ToolServers, "call", counted)
    return found


def call_of(name: str, **arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def ask(page: Any, script: Script, *calls: str) -> Any:
    """Have the model make calls; return the first that waits. The answer after them is fixed."""
    expect(page.locator("#tools-list")).to_contain_text("tests: ready")
    script.say("Let me see. " + "\n".join(calls))
    send(page, "Go")
    question = page.locator("article.asked")
    expect(question.get_by_role("button")).to_have_count(3)
    script.say("So it is.")
    return question


def test_allowed_by_keyboard(
    visit: Any, with_tools: Running, script: Script, tools_file: Path, made: Any
) -> None:
    page = visit(running=with_tools)
    question = ask(page, script, call_of("add", a=2, b=3))
    expect(page.get_by_role("status")).to_contain_text("wants to run tests.add")
    page.reload()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(question).to_contain_text("The model wants to run tests.add")
    expect(question.locator("pre")).to_have_text('{\n  "a": 2,\n  "b": 3\n}')
    assert made == []
    names = ["Allow once", "Always in this chat", "Deny"]
    for name in names:
        expect(question.get_by_role("button", name=f"{name}: tests.add")).to_be_visible()
    question.locator("pre").focus()
    page.keyboard.press("Tab")
    expect(question.get_by_role("button", name="Allow once")).to_be_focused()
    page.keyboard.press("Enter")
    expect(answer(page).locator(".body")).to_have_text("So it is.")
    ended(page)
    assert made == [{"a": 2, "b": 3}]
    page.get_by_text('tests.add {"a": 2, "b": 3}').click()
    expect(page.locator("details.call > div")).to_have_text("5")
    asked, called, result, last = turns(tools_file)
    (call,) = called.info["tool_calls"]
    assert (called.content, last.content) == ("Let me see.", "So it is.")
    assert [asked.role, result.role, last.role] == ["user", "tool", "assistant"]
    facts = {"tool_call_id": call["id"], "title": "tests.add", "ending": "done"}
    assert result.content == "5"
    assert {name: result.info[name] for name in facts} == facts


@pytest.mark.slow
def test_tools_can_be_switched_off(
    visit: Any, with_tools: Running, script: Script, tools_file: Path, made: Any
) -> None:
    """For a chat, before it begins, and on again."""
    page = visit(running=with_tools)
    expect(page.locator("#tools-list")).to_contain_text("tests: ready")
    switch = page.get_by_role("checkbox", name="Use tools")

    def set_switch(checked: bool) -> None:
        page.get_by_role("button", name="Options").click()
        expect(switch).to_be_checked(checked=not checked)
        switch.focus()
        page.keyboard.press("Space")
        page.keyboard.press("Enter")
        expect(switch).to_be_hidden()

    set_switch(False)
    call = call_of("add", a=2, b=3)
    script.say(call)
    send(page, "Go")
    expect(ended(page).locator(".body")).to_contain_text('"name": "add"')
    *_, last = turns(tools_file)
    assert (last.content, last.info.get("tool_calls"), made) == (call, None, [])
    page.reload()
    set_switch(True)
    ask(page, script, call).get_by_role("button", name="Allow once").click()
    expect(answer(page).locator(".body")).to_have_text("So it is.")
    ended(page)
    assert made == [{"a": 2, "b": 3}]


@pytest.mark.slow
def test_stop_ends_calls(
    visit: Any, with_tools: Running, script: Script, tools_file: Path, made: Any
) -> None:
    """The one that runs, and the one that waits to be allowed."""
    page = visit(running=with_tools)
    question = ask(page, script, call_of("sleep", seconds=600), call_of("add", a=1, b=1))
    question.get_by_role("button", name="Allow once").click()
    expect(question).to_contain_text("tests.sleep runs")
    wait_for(lambda: made)
    page.keyboard.press("Escape")
    expect(page.get_by_text('tests.sleep {"seconds": 600} (stopped)')).to_be_visible()
    expect(page.get_by_text('tests.add {"a": 1, "b": 1} (stopped)')).to_be_visible()
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert len(made) == 1
    assert [turn.role for turn in turns(tools_file)] == ["user", "assistant", "tool", "tool"]
    send(page, "And now?")
    expect(ended(page).locator(".body")).to_have_text("So it is.")


@pytest.mark.slow
def test_denied_markup_is_shown_as_text(
    visit: Any, with_tools: Running, script: Script, tools_file: Path, made: Any
) -> None:
    hostile = "<img src=x onerror=alert(1)>\u202e</pre><script>alert(1)</script>"
    page = visit(running=with_tools)
    question = ask(page, script, call_of(hostile), call_of("add", a=hostile, b=1))
    expect(page.get_by_text(f"{hostile} {{}} (failed)")).to_be_visible()
    shown = hostile.replace("\u202e", "\\u202e")  # what turns a line around cannot hide
    expect(question.locator("pre")).to_contain_text(shown)
    assert page.locator("#log :is(script, img)").count() == 0
    question.get_by_role("button", name="Deny").click()
    expect(ended(page).locator(".body")).to_have_text("So it is.")
    expect(page.get_by_text("(not allowed)")).to_be_visible()
    assert page.locator("#log :is(script, img)").count() == 0
    assert made == []
    assert turns(tools_file)[3].content == "The user did not allow this call."


@pytest.mark.slow
def test_axe_finds_nothing_at_calls(visit: Any, with_tools: Running, script: Script) -> None:
    page = visit(running=with_tools)
    question = ask(page, script, call_of("add", a="1\n" * 200, b=1), call_of("add", a=1, b=1))
    expect(question.get_by_role("button", name="Deny")).to_be_in_viewport()
    assert axe_violations(page) == []
    page.get_by_role("button", name="Options").click()
    page.get_by_text("Tools of your MCP servers").click()
    assert axe_violations(page) == []


@pytest.mark.slow
def test_end_of_the_server_leaves_no_question(
    talker: localrt.Model, script: Script, settings: Path, file: Path, made: Any
) -> None:
    with serving(talker, history=file, config_dir=settings) as running:
        script.say(call_of("add", a=2, b=3))
        _, about, _ = running.request("POST", "/v1/conversations", {})
        path = f"/v1/conversations/{about['id']}"
        running.request("POST", f"{path}/items", {"content": [{"text": "Go"}]})
        _, item, _ = running.request("POST", f"{path}/answers", {"tools": True})
        running.request("GET", f"{path}/answers/{item['id']}")  # ends with the answer
        _, found, _ = running.request("GET", f"{path}/items")
        call = found["data"][-1]
        assert (call["role"], call["state"]) == ("tool", "writing")
    *_, result = turns(file)
    assert (result.state, result.info["ending"], made) == ("done", "stopped", [])
