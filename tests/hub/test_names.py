"""What MODEL may be: names of the hub, short names, paths, the demo, and what is said about
anything else.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.common.errors import LocalrtError, ModelNotFoundError, OptionError
from localrt.common.settings import Settings
from localrt.hub import resolve
from localrt.hub.files import (
    choose_variant,
    gguf_variants,
    quantization_label,
    safetensors_model_files,
    variant_name,
)
from localrt.hub.names import KNOWN_MODELS, HubRef, client_name, find_known, parse_hub_ref
from localrt.planning.models import shape_from_config
from tests.conftest import needs_links
from tests.hub.conftest import settings_at


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return settings_at(tmp_path / "settings", "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/name", HubRef("org/name")),
        ("org/name:Q4_K_M", HubRef("org/name", None, "Q4_K_M")),
        ("org/name@refs/pr/1:q8_0", HubRef("org/name", "refs/pr/1", "q8_0")),
        ("https://huggingface.co/org/name", HubRef("org/name")),
        ("hf.co/org/name:Q8_0", HubRef("org/name", None, "Q8_0")),
        ("org/name:sub/file.gguf", HubRef("org/name", None, "sub/file.gguf")),
    ],
)
def test_hub_names(text: str, expected: HubRef) -> None:
    assert parse_hub_ref(text) == expected


@pytest.mark.parametrize(
    "text", ["name", "org/name@../../x", "a/b/c", "org/na me", "org/name:", "../x/y"]
)
def test_not_hub_names(text: str) -> None:
    assert parse_hub_ref(text) is None


@given(st.text(max_size=40).filter(lambda text: text != "smollm2" and not parse_hub_ref(text)))
def test_any_other_text_is_a_path_or_one_of_our_errors(text: str) -> None:
    with contextlib.suppress(LocalrtError):
        found = resolve(text, settings=settings_at(Path("/nowhere"), "http://127.0.0.1:9"))
        assert found.source == "local"


def test_paths_are_used_as_they_are(tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    for path in (folder, file):
        found = resolve(str(path), settings=settings)
        assert (found.path, found.source, found.revision) == (path, "local", None)
    (tmp_path / "org" / "name").mkdir(parents=True)  # a folder wins over a name of the hub
    with contextlib.chdir(tmp_path):
        assert resolve("org/name", settings=settings).source == "local"
    for name, revision, says in (
        (str(tmp_path), "v1", "revision"),
        ("org/name@v1", "v2", "two revisions"),
        ("org/nam", "../../x", "cannot be"),
    ):
        with pytest.raises(OptionError, match=says):
            resolve(name, settings=settings, revision=revision)


def test_a_missing_file_suggests_close_ones(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "qwen-q4_k_m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelNotFoundError, match="no such file") as caught:
        resolve(str(tmp_path / "qwen-q4_k_s.gguf"), settings=settings)
    assert "qwen-q4_k_m.gguf" in str(caught.value)


@pytest.mark.parametrize(
    "text", ["./missing", "~nobody-of-that-name/x", "missing.gguf", "a/b.gguf"]
)
def test_what_looks_like_a_path_is_one(text: str, settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError, match="no such file"):
        resolve(text, settings=settings)


def test_a_sentence_is_no_name(settings: Settings) -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2"):
        resolve("smolm2", settings=settings)
    says = r"""it was taken for a model's name, .*: smollm2 "What is a \\"quine\\"\?"$"""
    with pytest.raises(ModelNotFoundError, match=says):
        resolve('What is a "quine"?', settings=settings)


@pytest.mark.parametrize("text", ["", "  ", "a\0b"])
def test_no_name_at_all(text: str, settings: Settings) -> None:
    with pytest.raises(OptionError):
        resolve(text, settings=settings)


@pytest.mark.parametrize(
    ("stem", "label"),
    [
        ("SmolLM2-135M-Instruct.Q4_1", "Q4_1"),
        ("Llama-3.3-70B-Instruct-UD-IQ2_XXS", "UD-IQ2_XXS"),
        ("gpt-oss-20b-MXFP4_MOE", "MXFP4_MOE"),
        ("model-bf16", "BF16"),
        ("Q8-tales-f16", "F16"),
        ("faq3_bot", None),
    ],
)
def test_labels_in_file_names(stem: str, label: str | None) -> None:
    assert quantization_label(stem) == label


@pytest.mark.parametrize(
    ("name", "is_model"),
    [
        *((name, True) for name in ("Clippy-7B-Q4_K_M", "Vaelith-12B", "imatrix-tuned-1b")),
        *((name, False) for name in ("clip_l", "vae-f16", "x.imatrix", "x-mmproj-f16")),
    ],
)
def test_files_beside_models(name: str, is_model: bool) -> None:
    assert bool(gguf_variants([f"{name}.gguf"])) is is_model


@pytest.mark.parametrize(
    ("repo", "files", "wanted", "chosen"),
    [
        ("org/m", "m-Q4_K_M mtp-m-Q4_K_M", None, "m-Q4_K_M"),
        ("org/m", "m-Q4_K_M m-Q8_0 MTP/mtp-m-Q4_K_M MTP/mtp-m-Q8_0", None, "m-Q4_K_M"),
        ("org/m", "m-Q8_0 MTP/mtp-m-Q4_K_M", "mtp-m-Q4_K_M.gguf", "MTP/mtp-m-Q4_K_M"),
        ("org/m", "mtp-m-Q4_K_M", None, None),
        ("org/m", "m-Q4_K_M m-eagle3-Q4_K_M", "Q4_K_M", "m-Q4_K_M"),
        ("org/m", "m-Q4_K_M EAGLE3-m.Q4_K_M mmproj-m-Q4_K_M", None, "m-Q4_K_M"),
        ("org/m", "g-it-Q4_K_M g-it-assistant-Q4_K_M", None, "g-it-Q4_K_M"),
        ("org/m", "m-Q4_K_M m-DFlash2-Q4_K_M m-dspark-Q4_K_M", "Q4_K_M", "m-Q4_K_M"),
        ("org/m", "m-Q4_K_M g-it-assistant-Q8_0", "g-it-assistant-Q8_0", "g-it-assistant-Q8_0"),
        ("org/m-DFlash2-GGUF", "m-DFlash2-Q8_0 m-DFlash2-Q4_K_M", None, "m-DFlash2-Q4_K_M"),
        ("org/m", "my-assistant-Q4_K_M", None, "my-assistant-Q4_K_M"),
        ("org/m", "MTP/m-Q4_K_M", None, "MTP/m-Q4_K_M"),
        ("org/m", "m-UD-Q4_K_XL MTP/m-Q8_0-MTP MTP/m-MTP-Q4_0", None, "m-UD-Q4_K_XL"),
        ("org/m", "UD-IQ2_XXS/model BF16/model", "UD-IQ2_XXS", "UD-IQ2_XXS/model"),
        ("org/m", "x/Q8_0/model x/BF16/model", "Q8_0", "x/Q8_0/model"),
        ("org/m", "Q4_K_M/m-Q5_0 m-Q8_0", "Q5_0", "Q4_K_M/m-Q5_0"),
    ],
)
def test_draft_heads_beside_a_model(
    repo: str, files: str, wanted: str | None, chosen: str | None
) -> None:
    variants = gguf_variants(f"{file}.gguf" for file in files.split())
    if chosen is None:
        with pytest.raises(ModelNotFoundError):
            choose_variant(variants, wanted, repo)
        return
    found = choose_variant(variants, wanted, repo)
    assert found.files == (f"{chosen}.gguf",)
    again = choose_variant(variants, variant_name(found, variants), repo)
    assert again == found


def test_split_files_are_one_variant_and_gaps_are_noticed() -> None:
    names = [f"sub/big-Q6_K-0000{part}-of-00003.gguf" for part in (3, 1)]
    assert gguf_variants(names) == []
    (variant,) = gguf_variants([*names, "sub/big-Q6_K-00002-of-00003.gguf"])
    assert (variant.label, len(variant.files)) == ("Q6_K", 3)
    assert variant.files[0].endswith("-00001-of-00003.gguf")


def test_a_single_file_is_preferred_to_other_copies() -> None:
    names = ["config.json", "model.safetensors", "model.fp16.safetensors", "a/model.safetensors"]
    assert safetensors_model_files(names) == ["config.json", "model.safetensors"]
    pooled = [*names, "1_Pooling/config.json", "2_Normalize/config.json"]
    assert set(safetensors_model_files(pooled)) - set(names) == {"1_Pooling/config.json"}
    dense = {"2_Dense/config.json", "2_Dense/model.safetensors"}
    assert dense < set(safetensors_model_files([*pooled, *dense, "2_Dense/pytorch_model.bin"]))
    assert safetensors_model_files(["config.json", "pytorch_model.bin"]) == []


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("/home/me/models/qwen2.5-coder-q4_k_m.gguf", "qwen2.5-coder-q4_k_m"),
        ("./model-00001-of-00003.gguf", "model"),
        ("org/name:Q4_K_M", "org/name:Q4_K_M"),
        ("org/name:name-q8_0.gguf", "name-q8_0"),
        ("lmstudio:publisher/model:Q4_K_M", "publisher/model:Q4_K_M"),
        ("smollm2", "smollm2"),
    ],
)
def test_clients_know_no_paths(model: str, name: str) -> None:
    assert client_name(model) == name


@needs_links
@pytest.mark.parametrize(
    ("target", "told"),
    [("model.gguf", "it leads back to itself"), ("gone.gguf", "gone.gguf is not there")],
)
def test_a_link_that_leads_nowhere(
    settings: Settings, tmp_path: Path, target: str, told: str
) -> None:
    link = tmp_path / "model.gguf"
    link.symlink_to(target)
    with pytest.raises(ModelNotFoundError, match=f"is a link that leads to no file.*: {told}"):
        resolve(str(link), settings=settings)


@pytest.mark.slow
def test_a_config_has_the_parameters_of_its_model() -> None:
    for model in {each.shape: each for each in KNOWN_MODELS}.values():
        shape = shape_from_config(model.config(), name=model.name, format="f32")
        assert shape.nbytes / 4e9 == pytest.approx(model.parameters, rel=0.03), model.name


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("llama3.2:1b", "llama3.2:1b"),
        ("llama3.2", "llama3.2:3b"),
        ("gemma4:latest", "gemma4:e4b"),
        ("llama3.2:7b", None),
    ],
)
def test_a_family_alone_is_its_first_model(name: str, found: str | None) -> None:
    model = find_known(name)
    assert (model.name if model else None) == found
