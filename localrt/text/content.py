"""What messages may hold: text. Pictures, sounds and files are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from localrt.errors import OptionError

_OTHERS = {
    "image": "a picture",
    "screenshot": "a picture",
    "audio": "a sound",
    "video": "a video",
    "file": "a file",
    "document": "a file",
}
_THOUGHTS = ("thinking", "reasoning")  # parts that have a field of this name for their text


def check_text_only(messages: Sequence[Any]) -> None:
    """Whether all parts of all contents are text.

    Raises:
        OptionError: one is not.
    """
    for number, message in enumerate(messages, 1):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list | tuple) else ():
            other = _other_than_text(part) if isinstance(part, Mapping) else None
            if other is not None:
                raise OptionError(
                    f"message {number} has {other}, and the model reads text only: leave it out"
                )


def kind_in_words(kind: str) -> str | None:
    """What a part of this type is: an image, a file; None if that is not known."""
    return next((word for word in _OTHERS if word in kind), None)


def _other_than_text(part: Mapping[str, Any]) -> str | None:
    """What a part of a content is, in words; None if it is text."""
    kind = str(part.get("type", ""))
    if kind in _THOUGHTS:
        return None
    word = kind_in_words(kind)
    if word is None and isinstance(part.get("text"), str):
        return None
    named = None if word is None else _OTHERS[word]
    return f"{named or 'a part without text'} ({kind:.40})" if kind else "a part without a type"
