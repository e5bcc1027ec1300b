"""Pictures in prompts and conversations, through the public API, on a tiny random model."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import localrt
from tests.inside import core_of, engine_of

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}


def photo(seed: int, size: tuple[int, int] = (120, 200), kind: str = "PNG") -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 255, (*size, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def asked(*parts: Any) -> list[dict[str, Any]]:
    def shown(part: Any) -> dict[str, Any]:
        kind = "text" if isinstance(part, str) else "image"
        return {"type": kind, kind: part}

    return [{"role": "user", "content": [shown(part) for part in parts]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models.vision.tiny import qwen_folder

    return qwen_folder(tmp_path_factory.mktemp("eyes") / "qwen")


@pytest.fixture(scope="module")
def seeing(folder: Path) -> Iterator[localrt.Model]:
    with localrt.load(str(folder), device="cpu", ctx=2048) as model:
        yield model


def test_a_picture_is_part_of_a_message(seeing: localrt.Model, tmp_path: Path) -> None:
    assert seeing.info.sees
    one = seeing.generate(asked(photo(0), "what is this"), logprobs=1, **GREEDY)
    other = seeing.generate(asked(photo(1), "what is this"), logprobs=1, **GREEDY)
    assert one.logprobs[0].logprob != other.logprobs[0].logprob
    (tmp_path / "a.png").write_bytes(photo(0))
    opened = Image.open(tmp_path / "a.png")
    for given in (tmp_path / "a.png", str(tmp_path / "a.png"), opened, photo(0)):
        assert seeing.generate("what is this", images=[given], **GREEDY).text == one.text
    for given in (tmp_path / "a.png", str(tmp_path / "a.png"), photo(0)):
        assert seeing.generate("what is this", images=given, **GREEDY).text == one.text


def test_prefixes_compare_pictures(seeing: localrt.Model) -> None:
    first = seeing.generate(asked("at first ", photo(2), "what is this"), **GREEDY)
    size = first.metrics.prompt_tokens
    again = seeing.generate(asked("at first ", photo(2), "what is this"), **GREEDY)
    assert again.metrics.cached_tokens == size - 1
    assert again.token_ids == first.token_ids
    other = seeing.generate(asked("at first ", photo(3), "what is this"), **GREEDY)
    assert other.metrics.prompt_tokens == size
    assert other.metrics.cached_tokens < 20  # what comes before the picture


def test_bits_do_not_depend_on_passes(seeing: localrt.Model) -> None:
    prompts = [
        asked(photo(4), "what is this", photo(5, (70, 300))),
        asked("hello world"),
        asked("hello ", photo(6, (300, 40)), photo(4), "world"),
    ]
    alone = [seeing.generate(prompt, **GREEDY).token_ids for prompt in prompts]
    found: dict[int, list[int]] = {}
    for index, chunk in seeing.stream_batch(prompts, batch_size=3, **GREEDY):
        found.setdefault(index, []).extend(chunk.token_ids)
    assert [tuple(found[index]) for index in range(3)] == alone
    engine = engine_of(seeing)
    rows, engine.pass_rows = engine.pass_rows, 7
    try:
        for prompt, ids in zip(prompts, alone, strict=True):
            core_of(seeing).free_idle()
            assert seeing.generate(prompt, **GREEDY).token_ids == ids
    finally:
        engine.pass_rows = rows


def test_drafts_behind_a_picture(seeing: localrt.Model) -> None:
    prompt = asked(photo(7), "one two one two one two one")
    options = {**GREEDY, "max_tokens": 24, "logprobs": 1}
    plain = seeing.generate(prompt, draft="off", **options)
    drafted = seeing.generate(prompt, draft="ngram", tree_budget=8, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.logprobs == plain.logprobs
    assert drafted.metrics.accepted_by_source


def test_conversations_keep_pictures(seeing: localrt.Model, tmp_path: Path) -> None:
    chat = seeing.chat(**GREEDY)
    first = chat.send("what is this", images=[photo(8)])
    second = chat.send("and now")
    # The answer's tokens may spell otherwise when they are read again.
    assert second.metrics.cached_tokens >= first.metrics.prompt_tokens
    chat.save(tmp_path / "chat.json")
    loaded = seeing.load_chat(tmp_path / "chat.json")
    assert loaded.send("again").text == chat.send("again").text


REFUSED = {
    "not a picture": (b"GIF of nothing", "not a PNG, JPEG, WebP or GIF"),
    "cut off": (photo(0)[:2000], "damaged"),
    "a file that is not there": ("/nowhere/a.png", "does not exist"),
    "a number": (5, "must be a path, bytes or a PIL image"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_pictures_are_refused(seeing: localrt.Model, name: str) -> None:
    given, words = REFUSED[name]
    with pytest.raises(localrt.OptionError, match=words):
        seeing.generate("what is this", images=[given], **GREEDY)


def test_bombs_are_refused_unread(seeing: localrt.Model) -> None:
    file = io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(file, "PNG")
    with pytest.raises(localrt.OptionError, match="pixels: the most is 64 million"):
        seeing.generate("what is this", images=[file.getvalue()], **GREEDY)


@pytest.mark.parametrize(
    ("kind", "words"),
    [("image_url", r"a picture \(image_url\)"), ("input_audio", "a sound"), ("file", "a file")],
)
def test_a_model_that_reads_text_only(tiny: localrt.Model, kind: str, words: str) -> None:
    assert not tiny.info.sees
    parts = [{"type": "text", "text": "What is it?"}, {"type": kind, kind: {}}]
    messages = [{"role": "system", "content": "Look."}, {"role": "user", "content": parts}]
    with pytest.raises(localrt.OptionError, match=f"^message 2 has {words}.*reads text only"):
        tiny.generate(messages, **GREEDY)
