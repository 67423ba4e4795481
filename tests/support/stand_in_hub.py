"""A stand-in for the Hugging Face hub: the few endpoints that huggingface_hub calls to resolve, list and download.

Not the hub: no accounts, no large-file storage, no redirects. Answers to what is missing or closed are those that the hub gave
when they were looked at, status and `X-Error-Code`.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = 40  # hex digits of a commit's hash
_API = re.compile(r"/api/(model|dataset)s/([^/]+/[^/]+)(?:/(revision|tree)/([^?]+))?")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


def commit_of(files: Mapping[str, bytes]) -> str:
    """A hash that differs where files do."""
    digest = hashlib.sha1()
    for name, content in sorted(files.items()):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()


@dataclass
class StandInHub:
    """Repositories by kind and name; each has commits, and branches that point at them. asked: (method, path) so far."""

    url: str = ""
    commits: dict[tuple[str, str], dict[str, dict[str, bytes]]] = field(default_factory=dict)
    branches: dict[tuple[str, str], dict[str, str]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    asked: list[tuple[str, str]] = field(default_factory=list)

    def put(self, kind: str, name: str, files: Mapping[str, bytes], branch: str = "main") -> str:
        """Commit files to a branch; returns the hash."""
        commit = commit_of(files)
        self.commits.setdefault((kind, name), {})[commit] = dict(files)
        self.branches.setdefault((kind, name), {})[branch] = commit
        return commit

    def put_folder(self, kind: str, name: str, folder: Path, **more: bytes) -> str:
        """Commit a folder's files."""
        files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.put(kind, name, {**files, **more})

    def downloads(self) -> list[str]:
        """Names of the files that were sent."""
        return sorted(path.rpartition("/")[2] for method, path in self.asked if method == "GET" and "/resolve/" in path)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        api, file = _API.fullmatch(path), _FILE.fullmatch(path)
        if api:
            kind, name, asked, revision = api.groups()
        elif file:
            kind, name, asked, revision = ("dataset" if file[1] else "model"), file[2], "file", file[3]
        if not (api or file) or (kind, name) not in self.commits:
            return 401, {"X-Error-Message": "Invalid username or password."}, b""
        if name in self.gated and asked == "file":
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        revision = unquote(revision or "main")
        commit = self.branches[kind, name].get(revision, revision)
        files = self.commits[kind, name].get(commit)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if file:
            content = files[unquote(file[4])]
            return 200, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": commit}, content
        listed = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in files.items()
        ]
        said: Any = listed
        if asked != "tree":
            said = {"id": name, "sha": commit, "siblings": [{"rfilename": each["path"]} for each in listed]}
        return 200, {"Content-Type": "application/json"}, json.dumps(said).encode()


@contextmanager
def serve_stand_in_hub() -> Iterator[StandInHub]:
    """The hub on a port of the loopback, empty."""
    hub = StandInHub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            path = urlsplit(self.path).path
            hub.asked.append((self.command, path))
            status, headers, body = hub.answer(path)
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_GET = do_HEAD = _answer

        def log_message(self, format: str, *arguments: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def environment(url: str, home: Path, *, offline: bool = False) -> dict[str, str]:
    """What a process that shall ask the stand-in finds in its environment. home: of its cache."""
    return {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_OFFLINE": str(int(offline))}


def ask_stand_in(patch: pytest.MonkeyPatch, url: str, home: Path, *, offline: bool = False) -> None:
    """The same for huggingface_hub in this process, which has read its environment already."""
    from huggingface_hub import constants

    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
    patch.setattr(constants, "HF_HUB_OFFLINE", offline)
