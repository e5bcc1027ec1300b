"""The first opening of a model's files: a confined process parses them before this one does.

Files that end it are refused; malformed ones are opened here for the error. Only a line comes back.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from localrt.common.errors import CheckpointError, LocalrtError
from localrt.common.files import read_cached, write_cached
from localrt.common.formatting import one_line
from localrt.common.helpers import has_helpers, helper_command, package_folders
from localrt.common.version import __version__
from localrt.models.weight_files import MANIFEST_NAME, model_files, model_stamp, projectors_beside

_RECORD, _MOST_RECORDS = "checked.json", 500
_NBYTES, _SECONDS, _LONGEST_ANSWER = 1 << 30, 60, 1 << 16
_PIPES = (-1, None, subprocess.DEVNULL, subprocess.PIPE, subprocess.STDOUT)
_NAMED = ("config.json", "adapter_config.json", MANIFEST_NAME)  # in a folder that is one model


def check_first(path: Path, cache: Path, projectors: Sequence[Path] = ()) -> str:
    """Have a confined process parse the model or adapter at ``path``, unless one has done so.

    ``cache`` is localrt's own folder, ``projectors`` are vision encoders elsewhere. Returns a line:
    what was checked, when and under what, or why nothing was.

    Raises:
        CheckpointError: that process failed, or exceeded its limits.
    """
    if not has_helpers():
        return "no: this program cannot start a process for it"
    path = path.absolute()
    one = path.is_file() or any((path / name).exists() for name in _NAMED)
    models = [path, *projectors, *projectors_beside(path)] if one else sorted(path.glob("*.gguf"))
    stamp = "".join([__version__, *map(model_stamp, models)])
    known = (records := read_cached(cache / _RECORD)).pop(str(path), None)
    if isinstance(known, dict) and known.get("stamp") == stamp:
        return str(known.get("line"))
    folders = package_folders("numpy", "tokenizers", "typing_extensions") or None
    command, answer = helper_command(__name__, *map(str, [path, *models]), folders=folders), ""
    with suppress(OSError), subprocess.Popen(command, *_PIPES) as process:
        assert process.stdout is not None, "it is a pipe"
        answer = process.stdout.read(_LONGEST_ANSWER).decode(errors="replace")
    limits, *said = [one_line(line) for line in answer.splitlines()] or [""]
    if not limits.startswith("with "):
        return "no: the process that would parse it first does not run"
    if (status := process.returncode) or not said:
        how = (said or [str(signal.strsignal(-status) if status < 0 else status)])[-1]
        raise CheckpointError(
            f"{path} is refused: the process that parses it first, {limits}, ended ({how}): "
            "get it again, from a place you trust"
        )
    line = f"at first opening, on {time.strftime('%Y-%m-%d')}, {limits}: {said[-1]}"
    kept = [*records.items()][1 - _MOST_RECORDS :]
    write_cached(cache / _RECORD, dict([*kept, (str(path), {"stamp": stamp, "line": line})]))
    return line


def main() -> None:
    """Parse the model at the first argument, whose files the others name; print what was parsed."""
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import tokenizers  # noqa: F401 - whose libraries cannot be read later

    from localrt.models.checkpoints import open_checkpoint
    from localrt.models.checkpoints.safetensors_header import read_header
    from localrt.models.tensor_source import RangedFile
    from localrt.models.tokenizers import load_tokenizer
    from localrt.models.vision.source import vision_source
    from localrt.system.confined import confine, limiter

    limit, (path, *models) = limiter(), map(Path, sys.argv[1:])
    files = [each for model in models for each in model_files(model)]
    limits = [*confine([path, *files, *sys.path]), *limit(_NBYTES, _SECONDS)]
    print("with", ", ".join(limits) or "no limits, which this system lacks", flush=True)
    parsed = []
    with suppress(LocalrtError, OSError, ImportError):  # of libraries that cannot be read now
        for each in path.glob("adapter*.safetensors"):
            parsed.append(f"adapter of {len(read_header(RangedFile(each)))} tensors")
        checkpoint = open_checkpoint(path)
        parsed.append(f"header, {len(checkpoint.tensors)} tensors, config")
        with suppress(LocalrtError):
            parsed += ["tokenizer"] * bool(load_tokenizer(checkpoint))
        parsed += ["vision encoder"] * bool(vision_source(path, models[1:]))
    print(", ".join(parsed) or "nothing that can be used")
