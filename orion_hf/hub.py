"""Pushing ORION repositories to the Hub, and finding those of an author.

    push_folder("out/orion-eurosat", "org/orion-eurosat")  # adapter, processor, prototypes, card: one commit
    push_folder("out/orion-eurosat", "org/orion-eurosat", merged=True)  # and full weights, revision "merged"

A push is one commit on top of the head that was read, so the repository holds the old state whole or the new
state whole. If the connection breaks, the head is read again: when it holds our files the push succeeded, when
it is unchanged the commit is tried again, when somebody else has pushed meanwhile we stop. Of a folder only the
files of an ORION repository are pushed.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx2
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import save_file
from transformers.utils import logging

from .card import (
    CARD_NAME,
    HEATMAP_NAME,
    MERGED_REVISION,
    RESULTS_NAME,
    base_of,
    is_generated,
    model_card,
    read_folder,
    write_heatmap,
)
from .configuration_orion import ORION_CONFIG_NAME
from .repository import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    PROTOTYPES_NAME,
    is_hub_id,
    is_revision,
    read_tensors,
)
from .training_log import LOG_NAME

if TYPE_CHECKING:
    from .modeling_orion import OrionCLIPTextModel

logger = logging.get_logger(__name__)

# All that a repository of ours consists of. Nothing else in a folder is pushed (checkpoints, notes, keys), and
# of these a push removes what it does not bring (an adapter beside full weights would be added to them).
OUR_FILES = (
    ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME, "config.json", "model.safetensors", "model-*-of-*.safetensors",
    "model.safetensors.index.json", ORION_CONFIG_NAME, PROTOTYPES_NAME, "processor_config.json",
    "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
    "merges.txt", LOG_NAME, RESULTS_NAME, CARD_NAME, HEATMAP_NAME,
)  # fmt: skip

ATTEMPTS = 4
_TRANSIENT = (408, 429, 500, 502, 503, 504)
_CONFLICT = (409, 412)
_LONGEST_WAIT = 60.0
_LARGEST_FLOAT32_PROTOTYPES = 2 * 2**20

Answer = TypeVar("Answer")


class PushError(RuntimeError):
    """A push that was not made, in one line: why, and what to do."""


@dataclass(frozen=True)
class Push:
    """What came of a push.

    Attributes:
        repo_id, revision: where to.
        commit: the commit that now holds the files; of a pull request, the commit proposed.
        url: a page to look at.
        changed: False when the repository already held exactly these files and no commit was made.
    """

    repo_id: str
    revision: str
    commit: str
    url: str
    changed: bool


def push_folder(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    merged: bool = False,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    license: str | None = None,
) -> Push:
    """Push a saved adapter or merged model with its card, in one commit.

    Args:
        folder: what `OrionCLIPTextModel.save_pretrained` or `orion-hf finetune` wrote.
        repo_id: ``org/name``; created if it does not exist.
        merged: push full weights as well, on the revision ``merged``, for machines without peft.
        private: visibility of a new repository; None is the owner's default. An existing public one is
            refused when True, because a push does not hide what is public.
        token: of the Hub; None takes that of ``HF_TOKEN`` or ``hf auth login``.
        revision: branch to push to, created if need be; None is ``main``.
        create_pr: propose the change as a pull request instead of making it.
        commit_message: the commit's title.
        license: of the weights, for the card.

    Returns:
        The push of the folder itself (the one of the merged weights precedes it).

    Example:
        >>> push_folder("out/orion-eurosat", "org/orion-eurosat").url  # doctest: +SKIP
    """
    folder = Path(folder)
    kind, _ = read_folder(folder)
    if merged and kind == "merged":
        raise ValueError(f"{folder} holds full weights already: push it without merged.")
    remote = _Remote(repo_id, token)
    options: dict[str, Any] = {
        "revision": revision,
        "create_pr": create_pr,
        "message": commit_message,
        "license": license,
    }
    if not merged:
        return _push(remote, folder, private=private, **options)
    from .modeling_orion import OrionCLIPTextModel

    model = OrionCLIPTextModel.from_pretrained(folder, token=remote.token)
    with tempfile.TemporaryDirectory() as temporary:
        full = Path(temporary) / "full"
        model.save_pretrained(full, merged=True)
        for name in (LOG_NAME, RESULTS_NAME):
            if (folder / name).is_file():
                shutil.copyfile(_inside(folder, name), full / name)
        return _push_both(remote, folder, full, private, **options)


def push_model(
    model: OrionCLIPTextModel,
    repo_id: str,
    *,
    merged: bool = False,
    private: bool | None = None,
    token: str | bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    license: str | None = None,
) -> Push:
    """Push a model from memory; everything else as in [`push_folder`]. Used by ``model.push_to_hub``."""
    if model.task is None:
        raise ValueError("The model has no task: set model.task, for example to OrionTask.from_names([...]).")
    remote = _Remote(repo_id, token)
    options: dict[str, Any] = {
        "revision": revision,
        "create_pr": create_pr,
        "message": commit_message,
        "license": license,
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder, full = Path(temporary) / "model", Path(temporary) / "full"
        model.save_pretrained(folder)
        if not (merged and model.has_lora):
            return _push(remote, folder, private=private, **options)
        model.save_pretrained(full, merged=True)
        return _push_both(remote, folder, full, private, **options)


def _push_both(remote: _Remote, adapter: Path, full: Path, private: bool | None, **options: Any) -> Push:
    """Full weights first: so the card of the adapter never promises a revision that is not there."""
    if options["revision"] == MERGED_REVISION or options["create_pr"]:
        raise ValueError(
            f"The revision {MERGED_REVISION!r} is for the full weights, beside an adapter on another branch and "
            "not in a pull request: push without revision and create_pr."
        )
    _check_base(adapter)
    _push(remote, full, private=private, **{**options, "revision": MERGED_REVISION})
    return _push(remote, adapter, private=private, merged_revision=True, **options)


def find_adapters(folder: str | Path) -> dict[str, Path]:
    """Every adapter below ``folder``: name for a repository (``orion-<task>``) -> its folder.

    Example:
        >>> find_adapters("out")  # doctest: +SKIP
        {'orion-dtd': PosixPath('out/orion-dtd'), 'orion-eurosat': PosixPath('out/orion-eurosat')}
    """
    found: dict[str, Path] = {}
    for path in sorted(Path(folder).rglob(ADAPTER_CONFIG_NAME)):
        below = path.parent.relative_to(folder)
        hidden = any(part.startswith((".", "checkpoint-")) for part in below.parts)
        if hidden or not (path.parent / ORION_CONFIG_NAME).is_file():
            continue
        _, config = read_folder(path.parent)
        task = config.task.name if config.task is not None else "task"
        name = f"orion-{re.sub(r'[^A-Za-z0-9._-]+', '-', task).strip('-').lower() or 'task'}"
        if name in found:
            raise ValueError(f"{found[name]} and {path.parent} are both {name}: push one of them by itself.")
        found[name] = path.parent
    if not found:
        raise ValueError(f"no adapter below {folder}: give the folder that they were saved in.")
    return found


@dataclass(frozen=True)
class Listed:
    """A repository as its card's metadata describe it; None for what they do not say."""

    repo_id: str
    task: str | None
    base: str | None
    classes: int | None
    top1: float | None
    private: bool


def list_repositories(author: str, token: str | bool | None = None) -> list[Listed]:
    """The ORION repositories of a user or organisation, by name.

    Example:
        >>> [listed.task for listed in list_repositories("org")]  # doctest: +SKIP
        ['dtd', 'eurosat']
    """
    remote = _Remote(None, token, needed=False)
    models = remote.call(
        f"listing the repositories of {author}",
        lambda: list(remote.api.list_models(author=author, filter="orion", cardData=True)),
    )
    return sorted((_listed(model) for model in models), key=lambda listed: listed.repo_id)


def _listed(model: Any) -> Listed:
    card = model.card_data.to_dict() if model.card_data is not None else {}
    orion: Any = card.get("orion") if isinstance(card.get("orion"), dict) else {}
    task, classes = orion.get("task"), orion.get("classes")
    base = card.get("base_model") or orion.get("base")
    base = base[0] if isinstance(base, list) and base else base
    results = getattr(model.card_data, "eval_results", None) or []
    top1 = next((r.metric_value for r in results if r.metric_type == "accuracy"), None)
    return Listed(
        repo_id=model.id,
        task=task if isinstance(task, str) else None,
        base=base if isinstance(base, str) else None,
        classes=classes if isinstance(classes, int) else None,
        top1=float(top1) if isinstance(top1, (int, float)) else None,
        private=bool(model.private),
    )


# What is pushed


def _push(
    remote: _Remote,
    folder: Path,
    *,
    private: bool | None,
    revision: str | None,
    create_pr: bool,
    message: str | None,
    license: str | None,
    merged_revision: bool = False,
) -> Push:
    revision = revision or "main"
    if not is_revision(revision):
        raise ValueError(f"{revision!a} cannot be a branch: use letters, digits and ./-_ only.")
    with tempfile.TemporaryDirectory() as temporary:
        stage = Path(temporary)
        title = _stage(folder, stage, remote.repo_id, revision, license, merged_revision)
        files = {path.name: path for path in sorted(stage.iterdir())}
        for name, path in files.items():
            if remote.token and remote.token.encode() in path.read_bytes():
                raise PushError(f"{folder / name} contains your token: remove it there, nothing was pushed.")
        remote.ensure_repository(private, create_pr)
        if not create_pr:
            remote.ensure_branch(revision)
        _warn_of_surprises(remote, folder, revision, merged_revision)
        return remote.commit(files, revision, message or title, create_pr)


def _stage(folder: Path, stage: Path, repo_id: str, revision: str, license: str | None, merged_revision: bool) -> str:
    """Copy what is pushed to ``stage``, made to fit any machine, with its card; the commit's title."""
    kind, config = read_folder(folder)
    base, base_revision = _check_base(folder)
    for path in sorted(folder.iterdir()):
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in OUR_FILES):
            shutil.copyfile(_inside(folder, path.name), stage / path.name)
    # The card shows the prototypes as they are; what is stored may be rounded.
    if not _is_newer(folder / HEATMAP_NAME, folder / PROTOTYPES_NAME):
        (stage / HEATMAP_NAME).unlink(missing_ok=True)
        write_heatmap(stage, stage / HEATMAP_NAME)
    card = stage / CARD_NAME
    if not card.is_file() or is_generated(card.read_text(encoding="utf-8")):
        made = model_card(stage, repo_id, license=license, revision=revision, merged_revision=merged_revision)
        card.write_text(str(made), encoding="utf-8")
    if kind == "adapter" and (base or "").startswith("embedded:"):
        # Saved with this machine's path of the embedded model, which nobody else has.
        adapter = json.loads((stage / ADAPTER_CONFIG_NAME).read_text(encoding="utf-8"))
        adapter |= {"base_model_name_or_path": base, "revision": base_revision}
        (stage / ADAPTER_CONFIG_NAME).write_text(json.dumps(adapter, indent=2) + "\n", encoding="utf-8")
    if base is None:
        config.base_model = config.base_revision = None  # a folder of this machine
        config.save_json(stage / ORION_CONFIG_NAME)
    _slim(stage)
    return f"ORION {'adapter' if kind == 'adapter' else 'merged weights'} for {config.task.name}"  # type: ignore[union-attr]


def _is_newer(made: Path, source: Path) -> bool:
    return made.is_file() and source.is_file() and made.stat().st_mtime_ns > source.stat().st_mtime_ns


def _slim(stage: Path) -> None:
    """Half the size of the two files that are large for no reason: white space, and digits nobody needs."""
    tokenizer = stage / "tokenizer.json"
    if tokenizer.is_file():
        content = json.loads(tokenizer.read_text(encoding="utf-8"))
        tokenizer.write_text(json.dumps(content, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")
    prototypes = stage / PROTOTYPES_NAME
    if prototypes.is_file() and prototypes.stat().st_size > _LARGEST_FLOAT32_PROTOTYPES:
        tensors = read_tensors(prototypes)
        save_file({name: tensor.half() for name, tensor in tensors.items()}, prototypes)


def _check_base(folder: Path) -> tuple[str | None, str | None]:
    """The base model; an adapter whose base is a folder of this machine is of no use to anybody else."""
    kind, config = read_folder(folder)
    base, revision = base_of(folder, kind, config)
    if kind == "adapter" and base is None:
        raise ValueError(
            f"{folder}: the base model of the adapter is not on the Hub, so nobody else could load it. Write its "
            f"Hub id into {ADAPTER_CONFIG_NAME}, or push full weights: save_pretrained(FOLDER, merged=True)."
        )
    return base, revision


def _warn_of_surprises(remote: _Remote, folder: Path, revision: str, merged_revision: bool) -> None:
    """Say what would make others get other weights than ours; a Hub that cannot tell is no reason to stop."""
    kind, config = read_folder(folder)
    base, base_revision = base_of(folder, kind, config)
    if kind == "merged":
        return
    try:
        branches = [branch.name for branch in remote.api.list_repo_refs(remote.repo_id).branches]
        if MERGED_REVISION in branches and not merged_revision and revision == "main":
            logger.warning(
                f"{remote.repo_id}: the full weights on its revision {MERGED_REVISION!r} are of an earlier push; "
                "push with merged to renew them."
            )
        if base_revision is not None and is_hub_id(base) and remote.api.model_info(str(base)).sha != base_revision:
            logger.warning(
                f"{remote.repo_id}: its base {base} has changed since revision {base_revision}, and stock loaders "
                "of adapters take its newest state. Push with merged, so that they have exact weights to load."
            )
    except (HfHubHTTPError, httpx2.TransportError):
        return


def _inside(folder: Path, name: str) -> Path:
    """The file, unless it is a link to something outside the folder: that was not meant to be published."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{folder / name} is a link that leaves the folder: copy the file, if you want to publish it.")
    return path


# How it is pushed


class _Remote:
    """One repository of the Hub: calls with retries, errors in one line without the token."""

    def __init__(self, repo_id: str | None, token: str | bool | None, needed: bool = True):
        if repo_id is not None:
            validate_repo_id(repo_id)
        self.repo_id = repo_id or ""
        self.token = _check_token(token, needed)
        self.api = HfApi(token=self.token or False, library_name="orion-hf")
        if repo_id is not None and "/" not in repo_id:
            self.repo_id = f"{self.call('no login on the Hub', self.api.whoami)['name']}/{repo_id}"

    def call(self, what: str, request: Callable[[], Answer]) -> Answer:
        """The answer to ``request``, tried again when the network or the Hub is at fault."""
        for attempt in range(ATTEMPTS):
            try:
                return request()
            except (RepositoryNotFoundError, RevisionNotFoundError):
                raise
            except Exception as error:
                if attempt == ATTEMPTS - 1 or not _is_transient(error):
                    raise self.error(what, error) from error
                _wait(attempt, error)
        raise AssertionError("the last attempt returns or raises")

    def error(self, what: str, error: Exception) -> PushError:
        """``error`` in one line that says what to do."""
        status = _status(error)
        if status == 401:
            reason = "the Hub does not accept the token; log in with `hf auth login`, or set HF_TOKEN."
        elif status == 403:
            reason = "the token may not do that; use one with write access, or propose the change with create_pr."
        elif status == 429:
            reason = "too many requests; try again in a few minutes."
        elif status is not None and status >= 500:
            reason = f"the Hub answers {status}; try again later."
        elif _is_transient(error):
            reason = "the connection broke; try again when the network is back."
        else:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = lines[-1] if status == 400 and lines else (lines or [type(error).__name__])[0]
        text = f"{what}: {reason}"
        return PushError(text.replace(self.token, "***") if self.token else text)

    def ensure_repository(self, private: bool | None, create_pr: bool) -> None:
        what = f"{self.repo_id} could not be opened"
        try:
            info = self.call(what, lambda: self.api.model_info(self.repo_id))
        except RepositoryNotFoundError as missing:
            if create_pr:
                raise PushError(f"{self.repo_id} does not exist or is not yours to see.") from missing
            try:
                self.call(what, lambda: self.api.create_repo(self.repo_id, private=private, exist_ok=True))
            except RepositoryNotFoundError as refused:
                raise self.error(what, refused) from refused
            return
        if private and not info.private:
            raise PushError(f"{self.repo_id} exists and is public: make it private in its settings on the Hub first.")

    def ensure_branch(self, revision: str) -> None:
        what = f"the branch {revision} of {self.repo_id} could not be made"
        try:
            self.call(what, lambda: self.api.model_info(self.repo_id, revision=revision))
        except RevisionNotFoundError:
            self.call(what, lambda: self.api.create_branch(self.repo_id, branch=revision, exist_ok=True))

    def commit(self, files: dict[str, Path], revision: str, title: str, create_pr: bool) -> Push:
        """Make the branch hold ``files`` and nothing else of ours: in one commit, or none if it does already."""
        what = f"{self.repo_id} was not changed"
        page = f"{self.api.endpoint}/{self.repo_id}/tree/{revision}"
        parent: str | None = None
        failure: Exception | None = None
        for attempt in range(ATTEMPTS + 1):
            head, operations = self._difference(files, revision, failure)
            if not operations:  # nothing to do, or the commit was made and only its answer was lost
                return Push(self.repo_id, revision, head, page, changed=parent is not None)
            if parent not in (None, head):
                raise self._overtaken()
            if attempt == ATTEMPTS:
                break
            parent = head
            try:
                made = self.api.create_commit(
                    self.repo_id,
                    operations,
                    commit_message=title,
                    revision=revision,
                    create_pr=create_pr,
                    parent_commit=head,
                )
                return Push(self.repo_id, revision, made.oid, made.pr_url or page, changed=True)
            except Exception as error:
                if _status(error) in _CONFLICT:
                    raise self._overtaken() from error
                if not _is_transient(error):
                    raise self.error(what, error) from error
                if create_pr:
                    raise PushError(
                        f"{self.repo_id}: the connection broke before the Hub's answer; see whether the pull "
                        "request is there before you push again."
                    ) from error
                failure = error
                if attempt < ATTEMPTS - 1:
                    _wait(attempt, error)
        assert failure is not None
        raise self.error(what, failure) from failure

    def _overtaken(self) -> PushError:
        return PushError(
            f"{self.repo_id} was not changed by this push: somebody else pushed to it meanwhile. Look at their "
            "commit, then push again."
        )

    def _difference(
        self, files: dict[str, Path], revision: str, failure: Exception | None = None
    ) -> tuple[str, list[Any]]:
        """The head of the branch, and what must be committed on it to hold ``files``."""
        what = f"{self.repo_id} could not be read"
        if failure is not None:
            what = f"{self.repo_id}: perhaps the commit was made (pushing again makes no second one)"
        info = self.call(what, lambda: self.api.model_info(self.repo_id, revision=revision, files_metadata=True))
        stored = {file.rfilename: file for file in info.siblings or ()}
        operations: list[Any] = [
            CommitOperationAdd(name, path)
            for name, path in files.items()
            if name not in stored or not _is_same(path.read_bytes(), stored[name])
        ]
        operations += [
            CommitOperationDelete(name)
            for name in stored
            if name not in files and any(fnmatch(name, pattern) for pattern in OUR_FILES)
        ]
        return str(info.sha), operations


def _check_token(token: str | bool | None, needed: bool) -> str | None:
    if token is None or token is True:
        token = get_token()
    if not token:
        if needed:
            raise PushError("no token for the Hub: log in with `hf auth login`, or set HF_TOKEN.")
        return None
    token = str(token).strip()
    if not re.fullmatch("[!-~]+", token):
        # Checked here because HTTP libraries quote a header that they cannot send.
        raise PushError("the token has characters that no token has (not shown): copy it again from your settings.")
    return token


def _is_same(data: bytes, stored: Any) -> bool:
    if stored.lfs is not None:
        return stored.lfs.sha256 == hashlib.sha256(data).hexdigest()
    return stored.blob_id == hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on: failed uploads arrive wrapped."""
    while error is not None:
        yield error
        error = error.__cause__


def _status(error: BaseException) -> int | None:
    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            return cause.response.status_code
    return None


def _is_transient(error: BaseException) -> bool:
    """Whether another attempt may go better."""
    status = _status(error)
    if status is not None:
        return status in _TRANSIENT
    return any(isinstance(cause, (httpx2.TransportError, ConnectionError, TimeoutError)) for cause in _causes(error))


def _wait(attempt: int, error: BaseException) -> None:
    """Wait 1, 2, 4 seconds, or as long as the Hub asks for."""
    seconds = float(2**attempt)
    for cause in _causes(error):
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            asked = cause.response.headers.get("Retry-After", "")
            seconds = max(seconds, float(asked)) if asked.isdigit() else seconds
    time.sleep(min(seconds, _LONGEST_WAIT))
