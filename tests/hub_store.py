"""What the loopback Hub stores: blobs, commits that are whole snapshots, and repositories of them."""

import base64
import hashlib
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property
from typing import Any

from hub_cards import check_card
from hub_wire import HubError

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".h5", ".onnx", ".parquet", ".arrow", ".npy", ".npz", ".zip")
GIT_ATTRIBUTES = "".join(f"*{suffix} filter=lfs diff=lfs merge=lfs -text\n" for suffix in LFS_SUFFIXES)


def git_oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_lfs(path: str, size: int, sample: bytes) -> bool:
    """The Hub's choice in ``preupload``: by name, by size, or because the file is binary."""
    return size > 0 and (path.endswith(LFS_SUFFIXES) or size > 10 * 2**20 or b"\0" in sample)


@dataclass(frozen=True)
class Blob:
    data: bytes
    lfs: bool

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @cached_property
    def oid(self) -> str:
        """The git object id: of the file, or of the LFS pointer that git holds in its place."""
        if not self.lfs:
            return git_oid(self.data)
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(self.data)}\n"
        return git_oid(pointer.encode())

    @cached_property
    def etag(self) -> str:
        return self.sha256 if self.lfs else self.oid


@dataclass(frozen=True)
class Commit:
    oid: str
    parent: "Commit | None"
    title: str
    description: str
    author: str
    date: str
    files: Mapping[str, Blob]

    def history(self) -> "list[Commit]":
        """Newest first."""
        commits = [self]
        while parent := commits[-1].parent:
            commits.append(parent)
        return commits


@dataclass
class Repo:
    name: str  # "models/org/name" or "datasets/org/name"
    private: bool = False
    gated: bool = False
    refs: dict[str, Commit] = field(default_factory=dict)  # refs/heads/*, refs/tags/*, refs/pr/*
    lfs: dict[str, bytes] = field(default_factory=dict)  # uploaded content by sha256, committed or not

    @property
    def id(self) -> str:
        return self.name.partition("/")[2]

    @property
    def url_path(self) -> str:
        return self.id if self.name.startswith("models/") else self.name

    def commit(
        self,
        ref: str,
        files: Mapping[str, Blob],
        title: str,
        author: str,
        description: str = "",
        base: Commit | None = None,
    ) -> Commit:
        parent = base or self.refs.get(ref)
        listing = "".join(f"{path} {blob.oid}\n" for path, blob in sorted(files.items()))
        seed = f"{parent.oid if parent else ''}\n{title}\n{author}\n{secrets.token_hex(8)}\n{listing}"
        date = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        commit = Commit(hashlib.sha1(seed.encode()).hexdigest(), parent, title, description, author, date, dict(files))
        self.lfs.update({blob.sha256: blob.data for blob in files.values() if blob.lfs})
        self.refs[ref] = commit
        return commit

    def find(self, revision: str) -> Commit:
        """The commit of a branch, a tag, a pull request or a (shortened) commit id."""
        for ref in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if ref in self.refs:
                return self.refs[ref]
        if re.fullmatch("[0-9a-f]{7,40}", revision):
            for head in self.refs.values():
                for commit in head.history():
                    if commit.oid.startswith(revision):
                        return commit
        raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")


def apply_operation(repo: Repo, files: dict[str, Blob], key: str, value: Mapping[str, Any]) -> None:
    """One line of a commit, on the snapshot that becomes the commit."""
    path = value["path"].rstrip("/")
    if not path or path.startswith("/") or {"..", ".", ".git", ""} & set(path.split("/")):
        raise HubError(400, f"Invalid path in repository: {path!r}")
    if key == "file":
        data = base64.b64decode(value["content"], validate=True)
        if path == "README.md" and (errors := check_card(data.decode())[0]):
            raise HubError(400, "Invalid metadata in README.md: " + "; ".join(errors))
        files[path] = Blob(data, lfs=False)
    elif key == "lfsFile":
        data = repo.lfs.get(value["oid"], b"")
        if value["oid"] not in repo.lfs or value.get("size", len(data)) != len(data):
            raise HubError(400, f"LFS pointer of {path} points to a file that was not uploaded")
        files[path] = Blob(data, lfs=True)
    elif key in ("deletedFile", "deletedFolder"):
        gone = [name for name in files if (name == path if key == "deletedFile" else name.startswith(f"{path}/"))]
        if not gone:
            raise HubError(404, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        for name in gone:
            del files[name]
    else:
        raise HubError(400, f"Unknown operation {key!r}")
