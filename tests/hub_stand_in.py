"""A Hugging Face Hub on 127.0.0.1 with what huggingface_hub needs to push and load models."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import yaml

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz"
USER = "someone"
MODEL_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class StandIn:
    """A server that keeps each repository as a list of commits. A commit maps all its paths to bytes.

    Attributes:
        endpoint: the value for HF_ENDPOINT.
        unknown: the requests that the server does not know. No test should send one.
        authorised: the tokens of all requests.
    """

    def __init__(self):
        self.commits: dict[str, list[dict[str, bytes]]] = {}
        self.unknown: list[str] = []
        self.authorised: set[str] = set()
        hub = self

        class Handler(_Handler):
            stand_in = hub

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self):
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def files(self, repo: str) -> dict[str, bytes]:
        """The files of the newest commit."""
        return self.commits[repo][-1]

    def card(self, repo: str) -> str:
        return self.files(repo)["README.md"].decode()

    def put(self, repo: str, files: dict[str, bytes]) -> None:
        """Add a commit, as another user does."""
        self.commits.setdefault(repo, []).append(dict(files))

    def commit_id(self, repo: str) -> str:
        return hashlib.sha1(f"{repo}{len(self.commits[repo])}".encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    stand_in: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._answer()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815  (http.server's names)

    def _answer(self):
        hub, path = self.stand_in, unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if self.token:
            hub.authorised.add(self.token)
        for pattern, method in _ROUTES:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                named = match.groupdict()
                if method in _WRITING and self.token != TOKEN:
                    self._json({"error": "Invalid username or password."}, 401)
                elif method in _READING and named["repo"] not in hub.commits:
                    self._json({"error": "Repository not found"}, 404, **{"X-Error-Code": "RepoNotFound"})
                else:
                    method(self, **named)
                return
        hub.unknown.append(f"{self.command} {path}")
        self._json({"error": "not found"}, 404)

    def _json(self, content, status=200, **headers):
        self._bytes(json.dumps(content).encode(), status, **{"Content-Type": "application/json", **headers})

    def _bytes(self, content, status=200, **headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def create(self):
        asked = json.loads(self.body)
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        answer = {"url": f"{self.stand_in.endpoint}/{repo}", "name": repo}
        if repo in self.stand_in.commits:
            self._json({**answer, "error": "You already created this model repo"}, 409)
        else:
            self.stand_in.commits[repo] = [{}]
            self._json(answer)

    def validate_card(self):
        text = json.loads(self.body)["content"]
        metadata = yaml.safe_load(text.split("---")[1])
        base = metadata.get("base_model") or []
        wrong = [name for name in ([base] if isinstance(base, str) else base) if not MODEL_ID.fullmatch(name)]
        errors = [{"message": f'"base_model" {name!r} is not a valid model id'} for name in wrong]
        self._json({"errors": errors, "warnings": []}, 400 if errors else 200)

    def preupload(self, repo, revision):
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        files = [{"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths]
        self._json({"files": files})

    def commit(self, repo, revision):
        files = dict(self.stand_in.files(repo))
        for line in self.body.decode().splitlines():
            entry = json.loads(line)
            assert entry["key"] in ("file", "header"), entry
            if entry["key"] == "file":
                files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        self.stand_in.put(repo, files)
        oid = self.stand_in.commit_id(repo)
        self._json({"success": True, "commitOid": oid, "commitUrl": f"{self.stand_in.endpoint}/{repo}/commit/{oid}"})

    def info(self, repo, revision="main"):
        files = [{"rfilename": name} for name in sorted(self.stand_in.files(repo))]
        sha = self.stand_in.commit_id(repo)
        self._json({"id": repo, "modelId": repo, "sha": sha, "private": False, "tags": [], "siblings": files})

    def nothing(self):
        self._json({}, 404)

    def tree(self, repo, revision, folder=None):
        if folder is not None:
            self._json({"error": "Entry not found"}, 404, **{"X-Error-Code": "EntryNotFound"})
            return
        described = [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in self.stand_in.files(repo).items()
        ]
        self._json(described)

    def resolve(self, repo, revision, path):
        commit = {"X-Repo-Commit": self.stand_in.commit_id(repo)}
        content = self.stand_in.files(repo).get(path)
        if content is None:
            self._json({"error": "Entry not found"}, 404, **commit, **{"X-Error-Code": "EntryNotFound"})
            return
        self._bytes(content, **commit, ETag=f'"{hashlib.sha256(content).hexdigest()}"')


_WRITING = (_Handler.create, _Handler.preupload, _Handler.commit)  # for the user alone
_READING = (_Handler.info, _Handler.tree, _Handler.resolve)  # from a repository that exists
_REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
_ROUTES = [
    (r"POST /api/repos/create", _Handler.create),
    (r"GET /api/agent-harnesses", _Handler.nothing),  # statistics of huggingface_hub
    (r"POST /api/validate-yaml", _Handler.validate_card),
    (rf"POST /api/models/{_REPO}/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    (rf"POST /api/models/{_REPO}/commit/(?P<revision>[^/]+)", _Handler.commit),
    (rf"GET /api/models/{_REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", _Handler.tree),
    (rf"GET /api/models/{_REPO}/revision/(?P<revision>[^/]+)", _Handler.info),
    (rf"GET /api/models/{_REPO}", _Handler.info),
    (rf"(GET|HEAD) /{_REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
