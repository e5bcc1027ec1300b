"""Arguments that models write as plain text become what the tool's schema calls for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localrt.chat_format.json_schemas import ABSENT, accepted, parameters_of
from tests.chat_format.call_templates import tool
from tests.chat_format.test_call_syntax import fed, known, parser_of

DEFS: dict[str, Any] = {
    "$defs": {
        "size": {"enum": ["s", "m", "10"]},
        "count": {"type": "integer"},
        "loop": {"$ref": "#/$defs/loop"},
        "tree": {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/tree"}, {"type": "null"}]},
        **{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 3} for n in range(30)},
        "d30": {"type": "integer"},
        "a/b": {"type": "boolean"},
    },
    "definitions": {"old": {"anyOf": [{"type": "number"}, {"type": "null"}]}},
}
STRING, INTEGER, NUMBER, NULL = ({"type": t} for t in ("string", "integer", "number", "null"))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        # Text stays text.
        (STRING, "5", "5"),
        (STRING, '{"a": 1}', '{"a": 1}'),
        (STRING, "", ""),
        (STRING, "None", "None"),
        ({"enum": ["1", "true"]}, "1", "1"),
        ({"enum": ["1", 2]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"const": "null"}, "null", "null"),
        ({"$ref": "#/$defs/size"}, "10", "10"),
        ({"allOf": [{"$ref": "#/$defs/size"}], "description": "x"}, "10", "10"),
        ({"anyOf": [{"$ref": "#/$defs/size"}, NULL]}, "10", "10"),
        # Numbers.
        (INTEGER, "5", 5),
        (INTEGER, " 5.0 ", 5),
        (INTEGER, "5.5", 5.5),
        (NUMBER, "5.0", 5.0),
        (NUMBER, "5", 5),
        (NUMBER, "1e3", 1000.0),
        (INTEGER, "five", "five"),
        (NUMBER, "1e999", "1e999"),
        ({"type": "array"}, "[1, -1e999]", "[1, -1e999]"),
        (INTEGER, "", ABSENT),
        (INTEGER, "None", ABSENT),
        ({"$ref": "#/$defs/count"}, "5.0", 5),
        ({"allOf": [NUMBER, INTEGER]}, "5.0", 5),
        ({"type": "number", "enum": [1, 2]}, "2.0", 2),
        ({"enum": [1, 2]}, "2", 2),
        ({"const": 7}, "7", 7),
        # With null.
        ({"anyOf": [INTEGER, NULL]}, "5.0", 5),
        ({"oneOf": [INTEGER, NULL]}, "None", None),
        ({"type": ["integer", "null"]}, "null", None),
        ({"type": ["integer", "null"]}, "", None),
        ({"type": "integer", "nullable": True}, "null", None),
        ({"$ref": "#/definitions/old"}, "2.5", 2.5),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["string", "null"]}, "", ""),
        # Several types.
        ({"type": ["string", "integer"]}, "5", 5),
        ({"type": ["string", "number"]}, "5", 5),
        ({"type": ["string", "integer"]}, "5.5", "5.5"),
        ({"anyOf": [{"type": "array"}, STRING]}, '["a"]', ["a"]),
        # Truth.
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "false", False),
        ({"type": "boolean"}, "FALSE", False),
        ({"$ref": "#/$defs/a~1b"}, "True", True),
        # Lists and objects.
        ({"type": "array"}, "[1, 'a', None]", [1, "a", None]),
        ({"type": "object"}, '{"a": true}', {"a": True}),
        ({"properties": {"a": INTEGER}}, "{'a': True}", {"a": True}),
        ({"type": "array"}, "", ABSENT),
        # Nothing is said, or nothing that can be read.
        ({}, "5", 5),
        (True, "x", "x"),
        ({}, "", ""),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"$ref": "#/$defs/nowhere"}, "x", "x"),
        # Many ways lead to the same schema.
        ({"$ref": "#/$defs/tree"}, "5", 5),
        ({"$ref": "#/$defs/d0"}, "5.0", 5),
        ({"$ref": "https://example.org/s.json"}, "x", "x"),
        ({"anyOf": [INTEGER, {}]}, "x", "x"),
        ({"type": 3, "enum": "x", "anyOf": {}}, "x", "x"),
    ],
)
def test_text_is_read_as_the_schema_says(schema: Any, text: str, value: Any) -> None:
    found = accepted(schema, DEFS).read(text)
    assert found is value if value is ABSENT else (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("schema", "properties", "required"),
    [
        ({"properties": {"a": STRING}, "required": ["a", "b"]}, {"a"}, {"a"}),
        ({"$ref": "#/$defs/o", "$defs": {"o": {"properties": {"a": STRING}}}}, {"a"}, set()),
        (
            {
                "allOf": [
                    {"properties": {"a": STRING}, "required": ["a"]},
                    {"properties": {"b": STRING}},
                ]
            },
            {"a", "b"},
            {"a"},
        ),
        ({"anyOf": [{"properties": {"a": STRING}, "required": ["a"]}, {}]}, {"a"}, set()),
        (None, set(), set()),
        ([1], set(), set()),
        ({"anyOf": [{"$ref": "#"}, {"$ref": "#"}], "properties": {"a": STRING}}, {"a"}, set()),
    ],
)
def test_parameters_wherever_they_stand(schema: Any, properties: set[str], required: Any) -> None:
    found, needed = parameters_of(schema)
    assert (set(found), needed) == (properties, required)


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {
        "size": {"$ref": "#/$defs/size"},
        "count": {"anyOf": [{"$ref": "#/$defs/count"}, NULL]},
        "note": {"type": ["string", "null"]},
    },
    "required": ["size"],
    **DEFS,
}


CODER = (
    "<tool_call>\n<function=f>\n<parameter=size>\n10\n</parameter>\n<parameter=count>\n3.0\n"
    "</parameter>\n</function>\n</tool_call>"
)
GLM = (
    "<tool_call>f\n<arg_key>size</arg_key>\n<arg_value>10</arg_value>\n"
    "<arg_key>count</arg_key>\n<arg_value>3.0</arg_value>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("name", "text"),
    [("Qwen Coder, Qwen 3.5, Nemotron 3", CODER), ("Hermes, Qwen", CODER), ("GLM", GLM)],
)
def test_calls_have_the_types_of_their_tools(name: str, text: str) -> None:
    parser = parser_of(*known(name), [tool("f", parameters=PARAMETERS)], "")
    assert fed(parser, text, [7]) == ""
    assert [json.loads(call.arguments) for call in parser.calls] == [{"size": "10", "count": 3}]
