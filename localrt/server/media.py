"""Pictures in requests, from base64 or URLs, for vision models; text placeholders for other models.
Documents are read as text, and their pages without text as pictures.

The media type that clients state for a picture is ignored: the library inspects the bytes.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from localrt.common.errors import OptionError
from localrt.documents.reading import Document, DocumentCache
from localrt.models.vision.picture import MOST_BYTES
from localrt.server.errors import invalid
from localrt.server.messages import DOCUMENT, Media, Mixed, Pieces
from localrt.server.service import Service
from localrt.service.live import run_to_end

Prompt = Mapping[str, Any]

_MOST = 64  # pictures per request
_FETCH_S = 30.0  # seconds for all pictures of a request
_PICTURES = ("image", "screenshot")
_MOST_HEAD = 256  # characters of a data URI before its data
_BLANKS = b" \t\r\n"


@asynccontextmanager
async def with_pictures(
    prompts: Sequence[Prompt], service: Service, *, sees: bool
) -> AsyncIterator[Sequence[Prompt]]:
    """Yield the prompts of a ``Generation`` in the library's form, with the bytes of pictures,
    which count as taken until the block ends. A model without vision gets text placeholders.

    Raises:
        ApiError: 400, one cannot be read or may not be fetched; 503, there is no room.
    """
    documents = [each for each in _media(prompts) if each.kind == DOCUMENT]
    if documents:
        async with service.seeing:
            kept = service.documents
            read = await run_to_end(lambda: [_read(one, kept, sees) for one in documents])
        texts = dict(zip(map(id, documents), read, strict=True))

        def with_texts(content: Mixed) -> Mixed:
            pieces = [texts.get(id(piece), [piece]) for piece in content.pieces]
            return Mixed([each for one in pieces for each in one], content.between)

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
    taken = 0

    def take(nbytes: int) -> None:
        nonlocal taken
        service.bodies.take(nbytes)
        taken += nbytes

    try:
        fetched = await _fetched(sources, service, take)
        async with service.seeing:
            decoded: list[bytes] = []  # not the task's result: its reference cycle would live on
            await run_to_end(lambda: decoded.extend(_decoded(sources, fetched)))
            pictures = iter(decoded)
            yield [_shown(prompt, lambda one: _parts(one, pictures)) for prompt in prompts]
    finally:
        service.bodies.take(-taken)


def in_words(prompt: Prompt) -> Prompt:
    """Return the prompt for a text-only model."""
    return _shown(prompt, Mixed.in_words)


def _media(prompts: Sequence[Prompt]) -> list[Media]:
    found: list[Media] = []
    for prompt in prompts:
        given = prompt.get("prompt")
        contents = [each["content"] for each in given] if isinstance(given, list) else [given]
        mixed = (content for content in contents if isinstance(content, Mixed))
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
    content = _Source(name, data, 0).decoded()
    read = cache.read(content, name=name, media_type=media_type, pictures=pictures)
    return read, [base64.b64encode(page.picture).decode("ascii") for page in read.pictures]


def _read(document: Media, cache: DocumentCache, sees: bool) -> Pieces:
    """Return the text of a document and its pages without text as pictures, or what is wrong."""
    try:
        read, pictures = document_of(**document.part, cache=cache, pictures=sees)
    except OptionError as error:
        return [f"[document left out: {error}]"]
    return [read.text, *(Media("image", {"data": each}, "") for each in pictures)]


def _shown(prompt: Prompt, show: Callable[[Mixed], object]) -> Prompt:
    """Return the prompt with ``show`` of each content that has media."""

    def shown(content: object) -> Any:
        return show(content) if isinstance(content, Mixed) else content

    given = prompt.get("prompt")
    if isinstance(given, list):
        given = [{**message, "content": shown(message["content"])} for message in given]
    return {**prompt, "prompt": shown(given)} if "prompt" in prompt else prompt


def _parts(content: Mixed, pictures: Iterator[bytes]) -> list[dict[str, Any]]:
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
class _Source:
    """The source of a picture called ``name`` in messages: ``text`` is a URL, or base64 from index
    ``start`` on.
    """

    name: str
    text: str
    start: int | None = None

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


def _sources(prompts: Sequence[Prompt], media: Sequence[Media]) -> list[_Source]:
    """Return the sources of all pictures.

    Raises:
        ApiError: 400, there are too many, or not all are pictures.
    """
    for one in media:
        if one.kind not in _PICTURES:
            raise invalid(f"the model takes no {one.kind}: send text and pictures")
    if len(media) > _MOST:
        raise invalid(f"the request has {len(media)} pictures: the most is {_MOST}")
    if any(isinstance(prompt.get("prompt"), Mixed) for prompt in prompts):
        raise invalid("pictures need a chat template: leave out raw and suffix", "images")
    return [_source(one.part, f"picture {number}") for number, one in enumerate(media, 1)]


def _source(part: Mapping[str, object], name: str) -> _Source:
    given = next((part[key] for key in ("image_url", "source") if part.get(key)), part)
    if isinstance(given, Mapping):
        data = given.get("data")
        if isinstance(data, str) and not data.startswith("data:"):
            return _Source(name, data, 0)
        if given.get("file_id"):
            raise invalid(f"{name} is a file_id, and there are no files here: send its data")
        given = data or given.get("url")
    if isinstance(given, str):
        end = given.find(",", 0, _MOST_HEAD)
        head = given[: max(end, 8)].lower()
        if head.startswith("data:") and head.endswith(";base64"):
            return _Source(name, given, end + 1)
        if head.startswith(("http://", "https://")):
            return _Source(name, given)
    raise invalid(f"{name} must be in base64 (data:image/png;base64,...), or a URL of the web")


def _decoded(sources: Sequence[_Source], fetched: Mapping[str, bytes]) -> Iterator[bytes]:
    for one in sources:
        yield fetched[one.text] if one.start is None else one.decoded()


async def _fetched(
    sources: Sequence[_Source], service: Service, take: Callable[[int], None]
) -> Mapping[str, bytes]:
    """Return the contents of all URLs in ``sources``; their total is limited like a body."""
    urls = {one.text: one.name for one in sources if one.start is None}
    found: dict[str, bytes] = {}
    if urls and service.fetcher is None:
        name = next(iter(urls.values()))
        raise invalid(f"{name} is a URL: send its data, or start the server with --fetch-pictures")
    left = service.options.max_body
    try:
        async with asyncio.timeout(_FETCH_S):
            for url, name in urls.items():
                assert service.fetcher is not None, "checked above"
                found[url] = await service.fetcher.fetch(url, name, min(left, MOST_BYTES), take)
                left -= len(found[url])
    except TimeoutError as error:
        raise invalid(f"pictures did not arrive within {_FETCH_S:g} s") from error
    return found
