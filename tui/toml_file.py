"""A TOML file that people write and the app changes: comments and order stay as they are.

A file that cannot be read is left alone, and said once. Changes read it again first, so that two
apps do not undo each other's, and replace it as a whole.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localrt.errors import StorageError
from localrt.files import write_text

__all__ = ["MemoryFile", "TomlFile"]


class TomlFile:
    """``path`` need not exist."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Any]:
        """What it says; nothing where there is no file.

        Raises:
            StorageError: it is not TOML, or cannot be read.
        """
        try:
            return tomllib.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror or error}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise StorageError(f"{self.path} is not TOML: {reason}") from error

    def change(self, values: Mapping[str, Any], *, table: str | None = None) -> None:
        """Set keys at the top, or in a table; None removes one, an empty table goes too.

        Raises:
            StorageError: it cannot be read, and is left as it is, or cannot be written.
        """
        import tomlkit  # only who changes something pays for it

        self.read()  # a file that is not TOML is somebody's work: not replaced
        try:
            text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
            document: Any = tomlkit.parse(text)
            place: Any = document
            if table is not None:
                if not isinstance(document.get(table), dict):
                    document[table] = tomlkit.table()
                place = document[table]
            for name, value in values.items():
                if value is None:
                    place.pop(name, None)
                else:
                    place[name] = _shown(value)
            if table is not None and not place:
                del document[table]
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be written: {error.strerror}") from error
        except (TypeError, ValueError) as error:
            raise StorageError(f"{self.path} cannot be changed: {error}") from error
        write_text(self.path, tomlkit.dumps(document), mode=0o600)

    def replace_table(self, table: str, values: Mapping[str, Any] | None) -> None:
        """Have a table say exactly this; None removes it.

        Raises:
            StorageError: as in ``change``.
        """
        before = self.read().get(table)
        old = before if isinstance(before, dict) else {}
        gone = dict.fromkeys(old) if values is None else {k: None for k in old if k not in values}
        self.change({**gone, **(values or {})}, table=table)


class MemoryFile(TomlFile):
    """The same without a disk: what is changed is forgotten with the app."""

    def __init__(self) -> None:
        super().__init__(Path("nowhere"))
        self._values: dict[str, Any] = {}

    def read(self) -> dict[str, Any]:
        """See ``TomlFile``."""
        return dict(self._values)

    def change(self, values: Mapping[str, Any], *, table: str | None = None) -> None:
        """See ``TomlFile``."""
        place = self._values if table is None else self._values.setdefault(table, {})
        for name, value in values.items():
            if value is None:
                place.pop(name, None)
            else:
                place[name] = value
        if table is not None and not place:
            del self._values[table]


def _shown(value: Any) -> Any:
    """Text of several lines as people write it."""
    import tomlkit

    if isinstance(value, str) and "\n" in value and "\r" not in value:
        return tomlkit.string(value, multiline=True)
    return value
