"""The loopback Hub, seen by the real client: every part that the push and pull tests lean on."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from hub_cards import check_card
from hub_server import UNKNOWN_TOKEN, HubServer
from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, constants
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

ADA, BOB = "hf_token_of_ada", "hf_token_of_bob"
WEIGHTS = bytes(range(256)) * 64
CARD = """---
license: mit
library_name: peft
pipeline_tag: zero-shot-image-classification
base_model: org/base
base_model_relation: adapter
tags: [orion, clip]
model-index:
- name: tiny
  results:
  - task: {type: zero-shot-image-classification}
    dataset: {name: EuroSAT, type: eurosat}
    metrics: [{type: accuracy, value: 0.5}]
---
# Tiny
"""


@pytest.fixture
def hub():
    with HubServer(users={ADA: "ada", BOB: "bob"}, orgs={"org": ["ada"]}) as hub:
        yield hub


@pytest.fixture
def ada(hub):
    return HfApi(endpoint=hub.endpoint, token=ADA)


@pytest.fixture
def bob(hub):
    return HfApi(endpoint=hub.endpoint, token=BOB)


@pytest.fixture
def anyone(hub):
    return HfApi(endpoint=hub.endpoint, token=False)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """The client sleeps whole seconds between retries: shorten them, and keep what it asked for."""
    asked: list[float] = []

    def sleep(seconds: float) -> None:
        asked.append(seconds)
        time.sleep(0.01)

    quick = SimpleNamespace(**{**vars(time), "sleep": sleep})
    for module in ("utils._http", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.time", quick)
    return asked


def adds(files: dict[str, bytes]) -> list[CommitOperationAdd]:
    return [CommitOperationAdd(path, data) for path, data in files.items()]


def push(api: HfApi, files: dict[str, bytes], repo: str = "org/tiny", **options):
    return api.create_commit(repo, adds(files), commit_message=options.pop("message", "push"), **options)


def statuses(hub: HubServer, method: str, part: str) -> list[int | None]:
    return [r.status for r in hub.requests if r.method == method and part in r.path]


def test_push_makes_one_commit_of_regular_and_lfs_files(hub, ada):
    url = ada.create_repo("org/tiny")
    assert (url.repo_id, str(url)) == ("org/tiny", f"{hub.endpoint}/org/tiny")
    files = {
        "README.md": CARD.encode(),
        "model.safetensors": WEIGHTS,
        "plots/a b.png": b"\x89PNG\0",
        "empty": b"",
    }
    commit = push(ada, files, message="first", commit_description="why")

    assert hub.files("org/tiny") == files
    assert [c.title for c in hub.commits("org/tiny")] == ["first", "initial commit"]
    assert hub.commits("org/tiny")[0].oid == commit.oid
    newest = ada.list_repo_commits("org/tiny")[0]
    assert (newest.title, newest.message, newest.authors) == ("first", "why", ["ada"])
    assert statuses(hub, "PUT", "/lfs/") == [200, 200]
    assert all(r.authorization == "ada" for r in hub.requests if not r.path.startswith("/lfs/"))
    assert all(r.authorization is None for r in hub.requests if r.path.startswith("/lfs/"))
    assert ADA not in repr(hub.requests)


def test_pushing_the_same_again_makes_no_commit_and_no_upload(hub, ada):
    ada.create_repo("org/tiny")
    files = {"config.json": b"{}", "model.safetensors": WEIGHTS}
    first = push(ada, files)
    before = len(hub.requests)
    assert push(ada, files).oid == first.oid
    assert len(hub.commits("org/tiny")) == 2
    assert not [r for r in hub.requests[before:] if r.method == "PUT" or "/commit/" in r.path]


def test_deletions(hub, ada):
    hub.add_repo("org/tiny", {"a.txt": b"a", "sub/b.txt": b"b", "sub/c.txt": b"c"})
    operations = [CommitOperationDelete("sub/"), *adds({"d.txt": b"d"})]
    ada.create_commit("org/tiny", operations, commit_message="move")
    assert hub.files("org/tiny") == {"a.txt": b"a", "d.txt": b"d"}
    with pytest.raises(EntryNotFoundError, match="doesn't exist"):
        ada.create_commit("org/tiny", [CommitOperationDelete("nope")], commit_message="x")


def test_create_and_delete_repositories(hub, ada, bob):
    ada.create_repo("mine")
    assert "models/ada/mine" in hub.repos  # a bare name belongs to the user
    with pytest.raises(HfHubHTTPError) as conflict:
        ada.create_repo("ada/mine")
    assert conflict.value.response.status_code == 409
    assert ada.create_repo("ada/mine", exist_ok=True).repo_id == "ada/mine"
    with pytest.raises(HfHubHTTPError) as forbidden:
        bob.create_repo("org/other")
    assert forbidden.value.response.status_code == 403
    ada.delete_repo("ada/mine")
    assert not ada.repo_exists("ada/mine")
    with pytest.raises(RepositoryNotFoundError):
        ada.delete_repo("ada/mine")


def test_branches_tags_and_pull_requests(hub, ada, bob):
    hub.add_repo("org/tiny", {"a.txt": b"main"})
    ada.create_branch("org/tiny", branch="merged")
    push(ada, {"b.txt": b"merged"}, revision="merged")
    ada.create_tag("org/tiny", tag="v1", revision="merged")
    proposed = push(bob, {"model.safetensors": WEIGHTS}, create_pr=True)  # bob may only read

    assert (proposed.pr_num, proposed.pr_revision) == (1, "refs/pr/1")
    assert hub.files("org/tiny") == {"a.txt": b"main"}
    assert hub.files("org/tiny", "v1") == hub.files("org/tiny", "merged") == {"a.txt": b"main", "b.txt": b"merged"}
    assert hub.files("org/tiny", "refs/pr/1") == {"a.txt": b"main", "model.safetensors": WEIGHTS}
    refs = ada.list_repo_refs("org/tiny", include_pull_requests=True)
    assert [b.name for b in refs.branches] == ["main", "merged"]
    assert ([t.name for t in refs.tags], [p.ref for p in refs.pull_requests]) == (["v1"], ["refs/pr/1"])
    with pytest.raises(HfHubHTTPError) as conflict:
        ada.create_branch("org/tiny", branch="merged")
    assert conflict.value.response.status_code == 409
    ada.create_branch("org/tiny", branch="merged", exist_ok=True)
    ada.delete_branch("org/tiny", branch="merged")
    with pytest.raises(RevisionNotFoundError):
        push(ada, {"c": b"c"}, revision="merged")


def test_trees_and_info(hub, ada):
    hub.add_repo("org/tiny", {"README.md": CARD.encode(), "sub/deep/w.bin": WEIGHTS, "sub/x.txt": b"x"})
    head = hub.commits("org/tiny")[0].oid
    assert [e.path for e in ada.list_repo_tree("org/tiny")] == [".gitattributes", "README.md", "sub"]
    below = list(ada.list_repo_tree("org/tiny", "sub", recursive=True, expand=True))
    assert [e.path for e in below] == ["sub/deep", "sub/deep/w.bin", "sub/x.txt"]
    assert (below[1].size, below[1].lfs.size, below[1].last_commit.oid) == (len(WEIGHTS), len(WEIGHTS), head)
    with pytest.raises(EntryNotFoundError):
        list(ada.list_repo_tree("org/tiny", "nope"))
    found = ada.get_paths_info("org/tiny", ["sub", "README.md", "nope"])
    assert [e.path for e in found] == ["sub", "README.md"]

    info = ada.model_info("org/tiny", files_metadata=True, securityStatus=True)
    assert (info.sha, info.private, info.library_name) == (head, False, "peft")
    assert info.security_repo_status == {"scansDone": True, "filesWithIssues": []}
    sizes = {s.rfilename: (s.size, s.lfs and s.lfs.size) for s in info.siblings}
    assert sizes["sub/deep/w.bin"] == (len(WEIGHTS), len(WEIGHTS)) and sizes["sub/x.txt"] == (1, None)
    assert ada.model_info("org/tiny", revision=head[:8]).sha == head
    with pytest.raises(RevisionNotFoundError):
        ada.model_info("org/tiny", revision="nope")


def test_list_models_by_author_and_tag_with_cards(hub, ada, anyone):
    hub.add_repo("org/tiny", {"README.md": CARD.encode()})
    hub.add_repo("org/plain", {"config.json": b"{}"})
    hub.add_repo("org/hidden", {"README.md": CARD.encode()}, private=True)
    hub.add_repo("bob/tiny", {"README.md": CARD.encode()})

    def ids(api, **query):
        return sorted(model.id for model in api.list_models(**query))

    assert ids(anyone, author="org") == ["org/plain", "org/tiny"]
    assert ids(ada, author="org", filter=["orion", "clip"]) == ["org/hidden", "org/tiny"]
    assert ids(anyone, filter="base_model:adapter:org/base") == ["bob/tiny", "org/tiny"]
    (model,) = anyone.list_models(author="org", filter="orion", cardData=True, full=True)
    assert model.card_data.base_model == "org/base"
    assert model.card_data.eval_results[0].metric_value == 0.5
    assert "README.md" in [s.rfilename for s in model.siblings]


def test_download_with_etags_and_ranges(hub, anyone, tmp_path):
    oid = hub.add_repo("org/tiny", {"sub/config.json": b'{"a": 1}', "model.safetensors": WEIGHTS})
    path = Path(anyone.hf_hub_download("org/tiny", "model.safetensors", cache_dir=tmp_path))
    assert path.read_bytes() == WEIGHTS and path.parent.name == oid
    folder = Path(anyone.snapshot_download("org/tiny", cache_dir=tmp_path))
    assert (folder / "sub/config.json").read_bytes() == b'{"a": 1}'
    assert len(statuses(hub, "GET", "/cdn/")) == 1  # the second call found the weights in the cache

    def get(file: str, span: str):
        url = f"{hub.endpoint}/org/tiny/resolve/main/{file}"
        return httpx2.get(url, headers={"Range": f"bytes={span}"}, follow_redirects=True)

    for file, data in (("model.safetensors", WEIGHTS), ("sub/config.json", b'{"a": 1}')):
        part = get(file, "2-5")
        assert (part.status_code, part.content) == (206, data[2:6])
        assert part.headers["Content-Range"] == f"bytes 2-5/{len(data)}"
        assert get(file, "3-").content == data[3:]
        assert get(file, "-3").content == data[-3:]
        beyond = get(file, f"{len(data)}-")
        assert (beyond.status_code, beyond.headers["Content-Range"]) == (416, f"bytes */{len(data)}")


def test_private_repositories(hub, ada, bob, anyone, tmp_path):
    ada.create_repo("org/secret", private=True)
    push(ada, {"a.txt": b"a", "model.safetensors": WEIGHTS}, "org/secret")
    assert Path(ada.hf_hub_download("org/secret", "model.safetensors", cache_dir=tmp_path / "ada")).exists()
    assert {r.authorization for r in hub.requests if r.path.startswith("/cdn/")} == {None}  # no token off the Hub

    stranger = HfApi(endpoint=hub.endpoint, token="hf_wrong")
    for api, status in ((anyone, 401), (stranger, 401), (bob, 404)):
        with pytest.raises(RepositoryNotFoundError) as missing:
            api.model_info("org/secret")
        assert missing.value.response.status_code == status
        with pytest.raises(RepositoryNotFoundError):
            api.hf_hub_download("org/secret", "a.txt", cache_dir=tmp_path / "no")
        with pytest.raises(RepositoryNotFoundError):
            push(api, {"b.txt": b"b"}, "org/secret")
    assert any(r.authorization == UNKNOWN_TOKEN for r in hub.requests)
    assert list(hub.files("org/secret")) == ["a.txt", "model.safetensors"]
    guessed = next(r.path for r in hub.requests if r.path.startswith("/cdn/"))
    assert httpx2.get(hub.endpoint + guessed).status_code == 403  # a signed URL needs its signature


def test_errors_have_the_hub_codes(hub, ada, bob, anyone, tmp_path):
    oid = hub.add_repo("org/tiny", {"a.txt": b"a"})
    hub.add_repo("org/gated", {"a.txt": b"a"}, gated=True)
    with pytest.raises(EntryNotFoundError) as missing:
        anyone.hf_hub_download("org/tiny", "nope.txt", cache_dir=tmp_path)
    assert missing.value.response.headers["X-Repo-Commit"] == oid
    with pytest.raises(RevisionNotFoundError):
        anyone.hf_hub_download("org/tiny", "a.txt", revision="nope", cache_dir=tmp_path)
    for name in ("org/nope", "nope"):
        with pytest.raises(RepositoryNotFoundError):
            anyone.hf_hub_download(name, "a.txt", cache_dir=tmp_path)
    for api in (anyone, bob):
        with pytest.raises(GatedRepoError):
            api.hf_hub_download("org/gated", "a.txt", cache_dir=tmp_path)
    for api, status in ((bob, 403), (anyone, 401)):
        with pytest.raises(HfHubHTTPError) as refused:
            push(api, {"b.txt": b"b"})
        assert refused.value.response.status_code == status
    assert ada.whoami()["orgs"][0]["name"] == "org" and bob.whoami()["name"] == "bob"
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        ada.whoami(token="hf_wrong")
    assert hub.files("org/tiny") == {"a.txt": b"a"}


def test_what_was_not_uploaded_or_leaves_the_repository_is_not_committed(hub):
    hub.add_repo("org/tiny", {"a.txt": b"a"})
    lines = (
        {"key": "lfsFile", "value": {"path": "w.bin", "oid": "0" * 64, "size": 3}},
        {"key": "file", "value": {"path": "../b.txt", "content": "Yg==", "encoding": "base64"}},
        {"key": "unheard-of", "value": {"path": "b.txt"}},
    )
    for line in lines:
        body = "\n".join(json.dumps(x) for x in ({"key": "header", "value": {"summary": "x"}}, line))
        url = f"{hub.endpoint}/api/models/org/tiny/commit/main"
        answer = httpx2.post(url, content=body, headers={"Authorization": f"Bearer {ADA}"})
        assert answer.status_code == 400 and "error" in answer.json()
    assert hub.files("org/tiny") == {"a.txt": b"a"}


def test_card_metadata_is_validated(hub, ada):
    ada.create_repo("org/tiny")
    assert check_card(CARD) == ([], [])
    wrong = {
        "license: mit": ("license: mine", '"license" must be one of'),
        "tags: [orion, clip]": ("tags: orion", '"tags" must be an array'),
        "base_model: org/base": ("base_model: /home/me/base", '"base_model" with value'),
        "{type: accuracy, value: 0.5}": ("{type: accuracy}", r'metrics\[0\].value" is required'),
        "{name: EuroSAT, type: eurosat}": ("{name: EuroSAT}", 'dataset.type" is required'),
        "license: ": ("license: [", "YAML"),
    }
    for old, (new, message) in wrong.items():
        with pytest.raises(ValueError, match=message):
            push(ada, {"README.md": CARD.replace(old, new).encode()})
    with pytest.warns(UserWarning, match="empty or missing yaml metadata"):
        push(ada, {"README.md": b"# No metadata"})


def test_only_one_of_two_commits_on_the_same_parent_is_made(hub, ada):
    parent = hub.add_repo("org/tiny", {"a.txt": b"a"})
    outcomes = []

    def contend(number: int) -> None:
        try:
            push(
                ada,
                {f"{number}.txt": b"x", "model.safetensors": WEIGHTS + bytes([number])},
                parent_commit=parent,
            )
            outcomes.append(number)
        except HfHubHTTPError as error:
            assert error.response.status_code == 412 and "A commit has happened since" in str(error)

    threads = [threading.Thread(target=contend, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = outcomes
    assert hub.files("org/tiny") == {
        "a.txt": b"a",
        f"{winner}.txt": b"x",
        "model.safetensors": WEIGHTS + bytes([winner]),
    }


def test_commits_without_a_parent_lose_no_files(hub, ada):
    hub.add_repo("org/tiny", {"a.txt": b"a"})
    threads = [threading.Thread(target=push, args=(ada, {f"{n}.txt": b"x"})) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(hub.files("org/tiny")) == {"a.txt", *(f"{n}.txt" for n in range(8))}
    assert len(hub.commits("org/tiny")) == 10


def test_client_retries_uploads_through_faults(hub, ada, short_waits):
    ada.create_repo("org/tiny")
    hub.faults.add("PUT", "/lfs/", 503)
    hub.faults.add("PUT", "/lfs/", "cut-upload", times=2)
    hub.faults.add("POST", "/preupload/", 429, seconds=7)
    hub.faults.add("POST", "objects/batch", "slow", seconds=0.2)
    big = WEIGHTS * 256  # 4 MB: more than the sockets buffer, so the cut is felt in the middle
    started = time.monotonic()
    push(ada, {"model.safetensors": big})
    assert time.monotonic() - started > 0.2
    assert hub.files("org/tiny") == {"model.safetensors": big}
    assert statuses(hub, "PUT", "/lfs/") == [503, None, None, 200]
    assert short_waits[0] == 8  # Retry-After and the client's own second
    assert hub.faults.pending == []


def test_failed_pushes_leave_the_old_state(hub, ada):
    hub.add_repo("org/tiny", {"a.txt": b"old"})
    new = {"a.txt": b"new", "model.safetensors": WEIGHTS}
    for method, path, kind in (
        ("POST", "/commit/", 503),
        ("POST", "/commit/", "cut-upload"),
        ("PUT", "/lfs/", 403),
        ("PUT", "/lfs/", "cut-upload"),
    ):
        hub.faults.add(method, path, kind, times=None)
        with pytest.raises((HfHubHTTPError, httpx2.HTTPError, RuntimeError)):
            push(ada, new)
        hub.faults.clear()
        assert hub.files("org/tiny") == {"a.txt": b"old"}
        hub.repos["models/org/tiny"].lfs.clear()
    push(ada, new)
    assert hub.files("org/tiny") == new
    with pytest.raises(ValueError, match="Unknown fault"):
        hub.faults.add("GET", "", "typo")


def test_a_lost_answer_is_a_commit_nobody_heard_of(hub, ada):
    hub.add_repo("org/tiny", {"a.txt": b"old"})
    hub.faults.add("POST", "/commit/", "cut-answer")
    with pytest.raises(httpx2.HTTPError):
        push(ada, {"a.txt": b"new"})
    assert hub.files("org/tiny") == {"a.txt": b"new"}


def test_cut_downloads_resume_or_leave_nothing(hub, anyone, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1024)
    hub.add_repo("org/tiny", {"model.safetensors": WEIGHTS})
    hub.faults.add("GET", "/cdn/", "cut-download")
    path = Path(anyone.hf_hub_download("org/tiny", "model.safetensors", cache_dir=tmp_path / "a"))
    assert path.read_bytes() == WEIGHTS
    assert [r.range for r in hub.requests if "/cdn/" in r.path] == [None, f"bytes={len(WEIGHTS) // 2}-"]

    hub.faults.add("GET", "/cdn/", "reset", times=None)
    with pytest.raises(httpx2.HTTPError):
        anyone.hf_hub_download("org/tiny", "model.safetensors", cache_dir=tmp_path / "b")
    assert not list((tmp_path / "b").rglob("snapshots/*/model.safetensors"))


def test_datasets_have_their_own_names(hub, ada, tmp_path):
    hub.add_repo("org/same", {"a.txt": b"model"})
    ada.create_repo("org/same", repo_type="dataset")
    files = {"train.parquet": WEIGHTS, "a.txt": b"dataset"}
    ada.create_commit("org/same", adds(files), commit_message="data", repo_type="dataset")
    assert hub.files("datasets/org/same") == files and hub.files("org/same") == {"a.txt": b"model"}
    folder = Path(ada.snapshot_download("org/same", repo_type="dataset", cache_dir=tmp_path))
    assert (folder / "train.parquet").read_bytes() == WEIGHTS
    assert [d.id for d in ada.list_datasets(author="org")] == ["org/same"]
    assert ada.dataset_info("org/same").sha == hub.commits("datasets/org/same")[0].oid


# One process pushes as transformers pushes and loads what it pushed; a second loads it from the cache alone.
PUSH = """
from transformers import CLIPTextConfig, CLIPTextModelWithProjection
sizes = dict(vocab_size=10, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
config = CLIPTextConfig(**sizes, projection_dim=4, eos_token_id=9, bos_token_id=0, pad_token_id=1)
pushed = CLIPTextModelWithProjection(config).eval()
pushed.push_to_hub("org/tiny", private=True)
"""
LOAD = """
import json, torch
from transformers import CLIPTextModelWithProjection
def embed(model):
    with torch.inference_mode():
        return model(torch.tensor([[0, 5, 7, 9]])).text_embeds[0].tolist()
print(json.dumps([embed(CLIPTextModelWithProjection.from_pretrained("org/tiny"))]))
"""


def test_transformers_pushes_to_the_hub_loads_from_it_and_then_offline(hub):
    def run(code: str, **variables: str) -> list[list[float]]:
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env={**env, **variables}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert ADA not in done.stdout + done.stderr
        return [json.loads(line)[0] for line in done.stdout.splitlines() if line.startswith("[[")]

    env = hub.env(token=ADA)
    (online, pushed) = run(PUSH + LOAD + "print(json.dumps([embed(pushed)]))")
    assert online == pushed
    assert {"config.json", "model.safetensors"} <= set(hub.files("org/tiny"))
    assert hub.repos["models/org/tiny"].private
    seen = len(hub.requests)
    assert run(LOAD, HF_HUB_OFFLINE="1") == [online]
    assert len(hub.requests) == seen
