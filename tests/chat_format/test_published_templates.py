"""Published chat templates, which are not part of the project: their calls are read back.

Set ``LOCALRT_TEST_TEMPLATES`` to a folder of ``.jinja`` files, such as llama.cpp's
``models/templates``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from localrt.chat_format.chat_template import ChatTemplate
from localrt.chat_format.messages import for_template
from localrt.chat_format.parser import common_start, is_harmony
from localrt.chat_format.template_syntax import TemplateSyntax
from localrt.chat_format.thinking import thoughts_apart
from localrt.common.errors import TemplateError
from tests.chat_format.call_templates import calling, ids_of
from tests.chat_format.test_call_syntax import (
    as_json,
    fed,
    parser_of,
    tools_of,
)

_FOLDER = os.environ.get("LOCALRT_TEST_TEMPLATES", "")
_FILES = sorted(Path(_FOLDER).glob("*.jinja")) if _FOLDER else []
_ENDS = ("<|message_sep|>\n\n", "<|eot_id|>", "<|eom_id|>")  # of turns whose calls have no end
_USER = {"role": "user", "content": "Hello?"}
_FLAT = {"city": 'Oslo "x"\n<a> é日', "days": 3, "to": -1.5, "fine": True, "code": "true"}
_NESTED = {"o": {"a": [1, {"b": "c"}]}, "l": ["x", 2], "none": None}
_CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "flat": [("weather", _FLAT)],
    "nested": [("weather", _NESTED)],
    "empty": [("weather", {})],
    "two": [("weather", {"city": "Oslo"}), ("get_it", {"days": 7})],
}


@pytest.mark.skipif(not _FILES, reason="LOCALRT_TEST_TEMPLATES names no folder of templates")
@pytest.mark.parametrize("path", _FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("case", _CALLS)
def test_calls_of_a_published_template_are_read_back(path: Path, case: str) -> None:
    template = ChatTemplate(path.read_text(encoding="utf-8"))
    syntax, calls = TemplateSyntax.of(template), _CALLS[case]
    tools = tools_of(calls)
    for each in tools:
        each["function"]["description"] = "A tool."
        for schema in each["function"]["parameters"]["properties"].values():
            schema["description"] = "A value."
    given: list[Any] = [_USER, calling(*calls, ids=ids_of(path.stem))]
    if is_harmony(template.tool_source):
        given = thoughts_apart(given)
    shaped = for_template(given, arguments_as_text=syntax.calls.as_text)
    try:
        asked, prompt = (
            template.render([_USER], tools=tools, add_generation_prompt=asks)
            for asks in (False, True)
        )
        whole = template.render(shaped, tools=tools, add_generation_prompt=False)
    except TemplateError as error:
        pytest.skip(f"it does not write this: {error}")
    if not whole.startswith(prompt):  # it begins to think, or leaves empty thoughts out
        prompt = common_start(asked, whole)
    answer = whole[len(prompt) :]
    if asked == prompt:  # every text ends with what begins the next answer
        answer = answer.partition("<|eot_id|>")[0]
    answer = next((answer.removesuffix(end) for end in _ENDS if answer.endswith(end)), answer)
    if not all(name in answer for name, _ in calls):
        pytest.skip("it does not write all calls")
    parser = parser_of(template, syntax, tools, prompt)
    fed(parser, answer, [3, 1, 7])
    found = [(call.name, json.loads(call.arguments)) for call in parser.calls]
    assert as_json(found) == as_json(calls)
