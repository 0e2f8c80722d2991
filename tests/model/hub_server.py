"""The few routes of the Hugging Face Hub that huggingface_hub calls to download, list and commit, on the loopback.

Repositories are folders under `root`; a commit writes into them. Everything above the HTTP boundary is the real client.
"""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34


class HubServer:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.requests: list[str] = []  # "METHOD path", in order
        self.ranges: list[str] = []  # of the downloads that asked for a part
        self.tokens: set[str | None] = set()
        self.cut_after: dict[str, int] = {}  # file name -> bytes after which the next download of it breaks off
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_HEAD(self) -> None:
                server.answer(self, "HEAD")

            def do_GET(self) -> None:
                server.answer(self, "GET")

            def do_POST(self) -> None:
                server.answer(self, "POST")

            def log_message(self, *arguments: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, request: BaseHTTPRequestHandler, method: str) -> None:
        path = unquote(urlsplit(request.path).path)
        self.requests.append(f"{method} {path}")
        self.tokens.add(request.headers.get("authorization"))
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        if match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path):
            self._file(request, method, self.root / match[1] / match[2])
        elif path == "/api/repos/create":
            values = json.loads(body)
            repo = f"{values.get('organization') or 'me'}/{values['name']}"
            (self.root / repo).mkdir(parents=True, exist_ok=True)
            self._json(request, {"url": f"{self.url}/{repo}", "name": repo, "id": repo})
        elif path == "/api/whoami-v2":
            self._json(request, {"name": "me", "type": "user", "orgs": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/preupload/[^/]+", path):
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for f in json.loads(body)["files"]
            ]
            self._json(request, {"files": files})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/[^/]+", path):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    target = self.root / match[1] / entry["value"]["path"]
                    target.write_bytes(base64.b64decode(entry["value"]["content"]))
            self._json(request, {"commitUrl": f"{self.url}/{match[1]}/commit/{COMMIT}", "commitOid": COMMIT})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/paths-info/[^/]+", path):
            wanted = re.findall(r"paths=([^&]+)", body.decode()) or json.loads(body)["paths"]
            self._json(request, [self._entry(self.root / match[1], unquote(name)) for name in wanted])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/tree/[^/]+/?", path):
            names = sorted(p.name for p in (self.root / match[1]).iterdir())
            self._json(request, [self._entry(self.root / match[1], name) for name in names])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/[^/]+)?", path):
            if not (self.root / match[1]).is_dir():
                self._json(request, {"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
                return
            siblings = [{"rfilename": p.name} for p in sorted((self.root / match[1]).iterdir())]
            self._json(request, {"id": match[1], "sha": COMMIT, "siblings": siblings})
        else:
            self._json(request, {"error": f"no route {path}"}, 404)

    def _entry(self, repo: Path, name: str) -> dict:
        raw = (repo / name).read_bytes()
        entry: dict = {"type": "file", "path": name, "size": len(raw), "oid": hashlib.sha1(raw).hexdigest()}
        if name.endswith(".safetensors"):
            entry["lfs"] = {"oid": hashlib.sha256(raw).hexdigest(), "size": len(raw), "pointerSize": 130}
        return entry

    def _file(self, request: BaseHTTPRequestHandler, method: str, path: Path) -> None:
        if not path.is_file():
            self._json(
                request, {"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
            )
            return
        raw = path.read_bytes()
        size, status, first = len(raw), 200, 0
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range") or ""):
            status, first = 206, int(match[1])
            self.ranges.append(match[0])
        digest = hashlib.sha256(raw) if path.suffix == ".safetensors" else hashlib.sha1(raw)
        request.send_response(status)
        request.send_header("ETag", f'"{digest.hexdigest()}"')
        request.send_header("X-Repo-Commit", COMMIT)
        request.send_header("Content-Length", str(size - first))
        request.send_header("Accept-Ranges", "bytes")
        if status == 206:
            request.send_header("Content-Range", f"bytes {first}-{size - 1}/{size}")
        request.end_headers()
        if method == "GET":
            if path.name in self.cut_after:
                request.wfile.write(raw[first : first + self.cut_after.pop(path.name)])
                request.wfile.flush()
                request.connection.close()
                request.close_connection = True
            else:
                request.wfile.write(raw[first:])

    def _json(
        self, request: BaseHTTPRequestHandler, value: object, status: int = 200, headers: dict | None = None
    ) -> None:
        raw = json.dumps(value).encode()
        request.send_response(status)
        for key, text in {
            "Content-Type": "application/json",
            "Content-Length": str(len(raw)),
            **(headers or {}),
        }.items():
            request.send_header(key, text)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(raw)
