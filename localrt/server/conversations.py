"""The user's conversations over HTTP, for the chat page: private calls, whose form may change.

They are those of the terminal app. Models answer in them, with the tools of MCP servers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from localrt import system
from localrt.chat_format.thinking import parted
from localrt.common.errors import OptionError
from localrt.engine.options import read_options
from localrt.history import AnswerWriter, Conversation, ConversationInfo, Turn
from localrt.history.database import GoneError
from localrt.history.messages import summary_turns
from localrt.server.about import known_facts
from localrt.server.answers import Answers, ConversationAnswer, OpenCall
from localrt.server.bodies import read_fields
from localrt.server.dialect import EVENT_STREAM, Endpoint, Payload
from localrt.server.errors import ApiError, JsonResponse, invalid
from localrt.server.markdown import HtmlParts
from localrt.server.media import document_of
from localrt.server.messages import encoded
from localrt.server.options import is_loopback
from localrt.server.request_schema import (
    FLAG,
    OBJECT,
    STRING,
    TEXT,
    Field,
    RequestSchema,
    list_of,
    required,
)
from localrt.server.service import ModelRequest, service_of

_FOLD = list_of({}, minItems=3, maxItems=3)  # start, end, label
_CONVERSATION = RequestSchema(
    {
        "title": Field(STRING),
        "model": Field(STRING),
        "instructions": Field(TEXT),
        "options": Field(OBJECT),
        "shown": Field(STRING),
        "pinned": Field(FLAG),
        "draft": Field(STRING),
        "temporary": Field(FLAG),
    }
)
_MESSAGE = RequestSchema(
    {"content": required(list_of(OBJECT)), "folds": Field(list_of(_FOLD)), "after": Field(TEXT)}
)
FILE = RequestSchema({"filename": required(STRING), "file_data": required(STRING)})
_EDIT = RequestSchema({"text": required(STRING)})
_ANSWER_TO = RequestSchema(
    {
        "model": Field(TEXT),
        "after": Field(TEXT),
        "tools": Field(FLAG),
        "continued": Field(TEXT),
        "summary": Field(FLAG),
        "ctx": Field({"type": "integer", "minimum": 1}),
    }
)
_DECISION = RequestSchema({"decision": required({"enum": ["once", "always", "refuse"]})})
SCHEMAS = (_CONVERSATION, _MESSAGE, FILE, _EDIT, _ANSWER_TO, _DECISION)

Work = Callable[[Answers, Request, Payload], Any]

_SHOWN = (
    *("tokens", "tok_s", "context", "finish_reason", "error", "ending", "title", "arguments"),
    *("ways", "edited", "summary"),
)
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


def open_conversation(answers: Answers, request: Request) -> Conversation:
    """Open the conversation of a path.

    Raises:
        ApiError: 404, there is none.
    """
    name = request.path_params["id"]
    try:
        return answers.history_of(name).open(name)
    except GoneError as error:
        raise ApiError(404, f"there is no conversation {name[:80]!r}") from error


def _turn(conversation: Conversation, name: str) -> Turn:
    try:
        return conversation.turn(_number(name))
    except GoneError as error:
        raise ApiError(404, f"the conversation has no item {name[:80]!r}") from error


def _number(name: str) -> int:
    return int(name) if name.isascii() and name.isdigit() and len(name) < 19 else -1


# -- conversations ---------------------------------------------------------------------------------


def described(found: Conversation | ConversationInfo) -> Payload:
    """Return a conversation as lists have it."""
    facts = {"id": found.id, "updated": found.updated, "title": found.title, "model": found.model}
    return {**facts, "pinned": found.pinned}


def conversations(answers: Answers, request: Request, fields: Payload) -> Payload:
    """The conversations, latest use first, or those with the words of ``search``; and why some
    changes are not saved.
    """
    found = answers.history.list(request.query_params.get("search", ""), limit=_MOST_FOUND)
    listed = [{**described(one), "snippet": one.snippet} for one in found]
    return {"data": listed, "problem": answers.history.problem}


def conversation(answers: Answers, request: Request, fields: Payload) -> Payload:
    """A conversation, new or with the body's changes: title, model, instructions, options, shown
    branch, pinned, draft.
    """
    names = ("title", "model", "pinned")
    changes: dict[str, Any] = {key: fields[key] for key in names if key in fields}
    if "instructions" in fields:
        changes["system"] = fields["instructions"] or None
    if (options := fields.get("options")) is not None:
        read_options(options)
        changes["options"] = {name: each for name, each in options.items() if each is not None}
    shown = None
    if "id" in request.path_params:
        found = open_conversation(answers, request)
    else:
        found = (answers.temporary if fields.get("temporary") else answers.history).new(model="")
    if "shown" in fields:
        shown = _turn(found, fields["shown"]).id
    found.set(**changes)
    if "draft" in fields:
        found.keep_draft(fields["draft"])
    if shown is not None:
        found.show(shown)
    draft = found.draft if "draft" in fields else found.take_draft()
    settings = {"instructions": found.system, "options": found.options, "draft": draft}
    return {
        **described(found),
        **settings,
        "temporary": answers.history_of(found.id) is answers.temporary,
    }


async def delete(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Delete a conversation, with all its branches; an answer that is being written ends."""
    id = (await asyncio.to_thread(open_conversation, answers, request)).id
    await asyncio.to_thread(lambda: answers.history_of(id).delete(id))
    answers.stop(id)
    return {"id": id}


# -- items -----------------------------------------------------------------------------------------


def _item(found: Conversation, turn: Turn, *, pictures: bool = False) -> Payload:
    """Return a turn; a user's pictures are named, and are in it if ``pictures``. Of a long answer,
    only the last parts are there as HTML.
    """
    branches = found.siblings(turn.id) if turn.branches > 1 else (turn.id,)
    about: Payload = {
        "id": str(turn.id),
        "role": turn.role,
        "state": turn.state,
        "info": {name: turn.info[name] for name in _SHOWN if turn.info.get(name) is not None},
        "alternatives": [str(number) for number in branches],
    }
    if turn.role == "tool":
        return {**about, "text": turn.content}
    if turn.role == "assistant":
        thinking, text = parted(turn.content)
        calls = bool(turn.info.get("tool_calls"))
        about |= HtmlParts().take(text)
        return {**about, "thinking": thinking, "text": text, "calls": calls}
    shown = [
        {"name": one.name, **({"url": one.data_uri} if pictures else {})} for one in turn.pictures
    ]
    folds = turn.info.get("folds") or []
    return {**about, "text": turn.content, "pictures": shown, "folds": folds}


def item(answers: Answers, request: Request, fields: Payload) -> Payload:
    """An item, with its pictures, and with what an open call asks; or those parts of an answer that
    precede the part ``before``.
    """
    found = open_conversation(answers, request)
    turn = _turn(found, request.path_params["item"])
    if "before" in request.query_params:
        before = max(_number(request.query_params["before"]), 0)
        return HtmlParts().take(parted(turn.content).text, before=before)
    shown, call = _item(found, turn, pictures=True), answers.running.get(turn.id)
    return {**shown, "open": call.shown()} if isinstance(call, OpenCall) else shown


def items(answers: Answers, request: Request, fields: Payload) -> Payload:
    """The last ``limit`` items, latest last, of the branch that is shown, or of the one through
    ``branch``; those that precede the item ``before``.
    """
    found, query = open_conversation(answers, request), request.query_params
    through = _turn(found, query["branch"]).id if "branch" in query else None
    turns = list(found.turns if through is None else found.branch(through))
    ids = [str(turn.id) for turn in turns]
    if query.get("before") in ids:
        turns = turns[: ids.index(query["before"])]
    limit = max(1, _number(query.get("limit", "20")))
    return {"data": [_item(found, turn) for turn in turns[-limit:]], "more": len(turns) > limit}


def add_message(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Add a user's message at the end, or as a branch after the item ``after``, "" for the
    beginning.
    """
    found, after, parts = open_conversation(answers, request), fields.get("after"), []
    for part in fields["content"]:
        url, text = part.get("url"), part.get("text")
        if isinstance(url, str) and url.startswith("data:"):
            parts.append({"type": "image", "image": url, "name": str(part.get("name") or "")})
        elif isinstance(text, str):
            parts.append({"type": "text", "text": text})
        else:
            raise invalid("the parts of a message must be texts, or pictures as data URIs")
    number = 0 if after == "" else None if after is None else _turn(found, after).id
    info = {"folds": fields["folds"]} if fields.get("folds") else {}
    return _item(found, found.add("user", parts, after=number, info=info))


def edit_answer(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Add an answer with this text beside the item."""
    found = open_conversation(answers, request)
    turn = _turn(found, request.path_params["item"])
    return _item(found, found.edit_answer(turn.id, fields["text"]))


async def remove(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Delete an item with all that follows it; answers that are being written end."""
    found = await asyncio.to_thread(open_conversation, answers, request)
    turn = await asyncio.to_thread(_turn, found, request.path_params["item"])
    answers.stop(found.id)
    await asyncio.to_thread(found.remove, turn.id)
    return {"id": str(turn.id)}


def fork(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Copy the conversation up to the item as a new one."""
    found = open_conversation(answers, request)
    turn = _turn(found, request.path_params["item"])
    return described(answers.history_of(found.id).fork(found.id, turn.id))


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
    return {**shown, "pictures": pictures}


# -- answers ---------------------------------------------------------------------------------------


async def begin(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Let a model answer the last message, or the message ``after``; continue the answer
    ``continued``; or sum up what precedes the message, which is then asked again. With ``ctx`` the
    model gets a longer context.
    """
    service = service_of(request)
    model = service.models.find(fields.get("model"))

    def asked(found: Conversation) -> Turn:
        after = fields.get("after")
        turn = _turn(found, after) if after else next(reversed(found.turns), None)
        if turn is None or turn.role == "assistant" or turn.state == "writing":
            raise invalid("there is no message to answer: add one", "after")
        if turn.pictures and "vision" not in known_facts(model).capabilities:
            raise invalid(f"{model.name} cannot see pictures: choose another model", "model")
        return turn

    def prepare() -> tuple[Conversation, AnswerWriter, Turn | None, Turn | None, Payload]:
        found, continued, question = open_conversation(answers, request), None, None
        if fields.get("continued"):
            continued = _turn(found, fields["continued"])
            writer = found.reopen(continued.id)
        elif fields.get("summary"):
            question = asked(found)
            _, request_text = summary_turns((), None)
            writer = found.answer(after=found.add("user", request_text, after=0).id)
        else:
            writer = found.answer(after=asked(found).id)
        found.set(model=model.name)
        if found.options.get("tool_choice") == "none":
            fields["tools"] = False
        return found, writer, continued, question, _item(found, found.turn(writer.turn))

    found, writer, continued, question, made = await asyncio.to_thread(prepare)
    if "ctx" in fields:
        service.models.lengthen(model.name, fields["ctx"])
    asking = ModelRequest(request, service, fields, model)
    answers.begin(asking, found, writer, continued=continued, summed_up=question)
    return made


async def follow(answers: Answers, request: Request, fields: Payload) -> Response:
    """An answer while it is written, as events with HTML."""
    found = answers.running.get(_number(request.path_params["item"]))
    if not isinstance(found, ConversationAnswer):
        raise ApiError(404, "no answer with this id is being written by this server")
    headers = {"X-Accel-Buffering": "no"}
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
    id = request.query_params.get("conversation", "")
    text = toolbox.command("", id) if toolbox.servers.configs else ""
    return {"text": text, "starting": toolbox.starting}


def owners_endpoint(
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
_ITEM, _ANSWER = f"{_ONE}/items/{{item}}", f"{_ONE}/answers/{{item}}"
ROUTES = (
    owners_endpoint(_ALL, "GET", conversations),
    owners_endpoint(_ALL, "POST", conversation, _CONVERSATION),
    owners_endpoint(_ONE, "GET", conversation),
    owners_endpoint(_ONE, "POST", conversation, _CONVERSATION),
    owners_endpoint(_ONE, "DELETE", delete),
    owners_endpoint(f"{_ONE}/items", "GET", items),
    owners_endpoint(f"{_ONE}/items", "POST", add_message, _MESSAGE),
    owners_endpoint(_ITEM, "GET", item),
    owners_endpoint(_ITEM, "POST", edit_answer, _EDIT),
    owners_endpoint(_ITEM, "DELETE", remove),
    owners_endpoint(f"{_ITEM}/fork", "POST", fork),
    owners_endpoint("/v1/documents", "POST", document, FILE),
    owners_endpoint(f"{_ONE}/answers", "POST", begin, _ANSWER_TO),
    owners_endpoint(_ANSWER, "GET", follow),
    owners_endpoint(f"{_ANSWER}/cancel", "POST", stop),
    owners_endpoint(f"{_ANSWER}/decision", "POST", decide, _DECISION, tools=True),
    owners_endpoint("/v1/tools", "POST", tools, tools=True),
)
