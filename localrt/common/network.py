"""What the environment has wrong where an HTTP client fails: certificates and proxies."""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterator
from pathlib import Path


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def network_problem(raised: BaseException | None, host: str) -> str:
    """What to set of the environment that an HTTP client failed at; empty for other errors."""
    named = os.environ.get("SSL_CERT_FILE")
    unread = named and not (Path(named).is_file() and os.access(named, os.R_OK))
    failures = (ssl.SSLError, FileNotFoundError, IsADirectoryError, PermissionError)
    for error in causes(raised):
        empty = isinstance(error, ssl.SSLError) and error.reason == "NO_CERTIFICATE_OR_CRL_FOUND"
        if empty or (unread and isinstance(error, failures)):
            return f"SSL_CERT_FILE ({named}) is no file of certificates: correct it, or unset it"
        if isinstance(error, ssl.SSLCertVerificationError):
            return (
                f"the certificate of {host} is not trusted ({error.verify_message[:80]}): for an "
                "authority of your own set SSL_CERT_FILE to its certificate"
            )
        if isinstance(error, ImportError | ValueError) and "proxy" in str(error).lower():
            return (
                "ALL_PROXY, HTTPS_PROXY or HTTP_PROXY names a proxy of a kind that cannot be used: "
                "take one with http://, or unset it"
            )
    return ""
