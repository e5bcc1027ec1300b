"""Pictures in every protocol: what the model is given of them, and what is refused."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from PIL import Image

import localrt
from localrt.documents import reading
from localrt.documents.reading import read_document
from tests.documents.samples import RED as RED_PAGE
from tests.documents.samples import WORD, pdf
from tests.server.conftest import Running, serving
from tests.server.dialects import BODIES, data_uri, events_in


def png(colour: str = "red") -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (8, 6), colour).save(made, "PNG")
    return made.getvalue()


RED, BLUE = png("red"), png("blue")
RED64, BLUE64 = (base64.b64encode(each).decode() for each in (RED, BLUE))


@pytest.fixture(scope="module")
def _seeing(model: localrt.Model) -> Iterator[Any]:
    """A server whose model is told that it sees, and the prompts that it was given."""
    with serving(model, name="tiny", max_body=1 << 20) as running:
        (served,) = running.service.models.at_work()
        served.sees = True
        submit = served.live.asubmit
        prompts: list[Any] = []

        async def asubmit(prompt: Any = None, **options: Any) -> Any:
            prompts.append(prompt)
            return await submit("hi", **options)

        served.live.asubmit = asubmit  # type: ignore[method-assign]
        yield running, prompts


@pytest.fixture
def seeing(_seeing: Any) -> tuple[Running, list[Any]]:
    running, prompts = _seeing
    prompts.clear()
    return running, prompts


def given(prompts: list[Any]) -> list[Any]:
    """The one content with pictures, as pairs of a type and what it has."""
    (prompt,) = prompts
    (content,) = [each["content"] for each in prompt if isinstance(each["content"], list)]
    return [(part["type"], part[part["type"]]) for part in content]


def test_model_that_reads_text_only(server: Running) -> None:
    server.service._noted.clear()
    picture, text = source_of(RED), {"type": "text", "text": "hi"}
    for asked, between in ((in_chat, "\n"), (in_messages, "\n\n")):
        _, got, _ = ask(server, asked(picture, text), temperature=0, max_tokens=4)
        words = [{"role": "user", "content": f"[image left out]{between}hi"}]
        expected = server.model.generate(words, temperature=0, max_tokens=4).text
        assert json.dumps(expected) in json.dumps(got)
    why = "the model reads text only, and is shown words in its place"
    assert f"messages hold image: {why}" in server.notes


# -- a model that sees ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tiny random model that sees, after one that does not."""
    from tests.models.vision.tiny import qwen_folder

    folder = qwen_folder(tmp_path_factory.mktemp("seer") / "qwen")
    with localrt.load(folder, draft="off", ctx=2048) as model:
        model.defaults.update(max_tokens=6, ignore_eos=True)
        with serving(model, name="seer") as running:
            yield running


def noise(seed: int) -> bytes:
    made = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (60, 90, 3), np.uint8)
    Image.fromarray(pixels).save(made, "PNG")
    return made.getvalue()


@pytest.mark.slow
def test_model_that_sees(seer: Running) -> None:
    pictures = [noise(1), noise(2)]
    expected = seer.model.generate("what is this", images=pictures, temperature=0)
    parts = [*map(source_of, pictures), {"type": "text", "text": "what is this"}]
    for stream in (False, True):
        _, got, _ = ask(seer, in_chat(*parts), temperature=0, stream=stream)
        choices = [one["choices"][0] for one in (events_in(got) if stream else [got])]
        said = [choice["delta" if stream else "message"].get("content") for choice in choices]
        assert "".join(filter(None, said)) == expected.text
    assert expected.metrics.prompt_tokens > 20


@pytest.mark.slow
def test_counted_tokens(seer: Running) -> None:
    asked = in_messages(source_of(noise(3)), TEXT)
    usage = ask(seer, asked)[1]["usage"]
    counting = ("POST", "/v1/messages/count_tokens", {"model": "seer", **asked[1]})
    _, counted, _ = seer.request(*counting)
    assert counted["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.slow
def test_bytes_that_are_no_picture(seer: Running) -> None:
    for picture, why in (
        (b"GIF of nothing", "not a PNG, JPEG, WebP or GIF"),
        (noise(6)[:2000], "damaged"),
    ):
        status, got, _ = ask(seer, in_chat(source_of(picture)))
        assert (status, why in got["error"]["message"]) == (400, True), got


@pytest.mark.slow
def test_what_is_told_of_a_model(seer: Running, server: Running) -> None:
    for running, sees in ((seer, True), (server, False)):
        name = running.name
        listed = running.request("GET", "/v1/models")[1]["data"][0]
        assert ("vision" in listed["capabilities"]) is sees
        props = running.request("GET", "/props")[1]
        assert props["modalities"] == {"vision": sees, "audio": False}
        shown = running.request("POST", "/api/show", {"model": name})[1]
        assert ("vision" in shown["capabilities"]) is sees


# -- forms of parts --------------------------------------------------------------------------------


def in_chat(*parts: Any) -> tuple[str, Any]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": list(parts)}]}


def in_responses(*parts: Any) -> tuple[str, Any]:
    return "/v1/responses", {"input": [{"role": "user", "content": list(parts)}]}


def in_messages(*parts: Any) -> tuple[str, Any]:
    return "/v1/messages", {"messages": [{"role": "user", "content": list(parts)}]}


def in_ollama(*images: Any) -> tuple[str, Any]:
    return "/api/chat", {"messages": [{"role": "user", "content": "hi", "images": list(images)}]}


def in_generate(*images: Any, **fields: Any) -> tuple[str, Any]:
    return "/api/generate", {"images": list(images), **fields}


def source(data: Any, **fields: Any) -> dict[str, Any]:
    return {
        "type": "image",
        "source": {"type": "base64", "media_type": "image/png", "data": data, **fields},
    }


def source_of(picture: bytes) -> dict[str, Any]:
    return source(base64.b64encode(picture).decode())


def looked(*content: Any) -> dict[str, Any]:
    """The result of ``CALL``."""
    shown = {"type": "tool_result", "tool_use_id": "c", "content": list(content)}
    return {"role": "user", "content": [shown]}


def image_url(data: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_uri(data)}}


TEXT = {"type": "text", "text": "a"}


def document(data: str, media_type: str = "application/pdf", **fields: Any) -> dict[str, Any]:
    given = {"type": "base64", "media_type": media_type, "data": data}
    return {"type": "document", "title": "r.pdf", "source": given, **fields}


def file(data: str, name: str = "r.pdf") -> dict[str, Any]:
    return {"type": "file", "file": {"filename": name, "file_data": data}}


def input_file(data: str) -> dict[str, Any]:
    return {"type": "input_file", "filename": "r.pdf", "file_data": data}


PDF64 = base64.b64encode(pdf("One", RED_PAGE)).decode()
PDF_FILE = file(f"data:application/pdf;base64,{PDF64}")
CALL = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look"}]},
]


def ask(server: Running, asked: tuple[str, Any], **fields: Any) -> tuple[int, Any, dict[str, str]]:
    path, body = asked
    return server.request("POST", path, {**BODIES[path], **body, **fields})


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (in_chat({"type": "image_url", "image_url": data_uri(RED64)}), [("image", RED)]),
        (in_chat(image_url(RED64)), [("image", RED)]),
        (
            in_chat(TEXT, TEXT, {"type": "image_url", "image_url": data_uri(RED64)}, TEXT),
            [("text", "a\na"), ("image", RED), ("text", "a")],
        ),
        (in_chat({"type": "image", "data": RED64, "mimeType": "image/png"}), [("image", RED)]),
        (in_responses({"type": "input_image", "image_url": data_uri(RED64)}), [("image", RED)]),
        (in_messages(source(RED64)), [("image", RED)]),
        (
            ("/v1/messages", {"messages": [*CALL, looked(TEXT, source(RED64), source(BLUE64))]}),
            [("text", "a"), ("image", RED), ("image", BLUE)],
        ),
        (
            (
                "/v1/responses",
                {
                    "input": [
                        {"type": "function_call", "call_id": "c", "name": "look"},
                        {
                            "type": "function_call_output",
                            "call_id": "c",
                            "output": [{"type": "input_image", "image_url": data_uri(RED64)}],
                        },
                    ]
                },
            ),
            [("image", RED)],
        ),
        (in_ollama(RED64, BLUE64), [("image", RED), ("image", BLUE), ("text", "hi")]),
        (in_generate(RED64), [("image", RED), ("text", "hi")]),
    ],
)
def test_forms(seeing: Any, asked: tuple[str, Any], expected: Any) -> None:
    server, prompts = seeing
    status, got, _ = ask(server, asked)
    assert status == 200, got
    assert given(prompts) == expected


@pytest.mark.parametrize(
    "asked",
    [
        in_chat(PDF_FILE, TEXT),
        ("/v1/messages", {"messages": [*CALL, looked(document(PDF64), TEXT)]}),
    ],
)
def test_pages_without_text(seeing: Any, asked: tuple[str, Any]) -> None:
    server, prompts = seeing
    status, got, _ = ask(server, asked)
    assert status == 200, got
    (kind, text), (picture, data), after = given(prompts)
    assert (kind, picture, after) == ("text", "image", ("text", "a"))
    assert text == read_document(pdf("One", RED_PAGE), name="r.pdf", pictures=True).text
    assert Image.open(io.BytesIO(data)).size == (1536, 768)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (file(base64.b64encode(WORD).decode(), "a.docx"), "a.docx:\n```\n## Plan\n\nFish & chips"),
        (document(PDF64, title=None), "the document:\n```\n[page 1]\nOne"),
        (file("data:application/pdf;base64,JVBE"), "[document left out: r.pdf is not a PDF file"),
    ],
)
def test_kinds_of_documents(seeing: Any, part: Any, text: str) -> None:
    server, prompts = seeing
    status, got, _ = ask(server, in_chat(part))
    assert status == 200, got
    assert text in str(prompts[0][0]["content"]).replace("\\n", "\n")


def test_a_document_that_comes_again_is_not_read_again(
    seeing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, prompts = seeing
    asked: list[bytes] = []

    def counted(source: bytes, **how: Any) -> Any:
        asked.append(source)
        return read_document(source, **how)

    monkeypatch.setattr(reading, "read_document", counted)
    data = pdf("Read once")
    for _ in range(3):
        part = file(base64.b64encode(data).decode(), "once.pdf")
        assert ask(server, in_chat(part))[0] == 200
    assert asked == [data]
    assert all("[page 1]\nRead once" in str(each).replace("\\n", "\n") for each in prompts)


def test_stored_response_keeps_its_picture(seeing: Any) -> None:
    server, prompts = seeing
    _, first, _ = ask(server, in_responses({"type": "input_image", "image_url": data_uri(RED64)}))
    prompts.clear()
    body = {"input": "And now?", "previous_response_id": first["id"]}
    assert ask(server, ("/v1/responses", body))[0] == 200
    assert given(prompts) == [("image", RED)]


# -- what is refused -------------------------------------------------------------------------------

URL = "http://127.0.0.1/a.png"
REFUSED: list[tuple[tuple[str, Any], str]] = [
    (in_chat({"type": "image_url", "image_url": data_uri("!!!")}), "picture 1 is not valid base64"),
    (in_chat({"type": "image_url", "image_url": data_uri("")}), "picture 1 is empty"),
    (in_chat({"type": "image_url"}), "picture 1 must be in base64"),
    (in_chat({"type": "image_url", "image_url": {"url": URL}}), "data: URL"),
    (in_chat({"type": "image_url", "image_url": "/etc/passwd"}), "must be in base64"),
    (
        in_chat(*[{"type": "image_url", "image_url": data_uri(RED64)}] * 65),
        "the request has 65 pictures: the most is 64",
    ),
    (in_chat({"type": "input_audio", "input_audio": {"data": "AAAA"}}), "takes no audio"),
    (in_responses({"type": "input_image", "file_id": "file-1"}), "picture 1 is a file_id"),
    (in_messages(source(RED64), source("@@")), "picture 2 is not valid base64"),
    (in_messages(source(None, type="url", url=URL)), "data: URL"),
    (in_ollama("@@"), "picture 1 is not valid base64"),
    (in_responses(input_file("@@")), "r.pdf is not valid base64"),
    (in_generate(RED64, raw=True), "leave out raw and suffix"),
]


@pytest.mark.parametrize(("asked", "why"), REFUSED)
def test_refused(seeing: Any, asked: tuple[str, Any], why: str) -> None:
    server, prompts = seeing
    for stream in (False, True):
        status, got, _ = ask(server, asked, stream=stream)
        assert status == 400, got
        message = got["error"] if asked[0].startswith("/api/") else got["error"]["message"]
        assert why in message
        assert "\n" not in message
    assert not prompts


@pytest.mark.parametrize("asked", [in_chat(), in_messages()])
def test_body_that_is_too_large(seeing: Any, asked: tuple[str, Any]) -> None:
    server, _ = seeing
    status, got, _ = ask(server, asked, padding="A" * (1 << 20))
    assert status == 413
    assert "--max-body" in str(got["error"])
    if asked[0] == "/v1/messages":
        assert got["error"]["type"] == "request_too_large"
