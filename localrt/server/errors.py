"""Errors in the form of each dialect: a status and a JSON object."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.responses import Response

from localrt.common.errors import (
    CancelledError,
    ContextOverflowError,
    LocalrtError,
    MemoryBudgetError,
    MissingExtraError,
    OptionError,
    TemplateError,
    TokenizerError,
    UnsupportedModelError,
)
from localrt.common.option_names import on_command_line, python_option

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPES = {**_TYPES, 413: "request_too_large", 501: "api_error", 503: "overloaded_error"}

ANTHROPIC_HEADER = "anthropic-version"  # sent by Anthropic's clients, even to list models

_NO_PATH = "there is nothing at this path: `localrt help server` lists what this server answers"

# A path from a root or home folder, up to its last part. Names may contain spaces.
_FOLDERS = re.compile(
    r"""(?<![\w/:.~-])(?:~|[A-Za-z]:)?[/\\]"""
    r"""(?:(?=\S)(?:(?![:;,]\ )[^/\\\n"'])*[^/\\\s"':;,][/\\])+"""
)

# Options that are set by flags of `localrt serve`, not in requests.
_OF_THE_SERVER = frozenset(
    {
        *("adapters", "chat_template", "ctx", "device", "draft", "engine", "format", "gpu_memory"),
        *("kv_format", "overflow", "pre_tokenizer", "ram", "threads", "tree_budget"),
    }
)
# Options that have another name in requests.
_FIELDS = {"json_schema": "response_format", "token_ids": "prompt"}
_FIELDS |= {"grammar": "grammar", "suffix": "suffix"}  # known without an underscore


def to_json(value: object) -> bytes:
    """Return one line of JSON in ASCII."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


class JsonResponse(Response):
    """A JSON body in ASCII, which unpaired surrogates cannot break."""

    media_type = "application/json"

    def render(self, content: object) -> bytes:
        """Return ``content`` as bytes."""
        return to_json(content)


class ApiError(Exception):
    """An error response. ``param`` is the field concerned.

    ``overflow`` has the token counts of a prompt that does not fit and of the context.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        overflow: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.overflow = overflow
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def response(self, path: str, headers: Mapping[str, str]) -> Response:
        """Return the whole HTTP response to a request of ``path``, in its dialect's form."""
        make = error_body
        if path.startswith("/api/"):
            make = ollama_error
        elif path.startswith("/v1/messages") or ANTHROPIC_HEADER in headers:
            make = anthropic_error
        return JsonResponse(make(self), status_code=self.status, headers=self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for an invalid request."""
    return ApiError(400, message, param=param, code=code)


def in_words(error: ApiError) -> str:
    """Return the message; for a context overflow, in the wording that clients recognize."""
    if error.overflow is None:
        return str(error)
    tokens, ctx = error.overflow
    return (
        f"This model's maximum context length is {ctx} tokens. However, the request has {tokens} "
        f"tokens ({error})"
    )


def error_body(error: ApiError) -> dict[str, object]:
    """Return an error's JSON in OpenAI's form; for a context overflow, also in llama.cpp's."""
    found: dict[str, object] = {
        "message": in_words(error),
        "type": _TYPES.get(error.status, "server_error"),
        "param": error.param,
        "code": error.code,
    }
    if error.overflow is not None:
        tokens, ctx = error.overflow
        found["type"] = "exceed_context_size_error"
        found |= {"n_prompt_tokens": tokens, "n_ctx": ctx}
    return {"error": found}


def anthropic_error(error: ApiError) -> dict[str, object]:
    """Return an error's JSON in Anthropic's form."""
    kind, message = _ANTHROPIC_TYPES.get(error.status, "api_error"), str(error)
    if error.overflow is not None:
        tokens, ctx = error.overflow
        message = f"prompt is too long: {max(tokens, ctx + 1)} tokens > {ctx} maximum ({message})"
    return {"type": "error", "error": {"type": kind, "message": message}}


def ollama_error(error: ApiError) -> dict[str, object]:
    """Return an error's JSON in Ollama's form."""
    return {"error": in_words(error)}


def without_folders(text: str) -> str:
    """Return ``text`` with file names instead of paths: clients should not see folders."""
    return _FOLDERS.sub("", text)


def _in_a_request(name: str, value: object) -> str:
    """Spell an option as requests do, or as the server's flag."""
    spelling = on_command_line if name in _OF_THE_SERVER else python_option
    return spelling(name, value)


def api_error(error: LocalrtError) -> ApiError:
    """Return a library error as an HTTP error."""
    message = without_folders(error.told(_in_a_request))
    if isinstance(error, ContextOverflowError):
        counts = None
        if error.tokens is not None and error.ctx is not None:
            counts = error.tokens, error.ctx
        return ApiError(400, message, code="context_length_exceeded", overflow=counts)
    if isinstance(error, OptionError | TemplateError | TokenizerError):
        word = message.split(" ", 1)[0]
        is_field = word in _FIELDS or ("_" in word and word.isidentifier())
        param = _FIELDS.get(word, word) if is_field else None
        return invalid(message, param)
    if isinstance(error, MissingExtraError | UnsupportedModelError):
        return ApiError(501, message)
    if isinstance(error, MemoryBudgetError):
        return ApiError(503, message, code="out_of_memory", headers={"Retry-After": "10"})
    if isinstance(error, CancelledError):
        return ApiError(503, message, code="cancelled")
    return ApiError(500, message)


def failure(error: BaseException) -> ApiError:
    """Return any error as an HTTP error; a native library's panic is not an ``Exception``."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, LocalrtError):
        return api_error(error)
    if isinstance(error, HTTPException):
        detail = _NO_PATH if error.status_code == 404 else error.detail
        return ApiError(error.status_code, detail, headers=error.headers)
    if isinstance(error, asyncio.CancelledError):
        return ApiError(503, "the server is stopping", code="stopping")
    return ApiError(500, f"the server failed: {type(error).__name__}")
