"""A model, a chat and servers of tools that compute nothing: the test decides every step."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from localrt import Change, Outlook, Status
from localrt.common.errors import StorageError
from localrt.common.progress import Progress, ProgressCallback
from localrt.engine.options import read_options
from localrt.engine.types import Chunk, FinishReason, Metrics, ToolCall
from localrt.mcp.config import ServerConfig, ServerStatus, Tool, ToolResult
from localrt.mcp.servers import ToolServers
from localrt.mcp.toolbox import Toolbox
from localrt.service.status import LaneUse, MemoryUse, ModelInfo, PassTrace
from localrt.tui.chat.panel import PanelData

INFO = ModelInfo(
    name="tiny-model",
    path=Path("tiny-model.gguf"),
    architecture="llama",
    parameters=134_515_008,
    layers=30,
    vocab_size=49_152,
    engine="native",
    device="cpu",
    format="q4_1",
    weight_bytes=91_000_000,
    context_length=8192,
    ctx=8192,
    has_chat_template=True,
    exactness="bit-exact",
    quantization="Q4_1",
)


class FakeChat:
    """Answers with ``model.answer``, piece by piece; waits for ``model.step`` where it is set."""

    def __init__(self, model: FakeModel, system: str | None = None, **options: Any) -> None:
        self.model = model
        self.messages: list[dict[str, Any]] = []
        self.options: dict[str, Any] = {}
        self.system = system
        self.closed = False
        self._cancel = threading.Event()
        self.set(**options)

    @property
    def system(self) -> str | None:
        if self.messages and self.messages[0]["role"] == "system":
            return self.messages[0]["content"]
        return None

    @system.setter
    def system(self, text: str | None) -> None:
        if self.system is not None:
            del self.messages[0]
        if text:
            self.messages.insert(0, {"role": "system", "content": text})

    def set(self, **options: Any) -> None:
        changed = {**self.options, **options}
        read_options(self.model.defaults, changed)
        self.options = {name: value for name, value in changed.items() if value is not None}

    def cancel(self) -> None:
        self._cancel.set()

    def park(self) -> None:
        pass

    def save_while(self, exists: Callable[[], bool]) -> None:
        pass

    def close(self) -> None:
        self.closed = True

    @property
    def capacity(self) -> int:
        return self.model.info.ctx

    @property
    def takes_tools(self) -> bool:
        return self.model.takes_tools

    def stream(
        self, *, on_progress: ProgressCallback, tools: Sequence[Any] = (), **options: Any
    ) -> Iterator[Chunk]:
        self._cancel = threading.Event()
        self.model.seen.append(Seen(list(self.messages), list(tools), options))
        return self._answer(on_progress)

    def continue_answer(self, **how: Any) -> Iterator[Chunk]:
        begun = self.messages[-1]
        assert begun.pop("prefix")
        return self._after(begun["content"], self.stream(**how))

    def _after(self, text: str, rest: Iterator[Chunk]) -> Iterator[Chunk]:
        for chunk in rest:
            yield replace(chunk, text=text + chunk.text)
            text = ""

    def _answer(self, on_progress: ProgressCallback) -> Iterator[Chunk]:
        model = self.model
        pieces: list[str] = []
        calls = model.calls.pop(0) if model.calls else ()
        prompt = sum(map(_words, self.messages))
        for done in model.prefill:
            on_progress(Progress("prefill", done, 100, "tokens"))
        if model.error is not None and not model.answer and not calls:
            raise model.error
        reason: FinishReason = model.finish_reason
        for piece in [""] if calls else model.answer:
            while not self._cancel.is_set() and not model.steps.acquire(timeout=0.005):
                pass
            if self._cancel.is_set():
                reason = "cancelled"
                break
            if not calls:
                pieces.append(piece)
                yield Chunk(piece, (0,), _metrics(prompt, len(pieces), model.memory))
        if calls and reason == "stop":
            metrics = _metrics(prompt, len(pieces), model.memory)
            yield Chunk("", (), metrics, "tool_calls", tool_calls=tuple(calls))
            return
        if model.error is not None and reason != "cancelled":
            raise model.error
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        yield Chunk("", (), _metrics(prompt, len(pieces), model.memory), reason)


def _words(message: dict[str, Any]) -> int:
    content = message["content"]
    if isinstance(content, str):
        return len(content.split())
    return sum(64 if "image" in part else len(part["text"].split()) for part in content)


def _metrics(prompt: int, completion: int, memory: str | None) -> Metrics:
    return Metrics(
        prompt_tokens=prompt, completion_tokens=completion, decode_tok_s=41.2, memory=memory
    )


@dataclass(frozen=True)
class Seen:
    """What a model was given for one answer."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    options: dict[str, Any]


class FakeModel:
    """What the test sets: the answer's pieces, an error, how many pieces may come (``steps``).

    As long as there are ``calls``, an answer consists of the first of them.
    """

    def __init__(self, answer: Sequence[str] = ("Hello", " there."), **info: Any) -> None:
        self.info = replace(INFO, **info)
        self.name = self.info.name
        self.memory: str | None = None
        self.adapters: tuple[str, ...] = ()
        self.defaults: dict[str, Any] = {"temperature": 0.2, "top_p": 0.9}
        self.answer = list(answer)
        self.error: Exception | None = None
        self.finish_reason: FinishReason = "stop"
        self.prefill: Sequence[int] = ()
        self.steps = threading.Semaphore(1_000_000)
        self.closed = self.unloaded = False
        self.chats: list[FakeChat] = []
        self.takes_tools = True
        self.calls: list[Sequence[ToolCall]] = []
        self.seen: list[Seen] = []

    def hold(self) -> None:
        """From now on every piece waits for ``allow``."""
        self.steps = threading.Semaphore(0)

    def release(self) -> None:
        """Pieces come at once again."""
        self.steps = threading.Semaphore(1_000_000)

    def allow(self, pieces: int = 1) -> None:
        self.steps.release(pieces)

    @property
    def last_chat(self) -> FakeChat:
        return self.chats[-1]

    def given(self, *roles: str) -> list[Any]:
        """What the messages say that it was given last, of these roles or of all."""
        messages = self.seen[-1].messages
        return [each["content"] for each in messages if not roles or each["role"] in roles]

    def chat(self, system: str | None = None, **options: Any) -> FakeChat:
        self.chats.append(FakeChat(self, system, **options))
        return self.chats[-1]

    def load_chat(self, path: str | Path) -> FakeChat:
        try:
            record = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise StorageError(f"cannot read {path}: {error.strerror}") from error
        chat = self.chat(**record.get("options", {}))
        chat.messages = record["messages"]
        return chat

    def status(self, *, lanes: bool | None = None) -> Status | None:
        return None

    def advise(self) -> Outlook | None:
        return None

    def unload(self) -> None:
        self.unloaded = self.closed = True

    def count(self, prompt: str | Sequence[dict[str, str]]) -> int:
        return len(prompt.split()) if isinstance(prompt, str) else sum(map(_words, prompt))

    def close(self) -> None:
        self.closed = True


class FakeLoader:
    """A ``load`` that reports ``steps`` and ends when the test says so."""

    def __init__(
        self,
        model: FakeModel,
        *,
        held: bool = False,
        error: Exception | None = None,
        steps: Sequence[Progress] = (),
    ) -> None:
        self.model = model
        self.error = error
        self.steps = steps
        self.gate = threading.Event()
        if not held:
            self.gate.set()

    def __call__(self, progress: ProgressCallback) -> Any:
        last = Progress("load", 0, None, "bytes")
        for last in self.steps:
            progress(last)
        while not self.gate.wait(0.005):
            progress(last)
        if self.error is not None:
            raise self.error
        return self.model


PASS = PassTrace(
    seconds=0.02,
    lanes=(LaneUse("ssd", ((0.0, 0.019),)), LaneUse("cpu", ((0.0, 0.002), (0.01, 0.014)))),
    waited_s=0.014,
)
STREAMED = Status(
    clock_s=10.0,
    streamed=True,
    generating=True,
    ram=MemoryUse(138_000_000, 145_000_000),
    vram=None,
    kv=MemoryUse(3_200_000, 189_000_000),
    weight_bytes=96_000_000,
    tokens=40,
    passes=40,
    ssd_read_bytes=1_760_000_000,
    link_bytes=0,
    busy_s={"ssd": 0.97, "cpu": 0.3},
    ceiling_tok_s=66.0,
    metrics=Metrics(
        completion_tokens=40,
        decode_tok_s=41.2,
        accepted_per_pass=1.8,
        accepted_by_source={"ngram": 0.41},
        speculation="speculation: ngram",
    ),
    last_pass=PASS,
)
BEFORE = replace(
    STREAMED, clock_s=9.0, tokens=0, passes=0, ssd_read_bytes=0, busy_s={"ssd": 0.0, "cpu": 0.0}
)
OUTLOOK = Outlook(
    66.0,
    96_000_000,
    (Change("110 MB more RAM", 210.0, 3.8), Change("a disk twice as fast", 80.0, 2.0)),
)
VIEW = PanelData(
    status=STREAMED,
    flow=STREAMED.since(BEFORE),
    rates=(30.0, 38.0, 41.0, 40.0),
    outlook=OUTLOOK,
    hide="F3",
)


class WatchedModel(FakeModel):
    """``now`` is its status, ``looks`` are the wishes that came with each question."""

    def __init__(self, *arguments: Any, **info: Any) -> None:
        super().__init__(*arguments, **info)
        self.now = BEFORE
        self.looks: list[bool | None] = []
        self.advised = 0

    def status(self, *, lanes: bool | None = None) -> Status:
        self.looks.append(lanes)
        return self.now

    def advise(self) -> Outlook:
        self.advised += 1
        return OUTLOOK


SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
NAMES = ("read_file", "list", "delete")


class FakeServers(ToolServers):
    """One server ``files``, whose ``list`` runs without a question. ``results`` are by tool; one
    that is None stays away until the call is stopped.
    """

    def __init__(self) -> None:
        super().__init__([ServerConfig(name="files", command="x", allow=("list",))])
        self.tools = tuple(Tool("files", name, "", SCHEMA) for name in NAMES)
        self.results: dict[str, ToolResult | None] = {
            "read_file": ToolResult("milk"),
            "list": ToolResult("a\nb"),
            "delete": ToolResult("There is no such file.", "failed"),
        }
        self.called: list[tuple[str, dict[str, Any]]] = []
        self.running: list[Future[ToolResult]] = []
        self.ready = True

    @property
    def statuses(self) -> tuple[ServerStatus, ...]:
        if not self.ready:
            return (ServerStatus("files", "starting"),)
        return (ServerStatus("files", "ready", self.tools),)

    def call(self, tool: Tool, arguments: Mapping[str, Any], *, most: int) -> Future[ToolResult]:
        self.called.append((tool.name, dict(arguments)))
        future: Future[ToolResult] = Future()
        result = self.results[tool.name]
        if result is not None:
            future.set_result(result)
        self.running.append(future)
        return future


def toolbox() -> tuple[Toolbox, FakeServers]:
    servers = FakeServers()
    return Toolbox(servers), servers


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(uuid.uuid4().hex[:9], name, json.dumps(arguments))
