"""The user's conversations over HTTP, in the form of OpenAI's Conversations.

They are those of the terminal app: every turn is an item. Beyond OpenAI's, conversations are listed
and searched, have branches, instructions and options; models answer, with tools of MCP servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from inspect import iscoroutinefunction
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localrt import system
from localrt.chat_format.thinking import parted
from localrt.common.errors import OptionError, StorageError
from localrt.engine.options import read_options
from localrt.history import AnswerWriter, Conversation, ConversationInfo, Turn
from localrt.history.pictures import joined_content
from localrt.server.answers import Answers, ConversationAnswer, OpenCall
from localrt.server.bodies import read_fields
from localrt.server.dialect import EVENT_STREAM, Endpoint, Payload, listed
from localrt.server.errors import ApiError, JsonResponse, invalid
from localrt.server.media import document_of
from localrt.server.messages import encoded
from localrt.server.options import is_loopback
from localrt.server.page import to_html
from localrt.server.request_schema import (
    CONTENT,
    FLAG,
    OBJECT,
    STRING,
    TEXT,
    Field,
    RequestSchema,
    list_of,
    nullable,
    object_of,
    required,
)
from localrt.server.service import ModelRequest, service_of

_FOLD = list_of({}, minItems=3, maxItems=3)  # start, end, label
_MESSAGE = object_of(
    "content", type=TEXT, role=TEXT, content=CONTENT, folds=nullable(list_of(_FOLD))
)
_MESSAGES = list_of(_MESSAGE, maxItems=20)
_CONVERSATION = RequestSchema(
    {
        "metadata": Field(nullable(OBJECT)),
        "items": Field(nullable(_MESSAGES)),
        "instructions": Field(TEXT),
        "options": Field(nullable(OBJECT)),
        "shown": Field(TEXT),
    }
)
_ITEMS = RequestSchema({"items": required(_MESSAGES), "after": Field(TEXT)})
_DOCUMENT = RequestSchema({"filename": required(STRING), "file_data": required(STRING)})
_ANSWER_TO = RequestSchema({"model": Field(TEXT), "after": Field(TEXT), "tools": Field(FLAG)})
_DECISION = RequestSchema({"decision": required({"enum": ["once", "always", "refuse"]})})
SCHEMAS = (_CONVERSATION, _ITEMS, _DOCUMENT, _ANSWER_TO, _DECISION)

Work = Callable[[Answers, Request, Payload], Any]
_Given = tuple[str, list[Payload], Payload]  # role, content, facts

_STATUS = {"done": "completed", "writing": "in_progress"}
_HTML, _PICTURES = "html", "message.input_image.image_url"  # values of ``include``
_SHOWN = ("tokens", "tok_s", "context", "finish_reason", "error", "ending", "title", "arguments")
_MOST_FOUND = 100


def _check_owner(request: Request) -> bool:
    """Whether the request is surely from the conversations' owner, with whose rights tools run:
    without a key, only some systems say which user sends a request.

    Raises:
        ApiError: 403, it is from somebody else.
    """
    options, headers = service_of(request).options, request.headers
    if not (is_loopback(options.host) or options.conversations):
        raise ApiError(403, "conversations are off: they need localrt serve --conversations")
    page = headers.get("origin")
    if options.api_key is not None:
        return True  # the guard has checked it
    if page is not None and urlsplit(page).netloc.lower() != headers.get("host", "").lower():
        why = "without a key, conversations are for the server's own page alone"
        raise ApiError(403, f"{why}: start it with --api-key, and send the key")
    own = system.is_own_client(request.scope["client"], request.scope["server"])
    if own is False:
        why = "without a key, conversations are for the user who runs the server"
        raise ApiError(403, f"{why}: start it with --api-key, and send the key")
    return own is not None


def _open(answers: Answers, request: Request) -> Conversation:
    name = request.path_params["id"]
    try:
        return answers.history.open(name.removeprefix("conv_"))
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


def conversations(answers: Answers, request: Request, fields: Payload) -> Payload:
    """The conversations, latest use first, or those with the words of ``search``."""
    found = answers.history.list(request.query_params.get("search", ""), limit=_MOST_FOUND)
    data = [{**_described(one), "snippet": one.snippet} for one in found]
    return {"object": "list", "data": data}


def conversation(answers: Answers, request: Request, fields: Payload) -> Payload:
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
        found = _open(answers, request)
        shown = _turn(found, fields["shown"]).id if fields.get("shown") else None
    else:
        shown, added = None, [_read(one) for one in fields.get("items") or ()]
        found = answers.history.new(model="")
        _add(found, added)
    found.set(**changes)
    if shown is not None:
        found.show(shown)
    return {**_described(found), "instructions": found.system, "options": found.options}


async def delete(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Delete a conversation, with all its branches; an answer that is being written ends."""
    id = (await asyncio.to_thread(_open, answers, request)).id
    await asyncio.to_thread(answers.history.delete, id)
    answers.stop(id)
    return {"id": f"conv_{id}", "object": "conversation.deleted", "deleted": True}


# -- items -----------------------------------------------------------------------------------------


def _item(found: Conversation, turn: Turn, include: list[str]) -> Payload:
    """Return a turn as a message, or as the result of a call."""
    branches = found.siblings(turn.id) if turn.branches > 1 else (turn.id,)
    about: Payload = {
        "id": f"msg_{turn.id}",
        "status": _STATUS.get(turn.state, "incomplete"),
        "created_at": int(turn.created),
        "state": turn.state,
        "info": {name: turn.info[name] for name in _SHOWN if turn.info.get(name) is not None},
        "alternatives": [f"msg_{number}" for number in branches],
    }
    if turn.role == "tool":
        result = {"call_id": str(turn.info.get("tool_call_id", "")), "output": turn.content}
        return {**about, "type": "function_call_output", **result}
    if turn.role == "assistant":
        thinking, text = parted(turn.content)
        html = {"html": to_html(text)} if _HTML in include else {}
        thought = [{"type": "reasoning_text", "text": thinking}] if thinking else []
        content = [*thought, {"type": "output_text", "text": text, "annotations": [], **html}]
        message = {"type": "message", "role": turn.role, "content": content}
        return {**about, **message, "tool_calls": turn.info.get("tool_calls") or []}

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


def items(answers: Answers, request: Request, fields: Payload) -> Payload:
    """The items of the branch that is shown, or of the one through ``branch``; or one item."""
    found, query = _open(answers, request), request.query_params
    include = query.getlist("include[]") + query.getlist("include")
    if "item" in request.path_params:
        turn = _turn(found, request.path_params["item"])
        item, call = _item(found, turn, include), answers.running.get(turn.id)
        return {**item, "open": call.shown()} if isinstance(call, OpenCall) else item
    turns = found.branch(_turn(found, query["branch"]).id) if "branch" in query else found.turns
    shown, more = listed([f"msg_{turn.id}" for turn in turns], query)
    return {**more, "data": [_item(found, turns[place], include) for place in shown]}


def add_items(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Add messages at the end, or as a branch after the item ``after``, "" for the beginning."""
    found, after = _open(answers, request), fields.get("after")
    number = 0 if after == "" else None if after is None else _turn(found, after).id
    added = _add(found, [_read(one) for one in fields["items"]], number)
    return {"object": "list", "data": [_item(found, turn, [_HTML]) for turn in added]}


def _add(found: Conversation, items: Sequence[_Given], after: int | None = None) -> list[Turn]:
    added: list[Turn] = []
    for role, content, info in items:
        added.append(found.add(role, content, after=after, info=info))
        after = added[-1].id
    return added


async def document(answers: Answers, request: Request, fields: Payload) -> Payload:
    """The text of a file, as a message can have it, and pictures of its pages without text."""
    service, (media_type, data) = service_of(request), encoded(fields)
    how = {"name": fields["filename"], "media_type": media_type, "pictures": True}
    try:
        async with service.seeing:  # pages that are pictures take much memory
            found, pictures = await asyncio.to_thread(document_of, data, service.documents, **how)
    except OptionError as error:
        raise invalid(str(error), "file_data") from error
    shown = {"filename": found.name, "text": found.text, "size": found.size, "note": found.note}
    return {"object": "document", **shown, "pictures": pictures}


# -- answers ---------------------------------------------------------------------------------------


async def begin(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Let a model answer the last message, or the message ``after``."""
    service = service_of(request)
    model = service.models.find(fields.get("model"))

    def prepare() -> tuple[Conversation, AnswerWriter, Payload]:
        found = _open(answers, request)
        after = fields.get("after")
        asked = _turn(found, after) if after else next(reversed(found.turns), None)
        if asked is None or asked.role == "assistant" or asked.state == "writing":
            raise invalid("there is no message to answer: add one", "after")
        found.set(model=model.name)
        if found.options.get("tool_choice") == "none":
            fields["tools"] = False
        writer = found.answer(after=asked.id)
        return found, writer, _item(found, found.turn(writer.turn), [_HTML])

    found, writer, made = await asyncio.to_thread(prepare)
    answers.begin(ModelRequest(request, service, fields, model), found, writer)
    return made


async def follow(answers: Answers, request: Request, fields: Payload) -> Response:
    """An answer while it is written, as events with HTML."""
    found = answers.running.get(_number(request.path_params["item"]))
    if not isinstance(found, ConversationAnswer):
        raise ApiError(404, "no answer with this id is being written by this server")
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(found.follow(), headers=headers, media_type=EVENT_STREAM)


async def stop(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Stop an answer, whose text so far is kept, or a call and what would follow."""
    found = answers.running.get(_number(request.path_params["item"]))
    if found is not None:
        found.stop()
    return {"id": request.path_params["item"], "stopped": found is not None}


async def decide(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Allow a call that waits, once or always in its conversation, or refuse it."""
    call = answers.running.get(_number(request.path_params["item"]))
    if decided := isinstance(call, OpenCall) and call.asks:
        call.asks, call.decision = False, fields["decision"]
    return {"id": request.path_params["item"], "decided": decided}


async def tools(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Start the user's MCP servers if they do not run, and list their tools."""
    toolbox = answers.toolbox
    for line in toolbox.take_news():
        service_of(request).note_once(line, line)
    id = request.query_params.get("conversation", "").removeprefix("conv_")
    text = toolbox.command("", id) if toolbox.servers.configs else ""
    return {"text": text, "starting": toolbox.starting}


def _endpoint(
    path: str, method: str, work: Work, body: RequestSchema | None = None, *, tools: bool = False
) -> Endpoint:
    """Return an endpoint for the owner alone. Work on the history, which is on the disk, runs in a
    thread unless it is a coroutine. ``tools``: they may run, also if the body has this field.
    """
    in_loop = iscoroutinefunction(work)

    async def handle(request: Request) -> Response:
        sure, service, fields = _check_owner(request), service_of(request), {}
        if body is not None:
            fields = await read_fields(request, body, service.options, service.bodies)
        if not sure and (tools or fields.get("tools")):
            raise ApiError(403, "tools need localrt serve --api-key on this system")
        given = request.app.state.answers, request, fields
        found = await (work(*given) if in_loop else asyncio.to_thread(work, *given))
        return found if isinstance(found, Response) else JsonResponse(found)

    return Endpoint(path, method, handle)


_ALL, _ONE = "/v1/conversations", "/v1/conversations/{id}"
_ANSWER = f"{_ONE}/answers/{{item}}"
ROUTES = (
    _endpoint(_ALL, "GET", conversations),
    _endpoint(_ALL, "POST", conversation, _CONVERSATION),
    _endpoint(_ONE, "GET", conversation),
    _endpoint(_ONE, "POST", conversation, _CONVERSATION),
    _endpoint(_ONE, "DELETE", delete),
    _endpoint(f"{_ONE}/items", "GET", items),
    _endpoint(f"{_ONE}/items", "POST", add_items, _ITEMS),
    _endpoint(f"{_ONE}/items/{{item}}", "GET", items),
    _endpoint("/v1/documents", "POST", document, _DOCUMENT),
    _endpoint(f"{_ONE}/answers", "POST", begin, _ANSWER_TO),
    _endpoint(_ANSWER, "GET", follow),
    _endpoint(f"{_ANSWER}/cancel", "POST", stop),
    _endpoint(f"{_ANSWER}/decision", "POST", decide, _DECISION, tools=True),
    _endpoint("/v1/tools", "POST", tools, tools=True),
)
