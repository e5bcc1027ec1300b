"""Short names of models that people run: ``llama3.2:3b`` stands for a repository of the hub.

A name is a family and a tag, as Ollama has them; a family alone means the first of its models here.
``known_models.json`` names each one's repository of GGUF files and the public page that names it,
``known_configs.json`` has the published configs, so that it can be planned for without the network.
People add names of their own in ``config.toml`` (``names.py``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from localrt.hub.names import close_to

_CONFIGS = Path(__file__).with_name("known_configs.json")
_MODELS = Path(__file__).with_name("known_models.json")
_FIRST = "latest"  # a tag for the first of a family
_THINKS = re.compile(r"thinking|reasoning|\bR1\b|QwQ|gpt-oss|magistral", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KnownModel:
    """``parameters`` are billions, of the text part alone. ``shape`` names its config.

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
        """Where to read that the repository is this model's."""
        return self.source or f"https://huggingface.co/{self.repo}"

    def config(self) -> Mapping[str, Any]:
        """The published ``config.json``, as far as it says the shape of the text model."""
        return _configs()[self.shape]


KNOWN_MODELS: tuple[KnownModel, ...] = tuple(
    KnownModel(**row) for row in json.loads(_MODELS.read_text(encoding="utf-8"))
)
"""All of them; the first of a family is what the family's name alone means."""


def find_known(name: str) -> KnownModel | None:
    """The model of this short name, in any case: ``"llama3.2:3b"``, ``"llama3.2"``."""
    name = name.strip().lower().removesuffix(f":{_FIRST}")
    return next((model for model in KNOWN_MODELS if name in (model.name, model.family)), None)


def known_repo(repo: str) -> Mapping[str, Any] | None:
    """The published config of the model in this repository, where it is one of these."""
    found = (model for model in KNOWN_MODELS if model.repo.lower() == repo.lower())
    return next((model.config() for model in found), None)


def repo_thinks(repo: str) -> bool:
    """Whether the model in this repository thinks before it answers: answers then take longer."""
    known = next((model for model in KNOWN_MODELS if model.repo.lower() == repo.lower()), None)
    if known is not None:
        return known.thinks
    return _THINKS.search(repo) is not None


def close_names(name: str, others: Iterable[str] = ()) -> list[str]:
    """Up to three short names, or some of ``others``, that ``name`` may have been meant for."""
    known = [each for model in KNOWN_MODELS for each in (model.family, model.name)]
    return close_to(name, [*others, *known])


@cache
def _configs() -> Mapping[str, Mapping[str, Any]]:
    found: Mapping[str, Mapping[str, Any]] = json.loads(_CONFIGS.read_text(encoding="utf-8"))
    return found
