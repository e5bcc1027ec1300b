"""The ``with`` statement for what has a ``close``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NoReturn, Self


class Closing(ABC):
    """Closed at the end of a ``with`` block, however it ends."""

    @abstractmethod
    def close(self) -> None:
        """Give up what is held; safe to repeat."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        """It holds threads and files: refused at once, not after all that it holds was walked."""
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied: each process opens its own"
        )
