"""Downloads and searches at a hub that speaks HTTP on this machine: whole, interrupted, damaged,
refused.
"""

from __future__ import annotations

import gzip
import itertools
import shutil
import socket
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import close_session

from localrt.common.errors import (
    CancelledError,
    GatedModelError,
    HubError,
    LocalrtError,
    ModelNotFoundError,
    OfflineError,
    StorageError,
    UnsupportedModelError,
)
from localrt.common.progress import Progress
from localrt.common.settings import Settings
from localrt.hub import resolve, resolve_adapter
from localrt.hub.cache import CachedRepo
from localrt.hub.download import RemoteFile, RemoteRepo, download, list_repo
from localrt.hub.files import ADAPTER_FILES
from localrt.hub.names import find_known
from localrt.hub.searching import FoundModel, list_variants, search_models
from tests.fake_endpoint import MOST, Asked, answer_head, endless, fake
from tests.hub.conftest import NEWER, QUANTS, TINY, WEIGHTS
from tests.hub.server import COMMIT, OLD_COMMIT, FakeHub, etag_of

SHARD = "model-00001-of-00002.safetensors"
NEEDED = {
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
}
DEEP = {"a/x-Q8_0.gguf": b"a" * 1000, "b/x-Q8_0.gguf": b"b" * 1000}


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.hub.download._FIRST_WAIT_S", 0.001)


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def one_line_error(error: LocalrtError) -> str:
    text = str(error)
    assert "\n" not in text
    assert "Traceback" not in text
    return text


def test_brings_what_a_model_needs_and_nothing_else(settings: Settings) -> None:
    """Progress grows to the total over all files; other tools find them."""
    from huggingface_hub import scan_cache_dir, snapshot_download, try_to_load_from_cache

    steps: list[Progress] = []
    found = resolve("org/tiny", settings=settings, progress=steps.append)
    assert found.name == "org/tiny"
    assert found.source == "hub"
    assert found.revision == COMMIT
    assert files_below(found.path) == NEEDED
    assert all((found.path / name).read_bytes() == TINY[name] for name in NEEDED)

    # The index comes first, as it says what is to come.
    total = sum(len(TINY[name]) for name in NEEDED if not name.endswith(".index.json"))
    stages = list(dict.fromkeys(step.stage for step in steps))
    assert stages == ["download", "verify"]
    for stage in stages:
        done = [step.done for step in steps if step.stage == stage]
        assert done == sorted(set(done))
        assert done[-1] == total
    assert {(step.total, step.unit) for step in steps} == {(total, "bytes")}
    assert {step.detail for step in steps} <= NEEDED

    there = snapshot_download("org/tiny", cache_dir=settings.hub_cache, local_files_only=True)
    assert Path(there) == found.path
    file = try_to_load_from_cache("org/tiny", "config.json", cache_dir=settings.hub_cache)
    assert file == str(found.path / "config.json")
    scanned = scan_cache_dir(settings.hub_cache)
    assert not scanned.warnings
    assert scanned.size_on_disk == sum(len(TINY[name]) for name in NEEDED)


def test_a_newer_commit_is_fetched_only_on_request(hub: FakeHub, settings: Settings) -> None:
    hub.add("org/tiny", TINY, revision=COMMIT)
    old = resolve("org/tiny", settings=settings)
    newer = "d" * 40
    hub.add("org/tiny", {**TINY, SHARD: NEWER}, revision=newer)
    hub.commit_of = lambda revision: newer if revision == "main" else revision  # type: ignore[method-assign]

    assert not [each.path for each in hub.requests if "agent" in each.path], "nothing else"
    hub.requests.clear()
    assert resolve("org/tiny", settings=settings) == old
    new = resolve("org/tiny", settings=settings, refresh=True)

    assert new.revision == newer
    assert (new.path / SHARD).read_bytes() == NEWER
    assert len(hub.requests) == 2  # the list, and the one file that changed
    assert resolve("org/tiny", settings=settings) == new


def test_continues_after_the_connection_broke(hub: FakeHub, settings: Settings) -> None:
    """Whatever a busy hub says in between."""
    hub.cut_after[SHARD] = [400_000, 300_000]
    hub.broken["config.json"] = 2

    found = resolve("org/tiny", settings=settings)

    assert (found.path / SHARD).read_bytes() == WEIGHTS
    ranges = [request.range for request in hub.file_requests(SHARD)]
    assert ranges[0] is None
    assert len(ranges) == 3
    assert all(asked is not None and asked.startswith("bytes=") for asked in ranges[1:])


def test_a_later_run_continues(hub: FakeHub, settings: Settings) -> None:
    hub.cut_after[SHARD] = [400_000] + [0] * 5
    with pytest.raises(OfflineError) as caught:
        resolve("org/tiny", settings=settings)
    assert "kept" in one_line_error(caught.value)
    assert not list(settings.hub_cache.glob("*/snapshots/*/model-*"))
    hub.requests.clear()

    found = resolve("org/tiny", settings=settings)

    assert (found.path / SHARD).read_bytes() == WEIGHTS
    (request,) = hub.file_requests(SHARD)
    assert request.range is not None
    assert 0 < int(request.range.removeprefix("bytes=").removesuffix("-")) <= 400_000


PARTS = {
    "of a server that ignores ranges": WEIGHTS[:400_000],
    "longer than the file": WEIGHTS + b"more",
    "damaged by a power cut in the middle": bytes(len(WEIGHTS) // 2),
}


@pytest.mark.parametrize("kind", PARTS)
def test_a_part_that_is_begun_anew(kind: str, hub: FakeHub, settings: Settings) -> None:
    hub.ignore_range = "ranges" in kind
    part = CachedRepo(settings.hub_cache, "org/tiny").partial(etag_of(WEIGHTS))
    part.parent.mkdir(parents=True)
    part.write_bytes(PARTS[kind])
    steps: list[Progress] = []
    found = resolve("org/tiny", settings=settings, progress=steps.append)
    assert (found.path / SHARD).read_bytes() == WEIGHTS
    assert steps[-1].done == steps[-1].total


@pytest.mark.parametrize("name", [SHARD, "config.json"])
def test_a_damaged_file_is_refused_removed_and_fetched_again(
    name: str, hub: FakeHub, settings: Settings
) -> None:
    hub.damaged.add(name)
    with pytest.raises(HubError, match="checksum") as caught:
        resolve("org/tiny", settings=settings)
    assert name in one_line_error(caught.value)
    with pytest.raises(ModelNotFoundError):
        resolve("org/tiny", settings=settings, download=False)

    hub.damaged.clear()
    assert (resolve("org/tiny", settings=settings).path / name).read_bytes() == TINY[name]


def test_the_token_is_sent_and_never_shown(hub: FakeHub, settings: Settings) -> None:
    list_repo("org/tiny", None, settings)
    assert hub.requests.pop().authorization is None
    settings = replace(settings, hub_token="hf_secret")
    resolve("org/tiny", settings=settings)
    assert {request.authorization for request in hub.requests} == {"Bearer hf_secret"}
    assert "hf_secret" not in repr(settings)


def test_a_revision_pins_the_files(settings: Settings) -> None:
    found = resolve("org/tiny", settings=settings, revision="v1")
    assert found.revision == OLD_COMMIT
    assert (found.path / "config.json").read_bytes() == b'{"old": true}'
    assert resolve("org/tiny@v1", settings=settings, download=False).path == found.path
    by_commit = resolve(f"org/tiny@{OLD_COMMIT[:8]}", settings=settings, download=False)
    assert by_commit.path == found.path
    with pytest.raises(ModelNotFoundError):
        resolve("org/tiny", settings=settings, download=False)


@pytest.mark.parametrize("wanted", ["q8_0", "TINY-q8_0.GGUF"])
def test_a_quantization_is_picked(wanted: str, hub: FakeHub, settings: Settings) -> None:
    found = resolve(f"org/quants:{wanted}", settings=settings)
    assert found.name == "org/quants:Q8_0"
    assert found.path.name == "tiny-Q8_0.gguf"
    assert found.path.read_bytes() == QUANTS["tiny-Q8_0.gguf"]
    assert sum("resolve" in request.path for request in hub.requests) == 1


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (("a/x-Q8_0.gguf", "b/x-Q8_0.gguf"), "b/x-Q8_0.gguf"),
        (("a/x-Q4_K_M.gguf", "b/x-Q4_K_M.gguf", "x-Q8_0.gguf"), "a/x-Q4_K_M.gguf"),
        (("Q4_K_M/model.gguf", "BF16/model.gguf"), "BF16"),
    ],
)
def test_pulled_again(
    files: tuple[str, ...], wanted: str, hub: FakeHub, settings: Settings
) -> None:
    """Files of one label, and labels that are folders: a second pull finds what the first chose."""
    hub.add("org/x", {name: name.encode() * 100 for name in files})
    first = resolve(f"org/x:{wanted}", settings=settings)
    for again in ("org/x", first.name):
        found = resolve(again, settings=settings, refresh=True)
        assert (found.path, found.name) == (first.path, first.name)
    assert resolve(first.name, settings=settings, download=False).path == first.path


def test_offline_asks_nobody(hub: FakeHub, settings: Settings) -> None:
    found = resolve("org/tiny", settings=settings)
    hub.requests.clear()
    assert resolve("org/tiny", settings=settings, offline=True, refresh=True) == found
    with pytest.raises(OfflineError, match="localrt pull org/quants") as caught:
        resolve("org/quants", settings=settings, offline=True)
    one_line_error(caught.value)
    with pytest.raises(ModelNotFoundError, match="localrt pull org/quants"):
        resolve("org/quants", settings=settings, download=False)
    with pytest.raises(OfflineError, match="org/lora"):
        resolve_adapter("org/lora", settings=settings, offline=True)
    for ask in (search_models, list_variants):
        with pytest.raises(OfflineError):
            ask("org/chat", settings=replace(settings, offline=True))
    assert hub.requests == []


def test_an_adapter_is_downloaded_once(hub: FakeHub, settings: Settings) -> None:
    hub.add("org/lora", ADAPTER)
    folder = resolve_adapter("org/lora", settings=settings)
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert found == {name: ADAPTER[name] for name in ADAPTER_FILES}
    asked = len(hub.requests)
    assert resolve_adapter("org/lora", settings=settings) == folder
    assert resolve_adapter("org/lora", settings=settings, offline=True) == folder
    assert len(hub.requests) == asked
    with pytest.raises(ModelNotFoundError, match=r"org/tiny is no adapter: it has no adapter_conf"):
        resolve_adapter("org/tiny", settings=settings)
    with pytest.raises(UnsupportedModelError, match="org/lora is an adapter: open the model"):
        resolve("org/lora", settings=settings)


@pytest.mark.parametrize(
    ("model", "options", "error", "words"),
    [
        ("org/nothing", {}, ModelNotFoundError, ["no model org/nothing"]),
        ("org/tiny", {"revision": "v9"}, ModelNotFoundError, ["no revision 'v9'"]),
        ("org/pickles", {}, ModelNotFoundError, ["safetensors"]),
        ("org/quants:Q2_K", {}, ModelNotFoundError, ["(there: Q4_K_M, Q8_0, F16)"]),
        ("org/few", {}, ModelNotFoundError, ["org/few:LABEL (there: Q5_0, Q6_K)"]),
        ("org/deep:Q8_0", {}, ModelNotFoundError, ["several Q8_0"]),
        ("org/closed", {}, GatedModelError, ["/org/closed", "HF_TOKEN", "hf auth login"]),
        ("org/broken", {}, HubError, ["HTTP 503"]),
        ("org/quants:Q5_0", {}, ModelNotFoundError, ["a file of org/quants is missing on the hub"]),
        ("org/portal", {}, HubError, ["does not answer like a model hub"]),
    ],
)
def test_what_is_refused_is_one_line(
    model: str,
    options: dict[str, Any],
    error: type[LocalrtError],
    words: list[str],
    hub: FakeHub,
    settings: Settings,
) -> None:
    hub.add("org/few", {"a.Q5_0.gguf": b"a", "a.Q6_K.gguf": b"b"})
    hub.add("org/deep", DEEP)
    hub.add("org/broken", {"broken.gguf": b"a"})
    hub.refuse |= {"org/closed": 403}
    hub.broken["broken.gguf"] = 100
    hub.extra_names = ["lost-Q5_0.gguf"] if "Q5_0" in model else []
    hub.html = model == "org/portal"  # a login page
    with pytest.raises(error) as caught:
        resolve(model, settings=settings, **options)
    text = one_line_error(caught.value)
    assert [each for each in words if each not in text] == []


@pytest.mark.parametrize("name", ["../../evil.json", "/etc/evil.json"])
def test_a_name_that_leaves_the_folder(name: str, hub: FakeHub, settings: Settings) -> None:
    hub.extra_names = [name]
    with pytest.raises(HubError, match="nothing was downloaded"):
        resolve("org/tiny", settings=settings)
    assert not settings.hub_cache.exists()


def test_too_little_space_is_said_before_the_download(
    hub: FakeHub, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 1000))
    with pytest.raises(StorageError, match="not enough space") as caught:
        resolve("org/tiny", settings=settings)
    assert "1.4 MB" in one_line_error(caught.value)
    assert not hub.file_requests(SHARD)


def test_a_cache_that_cannot_be_written(tmp_path: Path, settings: Settings) -> None:
    (tmp_path / "file").write_text("not a folder")
    settings = replace(settings, hub_cache=tmp_path / "file" / "hub")
    with pytest.raises(StorageError, match="cannot write to") as caught:
        resolve("org/tiny", settings=settings)
    assert "HF_HOME" in one_line_error(caught.value)


def test_cancel_stops_and_keeps_what_arrived(hub: FakeHub, settings: Settings) -> None:
    cancel = threading.Event()

    def stop_at_the_weights(step: Progress) -> None:
        if step.done > 100_000:
            cancel.set()

    with pytest.raises(CancelledError) as caught:
        resolve("org/tiny", settings=settings, progress=stop_at_the_weights, cancel=cancel)
    one_line_error(caught.value)
    with pytest.raises(ModelNotFoundError):
        resolve("org/tiny", settings=settings, download=False)

    found = resolve("org/tiny", settings=settings, cancel=threading.Event())
    assert (found.path / SHARD).read_bytes() == WEIGHTS


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("ALL_PROXY=socks5://127.0.0.1:1", "a proxy of a kind that cannot be used"),
        ("HTTP_PROXY=127.0.0.1:1", "cannot reach"),
        ("SSL_CERT_FILE=missing.pem", "is no file of certificates"),
    ],
)
def test_environment(
    line: str, says: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies and certificates that cannot be used are one line each, whatever is asked."""
    remote = list_repo("org/tiny", None, settings)
    close_session()
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(*line.split("=", 1))
    for ask in (
        lambda: search_models("tiny", settings=settings),
        lambda: list_repo("org/tiny", None, settings),
        lambda: download(remote, ["config.json"], revision=None, settings=settings),
    ):
        with pytest.raises(HubError) as caught:
            ask()
        assert says in one_line_error(caught.value)


# -- a hub that sends too much ---------------------------------------------------------------------

JSON = "application/json"
BIG = b'{"siblings": "' + b"x" * 9999
PACKED = gzip.compress(b"[" + b" " * MOST + b"]")
THERE = b"HTTP/1.1 302 There\r\nLocation: %s\r\n\r\n"
# how it answers: what is said of a list, of a file
HOSTILE: dict[str, tuple[Callable[[Asked, socket.socket], bytes | None], str, str]] = {
    "body": (endless(BIG, answer_head(JSON)), "sends too much", "sends too much of it"),
    "values": (
        lambda *_: answer_head(JSON) + b"[" + b"[]," * 250_000 + b"0]",
        "does not answer like a model hub",
        "sends too much of it",
    ),
    "gzip": (
        lambda *_: answer_head(JSON, Content_Encoding="gzip") + PACKED,
        *["sends compressed answers"] * 2,
    ),
    "refusal": (endless(BIG, answer_head(JSON, 400)), *["HTTP 400"] * 2),
    "no such file": (
        endless(BIG, answer_head(JSON, 404, X_Error_Code="EntryNotFound")),
        *["is missing on the hub"] * 2,
    ),
    "redirect": (endless(BIG, THERE % b"/there"), *["redirects without end"] * 2),
    "head": (endless(b"A: b\r\n", b"HTTP/1.1 200 OK\r\n"), *["cannot reach"] * 2),
}


@pytest.mark.parametrize("way", HOSTILE)
def test_hostile_hubs(way: str, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localrt.hub.download._MOST_METADATA", MOST)
    answer, of_list, of_file = HOSTILE[way]
    remote = RemoteRepo("org/x", COMMIT, {"a.gguf": RemoteFile("a.gguf", 100, "a" * 64)})
    with fake(answer) as server:
        there = replace(settings, hub_endpoint=server.url)
        for ask, says in (
            (lambda: search_models("x", settings=there), of_list),
            (lambda: list_repo("org/x", None, there), of_list),
            (lambda: list_variants("org/x", settings=there), of_list),
            (lambda: download(remote, ["a.gguf"], revision=None, settings=there), of_file),
        ):
            with pytest.raises(HubError) as caught:
                ask()
            assert says in one_line_error(caught.value)
    kept = [path for path in there.hub_cache.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in kept) < 1000


def test_a_hub_that_drips(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something comes all the time, but never all."""
    clock = SimpleNamespace(monotonic=itertools.count(0, 4).__next__)  # four seconds a look
    monkeypatch.setattr("localrt.hub.download.time", clock)

    def answer(asked: Asked, connection: socket.socket) -> None:
        connection.sendall(answer_head(JSON))
        while not server.over.wait(0.01):
            connection.sendall(b" ")

    with fake(answer) as server:
        there = replace(settings, hub_endpoint=server.url)
        with pytest.raises(HubError, match="too slowly"):
            list_repo("org/x", None, there)
        with pytest.raises(HubError, match="too slowly"):
            search_models("x", settings=there)


ADAPTER = {
    "README.md": b"# lora",
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": b"low ranks" * 1000,
    "optimizer.pt": b"pickle" * 1000,
}


MODELS: list[dict[str, Any]] = [
    {
        **{"id": "org/chat-GGUF", "downloads": 900, "likes": 7, "tags": ["gguf", "en"]},
        **{"gated": False, "lastModified": "2026-02-17T10:00:00.000Z"},
    },
    {"id": "org/chat-pictures", "downloads": 800, "tags": ["diffusers"], "gated": False},
    {"id": "org/chat", "downloads": 9, "tags": ["safetensors"], "gated": "manual", "likes": 0},
]


def test_models_by_words(hub: FakeHub, settings: Settings) -> None:
    hub.published = MODELS
    found = search_models("chat ", settings=settings)
    assert [model.name for model in found] == ["org/chat-GGUF", "org/chat"]
    assert found[0] == FoundModel("org/chat-GGUF", 900, 7, ("gguf",), False, "2026-02-17")
    assert found[1].gated
    search_models(" qwen3:30b", settings=settings)
    known = find_known("qwen3:30b")
    assert known is not None
    assert hub.searches == ["chat", known.repo]


def test_a_hub_that_is_busy_is_one_line(hub: FakeHub, settings: Settings) -> None:
    hub.busy = True
    with pytest.raises(HubError) as raised:
        search_models("chat", settings=settings)
    assert "\n" not in str(raised.value)


def test_variants_with_sizes(hub: FakeHub, settings: Settings) -> None:
    found = [(each.label, each.name) for each in list_variants("org/quants", settings=settings)]
    assert found == [(label, f"org/quants:{label}") for label in ("Q8_0", "Q4_K_M", "F16")]
    (whole,) = list_variants("org/tiny", settings=settings)
    assert whole.name == "org/tiny"
    assert whole.label == "safetensors"
