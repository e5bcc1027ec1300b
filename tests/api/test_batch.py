"""``localrt.Batch``: rows of Ray, Dask and Spark, what is kept, and a cluster that loses a node."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import localrt
from localrt.batch import Batch, _loaded

GREEDY: Any = {"temperature": 0.0, "max_tokens": 5}


@pytest.fixture(scope="module")
def model(tiny_folder: Path) -> str:
    return str(tiny_folder)


def _kept(folder: Path) -> int:
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    return sum(len(json.loads(line)) for line in lines if not line.startswith('{"model"'))


def test_rows_of_each_kind(model: str) -> None:
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    batch = pickle.loads(pickle.dumps(Batch(model, **GREEDY)))
    prompts = ["a", "b" * 100_000, "c"]
    rows = batch({"prompt": np.array(prompts, dtype=object), "n": np.arange(3)})
    assert rows["n"].tolist() == [0, 1, 2]
    frame = pandas.DataFrame({"prompt": prompts, "n": range(3)}, index=[7, 8, 9])
    made = batch(frame)
    assert made.index.tolist() == [7, 8, 9]
    (streamed,) = batch(iter([frame]))
    (here,) = _loaded.values()
    right = [each.text for each in here.generate_batch(["a", "c"], **GREEDY)]
    for answered in (rows, made, streamed):
        texts = list(answered["answer"])
        assert [texts[0], texts[2]] == right
        assert texts[1] == ""
        assert "context" in list(answered["error"])[1]


def test_other_columns() -> None:
    for rows in ({"text": ["a"]}, ["a"]):
        with pytest.raises(localrt.OptionError, match="rows need columns with the names prompt"):
            localrt.Batch()(rows)


def test_what_is_kept(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(*ids: int) -> dict[str, Any]:
        return {"q": np.array([f"say {i}" for i in ids], dtype=object), "id": np.array(ids)}

    def batch(**options: Any) -> Batch:
        return Batch(model, column="q", **{"kept": tmp_path, **GREEDY, **options})

    one, two = batch(), batch()
    first = one(rows(1, 2))["answer"]
    monkeypatch.setattr("localrt.batch._OWN", "another-process")
    assert two(rows(2, 3))["answer"][0] == first[1]
    assert (_kept(tmp_path), len(list(tmp_path.iterdir()))) == (3, 2)
    (head,) = {path.read_text().splitlines()[0] for path in tmp_path.iterdir()}
    (tmp_path / "killed.jsonl").write_text(f'{head}\n{{"4": "half')
    assert one(rows(3, 4))["answer"][1] == batch(kept=None)(rows(4))["answer"][0]
    monkeypatch.setattr(Batch, "_here", None)
    assert list(batch()(rows(1, 2))["answer"]) == list(first)
    with pytest.raises(localrt.OptionError, match="other options"):
        batch(max_tokens=6)(rows(1))
    with pytest.raises(localrt.OptionError, match="did you mean"):
        batch(max_token=6)


CLUSTER = """
import json, sys, threading, time
from pathlib import Path
import localrt, ray
from ray.cluster_utils import Cluster

model, kept, options = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
node = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address, log_to_driver=False)

def kill():
    while len(list(kept.glob("*.jsonl"))) < 2:
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)

def answers(count):
    data = ray.data.from_items([{"id": i, "prompt": f"say {i}"} for i in range(count)])
    made = data.map_batches(
        localrt.Batch, fn_constructor_args=[model], fn_constructor_kwargs={"kept": kept, **options},
        batch_size=2, num_cpus=1, compute=ray.data.ActorPoolStrategy(min_size=1, max_size=2),
    )
    return [row["answer"] for row in sorted(made.take_all(), key=lambda row: row["id"])]

threading.Thread(target=kill, daemon=True).start()
made = json.dumps([answers(40), answers(44)])
Path(sys.argv[4]).write_text(made)
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_a_cluster_that_loses_a_node(model: str, tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs the ray extra")
    made, kept = tmp_path / "made.json", tmp_path / "kept"
    command = [sys.executable, "-W", "ignore", "-c", CLUSTER, model, str(kept)]
    command += [json.dumps(GREEDY), str(made)]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
    assert said.returncode == 0, said.stderr[-3000:]
    first, second = json.loads(made.read_text())
    with localrt.load(model) as here:
        right = here.generate_batch([f"say {i}" for i in range(44)], **GREEDY)
    assert second == [each.text for each in right]
    assert first == second[:40]
    assert 44 <= _kept(kept) <= 48, "what was lost with the node alone is computed again"
