import sys
from pathlib import Path

import pytest

from benchmarks.common.memory_limit import MemoryLimit, drop_from_cache
from localrt.bench.runner import model_files
from localrt.common.errors import LocalrtError


def _tree(root: Path, cgroup: str, *groups: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for group in groups:
        (root / "sys/fs/cgroup" / group).mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / group / "cgroup.procs").write_text("")
    return root


@pytest.mark.parametrize(
    ("cgroup", "group", "file"),
    [
        ("4:memory:/job\n", "memory/job", "memory.limit_in_bytes"),
        ("4:memory:/only/the/host/sees\n", "memory", "memory.limit_in_bytes"),
        ("0::/job\n", "job", "memory.max"),
    ],
)
def test_create(tmp_path: Path, cgroup: str, group: str, file: str) -> None:
    limit = MemoryLimit.create(5_000_000, _tree(tmp_path, cgroup, group))
    (folder,) = (tmp_path / "sys/fs/cgroup" / group).glob("localrt-bench-*")
    assert (folder / file).read_text("utf-8") == "5000000"
    limit.add(4321)
    assert (folder / "cgroup.procs").read_text("utf-8") == "4321"


@pytest.mark.parametrize("name", ["memory.peak", "memory.max_usage_in_bytes"])
def test_peak(tmp_path: Path, name: str) -> None:
    limit = MemoryLimit(tmp_path)
    assert limit.peak() is None
    (tmp_path / name).write_text("123456\n")
    assert limit.peak() == 123456


def test_no_control_groups(tmp_path: Path) -> None:
    with pytest.raises(LocalrtError, match="systemd-run"):
        MemoryLimit.create(5_000_000, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs control groups")
def test_real_group() -> None:
    import subprocess

    try:
        limit = MemoryLimit.create(64 << 20)
    except LocalrtError as error:
        pytest.skip(str(error))
    child = subprocess.Popen(
        [sys.executable, "-c", "input(); bytearray(200 << 20)"],
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    limit.add(child.pid)
    child.communicate(b"\n")
    assert child.returncode != 0
    assert 50 << 20 < (limit.peak() or 0) <= 64 << 20
    limit.remove()
    assert not limit._folder.exists()


def test_model_files(tmp_path: Path) -> None:
    (tmp_path / "store/deep").mkdir(parents=True)
    for name in ("store/a", "store/deep/b", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf"):
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "one.gguf").write_bytes(b"x")
    assert {f.name for f in model_files(tmp_path / "store")} == {"a", "b"}
    parts = model_files(tmp_path / "m-00001-of-00002.gguf")
    assert [f.name for f in parts] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert model_files(tmp_path / "one.gguf") == [tmp_path / "one.gguf"]


def test_drop_from_cache(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"x")
    drop_from_cache([tmp_path / "one.gguf", tmp_path / "gone"], drop_all=tmp_path / "no/right")
    drop_from_cache([tmp_path / "one.gguf"], drop_all=tmp_path / "switch")
    assert (tmp_path / "switch").read_text("utf-8") == "1\n"
