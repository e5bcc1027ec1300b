"""Pictures, folders of tiny random models that see, and what our encoders make of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from localrt.engine.native.engine import NativeEngine
from localrt.loading.load import load_model
from localrt.loading.options import LoadOptions
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision.encoder import EncodedPicture, PreparedPicture, VisionEncoder
from localrt.models.vision.encoder_cache import EncoderUnitReader, VisionState
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_encoder, vision_source
from localrt.quant.choose import all_vision_steps
from localrt.quant.ops.vision import VisionSteps
from localrt.quant.reference.ops import TorchOps
from tests.models.tiny import relative_error, tokens


def picture(width: int, height: int, seed: int = 0) -> Picture:
    """Random shades with random dots on them."""
    random = np.random.default_rng(seed)
    x, y = np.arange(width)[:, None], np.arange(height)[:, None, None]
    waves = np.sin(x * random.uniform(0.05, 0.4, 3)) * np.cos(y * random.uniform(0.05, 0.4, 3))
    dots = random.uniform(-60, 60, (height, width, 3))
    return Picture(np.clip(128 + 90 * waves + dots, 0, 255).astype(np.uint8))


@dataclass(frozen=True)
class Opened:
    """What a folder's encoder is and makes of pictures, computed in float32."""

    encoder: VisionEncoder
    prepared: list[PreparedPicture]
    seen: list[EncodedPicture]


def look(folder: Path, *pictures: Picture | PreparedPicture) -> Opened:
    """Open the folder's encoder and encode the pictures."""
    ops = TorchOps(compute_format="f32", device="cpu")
    with closing(VisionFolder(folder)) as source:
        encoder = read_encoder(source.config, source.processor)
        steps = VisionSteps(ops)
        units = EncoderUnitReader(source, steps)
        prepared = [p if isinstance(p, PreparedPicture) else encoder.prepare(p) for p in pictures]
        return Opened(encoder, prepared, [encoder.encode(each, units, steps) for each in prepared])


def expanded(prepared: PreparedPicture, row: str) -> str:
    """The text of a picture's pieces, each row of which is written ``row``."""
    return "".join(piece if isinstance(piece, str) else row * piece for piece in prepared.pieces)


def renamed(folder: Path, name: Callable[[str], str]) -> Path:
    """The folder, its tensors under other names."""
    file = folder / "model.safetensors"
    save_file({name(key): value for key, value in load_file(file).items()}, file)
    return folder


def settings(folder: Path, name: str, **values: Any) -> Path:
    """The folder with more settings in a JSON file of its processors."""
    path = folder / name
    known = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**known, **values}))
    return folder


Prompt: TypeAlias = Sequence[Picture | Sequence[int]]


class Seeing:
    """An engine that sees with the model in a folder or a GGUF file, and computes in float32.

    A picture's row stands as ``token`` for what knows no pictures, ``tokens`` are the ids of the
    texts among its pieces. Passes have at most ``rows`` rows.
    """

    def __init__(
        self, folder: Path, token: int, tokens: Mapping[str, int], *, rows: int = 512
    ) -> None:
        engine = load_model(folder, LoadOptions(ctx=1024, format="f32", device="cpu")).engine
        assert isinstance(engine, NativeEngine)
        source = vision_source(folder)
        assert source is not None
        encoder = read_encoder(source.config, source.processor)
        engine.attach_vision(
            lambda ops, take: VisionState(encoder, source, all_vision_steps(ops), token, take)
        )
        engine.pass_rows = rows
        self.engine, self.tokens = engine, tokens

    def ids(self, part: Picture | Sequence[int]) -> list[int]:
        """The ids of a part of a prompt."""
        if not isinstance(part, Picture):
            return list(part)
        assert self.engine.vision is not None
        placed = self.engine.vision.prompt_picture(part)
        rows, found = iter(placed.ids), list[int]()
        for piece in placed.prepared.pieces:
            found += [self.tokens[piece]] if isinstance(piece, str) else islice(rows, piece)
        return found

    def logits(self, prompt: Prompt) -> list[np.ndarray]:
        """The logits behind every part of a prompt."""
        session = self.engine.session(1024)
        return [session.extend(self.ids(part)).copy() for part in prompt]

    def __enter__(self) -> Seeing:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()


def plain(ids: Iterable[int], token: int) -> list[int]:
    """Ids with ``token`` in the place of each row of a picture."""
    return [token if number < 0 else number for number in ids]


def check_logits(
    folder: Path,
    model: Any,
    pictures: tuple[Picture, Picture],
    inputs: Callable[..., dict[str, Any]],
    token: int,
    names: Mapping[str, int],
    *,
    row: int | None = None,
    rows: int = 512,
) -> None:
    """Behind every part of conversations, those of transformers' ``model``.

    ``inputs`` are what it takes beside ids and of their pictures, whose rows are ``token``; ours is
    told ``row``.
    """
    texts, (one, two) = [tokens(9), tokens(5, seed=1), tokens(12, seed=2)], pictures
    prompts: list[Prompt] = [
        texts,
        [texts[0], one, texts[1]],
        [texts[0], one, texts[1], two, texts[2]],
        [one, two, one, texts[2]],
    ]
    with Seeing(folder, token if row is None else row, names, rows=rows) as seeing:
        for prompt in prompts:
            parts = [seeing.ids(part) for part in prompt]
            ids = torch.tensor([plain(chain(*parts), token)])
            own = inputs(ids, *(part for part in prompt if isinstance(part, Picture)))
            with torch.no_grad():
                theirs = model(ids, **own).logits[0]
            ends = np.cumsum([len(part) for part in parts]) - 1
            for end, ours in zip(ends, seeing.logits(prompt), strict=True):
                assert relative_error(ours, theirs[end].numpy()) < 1e-4
