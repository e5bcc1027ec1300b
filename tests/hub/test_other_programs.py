"""Models of Ollama, LM Studio and llama.cpp: found, named, resolved in place, never deleted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from localrt.common.errors import ModelNotFoundError, OptionError
from localrt.common.settings import Settings
from localrt.hub import list_models, remove_model, resolve
from tests.hub.server import add_ollama_model

LIBRARY = "registry.ollama.ai/library"


@pytest.fixture
def here(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Folders of all three programs; the demo's package is not there."""
    monkeypatch.setattr("localrt.hub.listing.demo_in_package", lambda: None)
    return replace(
        settings,
        ollama_dirs=(tmp_path / "ollama", tmp_path / "service"),
        lm_studio_dirs=(tmp_path / "lmstudio",),
        llama_cpp_dirs=(tmp_path / "llama.cpp",),
    )


def names(settings: Settings) -> list[str]:
    return [model.name for model in list_models(settings)]


def test_what_ollama_has_is_listed_by_its_names(here: Settings, tmp_path: Path) -> None:
    add_ollama_model(tmp_path / "ollama", f"{LIBRARY}/llama3.2/3b", b"GGUF one")
    add_ollama_model(tmp_path / "ollama", "registry.ollama.ai/me/own/latest", b"GGUF two")
    add_ollama_model(tmp_path / "service", "hf.co/org/name/Q4_K_M", b"GGUF three")
    add_ollama_model(tmp_path / "service", f"{LIBRARY}/cloudy/latest", b"no weights")
    assert names(here) == [
        "ollama:hf.co/org/name:Q4_K_M",
        "ollama:llama3.2:3b",
        "ollama:me/own:latest",
    ]
    model = list_models(here)[1]
    assert (model.place, model.quantization, model.kind) == ("Ollama", "Q4_K_M", "gguf")
    for name in names(here):
        assert resolve(name, settings=here, download=False).path.read_bytes()[:4] == b"GGUF"


@pytest.mark.parametrize("name", ["LLAMA3.2:3B", "ollama:llama3.2:3b", "llama3.2"])
def test_a_short_name_means_the_model_that_ollama_has(
    name: str, here: Settings, tmp_path: Path
) -> None:
    blob = add_ollama_model(tmp_path / "ollama", f"{LIBRARY}/llama3.2/3b")
    found = resolve(name, settings=here, download=False)
    assert (found.path, found.source) == (blob, "ollama")


def test_what_is_kept_beside_the_weights_comes_along(here: Settings, tmp_path: Path) -> None:
    blob = add_ollama_model(
        tmp_path / "ollama",
        f"{LIBRARY}/pirate/latest",
        template="{{ .Prompt }}",
        system="You are a pirate.",
        params={
            "temperature": 0.2,
            "repeat_penalty": 1.1,
            "stop": ["<end>"],
            "num_ctx": 2048,
            "num_predict": -1,
            "num_gpu": 99,
        },
        license="Apache",
        adapter=b"GGUF adapter",
        projector=b"GGUF projector",
    )
    extras = resolve("pirate", settings=here, download=False).extras
    assert extras is not None
    assert (extras.go_template, extras.system) == (True, "You are a pirate.")
    assert extras.options == {"temperature": 0.2, "repetition_penalty": 1.1, "stop": ["<end>"]}
    assert (extras.ctx, extras.license) == (2048, "Apache")
    assert [path.parent for path in extras.adapters] == [blob.parent]
    assert [path.read_bytes() for path in extras.projectors] == [b"GGUF projector"]


@pytest.mark.parametrize("text", ["{", '{"layers": 3}', '{"layers": [{}], "config": {}}'])
def test_a_damaged_manifest_is_no_model(text: str, here: Settings, tmp_path: Path) -> None:
    add_ollama_model(tmp_path / "ollama", f"{LIBRARY}/good/latest")
    manifest = tmp_path / "ollama" / "manifests" / LIBRARY / "bad" / "latest"
    manifest.parent.mkdir()
    manifest.write_text(text)
    assert names(here) == ["ollama:good:latest"]


def test_lm_studio_and_llama_cpp(here: Settings, tmp_path: Path) -> None:
    home = tmp_path / "lmstudio" / "maker" / "Model-GGUF"
    home.mkdir(parents=True)
    for name in ("Model-Q4_K_M.gguf", "Model-Q8_0.gguf", "mmproj-Model.gguf"):
        (home / name).write_bytes(b"GGUF")
    flat = tmp_path / "llama.cpp"
    flat.mkdir()
    for name in ("org_Tiny-GGUF_tiny-Q8_0.gguf", "alone.gguf"):
        (flat / name).write_bytes(b"GGUF")
    assert names(here) == [
        "llamacpp:alone",
        "llamacpp:org_Tiny-GGUF_tiny-Q8_0",
        "lmstudio:maker/Model-GGUF:Q4_K_M",
        "lmstudio:maker/Model-GGUF:Q8_0",
    ]
    sizes = {each.name: each.bytes for each in list_models(here)}
    assert sizes["lmstudio:maker/Model-GGUF:Q8_0"] == 8  # with its vision encoder
    found = resolve("lmstudio:maker/model-gguf:q8_0", settings=here, download=False)
    assert found.path == home / "Model-Q8_0.gguf"
    assert resolve("llamacpp:alone", settings=here, download=False).path == flat / "alone.gguf"
    with pytest.raises(ModelNotFoundError, match="did you mean lmstudio:maker/Model-GGUF"):
        resolve("lmstudio:maker/Model-GGUF:Q5_0", settings=here)


def test_files_of_others_are_not_deleted_and_it_is_said_what_to_do(
    here: Settings, tmp_path: Path
) -> None:
    blob = add_ollama_model(tmp_path / "ollama", f"{LIBRARY}/llama3.2/3b")
    for name in ("llama3.2:3b", "ollama:llama3.2:3b"):
        with pytest.raises(OptionError, match=r"belongs to Ollama: run `ollama rm llama3\.2:3b`"):
            remove_model(name, here)
    assert blob.exists()
