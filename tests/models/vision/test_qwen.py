"""Qwen's encoders and those like them: pictures, positions on three axes, and conversations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from localrt.common.errors import CancelledError, MemoryBudgetError, OptionError
from localrt.engine.native.engine import NativeEngine
from localrt.engine.protocol import EngineInfo
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.registry import load_decoder, read_config
from localrt.models.vision.encoder_cache import VisionState
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_encoder
from localrt.quant.choose import all_vision_steps
from localrt.quant.cpu.ops import NativeOps
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.reference.ops import TorchOps
from localrt.speculative.tree import TokenTree
from tests.conftest import needs_kernels
from tests.models.tiny import relative_error, tokens
from tests.models.vision.oracles import look, picture
from tests.models.vision.tiny_qwen import IDS, TINY, processor_of, save_tiny_vl
from tests.ops.cuda.conftest import emulator as emulator
from tests.ops.cuda.emulator import Emulator
from tests.ops.cuda.target import DEVICE

QUICK = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
KINDS = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in TINY]
TinyVl = Callable[[str], tuple[Path, Any]]


@pytest.fixture(scope="module")
def tiny_vl(tmp_path_factory: pytest.TempPathFactory) -> TinyVl:
    """The folder and transformers' model of one of ``TINY``."""

    @cache
    def make(kind: str) -> tuple[Path, Any]:
        folder = tmp_path_factory.mktemp(kind)
        return folder, save_tiny_vl(kind, folder)

    return make


SIZES = [(40, 40), (13, 90), (131, 37), (8, 8), (23, 301)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows(kind: str, tiny_vl: TinyVl) -> None:
    folder, model = tiny_vl(kind)
    processor = processor_of(folder)
    pictures = [picture(*size, seed=seed) for seed, size in enumerate(SIZES)]
    opened = look(folder, *pictures)
    ours = opened.seen
    for some in ([0], [1, 2], [3, 4]):
        inputs = processor([pictures[each].image() for each in some], return_tensors="pt")
        with torch.no_grad():
            theirs = model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
        rows = np.concatenate([ours[each].rows for each in some])
        assert relative_error(rows, torch.cat(list(theirs.pooler_output)).numpy()) < 1e-4
        deep = getattr(theirs, "deepstack_features", None) or []
        assert opened.encoder.deep_layers == len(deep)
        for layer, wanted in enumerate(deep):
            found = np.concatenate([ours[each].deep[layer] for each in some])
            assert relative_error(found, torch.cat(list(wanted)).numpy()) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(13, 90), (8, 8), (1, 1), (640, 480)])
def test_prepared(kind: str, size: tuple[int, int], tiny_vl: TinyVl) -> None:
    folder, model = tiny_vl(kind)
    shown = picture(*size)
    with closing(VisionFolder(folder)) as source:
        encoder = read_encoder(source.config, source.processor)
    prepared = encoder.prepare(shown)
    wanted = processor_of(folder)(shown.image(), return_tensors="np")
    _, h, w = wanted["image_grid_thw"][0].tolist()
    assert prepared.grid == (h, w)
    assert prepared.pieces == (h * w // 4,)
    frames = wanted["pixel_values"].reshape(h * w, 3, -1, 16)
    if kind == "paddleocr_vl":  # line by line, not square by square
        squares = frames.reshape(h // 2, 2, w // 2, 2, 3, 1, 16).swapaxes(1, 2)
        frames = squares.reshape(frames.shape)
    ours = prepared.patches[:].reshape(h * w, 3, 16)
    for frame in range(frames.shape[2]):
        np.testing.assert_allclose(frames[:, :, frame], ours, rtol=0, atol=1e-5)

    before, behind = 3, 4
    kinds = torch.tensor([[0] * before + [1] * prepared.rows + [0] * behind])
    grid = torch.tensor(wanted["image_grid_thw"])
    (positions,) = model.model.get_rope_index(torch.zeros_like(kinds), kinds, grid)[0].swapaxes(
        0, 1
    )
    assert prepared.offsets is not None
    picture_ends = before + prepared.rows
    np.testing.assert_array_equal(positions[:, before:picture_ends].T, before + prepared.offsets)
    text = before + prepared.advance + np.arange(behind)
    np.testing.assert_array_equal(positions[:, picture_ends:], np.tile(text, (3, 1)))


@pytest.mark.parametrize(
    ("kind", "size", "most"),
    [
        ("qwen3_vl", 3584, 16384),
        ("mistral3", 64, 3025),
        ("glm_ocr", 1536, 10699),  # half of the pixels
        ("paddleocr_vl", 1024, 21399),
    ],
)
def test_large_photo(kind: str, size: int, most: int) -> None:
    """Made smaller where a context has no room for all of its rows."""
    text = {"hidden_size": size, "num_attention_heads": 4}
    config = {"model_type": kind, "vision_config": {}, "text_config": text}
    processor = {"max_pixels": 4096**2, "size": {"longest_edge": 1540}}
    encoder = read_encoder(config, processor)
    photo, small = (Picture(np.zeros((h, w, 3), np.uint8)) for h, w in ((3024, 4032), (300, 400)))
    for rows in (2048, 500):
        bounded = encoder.with_max_rows(rows)
        prepared = bounded.prepare(photo)
        assert 0.6 * rows < prepared.rows <= min(rows, most)
        assert prepared.grid[1] / prepared.grid[0] == pytest.approx(4 / 3, rel=0.06)
        assert bounded.prepare(small).pieces == encoder.prepare(small).pieces
    assert encoder.prepare(photo).rows > 1800


def test_aspect() -> None:
    encoder = read_encoder({"model_type": "qwen2_vl", "vision_config": {}, "hidden_size": 3584}, {})
    with pytest.raises(OptionError, match=r"2010 x 10 pixels: .* more than 200 times as long"):
        encoder.prepare(Picture(np.zeros((10, 2010, 3), np.uint8)))


PICTURES = [picture(90, 41), picture(23, 70, seed=1)]
TEXTS = [[token % 100 for token in tokens(5 + n, seed=n)] for n in range(3)]
TOKEN = IDS["image_token_id"]
INFO = EngineInfo(
    engine="native",
    architecture="qwen",
    device="cpu",
    format="f32",
    parameters=0,
    layers=3,
    vocab_size=120,
    weight_bytes=0,
    context_length=512,
    exactness="bit-exact",
)


@contextmanager
def opened(folder: Path, ops: Any) -> Iterator[NativeEngine]:
    """An engine that sees."""
    with closing(open_checkpoint(folder)) as checkpoint:
        config = read_config(checkpoint, context=512)
        engine = NativeEngine(load_decoder(checkpoint, ops, config), INFO)
    source = VisionFolder(folder)
    encoder = read_encoder(source.config, source.processor)
    engine.attach_vision(
        lambda ops, take: VisionState(encoder, source, all_vision_steps(ops), TOKEN, take)
    )
    with closing(engine):
        yield engine


def torch_ops() -> TorchOps:
    return TorchOps(compute_format="f32", device="cpu")


def prompt(engine: NativeEngine, pictures: Sequence[Picture]) -> list[int]:
    """Text, and each picture with text behind it."""
    assert engine.vision is not None
    ids = list(TEXTS[0])
    for shown, text in zip(pictures, TEXTS[1:], strict=False):
        ids += [*engine.vision.prompt_picture(shown).ids, *text]
    return ids


def wanted(folder: Path, model: Any, ids: Sequence[int], pictures: Sequence[Picture]) -> Any:
    """Transformers' logits (R, V)."""
    plain = torch.tensor([[TOKEN if token < 0 else token for token in ids]])
    inputs: dict[str, Any] = {}
    if pictures:
        inputs = dict(processor_of(folder)([p.image() for p in pictures], return_tensors="pt"))
        inputs["mm_token_type_ids"] = (plain == TOKEN).int()
    with torch.no_grad():
        return model(input_ids=plain, **inputs).logits[0].numpy()


def said(engine: NativeEngine, ids: Sequence[int], ends: Sequence[int]) -> npt.NDArray[np.float32]:
    """The logits at the ends of passes."""
    session = engine.session(512)
    logits = [session.extend(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    session.close()
    return np.stack(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_conversations(kind: str, tiny_vl: TinyVl) -> None:
    folder, model = tiny_vl(kind)
    with opened(folder, torch_ops()) as engine:
        ids = prompt(engine, PICTURES)
        theirs = wanted(folder, model, ids, PICTURES)
        for ends in ([len(ids)], range(2, len(ids), 9)):
            ours = said(engine, ids, list(ends))
            assert relative_error(ours, theirs[[end - 1 for end in ends]]) < 1e-4


def test_text_config_outside(tmp_path: Path, tiny_vl: TinyVl) -> None:
    """PaddleOCR-VL's is published so, with older names of rotary parameters."""
    folder, model = tiny_vl("paddleocr_vl")
    path = shutil.copytree(folder, tmp_path / "folder") / "config.json"
    config = json.loads(path.read_text("utf-8"))
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    del text["model_type"]
    scaling = {"type": "default", "rope_type": "default", "mrope_section": rope["mrope_section"]}
    own = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    path.write_text(json.dumps({**text, **config, **own}))
    with opened(path.parent, torch_ops()) as engine:
        ids = prompt(engine, PICTURES)
        theirs = wanted(folder, model, ids, PICTURES)
        assert relative_error(said(engine, ids, [len(ids)]), theirs[-1:]) < 1e-4


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_cuts_on_the_kernels(kind: str, tiny_vl: TinyVl) -> None:
    """They change no bit."""
    folder, model = tiny_vl(kind)
    with opened(folder, NativeOps(threads=2)) as engine:
        ids = prompt(engine, PICTURES)
        ends = list(range(1, len(ids) + 1))
        ours = said(engine, ids, ends)
        theirs = wanted(folder, model, ids, PICTURES)
        rows = np.abs(ours - theirs).max(1) / np.abs(theirs).max()
        # Rounding may change some rows' choices of experts.
        assert (np.median(rows) if "moe" in kind else rows.max()) < 0.02
        for cuts in ([len(ids)], list(range(6, len(ids), 11))):
            np.testing.assert_array_equal(said(engine, ids, cuts), ours[[end - 1 for end in cuts]])


def _cancelled(after: int) -> Callable[[], None]:
    left = iter(range(after))

    def check() -> None:
        if next(left, None) is None:
            raise CancelledError("enough")

    return check


def test_budget(tiny_vl: TinyVl, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cached pictures are charged to the budget; the oldest is evicted if it has no room."""
    monkeypatch.setattr("localrt.models.vision.encoder_cache._RESERVED_NBYTES", 1000)
    folder, _ = tiny_vl("qwen3_vl")
    taken, left, others = 0, 1 << 30, False

    def take(nbytes: int, on_gpu: bool) -> None:
        nonlocal taken, left
        if taken + nbytes > left:
            raise MemoryBudgetError("full")
        taken += nbytes
        if others and nbytes < 0:  # who take what is given back
            left = taken

    source = VisionFolder(folder)
    encoder = read_encoder(source.config, source.processor)
    with closing(
        VisionState(encoder, source, all_vision_steps([torch_ops()]), TOKEN, take)
    ) as vision:
        shown = [picture(60, 60, seed=n) for n in range(3)]
        placed = [vision.prompt_picture(each) for each in shown]
        ids = [np.array(each.ids) for each in placed]
        for each in ids:
            vision.picture_rows(each)
        assert taken == sum(each.nbytes for each in placed) - 1000
        left = taken + placed[0].nbytes  # less than one on its way takes
        fourth = vision.prompt_picture(picture(60, 60, seed=3))
        with pytest.raises(MemoryBudgetError, match="a picture of this size needs"):
            vision.picture_rows(np.array(fourth.ids))
        left, others = 1 << 30, True
        vision.picture_rows(np.array(fourth.ids))
        assert [each.encoded is None for each in (*placed, fourth)] == [True, False, False, False]


@needs_kernels
@pytest.mark.parametrize("room", [True, False])
def test_gpu(
    room: bool, tiny_vl: TinyVl, emulator: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The encoder is computed there if it has room for the picture, else on the CPU."""
    folder, model = tiny_vl("qwen3_vl")
    ops = CudaOps(device=str(DEVICE))
    if not room:
        monkeypatch.setattr(ops, "free_memory", lambda: 1000)
    with opened(folder, ops) as engine:
        ids = prompt(engine, PICTURES)
        ours = said(engine, ids, [len(ids)])
        assert relative_error(ours, wanted(folder, model, ids, PICTURES)[-1:]) < 0.05
        DEVICE.trim()
        before = DEVICE.scratch.nbytes
        ids = prompt(engine, [picture(70, 70, seed=5)])
        with pytest.raises(CancelledError) as caught:
            engine.session(512).extend(ids, check=_cancelled(2))
        assert DEVICE.scratch.nbytes == before, "the error holds none of its memory"
        del caught
    if not DEVICE.is_gpu:
        names = [program.name for program in emulator.launches]
        assert ("layer_norm" in names) == room


def test_going_back(tiny_vl: TinyVl) -> None:
    """A session that keeps a part of a picture goes on as a new one does."""
    folder, model = tiny_vl("qwen3_vl")
    with opened(folder, torch_ops()) as engine:
        ids = prompt(engine, PICTURES)
        theirs = wanted(folder, model, ids, PICTURES)[-1]
        session = engine.session(512)
        session.extend(ids)
        for length in (len(ids) - 2, len(TEXTS[0]) + 3, 2):
            assert session.trim(length) == length
            assert relative_error(session.extend(ids[length:]), theirs) < 1e-4


@needs_kernels
@pytest.mark.parametrize(("kind", "kv_format"), [("qwen2_5_vl", "int8"), ("qwen3_5", "bf16")])
def test_sessions_together(kind: str, kv_format: Any, tiny_vl: TinyVl) -> None:
    """Two pictures and a text in the same passes: the bits of each alone."""
    with opened(tiny_vl(kind)[0], NativeOps(threads=2, kv_format=kv_format)) as engine:
        prompts = [prompt(engine, PICTURES), prompt(engine, PICTURES[1:]), TEXTS[2] * 3]
        alone = [said(engine, ids, [len(ids) - 8, len(ids) - 1, len(ids)]) for ids in prompts]
        sessions = [engine.session(512) for _ in prompts]
        for prompt_picture, (first, end) in enumerate([(None, -8), (-8, -1), (-1, None)]):
            parts = [(s, ids[first:end]) for s, ids in zip(sessions, prompts, strict=True)]
            logits = engine.extend_batch(parts, wanted=range(3))
            np.testing.assert_array_equal(logits, [each[prompt_picture] for each in alone])


@needs_kernels
def test_tree_behind_pictures(tiny_vl: TinyVl) -> None:
    """Its accepted path has the bits of tokens one after another."""
    folder, _ = tiny_vl("qwen2_5_vl")
    with opened(folder, NativeOps(threads=2, kv_format="int8")) as engine:
        ids = [*prompt(engine, PICTURES), 5, 6, 7, 8]
        plain = said(engine, ids, range(len(ids) - 4, len(ids) + 1))
        session = engine.session(512)
        session.extend(ids[:-4])
        tree = TokenTree(
            tokens=np.array([9, 6, 7]),
            parents=np.array([-1, -1, 1]),
            depths=np.array([1, 1, 2]),
            scores=np.zeros(3),
            origins=np.zeros(3, np.uint8),
            sources=(),
        )
        logits = session.extend_tree(5, tree)
        np.testing.assert_array_equal(logits[[0, 2, 3]], plain[1:4])
        session.keep([0, 2, 3])
        np.testing.assert_array_equal(session.extend([8]), plain[4])
