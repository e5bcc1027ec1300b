from pathlib import Path

from benchmarks.common.memory_limit import drop_from_cache
from localrt.bench.runner import model_files


def test_files_of_a_model_are_those_of_a_store_or_all_parts(tmp_path: Path) -> None:
    (tmp_path / "store/deep").mkdir(parents=True)
    for name in ("store/a", "store/deep/b", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "one.gguf").write_bytes(b"x")
    assert {f.name for f in model_files(tmp_path / "store")} == {"a", "b"}
    parts = model_files(tmp_path / "m-00001-of-00002.gguf")
    assert [f.name for f in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert model_files(tmp_path / "one.gguf") == [tmp_path / "one.gguf"]


def test_what_was_dropped_is_said(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"x")
    no_right = tmp_path / "no/right"
    said = drop_from_cache([tmp_path / "one.gguf", tmp_path / "gone"], drop_all=no_right)
    assert said in ("model files", "nothing")  # the system may have no way to
    switch = tmp_path / "switch"
    assert drop_from_cache([tmp_path / "one.gguf"], drop_all=switch) == "everything"
    assert switch.read_text() == "1\n"
