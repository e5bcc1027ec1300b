"""Settings that come with a model: those of Ollama's store, and suppressed tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import localrt
from localrt.hub.other_programs import Extras
from localrt.hub.resolving import ResolvedModel
from tests.inside import core_of

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
EXTRAS = Extras(
    go_template=True,
    system="You are a pirate.",
    params={"temperature": 0, "top_k": 3, "stop": ["zz"], "num_ctx": 64, "min_p": "odd"},
)


@pytest.fixture
def model(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[localrt.Model]:
    """Of a folder with a chat template of its own, as Ollama would have it."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config["chat_template"] = TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = ResolvedModel("ollama:pirate:latest", folder, None, "ollama", EXTRAS)
    monkeypatch.setattr("localrt.loading.context.resolve", lambda *_, **__: found)
    with localrt.load("pirate", **getattr(request, "param", {})) as loaded:
        yield loaded


def test_defaults_of_store(model: localrt.Model) -> None:
    assert model.info.ctx == 64
    assert model.info.has_chat_template
    kept = {name: model.defaults.get(name) for name in ("temperature", "top_k", "stop", "min_p")}
    assert (kept["temperature"], kept["top_k"], kept["stop"]) == (0, 3, ["zz"])
    assert kept["min_p"] != "odd"  # what cannot be used is left out


def test_system_prompt_of_store(model: localrt.Model) -> None:
    def shown(*messages: dict[str, str]) -> str:
        assert model.tokenizer is not None
        return model.tokenizer.decode(core_of(model).requests.render(messages))

    hi = {"role": "user", "content": "Hi"}
    assert shown(hi) == "[system] You are a pirate.[user] Hi[assistant]"
    assert shown({"role": "system", "content": ""}, hi) == "[system] [user] Hi[assistant]"
    assert shown({"role": "developer", "content": "X"}, hi) == "[system] X[user] Hi[assistant]"
    late = {"role": "system", "content": "X"}  # the beginning of the prompt stays what it was
    assert (
        shown(hi, late, hi) == "[system] You are a pirate.[user] Hi[system] X[user] Hi[assistant]"
    )


@pytest.mark.parametrize("model", [{"ctx": 128}], indirect=True)
def test_given_context(model: localrt.Model) -> None:
    assert model.info.ctx == 128


def test_tokens_that_a_model_suppresses(tiny_folder: Path, tmp_path: Path) -> None:
    """The best token is not taken where the model's settings say that it is never to be."""
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    settings: dict[str, Any] = {"eos_token_id": 2, "do_sample": False}
    taken: list[int] = []
    for _ in range(3):
        (folder / "generation_config.json").write_text(
            json.dumps({**settings, "suppress_tokens": taken})
        )
        with localrt.load(folder) as model:
            (token,) = model.generate(token_ids=[5, 6], max_tokens=1, ignore_eos=True).token_ids
        assert token not in taken
        taken.append(token)


def test_a_template_in_another_language_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    config.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch:
        found = ResolvedModel("ollama:pirate:latest", folder, None, "ollama", EXTRAS)
        patch.setattr("localrt.loading.context.resolve", lambda *_, **__: found)
        with localrt.load("pirate") as model:
            notes = [note for note in model.info.notes if "no chat template" in note]
    assert notes == [
        "the model has no chat template: chatting in a plain format, as Ollama's is in Go's "
        "language; `chat_template` takes Jinja2"
    ]
