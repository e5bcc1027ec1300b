"""A TOML file that users and the app edit: the app keeps comments and order.

An unreadable file is not changed. A change reads the file again first, so that two apps do not undo
each other's changes, and replaces it atomically.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localrt.common.errors import StorageError, reason_of
from localrt.common.files import keep_private, write_text


class TomlFile:
    """``path`` need not exist; with None, changes are kept in memory only."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._text = ""  # without a path

    def read(self) -> dict[str, Any]:
        """The file's content; empty if there is no file.

        Raises:
            StorageError: it is not TOML, or cannot be read.
        """
        return self._parsed()[1]

    def change(self, values: Mapping[str, object], *, table: str | None = None) -> None:
        """Set top-level keys, or keys of a table; None removes a key; empty tables are removed.

        Raises:
            StorageError: it cannot be read (and is not changed), or cannot be written.
        """
        import tomlkit  # imported only for a change

        text, _ = self._parsed()  # never replace a file that is not TOML: it may be the user's work
        try:
            document: Any = tomlkit.parse(text)
            place: Any = document
            if table is not None:
                if not isinstance(document.get(table), dict):
                    document[table] = tomlkit.table()
                place = document[table]
            for name, value in values.items():
                if value is None:
                    place.pop(name, None)
                elif isinstance(value, str) and "\n" in value and "\r" not in value:
                    place[name] = tomlkit.string(value, multiline=True)
                else:
                    place[name] = value
            if table is not None and not place:
                del document[table]
            self._write(tomlkit.dumps(document))
        except (TypeError, ValueError) as error:
            raise StorageError(f"{self.path} cannot be changed: {error}") from error

    def replace_table(self, table: str, values: Mapping[str, object] | None) -> None:
        """Replace a table; None removes it.

        Raises:
            StorageError: as in ``change``.
        """
        before = self.read().get(table)
        gone = dict.fromkeys(before) if isinstance(before, dict) else {}
        self.change({**gone, **(values or {})}, table=table)

    def _parsed(self) -> tuple[str, dict[str, object]]:
        try:
            text = self._text if self.path is None else self.path.read_text("utf-8-sig")
            return text, tomllib.loads(text)
        except FileNotFoundError:
            return "", {}
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {reason_of(error)}") from error
        except (ValueError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            reason = "it is nested too deeply" if deep else str(error).splitlines()[0]
            raise StorageError(f"{self.path} is not TOML: {reason}") from error

    def _write(self, text: str) -> None:
        if self.path is None:
            self._text = text
        else:
            write_text(self.path.resolve(), text, private=True, folder=True)  # a link stays one
            keep_private(self.path.parent)
