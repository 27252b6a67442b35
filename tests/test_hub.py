"""Push and pull through the loopback Hub: the real client, real sockets, processes with a fresh HF_HOME.

One process does all pushes (importing transformers takes seconds) and runs the code that a test sends it; whatever it
prints, raises or writes is searched for its token.
"""

import itertools
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hub_server import HubServer

SENTINEL, BOB = "hf_sentinelOfAda0123456789", "hf_tokenOfBob"
ADAPTER_FILES = {
    "README.md", "adapter_config.json", "adapter_model.safetensors", "orion_config.json", "prototypes.safetensors",
    "processor_config.json", "tokenizer.json", "tokenizer_config.json", "gram_heatmaps.png", "training_log.jsonl",
    "results.json",
}  # fmt: skip
MERGED_FILES = ADAPTER_FILES - {"adapter_config.json", "adapter_model.safetensors"} | {
    "config.json",
    "model.safetensors",
}

WORKER = """
import contextlib, io, json, os, sys, time, traceback
answers, scope = sys.stdout, {"log": []}
real_sleep = time.sleep
time.sleep = lambda seconds: (scope["log"].append(seconds), real_sleep(min(seconds, 0.02)))[1]
for line in sys.stdin:
    output, error = io.StringIO(), None
    scope["result"] = None
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            exec(json.loads(line), scope)
        except BaseException as failure:
            traceback.print_exc()
            error = [type(failure).__name__, str(failure)]
    answer = {"result": scope["result"], "error": error, "output": output.getvalue()}
    print(json.dumps(answer), file=answers, flush=True)
"""

# Two states of one adapter (old, new) and an adapter of another task, each as a training run leaves its folder.
SETUP = """
import json, shutil
from pathlib import Path
from dataclasses import replace
from tiny_clip_folder import TASK, train_a_little
from orion_hf import OrionCLIPTextModel, cli
from orion_hf.card import write_heatmap
from orion_hf.hub import PushError, list_repositories, push_folder, push_model
from orion_hf.tasks import OrionTask
import torch

def adapter(task, scale):
    model = OrionCLIPTextModel.from_pretrained("org/base")
    model.task = task
    model.add_lora(rank=2)
    train_a_little(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(scale)
    return model

work = Path(WORK)
land = OrionTask.from_name("eurosat")
for name, task, scale in (("old", TASK, 1.0), ("new", TASK, 2.0), ("all/deep/land", land, 1.0)):
    model = adapter(task, scale)
    folder = work / name
    model.save_pretrained(folder)
    (folder / "training_log.jsonl").write_text('{"step": 1, "orthogonality": 0.5}\\n')
    top1 = {"CLIP": 41.0, "ORION": {"mean": 50.0 + scale, "interval": 0.5}}
    (folder / "results.json").write_text(json.dumps({"top1": top1, "protocol": "one seed", "command": "evaluate"}))
    (folder / "checkpoint-3").mkdir()
    (folder / "checkpoint-3" / "adapter_config.json").write_text("{}")
    (folder / "private-notes.txt").write_text("not for others")
    (folder / ".env").write_text("KEY=1")
    write_heatmap(folder, folder / "gram_heatmaps.png")  # once, not at every push
shutil.copytree(work / "old", work / "all" / "pets")
OrionCLIPTextModel.from_pretrained(work / "old").save_pretrained(work / "full", merged=True)
result = True
"""


class Client:
    """A process that talks to the Hub with a token and runs what it is sent."""

    def __init__(self, hub: HubServer, token: str, root: Path, work: Path):
        env = hub.env(token=token)
        env["PYTHONPATH"] = f"{root / 'tests'}:{env['PYTHONPATH']}"
        self.home, self.token = Path(env["HF_HOME"]), token
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env=env,
            cwd=work,
            text=True,
            stdin=-1,
            stdout=-1,
            stderr=subprocess.STDOUT,
        )

    def run(self, code: str) -> SimpleNamespace:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line.startswith("{"), line + self.process.stdout.read()
        assert self.token not in line
        return SimpleNamespace(**json.loads(line))

    def push(self, folder: str, repo: str = "org/x", options: str = "") -> SimpleNamespace:
        return self.run(
            f"log.clear(); p = push_folder(work / {folder!r}, {repo!r}, {options})\n"
            "result = [p.changed, p.commit, p.url]"
        )


@pytest.fixture(scope="module")
def hub():
    with HubServer(users={SENTINEL: "ada", BOB: "bob"}, orgs={"org": ["ada"]}) as server:
        yield server


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return tmp_path_factory.mktemp("work")


@pytest.fixture(scope="module")
def client(hub, root, work):
    client = Client(hub, SENTINEL, root, work)
    seeded = client.run(
        "from pathlib import Path; from tiny_clip_folder import save_tiny_clip\n"
        f"result = [str(save_tiny_clip(Path({str(work)!r}) / f'base{{seed}}', seed=seed)) for seed in (1, 2)]"
    )
    hub.add_repo("org/base", seeded.result[0])
    made = client.run(SETUP.replace("WORK", repr(str(work))))
    assert made.result, made.output
    yield client
    command_line = Path(f"/proc/{client.process.pid}/cmdline").read_bytes()
    assert client.process.stdin
    client.process.stdin.close()
    client.process.wait(timeout=60)
    # After all pushes and faults, the token is in no file, no repository and no command line.
    files = [path for folder in (work, client.home) for path in folder.rglob("*") if path.is_file()]
    blobs = [blob.data for stored in hub.repos.values() for ref in stored.refs.values() for blob in ref.files.values()]
    uploads = [data for stored in hub.repos.values() for data in stored.lfs.values()]
    assert files and blobs and uploads
    for data in [
        command_line,
        repr(hub.requests).encode(),
        *(path.read_bytes() for path in files),
        *blobs,
        *uploads,
    ]:
        assert SENTINEL.encode() not in data


@pytest.fixture(scope="module")
def old_files(hub, client):
    pushed = client.push("old", "org/first")
    assert pushed.result and pushed.result[0], pushed.output
    return hub.files("org/first")


@pytest.fixture
def repo(hub, old_files, number=itertools.count()):  # noqa: B008 (one counter is what is wanted)
    """The name of a repository that holds the adapter ``old``."""
    name = f"org/seeded-{next(number)}"
    hub.add_repo(name, old_files)
    yield name
    hub.faults.clear()


def one_line(answer: SimpleNamespace, kind: str = "PushError") -> str:
    assert answer.error is not None, answer.output
    assert answer.error[0] == kind, answer.output
    message = answer.error[1]
    assert "\n" not in message and 20 < len(message) < 300
    return message


def posts(hub: HubServer, since: int) -> list[str]:
    return [request.path for request in hub.requests[since:] if request.method in ("POST", "PUT")]


def test_a_push_is_one_commit_of_our_files_and_no_others(hub, old_files):
    repo = "org/first"
    assert set(old_files) == ADAPTER_FILES
    assert [commit.title for commit in hub.commits(repo)][-2:] == ["ORION adapter for pets", "initial commit"]
    card = hub.files(repo)["README.md"].decode()
    assert "base_model: org/base\n" in card and "library_name: peft" in card and "value: 51.0" in card
    base = hub.commits("org/base")[-2].oid
    assert json.loads(hub.files(repo)["adapter_config.json"])["revision"] == base
    assert f'revision="{base}"' in card


def test_pushing_twice_makes_no_commit_and_sends_nothing(hub, client, old_files):
    repo, seen = "org/first", len(hub.requests)
    again = client.push("old", repo)
    assert again.result == [False, hub.commits(repo)[0].oid, f"{hub.endpoint}/{repo}/tree/main"]
    assert posts(hub, seen) == [] and len(hub.commits(repo)) == 2
    assert client.push("new", repo).result[0] is True
    assert len(hub.commits(repo)) == 3


def test_full_weights_replace_an_adapter_and_strangers_files_stay(hub, client, repo):
    hub.add_repo(repo, {"examples/a.txt": b"theirs", "LICENSE": b"theirs"})
    assert client.push("full", repo).result[0]
    assert set(hub.files(repo)) == MERGED_FILES - {"training_log.jsonl", "results.json"} | {
        "examples/a.txt",
        "LICENSE",
    }
    assert "library_name: transformers" in hub.files(repo)["README.md"].decode()


def test_own_text_in_the_card_is_kept(hub, client, work, repo):
    card = "---\ntags: [orion]\n---\n# Mine\n"
    (work / "new" / "README.md").write_text(card)
    assert client.push("new", repo).result[0]
    assert hub.files(repo)["README.md"].decode() == card
    (work / "new" / "README.md").write_text("---\ntags: orion\n---\n# Wrong\n")
    assert "array of strings" in one_line(client.push("new", repo))
    (work / "new" / "README.md").unlink()


def test_both_kinds_together(hub, client, repo):
    assert client.push("old", repo, "merged=True").result[0]
    assert set(hub.files(repo)) == ADAPTER_FILES and set(hub.files(repo, "merged")) == MERGED_FILES
    assert 'revision="merged"' in hub.files(repo)["README.md"].decode()
    assert 'revision="merged"' in hub.files(repo, "merged")["README.md"].decode()
    assert client.push("old", repo, "merged=True").result[0] is False
    late = client.push("new", repo)
    assert late.result[0] and "are of an earlier push" in late.output
    assert "without revision" in one_line(client.push("old", repo, "merged=True, create_pr=True"), "ValueError")
    assert "full weights already" in one_line(client.push("full", repo, "merged=True"), "ValueError")


def test_push_from_memory_and_while_saving(hub, client):
    pushed = client.run(
        "model = OrionCLIPTextModel.from_pretrained(work / 'old')\n"
        "result = model.push_to_hub('org/memory', merged=True, private=True, commit_message='first').changed\n"
        "model.save_pretrained(work / 'saved', push_to_hub=True, repo_id='while-saving', private=True)"
    )
    assert pushed.result is True, pushed.output
    assert hub.repos["models/org/memory"].private and hub.repos["models/ada/while-saving"].private
    assert set(hub.files("org/memory")) == ADAPTER_FILES - {"training_log.jsonl", "results.json"}
    assert hub.commits("org/memory")[0].title == "first"
    assert hub.files("org/memory", "merged").keys() >= {"model.safetensors"}
    assert hub.files("ada/while-saving").keys() == hub.files("org/memory").keys()


def test_branches_and_pull_requests(hub, client, repo):
    before = hub.files(repo)
    assert client.push("new", repo, "revision='try'").result[0]
    assert hub.files(repo) == before and hub.files(repo, "try") != before
    proposed = client.push("new", repo, "create_pr=True")
    assert proposed.result[2].endswith("/discussions/1")
    assert hub.files(repo) == before
    assert hub.files(repo, "refs/pr/1")["adapter_model.safetensors"] != before["adapter_model.safetensors"]
    hub.faults.add("POST", "/commit/", "cut-answer")
    assert "see whether the pull request" in one_line(client.push("new", repo, "create_pr=True"))
    assert "cannot be a branch" in one_line(client.push("new", repo, "revision='../x'"), "ValueError")


PASSING = [
    ("GET", "/api/models/", 503, 2),
    ("GET", "/api/models/", "cut-answer", 1),
    ("POST", "/preupload/", 503, 2),
    ("POST", "/preupload/", "cut-upload", 1),
    ("POST", "objects/batch", 503, 1),
    ("PUT", "/lfs/", 503, 2),
    ("PUT", "/lfs/", "cut-upload", 2),
    ("PUT", "/lfs/", "cut-answer", 1),
    ("POST", "/commit/", 503, 3),
    ("POST", "/commit/", 429, 1),
    ("POST", "/commit/", "cut-upload", 2),
    ("POST", "/commit/", "cut-answer", 1),
    ("POST", "/commit/", "reset", 1),
    ("POST", "/commit/", "slow", 1),
]


@pytest.mark.parametrize(("method", "path", "kind", "times"), PASSING)
def test_passing_faults_are_overcome(hub, client, repo, method, path, kind, times):
    old = hub.files(repo)
    hub.repos[f"models/{repo}"].lfs.clear()  # so that the push uploads
    hub.faults.add(method, path, kind, times, seconds=0.3 if kind == "slow" else 5)
    pushed = client.push("new", repo)
    assert pushed.result and pushed.result[0], pushed.output
    assert hub.faults.pending == []
    new = hub.files(repo)
    assert new.keys() == old.keys() and new["adapter_model.safetensors"] != old["adapter_model.safetensors"]
    assert len(hub.commits(repo)) == 3, "one commit, even if the Hub's answer was lost"
    assert pushed.result[1] == hub.commits(repo)[0].oid
    if kind == 429:
        assert max(client.run("result = log").result) >= 5  # as long as the Hub asked for


LASTING = [
    ("GET", "/api/models/", 503, "answers 503"),
    ("POST", "/preupload/", 503, "answers 503"),
    ("POST", "objects/batch", "cut-upload", "connection broke"),
    ("PUT", "/lfs/", 403, "may not"),
    ("PUT", "/lfs/", "cut-upload", "connection broke"),
    ("POST", "/commit/", 500, "answers 500"),
    ("POST", "/commit/", 401, "hf auth login"),
    ("POST", "/commit/", 403, "may not"),
    ("POST", "/commit/", 429, "too many requests"),
    ("POST", "/commit/", "cut-upload", "connection broke"),
    ("*", "", "reset", "connection broke"),
]


@pytest.mark.parametrize(("method", "path", "kind", "says"), LASTING)
def test_lasting_faults_are_one_clear_line_and_leave_the_old_state(hub, client, repo, method, path, kind, says):
    old = hub.files(repo)
    hub.repos[f"models/{repo}"].lfs.clear()
    hub.faults.add(method, path, kind, times=None)
    assert says in one_line(client.push("new", repo))
    hub.faults.clear()
    assert hub.files(repo) == old and len(hub.commits(repo)) == 2
    assert client.push("new", repo).result[0]


def test_a_commit_whose_answers_are_always_lost_is_found(hub, client, repo):
    hub.faults.add("POST", "/commit/", "cut-answer", times=None)
    pushed = client.push("new", repo)
    assert pushed.result[:2] == [True, hub.commits(repo)[0].oid] and len(hub.commits(repo)) == 3


def test_the_loser_of_a_race_gets_a_clear_answer(hub, client, repo):
    hub.faults.add("POST", "/commit/", "slow", seconds=0.7)
    answers = []
    push = threading.Thread(target=lambda: answers.append(client.push("new", repo)))
    push.start()
    deadline = time.monotonic() + 30
    while hub.faults.pending and time.monotonic() < deadline:
        time.sleep(0.01)
    hub.add_repo(repo, {"theirs.txt": b"theirs"})
    push.join()
    assert "somebody else pushed" in one_line(answers[0])
    assert "theirs.txt" in hub.files(repo) and len(hub.commits(repo)) == 3
    assert client.push("new", repo).result[0]
    assert "theirs.txt" in hub.files(repo)


def test_many_pushes_at_once_lose_nothing(hub, client, repo):
    hub.add_repo(repo, {"theirs.txt": b"theirs"})
    answer = client.run(f"""
from concurrent.futures import ThreadPoolExecutor
def attempt(number):
    try:
        return push_folder(work / ("new" if number % 2 else "old"), {repo!r}).changed
    except PushError as error:
        return str(error)
with ThreadPoolExecutor(4) as pool:
    result = list(pool.map(attempt, range(8)))
""")
    assert answer.result is not None, answer.output
    lost = [outcome for outcome in answer.result if isinstance(outcome, str)]
    assert all("somebody else pushed" in line for line in lost)
    made = sum(outcome is True for outcome in answer.result)
    # A push that lost the Hub's answer and then finds its files there cannot know that another one, of the same files,
    # has put them there: it may count that commit as its own.
    assert 1 <= len(hub.commits(repo)) - 3 <= made
    files = hub.files(repo)
    assert set(files) == ADAPTER_FILES | {"theirs.txt"}
    assert len({hub_state(commit) for commit in hub.commits(repo)[:-3]}) <= 2, "every commit is old or new, whole"


def hub_state(commit) -> tuple[str, ...]:
    return tuple(blob.oid for path, blob in sorted(commit.files.items()) if path in ADAPTER_FILES)


def test_refusals(hub, client, repo, work):
    assert "is public" in one_line(client.push("old", repo, "private=True"))
    assert "does not accept the token" in one_line(client.push("old", "org/none", "token='hf_wrong'"))
    assert "may not do that" in one_line(client.push("old", "else/none"))
    assert "may not do that" in one_line(client.push("new", repo, f"token={BOB!r}"))
    assert "does not exist" in one_line(client.push("old", "org/none", "create_pr=True"))
    assert "no token" in one_line(client.push("old", "org/none", "token=False"))
    assert "copy it again" in one_line(client.push("old", "org/none", f"token='{SENTINEL[:9]}\\n{SENTINEL[9:]}'"))
    assert "not a folder" in one_line(client.push("nothing", "org/none"), "ValueError")
    assert "models/org/none" not in hub.repos

    moved = client.run(
        "shutil.copytree(work / 'old', work / 'local')\n"
        "path = work / 'local' / 'adapter_config.json'\n"
        "path.write_text(json.dumps(json.loads(path.read_text()) | {'base_model_name_or_path': str(work)}))\n"
        "push_folder(work / 'local', 'org/none')"
    )
    assert "is not on the Hub" in one_line(moved, "ValueError")
    secret = client.run(
        "import os; shutil.copytree(work / 'old', work / 'leak')\n"
        "(work / 'leak' / 'results.json').write_text(\n"
        "    json.dumps({'top1': {'ORION': 50}, 'command': 'HF_TOKEN=' + os.environ['HF_TOKEN']}))\n"
        "try:\n    push_folder(work / 'leak', 'org/none')\n"
        "finally:\n    shutil.rmtree(work / 'leak')"
    )
    assert "contains your token" in one_line(secret)
    linked = client.run(
        "shutil.copytree(work / 'old', work / 'linked'); path = work / 'linked' / 'tokenizer.json'\n"
        "path.unlink(); path.symlink_to('/etc/hostname'); push_folder(work / 'linked', 'org/none')"
    )
    assert "leaves the folder" in one_line(linked, "ValueError")


def test_the_commands(hub, client):
    def command(*argv: str) -> SimpleNamespace:
        return client.run(f"import os; os.chdir(work); result = cli.main({list(argv)!r})")

    pushed = command("push", "all", "org", "--all", "--private", "--license", "mit")
    assert pushed.result == 0, pushed.output
    assert [line.split()[:2] for line in pushed.output.splitlines() if "/tree/" in line] == [
        [f"{hub.endpoint}/org/orion-eurosat/tree/main", "pushed"],
        [f"{hub.endpoint}/org/orion-pets/tree/main", "pushed"],
    ]
    assert hub.repos["models/org/orion-pets"].private
    assert "license: mit" in hub.files("org/orion-eurosat")["README.md"].decode()
    assert command("push", "all/pets", "org/orion-pets", "--private", "--license", "mit").output.count("unchanged") == 1

    hub.add_repo("org/odd", {"README.md": b'---\ntags: [orion]\norion: {task: "a\\x1b[31m", classes: many}\n---\n'})
    listed = command("list", "--author", "org")
    rows = {line.split()[0]: line.split() for line in listed.output.splitlines()}
    assert rows["org/orion-eurosat"] == [
        "org/orion-eurosat",
        "(private)",
        "eurosat",
        "org/base",
        "10",
        "51.00",
    ]
    assert rows["org/odd"] == ["org/odd", "a\\x1b[31m"] and "org/base" not in rows
    as_json = [json.loads(line) for line in command("list", "--author", "org", "--json").output.splitlines()]
    assert {entry["repo_id"]: entry["top1"] for entry in as_json}["org/orion-pets"] == 51.0
    assert "has no ORION" in command("list", "--author", "bob").output

    assert command("push", "all", "org/x", "--all").result == 2
    failed = command("push", "nothing", "org/x")
    assert failed.result == 2 and failed.output.count("\n") == 1
    refused = client.run(f"cli.main(['push', 'all/pets', 'org/x', '--token', {SENTINEL[:7]!r} + {SENTINEL[7:]!r}])")
    assert refused.error == ["SystemExit", "2"] and "revoke" in refused.output


def test_cut_downloads_leave_no_usable_looking_file(hub, client, repo):
    load = f"result = OrionCLIPTextModel.from_pretrained({repo!r}, cache_dir=work / 'cut').class_names"
    hub.faults.add("GET", "/cdn/", "reset", times=None)
    failed = client.run(load)
    assert failed.error is not None
    hub.faults.clear()
    cached = client.run("result = [str(path) for path in (work / 'cut').rglob('snapshots/*/*.safetensors')]").result
    assert cached == []
    assert client.run(load).result == ["cat", "dog", "sea lion"]


PULL = """
import json, sys, tempfile, os, warnings
if PEFT_IS_MISSING:
    sys.modules["peft"] = None
import torch
from PIL import Image
from transformers import (
    AutoModelForZeroShotImageClassification, AutoProcessor, CLIPModel, CLIPTextModelWithProjection, logging, pipeline)
logging.set_verbosity_error()
found = {}
image = Image.new("RGB", (20, 20), (200, 30, 10))
os.chdir(tempfile.mkdtemp())
image.save("image.jpg")
where = WHERE
processor = AutoProcessor.from_pretrained(REPO, **where)
found["processor"] = type(processor).__name__
inputs = processor.tokenizer(["a photo of a cat."], return_tensors="pt")
@torch.inference_mode()
def embed(model):
    text = model.text_projection(model.text_model(**inputs).pooler_output)
    return [round(x, 4) for x in torch.nn.functional.normalize(text, dim=-1)[0].tolist()]
found["text"] = embed(CLIPTextModelWithProjection.from_pretrained(REPO, **where))
found["auto"] = embed(AutoModelForZeroShotImageClassification.from_pretrained(REPO, **where))
stock = pipeline("zero-shot-image-classification", model=REPO, **where)
found["pipeline"] = embed(stock.model)
labels = ["cat", "dog", "sea lion"]
found["stock scores"] = stock(image, candidate_labels=labels, hypothesis_template="a photo of a {}.")
if not PEFT_IS_MISSING:
    from orion_hf import OrionCLIPTextModel, OrionZeroShotImageClassificationPipeline
    ours = OrionCLIPTextModel.from_pretrained(REPO, **where)
    found["ours"] = embed(ours)
    found["classes"] = ours.class_names
    found["merged"] = embed(OrionCLIPTextModel.from_pretrained(REPO, revision="merged", **where))
    classify = OrionZeroShotImageClassificationPipeline(REPO, **where)
    found["our scores"] = classify(image)
"""
SNIPPETS = """
import contextlib, io
for snippet in SNIPPETS:
    scope = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(snippet, scope)
    if "base" in scope:
        found["peft"] = embed(scope["model"].base_model.model)
elsewhere = tempfile.mkdtemp()
OrionCLIPTextModel.from_pretrained(REPO, cache_dir=elsewhere)
again = OrionCLIPTextModel.from_pretrained(REPO, cache_dir=elsewhere, local_files_only=True)
found["cache_dir"] = embed(again)
"""
END = "print(json.dumps(found))"


def pull(code: str, env: dict[str, str], **values: object) -> dict:
    for name, value in values.items():
        code = re.sub(rf"\b{name}\b", lambda _, value=value: repr(value), code)
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert SENTINEL not in done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_pull_an_adapter_with_stock_tools_and_ours_then_offline(hub, client, work):
    """A private adapter whose base has moved on since: ours and PEFT load the pinned base, stock tools the newest."""
    wanted = client.run(
        "push_folder(work / 'old', 'org/pulled', private=True, merged=True)\n"
        "model = OrionCLIPTextModel.from_pretrained(work / 'old')\n"
        "result = [round(x, 4) for x in model.encode(['a photo of a cat.'])[0].tolist()]"
    ).result
    pinned = hub.commits("org/base")[-2].oid
    snippets = re.findall(r"```python\n(.*?)```", hub.files("org/pulled")["README.md"].decode(), re.DOTALL)
    assert len(snippets) == 3

    env = hub.env(token=SENTINEL)
    code = {"REPO": "org/pulled", "WHERE": {}, "PEFT_IS_MISSING": False, "SNIPPETS": snippets}
    online = pull(PULL + SNIPPETS + END, env, **code)
    assert online["processor"] == "CLIPProcessor" and online["classes"] == ["cat", "dog", "sea lion"]
    for name in ("text", "auto", "pipeline", "ours", "merged", "peft", "cache_dir"):
        assert online[name] == pytest.approx(wanted, abs=2e-4), name
    scores = {entry["label"]: entry["score"] for entry in online["stock scores"]}
    assert {e["label"]: e["score"] for e in online["our scores"]} == pytest.approx(scores, abs=1e-4)
    assert not [r for r in hub.requests if r.path.startswith(("/cdn/", "/lfs/")) and r.authorization]

    seen = len(hub.requests)
    offline = pull(PULL + END, env | {"HF_HUB_OFFLINE": "1"}, **code)
    assert len(hub.requests) == seen
    assert {name: value for name, value in online.items() if name not in ("peft", "cache_dir")} == offline

    # The base moves: what was pinned stays pinned, the revision "merged" is exact for tools that do not pin.
    hub.add_repo("org/base", work / "base2")
    moved = client.run(
        "from transformers import CLIPTextModelWithProjection\n"
        "def embed(model): return [round(x, 4) for x in OrionCLIPTextModel.encode(model, ids)[0].tolist()]\n"
        "ids = model.tokenizer(['a photo of a cat.'])['input_ids']\n"
        "ours = OrionCLIPTextModel.from_pretrained('org/pulled', cache_dir=work / 'moved')\n"
        "stock = CLIPTextModelWithProjection.from_pretrained('org/pulled', cache_dir=work / 'moved')\n"
        "result = [embed(ours), embed(stock), ours._base.commit]"
    )
    assert moved.result is not None, moved.output
    assert moved.result[0] == pytest.approx(wanted, abs=2e-4) and moved.result[2] == pinned
    assert moved.result[1] != pytest.approx(wanted, abs=1e-2), "stock loaders pin nothing: the card says so"
    warned = client.push("new", "org/pulled")
    assert "has changed since revision" in warned.output
    without_peft = {**code, "WHERE": {"revision": "merged"}, "PEFT_IS_MISSING": True}
    merged = pull(PULL + END, env, **without_peft)
    for name in ("text", "auto", "pipeline"):
        assert merged[name] == pytest.approx(wanted, abs=2e-4), name
