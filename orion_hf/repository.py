"""Reading and writing an ORION repository: a folder, or a repository on the Hub at one revision.

    adapter: adapter_config.json, adapter_model.safetensors         merged: config.json, model.safetensors
    both:    orion_config.json, prototypes.safetensors, processor and tokenizer files

Only JSON and safetensors are read. Writing goes to a temporary folder first, so that a failure leaves
what was there.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import HfApi, ResolvedRevision, constants
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import validate_repo_id
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.utils import cached_file
from transformers.utils.hub import resolve_revision

from .configuration_orion import ORION_CONFIG_NAME, OrionConfig
from .embedded import resolve_model_id

ADAPTER_CONFIG_NAME = "adapter_config.json"
ADAPTER_WEIGHTS_NAME = "adapter_model.safetensors"
PROTOTYPES_NAME = "prototypes.safetensors"

# The keyword arguments of `from_pretrained` that say where and how files are fetched.
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "subfolder", "token")
_REVISION = re.compile(r"[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
_FULL_WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")


@dataclass(frozen=True)
class Repository:
    """A folder or a Hub repository, and how to fetch its files.

    Attributes:
        name: as the user wrote it: a folder, a Hub id, or ``embedded:tiny-clip``.
        revision: of a Hub repository, resolved to one commit so that all files are of the same state.
        options: `HUB_OPTIONS`; not shown, because a token may be among them.
    """

    name: str
    revision: str | None = None
    options: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, name: str | os.PathLike, revision: str | None = None, **options: Any) -> Repository:
        """Resolve ``revision`` once; files are fetched when asked for.

        Raises:
            OSError: there is no such folder, and no such repository within reach.
        """
        name = os.fspath(name)
        path = resolve_model_id(name)
        if os.path.isdir(path):
            return cls(name, revision, options)
        if not is_hub_id(path):
            raise OSError(f"{name}: there is no such folder, and it is no Hub id (org/name).")
        resolve = {key: options[key] for key in ("cache_dir", "local_files_only", "token") if key in options}
        resolved = resolve_revision(path, revision, **resolve)
        if not _is_cached(path, options.get("cache_dir")):
            _check_reachable(path, revision, resolved, bool(options.get("local_files_only")), options.get("token"))
        return cls(name, resolved, options)

    @property
    def path(self) -> str:
        """What transformers loads: the folder or the Hub id."""
        return resolve_model_id(self.name)

    @property
    def is_local(self) -> bool:
        return os.path.isdir(self.path)

    @property
    def commit(self) -> str | None:
        """The commit if it is known, else the revision asked for; None for a folder."""
        return None if self.is_local else getattr(self.revision, "resolved", self.revision)

    @property
    def loading(self) -> dict[str, Any]:
        """Keyword arguments for any ``from_pretrained(self.path, ...)``."""
        return {**self.options, "revision": self.revision or "main"}

    def __deepcopy__(self, memo: Any) -> Repository:
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Without the token, so that a pickled model does not carry it."""
        public = {key: value for key, value in self.options.items() if key != "token"}
        return {"name": self.name, "revision": self.revision, "options": public}

    def file(self, filename: str) -> str | None:
        """Local path of a file, downloaded if need be; None if there is none (offline: none cached)."""
        return cached_file(
            self.path,
            filename,
            **self.loading,
            _raise_exceptions_for_missing_entries=False,
        )


def read_orion_config(
    repository: str | os.PathLike | Repository, revision: str | None = None, **options: Any
) -> OrionConfig | None:
    """The checked `orion_config.json` of a repository, None if it has none (a plain CLIP).

    Args:
        repository: a folder, a Hub id, or an opened `Repository`.
        revision, options: as for ``from_pretrained`` (``token``, ``cache_dir``, ``local_files_only``, ...).

    Example:
        >>> read_orion_config("org/orion-eurosat").task.class_names  # doctest: +SKIP
    """
    if not isinstance(repository, Repository):
        repository = Repository.open(repository, revision, **options)
    path = repository.file(ORION_CONFIG_NAME)
    if path is None:
        return None
    _check_shards(repository)
    return OrionConfig.from_json_file(path)


def _check_shards(repository: Repository) -> None:
    """The index of sharded weights may name files beside it, none elsewhere on this machine."""
    path = repository.file("model.safetensors.index.json")
    if path is None:
        return
    try:
        with open(path, encoding="utf-8") as file:
            names = set(json.load(file)["weight_map"].values())
        inside = all(_FULL_WEIGHTS.fullmatch(name) for name in names)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        inside = False
    if not inside:
        raise ValueError(f"{path}: its weight_map does not name shards of this folder. Save the model again.")


@dataclass(frozen=True)
class Adapter:
    """The LoRA adapter of a repository: its configuration and the path of its weights."""

    config: LoraConfig
    weights: str

    @classmethod
    def find(cls, repository: Repository) -> Adapter | None:
        """The adapter of ``repository``, None if it has no `adapter_config.json`."""
        path = repository.file(ADAPTER_CONFIG_NAME)
        if path is None:
            return None
        try:
            with open(path, encoding="utf-8") as file:
                kind = json.load(file)["peft_type"]
            config = PeftConfig.from_pretrained(os.path.dirname(path))
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not an adapter config ({error}). Save or download it again.") from error
        if not isinstance(config, LoraConfig):
            raise ValueError(f"{path}: the adapter is {kind!r}; only LoRA adapters can be loaded.")
        weights = repository.file(ADAPTER_WEIGHTS_NAME)
        if weights is None:
            raise ValueError(
                f"{repository.name}: no {ADAPTER_WEIGHTS_NAME} beside {ADAPTER_CONFIG_NAME}. Adapters in "
                "pickle files (adapter_model.bin) are refused, because reading a pickle can run code: "
                "save it again as safetensors."
            )
        return cls(config, weights)

    def base(self, repository: Repository, orion: OrionConfig | None) -> Repository:
        """The base model; ``repository`` and ``orion`` are the adapter's own."""
        embedded = orion is not None and (orion.base_model or "").startswith("embedded:")
        # The path of an embedded model is for stock tools and differs between machines; its name does not.
        name = orion.base_model if embedded and orion is not None else self.config.base_model_name_or_path
        source = f"{repository.name}: base_model_name_or_path of {ADAPTER_CONFIG_NAME}"
        if not isinstance(name, str) or not name:
            raise ValueError(f"{source} is missing. Write the id or folder of the base model there.")
        if repository.is_local and not embedded:
            beside = os.path.join(repository.path, name)
            name = beside if not os.path.isdir(name) and os.path.isdir(beside) else name
        elif not embedded:
            _check_base(name, self.config.revision, source)
        options = {key: value for key, value in repository.options.items() if key != "subfolder"}
        try:
            return Repository.open(name, self.config.revision, **options)
        except OSError as error:
            raise OSError(
                f"{repository.name}: its base model {name!r} could not be loaded. Connect to the Hub, or write a "
                f"folder that holds it into {ADAPTER_CONFIG_NAME}. ({error})"
            ) from error


def is_hub_id(name: Any) -> bool:
    """Whether ``name`` can only mean a repository of the Hub: ``org/name``, and no folder of this machine.

    Example:
        >>> is_hub_id("openai/clip-vit-base-patch16"), is_hub_id("../clip"), is_hub_id("/data/clip")
        (True, False, False)
    """
    if not isinstance(name, str) or name.startswith(".") or os.path.isdir(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def _is_cached(repo_id: str, cache_dir: str | os.PathLike | None) -> bool:
    """Whether a file of any state of the repository is on this machine."""
    cache = Path(cache_dir or constants.HF_HUB_CACHE).expanduser()
    return (cache / repo_folder_name(repo_id=repo_id, repo_type="model") / "snapshots").is_dir()


def _check_reachable(
    repo_id: str, revision: str | None, resolved: str | None, local_files_only: bool, token: str | bool | None
) -> None:
    """Say why a repository of which nothing is cached cannot be had: transformers takes its files for missing."""
    if local_files_only or constants.is_offline_mode():
        raise OSError(
            f"{repo_id}: there is no such folder, and offline only what is cached of the Hub can be read, not this: "
            "connect to the Hub, or give a folder."
        )
    if isinstance(resolved, ResolvedRevision) and resolved.initial != resolved.resolved:
        return  # the Hub has just answered; a commit is taken on trust
    try:
        HfApi().model_info(repo_id, revision=revision, token=token)
    except GatedRepoError:
        return  # it is there; who may read it is said when a file is asked for
    except RepositoryNotFoundError as error:
        raise OSError(
            f"{repo_id}: there is no such folder, and the Hub shows no such repository: check the name; if it is "
            "private, log in with `hf auth login`."
        ) from error
    except RevisionNotFoundError as error:
        raise OSError(f"{repo_id}: the repository has no revision {revision!a}.") from error
    except Exception as error:  # whatever it is of the many kinds of failures of a connection
        raise OSError(
            f"{repo_id}: there is no such folder, and the Hub could not be reached to look for a repository of that "
            f"name ({type(error).__name__}): try again when it can be, or give a folder."
        ) from error


def is_revision(name: Any) -> bool:
    """Whether ``name`` can be a branch, tag or commit: it becomes part of addresses and cache paths."""
    return isinstance(name, str) and _REVISION.fullmatch(name) is not None and ".." not in name


def _check_base(name: str, revision: str | None, source: str) -> None:
    """A repository of the Hub must not make us read this machine's folders."""
    if not is_hub_id(name):
        raise ValueError(
            f"{source} is {name!a}, which is not a Hub id; an adapter from the Hub may not name a local "
            "folder. Download it and write your own base model there."
        )
    if revision is not None and not is_revision(revision):
        raise ValueError(f"{source} comes with {revision!a}, which is no revision. Correct it there.")


def read_tensors(path: str | os.PathLike) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU."""
    try:
        return load_file(path)
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: truncated or corrupt ({error}). Save or download it again.") from error


def read_prototypes(path: str | os.PathLike, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """X and V of a `prototypes.safetensors`, which must be of ``shape`` ``(K, d)``."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in ("prototypes", "anchors"):  # by the header, before a wrong tensor fills the memory
                found = file.get_slice(name).get_shape() if name in file.keys() else None  # noqa: SIM118
                if found != list(shape):
                    raise ValueError(
                        f"{path}: {name!r} must have the shape {shape}, for the classes of "
                        f"{ORION_CONFIG_NAME}, and has {found}. Save the model again, or remove the file."
                    )
            prototypes, anchors = file.get_tensor("prototypes").float(), file.get_tensor("anchors").float()
    except SafetensorError as error:
        raise ValueError(f"{path}: truncated or corrupt ({error}). Save or download it again.") from error
    if not (prototypes.isfinite().all() and anchors.isfinite().all()):
        raise ValueError(f"{path}: its numbers are not finite. Save the model again, or remove the file.")
    return prototypes, anchors


def write_prototypes(path: str | os.PathLike, prototypes: Tensor, anchors: Tensor) -> None:
    """Write X and V as float32."""
    tensors = {"prototypes": prototypes, "anchors": anchors}
    save_file({name: tensor.detach().float().cpu().contiguous() for name, tensor in tensors.items()}, path)


@contextmanager
def staged_folder(folder: str | os.PathLike) -> Iterator[Path]:
    """Write a repository whole or not at all.

    Yields an empty temporary folder. When the block ends well its files take their place in ``folder`` by
    renaming; a new folder appears at once, in an existing one files are replaced one by one and others stay.
    When it raises, ``folder`` is as before.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: give a folder to save to.")
    existed = folder.is_dir()
    parent = folder if existed else folder.parent  # the same file system, so that renaming works
    parent.mkdir(parents=True, exist_ok=True)
    stage = Path(tempfile.mkdtemp(prefix=".saving-", dir=parent))
    try:
        stage.chmod(0o777 & ~_umask())
        yield stage
        if existed:
            _check_kind(stage, folder)
            new = {path.name for path in stage.iterdir()}
            for path in sorted(stage.iterdir()):
                os.replace(path, folder / path.name)
            if "config.json" in new:  # shards of an earlier, larger save would be loaded instead
                for path in folder.iterdir():
                    if _FULL_WEIGHTS.fullmatch(path.name) and path.name not in new:
                        path.unlink()
        else:
            os.rename(stage, folder)
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _check_kind(stage: Path, folder: Path) -> None:
    """transformers adds an adapter to the full model beside it, so the two must not share a folder."""
    for new, old in (("config.json", ADAPTER_CONFIG_NAME), (ADAPTER_CONFIG_NAME, "config.json")):
        if (stage / new).exists() and (folder / old).exists():
            raise ValueError(
                f"{folder} holds {old}: an adapter and full weights cannot share a folder. Save to another."
            )


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def weights_version(model: nn.Module) -> int:
    """A number that changes when the weights of ``model`` do: the key under which embeddings may be kept.

    Changes in place are seen by PyTorch's version counters, replaced tensors by their address, merging and
    switching of adapters by the state of their layers. What bypasses the counters (``parameter.data``) is
    seen by a sample of 64 values of each tensor.
    """
    parameters = [parameter.detach() for parameter in model.parameters() if not parameter.is_meta]
    counters = [(tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version) for tensor in parameters]
    adapters = [
        (layer.merged, layer.disable_adapters, tuple(layer.active_adapters), tuple(layer.scaling.items()))
        for layer in model.modules()
        if isinstance(layer, LoraLayer)
    ]
    samples = [tensor.reshape(-1)[:: max(1, tensor.numel() // 64)].float() for tensor in parameters]
    content = torch.cat([sample.to(samples[0].device) for sample in samples]).cpu().numpy().tobytes()
    return hash((tuple(counters), tuple(adapters), content))
