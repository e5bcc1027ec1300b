"""Conversations over HTTP: those of the terminal app, for their owner alone."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import localrt
from localrt import History, OptionError
from localrt.engine.option_help import OPTION_HELP
from localrt.history.presets import Preset, PresetsFile
from localrt.server.options import ServeOptions
from localrt.server.pool import LocalFile, ModelPool
from localrt.service.live import LiveModel
from tests.conftest import write_tiny_model
from tests.server.conftest import Running, Script, needs_kernels, serving
from tests.waits import wait_for

pytestmark = needs_kernels


def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "PNG")
    return file.getvalue()


def ok(answer: tuple[int, Any, Any]) -> Any:
    assert answer[0] == 200, answer[1]
    return answer[1]


def begun(running: Running, text: str = "Hi", **fields: Any) -> tuple[str, str]:
    """A conversation with one message: the paths of both."""
    made = ok(running.request("POST", "/v1/conversations", fields))
    path = f"/v1/conversations/{made['id']}"
    message = {"content": [{"text": text}]}
    return path, ok(running.request("POST", f"{path}/items", message))["id"]


def answered(running: Running, path: str, **fields: Any) -> Any:
    """The answer to the last message, once it has ended."""
    item = ok(running.request("POST", f"{path}/answers", fields))
    assert item["state"] == "writing"
    running.request("GET", f"{path}/answers/{item['id']}")  # ends with the answer
    found = ok(running.request("GET", f"{path}/items/{item['id']}"))
    assert found["state"] != "writing"
    return found


def test_list(talking: Running, file: Path) -> None:
    path, _ = begun(talking, "Name one.", title="Rivers")
    ok(talking.request("POST", path, {"title": "Lakes"}))
    (found,) = ok(talking.request("GET", "/v1/conversations?search=lakes"))["data"]
    assert (found["title"], f"/v1/conversations/{found['id']}") == ("Lakes", path)
    ok(talking.request("DELETE", path))
    assert talking.request("GET", path)[0] == 404


def test_answer(talking: Running, script: Script, file: Path) -> None:
    script.say("<think>Easy.</think>It is **blue**.")
    path, _ = begun(talking, "Which colour?", instructions="Be brief.")
    found = answered(talking, path)
    assert (found["state"], found["text"]) == ("done", "It is **blue**.")
    assert found["thinking"] == "Easy."
    assert found["html"] == ["<p>It is <strong>blue</strong>.</p>\n"]
    assert found["info"]["tokens"] > 10
    ok(talking.request("POST", f"{path}/items", {"content": [{"text": "Sure?"}]}))
    again = answered(talking, path)
    # The second prompt has the first answer, and the system prompt, in it.
    assert again["info"]["context"][0] > found["info"]["context"][0] + 20
    with History(file) as history:  # as the terminal app reads it
        conversation = history.open(path.rpartition("/")[2])
        assert [(turn.role, turn.content, turn.state) for turn in conversation.turns] == [
            ("user", "Which colour?", "done"),
            ("assistant", "<think>Easy.</think>It is **blue**.", "done"),
            ("user", "Sure?", "done"),
            ("assistant", "<think>Easy.</think>It is **blue**.", "done"),
        ]
        assert (conversation.system, conversation.model) == ("Be brief.", "tiny")


def test_answer_goes_on_without_its_reader_and_stops(talking: Running, script: Script) -> None:
    script.say("One. Two. Three.")
    script.hold(5)
    path, _ = begun(talking)
    item = ok(talking.request("POST", f"{path}/answers", {}))
    place = f"{path}/items/{item['id']}"
    wait_for(lambda: ok(talking.request("GET", place))["text"] == "One. ")
    script.release()  # nobody follows
    wait_for(lambda: ok(talking.request("GET", place))["state"] == "done")
    assert ok(talking.request("GET", place))["text"] == "One. Two. Three."
    assert talking.request("GET", f"{path}/answers/{item['id']}")[0] == 404


def endless(talking: Running, script: Script) -> tuple[str, str]:
    """The paths of a conversation and of an answer in it that has begun, and does not end."""
    script.say("On and on. ", ends=False)
    script.hold(30)
    path, _ = begun(talking)
    place = f"{path}/items/{ok(talking.request('POST', f'{path}/answers', {}))['id']}"
    wait_for(lambda: "On" in ok(talking.request("GET", place))["text"])
    return path, place


def test_stop(talking: Running, script: Script) -> None:
    _, place = endless(talking, script)
    assert ok(talking.request("POST", f"{place.replace('/items/', '/answers/')}/cancel"))["stopped"]
    script.release()
    wait_for(lambda: ok(talking.request("GET", place))["state"] == "cancelled")
    assert ok(talking.request("GET", place))["text"].startswith("On and on.")
    wait_for(talking.idle)


def test_deleting_stops_the_answer(talking: Running, script: Script) -> None:
    path, place = endless(talking, script)
    ok(talking.request("DELETE", path))
    script.release()
    wait_for(talking.idle)
    assert talking.request("GET", place)[0] == 404


def test_the_app_s_conversation(talking: Running, file: Path) -> None:
    """Branches, pictures, files and calls, as the terminal app has written them."""
    with History(file) as history:
        kept = history.new(model="other", options={"temperature": 0.5})
        first = kept.add("user", [{"type": "image", "image": picture(), "name": "a.png"}])
        call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        kept.add("assistant", "Let me see.", info={"tool_calls": [call]})
        kept.add("tool", "seen", info={"tool_call_id": "c1", "title": "s.f", "arguments": "{}"})
        kept.add("assistant", "Red.")
        text = "Read it: notes"
        kept.add("user", text, after=0, info={"folds": [[9, 14, "notes.txt, 3 lines"]]})
        path = f"/v1/conversations/{kept.id}"
    (item,) = ok(talking.request("GET", f"{path}/items"))["data"]
    assert item["folds"] == [[9, 14, "notes.txt, 3 lines"]]
    assert item["alternatives"] == [str(first.id), item["id"]]
    assert ok(talking.request("GET", path))["options"] == {"temperature": 0.5}
    ok(talking.request("POST", path, {"shown": str(first.id)}))
    found = ok(talking.request("GET", f"{path}/items"))["data"]
    assert [one["role"] for one in found] == ["user", "assistant", "tool", "assistant"]
    assert found[2]["text"] == "seen"
    assert [one.get("calls") for one in found] == [None, True, None, False]
    assert found[0]["pictures"] == [{"name": "a.png"}]
    whole = ok(talking.request("GET", f"{path}/items/{first.id}"))
    data = whole["pictures"][0]["url"].partition("base64,")[2]
    assert base64.b64decode(data) == picture()


def test_branch(talking: Running, script: Script, file: Path) -> None:
    path, asked = begun(talking, "One")
    script.say("A.")
    first = answered(talking, path)
    script.say("B.")
    second = answered(talking, path, after=asked)
    assert second["alternatives"] == [first["id"], second["id"]]
    data = base64.b64encode(picture()).decode()
    content = [{"url": f"data:image/png;base64,{data}", "name": "p.png"}, {"text": "Two: x"}]
    item = {"content": content, "folds": [[5, 6, "x, 1 B"]]}
    edited = ok(talking.request("POST", f"{path}/items", {**item, "after": ""}))
    assert len(edited["alternatives"]) == 2
    with History(file) as history:
        (turn,) = history.open(path.rpartition("/")[2]).turns
        assert (turn.content, turn.pictures[0].name) == ("Two: x", "p.png")
        assert turn.info["folds"] == [[5, 6, "x, 1 B"]]
    shown = ok(talking.request("GET", f"{path}/items?branch={first['id']}"))["data"]
    assert [one["id"] for one in shown] == [asked, first["id"]]


def test_options_are_the_conversation_s(talking: Running, script: Script) -> None:
    path, _ = begun(talking, options={"max_tokens": 4})
    found = answered(talking, path)
    assert found["text"] == "Hell"
    assert found["info"]["finish_reason"] == "length"


def items(running: Running, path: str) -> list[Any]:
    found: list[Any] = ok(running.request("GET", f"{path}/items"))["data"]
    return found


def test_failed_answer_says_why(talking: Running) -> None:
    path, _ = begun(talking, "x" * 5000)
    found = answered(talking, path)
    assert found["state"] == "failed"
    assert "maximum context length" in found["info"]["error"]
    assert [way[0] for way in found["info"]["ways"]] == ["new"]


def test_continue_edit_fork_remove(talking: Running, script: Script) -> None:
    path, asked = begun(talking, options={"max_tokens": 5})
    script.say("One. ", ends=False)
    cut = answered(talking, path)
    assert (cut["text"], cut["info"]["finish_reason"]) == ("One. ", "length")
    assert "ids" not in cut["info"]
    script.say("Two.")
    ok(talking.request("POST", path, {"options": {}}))
    whole = answered(talking, path, continued=cut["id"])
    assert (whole["id"], whole["text"]) == (cut["id"], "One. Two.")
    place = f"{path}/items/{cut['id']}"
    edited = ok(talking.request("POST", place, {"text": "Three."}))
    assert (edited["text"], edited["alternatives"]) == ("Three.", [cut["id"], edited["id"]])
    fork = ok(talking.request("POST", f"{place}/fork"))["id"]
    copied = items(talking, f"/v1/conversations/{fork}")
    assert [one["text"] for one in copied] == ["Hi", "One. Two."]
    ok(talking.request("DELETE", f"{path}/items/{edited['id']}"))
    assert [one["text"] for one in items(talking, path)] == ["Hi", "One. Two."]
    ok(talking.request("DELETE", f"{path}/items/{asked}"))
    assert items(talking, path) == []


def test_summary(talking: Running, script: Script) -> None:
    path, _ = begun(talking, "x" * 3000)
    answered(talking, path)
    message = {"content": [{"text": "y" * 2000}]}
    asked = ok(talking.request("POST", f"{path}/items", message))["id"]
    full = answered(talking, path)
    assert [way[0] for way in full["info"]["ways"]] == ["oldest", "summary", "new"]
    script.say("There were many x.")
    summary = answered(talking, path, after=asked, summary=True)
    assert (summary["text"], summary["info"]["summary"]) == ("There were many x.", True)
    wait_for(lambda: items(talking, path)[-1]["state"] == "done")
    request, *rest = items(talking, path)
    assert "Summarize" in request["text"]
    assert [one["text"][:9] for one in rest] == ["There wer", "y" * 9, "There wer"]


def test_temporary(
    talking: Running, script: Script, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    submit = LiveModel.submit

    def watched(self: LiveModel, *args: Any, **options: Any) -> Any:
        asked.append(options.get("private"))
        return submit(self, *args, **options)

    monkeypatch.setattr(LiveModel, "submit", watched)
    path, _ = begun(talking, "A secret", temporary=True)
    assert answered(talking, path)["text"] == "Hello there."
    assert ok(talking.request("GET", path))["temporary"]
    assert (asked, ok(talking.request("GET", "/v1/conversations"))["data"]) == ([True], [])
    assert b"secret" not in b"".join(each.read_bytes() for each in file.parent.glob("history*"))
    ok(talking.request("DELETE", path))
    assert talking.request("GET", path)[0] == 404


def test_pin_and_draft(talking: Running) -> None:
    path, _ = begun(talking)
    begun(talking, "Later")
    ok(talking.request("POST", path, {"pinned": True, "draft": "What if"}))
    found = ok(talking.request("GET", path))
    assert (found["draft"], found["temporary"]) == ("What if", False)
    listed = ok(talking.request("GET", "/v1/conversations"))["data"]
    assert [(one["title"], one["pinned"]) for one in listed] == [("Hi", True), ("Later", False)]


def test_longer_context(tmp_path: Path) -> None:
    """A model of several is loaded again, with the context that its user chose."""
    folder = write_tiny_model(tmp_path)
    files = [LocalFile("tiny", "tiny", 1 << 20, folder)]
    load = lambda *_, ctx=64: localrt.load(folder, ctx=ctx)  # noqa: E731
    pool = ModelPool(load, lambda: files, ServeOptions())
    with serving(pool, history=":memory:") as running:
        path, asked = begun(running, "x" * 150, options={"max_tokens": 2})
        full = answered(running, path)
        ((name, label, ctx), (new, *_)) = full["info"]["ways"]
        assert (name, new, "more" in label) == ("longer", "new", True)
        assert answered(running, path, after=asked, ctx=ctx)["state"] == "done"
        (entry,) = pool.offered()
        assert entry.ctx == ctx


def test_export_and_import(talking: Running, script: Script) -> None:
    path, _ = begun(talking, title="Rivers", instructions="Be brief.")
    answered(talking, path)
    status, text, _ = talking.request("GET", f"{path}/export?form=md")
    assert status == 200
    assert all(part in text for part in ("# Rivers", "## You\n\nHi", "Hello there."))
    saved = json.dumps(ok(talking.request("GET", f"{path}/export?form=json"))).encode()
    data = base64.b64encode(saved).decode()
    given = {"filename": "../a b.json", "file_data": f"data:application/json;base64,{data}"}
    found = ok(talking.request("POST", "/v1/conversations/import", given))
    (copy,) = found["data"]
    texts = [one["text"] for one in items(talking, f"/v1/conversations/{copy['id']}")]
    assert (texts, found["left_out"]) == (["Hi", "Hello there."], [])


def test_settings(talker: localrt.Model, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('system = "Be kind."\n[generation]\ntop_k = 3\n')
    with serving(talker, history=":memory:", config_dir=tmp_path) as running:
        given = {"name": "Short", "instructions": "Be brief.", "options": {"top_p": 0.5}}
        PresetsFile(tmp_path).save(Preset("Short", "Be brief.", {"top_p": 0.5}))
        found = ok(running.request("GET", "/v1/presets"))
        own = {"name": "Long", "instructions": None, "options": {"max_tokens": 900}}
        sent = {**own, "options": {**own["options"], "top_k": None}}
        ok(running.request("POST", "/v1/presets", sent))
        assert own in ok(running.request("GET", "/v1/presets"))["data"]
        status, refused, _ = running.request("POST", "/v1/presets", {"name": "a", "options": {}})
        assert (status, "nothing to save" in refused["error"]["message"]) == (400, True)
        assert found == {
            "data": [given],
            "default": {"instructions": "Be kind.", "options": {"top_k": 3}},
        }
        status, refused, _ = running.request("POST", "/v1/options", {"options": {"top_p": 7}})
        assert (status, "top_p" in refused["error"]["message"]) == (400, True)
        found = ok(running.request("GET", "/v1/options"))
        several = ok(running.request("GET", "/v1/recommended"))["several"]
    assert {one["name"] for one in found["data"]} == OPTION_HELP.keys() - {"adapter"}
    assert several is False


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "said"),
    [
        ("POST", "/v1/documents", {"filename": "a.pdf", "file_data": "AAAA"}, 400, "not a PDF"),
        ("GET", "/v1/conversations/none", None, 404, "no conversation 'none'"),
        ("GET", "{path}/items/%C2%B2", None, 404, "no item"),
        ("POST", "{path}", {"options": {"temprature": 1}}, 400, "temperature"),
        ("POST", "{path}/items", {"content": [{}]}, 400, "parts"),
        ("POST", "{path}/items", {"content": [{"url": "/etc/passwd"}]}, 400, "data URIs"),
        ("GET", "{path}/answers/1", None, 404, "no answer"),
        ("POST", "{path}/answers", {"continued": "{item}"}, 400, "only an answer"),
        ("POST", "{path}/items/{item}", {"text": "x"}, 400, "only an answer"),
        ("DELETE", "{path}/items/9", None, 404, "no item"),
        ("POST", "{path}/items/9/fork", None, 404, "no item"),
        ("POST", "/v1/conversations/import", {"filename": "a", "file_data": "e30="}, 400, ""),
    ],
)
def test_refused(
    talking: Running, method: str, path: str, body: Any, status: int, said: str
) -> None:
    there, item = begun(talking)
    if body == {"continued": "{item}"}:
        body = {"continued": item}
    found = talking.request(method, path.format(path=there, item=item), body)
    assert (found[0], said in json.dumps(found[1])) == (status, True), found


def test_pictures_for_a_blind_model(talking: Running) -> None:
    path, _ = begun(talking)
    url = f"data:image/png;base64,{base64.b64encode(picture()).decode()}"
    ok(talking.request("POST", f"{path}/items", {"content": [{"url": url}]}))
    status, body, _ = talking.request("POST", f"{path}/answers", {})
    assert (status, body["error"]["message"][:24]) == (400, "tiny cannot see pictures")


# -- who may -------------------------------------------------------------------------------------


CALL = "/v1/conversations/1/answers/1"
KEYED = {"api_key": "own"}


@pytest.mark.parametrize(
    ("options", "headers", "status"),
    [
        ({}, {"Origin": "http://127.0.0.1:{port}"}, 200),
        ({"origins": ("*",)}, {"Origin": "https://elsewhere.example"}, 403),
        (KEYED, {}, 401),
        (KEYED, {"Authorization": "Bearer own"}, 200),
        ({"host": "0.0.0.0"}, {}, 403),
        ({"host": "0.0.0.0", **KEYED}, {"Authorization": "Bearer own"}, 403),
        ({"host": "0.0.0.0", **KEYED, "conversations": True}, {"x-api-key": "own"}, 200),
    ],
)
def test_who_may(talker: localrt.Model, options: Any, headers: dict[str, str], status: int) -> None:
    with serving(talker, history=":memory:", **options) as running:
        sent = {name: value.format(port=running.port) for name, value in headers.items()}
        assert running.request("GET", "/v1/conversations", headers=sent)[0] == status
        assert running.request("GET", "/", headers={"Accept": "text/html"})[0] == 200
        for path, body in (("/v1/tools", None), (f"{CALL}/decision", {"decision": "once"})):
            allowed = status if "api_key" in options or sys.platform == "linux" else 403
            assert running.request("POST", path, body, sent)[0] == allowed


OTHER_USER = 65534
ASK = f"""
import encodings.idna, http.client, json, os, sys
port, *asked = sys.argv[1:]
os.setgroups([])
os.setgid({OTHER_USER})
os.setuid({OTHER_USER})  # once all is read that this user may not read
connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
for each in asked:
    connection.request(*each.split(), b"{{}}")
    answer = connection.getresponse()
    print(json.dumps([answer.status, json.loads(answer.read())]))
"""
OPEN = "GET /v1/models"
PRIVATE = [
    *("GET /v1/conversations", "POST /v1/conversations", f"GET {CALL}", f"POST {CALL}/cancel"),
    *(f"POST {CALL}/decision", "POST /v1/documents", "POST /v1/tools"),
    *(f"{method} /v1/conversations/1/items/1" for method in ("POST", "DELETE")),
    *("POST /v1/conversations/1/items/1/fork", "GET /v1/conversations/1/export"),
    *("POST /v1/conversations/import", "GET /v1/presets", "GET /v1/options", "GET /v1/recommended"),
]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is")
def test_other_users(talker: localrt.Model) -> None:
    """Without a key, other users of this machine have no part in its owner's conversations."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with serving(talker, history=":memory:") as running:
        command = [sys.executable, "-I", "-S", "-c", ASK, str(running.port), *PRIVATE, OPEN]
        child = subprocess.run(command, capture_output=True, timeout=120, check=True)
    *private, (status, _) = [json.loads(line) for line in child.stdout.splitlines()]
    assert [found for found, _ in private] == [403] * len(PRIVATE)
    said = "without a key, conversations are for the user who runs the server"
    assert all(said in json.dumps(body) for _, body in private)
    assert status == 200


def test_open_to_all_is_refused() -> None:
    with pytest.raises(OptionError, match="needs a key"):
        ServeOptions(host="0.0.0.0", conversations=True)


# -- the page --------------------------------------------------------------------------------------


def test_page_and_what_others_find_there(talking: Running) -> None:
    status, text, headers = talking.request("GET", "/", headers={"Accept": "text/html,*/*"})
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert text.count("<script>") == text.count("<style>") == 1
    assert not re.search(r"<[^>]*\s(style|on\w+)=", text.partition("<script>")[0])
    assert not re.search(r"""["'`(]/v1|(src|href|action)=["']?/""", text), "not relative"
    assert talking.request("GET", "/")[1] == "localrt is running"
