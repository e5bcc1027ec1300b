"""What the ``tokenizers`` package raises, as localrt's errors.

It raises plain ``Exception``. A panic of its Rust code is not even that: nothing but
``BaseException`` catches it, and its class cannot be imported. Does not know tokenizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from localrt.errors import TokenizerError

__all__ = ["is_package_error", "package_errors"]


def is_package_error(error: BaseException) -> bool:
    """Whether a call of the package may have raised it: no interrupt, no exit."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


@contextmanager
def package_errors(what: str) -> Iterator[None]:
    """For calls of the package alone: what they raise is a TokenizerError that begins ``what``."""
    try:
        yield
    except BaseException as error:
        if not is_package_error(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise TokenizerError(f"{what}: {reason}") from None
