"""A model hub on 127.0.0.1, as far as a download needs one, and a fake store of Ollama."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["add_ollama_model"]

COMMIT = "c" * 40
OLD_COMMIT = "0123456789" * 4
SMALL = 512  # bytes from which the hub keeps a file outside git


def etag_of(content: bytes) -> str:
    if len(content) >= SMALL:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass
class Request:
    method: str
    path: str
    range: str | None
    authorization: str | None


@dataclass
class FakeHub:
    """The state of the hub. ``repos`` maps a name to revisions to files."""

    repos: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    refuse: dict[str, int] = field(default_factory=dict)  # repository -> HTTP status
    cut_after: dict[str, list[int]] = field(default_factory=dict)  # file -> bytes per answer
    damaged: set[str] = field(default_factory=set)  # files sent with a flipped byte
    broken: dict[str, int] = field(default_factory=dict)  # file -> times to answer 503
    ignore_range: bool = False
    extra_names: list[str] = field(default_factory=list)
    html: bool = False
    busy: bool = False
    published: list[dict[str, Any]] = field(default_factory=list)  # what searches find
    searches: list[str] = field(default_factory=list)  # the words that were searched for
    endpoint: str = ""

    def add(self, repo: str, files: dict[str, bytes], *, revision: str = COMMIT) -> None:
        self.repos.setdefault(repo, {})[revision] = files

    def file_requests(self, name: str) -> list[Request]:
        return [r for r in self.requests if r.method == "GET" and r.path.endswith(f"/{name}")]

    def commit_of(self, revision: str) -> str:
        return {"main": COMMIT, "v1": OLD_COMMIT}.get(revision, revision)


def start(hub: FakeHub) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(
                Request(self.command, path, self.headers["Range"], self.headers["Authorization"])
            )
            if hub.html:
                self.answer(200, b"<html>please log in to the network</html>", "text/html")
            elif hub.busy:
                self.fail(503, "")
            elif path == "/api/models":
                self.search(parse_qs(urlsplit(self.path).query)["search"][0])
            elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                self.info(match[1], match[2] or "main")
            elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self.file(match[1], match[2], match[3])
            else:
                self.fail(404, "EntryNotFound")

        def search(self, words: str) -> None:
            hub.searches.append(words)
            wanted = words.split()
            found = [
                each for each in hub.published if all(word in each["id"].lower() for word in wanted)
            ]
            self.answer(200, json.dumps(found).encode(), "application/json")

        def info(self, repo: str, revision: str) -> None:
            if (files := self.lookup(repo, revision)) is None:
                return
            siblings: list[dict[str, Any]] = []
            for name, content in files.items():
                entry: dict[str, Any] = {
                    "rfilename": name,
                    "size": len(content),
                    "blobId": hashlib.sha1(content).hexdigest(),
                }
                if len(content) >= SMALL:
                    entry["lfs"] = {
                        "sha256": etag_of(content),
                        "size": len(content),
                        "pointerSize": 130,
                    }
                else:
                    entry["blobId"] = etag_of(content)
                siblings.append(entry)
            siblings += [{**siblings[0], "rfilename": name} for name in hub.extra_names]
            info = {"id": repo, "sha": hub.commit_of(revision), "siblings": siblings}
            self.answer(200, json.dumps(info).encode(), "application/json")

        def file(self, repo: str, revision: str, name: str) -> None:
            if (files := self.lookup(repo, revision)) is None:
                return
            if name not in files:
                self.fail(404, "EntryNotFound")
                return
            if hub.broken.get(name, 0) > 0:
                hub.broken[name] -= 1
                self.fail(503, "")
                return
            content = files[name]
            etag = etag_of(content)
            if name in hub.damaged:
                content = bytes([content[0] ^ 1]) + content[1:]
            first = 0
            if (asked := self.headers["Range"]) and not hub.ignore_range:
                first = int(asked.removeprefix("bytes=").removesuffix("-"))
            self.send_response(206 if first else 200)
            if first:
                end = len(content) - 1
                self.send_header("Content-Range", f"bytes {first}-{end}/{len(content)}")
            self.send_header("Content-Length", str(len(content) - first))
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", hub.commit_of(revision))
            if len(content) >= SMALL:
                self.send_header("X-Linked-Etag", f'"{etag}"')
                self.send_header("X-Linked-Size", str(len(content)))
            self.end_headers()
            if self.command == "HEAD":
                return
            cuts = hub.cut_after.get(name)
            if cuts:
                self.wfile.write(content[first : first + cuts.pop(0)])
                self.wfile.flush()
                self.close_connection = True
            else:
                self.wfile.write(content[first:])

        def lookup(self, repo: str, revision: str) -> dict[str, bytes] | None:
            if status := hub.refuse.get(repo):
                self.fail(status, "GatedRepo" if status == 403 else "")
            elif repo not in hub.repos:
                self.fail(404, "RepoNotFound")
            elif (files := hub.repos[repo].get(hub.commit_of(revision))) is None:
                self.fail(404, "RevisionNotFound")
            else:
                return files
            return None

        def fail(self, status: int, code: str) -> None:
            self.answer(status, b'{"error": "no"}', "application/json", code)

        def answer(self, status: int, body: bytes, kind: str, code: str = "") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if code:
                self.send_header("X-Error-Code", code)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Handler


_TYPE = "application/vnd.ollama.image."


def add_ollama_model(
    root: Path, name: str, weights: bytes | Path = b"GGUF", **layers: bytes | str | dict[str, Any]
) -> Path:
    """``name`` is ``HOST/NAMESPACE/MODEL/TAG``; returns the blob of the weights."""
    blobs = root / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)

    def blob(kind: str, content: bytes | Path) -> dict[str, Any]:
        data = content.name.encode() if isinstance(content, Path) else content
        digest = hashlib.sha256(data).hexdigest()
        path = blobs / f"sha256-{digest}"
        if isinstance(content, Path):
            os.link(content, path)
        else:
            path.write_bytes(content)
        size = path.stat().st_size
        return {"mediaType": _TYPE + kind, "digest": f"sha256:{digest}", "size": size}

    described = [blob("model", weights)]
    for kind, value in layers.items():
        text = json.dumps(value) if isinstance(value, dict) else value
        described.append(blob(kind, text.encode() if isinstance(text, str) else text))
    config = blob("config", json.dumps({"file_type": "Q4_K_M"}).encode())
    manifest = root / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": config, "layers": described}))
    return blobs / described[0]["digest"].replace(":", "-")
