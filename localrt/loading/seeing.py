"""Gives an engine its model's sight: the tower's open files, whose weights wait for a picture."""

from __future__ import annotations

from pathlib import Path

from localrt.common.errors import LocalrtError, UnsupportedModelError
from localrt.engine.native.engine import NativeEngine
from localrt.engine.protocol import Engine
from localrt.models.tokenizers import Tokenizer
from localrt.models.vision.registry import read_tower
from localrt.models.vision.sight import Sight
from localrt.models.vision.source import vision_source


def load_sight(path: Path, engine: Engine, tokenizer: Tokenizer | None) -> str:
    """Let ``engine`` see, if the model at ``path`` does; returns why it cannot, or what else is to
    say of its pictures, or "".

    A model whose pictures cannot be used answers to text all the same.
    """
    if not isinstance(engine, NativeEngine) or tokenizer is None:
        return ""
    try:
        source = vision_source(path)
        if source is None:
            return ""
        try:
            tower = read_tower(source.config, source.processor)
            name = tower.row_token or tower.placeholder
            token = tokenizer.token_id(name)
            if token is None:
                raise UnsupportedModelError(f"the vocabulary has no token {name!r}")
            if tower.both_ways and engine.info.device != "cpu":
                raise UnsupportedModelError(
                    "this model's pictures, whose rows see one another, need device 'cpu' so far"
                )
            engine.see(lambda ops, take: Sight(tower, source, ops, token, take))
        except BaseException:
            source.close()
            raise
    except LocalrtError as error:
        return f"pictures are refused: {error}"
    return tower.note
