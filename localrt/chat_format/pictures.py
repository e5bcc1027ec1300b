"""Pictures among the parts of messages: takes them out for the template, and puts what stands for
each in the place that the template gave it.

A part is ``{"type": "image", "image": ...}``. Templates of vision models write a placeholder for
it; for other templates, a mark stands in its place in the text.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from localrt.chat_format.chat_template import PICTURE, MessageTemplate, Segment
from localrt.common.errors import OptionError, TemplateError
from localrt.common.files import several
from localrt.models.vision.picture import picture_bytes

_PROBE = "localrt probe"


def with_pictures(text: str, images: Sequence[object]) -> str | list[dict[str, object]]:
    """A message's content of pictures, then a text.

    Raises:
        OptionError: a picture cannot be read.
    """
    if not isinstance(images := several(images), list | tuple):
        raise OptionError(f"images must be a list of pictures, is {images!r:.80}")
    if not images:
        return text
    pictures: list[dict[str, object]]
    pictures = [{"type": "image", "image": picture_bytes(image)} for image in images]
    return [*pictures, {"type": "text", "text": text}]


def is_picture(part: object) -> bool:
    """Whether a part of a content is a picture."""
    return isinstance(part, Mapping) and part.get("type") == "image" and "image" in part


def pictures_of(messages: Sequence[object]) -> list[Any]:
    """The pictures of a conversation, in order."""
    return [part["image"] for message in messages for part in _parts(message) if is_picture(part)]


def without_pictures(messages: Sequence[object], mark: str | None = None) -> list[Any]:
    """The conversation with each picture as templates take it, or as the text ``mark``."""
    stand_in = PICTURE if mark is None else {"type": "text", "text": mark}

    def taken_out(message: Any) -> object:
        parts = _parts(message)
        if not any(map(is_picture, parts)):
            return message
        shown = [stand_in if is_picture(part) else part for part in parts]
        if mark is None:
            return {**message, "content": shown}
        # As one text: what templates put between parts does not belong around a picture.
        texts = [part if isinstance(part, str) else str(part.get("text", "")) for part in shown]
        return {**message, "content": "".join(texts)}

    return [taken_out(message) for message in messages]


def new_mark() -> str:
    """A text that no message has."""
    return f"\ue0f0{secrets.token_hex(8)}\ue0f1"


def shows_pictures(template: MessageTemplate, placeholder: str) -> bool:
    """Whether the template writes the placeholder for a picture, and the text beside it."""
    content = [PICTURE, {"type": "text", "text": _PROBE}]
    try:
        written = template.render([{"role": "user", "content": content}])
    except TemplateError:
        return False
    return written.count(placeholder) == 1 and _PROBE in written and "{'type'" not in written


def put_in(
    segments: Sequence[Segment], sign: str, texts: Sequence[str], *, control: bool
) -> list[Segment] | None:
    """Return the segments with every ``sign`` replaced by the next of ``texts``, whose control
    tokens count; None if the numbers differ. ``control``: signs are control tokens themselves.
    """
    left, placed = list(texts), []
    for text, counts in segments:
        pieces = text.split(sign) if counts or not control else [text]
        if len(pieces) - 1 > len(left):
            return None
        for number, piece in enumerate(pieces):
            if number:
                placed.append((left.pop(0), True))
            if piece:
                placed.append((piece, counts))
    return None if left else placed


def _parts(message: object) -> Sequence[Any]:
    content = message.get("content") if isinstance(message, Mapping) else None
    return content if isinstance(content, list | tuple) else ()
