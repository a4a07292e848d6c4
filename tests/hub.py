"""A Hub for tests: its cache as it lies on a disk, and a server of as much of its protocol as we use."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"


def cached(cache: Path, name: str, folder: Path, sha: str = SHA, revision: str = "main") -> Path:
    """Put a folder into a cache of the Hub, as huggingface_hub would have downloaded it."""
    home = cache / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / sha
    shutil.copytree(folder, snapshot)
    (home / "refs").mkdir(parents=True, exist_ok=True)
    (home / "refs" / revision).write_text(sha)
    return snapshot


class Hub:
    """Repositories in memory, each a dict of files, behind a real HTTP server on this machine."""

    def __init__(self):
        self.repos: dict[str, dict[str, bytes]] = {}
        self.made: dict[str, dict[str, Any]] = {}  # what was asked of each when it was made
        self.gated: set[str] = set()
        self.asked: list[str] = []  # files that were downloaded
        self.tokens: set[str | None] = set()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def add(self, name: str, folder: Path) -> None:
        files = (path for path in folder.rglob("*") if path.is_file())
        self.repos[name] = {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    def sha(self, name: str) -> str:
        return hashlib.sha1(repr(sorted(self.repos[name].items())).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_):
        pass

    def answer(self, value=None, code=200, body=b"", **headers):
        body = body if value is None else json.dumps(value).encode()
        self.send_response(code)
        for name, text in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, code, error):
        self.answer({"error": error}, code, X_Error_Code=error)

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        hub, path = self.hub, unquote(urlsplit(self.path).path).strip("/")
        self.hub.tokens.add(self.headers.get("Authorization"))
        name = "/".join(path.removeprefix("api/models/").split("/")[:2])
        if name in hub.gated:
            return self.refuse(403, "GatedRepo")
        if name not in hub.repos:
            return self.refuse(401, "RepoNotFound")
        files, sha, rest = hub.repos[name], hub.sha(name), path.split(name, 1)[1].strip("/")
        if path.startswith("api/models/"):
            revision = rest.split("/")[1] if "/" in rest else "main"
            if revision not in ("main", sha):
                return self.refuse(404, "RevisionNotFound")
            if rest.startswith("tree/"):
                blobs = {k: hashlib.sha1(v).hexdigest() for k, v in files.items()}
                return self.answer(
                    [{"type": "file", "path": k, "size": len(v), "oid": blobs[k]} for k, v in files.items()]
                )
            return self.answer({"id": name, "sha": sha, "private": False, "tags": [], "siblings": []})
        _, _, file = rest.split("/", 2)  # resolve/REVISION/FILE
        if file not in files:
            return self.refuse(404, "EntryNotFound")
        if self.command == "GET":
            hub.asked.append(file)
        etag = f'"{hashlib.sha1(files[file]).hexdigest()}"'
        return self.answer(body=files[file], ETag=etag, X_Repo_Commit=sha)

    def do_POST(self):
        hub, path = self.hub, unquote(urlsplit(self.path).path).strip("/")
        sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        hub.tokens.add(self.headers.get("Authorization"))
        if path == "api/repos/create":
            asked = json.loads(sent)
            name = f"{asked['organization']}/{asked['name']}"
            if name in hub.repos:
                return self.answer({"url": f"{hub.address}/{name}"}, 409)
            hub.repos[name], hub.made[name] = {}, asked
            return self.answer({"url": f"{hub.address}/{name}"})
        if path == "api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        name = "/".join(path.removeprefix("api/models/").split("/")[:2])
        if path.endswith("preupload/main"):
            modes = [{"path": f["path"], "uploadMode": "regular"} for f in json.loads(sent)["files"]]
            return self.answer({"files": [{**mode, "shouldIgnore": False} for mode in modes]})
        assert path.endswith("commit/main"), path
        for line in map(json.loads, sent.splitlines()):
            if line["key"] == "file":
                hub.repos[name][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            elif line["key"] == "deletedFile":
                del hub.repos[name][line["value"]["path"]]
        url = f"{hub.address}/{name}/commit/{hub.sha(name)}"
        return self.answer({"success": True, "commitOid": hub.sha(name), "commitUrl": url})
