"""Multimodal inputs of requests: pictures in base64 for vision models, placeholders for others.
Documents are read as text, and their pages without text as pictures.

The media type that clients state for a picture is ignored: the library inspects the bytes.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from localrt.common.errors import OptionError
from localrt.documents.reading import Document, DocumentCache
from localrt.server.errors import invalid
from localrt.server.messages import DOCUMENT, Media, MultimodalContent, Pieces
from localrt.server.service import Service
from localrt.service.live import run_to_end

Prompt = Mapping[str, Any]

_MOST = 64  # pictures per request
_PICTURES = ("image", "screenshot")
_MOST_HEAD = 256  # characters of a data URI before its data
_BLANKS = b" \t\r\n"


@asynccontextmanager
async def with_pictures(
    prompts: Sequence[Prompt], service: Service, *, sees: bool
) -> AsyncIterator[Sequence[Prompt]]:
    """Yield the prompts of a ``GenerationRequest`` in the library's form, with the bytes of
    pictures. A model without vision gets text placeholders.

    Raises:
        ApiError: 400, one cannot be read.
    """
    documents = [each for each in _media(prompts) if each.kind == DOCUMENT]
    if documents:
        async with service.seeing:
            kept = service.documents
            read = await run_to_end(lambda: [_read(one, kept, sees) for one in documents])
        texts = dict(zip(map(id, documents), read, strict=True))

        def with_texts(content: MultimodalContent) -> MultimodalContent:
            pieces = [texts.get(id(piece), [piece]) for piece in content.pieces]
            return MultimodalContent([each for one in pieces for each in one], content.between)

        prompts = [_shown(prompt, with_texts) for prompt in prompts]
    media = _media(prompts)
    if not media:
        yield list(map(in_words, prompts))
        return
    if not sees:
        for kind in {one.kind for one in media}:
            why = "the model reads text only, and is shown words in its place"
            service.note_once(f"content {kind}", f"messages hold {kind}: {why}")
        yield list(map(in_words, prompts))
        return
    sources = _sources(prompts, media)
    async with service.seeing:
        decoded: list[bytes] = []  # not the task's result: its reference cycle would live on
        await run_to_end(lambda: decoded.extend(one.decoded() for one in sources))
        pictures = iter(decoded)
        yield [_shown(prompt, lambda one: _parts(one, pictures)) for prompt in prompts]


def in_words(prompt: Prompt) -> Prompt:
    """Return the prompt for a text-only model."""
    return _shown(prompt, MultimodalContent.in_words)


def _media(prompts: Sequence[Prompt]) -> list[Media]:
    found: list[Media] = []
    for prompt in prompts:
        given = prompt.get("prompt")
        contents = [each["content"] for each in given] if isinstance(given, list) else [given]
        mixed = (content for content in contents if isinstance(content, MultimodalContent))
        found += [piece for one in mixed for piece in one.pieces if isinstance(piece, Media)]
    return found


def document_of(
    data: str, cache: DocumentCache, *, name: str, media_type: str, pictures: bool
) -> tuple[Document, list[str]]:
    """Return a file that is sent in base64 as text, and its pages without text in base64.

    Raises:
        ApiError: 400, it is not base64.
        OptionError: it cannot be read.
    """
    content = _MediaSource(name, data, 0).decoded()
    read = cache.read(content, name=name, media_type=media_type, pictures=pictures)
    return read, [base64.b64encode(page.picture).decode("ascii") for page in read.pictures]


def _read(document: Media, cache: DocumentCache, sees: bool) -> Pieces:
    """Return the text of a document and its pages without text as pictures, or what is wrong."""
    try:
        read, pictures = document_of(**document.part, cache=cache, pictures=sees)
    except OptionError as error:
        return [f"[document left out: {error}]"]
    return [read.text, *(Media("image", {"data": each}, "") for each in pictures)]


def _shown(prompt: Prompt, show: Callable[[MultimodalContent], object]) -> Prompt:
    """Return the prompt with ``show`` of each content that has media."""

    def shown(content: object) -> Any:
        return show(content) if isinstance(content, MultimodalContent) else content

    given = prompt.get("prompt")
    if isinstance(given, list):
        given = [{**message, "content": shown(message["content"])} for message in given]
    return {**prompt, "prompt": shown(given)} if "prompt" in prompt else prompt


def _parts(content: MultimodalContent, pictures: Iterator[bytes]) -> list[dict[str, Any]]:
    """Return a content in the form of chat templates, taking the next of ``pictures``."""
    parts: list[dict[str, Any]] = []
    for piece in content.pieces:
        if isinstance(piece, Media):
            parts.append({"type": "image", "image": next(pictures)})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += f"{content.between}{piece}"
        else:
            parts.append({"type": "text", "text": piece})
    return parts


# -- sources of pictures
# ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _MediaSource:
    """The base64 of a picture, called ``name`` in messages: ``text`` from index ``start`` on."""

    name: str
    text: str
    start: int

    def decoded(self) -> bytes:
        """Return the bytes in base64.

        Raises:
            ApiError: 400, it is not base64, or there are none.
        """
        try:
            data = memoryview(self.text.encode("ascii"))[self.start :]
            try:
                found = binascii.a2b_base64(data, strict_mode=True)
            except ValueError:  # base64 with line breaks, as written by many programs
                lines = bytes(data).translate(None, _BLANKS)
                found = binascii.a2b_base64(lines, strict_mode=True)
        except ValueError as error:
            raise invalid(f"{self.name} is not valid base64") from error
        if not found:
            raise invalid(f"{self.name} is empty")
        return found


def _sources(prompts: Sequence[Prompt], media: Sequence[Media]) -> list[_MediaSource]:
    """Return the sources of all pictures.

    Raises:
        ApiError: 400, there are too many, or not all are pictures.
    """
    for one in media:
        if one.kind not in _PICTURES:
            raise invalid(f"the model takes no {one.kind}: send text and pictures")
    if len(media) > _MOST:
        raise invalid(f"the request has {len(media)} pictures: the most is {_MOST}")
    if any(isinstance(prompt.get("prompt"), MultimodalContent) for prompt in prompts):
        raise invalid("pictures need a chat template: leave out raw and suffix", "images")
    return [_source(one.part, f"picture {number}") for number, one in enumerate(media, 1)]


def _source(part: Mapping[str, object], name: str) -> _MediaSource:
    given = next((part[key] for key in ("image_url", "source") if part.get(key)), part)
    if isinstance(given, Mapping):
        data = given.get("data")
        if isinstance(data, str) and not data.startswith("data:"):
            return _MediaSource(name, data, 0)
        if given.get("file_id"):
            raise invalid(f"{name} is a file_id, and there are no files here: send its data")
        given = data or given.get("url")
    if isinstance(given, str):
        end = given.find(",", 0, _MOST_HEAD)
        head = given[: max(end, 8)].lower()
        if head.startswith("data:") and head.endswith(";base64"):
            return _MediaSource(name, given, end + 1)
        if head.startswith(("http://", "https://")):
            raise invalid(f"{name} is a URL: send the picture's bytes as a data: URL")
    raise invalid(f"{name} must be in base64 (data:image/png;base64,...)")
