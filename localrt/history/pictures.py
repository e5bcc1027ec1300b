"""The pictures of a conversation: files as they were given, kept once by their contents.

A turn's text and pictures come and go as content parts, ``{"type": "image", "image": ...}``
between ``{"type": "text", "text": ...}``. Keeping one decodes no more than its header.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sqlite3
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localrt.common.errors import OptionError, StorageError
from localrt.common.formatting import format_bytes

if TYPE_CHECKING:
    from PIL import Image

LARGEST_PICTURE = 32_000_000
"""Bytes: the largest file of a picture that a conversation keeps."""

_PICTURES = "pictures"  # in a turn's stored ``info``
_TURNED = (5, 6, 7, 8)  # EXIF orientations on the side
_ORIENTATION = 0x0112


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPicture:
    """A picture before character ``place`` of its turn's text; ``width`` and ``height`` in pixels.

    ``digest`` names its contents.
    """

    name: str
    width: int
    height: int
    place: int
    media_type: str
    digest: str
    read: Callable[[], bytes] = field(repr=False, compare=False)

    @property
    def data(self) -> bytes:
        """The file.

        Raises:
            StorageError: the history cannot be read.
        """
        return self.read()

    @property
    def part(self) -> dict[str, Any]:
        """The picture as a content part; a text where it cannot be read any more."""
        try:
            return {"type": "image", "image": self.data}
        except StorageError:
            return {"type": "text", "text": f"[{self.name}: this picture is lost]"}

    @property
    def data_uri(self) -> str:
        """The file as text.

        Raises:
            StorageError: the history cannot be read.
        """
        return f"data:{self.media_type};base64,{base64.b64encode(self.data).decode('ascii')}"


def new_picture(data: bytes, *, name: str = "", place: int = 0) -> KeptPicture:
    """A picture from the bytes of its file.

    Raises:
        OptionError: it is no picture, or too large.
    """
    from PIL import Image

    from localrt.models.vision.picture import media_type, open_header  # brings numpy

    shown = name or "the picture"
    if len(data) > LARGEST_PICTURE:
        raise OptionError(
            f"{shown} has {format_bytes(len(data))}: a picture has at most "
            f"{format_bytes(LARGEST_PICTURE)}"
        )
    with open_header(data, shown) as image, warnings.catch_warnings(action="ignore"):
        (width, height), kind = image.size, media_type(image)
        try:
            # PNG's own getexif decodes the whole picture.
            turned = Image.Image.getexif(image).get(_ORIENTATION) in _TURNED
        except Exception as error:  # Pillow's decoders raise anything
            raise OptionError(f"{shown} is damaged: {error}") from error
    return KeptPicture(
        name=name or f"picture.{kind.removeprefix('image/')}",
        width=height if turned else width,
        height=width if turned else height,
        place=place,
        media_type=kind,
        digest=hashlib.sha256(data).hexdigest(),
        read=lambda: data,
    )


def read_picture(given: object, *, name: str = "", place: int = 0) -> KeptPicture:
    """The picture in a path, bytes, a data URI, or pixels.

    Raises:
        OptionError: it cannot be read, is no picture, or too large.
    """
    if isinstance(given, KeptPicture):
        return replace(given, place=place)
    from localrt.models.vision.picture import picture_bytes  # brings numpy

    if isinstance(given, str | Path) and not str(given).startswith("data:"):
        name = name or Path(given).name
    return new_picture(picture_bytes(given), name=name, place=place)


def small_image(picture: KeptPicture, width: int, height: int) -> Image.Image:
    """The picture, upright and in RGB, in exactly this size.

    Raises:
        OptionError: it is damaged or has too many pixels.
        StorageError: the history cannot be read.
    """
    from localrt.models.vision.picture import open_picture  # brings numpy

    opened = open_picture(picture.data, picture.name, side=2 * max(width, height))
    return opened.image().resize((width, height))


def split_content(
    content: str | Sequence[Mapping[str, Any]],
) -> tuple[str, tuple[KeptPicture, ...]]:
    """A message's text, and its pictures by their places in it.

    Raises:
        OptionError: a part is neither text nor a picture.
    """
    if isinstance(content, str):
        return content, ()
    text, pictures = "", []
    for part in content:
        if not isinstance(part, Mapping):
            raise OptionError(f"a message's part is a mapping, not {part!r:.80}")
        if isinstance(part.get("text"), str):
            text += part["text"]
        elif "image" in part:
            name = part.get("name") or ""
            pictures.append(read_picture(part["image"], name=name, place=len(text)))
        else:
            raise OptionError("a message's parts are texts and images")
    return text, tuple(pictures)


def joined_content(
    text: str,
    pictures: Iterable[KeptPicture],
    part: Callable[[KeptPicture], dict[str, Any]] = lambda picture: picture.part,
) -> str | list[dict[str, object]]:
    """The opposite of ``split_content``: parts where there are pictures."""
    parts: list[dict[str, object]] = []
    last = 0
    for picture in pictures:
        if picture.place > last:
            parts.append({"type": "text", "text": text[last : picture.place]})
        parts.append(part(picture))
        last = max(picture.place, last)
    if parts and text[last:]:
        parts.append({"type": "text", "text": text[last:]})
    return parts or text


def stored_info(info: Mapping[str, object], pictures: Iterable[KeptPicture]) -> str:
    """The JSON of a turn's ``info``, with what describes its pictures."""
    records = [
        [each.place, each.name, each.width, each.height, each.media_type, each.digest]
        for each in pictures
    ]
    return json.dumps({**info, _PICTURES: records} if records else dict(info))


def joined_text(
    text: str, pictures: Iterable[KeptPicture], label: Callable[[KeptPicture], str]
) -> str:
    """The text with a label in the place of each picture."""
    pieces, last = [], 0
    for picture in pictures:
        pieces += [text[last : picture.place], label(picture)]
        last = picture.place
    return "".join([*pieces, text[last:]])


def split_info(
    stored: str, length: int, read: Callable[[str], bytes]
) -> tuple[dict[str, object], tuple[KeptPicture, ...]]:
    """The opposite of ``stored_info``, for a turn of ``length`` characters.

    ``read`` returns the file of a digest. Pictures that make no sense are left out.
    """
    info: dict[str, Any] = json.loads(stored)
    pictures: list[KeptPicture] = []
    for item in info.pop(_PICTURES, ()):
        try:
            place, name, width, height, media_type, digest = item
            pictures.append(
                KeptPicture(
                    name=str(name),
                    width=int(width),
                    height=int(height),
                    place=min(max(int(place), 0), length),
                    media_type=str(media_type),
                    digest=str(digest),
                    read=partial(read, str(digest)),
                )
            )
        except (TypeError, ValueError):
            continue
    return info, tuple(sorted(pictures, key=lambda picture: picture.place))


def keep_pictures(
    connection: sqlite3.Connection, turn: int, pictures: Iterable[KeptPicture]
) -> None:
    """Write a turn's pictures, each file once, but not those that cannot be read any more."""
    for picture in pictures:
        known = "SELECT 1 FROM picture WHERE digest = ?"
        if connection.execute(known, (picture.digest,)).fetchone() is None:
            try:
                row = (picture.digest, picture.data)
            except StorageError:
                continue
            connection.execute("INSERT INTO picture (digest, data) VALUES (?, ?)", row)
        link = "INSERT OR IGNORE INTO turn_picture (turn, picture) VALUES (?, ?)"
        connection.execute(link, (turn, picture.digest))
