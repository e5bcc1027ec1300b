"""Short names of popular models: ``llama3.2:3b`` stands for a repository of the hub.

A name is a family and a tag, as in Ollama; a family alone means its first model here.
``known_models.json`` has each model's repository of GGUF files and the public page that names it,
``known_configs.json`` the published configs, so that planning needs no network. Users add their own
names in ``config.toml`` (``names.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from localrt.hub.names import close_to

_CONFIGS = Path(__file__).with_name("known_configs.json")
_MODELS = Path(__file__).with_name("known_models.json")
_FIRST = "latest"  # the tag of a family's first model
_THINKS = re.compile(r"thinking|reasoning|\bR1\b|QwQ|gpt-oss|magistral", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """``parameters`` are billions, of the text model only. ``shape`` names its config.

    ``source`` is the public page where ``repo`` was found; None: the repository's own. ``thinks``:
    it thinks before it answers.
    """

    name: str
    repo: str
    parameters: float
    shape: str
    source: str | None = None
    thinks: bool = False

    @property
    def family(self) -> str:
        """The name without its tag: ``"llama3.2"``."""
        return self.name.partition(":")[0]

    @property
    def page(self) -> str:
        """The repository's page on the hub."""
        return f"https://huggingface.co/{self.repo}"

    def config(self) -> Mapping[str, object]:
        """The part of the published ``config.json`` that describes the text model's shape."""
        return _configs()[self.shape]


KNOWN_MODELS: tuple[KnownModel, ...] = tuple(
    KnownModel(**row) for row in json.loads(_MODELS.read_text(encoding="utf-8"))
)
"""All of them; the first of a family is what the family's name alone means."""


def find_known(name: str) -> KnownModel | None:
    """The model with this short name, ignoring case: ``"llama3.2:3b"``, ``"llama3.2"``."""
    name = name.strip().lower().removesuffix(f":{_FIRST}")
    return next((model for model in KNOWN_MODELS if name in (model.name, model.family)), None)


def known_repo(repo: str) -> Mapping[str, object] | None:
    """The published config of this repository's model, if it is known."""
    found = (model for model in KNOWN_MODELS if model.repo.lower() == repo.lower())
    return next((model.config() for model in found), None)


def repo_thinks(repo: str) -> bool:
    """Whether the model in this repository thinks before it answers (slower answers)."""
    known = next((model for model in KNOWN_MODELS if model.repo.lower() == repo.lower()), None)
    if known is not None:
        return known.thinks
    return _THINKS.search(repo) is not None


def close_names(name: str, others: Iterable[str] = ()) -> list[str]:
    """Up to three short names, or names in ``others``, similar to ``name``."""
    known = [each for model in KNOWN_MODELS for each in (model.family, model.name)]
    return close_to(name, [*others, *known])


@cache
def _configs() -> Mapping[str, Mapping[str, object]]:
    found: Mapping[str, Mapping[str, object]] = json.loads(_CONFIGS.read_text(encoding="utf-8"))
    return found
