"""The four protocols as one: each dialect's own client sends a question and reads its answer.

What an answer is in any of them is an ``Answer``. Whatever only one dialect has stays in the tests
of its client.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

HI = [{"role": "user", "content": "hi"}]


def colours(*names: str) -> dict[str, Any]:
    """The schema of an object with one of these colours."""
    return {
        "type": "object",
        "properties": {"colour": {"enum": [*names]}},
        "required": ["colour"],
        "additionalProperties": False,
    }


COLOUR = colours("red", "blue")
PAINT = {"name": "paint", "parameters": COLOUR}
# The least that a request of each path has.
BODIES: Mapping[str, Mapping[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 4},
    "/api/chat": {"model": "tiny", "messages": HI, "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {
        "model": "tiny",
        "prompt": "hi",
        "stream": False,
        "options": {"num_predict": 4},
    },
}
# What a stream of it says while there is nothing new.
SIGNS: Mapping[str, str] = {
    "/v1/chat/completions": '"delta":{}',
    "/v1/completions": '"text":"","logprobs":null,"finish_reason":null',
    "/v1/responses": "event: response.in_progress",
    "/v1/messages": "event: ping",
    "/api/chat": '"content":""},"done":false',
    "/api/generate": '"response":"","done":false',
}


@dataclass(frozen=True)
class Question:
    """``most`` tokens are written at most. With a ``tool`` it must be called; ``think`` is how
    much, or False. ``begun`` is how the answer begins.
    """

    text: str = "hi"
    system: str | None = None
    begun: str | None = None
    most: int = 12
    stop: str | None = None
    tool: Mapping[str, Any] | None = None
    think: str | bool | None = None
    stream: bool = False

    def messages(self) -> list[Any]:
        begun = [{"role": "assistant", "content": self.begun}] if self.begun else []
        return [{"role": "user", "content": self.text}, *begun]

    def with_system(self) -> list[Any]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.messages()]


def events_in(stream: str) -> list[Any]:
    """The JSON of a stream's events."""
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def data_uri(data: str) -> str:
    return f"data:image/png;base64,{data}"


@dataclass(frozen=True)
class Answer:
    """``calls`` are names and arguments; ``reason`` is in the library's words."""

    text: str
    reason: str
    prompt_tokens: int
    tokens: int
    thought: str = ""
    calls: tuple[tuple[str, Any], ...] = ()


@cache
def client_of(library: str, url: str) -> Any:
    """Return the client of a vendor's ``library`` for a server: making one takes 50 ms."""
    module = pytest.importorskip(library)
    if library == "ollama":
        return module.Client(host=url)
    url = f"{url}/v1" if library == "openai" else url
    kind = module.OpenAI if library == "openai" else module.Anthropic
    return kind(base_url=url, api_key="any", max_retries=0)


def ask_chat(url: str, model: str, asked: Question) -> Answer:
    """OpenAI's chat completions."""
    fields: dict[str, Any] = {"messages": asked.with_system(), "max_tokens": asked.most}
    more: dict[str, Any] = {}
    if asked.begun:
        fields["messages"][-1] = {**fields["messages"][-1], "prefix": True}
    if asked.tool is not None:
        fields |= {"tools": [{"type": "function", "function": asked.tool}]}
        fields |= {"tool_choice": "required", "parallel_tool_calls": False}
    if asked.think is not None:
        more["reasoning_effort"] = asked.think or "none"
    if asked.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    got = client_of("openai", url).chat.completions.create(
        model=model, temperature=0, stop=asked.stop, extra_body=more, **fields
    )
    events = list(got) if asked.stream else [got]
    choices = [event.choices[0] for event in events if event.choices]
    messages = [choice.delta if asked.stream else choice.message for choice in choices]
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    usage = events[-1].usage
    return Answer(
        "".join(message.content or "" for message in messages),
        next(choice.finish_reason for choice in choices if choice.finish_reason),
        usage.prompt_tokens,
        usage.completion_tokens,
        "".join(getattr(message, "reasoning_content", None) or "" for message in messages),
        tuple((call.name, json.loads(call.arguments)) for call in calls),
    )


def ask_responses(url: str, model: str, asked: Question) -> Answer:
    """OpenAI's Responses."""
    fields: dict[str, Any] = {"input": asked.messages(), "max_output_tokens": asked.most}
    if asked.system is not None:
        fields["instructions"] = asked.system
    if asked.tool is not None:
        fields["tools"] = [{"type": "function", "strict": True, **asked.tool}]
        fields |= {"tool_choice": "required", "parallel_tool_calls": False}
    if asked.think is not None:
        fields["reasoning"] = {"effort": asked.think or "none"}
    responses = client_of("openai", url).responses
    if asked.stream:
        with responses.stream(model=model, temperature=0, **fields) as stream:
            last = list(stream)[-1]
        got = getattr(last, "response", None)
        assert getattr(got, "status", "failed") != "failed", f"{last}"
    else:
        got = responses.create(model=model, temperature=0, **fields)
    calls = [item for item in got.output if item.type == "function_call"]
    thoughts = [item.content[0].text for item in got.output if item.type == "reasoning"]
    limited = got.status == "incomplete" and got.incomplete_details.reason == "max_output_tokens"
    return Answer(
        got.output_text,
        "length" if limited else "tool_calls" if calls else "stop",
        got.usage.input_tokens,
        got.usage.output_tokens,
        "".join(thoughts),
        tuple((call.name, json.loads(call.arguments)) for call in calls),
    )


def ask_anthropic(url: str, model: str, asked: Question) -> Answer:
    """Anthropic's Messages."""
    fields: dict[str, Any] = {"messages": asked.messages(), "max_tokens": asked.most}
    more: dict[str, Any] = {"temperature": 0}
    if asked.system is not None:
        fields["system"] = asked.system
    if asked.stop is not None:
        fields["stop_sequences"] = ["@@@", asked.stop]
    if asked.tool is not None:
        name, schema = asked.tool["name"], asked.tool["parameters"]
        fields["tools"] = [{"name": name, "description": "Paints.", "input_schema": schema}]
        fields["tool_choice"] = {"type": "tool", "name": name}
    if asked.think:
        more["output_config"] = {"effort": asked.think}
    of_client = client_of("anthropic", url).messages
    if asked.stream:
        with of_client.stream(model=model, extra_body=more, **fields) as stream:
            got = stream.get_final_message()
    else:
        got = of_client.create(model=model, extra_body=more, **fields)
    parts: dict[str, list[Any]] = {"text": [], "thinking": [], "tool_use": []}
    for block in got.content:
        parts[block.type].append(block)
    assert got.stop_sequence == (asked.stop if got.stop_reason == "stop_sequence" else None)
    reasons = {"max_tokens": "length", "tool_use": "tool_calls"}
    return Answer(
        "".join(block.text for block in parts["text"]),
        reasons.get(got.stop_reason, "stop"),
        got.usage.input_tokens + got.usage.cache_read_input_tokens,
        got.usage.output_tokens,
        "".join(block.thinking for block in parts["thinking"]),
        tuple((block.name, block.input) for block in parts["tool_use"]),
    )


def ask_ollama(url: str, model: str, asked: Question) -> Answer:
    """Ollama's chat. Its clients cannot ask for a call: the server's defaults do."""
    options = {"temperature": 0, "num_predict": asked.most, "stop": asked.stop}
    fields: dict[str, Any] = {"messages": asked.with_system(), "options": options}
    if asked.tool is not None:
        fields["tools"] = [{"type": "function", "function": asked.tool}]
    if asked.think is not None:
        fields["think"] = asked.think
    got = client_of("ollama", url).chat(model=model, stream=asked.stream, **fields)
    pieces = list(got) if asked.stream else [got]
    *before, last = pieces
    assert (last.done, any(piece.done for piece in before)) == (True, False)
    calls = [call.function for piece in pieces for call in piece.message.tool_calls or ()]
    return Answer(
        "".join(piece.message.content or "" for piece in pieces),
        "tool_calls" if calls and last.done_reason == "stop" else last.done_reason,
        last.prompt_eval_count,
        last.eval_count,
        "".join(piece.message.thinking or "" for piece in pieces),
        tuple((call.name, dict(call.arguments)) for call in calls),
    )


Ask = Callable[[str, str, Question], Answer]
DIALECTS: Mapping[str, Ask] = {
    "chat": ask_chat,
    "responses": ask_responses,
    "anthropic": ask_anthropic,
    "ollama": ask_ollama,
}
# What one of them has no field for.
LACKS: Mapping[str, Iterable[str]] = {"responses": ("stop", "begun")}
