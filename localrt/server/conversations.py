"""The user's conversations over HTTP, in the form of OpenAI's Conversations.

They are those of the terminal app: every turn is an item. Beyond OpenAI's, conversations are listed
and searched, have branches, instructions and options; models answer, with tools of MCP servers.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localrt import system
from localrt.chat_format.thinking import parted
from localrt.common.errors import OptionError, StorageError
from localrt.documents.reading import DocumentCache
from localrt.engine.options import read_options
from localrt.history import AnswerWriter, Conversation, ConversationInfo, History, Turn
from localrt.history.pictures import joined_content
from localrt.server.answers import Answer, Answers, Call
from localrt.server.bodies import read_fields
from localrt.server.dialect import EVENT_STREAM, JSON, Endpoint, Payload, listed
from localrt.server.errors import ApiError, JsonResponse, invalid
from localrt.server.media import document_of
from localrt.server.messages import encoded
from localrt.server.options import is_loopback
from localrt.server.page import to_html
from localrt.server.service import ModelRequest, sent_key, service_of

Work = Callable[[History, Request, dict[str, Any]], Payload]
_Given = tuple[str, list[Payload], Payload]  # role, content, facts

_STATUS = {"done": "completed", "writing": "in_progress"}
_HTML, _PICTURES = "html", "message.input_image.image_url"  # values of ``include``
_SHOWN = ("tokens", "tok_s", "context", "finish_reason", "error", "ending", "title", "arguments")
_MOST_FOUND = 100


def _owned(request: Request, *, tools: bool = False) -> Answers:
    """Return the conversations, if the request is surely their owner's. ``tools`` run with the
    owner's rights: they need a key where the system does not say which user sends a request.

    Raises:
        ApiError: 403, it need not be.
    """
    options, headers = service_of(request).options, request.headers
    if not (is_loopback(options.host) or options.conversations):
        raise ApiError(403, "conversations are off: they need localrt serve --conversations")
    page = headers.get("origin")
    if options.api_key is not None:
        if not hmac.compare_digest(sent_key(headers).encode(), options.api_key.strip().encode()):
            raise ApiError(403, "conversations need the server's own key, not that of a class")
    elif page is not None and urlsplit(page).netloc.lower() != headers.get("host", "").lower():
        raise ApiError(403, "without a key, conversations are for the server's own page alone")
    elif (own := system.is_own_client(request.scope["client"], request.scope["server"])) is False:
        why = "without a key, conversations are for the user who runs the server"
        raise ApiError(403, f"{why}: start it with --api-key, and send the key")
    elif own is None and tools:
        raise ApiError(403, "tools need localrt serve --api-key on this system")
    found = request.app.state.answers
    assert isinstance(found, Answers), "the app was made by create_app"
    return found


def _open(history: History, request: Request) -> Conversation:
    name = request.path_params["id"]
    try:
        return history.open(name.removeprefix("conv_"))
    except StorageError as error:
        raise ApiError(404, f"there is no conversation {name[:80]!r}") from error


def _turn(conversation: Conversation, name: str) -> Turn:
    try:
        return conversation.turn(_number(name))
    except StorageError as error:
        raise ApiError(404, f"the conversation has no item {name[:80]!r}") from error


def _number(name: str) -> int:
    digits = name.removeprefix("msg_")
    return int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 16 else -1


# -- conversations ---------------------------------------------------------------------------------


def _described(found: Conversation | ConversationInfo) -> Payload:
    return {
        "id": f"conv_{found.id}",
        "object": "conversation",
        "created_at": int(found.created),
        "updated_at": found.updated,
        "metadata": {"title": found.title, "model": found.model},
    }


def conversations(history: History, request: Request, fields: Payload) -> Payload:
    """The conversations, latest use first, or those with the words of ``search``."""
    found = history.list(request.query_params.get("search", ""), limit=_MOST_FOUND)
    data = [{**_described(one), "snippet": one.snippet} for one in found]
    return {"object": "list", "data": data}


def conversation(history: History, request: Request, fields: Payload) -> Payload:
    """A conversation, new or with the body's changes: title, model, instructions, options, shown
    branch.
    """
    told = fields.get("metadata") or {}
    changes = {name: told[name] for name in ("title", "model") if isinstance(told.get(name), str)}
    if "instructions" in fields:
        changes["system"] = fields["instructions"] or None
    if (options := fields.get("options")) is not None:
        read_options(options)
        changes["options"] = {name: each for name, each in options.items() if each is not None}
    if "id" in request.path_params:
        found = _open(history, request)
        shown = _turn(found, fields["shown"]).id if fields.get("shown") else None
    else:
        shown, added = None, [_read(one) for one in fields.get("items") or ()]
        found = history.new(model="")
        _add(found, added)
    found.set(**changes)
    if shown is not None:
        found.show(shown)
    return {**_described(found), "instructions": found.system, "options": found.options}


async def delete(request: Request) -> Response:
    """Delete a conversation, with all its branches; an answer that is being written ends."""
    answers = _owned(request)

    def work() -> str:
        id = _open(answers.history, request).id
        answers.history.delete(id)
        return id

    id = await asyncio.to_thread(work)
    answers.stop(id)
    return JsonResponse({"id": f"conv_{id}", "object": "conversation.deleted", "deleted": True})


# -- items -----------------------------------------------------------------------------------------


def _item(found: Conversation, turn: Turn, include: list[str]) -> Payload:
    """Return a turn as a message, or as the result of a call."""
    own = {} if turn.branches == 1 else {"alternatives": found.siblings(turn.id)}
    about: Payload = {
        "id": f"msg_{turn.id}",
        "status": _STATUS.get(turn.state, "incomplete"),
        "created_at": int(turn.created),
        "state": turn.state,
        "info": {name: turn.info[name] for name in _SHOWN if turn.info.get(name) is not None},
        **{name: [f"msg_{number}" for number in numbers] for name, numbers in own.items()},
    }
    if turn.role == "tool":
        result = {"call_id": str(turn.info.get("tool_call_id", "")), "output": turn.content}
        return {**about, "type": "function_call_output", **result}
    if turn.role == "assistant":
        thinking, text = parted(turn.content)
        html = {"html": to_html(text)} if _HTML in include else {}
        thought = [{"type": "reasoning_text", "text": thinking}] if thinking else []
        content = [*thought, {"type": "output_text", "text": text, "annotations": [], **html}]
        calls = {"tool_calls": turn.info.get("tool_calls") or []}
        return {**about, **calls, "type": "message", "role": turn.role, "content": content}

    def picture(one: Any) -> Payload:
        data = {"image_url": one.data_uri} if _PICTURES in include else {}
        return {"type": "input_image", "detail": "auto", "name": one.name, **data}

    given = joined_content(turn.content, turn.pictures, picture)
    parts = [{"type": "text", "text": given}] if isinstance(given, str) else given
    files = {"folds": turn.info["folds"]} if turn.info.get("folds") else {}
    return {**about, **files, "type": "message", "role": turn.role, "content": parts}


def _read(item: Mapping[str, Any]) -> _Given:
    """Return the role, the content and the facts of a message for the history."""
    role, content, parts = item.get("role"), item["content"], []
    if item.get("type", "message") != "message" or role not in ("user", "assistant"):
        raise invalid("items must be messages of the user or the assistant", "items")
    for part in content if isinstance(content, list) else [content]:
        given = part if isinstance(part, Mapping) else {"text": part}
        url, text = given.get("image_url"), given.get("text")
        if isinstance(url, str) and url.startswith("data:"):
            parts.append({"type": "image", "image": url, "name": str(given.get("name") or "")})
        elif isinstance(text, str):
            parts.append({"type": "text", "text": text})
        else:
            raise invalid("the parts of a message must be texts, or pictures as data URIs", "items")
    return role, parts, {"folds": item["folds"]} if item.get("folds") else {}


def items(history: History, request: Request, fields: Payload) -> Payload:
    """The items of the branch that is shown, or of the one through ``branch``; or one item."""
    found, query = _open(history, request), request.query_params
    include = query.getlist("include[]") + query.getlist("include")
    if "item" in request.path_params:
        turn = _turn(found, request.path_params["item"])
        item, call = _item(found, turn, include), request.app.state.answers.running.get(turn.id)
        return {**item, "open": call.shown()} if isinstance(call, Call) else item
    turns = found.branch(_turn(found, query["branch"]).id) if "branch" in query else found.turns
    shown, more = listed([f"msg_{turn.id}" for turn in turns], query)
    return {**more, "data": [_item(found, turns[place], include) for place in shown]}


def add_items(history: History, request: Request, fields: Payload) -> Payload:
    """Add messages at the end, or as a branch after the item ``after``, "" for the beginning."""
    found, after = _open(history, request), fields.get("after")
    number = 0 if after == "" else None if after is None else _turn(found, after).id
    added = _add(found, [_read(one) for one in fields["items"]], number)
    return {"object": "list", "data": [_item(found, turn, [_HTML]) for turn in added]}


def _add(found: Conversation, items: Sequence[_Given], after: int | None = None) -> list[Turn]:
    added: list[Turn] = []
    for role, content, info in items:
        added.append(found.add(role, content, after=after, info=info))
        after = added[-1].id
    return added


async def document(request: Request) -> Response:
    """The text of a file, as a message can have it, and pictures of its pages without text."""
    _owned(request)
    service = service_of(request)
    fields = await read_fields(request, "DOCUMENT", service.options, service.bodies)
    async with service.seeing:  # pages that are pictures take much memory
        return JsonResponse(await asyncio.to_thread(_document, fields, service.documents))


def _document(fields: Payload, cache: DocumentCache) -> Payload:
    media_type, data = encoded(fields)
    try:
        found, pictures = document_of(
            data, cache, name=fields["filename"], media_type=media_type, pictures=True
        )
    except OptionError as error:
        raise invalid(str(error), "file_data") from error
    shown = {"filename": found.name, "text": found.text, "size": found.size, "note": found.note}
    return {"object": "document", **shown, "pictures": pictures}


# -- answers ---------------------------------------------------------------------------------------


async def begin(request: Request) -> Response:
    """Let a model answer the last message, or the message ``after``."""
    answers, service = _owned(request), service_of(request)
    fields = await read_fields(request, "CONVERSATION_ANSWER", service.options, service.bodies)
    _owned(request, tools=bool(fields.get("tools")))
    model = service.models.find(fields.get("model"))

    def prepare() -> tuple[Conversation, AnswerWriter, Payload, int]:
        found = _open(answers.history, request)
        last = found.turns[-1:]
        asked = _turn(found, fields["after"]) if fields.get("after") else last[0] if last else None
        if asked is None or asked.role == "assistant" or asked.state == "writing":
            raise invalid("there is no message to answer: add one", "after")
        found.set(model=model.name)
        rounds = 0
        if fields.get("tools") and found.options.get("tool_choice") != "none":
            from localrt.mcp.toolbox import ROUNDS as rounds  # noqa: N811 - takes memory
        writer = found.answer(after=asked.id)
        return found, writer, _item(found, found.turn(writer.turn), [_HTML]), rounds

    found, writer, made, rounds = await asyncio.to_thread(prepare)
    answers.begin(ModelRequest(request, service, fields, model), found, writer, rounds)
    return JsonResponse(made)


async def follow(request: Request) -> Response:
    """An answer while it is written, as events with HTML."""
    found = _owned(request).running.get(_number(request.path_params["item"]))
    if not isinstance(found, Answer):
        raise ApiError(404, "no answer with this id is being written by this server")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(found.follow(), headers=headers, media_type=EVENT_STREAM)


async def stop(request: Request) -> Response:
    """Stop an answer, whose text so far is kept, or a call and what would follow."""
    found = _owned(request).running.get(_number(request.path_params["item"]))
    if found is not None:
        found.stop()
    return JsonResponse({"id": request.path_params["item"], "stopped": found is not None})


async def decide(request: Request) -> Response:
    """Allow a call that waits, once or always in its conversation, or refuse it."""
    answers, service = _owned(request, tools=True), service_of(request)
    fields = await read_fields(request, "CALL_DECISION", service.options, service.bodies)
    call = answers.running.get(_number(request.path_params["item"]))
    if decided := isinstance(call, Call) and call.asks:
        call.asks, call.decision = False, fields["decision"]
    return JsonResponse({"id": request.path_params["item"], "decided": decided})


async def tools(request: Request) -> Response:
    """Start the user's MCP servers if they do not run, and list their tools."""
    toolbox = _owned(request, tools=True).toolbox
    for line in toolbox.take_news():
        service_of(request).note_once(line, line)
    id = request.query_params.get("conversation", "").removeprefix("conv_")
    text = toolbox.command("", id) if toolbox.servers.configs else ""
    return JsonResponse({"text": text, "starting": toolbox.starting})


def _endpoint(path: str, method: str, work: Work, body: str = "") -> Endpoint:
    """Return an endpoint whose ``work`` runs in a thread, since the history is on the disk."""

    async def handle(request: Request) -> Response:
        answers, service, fields = _owned(request), service_of(request), {}
        if body:
            fields = await read_fields(request, body, service.options, service.bodies)
        return JsonResponse(await asyncio.to_thread(lambda: work(answers.history, request, fields)))

    handle.__doc__ = work.__doc__
    return Endpoint(path, method, handle, JSON, body)


_ALL, _ONE = "/v1/conversations", "/v1/conversations/{id}"
ROUTES = (
    _endpoint(_ALL, "GET", conversations),
    _endpoint(_ALL, "POST", conversation, "CONVERSATION"),
    _endpoint(_ONE, "GET", conversation),
    _endpoint(_ONE, "POST", conversation, "CONVERSATION"),
    Endpoint(_ONE, "DELETE", delete, JSON),
    _endpoint(f"{_ONE}/items", "GET", items),
    _endpoint(f"{_ONE}/items", "POST", add_items, "CONVERSATION_ITEMS"),
    _endpoint(f"{_ONE}/items/{{item}}", "GET", items),
    Endpoint("/v1/documents", "POST", document, JSON, "DOCUMENT"),
    Endpoint(f"{_ONE}/answers", "POST", begin, JSON, "CONVERSATION_ANSWER"),
    Endpoint(f"{_ONE}/answers/{{item}}", "GET", follow, EVENT_STREAM),
    Endpoint(f"{_ONE}/answers/{{item}}/cancel", "POST", stop, JSON),
    Endpoint(f"{_ONE}/answers/{{item}}/decision", "POST", decide, JSON, "CALL_DECISION"),
    Endpoint("/v1/tools", "POST", tools, JSON),
)
