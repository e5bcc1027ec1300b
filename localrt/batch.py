"""Batch inference on many machines: a function of rows for Ray Data, Dask and Spark.

Each process that calls it loads the model once. What is done may be kept in a folder, so that a
second run computes only the rest. It imports none of the three.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Unpack
from uuid import uuid4

from localrt.api import Model, load
from localrt.common.errors import OptionError
from localrt.engine.options import GenerateOptions, read_options, schema_of

__all__ = ["Batch"]

_LOCK = threading.Lock()
_OWN = uuid4().hex  # each process keeps answers in a file of its own
_loaded: dict[str, Model] = {}  # of this process: some unpickle a ``Batch`` for each task


class Batch:
    """Answers a column of prompts, as ``data.map_batches(localrt.Batch, ...)`` of Ray Data.

    Args:
        model: as for ``load``; ``load`` has its other arguments, such as ``{"ram": "8GB"}``.
        column: the prompts, each what ``Model.generate`` takes; the text of its answer goes to the
            column ``into``, what went wrong with this prompt alone to the column ``error``, or "".
        kept: a folder that all machines see. Answers are kept there, and rows whose ``id`` is there
            are not computed again.
        options: those of ``Model.generate_batch``. A seed counts from the first row of each call.

    Raises:
        OptionError: a wrong option, or ``kept`` has answers of another model or with other options.
    """

    def __init__(
        self,
        model: str | Path = "smollm2",
        *,
        column: str = "prompt",
        into: str = "answer",
        id: str = "id",
        kept: str | Path | None = None,
        load: Mapping[str, Any] | None = None,
        **options: Unpack[GenerateOptions],
    ) -> None:
        read_options(options)
        self._model, self._load, self._options = str(model), dict(load or {}), options
        self._column, self._into, self._id = column, into, id
        self._kept = None if kept is None else Path(kept)
        told = {**options, "json_schema": schema_of(options.get("json_schema"))}
        self._head = json.dumps({"model": self._model, "options": told}, sort_keys=True)
        self._done: dict[str, str] = {}
        self._read: dict[Path, int] = {}  # the bytes of each file that are in ``_done``

    def __call__(self, rows: Any) -> Any:
        """Return the rows with two more columns.

        ``rows`` are a mapping of arrays (Ray), a DataFrame (Dask's ``map_partitions``) or an
        iterator of DataFrames (Spark's ``mapInPandas``); the result is of the same kind.
        """
        if isinstance(rows, Iterator):
            return map(self, rows)
        needed = [self._column, self._id] if self._kept else [self._column]
        try:
            columns = [rows[name] for name in needed]
        except (LookupError, TypeError) as error:
            what = f"rows need columns with the names {', '.join(needed)}"
            raise OptionError(f"{what}: see column= and id=") from error
        prompts = [each.tolist() if hasattr(each, "tolist") else each for each in columns[0]]
        ids = [str(each) for each in columns[1]] if self._kept else []
        texts, errors = self._answers(prompts, ids)
        made = {self._into: texts, "error": errors}
        if hasattr(rows, "assign"):
            return rows.assign(**made)
        import numpy as np

        return {**rows, **{name: np.array(each, dtype=object) for name, each in made.items()}}

    def _answers(self, prompts: list[Any], ids: list[str]) -> tuple[list[str], list[str]]:
        if self._kept is not None:
            self._look(self._kept)
        texts = [self._done.get(id, "") for id in ids] or [""] * len(prompts)
        errors = [""] * len(prompts)
        todo = [row for row in range(len(prompts)) if not ids or ids[row] not in self._done]
        if not todo:
            return texts, errors
        work = [prompts[row] for row in todo]
        answers = self._here().generate_batch(work, errors="return", **self._options)
        for row, answer in zip(todo, answers, strict=True):
            texts[row], errors[row] = answer.text, str(answer.error or "")
        if self._kept is not None:
            self._keep(self._kept, {ids[row]: texts[row] for row in todo if not errors[row]})
        return texts, errors

    def _here(self) -> Model:
        """Return this process's model."""
        key = json.dumps([self._model, self._load], sort_keys=True, default=str)
        with _LOCK:
            if key not in _loaded:
                _loaded[key] = load(self._model, **self._load)
            return _loaded[key]

    def _look(self, folder: Path) -> None:
        """Read what all processes have kept since the last call."""
        for path in sorted(folder.glob("*.jsonl")):
            with path.open("rb") as file:
                head = file.readline()
                if head.endswith(b"\n") and head.decode().strip() != self._head:
                    raise OptionError(
                        f"{folder} has answers of another model or with other options: "
                        "give kept another folder"
                    )
                file.seek(max(len(head), self._read.get(path, 0)))
                for line in file:
                    if line.endswith(b"\n"):  # else its writer was killed
                        self._done.update(json.loads(line))
                        self._read[path] = file.tell()

    def _keep(self, folder: Path, answers: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{_OWN}-{os.getpid()}.jsonl"
        with _LOCK, path.open("a", encoding="utf-8") as file:
            file.write(f"{self._head}\n" if not file.tell() else "")
            file.write(json.dumps(answers) + "\n")
        self._done.update(answers)
