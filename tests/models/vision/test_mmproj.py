"""Encoders in ``mmproj`` files: where they are, and that they are those of the folders."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from localrt.common.errors import CheckpointError, LocalrtError, UnsupportedModelError
from localrt.models.checkpoints import open_checkpoint
from localrt.models.checkpoints.gguf.vision import VisionGguf
from localrt.models.checkpoints.safetensors.vision import VisionFolder
from localrt.models.vision.encoder import EncodedPicture, PreparedPicture
from localrt.models.vision.encoder_cache import EncoderUnitReader
from localrt.models.vision.picture import Picture
from localrt.models.vision.registry import read_encoder, vision_source
from localrt.models.weight_files import files_nbytes, projectors_beside
from localrt.quant.choose import vision_steps
from localrt.quant.cuda.ops import CudaOps
from localrt.quant.formats import unpack
from localrt.quant.ops.protocol import Ops
from localrt.quant.reference.ops import TorchOps
from localrt.quantize.quantize import Recipe, quantize_model
from tests.checkpoints.make_gguf import write_gguf
from tests.models.make_gguf import write_tiny_gguf
from tests.models.make_mmproj import write_mmproj
from tests.models.test_model import some
from tests.models.tiny import random_model, relative_error
from tests.models.tiny_configs import CONFIGS, hf
from tests.models.vision.families import llava, mistral3
from tests.models.vision.oracles import Seeing, picture
from tests.models.vision.tiny_qwen import PIXELS, TEXT
from tests.models.vision.tiny_qwen import TINY as QWEN
from tests.ops.cuda.target import DEVICE

SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "image_size": 32,
    "patch_size": 4,
}
LLAMA = {**TEXT, "model_type": "llama"}
OTHERS: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: hf.Gemma3Config(
        text_config={**TEXT, "head_dim": 12, "query_pre_attn_scalar": 12},
        vision_config=SIGLIP,
        mm_tokens_per_image=16,
    ),
    "idefics3": lambda: hf.Idefics3Config(text_config=LLAMA, vision_config=SIGLIP, scale_factor=2),
    "lfm2_vl": lambda: hf.Lfm2VlConfig(
        text_config={**TEXT, "layer_types": ["full_attention"] * 3},
        vision_config={**SIGLIP, "num_patches": 64},
        projector_hidden_size=96,
    ),
    "internvl": lambda: hf.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2"},
        vision_config={
            **SIGLIP,
            "image_size": [32, 32],
            "patch_size": [4, 4],
            "attention_bias": True,
        },
    ),
    "minicpmv4_6": lambda: hf.MiniCPMV4_6Config(
        text_config={**CONFIGS["qwen3.5"]().to_dict(), "hidden_size": 64},
        vision_config={**SIGLIP, "num_hidden_layers": 3, "image_size": 280},
        insert_layer_id=1,
    ),
    "llava": llava,
    "mistral3": mistral3,
    "gemma4": lambda: hf.Gemma4Config(
        text_config={**CONFIGS["gemma4"]().to_dict(), "use_bidirectional_attention": "vision"},
        vision_config={
            **SIGLIP,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "position_embedding_size": 840,
            "standardize": True,
            "use_clipped_linears": True,
        },
        audio_config=None,
    ),
    "gemma4_unified": lambda: hf.Gemma4UnifiedConfig(
        text_config={**CONFIGS["gemma4-unified"]().to_dict(), "pad_token_id": 0},
        vision_config={
            "patch_size": 4,
            "mm_embed_dim": 40,
            "output_proj_dims": 40,
            "mm_posemb_size": 280,
        },
        audio_config={"audio_embed_dim": 20},
    ),
}
MODELS = QWEN | OTHERS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(kind: str) -> Path:
        if kind not in made:
            folder = made[kind] = tmp_path_factory.mktemp(kind)
            random_model(MODELS[kind]()).save_pretrained(folder)
            settings: dict[str, Any] = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.2, 0.1]}
            if kind in QWEN and not kind.startswith("glm"):  # whose files do not say
                settings["size"] = PIXELS
            if kind == "minicpmv4_6":
                settings |= {"scale_resolution": 48, "patch_size": 4}
            (folder / "preprocessor_config.json").write_text(json.dumps(settings))
        return made[kind]

    return make


def _hub_name(name: str) -> str:
    """Transformers 5 leaves a prefix out in its own files."""
    for part in ("embeddings.", "encoder.layers.", "post_layernorm."):
        if name.startswith(f"vision_tower.{part}") and "input_layernorm" not in name:
            return name.replace("vision_tower.", "vision_tower.vision_model.")
    return name


def _see(
    source: VisionFolder | VisionGguf, *pictures: Picture, ops: Ops | None = None, **processor: Any
) -> list[tuple[PreparedPicture, EncodedPicture]]:
    encoder = read_encoder(source.config, {**source.processor, **processor})
    steps = vision_steps(ops or TorchOps(compute_format="f32", device="cpu"))
    units = EncoderUnitReader(source, steps)
    prepared = [encoder.prepare(each) for each in pictures]
    return [(each, encoder.encode(each, units, steps)) for each in prepared]


@some(MODELS, ("gemma4", "mistral3", "qwen3_vl"))
def test_what_a_file_holds(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """The folder's tensors under its names, and an encoder that makes the same rows of pictures."""
    folder = tiny(name)
    path = write_mmproj(folder, tmp_path / "mmproj-f32.gguf")
    pictures = [picture(60, 60), picture(33, 90)]
    with closing(VisionFolder(folder)) as theirs, closing(VisionGguf(path)) as ours:
        plain = "gemma4" in name or name in ("internvl", "minicpmv4_6")
        hub = str if plain else _hub_name
        names = {hub(each): each for each in theirs.tensors if ".head." not in each}
        assert set(ours.tensors) == set(names)
        for each, info in ours.tensors.items():
            shape = theirs.tensors[names[each]].shape or (1,)
            values = unpack(theirs.read(names[each])).reshape(shape)
            assert (info.name, info.shape) == (each, values.shape)
            off = 1e-6 if each.endswith("soft_emb_norm.weight") else 0
            np.testing.assert_allclose(unpack(ours.read(each)), values, rtol=0, atol=off)
            if len(info.shape) > 1 and info.shape[0] > 3:
                part = unpack(ours.read(each, 1, 3))
                np.testing.assert_allclose(part, values[1:3], rtol=0, atol=off)
        encoders = [read_encoder(source.config, source.processor) for source in (theirs, ours)]
        assert encoders[0].placeholder == encoders[1].placeholder
        assert encoders[0].bidirectional == encoders[1].bidirectional
        assert encoders[0].deep_layers == encoders[1].deep_layers
        for (wanted, rows), (prepared, seen) in zip(
            _see(theirs, *pictures), _see(ours, *pictures), strict=True
        ):
            assert prepared.pieces == wanted.pieces
            np.testing.assert_array_equal(prepared.patches[:], wanted.patches[:])
            assert relative_error(seen.rows, rows.rows) < 1e-6
            for layer, deep in zip(seen.deep, rows.deep, strict=True):
                assert relative_error(layer, deep) < 1e-6


@some(("qwen3_vl", "gemma4_unified", "paddleocr_vl", "internvl"), ("qwen3_vl",))
def test_quantized(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """A store sees as its model does, wherever that is then."""
    shown = picture(60, 60)
    folder = shutil.copytree(tiny(name), tmp_path / "folder")
    file = write_tiny_gguf(folder, tmp_path / "m.gguf", name.replace("_", "-"))
    (tmp_path / "other").mkdir()
    mmproj = write_mmproj(folder, tmp_path / "other" / "sha256-2a")  # as Ollama names files
    others = {"mtp.layers.0.mlp.gate_proj.weight": np.zeros((9, 8), np.float32)}
    others["model.audio_tower.layers.0.weight"] = np.zeros((9, 8), np.float32)
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **others}, folder / "model.safetensors", {"format": "pt"})
    own = {"image_processor": {"image_mean": [0.1] * 3}}  # which the other file overrules
    (folder / "processor_config.json").write_text(json.dumps(own))
    stores = []
    for number, path in enumerate((folder, file)):
        out = tmp_path / f"store-{number}"
        report = quantize_model(path, out, Recipe("int4-g32", method="rtn"), projectors=[mmproj])
        assert report.vision_bytes > 1000
        assert files_nbytes(out) > report.nbytes + report.vision_bytes
        stores.append(out)
    again = tmp_path / "again"
    quantize_model(stores[0], again, Recipe("int8-g32", method="rtn"))
    shutil.rmtree(folder)
    shutil.rmtree(mmproj.parent)
    with closing(VisionFolder(tiny(name))) as source:
        ((wanted, rows),) = _see(source, shown)
    for store in (*stores, again):
        source_ = vision_source(store)
        assert source_ is not None
        with closing(source_):
            ((prepared, found),) = _see(source_, shown)
            assert not [each for each in source_.tensors if "mtp" in each or "audio" in each]
        assert prepared.pieces == wanted.pieces
        assert relative_error(found.rows, rows.rows) < 1e-6


@some(MODELS, ("gemma4", "lfm2_vl"))
def test_rows_on_a_gpu(name: str, tiny: Callable[[str], Path]) -> None:
    """Its kernels round to bf16 on the way, through all steps of a family."""
    few = {
        "gemma4": {"max_soft_tokens": 16},
        "gemma4_unified": {"max_soft_tokens": 16},
        "idefics3": {"size": {"longest_edge": 32}},
    }
    shown, own = picture(33, 60), few.get(name, {})
    with closing(VisionFolder(tiny(name))) as source:
        ((_, wanted),) = _see(source, shown, **own)
        ((_, found),) = _see(source, shown, ops=CudaOps(device=str(DEVICE)), **own)
    assert not np.array_equal(found.rows, wanted.rows)
    ours, theirs = (np.hstack([each.rows, *each.deep]) for each in (found, wanted))
    assert relative_error(ours, theirs) < 0.03


TEXTS = {"internvl": "qwen2", "lfm2_vl": "lfm2", "minicpmv4_6": "qwen3.5"}
TEXTS |= {"qwen2_5_vl": "qwen2.5-vl", "qwen3_5": "qwen3.5"}


@some(MODELS.keys() - {"idefics3", "llava", "qwen2_vl", "qwen3_vl_moe"}, ("gemma3", "qwen3_vl"))
def test_logits(name: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Of a GGUF model with its ``mmproj`` file, and of the folder that both were made of."""
    folder, text = tiny(name), TEXTS.get(name, name.replace("_", "-"))
    model = write_tiny_gguf(folder, tmp_path / "tiny-F32.gguf", text)
    write_mmproj(folder, tmp_path / "mmproj-F32.gguf")
    shown = picture(33, 60)
    found = []
    for path in (folder, model):
        with Seeing(path, 9, defaultdict(lambda: 10)) as seeing:
            found.append(seeing.logits([[3, 4, 5], shown, [6, 7]]))
    for theirs, ours in zip(*found, strict=True):
        assert relative_error(ours, theirs) < 1e-5


def _swapped(name: str) -> str:
    other = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
    return ".".join(other.get(part, part) for part in name.split("."))


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_vl"])
def test_early_files(kind: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """Whose up and down projections have each other's names, and which state no sizes of theirs."""
    inner = {"clip.vision.feed_forward_length": 0, "clip.vision.projection_dim": 0}
    plain = write_mmproj(tiny(kind), tmp_path / "plain.gguf")
    early = write_mmproj(tiny(kind), tmp_path / "early.gguf", changes=inner, named=_swapped)
    with closing(VisionGguf(plain)) as theirs, closing(VisionGguf(early)) as ours:
        assert ours.config == theirs.config
        assert {name: info.shape for name, info in ours.tensors.items()} == {
            name: info.shape for name, info in theirs.tensors.items()
        }


def test_audio_is_left_out(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    hears = {"clip.has_audio_encoder": True}
    path = write_mmproj(
        tiny("gemma4"),
        tmp_path / "mmproj.gguf",
        changes=hears,
        named=lambda name: "a.norm" if name == "v.std_bias" else name,
    )
    with closing(VisionGguf(path)) as ours:
        assert "a.norm" not in ours.tensors
        assert "use_bidirectional_attention" not in ours.config["text_config"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip.projector_type": "gemma9"}, "the projector type 'gemma9' are not known .known: "),
        ({"clip.vision.block_count": None}, "'clip.vision.block_count' is None, not from 1 to"),
        ({"clip.vision.image_mean": [0.5]}, "'clip.vision.image_mean' is .0.5., not 3 numbers"),
    ],
)
def test_bad_metadata(
    changes: dict[str, Any], message: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_mmproj(tiny("qwen3_vl"), tmp_path / "mmproj.gguf", changes=changes)
    with pytest.raises(LocalrtError, match=message):
        VisionGguf(path)


@pytest.mark.parametrize(
    ("kind", "missing", "message"),
    [
        ("gemma3", "mm.input_projection.weight", "no matrix 'mm.input_projection.weight'"),
        ("llava", "v.blk.0.attn_q.weight", "attention.q_proj.weight"),
    ],
)
def test_missing_tensors(
    kind: str, missing: str, message: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    path = write_mmproj(
        tiny(kind), tmp_path / "mmproj.gguf", named=lambda name: None if name == missing else name
    )
    with pytest.raises(CheckpointError, match=message):  # noqa: SIM117
        with closing(VisionGguf(path)) as source:
            _see(source, picture(20, 20))


@pytest.fixture
def idefics3(tiny: Callable[[str], Path]) -> Path:
    return tiny("idefics3")


def _model(path: Path, *, columns: int = 64, architecture: str = "llama") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    values = np.ones((1, columns), np.float32)
    metadata = {f"{architecture}.embedding_length": columns}
    return write_gguf(path, architecture, metadata, {"output.weight": (values, "f32")})[0]


def _found(model: Path, projectors: Sequence[Path] = ()) -> str:
    source = vision_source(model, projectors)
    if source is None:
        return ""
    source.close()
    return str(source.path.relative_to(model.parent.parent))


def test_store(idefics3: Path, tmp_path: Path) -> None:
    """It sees as the folder that it was made of."""
    origin = {"source": {"name": "x", "path": str(idefics3)}}
    (tmp_path / "manifest.json").write_text(json.dumps(origin))
    found = vision_source(tmp_path)
    assert isinstance(found, VisionFolder)
    assert found.path == idefics3
    found.close()


def test_beside_a_gguf_file(idefics3: Path, tmp_path: Path) -> None:
    model = _model(tmp_path / "here" / "smolvlm-500m-Q4_K_M.gguf")
    assert _found(model) == ""
    for name in ("x-mmproj-F16", "mmproj-smolvlm-Q8_0", "mmproj-F32", "mmproj-BF16", "mmproj-F16"):
        write_mmproj(idefics3, model.parent / f"{name}.gguf")
    assert [path.stem for path in projectors_beside(model)] == [
        "mmproj-smolvlm-Q8_0",
        "mmproj-BF16",
        "mmproj-F16",
        "mmproj-F32",
        "x-mmproj-F16",
    ]
    assert _found(model) == "here/mmproj-smolvlm-Q8_0.gguf"
    assert open_checkpoint(model.parent).path == model


def test_projector_of_another_model(idefics3: Path, tmp_path: Path) -> None:
    wide = _model(tmp_path / "all" / "wide.gguf", columns=32)
    write_mmproj(idefics3, tmp_path / "all" / "mmproj-smolvlm.gguf")
    assert _found(wide) == ""
    assert _found(_model(tmp_path / "all" / "qwen.gguf", architecture="qwen3vl")) == ""
    other = {"clip.projector_type": "unknown"}
    write_mmproj(idefics3, tmp_path / "all" / "mmproj-other-F16.gguf", changes=other)
    assert _found(_model(tmp_path / "all" / "llama.gguf")) == "all/mmproj-smolvlm.gguf"
    with pytest.raises(UnsupportedModelError, match="projector type 'unknown' are not known"):
        vision_source(_model(tmp_path / "all" / "other-3b.gguf", columns=32))


@pytest.mark.parametrize(
    ("model", "encoders", "found"),
    [
        ("Model-Q8_0", "Model-f16 Model-heretic-f16", "Model-f16"),
        ("Model-v1.0-Q8_0", "Model-v1.0-f16 Model-v1.1-f16", "Model-v1.0-f16"),
        ("A-B-Q8_0", "A-f16 A-B-Q8_0 A-B-f16", "A-B-f16"),
        ("A-B-Q8_0", "A-f16 B-f16", None),
    ],
)
def test_encoders_of_several_models(
    model: str, encoders: str, found: str | None, idefics3: Path, tmp_path: Path
) -> None:
    """The one with most words of the model's name; of equal ones none is guessed."""
    path = _model(tmp_path / "here" / f"{model}.gguf")
    for name in encoders.split():
        write_mmproj(idefics3, path.parent / f"mmproj-{name}.gguf")
    if found is not None:
        assert _found(path) == f"here/mmproj-{found}.gguf"
        return
    with pytest.raises(CheckpointError, match=r"mmproj-A-f16.gguf and mmproj-B-f16.gguf may both"):
        vision_source(path)
