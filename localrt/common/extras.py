"""What an extra of pyproject.toml installs, and the command that installs it.

No package index has localrt, so messages name an extra's packages.
"""

from __future__ import annotations

import sys

from localrt import system

EXTRAS = {
    "gpu": "cuda-bindings nvidia-cuda-nvrtc",
    "torch": "torch bitsandbytes",
    "quantize": "torch scipy",
    "llamacpp": "llama-cpp-python",
    "browser": "textual-serve aiohttp",
    "bench": "torch transformers accelerate sentencepiece protobuf",
}


def install(extra: str) -> str:
    """The command that installs an extra's packages for the Python that runs this."""
    return f"{system.quote(sys.executable)} -m pip install {EXTRAS[extra]}"
