"""Which files of a folder are read: patterns of ``.gitignore`` files are what they are for git."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from localrt.documents.folders import _expression, files_below

# Lines of a .gitignore, between "|"; a file that they ignore, and one that they do not.
PATTERNS = [
    ("build", "build", "builds"),
    ("build", "a/b/build/c.txt", "a/build.txt"),
    ("build/", "build/c.txt", "a/build"),
    ("/build", "build/c.txt", "a/build/c.txt"),
    ("a/build", "a/build/c.txt", "b/a/build/c.txt"),
    ("*.log", "a/b.log", "a/b.log.txt"),
    ("a/*.log", "a/b.log", "a/c/b.log"),
    ("a?.txt", "ab.txt", "a.txt"),
    ("[Dd]ebug/", "Debug/a.txt", "ebug/a.txt"),
    ("[a-c].txt", "b.txt", "d.txt"),
    ("[!a-c].txt", "d.txt", "b.txt"),
    ("[^a].txt", "b.txt", "a.txt"),
    ("x[!a]y", "xby", "x/y"),
    ("[]a].txt", "].txt", "b.txt"),
    ("**/logs", "a/b/logs/c", "a/b/blogs/c"),
    ("logs/**", "logs/a/b", "b/logs/a"),
    ("a/**/b", "a/x/y/b", "a/x/y/c"),
    ("a/**/b", "a/b", "c/a/b"),
    ("/**", "a/b", ""),
    ("a**b", "axxb", "a/b"),
    ("# a", "", "# a"),
    (r"\#a", "#a", "a"),
    (r"\!a", "!a", "a"),
    (r"\*", "*", "a"),
    (r"a\ ", "a ", "a"),
    ("a  ", "a", "a  "),
    ("a b", "a b", "a"),
    ("*.log|!a.log", "b.log", "a.log"),
    ("!a.log|*.log", "a.log", "a.txt"),
    ("logs|!logs/a", "logs/a", "a"),
    ("logs/*|!logs/a", "logs/b", "logs/a"),
    ("*|!*/|!*.py", "a/b.txt", "a/b.py"),
    ("a\r|b", "a", "ab"),
    ("|  ||/|//|", "", "a"),
    ("[z-a]|[|a\\", "", "a"),
    ("*a*a*a*b", "aaaab", "aaaa"),
    ("é", "é", "e"),
]


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return folder


def names_below(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in files_below(folder)]


def by_git(folder: Path) -> list[str]:
    git = ["git", "-C", str(folder)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    command = [*git, "ls-files", "-z", "-o", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
    return [name for name in listed if name and not re.search(r"(^|/)\.", name)]


@pytest.mark.parametrize(("lines", "ignored", "kept"), PATTERNS)
def test_patterns(lines: str, ignored: str, kept: str, tmp_path: Path) -> None:
    files = {f"in/{name}": "" for name in (ignored, kept) if name}
    written(tmp_path, {**files, "in/.gitignore": lines.replace("|", "\n"), "other": ""})
    expected = ["other", *([f"in/{kept}"] if kept else [])]
    assert names_below(tmp_path) == expected
    if shutil.which("git"):
        assert sorted(by_git(tmp_path)) == sorted(expected)


NAMES = st.sampled_from(["a", "b", "ab", "abc", "a.log", "x y", "z ", "d-e", "[q]", "#h", "!n"])
WORDS = "a|b|ab|*|**|?|[ab]|[!a]|[a-c]|*.log|*b*|a*c|**a|x y"
ESCAPES = r"\a|\#h|\!n|z\ |[]q[]*|[^a-b]|*a*b*|[d-]*"
PARTS = st.sampled_from([*WORDS.split("|"), *ESCAPES.split("|")])
ENDS = st.sampled_from(["", "", "/"])
LINES = st.builds(
    lambda negation, start, parts, end: negation + start + "/".join(parts) + end,
    *(st.sampled_from(["", "", "", "!"]), ENDS, st.lists(PARTS, min_size=1, max_size=3)),
    st.sampled_from(["", "/", " "]),
)
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
@given(
    paths=st.sets(PATHS, min_size=4, max_size=12),
    rules=st.dictionaries(st.sampled_from(["", "a/", "a/b/"]), st.lists(LINES, max_size=4)),
    excluded=st.lists(LINES, max_size=2),
)
def test_any_patterns_mean_what_git_takes_them_for(
    paths: set[str],
    rules: dict[str, list[str]],
    excluded: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("repository")
    for path in sorted(paths, key=len, reverse=True):
        if not (folder / path).exists():  # a folder
            with suppress(FileExistsError, NotADirectoryError):
                written(folder, {path: ""})
    for place, lines in rules.items():
        if (folder / place).is_dir():
            written(folder, {f"{place}.gitignore": "\n".join(lines)})
    written(folder, {".git/info/exclude": "\n".join(excluded)})
    if expected := by_git(folder):
        assert sorted(names_below(folder)) == sorted(expected)


def test_rules_around_an_attached_folder(tmp_path: Path) -> None:
    """Those of its repository count, those above it do not; what is named is read."""
    written(tmp_path, {".gitignore": "*", "it/.git/info/exclude": "/a/excluded\n"})
    written(tmp_path, {"it/.gitignore": "*.log\n/a/b/one\nbuild/\n", "it/a/.gitignore": "/b/two"})
    written(tmp_path, dict.fromkeys(("it/a/excluded", "it/build/c", "it/build/d.log"), ""))
    written(
        tmp_path, {f"it/a/b/{name}": "" for name in ("one", "two", "three", "x.log", ".hidden")}
    )
    written(
        tmp_path, {"it/a/node_modules/x": "", "it/a/b/inner/.git/HEAD": "", "it/a/b/inner/y": ""}
    )
    assert names_below(tmp_path / "it/a/b") == ["three", "inner/y"]
    assert names_below(tmp_path / "it") == ["a/b/three", "a/b/inner/y"]
    assert names_below(tmp_path / "it/build") == ["c"]
    written(tmp_path, {"it/build/.gitignore": "*"})
    assert names_below(tmp_path / "it/build") == ["c", "d.log"], "all are ignored, but it was named"


@pytest.mark.parametrize(
    ("pattern", "path"),
    [
        ("*a" * 100 + "b", "a" * 250),
        ("**/a/" * 50 + "b", "a/" * 500 + "c"),
        ("**/*a*a*a/" * 25 + "b", ("a" * 200 + "/") * 19 + "c"),
        ("?" + "*a*" * 60 + "x", "a" * 255),
        ("*[a]" * 60 + "/x", "a" * 250 + "/y"),
    ],
)
def test_no_pattern_takes_long(pattern: str, path: str) -> None:
    """With a step for each way to match, these would not end."""
    assert not _expression(pattern).fullmatch(path.replace("/", "\n"))


def test_files_of_patterns_that_are_none(tmp_path: Path) -> None:
    """They are endless, a folder, too large, or too many: the others count."""
    written(
        tmp_path, {"large/.gitignore": "#" * (1 << 19) + "\nx", "large/x": "", "a.log": "", "b": ""}
    )
    (tmp_path / "folder/.gitignore").mkdir(parents=True)
    (tmp_path / ".gitignore").write_text("*.log\n" + "c\n" * 9_000 + f"{'d' * 999}\nb")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "folder/pipe")
        os.mkfifo(tmp_path / "large/inner.pipe")
    assert names_below(tmp_path) == ["b", "large/x"]


def test_deep_folders(tmp_path: Path) -> None:
    """No call is nested in another for each of them."""
    places = [tmp_path]
    for _ in range(1100):
        places.append(places[-1] / "a")
        places[-1].mkdir()
    last = places[-1] / "b"
    last.write_text("")
    try:
        assert names_below(tmp_path) == [last.relative_to(tmp_path).as_posix()]
    finally:  # what removes tests' folders calls itself for each
        last.unlink()
        for place in reversed(places[1:]):
            place.rmdir()


@pytest.mark.skipif(os.name == "nt", reason="rights of POSIX")
def test_a_closed_folder_and_a_link_into_it(tmp_path: Path) -> None:
    written(tmp_path, {"closed/key": "", "it/a": ""})
    (tmp_path / "it/link").symlink_to("../closed/key")
    (tmp_path / "it/loop").symlink_to("loop")
    (tmp_path / "it/inside").symlink_to("a")
    (tmp_path / "closed").chmod(0)
    try:
        assert names_below(tmp_path / "it") == ["a", "inside"]
    finally:
        (tmp_path / "closed").chmod(0o700)
