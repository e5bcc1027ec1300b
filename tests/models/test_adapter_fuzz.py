"""Whatever bytes an adapter's files have, reading it ends quickly, with one line or an adapter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import CheckpointError, UnsupportedModelError
from localrt.models.checkpoints import Checkpoint, open_checkpoint
from localrt.models.checkpoints.adapters import read_adapter
from tests.checkpoints.make_gguf import write_gguf
from tests.checkpoints.test_fuzz import mutations
from tests.models.adapters import make_adapter
from tests.models.tiny import save_tiny
from tests.mutations import FUZZ, VALUES, changed, paths


@contextmanager
def make_files(folder: Path) -> Iterator[Checkpoint]:
    """Write an adapter of both kinds; yields its base."""
    base = save_tiny("qwen2", folder / "base", layers=1)
    make_adapter(base, folder / "a", use_dora=True, target_modules=["q_proj", "down_proj"])
    with closing(open_checkpoint(folder / "base")) as checkpoint:
        rows, columns = checkpoint.tensors["model.layers.0.mlp.down_proj.weight"].shape
        tensors: dict[str, Any] = {
            "blk.0.ffn_down.weight.lora_a": (np.ones((2, columns), np.float32), "f32"),
            "blk.0.ffn_down.weight.lora_b": (np.ones((rows, 2), np.float32), "f16"),
        }
        keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 4.0}
        write_gguf(folder / "a.gguf", "qwen2", keys, tensors)
        assert read_adapter(folder / "a", checkpoint).matrices
        assert read_adapter(folder / "a.gguf", checkpoint).matrices
        yield checkpoint


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Checkpoint]]:
    """A folder with an adapter of both kinds, and its base."""
    folder = tmp_path_factory.mktemp("adapter")
    with make_files(folder) as base:
        yield folder, base


def exercise(path: Path, base: Checkpoint) -> None:
    refusal = ""
    try:
        with np.errstate(all="ignore"):
            assert read_adapter(path, base).nbytes < 1 << 24
    except (CheckpointError, UnsupportedModelError) as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 1000


@FUZZ
@given(data=st.data())
def test_bytes_of_a_folder(files: tuple[Path, Checkpoint], data: st.DataObject) -> None:
    folder, base = files
    valid = (folder / "a" / "adapter_model.safetensors").read_bytes()
    other = folder / "bytes"
    other.mkdir(exist_ok=True)
    config = (folder / "a" / "adapter_config.json").read_bytes()
    (other / "adapter_config.json").write_bytes(config)
    (other / "adapter_model.safetensors").write_bytes(data.draw(mutations(valid)))
    exercise(other, base)


@FUZZ
@given(data=st.data())
def test_values_of_a_config(files: tuple[Path, Checkpoint], data: st.DataObject) -> None:
    folder, base = files
    config = json.loads((folder / "a" / "adapter_config.json").read_text("utf-8"))
    places = st.sampled_from([*paths(config), ("rank_pattern", "q_proj"), ("alpha_pattern", "(")])
    changes = st.lists(st.tuples(places, st.sampled_from(VALUES)), min_size=1, max_size=3)
    other = folder / "values"
    other.mkdir(exist_ok=True)
    weights = (folder / "a" / "adapter_model.safetensors").read_bytes()
    (other / "adapter_model.safetensors").write_bytes(weights)
    text = json.dumps(changed(config, data.draw(changes)))
    (other / "adapter_config.json").write_text(text)
    exercise(other, base)


@FUZZ
@given(data=st.data())
def test_bytes_of_a_gguf_file(files: tuple[Path, Checkpoint], data: st.DataObject) -> None:
    folder, base = files
    path = folder / "fuzz.gguf"
    path.write_bytes(data.draw(mutations((folder / "a.gguf").read_bytes())))
    exercise(path, base)
