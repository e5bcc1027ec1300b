"""The servers under test, and one request to a server, streamed and timed.

Servers are localrt, llama.cpp's server, and those that are already running. Once started, each has
an address for every application's requests. Servers that are started here end with the benchmark,
even if it is killed: a small guard process ends them when its stdin closes. A request runs in the
thread of its session; another thread may end all requests with ``Client.cancel``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2

from localrt import system
from localrt.bench.mix.mix import AppRequest, Mix
from localrt.client.answer import events, listed_models, refusal
from localrt.client.http import Exchange
from localrt.client.servers import Address, read_address
from localrt.common.errors import LocalrtError, OptionError
from localrt.common.files import user_path
from localrt.common.formatting import one_line
from localrt.common.processes import helper_command, localrt_command
from localrt.common.settings import Settings
from localrt.hub import list_models
from localrt.hub.cache import note_use
from localrt.hub.listing import client_names

CLASS_HEADER = "X-Localrt-Class"
_LONGEST_REFUSAL = 1 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """The address for an application's requests, and the model's name there."""

    address: Address
    model: str


@dataclass(slots=True)
class TimedReply:
    """The result of a request; times are in seconds since it was sent.

    ``tokens`` is the server's count, or if it sends none, the number of pieces of the answer.
    ``cancelled``: given up as planned.
    """

    text: str = ""
    at: list[float] = field(default_factory=list)  # time of each piece of text
    end_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int = 0  # of the prompt's: they were not read again
    cancelled: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """The time to the first piece of text."""
        return self.at[0] if self.at else None

    @property
    def tpot_s(self) -> float | None:
        """The mean time per token after the first."""
        return (self.at[-1] - self.at[0]) / (self.tokens - 1) if self.tokens > 1 else None

    def stalls(self, longest_s: float) -> int:
        """Count gaps longer than ``longest_s``."""
        return sum(b - a > longest_s for a, b in pairwise(self.at))


class Client:
    """Sends requests, each on a separate connection."""

    def __init__(self) -> None:
        self._cancelled: str | None = None

    def cancel(self, why: str) -> None:
        """End all current and later requests, with ``why`` as their error."""
        self._cancelled = self._cancelled or why

    def send(self, place: Target, request: AppRequest, class_: str) -> TimedReply:
        """Send one request and read its answer; failures are in ``TimedReply.error``."""
        reply = TimedReply()
        started = time.perf_counter()

        def look() -> float | None:
            if self._cancelled:
                raise LocalrtError(self._cancelled)
            if request.give_up_s is None:
                return None
            left = started + request.give_up_s - time.perf_counter()
            if left <= 0:
                raise TimeoutError
            return left

        try:
            _exchange(place, request, class_, look, reply, started)
        except TimeoutError:
            reply.cancelled = True
        except LocalrtError as error:
            reply.error = one_line(error)
        except (ValueError, TypeError, AttributeError):
            reply.error = f"{place.address.origin} does not speak OpenAI's protocol"
        reply.end_s = time.perf_counter() - started
        return reply


def _exchange(
    place: Target,
    request: AppRequest,
    class_: str,
    look: Callable[[], float | None],
    reply: TimedReply,
    started: float,
) -> None:
    address, path = place.address, place.address.base + request.path
    body = json.dumps({"model": place.model, **request.body}).encode()
    headers = {CLASS_HEADER: class_}
    with Exchange(address, "POST", path, body, headers=headers, look=look) as exchange:
        head = exchange.head()
        if head.status_code != 200:
            raise refusal(address, head.status_code, head.headers, exchange.read(_LONGEST_REFUSAL))
        if not request.body.get("stream"):
            _take(json.loads(b"".join(exchange.pieces())), reply, started)
            return
        ended = False
        for event in events(exchange.pieces(), address):
            ended = event is None
            if event is not None:
                _take(event, reply, started)
        if not ended:
            raise LocalrtError("the connection broke off in the middle of the answer")


def _take(event: Mapping[str, Any], reply: TimedReply, started: float) -> None:
    """Add an event of a stream, or a whole answer without text."""
    if error := event.get("error"):
        message = error.get("message") if isinstance(error, dict) else error
        raise LocalrtError(one_line(message or "the server failed"))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        parts = (delta.get("reasoning_content"), delta.get("content"), choice.get("text"))
        if text := "".join(part for part in parts if part):
            reply.at.append(time.perf_counter() - started)
            reply.text += text
            reply.tokens = max(reply.tokens, len(reply.at))
    if usage := event.get("usage"):
        reply.prompt_tokens = usage.get("prompt_tokens")
        cached = usage.get("prompt_tokens_details") or {}
        reply.cached_tokens = cached.get("cached_tokens") or 0
        reply.tokens = usage.get("completion_tokens") or reply.tokens


_START_S, _LOOK_S = 600.0, 0.1
_SLOTS, _CTX = 4, 8192  # llama-server's parallel slots, and context per slot


@dataclass(frozen=True, slots=True)
class Running:
    """A running server: each application's place, and the processes by their names in the report.

    ``commands`` are the commands that started it, without folders, since results may be shared.
    """

    places: dict[str, Target] = field(default_factory=dict)
    owners: dict[str, int] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)


class Server(ABC):
    """A server that can be measured; ``name`` is for the report."""

    name: str

    def check(self, mix: Mix) -> None:  # noqa: B027  nothing to check
        """Check before anything starts that the mix can run; raise `LocalrtError` if not."""

    @abstractmethod
    def serve(self, mix: Mix) -> AbstractContextManager[Running]:
        """A context in which the server is started and ready.

        Raises:
            LocalrtError: it does not start.
        """


class Localrt(Server):
    """``localrt serve`` with the mix's model files by name."""

    name = "localrt"

    def __init__(self, paths: Mapping[str, Path], options: Mapping[str, object]) -> None:
        self._paths, self._options = paths, options
        self._alone = len(set(paths.values())) == 1

    @contextmanager
    def serve(self, mix: Mix) -> Iterator[Running]:
        running = Running()
        options = {**mix.server, **self._options}
        words = [str(next(iter(self._paths.values()))), "--name", "model"] if self._alone else []
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        if not self._alone:  # keep idle models loaded, since loading is not measured
            words += ["--keep-alive", "-1"]
        names = {
            name: "model" if self._alone else _listed_name(path)
            for name, path in self._paths.items()
        }
        with ExitStack() as stack:
            command = localrt_command("serve", *words, "--quiet")
            address = start(stack, running, self.name, command)
            for app in mix.apps:
                running.places[app.name] = Target(address, names[app.model])
            running.commands.append(_shown(["localrt", "serve", *words]))
            yield running


class LlamaServer(Server):
    """llama.cpp's server: one process per model and use, with fixed settings."""

    def __init__(
        self, name: str, binary: Path, paths: Mapping[str, Path], arguments: Sequence[str]
    ) -> None:
        self.name, self._binary = name, binary
        self._paths, self._arguments = paths, arguments

    def check(self, mix: Mix) -> None:
        if not os.access(self._binary, os.X_OK) or self._binary.is_dir():
            raise OptionError(f"--peer {self.name}={self._binary}: this is no program")
        for name, path in self._paths.items():
            if path.suffix != ".gguf":
                raise LocalrtError(f"{self.name} reads GGUF files only: {name} is {path.name}")

    @contextmanager
    def serve(self, mix: Mix) -> Iterator[Running]:
        running = Running()
        addresses: dict[object, Address] = {}
        ctx = _SLOTS * int(mix.server.get("ctx", _CTX))
        with ExitStack() as stack:
            for app in mix.apps:
                use = (self._paths[app.model], app.kind == "embeddings")
                if use not in addresses:
                    words = ["-m", str(use[0]), "-np", str(_SLOTS), "-c", str(ctx)]
                    words += ["--cont-batching"]
                    # A text to embed must fit in one batch.
                    words += ["--embeddings", "--pooling", "mean", "-ub", "2048"] if use[1] else []
                    words += self._arguments
                    command, owner = [str(self._binary), *words], f"{self.name} ({app.name})"
                    addresses[use] = start(stack, running, owner, command)
                    running.commands.append(_shown([self._binary.name, *words]))
                running.places[app.name] = Target(addresses[use], app.model)
            yield running


class RunningServer(Server):
    """A server that is already running, at a URL. Its memory is not measured."""

    def __init__(self, url: str, key: str | None) -> None:
        self._address = read_address(url, key)
        self.name = self._address.place
        self._models: dict[str, str] = {}

    def check(self, mix: Mix) -> None:
        url = self._address.origin + self._address.base + "/models"
        try:
            body = _get(url, self._address.headers)
        except httpx2.HTTPError as error:
            raise LocalrtError(f"{url} cannot be read: {one_line(error)}") from error
        listed = [model.name for model in listed_models(body, self._address)]
        for name, model in mix.models.items():
            fitting = [each for each in (model, Path(model).stem, name) if each in listed]
            if not fitting and len(listed) != 1:
                raise LocalrtError(
                    f"{self._address.origin} lists {', '.join(listed[:5]) or 'no models'}, and not "
                    f"{model!r:.80}: give --model {name}=NAME"
                )
            self._models[name] = fitting[0] if fitting else listed[0]

    @contextmanager
    def serve(self, mix: Mix) -> Iterator[Running]:
        places = {app.name: Target(self._address, self._models[app.model]) for app in mix.apps}
        yield Running(places)


def make_servers(
    mix: Mix,
    paths: Mapping[str, Path],
    peers: Sequence[str],
    *,
    options: Mapping[str, object],
    arguments: Sequence[str],
    key: str | None,
) -> list[Server]:
    """Return localrt, started with ``options``, and the peers of ``--peer``.

    Peers that are programs get the ``arguments``, URLs the ``key``.

    Raises:
        OptionError: a peer is neither a URL nor ``NAME=PROGRAM``.
    """
    servers: list[Server] = [Localrt(paths, options)]
    for peer in peers:
        name, _, binary = peer.partition("=")
        if peer.startswith(("http://", "https://")):
            servers.append(RunningServer(peer, key))
        elif name and binary:
            servers.append(LlamaServer(name, user_path(binary).absolute(), paths, arguments))
        else:
            raise OptionError(f"--peer {peer!r:.80}: give a URL, or llama-server=PROGRAM")
    for server in servers:
        if sum(other.name == server.name for other in servers) > 1:
            raise OptionError(f"two servers are called {server.name}: give --peer NAME=PROGRAM")
        server.check(mix)
    return servers


# -- processes -------------------------------------------------------------------------------------


def start(stack: ExitStack, running: Running, owner: str, command: Sequence[str]) -> Address:
    """Start a server on a free port and wait until it is ready; it ends with ``stack``."""
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = str(bound.getsockname()[1])
    log = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - the stack closes it
    guard = subprocess.Popen(
        helper_command("localrt.bench.mix.guard", *command, "--port", port, folders=()),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        **system.OWN_GROUP,  # Ctrl+C reaches only the benchmark
    )
    stack.enter_context(guard)  # on exit, closes its stdin, which ends it, and waits
    assert guard.stdout is not None
    pid = guard.stdout.readline()
    address = read_address(f"http://127.0.0.1:{port}")
    until = time.monotonic() + _START_S
    while guard.poll() is None and time.monotonic() < until:
        with suppress(httpx2.HTTPError):
            _get(f"{address.origin}/health", address.headers)
            running.owners[owner] = int(pid)
            return address
        time.sleep(_LOOK_S)
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines() or ["it said nothing"]
    raise LocalrtError(f"the server did not start: {one_line(lines[-1])}")


def _get(url: str, headers: Mapping[str, str]) -> bytes:
    """Return the body at ``url``; any status but success is an ``HTTPError``."""
    response = httpx2.get(url, headers=headers, timeout=10, trust_env=False)
    return response.raise_for_status().content


def _listed_name(path: Path) -> str:
    """Register the file at ``path``; return the name that ``localrt serve`` gives the model."""
    settings = Settings.from_environment()
    note_use(str(path.absolute()), settings)
    for name, model in client_names(list_models(settings)).items():
        if model.path.samefile(path):
            return name
    raise LocalrtError(f"localrt serve does not list {path.name}")


def _shown(command: Sequence[str]) -> str:
    return " ".join(Path(word).name if Path(word).is_absolute() else word for word in command)
