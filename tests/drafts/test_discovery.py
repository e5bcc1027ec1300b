"""Drafts of the target's family: found by their vocabulary, used only where it is right to."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

import localrt
from localrt.common.settings import Settings
from localrt.drafts.discovery import FamilyDraft, find_family_draft, find_head, own_draft
from localrt.drafts.selection import Drafts
from localrt.engine.native.engine import NativeEngine
from localrt.engine.options import Options
from tests.checkpoints.make_gguf import ARRAY, STRING, UINT32, array, raw_gguf, string
from tests.conftest import needs_kernels, write_tiny_model
from tests.models.tiny_heads import TinyDFlash, TinyEagle3

WORDS = ("<s>", "a", "b", "ab", "ü")


def gguf(
    path: Path, size: int, *, words: tuple[str, ...] = WORDS, arch: str = "qwen2", **more: Any
) -> Path:
    """A file with a header like a model's, filled up to ``size`` bytes."""
    pairs = [
        ("general.architecture", STRING, string(arch)),
        ("general.tags", ARRAY, array(STRING, 2, string("x") + string("y"))),
        (f"{arch}.block_count", UINT32, struct.pack("<I", 2)),
        ("tokenizer.ggml.tokens", ARRAY, array(STRING, len(words), b"".join(map(string, words)))),
        *more.get("after", ()),
    ]
    data = raw_gguf(pairs)
    path.write_bytes(data + bytes(size - len(data)))
    return path


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Folders of this test's own: no model of the machine is found."""
    return Settings.from_environment({"XDG_CACHE_HOME": str(tmp_path / "c"), "XDG_DATA_HOME": "d"})


def found(target: Path, settings: Settings) -> str | None:
    draft = find_family_draft(target, settings)
    return None if draft is None else Path(draft.name).name


def test_smallest(tmp_path: Path, settings: Settings) -> None:
    target = gguf(tmp_path / "big.gguf", 100_000)
    assert found(target, settings) is None
    gguf(tmp_path / "half.gguf", 50_000)
    assert found(target, settings) == "half.gguf"
    gguf(tmp_path / "small.gguf", 20_000)
    assert found(target, settings) == "small.gguf"
    # Smaller, but: another word, a word more, another order, an architecture that is not known.
    gguf(tmp_path / "word.gguf", 9000, words=("<s>", "a", "b", "ab", "u"))
    gguf(tmp_path / "more.gguf", 9000, words=(*WORDS, "z"))
    gguf(tmp_path / "order.gguf", 9000, words=("<s>", "b", "a", "ab", "ü"))
    gguf(tmp_path / "kind.gguf", 9000, arch="bert")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(50))
    (tmp_path / "empty.gguf").write_bytes(b"")
    (tmp_path / "mmproj-small.gguf").write_bytes(gguf(tmp_path / "x.gguf", 9000).read_bytes())
    (tmp_path / "x.gguf").unlink()
    assert found(target, settings) == "small.gguf"
    # One of another architecture only where there is none of the target's own.
    gguf(tmp_path / "llama.gguf", 5000, arch="llama")
    assert found(target, settings) == "small.gguf"
    # small.gguf has 0.4 of its bytes.
    assert find_family_draft(tmp_path / "half.gguf", settings) is not None
    assert found(gguf(tmp_path / "phi.gguf", 30_000, arch="phi3"), settings) == "llama.gguf"


def test_split_files(tmp_path: Path, settings: Settings) -> None:
    target = gguf(tmp_path / "big-00001-of-00002.gguf", 20_000)
    (tmp_path / "big-00002-of-00002.gguf").write_bytes(bytes(80_000))
    gguf(tmp_path / "draft-00001-of-00002.gguf", 30_000)
    assert found(target, settings) is None  # its second part is missing
    (tmp_path / "draft-00002-of-00002.gguf").write_bytes(bytes(10_000))
    assert found(target, settings) == "draft-00001-of-00002.gguf"
    (tmp_path / "draft-00002-of-00002.gguf").write_bytes(bytes(30_000))
    assert found(target, settings) is None


def in_hub(settings: Settings, repo: str) -> Path:
    """The folder of the only snapshot of a repository."""
    path = settings.hub_cache / f"models--{repo.replace('/', '--')}"
    (path / "refs").mkdir(parents=True)
    (path / "refs/main").write_text("0" * 40)
    (path / "snapshots" / ("0" * 40)).mkdir(parents=True)
    return path / "snapshots" / ("0" * 40)


def test_folders(tmp_path: Path, settings: Settings) -> None:
    def folder(repo: str, size: int, words: str) -> Path:
        path = in_hub(settings, repo)
        config = {"architectures": ["Qwen2ForCausalLM"]}
        (path / "config.json").write_text(json.dumps(config))
        (path / "tokenizer.json").write_text(words)
        (path / "model.safetensors").write_bytes(bytes(size))
        return path

    target = folder("org/big", 100_000, "words")
    folder("org/other", 10_000, "sword")
    assert find_family_draft(target, settings) is None
    folder("org/small", 20_000, "words")
    draft = find_family_draft(target, settings)
    assert draft is not None
    assert draft.name == "org/small"


@needs_kernels
def test_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        write_tiny_model(tmp_path / name, context=256)
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "temperature": 0.0}

    def said(draft: str | None) -> tuple[tuple[int, ...], str]:
        monkeypatch.setattr("localrt.drafts.selection.family_draft", lambda _: draft)
        with localrt.load(tmp_path / "target") as model:
            chunk = model.generate("ab ab", **options)
        return chunk.token_ids, str(chunk.metrics.speculation)

    plain, why = said(None)
    assert "on this machine" not in why
    for name, note in (("draft", "was found on this machine"), ("missing", "is not used:")):
        tokens, why = said(str(tmp_path / name))
        assert tokens == plain
        assert f"draft {tmp_path / name} {note}" in why


@needs_kernels
@pytest.mark.parametrize(
    ("rows", "device", "streamed", "drafts"),
    [
        (sys.maxsize, "cpu", True, "small"),
        (64, "cuda:0", False, "ngram"),
        (1, "cuda:0", False, None),
    ],
)
def test_auto_by_what_is_promised(
    rows: int,
    device: str,
    streamed: bool,
    drafts: str | None,
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = FamilyDraft("small", tiny_folder, 1)
    monkeypatch.setattr("localrt.drafts.discovery.find_family_draft", lambda *_: small)
    engine = MagicMock(spec=NativeEngine, exact_rows=rows, is_mixture=False)
    engine.info = SimpleNamespace(device=device, streamed=streamed)
    asked = list[str]()

    def load(name: str, target: Any) -> Any:
        asked.append(name)
        raise localrt.MemoryBudgetError("it does not fit")

    target: Any = SimpleNamespace(engine=engine, path=tiny_folder)
    found = Drafts(target, load).speculation(Options(draft="auto"))
    assert (found is not None) is (drafts is not None)
    assert asked == (["small"] if drafts == "small" else [])
    assert found is None or found.tuner.most_rows == rows


@pytest.mark.parametrize(
    ("target", "head", "found"),
    [
        ("Tiny-1B-Q4_K_M.gguf", "tiny-1b-eagle3", True),
        ("Tiny-1B", "Tiny-10B-eagle3", False),
        ("Tiny-1B-Q4_K_M.gguf", "Tiny-1B-DFlash-Q8_0.gguf", True),
        ("Tiny-1B-Q4_K_M.gguf", "Tiny-1B-Q8_0.gguf", False),
    ],
)
def test_heads_by_name(target: str, head: str, found: bool, tmp_path: Path) -> None:
    if head.endswith(".gguf"):
        TinyDFlash(tmp_path / "own", 64, 211).save_gguf(tmp_path / head)
    else:
        (tmp_path / head).mkdir()
        TinyEagle3(tmp_path / head, 64, 211)
    (tmp_path / target).touch()
    name = find_head(tmp_path / target, Settings.from_environment())
    assert name == (str(tmp_path / head) if found else None)


def test_block_of_a_model_in_memory(settings: Settings) -> None:
    folder = Path(__file__).parents[1] / "data/hybrid"
    found = own_draft(folder, settings)
    assert found is not None
    assert found.name == "mtp"
    assert own_draft(folder, settings, streamed=True) is None


def test_heads_of_a_repository(settings: Settings) -> None:
    """A model of the hub is named by its repository, its file by the quantization."""
    target = gguf(in_hub(settings, "org/Some-1B-GGUF") / "weights-Q4_K_M.gguf", 9000)
    TinyEagle3(in_hub(settings, "me/some_1b_eagle3"), 64, 259)
    assert find_head(target, settings) == "me/some_1b_eagle3"
