"""Environments of their own for peers whose pins may conflict with localrt's.

    python -m benchmarks.peers.airllm_env [airllm]

Such an environment lies inside the one that localrt runs in and sees that one's packages behind its
own: only what the peer pins is installed twice, never torch. ``benchmarks.offload`` finds it there.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from localrt.common.errors import LocalrtError

PEERS: Mapping[str, tuple[str, ...]] = {"airllm": ("airllm==4.0.0",)}
"""What to install for a peer, exactly; its other needs are those of the ``bench`` extra."""

_PARENT = "localrt-parent.pth"


def peer_python(engine: str, prefix: Path | None = None) -> Path | None:
    """The interpreter of an engine's own environment; None where it has, or needs, none."""
    if engine not in PEERS:
        return None
    found = _python(_folder(engine, prefix))
    return found if found.exists() else None


def make_peer(engine: str, prefix: Path | None = None, *, source: str | None = None) -> Path:
    """Make the environment of ``engine``, or make it anew; returns its interpreter.

    ``source`` is a folder of wheels to install from instead of the package index.

    Raises:
        LocalrtError: no such peer, or it cannot be installed.
    """
    if engine not in PEERS:
        raise LocalrtError(f"unknown peer {engine!r}: choose from {', '.join(PEERS)}")
    folder = _folder(engine, prefix)
    venv.EnvBuilder(with_pip=False, clear=True, symlinks=os.name != "nt").create(folder)
    python = _python(folder)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    command += ["install", "--quiet", "--no-deps", *PEERS[engine]]
    if source is not None:
        command += ["--no-index", "--find-links", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["pip failed"]
        python.unlink(missing_ok=True)  # so that it is not found half made
        raise LocalrtError(f"{engine} cannot be installed: {words[-1]}")
    # Only now: what pip looked at was the peer's own.
    packages = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    parents = [sysconfig.get_paths()[kind] for kind in ("purelib", "platlib")]
    (packages / _PARENT).write_text("\n".join(dict.fromkeys(parents)) + "\n", encoding="utf-8")
    return python


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the environments of the peers named, by default of all."""
    parser = argparse.ArgumentParser(description="environments of peers for the benchmarks")
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"default: {' '.join(PEERS)}")
    names = parser.parse_args(arguments).peers or list(PEERS)
    try:
        if find_spec("pip") is None:
            raise LocalrtError("pip is not installed in this environment")
        for name in names:
            print(f"{name}: {make_peer(name)}")
    except LocalrtError as error:
        print(f"localrt: {error}", file=sys.stderr)
        return 1
    return 0


def _folder(engine: str, prefix: Path | None) -> Path:
    return (prefix or Path(sys.prefix)) / "localrt-peers" / engine


def _python(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


if __name__ == "__main__":
    sys.exit(main())
