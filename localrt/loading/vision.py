"""Attaches a model's vision encoder to its engine; weights are read at the first image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from localrt.common.errors import LocalrtError, UnsupportedModelError
from localrt.engine.native.engine import NativeEngine
from localrt.engine.protocol import Engine
from localrt.models.tokenizers import Tokenizer
from localrt.models.vision.encoder import VisionEncoder
from localrt.models.vision.encoder_cache import VisionState
from localrt.models.vision.registry import VisionSource, read_encoder, vision_source
from localrt.quant.choose import all_vision_steps

_MOST_ROWS = 4096  # of an image: a photo of 12 megapixels has 12,000 by Qwen's own settings


class VisionLoader:
    """The vision encoder of the model at a path, if it has one; ``problem`` says why it cannot be
    used. ``projectors`` are those of ``vision_source``.

    A model whose encoder cannot be used still answers text.
    """

    def __init__(self, path: Path, projectors: Sequence[Path] = ()) -> None:
        self.problem = ""
        self.encoder: VisionEncoder | None = None
        self._source: VisionSource | None = None
        try:
            self._source = vision_source(path, projectors)
            if self._source is None:
                return
            # Imported before the model's memory is planned, which then counts it.
            from PIL import Image

            Image.preinit()
            self.encoder = read_encoder(self._source.config, self._source.processor)
        except LocalrtError as error:
            self._refuse(error)

    @property
    def notes(self) -> list[str]:
        """Notes for the user about image support."""
        note = self.problem or (self.encoder.note if self.encoder is not None else "")
        return [note] if note else []

    def attach(self, engine: Engine, tokenizer: Tokenizer | None, ctx: int) -> None:
        """Enable images on ``engine``, each limited to half of a context of ``ctx`` tokens."""
        encoder, source = self.encoder, self._source
        if encoder is None or source is None:
            return
        if not isinstance(engine, NativeEngine) or tokenizer is None:
            self.close()
            self.encoder = None
            return
        try:
            name = encoder.row_token or encoder.placeholder
            token = tokenizer.token_id(name)
            if token is None:
                raise UnsupportedModelError(f"the vocabulary has no token {name!r}")
            bounded = encoder.with_max_rows(min(_MOST_ROWS, ctx // 2))
            engine.attach_vision(
                lambda ops, take: VisionState(bounded, source, all_vision_steps(ops), token, take)
            )
        except LocalrtError as error:
            self._refuse(error)

    def close(self) -> None:
        """Close the files."""
        if self._source is not None:
            self._source.close()

    def _refuse(self, error: LocalrtError) -> None:
        self.close()
        self.problem, self.encoder = f"pictures are refused: {error}", None
