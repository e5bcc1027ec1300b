"""What an extra of pyproject.toml installs, and the command that installs it.

No package index has localrt, so messages name an extra's packages.
"""

from __future__ import annotations

import sys

from localrt import system
from localrt.common.processes import is_packaged

EXTRAS = {
    "gpu": "cuda-bindings nvidia-cuda-nvrtc",
    "torch": "torch",
    "quantize": "torch scipy",
    "llamacpp": "llama-cpp-python",
    "ray": "ray[data]",
}


def install_for_gpu() -> str:
    """The command that installs llama.cpp for GPUs that are not NVIDIA's. Macs' have it anyway."""
    flags = "" if system.UNIFIED_MEMORY else " -C cmake.args=-DGGML_VULKAN=on"
    return f"{install('llamacpp')} --force-reinstall --no-cache-dir{flags}"


def install(extra: str) -> str:
    """What to do for an extra: the command that installs its packages for the Python here."""
    if is_packaged():
        return f"install localrt by pip, with its extra {extra}: this program takes no packages"
    return f"{system.quote(sys.executable)} -m pip install {EXTRAS[extra]}"
