"""The first opening of a model's files: a confined process parses them before this one does.

If that process fails, the model is refused; if the files are malformed, this process opens them for
its error message. Nothing but lines of text comes back.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import dropwhile
from pathlib import Path

from localrt.common.errors import CheckpointError, LocalrtError
from localrt.common.files import read_cached, write_cached
from localrt.common.formatting import one_line
from localrt.common.processes import confined_process, has_helpers, helper_command
from localrt.common.version import __version__
from localrt.models.weight_files import (
    ADAPTER_NAME,
    MANIFEST_NAME,
    model_files,
    model_stamp,
    projectors_beside,
)

_RECORD, _MOST_RECORDS = "checked.json", 500
_NBYTES, _SECONDS, _LONGEST_ANSWER = 1 << 30, 60, 1 << 16
_NAMED = ("config.json", ADAPTER_NAME, MANIFEST_NAME)  # a folder with one is one model


def check_first(path: Path, cache: Path, projectors: Sequence[Path] = ()) -> str:
    """Have a confined process parse the model or adapter at ``path``, unless one has done so.

    ``cache`` is localrt's cache folder, ``projectors`` are vision encoders in other folders. Return
    a line that says what was checked, when and with which restrictions, or why nothing was.

    Raises:
        CheckpointError: that process failed, or exceeded its limits.
    """
    if not has_helpers():
        return "no: this program cannot start the process that checks it"
    path = path.absolute()
    one = path.is_file() or any((path / name).exists() for name in _NAMED)
    models = [path, *projectors, *projectors_beside(path)] if one else sorted(path.glob("*.gguf"))
    stamp = "".join([__version__, *map(model_stamp, models)])
    known = (records := read_cached(cache / _RECORD)).pop(str(path), None)
    if isinstance(known, dict) and known.get("stamp") == stamp:
        return str(known.get("line"))
    command, answer = helper_command(__name__, *map(str, [path, *models])), ""
    with suppress(OSError), confined_process(command, subprocess.STDOUT) as process:
        assert process.stdout is not None, "it is a pipe"
        answer = process.stdout.read(_LONGEST_ANSWER).decode(errors="replace")
    told = dropwhile(lambda line: not line.startswith("with "), answer.splitlines())  # warnings
    limits, *said = [one_line(line) for line in told] or [""]
    if not limits:
        return "no: the process that checks it does not start"
    if (status := process.returncode) or not said:
        how = (said or [str(signal.strsignal(-status) if status < 0 else status)])[-1]
        raise CheckpointError(
            f"{path} is refused: the process that checks it, {limits}, failed ({how}): "
            "get it again, from a place you trust"
        )
    line = f"at first opening, on {time.strftime('%Y-%m-%d')}, {limits}: {said[-1]}"
    kept = [*records.items()][1 - _MOST_RECORDS :]
    write_cached(cache / _RECORD, dict([*kept, (str(path), {"stamp": stamp, "line": line})]))
    return line


def main() -> None:
    """Parse the model at the first argument, whose files the others name; print what was parsed.

    Frees nothing, which would take a tenth of its time.
    """
    gc.disable()
    os.environ |= {"OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    import tokenizers  # noqa: F401 - its libraries cannot be read after ``confine``

    from localrt.models.checkpoints import open_checkpoint
    from localrt.models.checkpoints.safetensors_header import read_header
    from localrt.models.tensor_source import RangedFile
    from localrt.models.tokenizers import load_tokenizer
    from localrt.models.vision.registry import vision_source
    from localrt.system.confined import confine, limiter

    limit, (path, *models) = limiter(), map(Path, sys.argv[1:])
    files = [each for model in models for each in model_files(model)]
    limits = [*confine([path, *files, *sys.path]), *limit(_NBYTES, _SECONDS)]
    print("with", ", ".join(limits) or "no limits, which this system lacks", flush=True)
    parsed = []
    with suppress(LocalrtError, OSError, ImportError):  # the last of libraries not imported above
        for each in path.glob("adapter*.safetensors"):
            parsed.append(f"adapter of {len(read_header(RangedFile(each)))} tensors")
        checkpoint = open_checkpoint(path)
        parsed.append(f"header, {len(checkpoint.tensors)} tensors, config")
        with suppress(LocalrtError):
            parsed += ["tokenizer"] * bool(load_tokenizer(checkpoint))
        parsed += ["vision encoder"] * bool(vision_source(path, models[1:]))
    print(", ".join(parsed) or "nothing that can be used", flush=True)
    os._exit(0)
