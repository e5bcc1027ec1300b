"""Gives an engine its model's sight: the tower's open files, whose weights wait for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localrt.common.errors import LocalrtError, UnsupportedModelError
from localrt.engine.native.engine import NativeEngine
from localrt.engine.protocol import Engine
from localrt.models.tokenizers import Tokenizer
from localrt.models.vision.registry import read_tower
from localrt.models.vision.sight import Sight
from localrt.models.vision.source import VisionSource, vision_source
from localrt.models.vision.tower import Tower
from localrt.quant.choose import all_vision_steps

_MOST_ROWS = 4096  # of a picture: a photo of 12 megapixels has 12,000 by Qwen's own settings


class Eyes:
    """The tower of the model at a path, if it has one; ``problem`` says why it cannot be used.
    ``projectors`` are those of ``vision_source``.

    A model whose pictures cannot be used answers to text all the same.
    """

    def __init__(self, path: Path, projectors: Sequence[Path] = ()) -> None:
        self.problem = ""
        self.tower: Tower | None = None
        self._source: VisionSource | None = None
        try:
            self._source = vision_source(path, projectors)
            if self._source is None:
                return
            # What it takes counts before the model's memory is planned.
            from PIL import Image

            Image.preinit()
            self.tower = read_tower(self._source.config, self._source.processor)
        except LocalrtError as error:
            self._refuse(error)

    @property
    def notes(self) -> list[str]:
        """What is to say of the model's pictures."""
        note = self.problem or (self.tower.note if self.tower is not None else "")
        return [note] if note else []

    def open_for(self, engine: Engine, tokenizer: Tokenizer | None, ctx: int) -> None:
        """Let ``engine`` see; of a context of ``ctx`` tokens a picture takes half at most."""
        tower, source = self.tower, self._source
        if tower is None or source is None:
            return
        if not isinstance(engine, NativeEngine) or tokenizer is None:
            self.close()
            self.tower = None
            return
        try:
            name = tower.row_token or tower.placeholder
            token = tokenizer.token_id(name)
            if token is None:
                raise UnsupportedModelError(f"the vocabulary has no token {name!r}")
            bounded = tower.within(min(_MOST_ROWS, ctx // 2))
            engine.see(lambda ops, take: Sight(bounded, source, all_vision_steps(ops), token, take))
        except LocalrtError as error:
            self._refuse(error)

    def close(self) -> None:
        """Close the files."""
        if self._source is not None:
            self._source.close()

    def _refuse(self, error: LocalrtError) -> None:
        self.close()
        self.problem, self.tower = f"pictures are refused: {error}", None
