"""A small Hub on loopback, for the real ``huggingface_hub`` client and real ``from_pretrained``.

    with HubServer(users={"hf_secret": "ada"}) as hub:
        hub.add_repo("org/tiny", {"config.json": b"{}"})
        subprocess.run([...], env=hub.env(token="hf_secret"))
        assert "README.md" in hub.files("ada/pushed")

Repositories live in memory: a commit is a snapshot ``{path: Blob}``, made under one lock, so it is whole or
absent. As on the Hub, large and binary files go through LFS: they are uploaded to and downloaded from signed
URLs on another origin (``localhost`` instead of ``127.0.0.1``) which refuses requests that carry a token.
Dataset repositories are named ``datasets/org/name``. Clients need ``HF_HUB_DISABLE_XET=1``: ``hub.env()`` has
it for subprocesses, ``conftest.py`` for the tests' own process. See also ``hub.faults``, ``hub.requests``.
"""

import base64
import hashlib
import json
import os
import re
import secrets
import tempfile
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from hub_cards import card_tags, check_card, read_card
from hub_store import GIT_ATTRIBUTES, Blob, Commit, Repo, apply_operation, git_oid, is_lfs
from hub_wire import (
    UNKNOWN_TOKEN,
    Answer,
    Connection,
    Faults,
    HubError,
    LoggedRequest,
    LoopbackServer,
    Request,
    json_answer,
)


class HubServer:
    """A Hub at ``hub.endpoint`` for as long as the ``with`` block lasts.

    Args:
        users: ``{token: user name}``. By default one user ``ada``; ``hub.token`` is the first user's token.
        orgs: ``{organisation: its members}``. By default everybody is a member of ``org``.
    """

    def __init__(self, users: Mapping[str, str] | None = None, orgs: Mapping[str, Iterable[str]] | None = None):
        self.users = dict(users or {"hf_loopback_token": "ada"})
        self.orgs = {name: set(members) for name, members in (orgs or {"org": self.users.values()}).items()}
        self.token = next(iter(self.users))
        self.repos: dict[str, Repo] = {}
        self.faults = Faults()
        self.requests: list[LoggedRequest] = []
        self.lock = threading.RLock()
        self._secret = secrets.token_hex(16)

    def __enter__(self) -> "HubServer":
        self._server = LoopbackServer(("127.0.0.1", 0), Connection)
        self._server.hub = self
        port = self._server.server_address[1]
        self.endpoint = f"http://127.0.0.1:{port}"
        self.cdn = f"http://localhost:{port}"
        self._homes = tempfile.TemporaryDirectory(prefix="hub-homes-", ignore_cleanup_errors=True)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._homes.cleanup()

    # -- for tests

    def env(self, token: str | None = None, **variables: str) -> dict[str, str]:
        """The whole environment of a subprocess that talks to this Hub, with a new, empty ``HF_HOME``."""
        parent = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        return {
            **parent,
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": tempfile.mkdtemp(dir=self._homes.name),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # datasets counts downloads on another host
            "NO_PROXY": "127.0.0.1,localhost",
            **({"HF_TOKEN": token} if token else {}),
            **variables,
        }

    def add_repo(
        self, repo: str, files: Mapping[str, bytes] | str | Path, private: bool = False, gated: bool = False
    ) -> str:
        """Seed a repository, or add a commit to it, from ``{path: bytes}`` or a folder; the commit's id."""
        if not isinstance(files, Mapping):
            folder = Path(files)
            files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        blobs = {path: Blob(data, is_lfs(path, len(data), data[:512])) for path, data in files.items()}
        with self.lock:
            found = self.repos.get(_full_name(repo)) or self._create(_full_name(repo), private, gated, author="seed")
            old = found.refs["refs/heads/main"].files
            return found.commit("refs/heads/main", {**old, **blobs}, "Seed", author="seed").oid

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """``{path: content}`` of a revision, without the ``.gitattributes`` that every repository has."""
        with self.lock:
            found = self.repos[_full_name(repo)].find(revision).files
        return {path: blob.data for path, blob in found.items() if path != ".gitattributes"}

    def commits(self, repo: str, revision: str = "main") -> list[Commit]:
        """The history, newest first; the last is the Hub's own "initial commit"."""
        with self.lock:
            return self.repos[_full_name(repo)].find(revision).history()

    # -- who may do what

    def _can_write(self, user: str | None, repo_id: str) -> bool:
        namespace = repo_id.partition("/")[0]
        return user is not None and (user == namespace or user in self.orgs.get(namespace, ()))

    def _authorize(self, request: Request, name: str, access: str) -> Repo:
        """The repository, or the Hub's refusal: what one may not see does not exist."""
        repo, user = self.repos.get(name), request.user
        if user == UNKNOWN_TOKEN:
            hidden = repo is None or repo.private
            raise HubError(401, "Invalid credentials in Authorization header", "RepoNotFound" if hidden else None)
        if repo is None or (repo.private and not self._can_write(user, repo.id)):
            if user is None:
                raise HubError(401, "Invalid username or password.", "RepoNotFound")
            raise HubError(404, "Repository not found", "RepoNotFound")
        writer = self._can_write(user, repo.id)
        if access == "content" and repo.gated and not writer:
            message = f"Access to {repo.name} is restricted. You must have access to it to download files."
            raise HubError(401 if user is None else 403, message, "GatedRepo")
        if access in ("write", "propose") and user is None:
            raise HubError(401, "Invalid username or password.")
        if access == "write" and not writer:
            raise HubError(403, f"You don't have the rights to write to {repo.id}")
        return repo

    def _require_writer(self, request: Request, repo: Repo) -> None:
        if not self._can_write(request.user, repo.id):
            raise HubError(
                403,
                f"You don't have the rights to write to {repo.id}. Pass `create_pr=1` to propose a change",
            )

    def _sign(self, path: str) -> str:
        """A URL on the other origin that needs no token, as those of S3 and the CDN."""
        return f"{self.cdn}{path}?sig={hashlib.sha256((self._secret + path).encode()).hexdigest()}"

    def _signed_repo(self, request: Request, store: str) -> Repo:
        if request.query.get("sig", [""])[0] != self._sign(request.path).partition("?sig=")[2]:
            raise HubError(403, "Wrong signature")
        if "Authorization" in request.headers:
            raise HubError(400, "Only one auth mechanism allowed: a token was sent to a signed URL")
        return self.repos[store]

    # -- repositories

    def whoami(self, request: Request) -> Answer:
        if request.user in (None, UNKNOWN_TOKEN):
            raise HubError(401, "Invalid credentials in Authorization header")
        orgs = [{"type": "org", "id": name, "name": name} for name in self.orgs if request.user in self.orgs[name]]
        access = {"type": "access_token", "accessToken": {"displayName": "test", "role": "write"}}
        return json_answer({"type": "user", "id": request.user, "name": request.user, "orgs": orgs, "auth": access})

    def _create(self, name: str, private: bool, gated: bool, author: str) -> Repo:
        repo = self.repos[name] = Repo(name, private, gated)
        repo.commit(
            "refs/heads/main",
            {".gitattributes": Blob(GIT_ATTRIBUTES.encode(), lfs=False)},
            "initial commit",
            author,
        )
        return repo

    def _named_in_body(self, request: Request) -> str:
        body = request.json()
        if request.user in (None, UNKNOWN_TOKEN):
            raise HubError(401, "Invalid username or password.")
        repo_id = f"{body.get('organization') or request.user}/{body['name']}"
        if not self._can_write(request.user, repo_id):
            raise HubError(403, f"You don't have the rights to write under the namespace {repo_id.partition('/')[0]}")
        return f"{body.get('type') or 'model'}s/{repo_id}"

    def create_repo(self, request: Request) -> Answer:
        name, body = self._named_in_body(request), request.json()
        found = {"url": f"{self.endpoint}/{name.removeprefix('models/')}", "name": name.partition("/")[2]}
        if name in self.repos:
            raise HubError(409, f"You already created this {name.partition('s/')[0]} repo", payload=found)
        private = bool(body.get("private")) or body.get("visibility") == "private"
        self._create(name, private, False, str(request.user))
        return json_answer(found)

    def delete_repo(self, request: Request) -> Answer:
        if self.repos.pop(self._named_in_body(request), None) is None:
            raise HubError(404, "Repository not found", "RepoNotFound")
        return Answer()

    def _info(self, repo: Repo, commit: Commit, blobs: bool = False) -> dict[str, Any]:
        card = read_card(commit.files["README.md"].data if "README.md" in commit.files else b"")
        library = card.get("library_name")
        if library is None:
            marks = {"adapter_config.json": "peft", "config.json": "transformers"}
            library = next((marks[path] for path in marks if path in commit.files), None)
        siblings: list[dict[str, Any]] = [{"rfilename": path} for path in sorted(commit.files)]
        for sibling in siblings if blobs else []:
            blob = commit.files[sibling["rfilename"]]
            sibling |= {"size": len(blob.data), "blobId": blob.oid}
            if blob.lfs:
                sibling["lfs"] = {"sha256": blob.sha256, "size": len(blob.data), "pointerSize": 130}
        info = {
            "id": repo.id,
            "author": repo.id.partition("/")[0],
            "sha": commit.oid,
            "private": repo.private,
            "gated": "auto" if repo.gated else False,
            "disabled": False,
            "lastModified": commit.date,
            "createdAt": commit.history()[-1].date,
            "downloads": 0,
            "likes": 0,
            "tags": card_tags(card, library),
            "siblings": siblings,
        }
        if repo.name.startswith("models/"):
            info |= {"modelId": repo.id, "pipeline_tag": card.get("pipeline_tag"), "library_name": library}
        return info | ({"cardData": card} if card else {})

    def info(self, request: Request, repo: Repo, revision: str = "main") -> Answer:
        info = self._info(repo, repo.find(revision), "blobs" in request.query)
        if "securityStatus" in request.query:
            info["securityRepoStatus"] = {"scansDone": True, "filesWithIssues": []}
        return json_answer(info)

    def list_repos(self, request: Request, kind: str) -> Answer:
        query = request.query
        found = []
        for repo in self.repos.values():
            info = self._info(repo, repo.refs["refs/heads/main"])
            if (
                repo.name.startswith(f"{kind}/")
                and (not repo.private or self._can_write(request.user, repo.id))
                and query.get("author", [info["author"]])[0] == info["author"]
                and query.get("search", [""])[0].lower() in repo.id.lower()
                and query.get("pipeline_tag", [info.get("pipeline_tag")])[0] == info.get("pipeline_tag")
                and set(query.get("filter", [])) <= set(info["tags"])
            ):
                wanted = {"full": ("siblings", "sha"), "cardData": ("cardData",)}
                for option, names in wanted.items():
                    for name in names:
                        if option not in query and name not in query.get("expand", []):
                            info.pop(name, None)
                found.append(info)
        found.sort(key=lambda info: info["lastModified"], reverse=True)
        return json_answer(found[: int(query.get("limit", ["1000"])[0])])

    # -- revisions and files

    def refs(self, request: Request, repo: Repo) -> Answer:
        def under(prefix: str) -> list[dict[str, str]]:
            return [
                {"name": ref.removeprefix(prefix), "ref": ref, "targetCommit": commit.oid}
                for ref, commit in repo.refs.items()
                if ref.startswith(prefix)
            ]

        refs = {"branches": under("refs/heads/"), "tags": under("refs/tags/"), "converts": []}
        return json_answer(refs | ({"pullRequests": under("refs/pr/")} if "include_prs" in request.query else {}))

    def _new_ref(self, repo: Repo, ref: str, start: str) -> Answer:
        if ref in repo.refs:
            raise HubError(409, f"Reference already exists: {ref}")
        repo.refs[ref] = repo.find(start)
        return json_answer({})

    def create_branch(self, request: Request, repo: Repo, ref: str) -> Answer:
        return self._new_ref(repo, f"refs/heads/{ref}", request.json().get("startingPoint", "main"))

    def create_tag(self, request: Request, repo: Repo, ref: str) -> Answer:
        return self._new_ref(repo, f"refs/tags/{request.json()['tag']}", ref)

    def delete_ref(self, request: Request, repo: Repo, kind: str, ref: str) -> Answer:
        full = f"refs/{'heads' if kind == 'branch' else 'tags'}/{ref}"
        if full == "refs/heads/main":
            raise HubError(403, "The branch main cannot be deleted")
        if repo.refs.pop(full, None) is None:
            raise HubError(404, f"Reference does not exist: {ref}", "RevisionNotFound")
        return Answer()

    def list_commits(self, request: Request, repo: Repo, revision: str) -> Answer:
        return json_answer(
            [
                {
                    "id": commit.oid,
                    "title": commit.title,
                    "message": commit.description,
                    "authors": [{"user": commit.author}],
                    "date": commit.date,
                }
                for commit in repo.find(revision).history()
            ]
        )

    def _entry(self, commit: Commit, path: str, expand: bool) -> dict[str, Any] | None:
        """One line of a tree: a file, a folder, or None when there is no such path."""
        entry: dict[str, Any]
        if blob := commit.files.get(path):
            entry = {"type": "file", "path": path, "oid": blob.oid, "size": len(blob.data)}
            if blob.lfs:
                entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 130}
            if expand:
                entry["securityFileStatus"] = {"status": "safe", "avScan": {}, "pickleImportScan": None}
        else:
            inside = [
                f"{name} {blob.oid}" for name, blob in sorted(commit.files.items()) if name.startswith(f"{path}/")
            ]
            if not inside:
                return None
            entry = {"type": "directory", "path": path, "oid": git_oid("\n".join(inside).encode()), "size": 0}
        if expand:
            *_, changed = (c for c in commit.history() if self._same(c, commit, path))
            entry["lastCommit"] = {"id": changed.oid, "title": changed.title, "date": changed.date}
        return entry

    def _same(self, one: Commit, other: Commit, path: str) -> bool:
        return self._entry(one, path, False) == self._entry(other, path, False)

    def tree(self, request: Request, repo: Repo, revision: str, path: str = "") -> Answer:
        commit = repo.find(revision)
        prefix = f"{path}/" if path else ""
        paths = set()
        for name in commit.files:
            if name.startswith(prefix):
                below = PurePosixPath(name).relative_to(path)
                parts = (
                    range(1, len(below.parts) + 1) if request.query.get("recursive") in (["true"], ["True"]) else [1]
                )
                paths |= {prefix + "/".join(below.parts[:n]) for n in parts}
        if path and not paths:
            raise HubError(404, f'{path} does not exist on "{revision}"', "EntryNotFound", X_Repo_Commit=commit.oid)
        expand = request.query.get("expand") in (["true"], ["True"])
        return json_answer([self._entry(commit, path, expand) for path in sorted(paths)])

    def paths_info(self, request: Request, repo: Repo, revision: str) -> Answer:
        if request.headers.get("Content-Type", "").startswith("application/json"):
            body = request.json()
            paths, expand = body["paths"], bool(body.get("expand"))
        else:
            form = parse_qs(request.body.decode())
            paths, expand = form.get("paths", []), form.get("expand") in (["true"], ["True"])
        entries = [self._entry(repo.find(revision), path.rstrip("/"), expand) for path in paths]
        return json_answer([entry for entry in entries if entry])

    def resolve(self, request: Request, repo: Repo, revision: str, path: str) -> Answer:
        commit = repo.find(revision)
        blob = commit.files.get(path)
        if blob is None:
            raise HubError(404, "Entry not found", "EntryNotFound", X_Repo_Commit=commit.oid)
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.etag}"'}
        if not blob.lfs:
            return _ranged(request, blob.data, headers)
        location = self._sign(f"/cdn/{repo.name}/{blob.sha256}/{quote(path.rsplit('/', 1)[-1])}")
        linked = {
            "X-Linked-Size": str(len(blob.data)),
            "X-Linked-ETag": f'"{blob.sha256}"',
            "Location": location,
        }
        return Answer(302, b"", headers | linked)

    def cdn_download(self, request: Request, store: str, sha256: str) -> Answer:
        return _ranged(request, self._signed_repo(request, store).lfs[sha256], {"ETag": f'"{sha256}"'})

    # -- pushing

    def validate_yaml(self, request: Request) -> Answer:
        errors, warnings = check_card(request.json()["content"])
        payload = {
            name: [{"message": text} for text in texts] for name, texts in (("errors", errors), ("warnings", warnings))
        }
        return json_answer(payload, 400 if errors else 200)

    def preupload(self, request: Request, repo: Repo, revision: str) -> Answer:
        if "create_pr" not in request.query:
            self._require_writer(request, repo)
        commit = repo.find(revision)
        answers = []
        for file in request.json()["files"]:
            lfs = is_lfs(file["path"], file["size"], base64.b64decode(file["sample"]))
            answer = {"path": file["path"], "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            if old := commit.files.get(file["path"]):
                answer["oid"] = old.etag
            answers.append(answer)
        return json_answer({"files": answers, "commitOid": commit.oid})

    def lfs_batch(self, request: Request, repo: Repo) -> Answer:
        body = request.json()
        if "ref" in body:  # without a branch it is for a pull request
            self._require_writer(request, repo)
        objects = []
        for item in body["objects"]:
            answer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in repo.lfs:
                verify = f"{self.endpoint}/{repo.url_path}.git/info/lfs/objects/verify"
                upload = self._sign(f"/lfs/{repo.name}/{item['oid']}/{item['size']}")
                answer["actions"] = {"upload": {"href": upload}, "verify": {"href": verify}}
            objects.append(answer)
        return json_answer({"transfer": "basic", "objects": objects})

    def lfs_upload(self, request: Request, store: str, sha256: str, size: str) -> Answer:
        repo = self._signed_repo(request, store)
        if len(request.body) != int(size) or hashlib.sha256(request.body).hexdigest() != sha256:
            raise HubError(400, "The content does not have the announced size and sha256")
        repo.lfs[sha256] = request.body
        return Answer(headers={"ETag": f'"{sha256}"'})

    def lfs_verify(self, request: Request, repo: Repo) -> Answer:
        if request.json()["oid"] not in repo.lfs:
            raise HubError(404, "LFS object not found")
        return json_answer({})

    def commit(self, request: Request, repo: Repo, revision: str) -> Answer:
        propose = "create_pr" in request.query
        if not propose:
            self._require_writer(request, repo)
        ref = revision if revision.startswith("refs/pr/") else f"refs/heads/{revision}"
        if ref not in repo.refs:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        header, *operations = [json.loads(line) for line in request.body.splitlines() if line.strip()]
        base, parent = repo.refs[ref], header["value"].get("parentCommit")
        if parent and not base.oid.startswith(parent):
            if not propose:
                raise HubError(412, "A commit has happened since. Please refresh and try again.")
            base = repo.find(parent)
        files = dict(base.files)
        for operation in operations:
            apply_operation(repo, files, operation["key"], operation["value"])
        if propose:
            number = 1 + sum(name.startswith("refs/pr/") for name in repo.refs)
            ref = f"refs/pr/{number}"
        title, description = header["value"]["summary"], header["value"].get("description", "")
        commit = repo.commit(ref, files, title, str(request.user), description, base)
        page = f"{self.endpoint}/{repo.url_path}"
        answer = {
            "success": True,
            "commitOid": commit.oid,
            "commitUrl": f"{page}/commit/{commit.oid}",
            "hookOutput": "",
        }
        return json_answer(answer | ({"pullRequestUrl": f"{page}/discussions/{number}"} if propose else {}))

    # -- one request

    def answer(self, request: Request) -> Answer:
        line = f"{'GET' if request.method == 'HEAD' else request.method} {request.path}"
        try:
            for pattern, access, function in ROUTES:
                if match := pattern.fullmatch(line):
                    parts: dict[str, Any] = {k: unquote(v) for k, v in match.groupdict().items() if v is not None}
                    if access:
                        name = f"{parts.pop('type', 'models')}/{parts.pop('id')}"
                        parts["repo"] = self._authorize(request, name, access)
                    return function(self, request, **parts)
            raise HubError(404, f"Sorry, we can't find {request.path}")
        except HubError as error:
            return error.answer
        except (KeyError, TypeError, ValueError) as error:
            return HubError(400, f"Bad request: {error!r}").answer


def _full_name(repo: str) -> str:
    return repo if repo.startswith("datasets/") else f"models/{repo}"


def _ranged(request: Request, data: bytes, headers: dict[str, str]) -> Answer:
    """``data`` or the ``Range: bytes=...`` of it."""
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", **headers}
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
    if not match or match.groups() == ("", ""):
        return Answer(200, data, headers)
    first, last = match.groups()
    start = int(first) if first else max(0, len(data) - int(last))
    stop = min(len(data), int(last) + 1) if first and last else len(data)
    if start >= stop:
        return Answer(416, b"", {"Content-Range": f"bytes */{len(data)}"})
    return Answer(206, data[start:stop], headers | {"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})


_ID = r"(?P<id>[^/]+(?:/[^/]+)?)"
_API = rf"/api/(?P<type>models|datasets)/{_ID}"
_PAGE = rf"/(?:(?P<type>datasets)/)?{_ID}"
_REVISION = "(?P<revision>[^/]+)"
_STORE = "(?P<store>(?:models|datasets)/[^/]+/[^/]+)/(?P<sha256>[0-9a-f]{64})"
# (request line, access to the repository it names or None, method)
ROUTES = [
    (re.compile(line), access, function)
    for line, access, function in (
        ("GET /api/whoami-v2", None, HubServer.whoami),
        ("POST /api/repos/create", None, HubServer.create_repo),
        ("DELETE /api/repos/delete", None, HubServer.delete_repo),
        ("POST /api/validate-yaml", None, HubServer.validate_yaml),
        ("GET /api/(?P<kind>models|datasets)", None, HubServer.list_repos),
        (f"GET {_PAGE}/resolve/{_REVISION}/(?P<path>.+)", "content", HubServer.resolve),
        (f"GET /cdn/{_STORE}/[^/]+", None, HubServer.cdn_download),
        (f"PUT /lfs/{_STORE}/(?P<size>[0-9]+)", None, HubServer.lfs_upload),
        (rf"POST {_PAGE}\.git/info/lfs/objects/batch", "propose", HubServer.lfs_batch),
        (rf"POST {_PAGE}\.git/info/lfs/objects/verify", "propose", HubServer.lfs_verify),
        (f"GET {_API}/refs", "read", HubServer.refs),
        (f"GET {_API}/revision/{_REVISION}", "read", HubServer.info),
        (f"GET {_API}/commits/{_REVISION}", "read", HubServer.list_commits),
        (f"GET {_API}/tree/{_REVISION}(?:/(?P<path>.+))?", "read", HubServer.tree),
        (f"POST {_API}/paths-info/{_REVISION}", "read", HubServer.paths_info),
        (f"POST {_API}/preupload/{_REVISION}", "propose", HubServer.preupload),
        (f"POST {_API}/commit/{_REVISION}", "propose", HubServer.commit),
        (f"POST {_API}/branch/(?P<ref>[^/]+)", "write", HubServer.create_branch),
        (f"POST {_API}/tag/(?P<ref>[^/]+)", "write", HubServer.create_tag),
        (f"DELETE {_API}/(?P<kind>branch|tag)/(?P<ref>[^/]+)", "write", HubServer.delete_ref),
        (f"GET {_API}", "read", HubServer.info),
    )
]
