"""A Hub on one machine: the HTTP interface used by huggingface_hub, over dictionaries, with faults on demand.

    with HubServer() as server:
        server.fail(r"POST .*/commit/", status=500, times=2)
        HfApi(endpoint=server.url, token=TOKEN).upload_folder(...)

Large files use Git LFS (basic, or multipart above `part_bytes`). Xet is not supported, so clients turn it off.
"""

import base64
import contextlib
import hashlib
import json
import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import yaml
from huggingface_hub import constants

TOKEN = "hf_ThisIsAnObviouslyFakeTokenOfTheTests"
USER = "tester"
REGULAR_BELOW_BYTES = 10_000

CLIENT_SETTINGS = ("ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_DISABLE_XET", "HUGGINGFACE_CO_URL_TEMPLATE")
"""Settings of this process's client, changed by `talk_to`."""


def talk_to(url: str) -> None:
    """Points this process's client, which reads its environment once, to a test server."""
    constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET = url, False, True
    constants.HUGGINGFACE_CO_URL_TEMPLATE = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A file as stored by the Hub."""

    content: bytes
    lfs: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def oid(self) -> str:
        """Returns the content's name for clients."""
        return self.sha256 if self.lfs else self.blob_id

    @property
    def blob_id(self) -> str:
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.content)}\n"
        content = pointer.encode() if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@dataclass(kw_only=True)
class Repo:
    """Branches name commits. A commit is a whole tree, by path."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Stored]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)

    def commit(self, branch: str, tree: dict[str, Stored], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {branch} {message}".encode()).hexdigest()
        self.commits[oid] = tree
        self.branches[branch] = oid
        self.messages.append(message)
        return oid


@dataclass(kw_only=True)
class Fault:
    """A changed or additional reaction to the next `times` requests whose "METHOD /path" matches."""

    pattern: re.Pattern
    times: int
    status: int | None = None
    message: str = "a fault of the test"
    reset: bool = False
    lose_answer: bool = False
    delay_s: float = 0.0


class Refused(Exception):
    """An answer with an error status."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class HubServer:
    """Runs inside its context. `requests` lists "METHOD /path" of each call, `put` the LFS objects received, in order."""

    def __init__(self, *, part_bytes: int = 10**9):
        self.part_bytes = part_bytes
        self.tokens = {TOKEN}
        self.repos: dict[str, Repo] = {}
        self.requests: list[str] = []
        self.put: list[str] = []
        self.parts: dict[tuple[str, str], bytes] = {}
        self.corrupted: list[tuple[re.Pattern, Callable[[bytes], bytes | None]]] = []
        self.lock = threading.RLock()
        self._faults: list[Fault] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(self))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "HubServer":
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fail(self, pattern: str, *, times: int = 1, **what: object) -> Fault:
        """Adds a fault; see `Fault`."""
        fault = Fault(pattern=re.compile(pattern), times=times, **what)
        with self.lock:
            self._faults.append(fault)
        return fault

    def corrupt(self, pattern: str, how: Callable[[bytes], bytes | None]) -> None:
        """Replaces the content of files whose path matches by the result of `how`; None loses the file."""
        self.corrupted.append((re.compile(pattern), how))

    def take_fault(self, line: str) -> Fault | None:
        with self.lock:
            for fault in self._faults:
                if fault.times > 0 and fault.pattern.search(line):
                    fault.times -= 1
                    return fault
        return None

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """Returns a branch's present files, without the .gitattributes of every repo."""
        repo = self.repos[repo_id]
        tree = repo.commits[repo.branches[revision]]
        return {path: stored.content for path, stored in tree.items() if path != ".gitattributes"}

    def count(self, pattern: str) -> int:
        """Counts the requests so far which match."""
        return sum(re.search(pattern, line) is not None for line in self.requests)


class _Calls:
    """The Hub's calls: each is given the match of its route and the request, and returns JSON."""

    def __init__(self, server: HubServer):
        self.server = server

    def repo(self, match: re.Match, request: "_Request", *, write: bool = False) -> Repo:
        repo = self.server.repos.get(match["repo"])
        if repo is None or (repo.private and not request.may):
            raise Refused(404 if request.may else 401, "Repository not found", "RepoNotFound")
        if write:
            request.must_be_allowed()
        return repo

    def tree(self, repo: Repo, match: re.Match) -> tuple[str, dict[str, Stored]]:
        revision = unquote(match["revision"] or "main")
        oid = repo.branches.get(revision, revision)
        if oid not in repo.commits:
            raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return oid, repo.commits[oid]

    def harnesses(self, match: re.Match, request: "_Request") -> dict:
        return {"standardEnvVars": [], "harnesses": {}}

    def whoami(self, match: re.Match, request: "_Request") -> dict:
        request.must_be_allowed()
        return {"type": "user", "name": USER, "orgs": [], "auth": {}}

    def create(self, match: re.Match, request: "_Request") -> dict:
        request.must_be_allowed()
        said = request.json()
        owner = said.get("organization") or USER
        if owner != USER:
            raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        repo_id = f"{owner}/{said['name']}"
        answer = {"url": f"{self.server.url}/{repo_id}", "name": repo_id}
        if repo_id in self.server.repos:
            raise Refused(409, json.dumps({**answer, "error": "You already created this model repo"}))
        is_private = said.get("visibility") == "private" or bool(said.get("private"))
        repo = self.server.repos[repo_id] = Repo(private=is_private)
        attributes = Stored(content=b"*.safetensors filter=lfs\n", lfs=False)
        repo.commit("main", {".gitattributes": attributes}, "initial commit")
        return answer

    def branch(self, match: re.Match, request: "_Request") -> dict:
        repo, name = self.repo(match, request, write=True), unquote(match["branch"])
        if name in repo.branches:
            raise Refused(409, f"Reference refs/heads/{name} already exists")
        repo.branches[name] = repo.branches["main"]
        return {}

    def validate_yaml(self, match: re.Match, request: "_Request") -> dict:
        front = re.match(r"^---\n(.*?)\n---\n", request.json()["content"], flags=re.DOTALL)
        try:
            metadata = yaml.safe_load(front[1]) if front else {}
        except yaml.YAMLError as error:
            raise Refused(400, json.dumps({"errors": [{"message": str(error)}], "warnings": []})) from error
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        return {"errors": [], "warnings": warnings}

    def preupload(self, match: re.Match, request: "_Request") -> dict:
        repo = self.repo(match, request, write=True)
        _, tree = self.tree(repo, match)
        files = []
        for file in request.json()["files"]:
            binary = b"\0" in base64.b64decode(file["sample"])
            lfs = file["path"].endswith(".safetensors") or binary or file["size"] >= REGULAR_BELOW_BYTES
            held, answer = tree.get(file["path"]), {"path": file["path"], "shouldIgnore": False}
            answer["uploadMode"] = "lfs" if lfs else "regular"
            files.append(answer | {"oid": None if held is None else held.oid})
        return {"files": files}

    def batch(self, match: re.Match, request: "_Request") -> dict:
        repo = self.repo(match, request, write=True)
        objects = []
        for wanted in request.json()["objects"]:
            oid, size = wanted["oid"], wanted["size"]
            answer = {"oid": oid, "size": size, "authenticated": True}
            place = f"{self.server.url}/lfs/{match['repo']}/{oid}"
            if oid not in repo.objects:
                upload: dict = {"href": place}
                if size > self.server.part_bytes:
                    parts = range(1, -(-size // self.server.part_bytes) + 1)
                    header = {str(n): f"{place}/part/{n}" for n in parts} | {"chunk_size": str(self.server.part_bytes)}
                    upload = {"href": f"{place}/complete", "header": header}
                answer["actions"] = {"upload": upload, "verify": {"href": f"{place}/verify"}}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def put_object(self, match: re.Match, request: "_Request") -> dict:
        self._keep(match, request.body)
        return {}

    def put_part(self, match: re.Match, request: "_Request") -> dict:
        self.server.parts[match["oid"], match["part"]] = request.body
        request.answer_headers["ETag"] = hashlib.md5(request.body).hexdigest()
        return {}

    def complete(self, match: re.Match, request: "_Request") -> dict:
        numbers = [str(part["partNumber"]) for part in request.json()["parts"]]
        self._keep(match, b"".join(self.server.parts[match["oid"], number] for number in numbers))
        return {}

    def _keep(self, match: re.Match, content: bytes) -> None:
        if hashlib.sha256(content).hexdigest() != match["oid"]:
            raise Refused(400, "the content has another sha256")
        with self.server.lock:
            self.server.repos[match["repo"]].objects[match["oid"]] = content
            self.server.put.append(match["oid"])

    def verify(self, match: re.Match, request: "_Request") -> dict:
        said = request.json()
        if len(self.repo(match, request, write=True).objects[said["oid"]]) != said["size"]:
            raise Refused(422, "the object has another size")
        return {}

    def commit(self, match: re.Match, request: "_Request") -> dict:
        repo = self.repo(match, request, write=True)
        with self.server.lock:
            branch = unquote(match["revision"])
            _, tree = self.tree(repo, match)
            tree, message = dict(tree), ""
            for line in request.body.splitlines():
                item = json.loads(line)
                value, kind = item["value"], item["key"]
                if kind == "header":
                    message = value["summary"]
                elif kind == "file":
                    tree[value["path"]] = Stored(content=base64.b64decode(value["content"]), lfs=False)
                elif kind == "lfsFile":
                    if value["oid"] not in repo.objects:
                        raise Refused(400, f"LFS object {value['oid']} of {value['path']} was never uploaded")
                    tree[value["path"]] = Stored(content=repo.objects[value["oid"]], lfs=True)
                elif kind == "deletedFile":
                    del tree[value["path"]]
            oid = repo.commit(branch, self._as_corrupted(tree), message)
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.server.url}/{match['repo']}/commit/{oid}"}

    def _as_corrupted(self, tree: dict[str, Stored]) -> dict[str, Stored]:
        for pattern, how in self.server.corrupted:
            for path in [path for path in tree if pattern.search(path)]:
                content = how(tree[path].content)
                if content is None:
                    del tree[path]
                else:
                    tree[path] = Stored(content=content, lfs=tree[path].lfs)
        return tree

    def info(self, match: re.Match, request: "_Request") -> dict:
        repo = self.repo(match, request)
        oid, tree = self.tree(repo, match)
        siblings = []
        for path, stored in sorted(tree.items()):
            sibling: dict = {"rfilename": path}
            if "blobs" in request.query:
                sibling |= {"size": len(stored.content), "blobId": stored.blob_id, **_lfs(stored, "sha256")}
            siblings.append(sibling)
        names = {"_id": "0", "id": match["repo"], "modelId": match["repo"], "sha": oid, "private": repo.private}
        nothing = {"gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        return names | nothing | {"siblings": siblings}

    def list_tree(self, match: re.Match, request: "_Request") -> list:
        _, tree = self.tree(self.repo(match, request), match)
        below = f"{unquote(match['path'])}/" if match["path"] else ""
        if below and not any(path.startswith(below) for path in tree):
            raise Refused(404, f"{below} does not exist", "EntryNotFound")
        return [_entry(path, stored) for path, stored in sorted(tree.items()) if path.startswith(below)]

    def paths_info(self, match: re.Match, request: "_Request") -> list:
        _, tree = self.tree(self.repo(match, request), match)
        wanted = parse_qs(request.body.decode())["paths"]
        return [_entry(path, tree[path]) for path in wanted if path in tree]

    def resolve(self, match: re.Match, request: "_Request") -> bytes:
        oid, tree = self.tree(self.repo(match, request), match)
        request.answer_headers["X-Repo-Commit"] = oid
        stored = tree.get(unquote(match["path"]))
        if stored is None:
            raise Refused(404, "Entry not found", "EntryNotFound")
        request.answer_headers["ETag"] = f'"{stored.oid}"'
        return stored.content


def _entry(path: str, stored: Stored) -> dict:
    size = len(stored.content)
    return {"type": "file", "path": path, "size": size, "oid": stored.blob_id, **_lfs(stored, "oid")}


def _lfs(stored: Stored, name: str) -> dict:
    """Describes a large file, with its hash under this name."""
    facts = {name: stored.sha256, "size": len(stored.content), "pointerSize": 134}
    return {"lfs": facts} if stored.lfs else {}


_REPO = r"(?P<repo>[^/]+/[^/]+?)"
_REVISION = r"(?P<revision>[^/]+)"
ROUTES = [
    ("GET", r"/api/agent-harnesses", "harnesses"),
    ("GET", r"/api/whoami-v2", "whoami"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", rf"/api/models/{_REPO}/branch/(?P<branch>[^/]+)", "branch"),
    ("POST", rf"/api/models/{_REPO}/preupload/{_REVISION}", "preupload"),
    ("POST", rf"/api/models/{_REPO}/commit/{_REVISION}", "commit"),
    ("POST", rf"/api/models/{_REPO}/paths-info/{_REVISION}", "paths_info"),
    ("GET", rf"/api/models/{_REPO}/tree/{_REVISION}(?:/(?P<path>.+))?", "list_tree"),
    ("GET", rf"/api/models/{_REPO}(?:/revision/{_REVISION})?", "info"),
    ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", rf"/lfs/{_REPO}/(?P<oid>[0-9a-f]{{64}})", "put_object"),
    ("PUT", rf"/lfs/{_REPO}/(?P<oid>[0-9a-f]{{64}})/part/(?P<part>\d+)", "put_part"),
    ("POST", rf"/lfs/{_REPO}/(?P<oid>[0-9a-f]{{64}})/complete", "complete"),
    ("POST", rf"/lfs/{_REPO}/(?P<oid>[0-9a-f]{{64}})/verify", "verify"),
    ("HEAD", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
    ("GET", rf"/{_REPO}/resolve/{_REVISION}/(?P<path>.+)", "resolve"),
]


@dataclass(kw_only=True)
class _Request:
    body: bytes
    query: dict[str, list[str]]
    token: str | None
    may: bool
    answer_headers: dict[str, str] = field(default_factory=dict)

    def json(self) -> dict:
        return json.loads(self.body)

    def must_be_allowed(self) -> None:
        if not self.may:
            # The Hub does not repeat the token. If a proxy does, our messages still must not contain it.
            raise Refused(401, f"Invalid credentials: {self.token}")


def _handler_of(server: HubServer) -> type[BaseHTTPRequestHandler]:
    calls = _Calls(server)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Suppresses the log, which pytest would show in a test's own output."""

        def handle(self) -> None:
            with contextlib.suppress(ConnectionError):
                super().handle()

        def answer(self) -> None:
            split = urlsplit(self.path)
            line = f"{self.command} {split.path}"
            with server.lock:
                server.requests.append(line)
            fault = server.take_fault(line) or Fault(pattern=re.compile(""), times=0)
            time.sleep(fault.delay_s)
            if fault.reset:
                self._reset()
                return
            body = self._read_body()
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            request = _Request(body=body, query=parse_qs(split.query), token=token, may=token in server.tokens)
            try:
                if fault.status is not None:
                    raise Refused(fault.status, fault.message)
                status, answer = 200, self._call(split.path, request)
            except Refused as error:
                status, answer = error.status, _error_body(error)
                request.answer_headers |= {"X-Error-Message": re.sub(r"\s+", " ", error.message)}
                if error.code is not None:
                    request.answer_headers["X-Error-Code"] = error.code
            if fault.lose_answer:
                self._reset()
                return
            self._send(status, answer, request.answer_headers)

        def _call(self, path: str, request: _Request) -> object:
            for method, pattern, name in ROUTES:
                match = re.fullmatch(pattern, path)
                if method == self.command and match:
                    groups = {"revision": None, "path": None, **match.groupdict()}
                    return getattr(calls, name)(groups, request)
            raise Refused(501, f"the Hub of the tests does not know {self.command} {path}")

        def _read_body(self) -> bytes:
            if self.headers.get("Transfer-Encoding") == "chunked":
                body = b""
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
                return body
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def _send(self, status: int, answer: object, headers: dict[str, str]) -> None:
            content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            kind = "application/octet-stream" if isinstance(answer, bytes) else "application/json"
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(content)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _reset(self) -> None:
            """Ends the connection with RST, like a failing router."""
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
            self.close_connection = True
            raise ConnectionResetError

        do_GET = do_HEAD = do_POST = do_PUT = answer

    return Handler


def _error_body(error: Refused) -> object:
    if error.message.startswith("{"):
        return json.loads(error.message)
    return {"error": error.message}
