"""Options, presets and files of conversations for the chat page: private calls, as those of
``localrt.server.conversations``. Presets and defaults are the terminal app's.
"""

from __future__ import annotations

import base64
import re
from dataclasses import fields as fields_of
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from localrt.common.errors import OptionError, StorageError
from localrt.engine.option_help import OPTION_HELP
from localrt.engine.options import Options, Overflow, read_options
from localrt.engine.sampling import Sampling
from localrt.history.export import as_json, as_markdown
from localrt.history.presets import Preset, PresetsFile, read_defaults
from localrt.server.answers import Answers
from localrt.server.conversations import FILE, described, open_conversation, owners_endpoint
from localrt.server.dialect import Payload
from localrt.server.errors import invalid, without_folders
from localrt.server.messages import encoded
from localrt.server.request_schema import OBJECT, STRING, TEXT, Field, RequestSchema, required
from localrt.server.service import service_of

_PRESET = RequestSchema(
    {"name": required(STRING), "instructions": Field(TEXT), "options": required(OBJECT)}
)
_OPTIONS = RequestSchema({"options": required(OBJECT)})
SCHEMAS = (_PRESET, _OPTIONS)
_AS_JSON = ("stop", "logit_bias", "dry_sequence_breakers")  # or as one text


def options(answers: Answers, request: Request, fields: Payload) -> Payload:
    """What a form needs to ask for every option; adapters are models in its list."""
    asked = [_asked(name, text) for name, text in OPTION_HELP.items() if name != "adapter"]
    return {"data": asked}


def check(answers: Answers, request: Request, fields: Payload) -> Payload:
    """Refuse options that no answer could have, before they are kept in a browser."""
    read_options(fields["options"])
    return {}


def recommended(answers: Answers, request: Request, fields: Payload) -> Payload:
    """The models that this machine runs well, and whether the server can have several."""
    from localrt.planning.recommend import recommended  # brings numpy

    several = service_of(request).models.several
    return {"data": [one.model.name for one in recommended()], "several": several}


def _asked(name: str, text: str) -> Payload:
    """Describe an option: its ``kind``, and its bounds or choices."""
    known = {one.name: one for owner in (Sampling, Options) for one in fields_of(owner)}[name]
    about: Payload = {"name": name, "help": text, "kind": "json" if name in _AS_JSON else "text"}
    if (bounds := known.metadata.get("bounds")) is not None:
        step = 1 if isinstance(bounds[0], int) else "any"
        about |= {"kind": "number", "min": bounds[0], "max": bounds[1], "step": step}
    elif name == "overflow" or isinstance(known.default, bool):
        choices = get_args(Overflow) if name == "overflow" else (True, False)
        about |= {"kind": "choice", "choices": choices}
    return about


def presets(answers: Answers, request: Request, fields: Payload) -> Payload:
    """The presets, and what new conversations begin with."""
    found, default = PresetsFile(answers.config_dir).list(), read_defaults(answers.config_dir)
    data = [{"name": one.name, "instructions": one.system, "options": one.options} for one in found]
    return {"data": data, "default": {"instructions": default.system, "options": default.options}}


def save_preset(answers: Answers, request: Request, fields: Payload) -> Payload:
    """A new preset; it replaces one of the same name."""
    options = {name: value for name, value in fields["options"].items() if value is not None}
    preset = Preset(fields["name"], fields.get("instructions") or None, options)
    PresetsFile(answers.config_dir).save(preset)
    return {"name": preset.name}


def export(answers: Answers, request: Request, fields: Payload) -> Response:
    """The shown branch as Markdown, or with ``form=json`` as JSON that can be imported."""
    found = open_conversation(answers, request)
    if request.query_params.get("form") == "json":
        return Response(as_json(found, found.turns), media_type="application/json")
    text = as_markdown(found, found.turns, lambda one: f"![{one.name}]({one.data_uri})")
    return Response(text, media_type="text/markdown")


def load(answers: Answers, request: Request, fields: Payload) -> Payload:
    """New conversations from a file of this or another program."""
    name = re.sub(r"[^\w.-]+", "-", fields["filename"])[-80:].lstrip(".") or "file"
    try:
        with TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(base64.b64decode(encoded(fields)[1]))
            found = answers.history.load_file(path)
    except (OptionError, StorageError, ValueError) as error:
        raise invalid(without_folders(str(error)), "file_data") from error
    return {"data": [*map(described, found.conversations)], "left_out": found.left_out}


ROUTES = (
    owners_endpoint("/v1/options", "GET", options),
    owners_endpoint("/v1/options", "POST", check, _OPTIONS),
    owners_endpoint("/v1/presets", "GET", presets),
    owners_endpoint("/v1/presets", "POST", save_preset, _PRESET),
    owners_endpoint("/v1/recommended", "GET", recommended),
    owners_endpoint("/v1/conversations/{id}/export", "GET", export),
    owners_endpoint("/v1/conversations/import", "POST", load, FILE),
)
